// Attention on tensor cores, 16-bit keys and values. No shared memory until a part is done.
//
// A warp has 32 keys at a time: S^T = K Q^T and O^T = V^T P^T, so keys (then dimensions) fill the 16 rows of a product
// and query rows its 8 columns. The order in which a product adds and the order of its rows are free, so every lane
// feeds the whole 16-byte piece that it loaded:
//   K: piece 4 j + c of a key row serves two products over 16 dimensions; Q is loaded alike.
//   V: piece c holds keys 8 c .. 8 c + 7 of one dimension and serves two products over 16 keys: of these, product h
//      takes keys 8 c + 4 h + {0, 1} and {2, 3}. The rows of S are permuted to match, so the transpose of P is one
//      movmatrix each.
// (lane = 4 g + c throughout, as in the fragments of mma.m16n8k16.)
#pragma once
#include "attention.h"

#if defined(OCT_TENSOR_CORES)
constexpr int TENSOR_THREADS = 128;

// Shared floats: weighted sums of 4 warps [4][8][D], of the parts so far [8 NT][D], states of warps and parts.
constexpr int tensor_shared_bytes(int head_size, int nt) {
  return 4 * (32 * head_size + 8 * nt * head_size + 2 * 32 + 2 * 8 * nt);
}

// Keys of one step of a warp, as the lane sees them.
struct Step {
  int base;           // first of 32 keys
  const char* key;    // of the lane's 8 keys 8 (g / 2) ..., piece c
  const char* value;  // of dimension g, keys 8 c ...
};

template <int D> DEVICE Step find_step(const octg_attention& a, const Place& p, const int32_t* table, int shift, int base) {
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  Step s{base, nullptr, nullptr};
  // Keys outside of [low, high) are masked; what is read in their place must only be memory that is there.
  const int k = min(max(base + 8 * (g >> 1), p.low & ~7), (p.high - 1) & ~7);
  const int v = min(max(base + 8 * c, p.low & ~7), (p.high - 1) & ~7);
  const int64_t block = int64_t(a.block_size) * D;
  s.key = static_cast<const char*>(a.key) + 2 * ((int64_t(table[k >> shift]) * a.kv_heads + p.kv_head) * block +
                                                 8 * (int64_t(c) * a.block_size + (k & (a.block_size - 1))));
  s.value = static_cast<const char*>(a.value) + 2 * ((int64_t(table[v >> shift]) * a.kv_heads + p.kv_head) * block +
                                                     int64_t(g) * a.block_size + (v & (a.block_size - 1)));
  return s;
}

// The row of the 32 keys that register i of product h holds.
DEVICE int key_of(int h, int i) {
  const int g = threadIdx.x % 32 >> 2;
  return 8 * (g >> 1) + 4 * h + (g & 1) + 2 * (i >> 1);
}

template <typename T, int D, int NT>
DEVICE void tensor_scores(const octg_attention& a, const Step& s, const uint32_t (&q)[NT][D / 32][4],
                          Accumulator (&scores)[NT][2]) {
  const int g = threadIdx.x % 32 >> 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const char* row = s.key + 16 * (4 * h + (g & 1));
#pragma unroll
    for (int nt = 0; nt < NT; nt++) scores[nt][h] = Accumulator{};
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const Vec16 k0 = load16(row + int64_t(64) * j * a.block_size), k1 = load16(row + int64_t(64) * j * a.block_size + 32);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        mma<T>(scores[nt][h], k0.word[0], k1.word[0], k0.word[1], k1.word[1], q[nt][j][0], q[nt][j][1]);
        mma<T>(scores[nt][h], k0.word[2], k1.word[2], k0.word[3], k1.word[3], q[nt][j][2], q[nt][j][3]);
      }
    }
  }
}

// Masks, softmax with the lane's two query rows, and P as the second operand of the next product.
template <typename T>
DEVICE void tensor_softmax(const octg_attention& a, const Place& p, int base, int first_row, Accumulator (&s)[2],
                           State (&state)[2], float (&factor)[2], uint32_t (&weights)[2][2]) {
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    float top = NEG_INF;
    const int row = first_row + 2 * (threadIdx.x & 3) + odd;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = odd; i < 4; i += 2) {
        const int key = base + key_of(h, i);
        const bool seen = key >= p.low && key < p.high && visible(a, p, row, key);
        top = fmaxf(top, s[h].c[i] = seen ? score(a, s[h].c[i], a.scale) : NEG_INF);
      }
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) top = fmaxf(top, shuffle_xor(top, i));
    top = fmaxf(top, state[odd].max);
    float sum = 0;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = odd; i < 4; i += 2) sum += s[h].c[i] = top == NEG_INF ? 0.0f : exp2_fast(s[h].c[i] - top);
    factor[odd] = state[odd].max == NEG_INF ? 0.0f : exp2_fast(state[odd].max - top);
    state[odd] = State{top, fmaf(state[odd].sum, factor[odd], sum)};
  }
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < 2; i++) weights[h][i] = transpose8x8(pack2<T>(s[h].c[2 * i], s[h].c[2 * i + 1]));
}

// Keys outside of the sequence may hold NaN, which a weight of zero does not undo: 16-bit zeros in their place.
DEVICE Vec16 keep_keys(Vec16 v, int first, int low, int high) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (first + i < low || first + i >= high) v.word[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
  return v;
}

template <typename T, int D, int NT>
DEVICE void tensor_values(const octg_attention& a, const Place& p, const Step& s, const float (&factor)[NT][2],
                          const uint32_t (&weights)[NT][2][2], Accumulator (&out)[NT][D / 16]) {
  const int first = s.base + 8 * (threadIdx.x & 3);
  const bool edge = s.base < p.low || s.base + 32 > p.high;
#pragma unroll
  for (int m = 0; m < D / 16; m++) {
    const char* at = s.value + int64_t(32) * m * a.block_size;
    Vec16 v0 = load16(at), v1 = load16(at + 16 * a.block_size);
    if (edge) v0 = keep_keys(v0, first, p.low, p.high), v1 = keep_keys(v1, first, p.low, p.high);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int i = 0; i < 4; i++) out[nt][m].c[i] *= factor[nt][i & 1];
      mma<T>(out[nt][m], v0.word[0], v1.word[0], v0.word[1], v1.word[1], weights[nt][0][0], weights[nt][0][1]);
      mma<T>(out[nt][m], v0.word[2], v1.word[2], v0.word[3], v1.word[3], weights[nt][1][0], weights[nt][1][1]);
    }
  }
}

// Blocks of an SM that must fit: without a number the compiler aims for more and spills.
constexpr int tensor_blocks(int head_size, int nt) { return head_size * nt >= 192 ? 2 : 3; }

template <typename T, int D, int NT>
__global__ void __launch_bounds__(TENSOR_THREADS, tensor_blocks(D, NT)) attention_tensor(octg_attention a, int split, int parts) {
  Place p;
  if (!find_place(a, 8 * NT, split, parts, p)) return;
  SHARED_MEMORY(float, warp_sums);             // [4][8][D]
  float* total_sums = warp_sums + 32 * D;      // [8 NT][D], each element belongs to one thread
  float* warp_states = total_sums + 8 * NT * D;  // [4][8] maximum, sum
  float* total_states = warp_states + 2 * 32;  // [8 NT] maximum, sum
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane >> 2, c = lane & 3;
  const int shift = log2_of(a.block_size);
  const int32_t* table = a.tables + int64_t(p.seq) * a.max_blocks;

  uint32_t q[NT][D / 32][4];
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const int row = 8 * nt + g;
      Vec16 v{};
      if (row < p.rows) v = load16(static_cast<const T*>(a.q) + query_offset(a, p, row) + 8 * (4 * j + c));
#pragma unroll
      for (int i = 0; i < 4; i++) q[nt][j][i] = v.word[i];
    }
  for (int i = tid; i < 8 * NT * D; i += TENSOR_THREADS) total_sums[i] = 0;
  if (tid < 8 * NT) total_states[2 * tid] = NEG_INF, total_states[2 * tid + 1] = 0;

  for (int part = p.first_part; part < p.end_part; part++) {
    State state[NT][2];
    Accumulator out[NT][D / 16];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      state[nt][0] = state[nt][1] = State{NEG_INF, 0};
#pragma unroll
      for (int m = 0; m < D / 16; m++) out[nt][m] = Accumulator{};
    }
    for (int base = part * OCTG_PART + 32 * warp; base < min((part + 1) * OCTG_PART, p.high); base += TILE) {
      if (base + 32 <= p.low) continue;
      const Step step = find_step<D>(a, p, table, shift, base);
      Accumulator scores[NT][2];
      float factor[NT][2];
      uint32_t weights[NT][2][2];
      tensor_scores<T, D, NT>(a, step, q, scores);
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
        tensor_softmax<T>(a, p, base, 8 * nt, scores[nt], state[nt], factor[nt], weights[nt]);
      tensor_values<T, D, NT>(a, p, step, factor, weights, out);
    }

#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int row = 2 * c + odd;
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) state[nt][odd].sum += shuffle_xor(state[nt][odd].sum, i);
        if (g == 0) {
          warp_states[2 * (8 * warp + row)] = state[nt][odd].max;
          warp_states[2 * (8 * warp + row) + 1] = state[nt][odd].sum;
        }
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            warp_sums[(8 * warp + row) * D + 16 * m + 8 * i + g] = out[nt][m].c[2 * i + odd];
      }
      BARRIER(1);
      for (int i = tid; i < 8 * D; i += TENSOR_THREADS) {
        const int row = i / D, d = i % D;
        State whole{NEG_INF, 0};
        float x = 0;
        for (int w = 0; w < 4; w++) {  // warps in order: the sum of a part doesn't depend on who is first
          const float* s = warp_states + 2 * (8 * w + row);
          x = merged(x, warp_sums[(8 * w + row) * D + d], merge(whole, State{s[0], s[1]}));
        }
        if (split && 8 * nt + row < p.rows) store_part(a, parts, query_offset(a, p, 8 * nt + row), part, d, x, whole);
        State total{total_states[2 * (8 * nt + row)], total_states[2 * (8 * nt + row) + 1]};
        const Factors f = merge(total, whole);
        float& sum = total_sums[(8 * nt + row) * D + d];
        sum = merged(sum, x, f);
        if (!split && part + 1 == p.end_part && 8 * nt + row < p.rows)
          static_cast<T*>(a.out)[query_offset(a, p, 8 * nt + row) + d] = from_float<T>(sum / total.sum);
      }
      State mine{NEG_INF, 0};
      if (tid < 8) {
        State whole{NEG_INF, 0};
        for (int w = 0; w < 4; w++) {
          const float* s = warp_states + 2 * (8 * w + tid);
          merge(whole, State{s[0], s[1]});
        }
        mine = State{total_states[2 * (8 * nt + tid)], total_states[2 * (8 * nt + tid) + 1]};
        merge(mine, whole);
      }
      BARRIER(2);
      if (tid < 8) total_states[2 * (8 * nt + tid)] = mine.max, total_states[2 * (8 * nt + tid) + 1] = mine.sum;
    }
  }
}
#endif
