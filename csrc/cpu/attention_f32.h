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

// The tiles of the next group, brought nearer a few lines at a time between the products: all at once would block the
// loads that the products wait for.
struct TilesAhead {
  const uint8_t* tile[kGroupTiles];
  int64_t at, end;  // bytes of each
};
OCT_INLINE void fetch_ahead(TilesAhead& ahead, int lines) {
  for (; lines && ahead.at < ahead.end; lines--, ahead.at += 64)
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) __builtin_prefetch(ahead.tile[t] + ahead.at, 0, 2);
}

// Per-thread memory of a task.
struct AttentionScratch {
  TilesAhead ahead;
  void* query;            // [kUnitRows][dims] in the kernel's type
  float* query_scale;     // [kUnitRows], for int8 queries
  float* scores;          // [kUnitRows][64]
  void* weights;          // [kUnitRows][64] in the kernel's type
  float* factor;          // [kUnitRows]
  int *low, *high;        // [kUnitRows], first and last key that a row sees
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

// How tiles are multiplied: chosen by instruction set, compute type and KV dtype (attention.h).
struct TileKernel {
  // Takes a query of `size` values in the compute type into row `row` of the scratch, zeros up to dims.
  void (*load_query)(const void* q, bool bf16_compute, int size, int dims, int row, AttentionScratch& s);
  // s.scores = s.query . K, raw; s.part = s.part * s.factor + s.weights . V. Up to four tiles.
  void (*scores)(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s);
  void (*values)(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s);
  bool bf16_weights;   // weights as bf16, else f32
  float v_scale_unit;  // not 0: the weights take the values' scales, times this
  void (*begin)(int rows) = nullptr;  // before the first call for a unit
};

// Tile shape by registers: 32 of 16 lanes, 16 of 8, 16 (SSE) or 32 (NEON) of 4.
constexpr int kF32Tiles = kLanes == 16 ? 4 : 1;
constexpr int kF32Rows = kLanes == 4 ? 2 : 4;
constexpr int kF32Vectors = kLanes == 16 ? 4 : 2;

static void load_query_f32(const void* q, bool bf16_compute, int size, int dims, int row, AttentionScratch& s) {
  float* out = (float*)s.query + row * dims;
  for (int i = 0; i < size; i++) out[i] = bf16_compute ? bf16_to_float(((const bf16*)q)[i]) : ((const float*)q)[i];
  for (int i = size; i < dims; i++) out[i] = 0;
}

static __attribute__((noinline)) void scores_f32_tiles(const float* const* k, int tiles, int rows, int dims,
                                                       AttentionScratch& s) {
  for (int t = 0; t < tiles; t += kF32Tiles) {
    const float* tile[kF32Tiles];
    for (int i = 0; i < kF32Tiles; i++) tile[i] = k[t + i < tiles ? t + i : t];  // what a missing one gives is masked
    const float* q = (const float*)s.query;
    float* out = s.scores + t * kTile;
    int r = 0;
    for (; r + kF32Rows <= rows; r += kF32Rows)
      scores_f32<kF32Rows, kF32Tiles>(q + r * dims, tile, dims, out + r * kGroupKeys);
    for (; r < rows; r++) scores_f32<1, kF32Tiles>(q + r * dims, tile, dims, out + r * kGroupKeys);
  }
}

template <int kVectors>
static void values_f32_dims(const float* const* v, int tiles, int rows, int dims, int d, AttentionScratch& s) {
  const float* w = (const float*)s.weights;
  int r = 0;
  for (; r + kF32Rows <= rows; r += kF32Rows)
    values_f32<kF32Rows, kVectors>(w + r * kGroupKeys, v, tiles, dims, d, s.factor + r, s.part + r * dims);
  for (; r < rows; r++)
    values_f32<1, kVectors>(w + r * kGroupKeys, v, tiles, dims, d, s.factor + r, s.part + r * dims);
}
static __attribute__((noinline)) void values_f32_tiles(const float* const* v, int tiles, int rows, int dims,
                                                       AttentionScratch& s) {
  int d = 0;
  for (; d + kF32Vectors * kLanes <= dims; d += kF32Vectors * kLanes)
    values_f32_dims<kF32Vectors>(v, tiles, rows, dims, d, s);
  for (; d < dims; d += kLanes) values_f32_dims<1>(v, tiles, rows, dims, d, s);
}

template <int kDtype>
static void scores_f32_of(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
  constexpr int kGroup = kDtype == OCT_I8 ? 4 : 2;
  const float* k[kGroupTiles];
  for (int t = 0; t < tiles; t++) {
    if (kDtype == OCT_F32) {
      k[t] = (const float*)raw[t].k;
      continue;
    }
    float* out = (float*)s.k_tiles + t * kTile * dims;
    k[t] = out;
    unpack_f32<kDtype>(raw[t].k, dims / kGroup, kTile, out);
    if (kDtype != OCT_I8) continue;
    for (int d = 0; d < dims; d++)
      OCT_UNROLL for (int i = 0; i < kTile; i += kLanes)
        store(out + d * kTile + i, load(out + d * kTile + i) * load(raw[t].k_scale + i));
  }
  scores_f32_tiles(k, tiles, rows, dims, s);
}

template <int kDtype>
static void values_f32_of(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
  constexpr int kGroup = kDtype == OCT_I8 ? 4 : 2;
  const float* v[kGroupTiles];
  for (int t = 0; t < tiles; t++) {
    if (kDtype == OCT_F32) {
      v[t] = (const float*)raw[t].v;
      continue;
    }
    float* out = (float*)s.v_tiles + t * kTile * dims;
    v[t] = out;
    unpack_f32<kDtype>(raw[t].v, kTile / kGroup, dims, out);
  }
  values_f32_tiles(v, tiles, rows, dims, s);
}

template <int kDtype> constexpr TileKernel f32_kernel() {
  return {load_query_f32, scores_f32_of<kDtype>, values_f32_of<kDtype>, false, kDtype == OCT_I8 ? 1.0f : 0.0f};
}

}  // namespace OCT_ISA
}  // namespace octavo
