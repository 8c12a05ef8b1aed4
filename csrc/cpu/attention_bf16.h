// Tile products for bf16 computation with AVX512-BF16 and VNNI: bf16 and fp8 caches by bf16 dot products, int8 keys by
// exact integer ones. With AMX the same through tile registers (attention_amx.h); the two round differently, so a set
// uses one of them for all rows.
//
// int8 keys meet a query of 15 bits (hi * 256 + lo per head, one scale a row), so only the cache's own rounding counts.
// int8 values go to bf16, which holds them exactly; their scales are folded into the weights.
#pragma once
#include "attention_f32.h"

#if defined(__AVX512BF16__)
namespace octavo {
namespace OCT_ISA {

OCT_INLINE vf dot_bf16(vf c, __m512i a, __m512i b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// GCC 12 copies and spills the accumulators of the intrinsic.
OCT_INLINE void dot_u8s8(__m512i& c, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(unsigned_bytes), "v"(signed_bytes));
}
OCT_INLINE __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
OCT_INLINE __m512i pair_at(const void* p) { int32_t x; memcpy(&x, p, 4); return _mm512_set1_epi32(x); }

static void load_query_bf16(const void* q, bool, int size, int dims, int row, AttentionScratch& s) {
  bf16* out = (bf16*)s.query + row * dims;
  memcpy(out, q, (size_t)size * 2);
  memset(out + size, 0, (size_t)(dims - size) * 2);
}

// Calls f(integral constant R) for runs of R <= kMost rows until all are done: f(count, first row).
template <int kMost, class F> OCT_INLINE void by_rows(int rows, F f) {
  int r = 0;
  for (; r + kMost <= rows; r += kMost) f(std::integral_constant<int, kMost>(), r);
  switch (rows - r) {
    case 1: f(std::integral_constant<int, 1>(), r); break;
    case 2: if constexpr (kMost > 2) f(std::integral_constant<int, 2>(), r); break;
    case 3: if constexpr (kMost > 3) f(std::integral_constant<int, 3>(), r); break;
    case 4: if constexpr (kMost > 4) f(std::integral_constant<int, 4>(), r); break;
    case 5: if constexpr (kMost > 5) f(std::integral_constant<int, 5>(), r); break;
  }
}

// ---------------------------------------------------------------- tiles to bf16
// int8 V [4][dims][4] to bf16 [8][dims][2], times 2^24 (the exponent of an integer in a lane's top byte).
static void unpack_v_int8(const uint8_t* in, int dims, uint8_t* out, TilesAhead& ahead) {
  const vu top = (vu){} + 0xff000000u;
  auto lane = [](vu x) { return (vu)to_float((vi)x); };  // its low 16 bits are zero: 8 bits are significant
  for (int quad = 0; quad < kTile / 4; quad++)
    for (int d = 0; d < dims; d += kLanes) {
      if (d % 64 == 0) fetch_ahead(ahead, 1);
      vu x = load_u32(in + (quad * dims + d) * 4);
      vu even = lane(x << 24) >> 16 | lane(x << 16 & top), odd = lane(x << 8 & top) >> 16 | lane(x & top);
      memcpy(out + (2 * quad * dims + d) * 4, &even, sizeof even);
      memcpy(out + ((2 * quad + 1) * dims + d) * 4, &odd, sizeof odd);
    }
}

// fp8 in lanes of two bytes to bf16 in lanes of two, `lanes` of them (a multiple of 16). Exact.
template <int kDtype> static void unpack_fp8(const uint8_t* in, int lanes, uint8_t* out) {
  for (int i = 0; i < lanes; i += kLanes) {
    vh h;
    memcpy(&h, in + 2 * i, sizeof h);
    vu x = __builtin_convertvector(h, vu);
    vu even = (vu)f8_lanes<kDtype>(x & 0xffu), odd = (vu)f8_lanes<kDtype>(x >> 8);
    vu pair = even >> 16 | (odd & 0xffff0000u);
    memcpy(out + 4 * i, &pair, sizeof pair);
  }
}

// The operand of tile `raw`: where it lies, or its unpacked form in `out`.
template <int kDtype> static const uint8_t* bf16_operand(const uint8_t* raw, int dims, uint8_t* out) {
  if (kDtype == OCT_BF16) return raw;
  unpack_fp8<kDtype>(raw, kTile * dims / 2, out);
  return out;
}

// ---------------------------------------------------------------- products
template <int kRows>
static __attribute__((noinline)) void scores_bf16(const bf16* q, const uint8_t* const* k, int dims, float* scores,
                                                  TilesAhead& ahead) {
  vf acc[kRows][kGroupTiles];
  OCT_UNROLL for (int r = 0; r < kRows; r++) OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) acc[r][t] = (vf){};
  for (int d = 0; d < dims; d += 2) {
    fetch_ahead(ahead, 1);
    __m512i key[kGroupTiles];
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) key[t] = load512(k[t] + d * kTile * 2);
    asm volatile("" : "+v"(key[0]), "+v"(key[1]), "+v"(key[2]), "+v"(key[3]));  // or GCC loads them for every row
    OCT_UNROLL for (int r = 0; r < kRows; r++) {
      __m512i query = pair_at(q + r * dims + d);
      OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) acc[r][t] = dot_bf16(acc[r][t], key[t], query);
    }
  }
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) store(scores + r * kGroupKeys + t * kTile, acc[r][t]);
}

template <int kRows, int kVectors>
static __attribute__((noinline)) void values_bf16(const bf16* weights, const uint8_t* const* v, int tiles, int dims,
                                                  const float* factor, float* out, TilesAhead& ahead) {
  vf acc[kRows][kVectors];
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int i = 0; i < kVectors; i++) acc[r][i] = load(out + r * dims + i * kLanes) * splat(factor[r]);
  for (int t = 0; t < tiles; t++)
    for (int pair = 0; pair < kTile / 2; pair++) {
      fetch_ahead(ahead, 1);
      __m512i value[kVectors];
      OCT_UNROLL for (int i = 0; i < kVectors; i++) value[i] = load512(v[t] + (pair * dims + i * kLanes) * 4);
      if constexpr (kVectors == 4) asm volatile("" : "+v"(value[0]), "+v"(value[1]), "+v"(value[2]), "+v"(value[3]));
      OCT_UNROLL for (int r = 0; r < kRows; r++) {
        __m512i weight = pair_at(weights + r * kGroupKeys + t * kTile + 2 * pair);
        OCT_UNROLL for (int i = 0; i < kVectors; i++) acc[r][i] = dot_bf16(acc[r][i], value[i], weight);
      }
    }
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int i = 0; i < kVectors; i++) store(out + r * dims + i * kLanes, acc[r][i]);
}

static void scores_bf16_tiles(const uint8_t* const* k, int tiles, int rows, int dims, AttentionScratch& s) {
  const uint8_t* tile[kGroupTiles];
  for (int t = 0; t < kGroupTiles; t++) tile[t] = k[t < tiles ? t : 0];  // what a missing one gives is masked
  by_rows<6>(rows, [&](auto n, int r) {
    scores_bf16<n>((const bf16*)s.query + r * dims, tile, dims, s.scores + r * kGroupKeys, s.ahead);
  });
}

static void values_bf16_tiles(const uint8_t* const* v, int tiles, int rows, int dims, AttentionScratch& s) {
  for (int d = 0; d < dims;) {
    const uint8_t* tile[kGroupTiles];
    for (int t = 0; t < tiles; t++) tile[t] = v[t] + d * 4;
    bool wide = d + 4 * kLanes <= dims;
    by_rows<6>(rows, [&](auto n, int r) {
      const bf16* w = (const bf16*)s.weights + r * kGroupKeys;
      if (wide) values_bf16<n, 4>(w, tile, tiles, dims, s.factor + r, s.part + r * dims + d, s.ahead);
      else values_bf16<n, 1>(w, tile, tiles, dims, s.factor + r, s.part + r * dims + d, s.ahead);
    });
    d += wide ? 4 * kLanes : kLanes;
  }
}

// ---------------------------------------------------------------- int8 keys
// The query as round(q / scale) = 256 * hi + lo, |.| <= 32512: hi at s.query, lo kUnitRows * dims bytes behind.
static void load_query_int8(const void* q, bool, int size, int dims, int row, AttentionScratch& s) {
  int8_t *hi = (int8_t*)s.query + row * dims, *lo = hi + kUnitRows * dims;
  alignas(64) bf16 x[kMaxHeadSize];
  memcpy(x, q, (size_t)size * 2);
  memset(x + size, 0, (size_t)(dims - size) * 2);
  vf top = {}, poison = {};
  for (int i = 0; i < dims; i += kLanes) {
    top = max(abs(load_bf16(x + i)), top);
    poison += load_bf16(x + i) * splat(0.0f);  // NaN when one is NaN or infinite
  }
  const float largest = max_lanes(top)[0];
  s.query_scale[row] = largest / 32512.0f + sum_lanes(poison)[0];
  const vf inverse = splat(largest > 1e-30f && largest < INFINITY ? 32512.0f / largest : 0.0f);
  for (int i = 0; i < dims; i += kLanes) {
    vi whole = round_to_int(load_bf16(x + i) * inverse), high = (whole + 128) >> 8, low = whole - (high << 8);
    vb h = __builtin_convertvector(high, vb), l = __builtin_convertvector(low, vb);
    memcpy(hi + i, &h, sizeof h);
    memcpy(lo + i, &l, sizeof l);
  }
}

// score = float(256 * hi . k + lo . k) * query scale * key scale
OCT_INLINE void store_int8_scores(vi hi, vi lo, const float* k_scale, float query_scale, float* out) {
  vf exact = to_float((hi << 8) + lo);
  store(out, exact * splat(query_scale) * load(k_scale));
}

template <int kRows>
static __attribute__((noinline)) void scores_int8(const int8_t* q, const RawTile* k, int dims, const float* query_scale,
                                                  float* scores, TilesAhead& ahead) {
  const int64_t lo = kUnitRows * dims;
  __m512i acc[2][kRows][kGroupTiles];
  OCT_UNROLL for (int r = 0; r < kRows; r++) {
    int sum[2] = {0, 0};
    for (int d = 0; d < dims; d++) sum[0] += q[r * dims + d], sum[1] += q[lo + r * dims + d];
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++)
      OCT_UNROLL for (int h = 0; h < 2; h++) acc[h][r][t] = _mm512_set1_epi32(-128 * sum[h]);
  }
  for (int d = 0; d < dims; d += 4) {
    fetch_ahead(ahead, 1);
    __m512i key[kGroupTiles];  // + 128: the instruction wants one unsigned factor
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++)
      key[t] = _mm512_xor_si512(load512(k[t].k + d * kTile), _mm512_set1_epi8((char)0x80));
    OCT_UNROLL for (int r = 0; r < kRows; r++)
      OCT_UNROLL for (int h = 0; h < 2; h++) {
        __m512i query = pair_at(q + h * lo + r * dims + d);
        OCT_UNROLL for (int t = 0; t < kGroupTiles; t++) dot_u8s8(acc[h][r][t], key[t], query);
      }
  }
  OCT_UNROLL for (int r = 0; r < kRows; r++)
    OCT_UNROLL for (int t = 0; t < kGroupTiles; t++)
      store_int8_scores((vi)acc[0][r][t], (vi)acc[1][r][t], k[t].k_scale, query_scale[r],
                        scores + r * kGroupKeys + t * kTile);
}

static void scores_int8_tiles(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
  RawTile tile[kGroupTiles];
  for (int t = 0; t < kGroupTiles; t++) tile[t] = raw[t < tiles ? t : 0];
  by_rows<3>(rows, [&](auto n, int r) {
    scores_int8<n>((const int8_t*)s.query + r * dims, tile, dims, s.query_scale + r, s.scores + r * kGroupKeys,
                   s.ahead);
  });
}

}  // namespace OCT_ISA
}  // namespace octavo
#endif
