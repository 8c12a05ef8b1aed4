// Tile products in AMX registers: 16 query rows at a time, the cache's tiles as they lie are the second operand.
//
// The arithmetic of a row doesn't depend on how many rows a register holds, so decode (few rows) and prefill agree.
#pragma once
#include "attention_bf16.h"

#if defined(__AMX_TILE__)
namespace octavo {
namespace OCT_ISA {

// Registers: 0-3 results; 4 queries (64 bytes), 5 keys (64 bytes); 6 queries (16 dims) or weights (16 tokens), 7 keys
// (16 dims) or values (16 tokens).
struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

static void configure_amx(int rows) {
  AmxConfig config;
  const int n = rows < 16 ? rows : 16;  // more rows go in blocks of 16; the last one may run over into unused rows
  const int bytes[8] = {64, 64, 64, 64, 64, 64, 32, 64}, lines[8] = {n, n, n, n, n, 16, n, 8};
  for (int i = 0; i < 8; i++) config.bytes[i] = (uint16_t)bytes[i], config.rows[i] = (uint8_t)lines[i];
  asm volatile("" ::"r"(&config) : "memory");  // GCC takes the next line for a read of 8 bytes and drops the rest
  _tile_loadconfig(&config);
}

template <int kTiles> static void scores_amx_tiles(const bf16* q, const uint8_t* const* k, int dims, float* scores,
                                                    TilesAhead& ahead) {
  asm volatile("" ::: "memory");  // the tile loads don't tell the compiler what they read
  _tile_zero(0);
  if (kTiles > 1) _tile_zero(1);
  if (kTiles > 2) _tile_zero(2);
  if (kTiles > 3) _tile_zero(3);
  int d = 0;
  for (; d + 32 <= dims; d += 32) {
    _tile_loadd(4, q + d, dims * 2);
#define OCT_STEP(t)                        \
  if (kTiles > t) {                        \
    fetch_ahead(ahead, 3);                 \
    _tile_loadd(5, k[t] + d * kTile * 2, 64); \
    _tile_dpbf16ps(t, 4, 5);               \
  }
    OCT_STEP(0) OCT_STEP(1) OCT_STEP(2) OCT_STEP(3)
#undef OCT_STEP
  }
  if (d < dims) {
    _tile_loadd(6, q + d, dims * 2);
#define OCT_STEP(t)                        \
  if (kTiles > t) {                        \
    fetch_ahead(ahead, 3);                 \
    _tile_loadd(7, k[t] + d * kTile * 2, 64); \
    _tile_dpbf16ps(t, 6, 7);               \
  }
    OCT_STEP(0) OCT_STEP(1) OCT_STEP(2) OCT_STEP(3)
#undef OCT_STEP
  }
  _tile_stored(0, scores, kGroupKeys * 4);
  if (kTiles > 1) _tile_stored(1, scores + kTile, kGroupKeys * 4);
  if (kTiles > 2) _tile_stored(2, scores + 2 * kTile, kGroupKeys * 4);
  if (kTiles > 3) _tile_stored(3, scores + 3 * kTile, kGroupKeys * 4);
}

static void scores_amx(const uint8_t* const* k, int tiles, int rows, int dims, AttentionScratch& s) {
  for (int r = 0; r < rows; r += 16) {
    const bf16* q = (const bf16*)s.query + r * dims;
    float* out = s.scores + r * kGroupKeys;
    switch (tiles) {
      case 1: scores_amx_tiles<1>(q, k, dims, out, s.ahead); break;
      case 2: scores_amx_tiles<2>(q, k, dims, out, s.ahead); break;
      case 3: scores_amx_tiles<3>(q, k, dims, out, s.ahead); break;
      default: scores_amx_tiles<4>(q, k, dims, out, s.ahead);
    }
  }
}

// hi or lo bytes of up to 16 queries times the keys, exact. dims is a multiple of 64.
template <int kTiles>
static void dots_amx_int8(const int8_t* q, const RawTile* k, int dims, int32_t* out, TilesAhead& ahead) {
  asm volatile("" ::: "memory");
  _tile_zero(0);
  if (kTiles > 1) _tile_zero(1);
  if (kTiles > 2) _tile_zero(2);
  if (kTiles > 3) _tile_zero(3);
  for (int d = 0; d < dims; d += 64) {
    _tile_loadd(4, q + d, dims);
#define OCT_STEP(t)                           \
  if (kTiles > t) {                           \
    fetch_ahead(ahead, 2);                    \
    _tile_loadd(5, k[t].k + d * kTile, 64);   \
    _tile_dpbssd(t, 4, 5);                    \
  }
    OCT_STEP(0) OCT_STEP(1) OCT_STEP(2) OCT_STEP(3)
#undef OCT_STEP
  }
  _tile_stored(0, out, kGroupKeys * 4);
  if (kTiles > 1) _tile_stored(1, out + kTile, kGroupKeys * 4);
  if (kTiles > 2) _tile_stored(2, out + 2 * kTile, kGroupKeys * 4);
  if (kTiles > 3) _tile_stored(3, out + 3 * kTile, kGroupKeys * 4);
}

static void dots_amx_int8(const int8_t* q, const RawTile* k, int tiles, int dims, int32_t* out, TilesAhead& ahead) {
  switch (tiles) {
    case 1: return dots_amx_int8<1>(q, k, dims, out, ahead);
    case 2: return dots_amx_int8<2>(q, k, dims, out, ahead);
    case 3: return dots_amx_int8<3>(q, k, dims, out, ahead);
    default: return dots_amx_int8<4>(q, k, dims, out, ahead);
  }
}

// The bits of scores_int8_tiles, since integer sums are exact in any order.
static void scores_amx_int8(const RawTile* k, int tiles, int rows, int dims, AttentionScratch& s) {
  alignas(64) int32_t hi[16 * kGroupKeys], lo[16 * kGroupKeys];
  for (int r = 0; r < rows; r += 16) {
    const int8_t* q = (const int8_t*)s.query + r * dims;
    dots_amx_int8(q, k, tiles, dims, hi, s.ahead);
    dots_amx_int8(q + kUnitRows * dims, k, tiles, dims, lo, s.ahead);
    for (int i = 0; i < 16 && r + i < rows; i++)
      for (int t = 0; t < tiles; t++)
        store_int8_scores(load_i32(hi + i * kGroupKeys + t * kTile), load_i32(lo + i * kGroupKeys + t * kTile),
                          k[t].k_scale, s.query_scale[r + i], s.scores + (r + i) * kGroupKeys + t * kTile);
  }
}

// 16 * kWide dims of up to 16 rows: out += weights . V.
template <int kWide>
static void values_amx_dims(const bf16* weights, const uint8_t* const* v, int tiles, int dims, int d, float* out,
                            TilesAhead& ahead) {
  asm volatile("" ::: "memory");
  _tile_loadd(0, out + d, dims * 4);
  if (kWide > 1) _tile_loadd(1, out + d + 16, dims * 4);
  if (kWide > 2) _tile_loadd(2, out + d + 32, dims * 4);
  if (kWide > 3) _tile_loadd(3, out + d + 48, dims * 4);
  for (int t = 0; t < tiles; t++) {
    _tile_loadd(6, weights + t * kTile, kGroupKeys * 2);
#define OCT_STEP(i)                                   \
  if (kWide > i) {                                    \
    fetch_ahead(ahead, 2);                            \
    _tile_loadd(7, v[t] + (d + i * 16) * 4, dims * 4); \
    _tile_dpbf16ps(i, 6, 7);                          \
  }
    OCT_STEP(0) OCT_STEP(1) OCT_STEP(2) OCT_STEP(3)
#undef OCT_STEP
  }
  _tile_stored(0, out + d, dims * 4);
  if (kWide > 1) _tile_stored(1, out + d + 16, dims * 4);
  if (kWide > 2) _tile_stored(2, out + d + 32, dims * 4);
  if (kWide > 3) _tile_stored(3, out + d + 48, dims * 4);
}

static void values_amx(const uint8_t* const* v, int tiles, int rows, int dims, AttentionScratch& s) {
  for (int r = 0; r < rows; r++)
    if (s.factor[r] != 1.0f)
      for (int d = 0; d < dims; d += kLanes)
        store(s.part + r * dims + d, load(s.part + r * dims + d) * splat(s.factor[r]));
  for (int r = 0; r < rows; r += 16) {
    const bf16* w = (const bf16*)s.weights + r * kGroupKeys;
    float* out = s.part + r * dims;
    int d = 0;
    for (; d + 64 <= dims; d += 64) values_amx_dims<4>(w, v, tiles, dims, d, out, s.ahead);
    for (; d < dims; d += 16) values_amx_dims<1>(w, v, tiles, dims, d, out, s.ahead);
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
#endif
