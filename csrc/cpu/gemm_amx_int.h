// int8 and 4-bit weights for many rows on AMX. The same bits as int_tile: the integer sums are exact in both, and the
// float operations behind them are the same in the same order.
//
// A panel is unpacked once for all its rows: per group [8][32][4] signed bytes (weight less zero point), then [32]
// scales and [32] minima in float.
#pragma once
#include "gemm_int.h"
#include "tiles.h"

#if defined(__AMX_INT8__)
namespace octavo {
namespace OCT_ISA {

constexpr int kUnpackedScales = kGroup * kPanel, kUnpackedGroup = kUnpackedScales + 2 * kPanel * 4;

template <PackKind kKind> static void unpack_panel(const uint8_t* group, int groups, uint8_t* to) {
  const __m512i zero = _mm512_set1_epi8((char)zero_point(kKind)), low = _mm512_set1_epi8(15);
  for (int g = 0; g < groups; g++, to += kUnpackedGroup) {
    if (kKind == kQ8) {
      for (int i = 0; i < 16; i++)
        _mm512_store_si512(to + i * 64, _mm512_sub_epi8(_mm512_loadu_si512(group + i * 64), zero));
    } else {
      for (int i = 0; i < 8; i++) {
        __m512i both = _mm512_loadu_si512(group + i * 64);
        _mm512_store_si512(to + i * 64, _mm512_sub_epi8(_mm512_and_si512(both, low), zero));
        both = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_store_si512(to + (i + 8) * 64, _mm512_sub_epi8(both, zero));
      }
    }
    float* scales = (float*)(to + kUnpackedScales);
    for (int v = 0; v < 2; v++) {
      vf scale, minimum = {};
      group_scales<kKind>(group, g, v * kLanes, &scale, &minimum);
      store(scales + v * kLanes, scale);
      store(scales + kPanel + v * kLanes, minimum);
    }
    group += group_bytes(kKind);
    if (kKind == kQ4K && g % 8 == 7) group += 4 * kPanel;
  }
}

// Integer sums of one group for 16 or 32 rows into sums[32][32].
template <bool kTwo> OCT_INLINE void sum_group(const uint8_t* group, const int8_t* a, int64_t stride, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(6, group, kPanel * 4);
  _tile_loadd(4, a, stride);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(7, group + 64, kPanel * 4);
  _tile_dpbssd(1, 4, 7);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, a + 16 * stride, stride);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + 16, kPanel * 4);
  if (kTwo) {
    _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
    _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
  }
}

// Adds the scaled sums of up to two groups to the rows of out.
template <bool kMinimum>
static void scale_groups(const uint8_t* group, const TileInput& in, int g, int n, int rows, const int32_t* sums,
                         float* out) {
  for (int r = 0; r < rows; r++) {
    vf acc[2] = {load(out + r * kPanel), load(out + r * kPanel + kLanes)};
    for (int i = 0; i < n; i++) {
      const float* scales = (const float*)(group + i * kUnpackedGroup + kUnpackedScales);
      const int32_t* dot = sums + (i * 32 + r) * kPanel;
      float row_scale = in.scale[(int64_t)r * in.row_groups + g + i];
      OCT_UNROLL for (int v = 0; v < 2; v++)
        acc[v] = fma(to_float(load_i32(dot + v * kLanes)), splat(row_scale) * load(scales + v * kLanes), acc[v]);
      if (kMinimum) {
        vf row_sum = splat(row_scale * (float)in.sum[(int64_t)r * in.row_groups + g + i]);
        OCT_UNROLL for (int v = 0; v < 2; v++) acc[v] = fma(row_sum, load(scales + kPanel + v * kLanes), acc[v]);
      }
    }
    store(out + r * kPanel, acc[0]);
    store(out + r * kPanel + kLanes, acc[1]);
  }
}

// The sums of the next two groups are begun before the last two are scaled.
template <bool kMinimum, bool kTwo>
static __attribute__((noinline)) void amx_int_tile(const uint8_t* unpacked, const TileInput& in, float* out) {
  constexpr int kStep = 2, kRows = kTwo ? 32 : 16;
  alignas(64) int32_t sums[2][kStep * 32 * kPanel];
  const int8_t* a = (const int8_t*)in.a;
  const uint8_t* ahead = in.ahead;
  memset(out, 0, kRows * kPanel * sizeof(float));
  tiles_fence();
  for (int g = 0, which = 0; g < in.groups + kStep; g += kStep, which ^= 1) {
    for (int i = g; i < g + kStep && i < in.groups; i++) {
      sum_group<kTwo>(unpacked + i * kUnpackedGroup, a + i * kGroup, in.stride, sums[which] + (i - g) * 32 * kPanel);
      for (int line = 0; line < in.ahead_lines; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
      ahead += in.ahead_lines * 64;
    }
    tiles_fence();
    if (g == 0) continue;
    int done = g - kStep, n = in.groups - done < kStep ? in.groups - done : kStep;
    scale_groups<kMinimum>(unpacked + done * kUnpackedGroup, in, done, n, kRows, sums[which ^ 1], out);
  }
}

template <PackKind kKind> constexpr Kernel amx_int_kernel() {
  constexpr bool kMinimum = kKind == kQ4M || kKind == kQ4K;
  Kernel k = {32, 16, [] { configure_tiles(kGroup); }, unpack_panel<kKind>, {}};
  for (int rows = 1; rows <= 32; rows++)
    k.tile[rows] = rows <= 16 ? amx_int_tile<kMinimum, false> : amx_int_tile<kMinimum, true>;
  return k;
}
constexpr Kernel kManyQ8 = amx_int_kernel<kQ8>(), kManyQ4 = amx_int_kernel<kQ4>(),
                 kManyQ4M = amx_int_kernel<kQ4M>(), kManyQ4K = amx_int_kernel<kQ4K>();

}  // namespace OCT_ISA
}  // namespace octavo
#endif
