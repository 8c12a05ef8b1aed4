// Writing new keys and values into the pool (rotated on the way, if asked), and moving blocks.
#pragma once
#include "kernels.h"
#include "platform.h"

// Largest magnitude over the block's threads; `shared` has a float for every 32 threads.
DEVICE float block_max(float x, float* shared) {
  x = max32(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  BARRIER(1);
  for (unsigned i = 0; i < blockDim.x / 32; i++) x = fmaxf(x, shared[i]);
  return x;
}

// Element d of a head after rotary embedding by the cosines and sines of its position. Rotated values are rounded to T
// before they are encoded: the cache holds what attention over T would have seen.
template <typename T> DEVICE float rotated(const octg_cache_write& w, const T* head, int row, int d) {
  const float x = to_float(head[d]);
  if (d >= w.rotary_dim) return x;
  const int half = w.rotary_dim / 2;
  const int pair = w.interleaved ? d / 2 : d % half;
  const bool second = w.interleaved ? d % 2 : d >= half;
  const int other = w.interleaved ? d ^ 1 : (second ? d - half : d + half);
  const float* turn = w.cos_sin + int64_t(w.positions[row]) * w.rotary_dim;
  const float y = to_float(head[other]), cosine = turn[pair], sine = turn[half + pair];
  return to_float(from_float<T>(second ? x * cosine + y * sine : x * cosine - y * sine));
}

// Grid (rows, query heads to rotate + KV heads), a thread a dimension. Shared: a float for every 32 threads, twice.
template <typename T, typename C> __global__ void cache_write(octg_cache_write w) {
  SHARED_MEMORY(float, shared);
  constexpr int X = 16 / sizeof(C);
  const int row = blockIdx.x, d = threadIdx.x, queries = w.q ? w.heads : 0;
  const bool in_head = d < w.head_size;
  if (int(blockIdx.y) < queries) {
    T* head = static_cast<T*>(w.q) + row * w.q_stride + int64_t(blockIdx.y) * w.head_size;
    const float x = in_head ? rotated<T>(w, head, row, d) : 0.0f;
    BARRIER(2);  // pairs read each other: all have read before one writes
    if (in_head) head[d] = from_float<T>(x);
    return;
  }
  const int64_t slot = w.slot_mapping[row];
  if (slot < 0) return;
  const int kv_head = blockIdx.y - queries;
  const int64_t at = row * w.kv_stride + int64_t(kv_head) * w.head_size;
  float k = in_head ? rotated<T>(w, static_cast<const T*>(w.k) + at, row, d) : 0.0f;
  float v = in_head ? to_float(static_cast<const T*>(w.v)[at + d]) : 0.0f;
  if (__is_same(C, int8_t)) {
    const float k_scale = block_max(fabsf(k), shared) / 127.0f;
    const float v_scale = block_max(fabsf(v), shared + blockDim.x / 32) / 127.0f;
    if (d == 0) {
      w.k_scale[slot * w.kv_heads + kv_head] = k_scale;
      w.v_scale[slot * w.kv_heads + kv_head] = v_scale;
    }
    k /= k_scale;  // 0 / 0 is stored as 0
    v /= v_scale;
  } else if (sizeof(C) == 1) {
    k /= *w.k_scale;
    v /= *w.v_scale;
  }
  if (!in_head) return;
  const int64_t block = slot / w.block_size, offset = slot % w.block_size;
  const int64_t head = (block * w.kv_heads + kv_head) * w.head_size * w.block_size;
  static_cast<C*>(w.key)[head + (d / X * w.block_size + offset) * X + d % X] = from_float<C>(k);
  static_cast<C*>(w.value)[head + int64_t(d) * w.block_size + offset] = from_float<C>(v);
}

// Grid (pairs, keys and values).
template <typename Word>
__global__ void copy_blocks(char* storage, const int64_t* pairs, int64_t num_blocks, int64_t block_bytes) {
  char* side = storage + int64_t(blockIdx.y) * num_blocks * block_bytes;
  const Word* from = reinterpret_cast<const Word*>(side + pairs[2 * blockIdx.x] * block_bytes);
  Word* to = reinterpret_cast<Word*>(side + pairs[2 * blockIdx.x + 1] * block_bytes);
  for (int64_t i = threadIdx.x; i < block_bytes / int64_t(sizeof(Word)); i += blockDim.x) to[i] = from[i];
}
