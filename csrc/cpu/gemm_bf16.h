// bf16 weights: with vdpbf16ps where the set has it, else widened to float.
#pragma once
#include "gemm.h"
#include "tiles.h"

namespace octavo {
namespace OCT_ISA {

#if defined(__AMX_BF16__)
constexpr bool kNativeBF16 = true;

// One visit of up to 32 rows to a slab of a panel: some of its groups of 32 k. A step adds 32 k to each accumulator, for
// one row as for 32; between two slabs the accumulators lie in memory, which changes no bit.
struct AmxVisit {
  const uint8_t* w;        // the slab
  const bf16* a;           // first row, at the slab's first k
  int64_t stride;          // from row to row of a, in elements
  int groups;
  bool first, fetch_w;     // the first slab of the panel; the weights are not in L1 yet
  const uint8_t* ahead;    // what to fetch into L2 meanwhile, so many cache lines for each group
  int ahead_lines;
};

// `between()` is called after each group: vector work that is done while the tile unit is busy.
template <bool kTwo, class F> OCT_INLINE void amx_visit(const AmxVisit& v, float* c, F between) {
  constexpr int kAhead = 3;  // groups
  const int64_t a_bytes = v.stride * 2, w_bytes = kPanel * 4, c_bytes = kPanel * 4;
  const bf16 *a = v.a, *a2 = a + 16 * v.stride;
  const uint8_t *w = v.w, *ahead = v.ahead;
  tiles_fence();
  if (v.first) {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) _tile_zero(2);
    if (kTwo) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    if (kTwo) _tile_loadd(2, c + 16 * kPanel, c_bytes);
    if (kTwo) _tile_loadd(3, c + 16 * kPanel + 16, c_bytes);
  }
  for (int g = 0; g < v.groups; g++, a += 32, a2 += 32, w += 2048) {
    _tile_loadd(6, w, w_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 64, w_bytes);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) _tile_loadd(5, a2, a_bytes);
    if (kTwo) _tile_dpbf16ps(2, 5, 6);
    if (kTwo) _tile_dpbf16ps(3, 5, 7);
    if (v.fetch_w)
      OCT_UNROLL for (int line = 0; line < 32; line++) __builtin_prefetch(w + kAhead * 2048 + line * 64);
    for (int line = 0; line < v.ahead_lines; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
    ahead += v.ahead_lines * 64;
    between();
  }
  tiles_fence();
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  if (kTwo) _tile_stored(2, c + 16 * kPanel, c_bytes);
  if (kTwo) _tile_stored(3, c + 16 * kPanel + 16, c_bytes);
  tiles_fence();
}

// multiply() (product.h) has a way of its own for these tiles.
constexpr Kernel amx_kernel() { return {32, 16, [] { configure_tiles(64); }, nullptr, {}}; }
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
