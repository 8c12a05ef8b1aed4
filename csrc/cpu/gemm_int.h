// int8 and 4-bit weights times int8 activations: exact integer sums of 32 products, then float in a fixed order.
//
// Weights are unsigned bytes (weight + offset), activations signed, so one row's group sum corrects the offset.
#pragma once
#include "gemm.h"

namespace octavo {
namespace OCT_ISA {

// acc + the four products of each 32-bit lane: w unsigned bytes, a signed.
OCT_INLINE vi dot4(vi acc, vu w, vi a) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));  // GCC 12 spills around the intrinsic
  return acc;
#else
  // Bytes 0 and 2, then 1 and 3, as pairs of 16 bits: their products and the sum of two fit 32 bits.
#if defined(__AVX512F__)
  __m512i low = _mm512_and_si512((__m512i)w, _mm512_set1_epi32(0xff00ff)), high = _mm512_srli_epi16((__m512i)w, 8);
  __m512i a0 = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)a, 8), 8), a1 = _mm512_srai_epi16((__m512i)a, 8);
  return acc + (vi)_mm512_madd_epi16(low, a0) + (vi)_mm512_madd_epi16(high, a1);
#elif defined(__AVX2__)
  __m256i low = _mm256_and_si256((__m256i)w, _mm256_set1_epi32(0xff00ff)), high = _mm256_srli_epi16((__m256i)w, 8);
  __m256i a0 = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)a, 8), 8), a1 = _mm256_srai_epi16((__m256i)a, 8);
  return acc + (vi)_mm256_madd_epi16(low, a0) + (vi)_mm256_madd_epi16(high, a1);
#elif defined(__SSE2__)
  __m128i low = _mm_and_si128((__m128i)w, _mm_set1_epi32(0xff00ff)), high = _mm_srli_epi16((__m128i)w, 8);
  __m128i a0 = _mm_srai_epi16(_mm_slli_epi16((__m128i)a, 8), 8), a1 = _mm_srai_epi16((__m128i)a, 8);
  return acc + (vi)_mm_madd_epi16(low, a0) + (vi)_mm_madd_epi16(high, a1);
#else
  OCT_UNROLL for (int i = 0; i < 4; i++) acc += (vi)(w >> (8 * i) & 255u) * (a << (24 - 8 * i) >> 24);
  return acc;
#endif
#endif
}

constexpr int kIntVectors = kLanes == 16 ? 2 : 1;
#if defined(__AVX512F__)
constexpr int kIntRows = 6;
#else
constexpr int kIntRows = 4;
#endif

constexpr int64_t group_bytes(PackKind kind) {
  return kind == kQ8 ? kGroup * kPanel + 2 * kPanel : kGroup * kPanel / 2 + (kind == kQ4M ? 4 : 2) * kPanel;
}
// Zero point of the stored weights: what was added to make them unsigned.
constexpr int zero_point(PackKind kind) { return kind == kQ8 ? 128 : kind == kQ4 ? 8 : 0; }

OCT_INLINE vf bytes_to_float(const uint8_t* p) {
  typedef uint8_t vub __attribute__((vector_size(kLanes)));
  vub b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
}

// Scales and minima of kLanes outputs from `column` on; `group` is number g of its panel. No minimum: left as it is.
template <PackKind kKind> OCT_INLINE void group_scales(const uint8_t* group, int g, int column, vf* scale, vf* minimum) {
  const uint8_t* at = group + (kKind == kQ8 ? kGroup * kPanel : kGroup * kPanel / 2);
  if (kKind == kQ4K) {
    const uint16_t* ends = (const uint16_t*)(group + (8 - g % 8) * group_bytes(kQ4K));
    *scale = bytes_to_float(at + column) * load_f16(ends + column);
    *minimum = -(bytes_to_float(at + kPanel + column) * load_f16(ends + kPanel + column));
  } else {
    *scale = load_f16((const uint16_t*)at + column);
    if (kKind == kQ4M) *minimum = load_f16((const uint16_t*)at + kPanel + column);
  }
}

template <PackKind kKind, int MR>
static __attribute__((noinline)) void int_tile(const uint8_t* panel, const TileInput& in, float* out) {
  constexpr int V = kIntVectors, kStep = kPanel * 4;
  const int8_t* a = (const int8_t*)in.a;
  for (int strip = 0; strip < kPanelVectors / V; strip++) {
    const int column = strip * V * kLanes;
    const uint8_t* group = panel;
    vf acc[MR][V];
    OCT_UNROLL for (int r = 0; r < MR; r++) OCT_UNROLL for (int v = 0; v < V; v++) acc[r][v] = vf{};
    for (int g = 0; g < in.groups; g++) {
      vi dot[MR][V];
      OCT_UNROLL for (int r = 0; r < MR; r++) {
        vi start = splat_i32(-zero_point(kKind) * in.sum[(int64_t)r * in.row_groups + g]);
        OCT_UNROLL for (int v = 0; v < V; v++) dot[r][v] = start;
      }
      const uint8_t* w = group + column * 4;
      if (strip == 0)
        for (int line = 0; line < group_bytes(kKind); line += 64) __builtin_prefetch(group + 4096 + line);
      auto step = [&](int k4, const vu* weights) __attribute__((always_inline)) {
        OCT_UNROLL for (int r = 0; r < MR; r++) {
          int32_t four;
          memcpy(&four, a + r * in.stride + g * kGroup + k4 * 4, 4);
          vi x = splat_i32(four);
          OCT_UNROLL for (int v = 0; v < V; v++) dot[r][v] = dot4(dot[r][v], weights[v], x);
        }
      };
      vu weights[V];
      if (kKind == kQ8) {
        OCT_UNROLL for (int k4 = 0; k4 < 8; k4++) {
          OCT_UNROLL for (int v = 0; v < V; v++) weights[v] = load_u32(w + k4 * kStep + v * kLanes * 4);
          step(k4, weights);
        }
      } else {
        OCT_UNROLL for (int k4 = 0; k4 < 4; k4++) {
          vu both[V];
          OCT_UNROLL for (int v = 0; v < V; v++) both[v] = load_u32(w + k4 * kStep + v * kLanes * 4);
          OCT_UNROLL for (int v = 0; v < V; v++) weights[v] = both[v] & 0x0f0f0f0fu;
          step(k4, weights);
          OCT_UNROLL for (int v = 0; v < V; v++) weights[v] = both[v] >> 4 & 0x0f0f0f0fu;
          step(k4 + 4, weights);
        }
      }
      vf scale[V], minimum[V];
      OCT_UNROLL for (int v = 0; v < V; v++)
        group_scales<kKind>(group, g, column + v * kLanes, &scale[v], &minimum[v]);
      OCT_UNROLL for (int r = 0; r < MR; r++) {
        float sa = in.scale[(int64_t)r * in.row_groups + g];
        vf row_scale = splat(sa);
        OCT_UNROLL for (int v = 0; v < V; v++)
          acc[r][v] = fma(to_float(dot[r][v]), row_scale * scale[v], acc[r][v]);
        if (kKind == kQ4M || kKind == kQ4K) {
          vf row_sum = splat(sa * (float)in.sum[(int64_t)r * in.row_groups + g]);
          OCT_UNROLL for (int v = 0; v < V; v++) acc[r][v] = fma(row_sum, minimum[v], acc[r][v]);
        }
      }
      group += group_bytes(kKind);
      if (kKind == kQ4K && g % 8 == 7) group += 4 * kPanel;
    }
    OCT_UNROLL for (int r = 0; r < MR; r++)
      OCT_UNROLL for (int v = 0; v < V; v++) store(out + r * kPanel + column + v * kLanes, acc[r][v]);
  }
}

template <PackKind kKind> constexpr Kernel int_kernel() {
  return {kIntRows, 1, nullptr, nullptr,
          {nullptr, int_tile<kKind, 1>, int_tile<kKind, 2>, int_tile<kKind, 3>, int_tile<kKind, 4>,
#if defined(__AVX512F__)
           int_tile<kKind, 5>, int_tile<kKind, 6>,
#endif
          }};
}

constexpr Kernel kQ8Kernel = int_kernel<kQ8>(), kQ4Kernel = int_kernel<kQ4>(), kQ4MKernel = int_kernel<kQ4M>(),
                 kQ4KKernel = int_kernel<kQ4K>();

}  // namespace OCT_ISA
}  // namespace octavo
