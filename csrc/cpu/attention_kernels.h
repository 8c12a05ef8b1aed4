// Which tile products are used: by instruction set, compute type and KV dtype.
#pragma once
#include "attention_amx.h"
#include "attention_bf16.h"
#include "attention_f32.h"

namespace octavo {
namespace OCT_ISA {

#if defined(__AVX512BF16__)
template <int kDtype>
static void scores_bf16_of(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
  const uint8_t* k[kGroupTiles];
  for (int t = 0; t < tiles; t++) k[t] = bf16_operand<kDtype>(raw[t].k, dims, s.k_tiles + t * kTile * dims * 2);
#if defined(__AMX_TILE__)
  scores_amx(k, tiles, rows, dims, s);
#else
  scores_bf16_tiles(k, tiles, rows, dims, s);
#endif
}

template <int kDtype>
static void values_bf16_of(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
  const uint8_t* v[kGroupTiles];
  for (int t = 0; t < tiles; t++) {
    uint8_t* out = s.v_tiles + t * kTile * dims * 2;
    v[t] = out;
    if constexpr (kDtype == OCT_I8) unpack_v_int8(raw[t].v, dims, out, s.ahead);
    else v[t] = bf16_operand<kDtype>(raw[t].v, dims, out);
  }
#if defined(__AMX_TILE__)
  values_amx(v, tiles, rows, dims, s);
#else
  values_bf16_tiles(v, tiles, rows, dims, s);
#endif
}

static void scores_int8_of(const RawTile* raw, int tiles, int rows, int dims, AttentionScratch& s) {
#if defined(__AMX_TILE__)
  if (dims % 64 == 0) return scores_amx_int8(raw, tiles, rows, dims, s);
#endif
  scores_int8_tiles(raw, tiles, rows, dims, s);
}

#if defined(__AMX_TILE__)
constexpr auto kBeginUnit = configure_amx;
#else
constexpr void (*kBeginUnit)(int) = nullptr;
#endif

template <int kDtype> constexpr TileKernel bf16_kernel() {
  return {load_query_bf16, scores_bf16_of<kDtype>, values_bf16_of<kDtype>, true, 0.0f, kBeginUnit};
}
constexpr TileKernel int8_kernel() {
  return {load_query_int8, scores_int8_of, values_bf16_of<OCT_I8>, true, 0x1p-24f, kBeginUnit};
}
#endif

static const TileKernel& tile_kernel(int dtype, bool bf16_compute) {
  static const TileKernel f32[] = {f32_kernel<OCT_F32>(), f32_kernel<OCT_BF16>(),   f32_kernel<OCT_F16>(),
                                   f32_kernel<OCT_I8>(),  f32_kernel<OCT_F8E4M3>(), f32_kernel<OCT_F8E5M2>()};
#if defined(__AVX512BF16__)
  static const TileKernel i8 = int8_kernel(), e4m3 = bf16_kernel<OCT_F8E4M3>(), e5m2 = bf16_kernel<OCT_F8E5M2>(),
                          bf16 = bf16_kernel<OCT_BF16>();
  if (bf16_compute && dtype == OCT_BF16) return bf16;
  if (bf16_compute && dtype == OCT_I8) return i8;
  if (bf16_compute && dtype == OCT_F8E4M3) return e4m3;
  if (bf16_compute && dtype == OCT_F8E5M2) return e5m2;
#endif
  return f32[dtype];
}

}  // namespace OCT_ISA
}  // namespace octavo
