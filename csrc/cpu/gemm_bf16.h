// bf16 weights: with vdpbf16ps where the set has it, else widened to float.
#pragma once
#include "gemm.h"
#include "tiles.h"

namespace octavo {
namespace OCT_ISA {

#if defined(__AMX_BF16__)
constexpr bool kNativeBF16 = true;

// 16 or 32 rows times a panel. A step adds 32 k to each accumulator, for one row as for 32.
template <bool kTwo>
static __attribute__((noinline)) void amx_tile(const uint8_t* panel, const TileInput& in, float* out) {
  const bf16* a = (const bf16*)in.a;
  const bf16* a2 = a + 16 * in.stride;
  const uint8_t* ahead = in.ahead;
  const int64_t a_bytes = in.stride * 2, w_bytes = kPanel * 4;
  tiles_fence();
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) _tile_zero(2);
  if (kTwo) _tile_zero(3);
  for (int g = 0; g < in.groups; g++, a += 32, a2 += 32, panel += 2048) {
    _tile_loadd(6, panel, w_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 64, w_bytes);
    _tile_dpbf16ps(1, 4, 7);
    for (int line = 0; line < in.ahead_lines; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
    ahead += in.ahead_lines * 64;
    if (kTwo) _tile_loadd(5, a2, a_bytes);
    if (kTwo) _tile_dpbf16ps(2, 5, 6);
    if (kTwo) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kPanel * 4);
  _tile_stored(1, out + 16, kPanel * 4);
  if (kTwo) _tile_stored(2, out + 16 * kPanel, kPanel * 4);
  if (kTwo) _tile_stored(3, out + 16 * kPanel + 16, kPanel * 4);
  tiles_fence();
}

constexpr Kernel amx_kernel() {
  Kernel k = {32, 16, [] { configure_tiles(64); }, nullptr, {}};
  for (int rows = 1; rows <= 32; rows++) k.tile[rows] = rows <= 16 ? amx_tile<false> : amx_tile<true>;
  return k;
}
constexpr Kernel kBF16Kernel = amx_kernel();
#elif defined(__AVX512BF16__)
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
constexpr Kernel kBF16Kernel = {12, 1, nullptr, nullptr,
                                {nullptr, bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>, bf16_tile<5>,
                                 bf16_tile<6>, bf16_tile<7>, bf16_tile<8>, bf16_tile<9>, bf16_tile<10>, bf16_tile<11>,
                                 bf16_tile<12>}};
#else
constexpr bool kNativeBF16 = false;
constexpr Kernel kBF16Kernel = float_kernel<true>();
#endif

}  // namespace OCT_ISA
}  // namespace octavo
