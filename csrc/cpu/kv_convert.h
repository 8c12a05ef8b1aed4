// Rounding keys and values to a KV dtype, and reading tiles of any dtype as f32 or bf16.
#pragma once
#include "kv_layout.h"
#include "simd.h"

namespace octavo {
namespace OCT_ISA {

// ---------------------------------------------------------------- writing
static uint16_t float_to_f16(float f) {  // nearest, ties to even; overflow to infinity
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = u >> 16 & 0x8000, mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (mag >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (mag < 0x38800000u) {  // a denormal: adding 0.5 leaves the mantissa in units of 2^-24
    float a;
    memcpy(&a, &mag, 4);
    a += 0.5f;
    memcpy(&mag, &a, 4);
    return (uint16_t)(sign | (mag - 0x3f000000u));
  }
  return (uint16_t)(sign | ((mag - 0x38000000u + 0xfffu + (mag >> 13 & 1)) >> 13));
}

// OCP fp8, nearest, ties to even, saturating at the largest finite value; NaN stays NaN.
// mantissa 3, bias 7, max 448 (e4m3: no infinity) or mantissa 2, bias 15, max 57344 (e5m2).
template <int kMantissa> static uint8_t float_to_f8(float f) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15;
  constexpr uint8_t kNan = kMantissa == 3 ? 0x7f : 0x7e, kMax = kMantissa == 3 ? 0x7e : 0x7b;
  uint32_t u;
  memcpy(&u, &f, 4);
  uint8_t sign = (uint8_t)(u >> 24 & 0x80);
  uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return sign | kNan;
  const float smallest_normal = kMantissa == 3 ? 0x1p-6f : 0x1p-14f;
  float a;
  memcpy(&a, &mag, 4);
  uint32_t code;
  if (a < smallest_normal) {  // fixed point; a carry gives the smallest normal number
    const float magic = kMantissa == 3 ? 0x1p14f : 0x1p7f;  // one unit in the last place is one step of the denormals
    float b = a + magic;
    memcpy(&code, &b, 4);
    uint32_t zero;
    memcpy(&zero, &magic, 4);
    code -= zero;
  } else {
    const int drop = 23 - kMantissa;
    code = (mag + (1u << (drop - 1)) - 1 + (mag >> drop & 1)) >> drop;
    code -= (uint32_t)(127 - kBias) << kMantissa;
  }
  return sign | (uint8_t)(code > kMax ? kMax : code);
}

// Nearest, ties to even. The instruction takes denormals for zero.
OCT_INLINE void store_rounded(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh(v);
  memcpy(p, &h, sizeof h);
#else
  store_bf16(p, v);
#endif
}

// Rounds `dims` values (a multiple of 16) into `out`. Returns the scale: value = scale * stored; 1 unless int8.
static float encode(const float* x, int dims, int dtype, void* out) {
  switch (dtype) {
    case OCT_F32: memcpy(out, x, 4 * (size_t)dims); break;
    case OCT_BF16: for (int i = 0; i < dims; i += kLanes) store_rounded((bf16*)out + i, load(x + i)); break;
    case OCT_F16: for (int i = 0; i < dims; i++) ((uint16_t*)out)[i] = float_to_f16(x[i]); break;
    case OCT_F8E4M3: for (int i = 0; i < dims; i++) ((uint8_t*)out)[i] = float_to_f8<3>(x[i]); break;
    case OCT_F8E5M2: for (int i = 0; i < dims; i++) ((uint8_t*)out)[i] = float_to_f8<2>(x[i]); break;
    case OCT_I8: {
      vf top = {}, sum = {};
      for (int i = 0; i < dims; i += kLanes) top = max(abs(load(x + i)), top), sum += load(x + i) * splat(0.0f);
      float largest = max_lane(top), poison = OCT_ISA::sum(sum);  // NaN when any value is NaN or infinite
      if (poison != 0) { memset(out, 0, (size_t)dims); return poison; }
      vf inverse = splat(largest > 1e-30f ? 127.0f / largest : 0.0f);
      for (int i = 0; i < dims; i += kLanes) {
        vb b = __builtin_convertvector(round_to_int(load(x + i) * inverse), vb);
        memcpy((int8_t*)out + i, &b, sizeof b);
      }
      return largest / 127.0f;
    }
  }
  return 1.0f;
}

// ---------------------------------------------------------------- reading
// f16 bits in the low half of each lane. The lanes' high halves must be zero.
OCT_INLINE vf f16_lanes(vu h) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, (__m256i)__builtin_convertvector(h, vh));
#elif defined(__AVX2__)
  __m256i half = (__m256i)h;
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#else
  vu mag = h & 0x7fffu;
  vf f = (vf)(mag << 13) * splat(0x1p112f);
  vu special = (vu)(mag >= 0x7c00u);
  vu bits = (special & (0x7f800000u | (mag & 0x3ffu) << 13)) | (~special & (vu)f);
  return (vf)(bits | (h & 0x8000u) << 16);
#endif
}
// fp8 bits in the low byte of each lane.
template <int kDtype> OCT_INLINE vf f8_lanes(vu b) {
  if (kDtype == OCT_F8E5M2) return f16_lanes(b << 8);
  vu mag = b & 0x7fu;
  vf f = f16_lanes((b & 0x80u) << 8 | mag << 7) * splat(256.0f);
  return (vf)((vu)f | (vu)(mag == 0x7fu));
}

// Rows of `length` lanes, `group` elements a lane, to group * rows rows of f32: element e of a lane goes to row
// group * r + e. This unpacks K (length 16) and V (length dims) alike.
template <int kDtype> OCT_INLINE void unpack_f32(const uint8_t* in, int rows, int length, float* out) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < length; i += kLanes) {
      int64_t at = (int64_t)r * length + i;
      if (kDtype == OCT_I8) {
        vi x = load_i32(in + 4 * at);
        float* to = out + 4 * (int64_t)r * length + i;
        store(to, to_float(x << 24 >> 24));
        store(to + length, to_float(x << 16 >> 24));
        store(to + 2 * length, to_float(x << 8 >> 24));
        store(to + 3 * length, to_float(x >> 24));
        continue;
      }
      float* to = out + 2 * (int64_t)r * length + i;
      if (kDtype == OCT_BF16 || kDtype == OCT_F16) {
        vu x = load_u32(in + 4 * at);
        store(to, kDtype == OCT_BF16 ? (vf)(x << 16) : f16_lanes(x & 0xffffu));
        store(to + length, kDtype == OCT_BF16 ? (vf)(x & 0xffff0000u) : f16_lanes(x >> 16));
      } else {
        vh h;
        memcpy(&h, in + 2 * at, sizeof h);
        vu x = __builtin_convertvector(h, vu);
        store(to, f8_lanes<kDtype>(x & 0xffu));
        store(to + length, f8_lanes<kDtype>(x >> 8));
      }
    }
}

}  // namespace OCT_ISA
}  // namespace octavo
