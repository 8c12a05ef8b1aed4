// y = x . W^T over packed panels, for any number of rows.
//
// The bits of y[row][output] come from one accumulator that walks k upwards; tiles differ only in how many rows and
// outputs they do side by side. That is what makes a row independent of its batch: never split k.
#pragma once
#include "model.h"
#include "operand.h"
#include "threads.h"

namespace octavo {
namespace OCT_ISA {

// A tile: `rows` rows (up to a kernel's max_rows) times one panel, out[row][32].
// `a` points at the first row of the form the kernel wants.
struct TileInput {
  const void* a;       // rows of float, bf16 or int8
  int64_t stride;      // in elements
  const float* scale;  // int8: [row][groups]
  const int32_t* sum;
  int groups;          // groups of 32 inputs that the panel holds
  int row_groups;      // from row to row of scale and sum
  const uint8_t* ahead;  // what to prefetch meanwhile, this many cache lines for each group
  int ahead_lines;
};
typedef void (*TileFn)(const uint8_t* panel, const TileInput& in, float* out);

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2;  // 24 accumulators of 32 registers
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;   // 12 of 16
#endif
constexpr int kPanelVectors = kPanel / kLanes;

// Weights of one k for kTileVectors * kLanes outputs. bf16 pairs lie side by side: even k in the low half.
template <bool kBrain> OCT_INLINE void load_weights(const uint8_t* at, vf* even, vf* odd) {
  OCT_UNROLL for (int v = 0; v < kTileVectors; v++) {
    if (kBrain) {
      vu w = load_u32(at + v * kLanes * 4);
      even[v] = (vf)(w << 16);
      odd[v] = (vf)(w & 0xffff0000u);
    } else {
      even[v] = load((const float*)at + v * kLanes);
      odd[v] = load((const float*)at + v * kLanes + kPanel);
    }
  }
}

template <bool kBrain, int MR>
static __attribute__((noinline)) void float_tile(const uint8_t* panel, const TileInput& in, float* out) {
  constexpr int kPairBytes = kPanel * (kBrain ? 4 : 8), kStripBytes = kTileVectors * kLanes * 4;
  const float* a = (const float*)in.a;
  const int64_t stride = in.stride;
  const int pairs = in.groups * kGroup / 2;
  for (int strip = 0; strip < kPanelVectors / kTileVectors; strip++) {
    const uint8_t* w = panel + strip * kStripBytes;
    vf acc[MR][kTileVectors];
    OCT_UNROLL for (int r = 0; r < MR; r++) OCT_UNROLL for (int v = 0; v < kTileVectors; v++) acc[r][v] = vf{};
    for (int p = 0; p < pairs; p++, w += kPairBytes) {
      vf even[kTileVectors], odd[kTileVectors];
      load_weights<kBrain>(w, even, odd);
      __builtin_prefetch(w + 4096);
      OCT_UNROLL for (int r = 0; r < MR; r++) {
        vf x = splat(a[r * stride + 2 * p]);
        OCT_UNROLL for (int v = 0; v < kTileVectors; v++) acc[r][v] = fma(x, even[v], acc[r][v]);
      }
      OCT_UNROLL for (int r = 0; r < MR; r++) {
        vf x = splat(a[r * stride + 2 * p + 1]);
        OCT_UNROLL for (int v = 0; v < kTileVectors; v++) acc[r][v] = fma(x, odd[v], acc[r][v]);
      }
    }
    OCT_UNROLL for (int r = 0; r < MR; r++)
      OCT_UNROLL for (int v = 0; v < kTileVectors; v++)
        store(out + r * kPanel + (strip * kTileVectors + v) * kLanes, acc[r][v]);
  }
}

// Tile functions for 1 .. max_rows rows.
constexpr int kUnpackedBytes = 1280;
struct Kernel {
  int max_rows;
  int grain;          // rows cost the same up to a multiple of this
  void (*prepare)();  // before the first tile of a product, or NULL
  // Tiles read this form of a panel, made once for all its rows; NULL: as it lies. At most kUnpackedBytes a group.
  void (*unpack)(const uint8_t* panel, int groups, uint8_t* to);
  TileFn tile[33];
};
template <bool kBrain> constexpr Kernel float_kernel() {
  return {kTileRows, 1, nullptr, nullptr,
          {nullptr, float_tile<kBrain, 1>, float_tile<kBrain, 2>, float_tile<kBrain, 3>, float_tile<kBrain, 4>,
           float_tile<kBrain, 5>, float_tile<kBrain, 6>,
#if defined(__AVX512F__)
           float_tile<kBrain, 7>, float_tile<kBrain, 8>, float_tile<kBrain, 9>, float_tile<kBrain, 10>,
           float_tile<kBrain, 11>, float_tile<kBrain, 12>,
#endif
          }};
}

}  // namespace OCT_ISA
}  // namespace octavo

