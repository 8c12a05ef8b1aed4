// Activations that go into a product, row by row, in the forms that its weights want.
#pragma once
#include "buffer.h"
#include "pack.h"
#include "simd.h"

namespace octavo {
namespace OCT_ISA {

enum Form { kFormF32 = 1, kFormBF16 = 2, kFormQ8 = 4 };
inline int form_of(PackKind kind) { return kind == kF32 ? kFormF32 : kind == kBF16 ? kFormBF16 : kFormQ8; }

// Bytes from row to row: an odd number of cache lines, so that the rows of a tile don't fall in one cache set.
OCT_INLINE int64_t row_stride_bytes(int64_t bytes) {
  int64_t lines = (bytes + 63) / 64;
  return (lines | 1) * 64;
}

// Inputs are padded with zeros to whole groups; rows may be read up to 31 past the last.
struct Operand {
  int k = 0, groups = 0;
  int f32_stride = 0, bf16_stride = 0, q8_stride = 0;  // in elements
  float* f32 = nullptr;
  bf16* b16 = nullptr;
  int8_t* q8 = nullptr;       // value = scale * q8, one scale per row and group of 32
  float* scale = nullptr;     // [row][groups]
  int32_t* sum = nullptr;     // [row][groups], sum of the group's q8
  Buffer buffers[5];

  void reserve(int rows, int inputs, int forms) {
    k = inputs;
    int padded = (int)round_up(inputs, 256);  // kQ4K has groups of 256
    groups = padded / kGroup;
    int64_t n = rows + kPanel;
    if (forms & kFormF32) {
      f32_stride = (int)(row_stride_bytes(padded * 4) / 4);
      f32 = buffers[0].reserve_array<float>(n * f32_stride);
    }
    if (forms & kFormBF16) {
      bf16_stride = (int)(row_stride_bytes(padded * 2) / 2);
      b16 = buffers[1].reserve_array<bf16>(n * bf16_stride);
    }
    if (forms & kFormQ8) {
      q8_stride = (int)row_stride_bytes(padded);
      q8 = buffers[2].reserve_array<int8_t>(n * q8_stride);
      scale = buffers[3].reserve_array<float>(n * groups);
      sum = buffers[4].reserve_array<int32_t>(n * groups);
    }
  }
};

// One group of 32 values: the largest magnitude becomes 127.
OCT_INLINE void quantise_group(const float* x, int8_t* q, float* scale, int32_t* group_sum) {
  vf top = {};
  for (int i = 0; i < kGroup; i += kLanes) top = max(abs(load(x + i)), top);
  float largest = max_lane(top), inverse = largest > 0 ? 127.0f / largest : 0.0f;
  vi total = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    vi r = round_to_int(load(x + i) * splat(inverse));
    total += r;
    vb bytes = __builtin_convertvector(r, vb);
    memcpy(q + i, &bytes, sizeof bytes);
  }
  *scale = largest * (1.0f / 127.0f);
  *group_sum = sum_i32(total);
}

// Writes row r in every wanted form. x has round_up(k, 256) values, zero from k on.
static void put_row(Operand& a, int forms, int r, const float* x) {
  int padded = a.groups * kGroup;
  if (forms & kFormF32) {
    float* to = a.f32 + (int64_t)r * a.f32_stride;
    for (int i = 0; i < padded; i += kLanes) store(to + i, load(x + i));
  }
  if (forms & kFormBF16) {
    bf16* to = a.b16 + (int64_t)r * a.bf16_stride;
    for (int i = 0; i < padded; i += kLanes) store_bf16(to + i, load(x + i));
  }
  if (forms & kFormQ8)
    for (int g = 0; g < a.groups; g++)
      quantise_group(x + g * kGroup, a.q8 + (int64_t)r * a.q8_stride + g * kGroup, a.scale + (int64_t)r * a.groups + g,
                     a.sum + (int64_t)r * a.groups + g);
}

}  // namespace OCT_ISA
}  // namespace octavo
