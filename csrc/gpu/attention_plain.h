// Attention without tensor cores: every KV dtype, head size and GPU. One block has 8 rows of one KV head.
//
// Scores: a thread a key (its 16-byte pieces lie block_size apart, those of neighbours beside each other). Values: a
// thread a dimension (its pieces hold neighbouring keys). So both sides read whole 16-byte pieces and no partial sum
// crosses threads but the softmax's.
#pragma once
#include "attention.h"

constexpr int PLAIN_ROWS = 8;

template <typename C> constexpr bool scaled_by_token = __is_same(C, int8_t);

// Shared floats: queries [8][head_size], scores [8][TILE], and for each row a factor, a maximum and a sum.
inline int plain_shared_bytes(int head_size) { return 4 * (PLAIN_ROWS * (head_size + TILE) + 3 * PLAIN_ROWS); }
inline int plain_threads(int head_size) { return head_size <= 64 ? 64 : (head_size + 31) / 32 * 32; }

template <typename C>
DEVICE void plain_scores(const octg_attention& a, const Place& p, const int32_t* table, int shift, int tile, float scale,
                         const float* q, float* scores) {
  constexpr int X = 16 / sizeof(C);
  for (int k = threadIdx.x; k < TILE; k += blockDim.x) {
    const int key = tile + k;
    float dot[PLAIN_ROWS] = {};
    const bool in_range = key >= p.low && key < p.high;
    if (in_range) {
      const int64_t block = table[key >> shift];
      const int offset = key & (a.block_size - 1);
      const C* at = static_cast<const C*>(a.key) + (block * a.kv_heads + p.kv_head) * a.head_size * a.block_size + offset * X;
      for (int chunk = 0; chunk < a.head_size / X; chunk++) {
        float x[X];
        unpack<C>(load16(at + int64_t(chunk) * a.block_size * X), x);
#pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++)
#pragma unroll
          for (int i = 0; i < X; i++) dot[r] = fmaf(x[i], q[r * a.head_size + chunk * X + i], dot[r]);
      }
      if (scaled_by_token<C>) {
        const float token_scale = a.k_scale[(block * a.block_size + offset) * a.kv_heads + p.kv_head];
#pragma unroll
        for (int r = 0; r < PLAIN_ROWS; r++) dot[r] *= token_scale;
      }
    }
#pragma unroll
    for (int r = 0; r < PLAIN_ROWS; r++)
      scores[r * TILE + k] = in_range && visible(a, p, r, key) ? score(a, dot[r], scale) : NEG_INF;
  }
}

// Turns one row's scores into weights; all 32 lanes of the group keep the row's state.
template <typename C>
DEVICE void plain_softmax(const octg_attention& a, const Place& p, const int32_t* table, int shift, int tile,
                          float* scores, State& state, float* factor) {
  const int lane = threadIdx.x % 32;
  float x[TILE / 32], top = NEG_INF, sum = 0;
#pragma unroll
  for (int i = 0; i < TILE / 32; i++) top = fmaxf(top, x[i] = scores[lane + 32 * i]);
  top = fmaxf(state.max, max32(top));
#pragma unroll
  for (int i = 0; i < TILE / 32; i++) {
    x[i] = top == NEG_INF ? 0.0f : exp2_fast(x[i] - top);
    sum += x[i];
    const int key = tile + lane + 32 * i;
    if (scaled_by_token<C> && x[i] > 0)
      x[i] *= a.v_scale[(int64_t(table[key >> shift]) * a.block_size + (key & (a.block_size - 1))) * a.kv_heads + p.kv_head];
    scores[lane + 32 * i] = x[i];
  }
  sum = sum32(sum);
  const float f = state.max == NEG_INF ? 0.0f : exp2_fast(state.max - top);
  state = State{top, fmaf(state.sum, f, sum)};
  if (lane == 0) *factor = f;
}

template <typename C>
DEVICE void plain_values(const octg_attention& a, const Place& p, const int32_t* table, int shift, int tile, int d,
                         const float* scores, float (&sum)[PLAIN_ROWS]) {
  constexpr int X = 16 / sizeof(C);
  const int end = min(tile + TILE, p.high);
  for (int key = max(tile, p.low / X * X); key < end; key += X) {
    const int64_t block = table[key >> shift];
    const C* at = static_cast<const C*>(a.value) +
                  ((block * a.kv_heads + p.kv_head) * a.head_size + d) * a.block_size + (key & (a.block_size - 1));
    float x[X];
    unpack<C>(load16(at), x);
#pragma unroll
    for (int i = 0; i < X; i++) {
      // What lies outside of the sequence may be NaN, which a weight of zero does not undo.
      const float value = key + i >= p.low && key + i < p.high ? x[i] : 0.0f;
#pragma unroll
      for (int r = 0; r < PLAIN_ROWS; r++) sum[r] = fmaf(scores[r * TILE + key + i - tile], value, sum[r]);
    }
  }
}

template <typename T, typename C>
__global__ void __launch_bounds__(256) attention_plain(octg_attention a, int split, int parts) {
  Place p;
  if (!find_place(a, PLAIN_ROWS, split, parts, p)) return;
  SHARED_MEMORY(float, q);
  float* scores = q + PLAIN_ROWS * a.head_size;
  float* factors = scores + PLAIN_ROWS * TILE;
  float* maxima = factors + PLAIN_ROWS;
  float* sums = maxima + PLAIN_ROWS;
  const int tid = threadIdx.x, groups = blockDim.x / 32, shift = log2_of(a.block_size);
  const int32_t* table = a.tables + int64_t(p.seq) * a.max_blocks;
  const bool one_scale = sizeof(C) == 1 && !scaled_by_token<C>;
  const float scale = one_scale ? a.scale * *a.k_scale : a.scale, v_scale = one_scale ? *a.v_scale : 1.0f;
  for (int i = tid; i < PLAIN_ROWS * a.head_size; i += blockDim.x) {
    const int row = i / a.head_size;
    q[i] = row < p.rows ? to_float(static_cast<const T*>(a.q)[query_offset(a, p, row) + i % a.head_size]) : 0.0f;
  }
  BARRIER(1);

  State total[PLAIN_ROWS];
  float result[PLAIN_ROWS] = {};
#pragma unroll
  for (int r = 0; r < PLAIN_ROWS; r++) total[r] = State{NEG_INF, 0};
  for (int part = p.first_part; part < p.end_part; part++) {
    State state[PLAIN_ROWS / 2];  // of the rows of this group of lanes: at least two groups share the rows
    for (auto& s : state) s = State{NEG_INF, 0};
    float sum[PLAIN_ROWS] = {};
    for (int tile = part * OCTG_PART; tile < min((part + 1) * OCTG_PART, p.high); tile += TILE) {
      if (tile + TILE <= p.low) continue;
      plain_scores<C>(a, p, table, shift, tile, scale, q, scores);
      BARRIER(2);
#pragma unroll
      for (int i = 0; i < PLAIN_ROWS / 2; i++)
        if (tid / 32 + i * groups < PLAIN_ROWS) {
          const int r = tid / 32 + i * groups;
          plain_softmax<C>(a, p, table, shift, tile, scores + r * TILE, state[i], factors + r);
        }
      BARRIER(3);
#pragma unroll
      for (int r = 0; r < PLAIN_ROWS; r++) sum[r] *= factors[r];
      if (tid < a.head_size) plain_values<C>(a, p, table, shift, tile, tid, scores, sum);
      BARRIER(4);
    }
#pragma unroll
    for (int i = 0; i < PLAIN_ROWS / 2; i++)
      if (tid / 32 + i * groups < PLAIN_ROWS && tid % 32 == 0) {
        maxima[tid / 32 + i * groups] = state[i].max;
        sums[tid / 32 + i * groups] = state[i].sum;
      }
    BARRIER(5);
    if (tid < a.head_size)
#pragma unroll
      for (int r = 0; r < PLAIN_ROWS; r++) {
        const State s{maxima[r], sums[r]};
        const float x = sum[r] * v_scale;
        if (split && r < p.rows) store_part(a, parts, query_offset(a, p, r), part, tid, x, s);
        const Factors f = merge(total[r], s);
        result[r] = merged(result[r], x, f);
      }
  }
  if (!split && tid < a.head_size)
#pragma unroll  // an index that the compiler doesn't know would put the arrays into memory
    for (int r = 0; r < PLAIN_ROWS; r++)
      if (r < p.rows) static_cast<T*>(a.out)[query_offset(a, p, r) + tid] = from_float<T>(result[r] / total[r].sum);
}
