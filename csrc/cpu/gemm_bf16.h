// bf16 weights: with vdpbf16ps where the set has it, else widened to float.
#pragma once
#include "gemm.h"

namespace octavo {
namespace OCT_ISA {

// Around a step, on every thread.
static void tiles_begin() {}
static void tiles_end() {}

#if defined(__AVX512BF16__)
constexpr bool kNativeBF16 = true;

// A step adds a pair of k. Even and odd products are rounded as the instruction does it, the same for every MR.
template <int MR>
static __attribute__((noinline)) void bf16_tile(const uint8_t* panel, const TileInput& in, float* out) {
  const bf16* a = (const bf16*)in.a;
  const int64_t stride = in.stride;
  const int pairs = in.groups * kGroup / 2;
  __m512 acc[MR][2];
  OCT_UNROLL for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int p = 0; p < pairs; p++, panel += 128) {
    __m512i b0 = _mm512_load_si512(panel), b1 = _mm512_load_si512(panel + 64);
    asm volatile("" : "+v"(b0), "+v"(b1));  // or GCC reloads them for each row
    __builtin_prefetch(panel + 4096);
    __builtin_prefetch(panel + 4096 + 64);
    OCT_UNROLL for (int r = 0; r < MR; r++) {
      int32_t pair;
      memcpy(&pair, a + r * stride + 2 * p, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, (__m512bh)b0);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, (__m512bh)b1);
    }
  }
  OCT_UNROLL for (int r = 0; r < MR; r++) {
    _mm512_storeu_ps(out + r * kPanel, acc[r][0]);
    _mm512_storeu_ps(out + r * kPanel + 16, acc[r][1]);
  }
}
constexpr Kernel kBF16Kernel = {12,
                                {nullptr, bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>, bf16_tile<5>,
                                 bf16_tile<6>, bf16_tile<7>, bf16_tile<8>, bf16_tile<9>, bf16_tile<10>, bf16_tile<11>,
                                 bf16_tile<12>}};
#else
constexpr bool kNativeBF16 = false;
constexpr Kernel kBF16Kernel = float_kernel<true>();
#endif

}  // namespace OCT_ISA
}  // namespace octavo
