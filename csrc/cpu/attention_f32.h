// Tile products in f32 for every instruction set and KV dtype: tiles are unpacked to f32 (f32 tiles are used in place).
//
// Each accumulator is one chain over d (scores) or over the keys in order (values), so the number of rows that are
// computed together changes no bit.
#pragma once
#include "attention_math.h"

namespace octavo {
namespace OCT_ISA {

// One tile of 16 tokens in storage form, wherever its bytes are.
struct RawTile { const uint8_t *k, *v; const float *k_scale, *v_scale; };

// Per-thread memory of a task.
struct AttentionScratch {
  void* query;            // [kUnitRows][dims] in the kernel's type
  float* query_scale;     // [kUnitRows]
  float* scores;          // [kUnitRows][64]
  void* weights;          // [kUnitRows][64] in the kernel's type
  float* factor;          // [kUnitRows]
  float *part, *total;    // [kUnitRows][dims]
  SoftmaxState *part_state, *total_state;  // [kUnitRows]
  float* v_scale;         // [64]
  uint8_t *k_tiles, *v_tiles;  // [4][dims * 16 * 4 bytes] unpacked operands
  uint8_t* raw;           // [4] tiles gathered from flat blocks, or partly filled
};

template <int kRows, int kTiles>
static void scores_f32(const float* q, const float* const* k, int dims, float* scores) {
  constexpr int kVectors = kTile / kLanes;
  vf acc[kRows][kTiles][kVectors] = {};
  for (int d = 0; d < dims; d++) {
    vf key[kTiles][kVectors];
    OCT_UNROLL for (int t = 0; t < kTiles; t++)
      OCT_UNROLL for (int v = 0; v < kVectors; v++) key[t][v] = load(k[t] + d * kTile + v * kLanes);
    OCT_UNROLL for (int r = 0; r < kRows; r++) {
      vf query = splat(q[r * dims + d]);
      OCT_UNROLL for (int t = 0; t < kTiles; t++)
        OCT_UNROLL for (int v = 0; v < kVectors; v++) acc[r][t][v] = fma(key[t][v], query, acc[r][t][v]);
    }
  }
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int t = 0; t < kTiles; t++)
      OCT_UNROLL for (int v = 0; v < kVectors; v++)
        store(scores + r * kGroupKeys + t * kTile + v * kLanes, acc[r][t][v]);
}

// out = out * factor + weights . V for dims d ... d + kVectors * kLanes.
template <int kRows, int kVectors>
static void values_f32(const float* weights, const float* const* v, int tiles, int dims, int d, const float* factor,
                       float* out) {
  vf acc[kRows][kVectors];
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int i = 0; i < kVectors; i++)
      acc[r][i] = load(out + r * dims + d + i * kLanes) * splat(factor[r]);
  for (int t = 0; t < tiles; t++)
    for (int token = 0; token < kTile; token++) {
      vf value[kVectors];
      OCT_UNROLL for (int i = 0; i < kVectors; i++) value[i] = load(v[t] + token * dims + d + i * kLanes);
      OCT_UNROLL for (int r = 0; r < kRows; r++) {
        vf weight = splat(weights[r * kGroupKeys + t * kTile + token]);
        OCT_UNROLL for (int i = 0; i < kVectors; i++) acc[r][i] = fma(value[i], weight, acc[r][i]);
      }
    }
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int i = 0; i < kVectors; i++) store(out + r * dims + d + i * kLanes, acc[r][i]);
}

template <int kDtype> struct F32Kernel {
  typedef float Weight;
  // Tile shape by registers: 32 of 16 lanes, 16 of 8, 16 (SSE) or 32 (NEON) of 4.
  static constexpr int kTiles = kLanes == 16 ? 4 : 1;
  static constexpr int kRows = kLanes == 4 ? 2 : 4;
  static constexpr int kVectors = kLanes == 16 ? 4 : 2;
  static constexpr bool kScalesValues = false;  // v_scale is applied when a tile is unpacked

  static void load_query(const StepContext& ctx, const void* q, int size, int dims, int row, AttentionScratch& s) {
    float* out = (float*)s.query + row * dims;
    for (int i = 0; i < size; i++) out[i] = ctx.bf16_compute() ? bf16_to_float(((const bf16*)q)[i]) : ((const float*)q)[i];
    for (int i = size; i < dims; i++) out[i] = 0;
  }

  static const float* k_tile(int t, int dims, const RawTile& raw, const AttentionScratch& s) {
    return kDtype == OCT_F32 ? (const float*)raw.k : (const float*)s.k_tiles + t * kTile * dims;
  }
  static const float* v_tile(int t, int dims, const RawTile& raw, const AttentionScratch& s) {
    return kDtype == OCT_F32 ? (const float*)raw.v : (const float*)s.v_tiles + t * kTile * dims;
  }

  static void unpack(int t, int dims, const RawTile& raw, AttentionScratch& s) {
    if (kDtype == OCT_F32) return;
    constexpr int kGroup = kDtype == OCT_I8 ? 4 : 2;
    float *k = (float*)s.k_tiles + t * kTile * dims, *v = (float*)s.v_tiles + t * kTile * dims;
    unpack_f32<kDtype>(raw.k, dims / kGroup, kTile, k);
    unpack_f32<kDtype>(raw.v, kTile / kGroup, dims, v);
    if (kDtype != OCT_I8) return;
    for (int d = 0; d < dims; d++)
      OCT_UNROLL for (int i = 0; i < kTile; i += kLanes)
        store(k + d * kTile + i, load(k + d * kTile + i) * load(raw.k_scale + i));
    for (int token = 0; token < kTile; token++)
      for (int d = 0; d < dims; d += kLanes)
        store(v + token * dims + d, load(v + token * dims + d) * splat(raw.v_scale[token]));
  }

  static void scores(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
    for (int t = 0; t < tiles; t++) unpack(t, dims, raw[t], s);
    for (int t = 0; t < tiles; t += kTiles) {
      const float* k[kTiles];
      for (int i = 0; i < kTiles; i++) k[i] = k_tile(t + i < tiles ? t + i : t, dims, raw[t + i < tiles ? t + i : t], s);
      const float* q = (const float*)s.query;
      float* out = s.scores + t * kTile;
      int r = 0;
      for (; r + kRows <= rows; r += kRows) scores_f32<kRows, kTiles>(q + r * dims, k, dims, out + r * kGroupKeys);
      for (; r < rows; r++) scores_f32<1, kTiles>(q + r * dims, k, dims, out + r * kGroupKeys);
    }
  }

  template <int kN> static void values_at(const float* const* v, int tiles, int rows, int dims, int d,
                                          AttentionScratch& s) {
    const float* w = (const float*)s.weights;
    int r = 0;
    for (; r + kRows <= rows; r += kRows)
      values_f32<kRows, kN>(w + r * kGroupKeys, v, tiles, dims, d, s.factor + r, s.part + r * dims);
    for (; r < rows; r++) values_f32<1, kN>(w + r * kGroupKeys, v, tiles, dims, d, s.factor + r, s.part + r * dims);
  }
  static void values(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
    const float* v[kGroupTiles];
    for (int t = 0; t < tiles; t++) v[t] = v_tile(t, dims, raw[t], s);
    int d = 0;
    for (; d + kVectors * kLanes <= dims; d += kVectors * kLanes) values_at<kVectors>(v, tiles, rows, dims, d, s);
    for (; d < dims; d += kLanes) values_at<1>(v, tiles, rows, dims, d, s);
  }
};

}  // namespace OCT_ISA
}  // namespace octavo
