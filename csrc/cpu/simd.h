// One vector type, as wide as the instruction set this file is compiled for, and the few operations the kernels need.
//
// The kernels are compiled once per set with -DOCT_ISA=name; everything lives in octavo::OCT_ISA, so the sets
// can't take each other's code at link time. Bits are a property of the set: fma() is a fused operation where the set
// has one, else multiply then add; the compiler may contract nothing by itself (-ffp-contract=off).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifndef OCT_ISA
#error "compile with -DOCT_ISA=name (csrc/build.py does)"
#endif

#define OCT_INLINE static inline __attribute__((always_inline))
#define OCT_UNROLL _Pragma("GCC unroll 32")

namespace octavo {
namespace OCT_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));  // one half-width element a lane
typedef int8_t vb __attribute__((vector_size(kLanes)));        // one byte a lane
typedef uint16_t bf16;

OCT_INLINE vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
OCT_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
OCT_INLINE vu load_u32(const void* p) { vu v; memcpy(&v, p, sizeof v); return v; }
OCT_INLINE vi load_i32(const void* p) { vi v; memcpy(&v, p, sizeof v); return v; }
OCT_INLINE vf splat(float x) { return x - (vf){}; }
OCT_INLINE vi splat_i32(int32_t x) { return x - (vi){}; }

OCT_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
OCT_INLINE vf max(vf a, vf b) { return a > b ? a : b; }  // b when either is NaN
OCT_INLINE vf min(vf a, vf b) { return a < b ? a : b; }
OCT_INLINE vf abs(vf a) { return (vf)((vu)a & 0x7fffffffu); }
OCT_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
OCT_INLINE vi round_to_int(vf a) {  // nearest, ties to even; |a| < 2^22
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23
  return (vi)(a + magic) - (vi)magic;
}

// Horizontal sums and maxima halve the vector until one lane is left: one order for every caller.
#if defined(__AVX512F__)
OCT_INLINE float sum(vf v) { return _mm512_reduce_add_ps(v); }
OCT_INLINE float max_lane(vf v) { return _mm512_reduce_max_ps(v); }
OCT_INLINE int32_t sum_i32(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
template <class T, class V, class F> OCT_INLINE T fold_lanes(V v, F f) {
  T lane[kLanes];
  memcpy(lane, &v, sizeof v);
  OCT_UNROLL for (int w = kLanes / 2; w; w /= 2)
    OCT_UNROLL for (int i = 0; i < w; i++) lane[i] = f(lane[i], lane[i + w]);
  return lane[0];
}
OCT_INLINE float sum(vf v) { return fold_lanes<float>(v, [](float a, float b) { return a + b; }); }
OCT_INLINE float max_lane(vf v) { return fold_lanes<float>(v, [](float a, float b) { return a > b ? a : b; }); }
OCT_INLINE int32_t sum_i32(vi v) { return fold_lanes<int32_t>(v, [](int32_t a, int32_t b) { return a + b; }); }
#endif

// ---------------------------------------------------------------- 16-bit floats
OCT_INLINE float bf16_to_float(bf16 h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
OCT_INLINE bf16 float_to_bf16(float f) {  // nearest, ties to even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)(u >> 16 | 0x40);
  return (bf16)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
OCT_INLINE vf load_bf16(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
OCT_INLINE vh round_bf16(vf v) {  // as float_to_bf16
  vu u = (vu)v;
  vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
  vu r = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  return __builtin_convertvector((nan & (u >> 16 | 0x40)) | (~nan & r), vh);
}
OCT_INLINE void store_bf16(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh(v);  // denormals become 0
#else
  vh h = round_bf16(v);
#endif
  memcpy(p, &h, sizeof h);
}

OCT_INLINE float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fffu, u;
  float f;
  if (mag >= 0x7c00) {
    u = sign | 0x7f800000u | (mag & 0x3ff) << 13;
    memcpy(&f, &u, 4);
    return f;
  }
  u = mag << 13;  // as a float its exponent is 112 too small; the product also normalises f16 denormals
  memcpy(&f, &u, 4);
  f *= 0x1p112f;
  memcpy(&u, &f, 4);
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}
OCT_INLINE vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vh h;
  memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu), mag = u & 0x7fffu;
  vf f = (vf)(mag << 13) * splat(0x1p112f);
  vu special = (vu)(mag >= 0x7c00u);
  vu bits = (special & (0x7f800000u | (mag & 0x3ffu) << 13)) | (~special & (vu)f);
  return (vf)(bits | (u & 0x8000u) << 16);
#endif
}

// ---------------------------------------------------------------- functions
// exp(x) to about 1 unit in the last place; 0 below -87.3 (no denormal results), infinity above 88.7. NaN gives NaN.
OCT_INLINE vf exp(vf x) {
#if defined(__AVX512F__)
  // min and max return their second operand when one is NaN.
  vf clamped = _mm512_max_ps(splat(-87.33654f), _mm512_min_ps(splat(89.0f), x));
  vf whole = _mm512_roundscale_ps(clamped * splat(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vf rest = fma(whole, splat(-0.693359375f), clamped);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  vf q = splat(1.9875691500e-4f);
  q = fma(q, rest, splat(1.3981999507e-3f));
  q = fma(q, rest, splat(8.3334519073e-3f));
  q = fma(q, rest, splat(4.1665795894e-2f));
  q = fma(q, rest, splat(1.6666665459e-1f));
  q = fma(q, rest, splat(5.0000001201e-1f));
  q = fma(q, rest * rest, rest) + splat(1.0f);
  __mmask16 keep = _mm512_cmp_ps_mask(x, splat(-87.33654f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(keep, q, whole);
#else
  const vf hi = splat(88.72283f), lo = splat(-87.33654f);
  vf y = x > hi ? hi : x;
  y = y < lo ? lo : y;
  vf n = to_float(round_to_int(y * splat(1.44269504f)));
  vf r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  // Two factors, so that n = 128 (just below overflow) has a representable scale.
  vi half = round_to_int(n) >> 1, rest = round_to_int(n) - half;
  vf e = p * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
  e = x > hi ? splat(__builtin_inff()) : e;
  return x < lo ? (vf){} : e;
#endif
}
OCT_INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
OCT_INLINE vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }
OCT_INLINE vf tanh(vf x) {  // 1 - 2 / (exp(2|x|) + 1), a short series near 0 where that cancels
  vf a = abs(x), t = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  vf s = a * a, small = splat(-5.70498872745e-3f);
  small = fma(small, s, splat(2.06390887954e-2f));
  small = fma(small, s, splat(-5.37397155531e-2f));
  small = fma(small, s, splat(1.33314422036e-1f));
  small = fma(small, s, splat(-3.33332819422e-1f));
  small = fma(small * s, a, a);
  t = a < splat(0.625f) ? small : t;
  return (vf)((vu)t | ((vu)x & 0x80000000u));
}

}  // namespace OCT_ISA
}  // namespace octavo
