// From a checkpoint's rows (dense or GGUF blocks) to packed panels. Portable code: it runs once a load.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "pack.h"

namespace octavo {

constexpr int kGgmlQ4_0 = 2, kGgmlQ4_1 = 3, kGgmlQ8_0 = 8, kGgmlQ4K = 12;

inline int packed_kind(int ggml_type) {
  switch (ggml_type) {
    case kGgmlQ4_0: return kQ4;
    case kGgmlQ4_1: return kQ4M;
    case kGgmlQ8_0: return kQ8;
    case kGgmlQ4K: return kQ4K;
  }
  return -1;
}

// The scalar conversions all round to nearest, ties to even.
inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fffu, u = mag << 13;
  float f;
  if (mag >= 0x7c00) {
    u |= 0x7f800000u;
  } else {
    memcpy(&f, &u, 4);
    f *= 0x1p112f;  // the exponent bias differs by 112; also normalises denormals
    memcpy(&u, &f, 4);
  }
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}
inline uint16_t float_to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00;
  if (u >= 0x477ff000u) return sign | 0x7c00;  // rounds to infinity
  if (u < 0x38800000u) {                       // a denormal half: let a float addition round it
    float magnitude, shift = 0.5f;
    memcpy(&magnitude, &u, 4);
    magnitude += shift;
    memcpy(&u, &magnitude, 4);
    return sign | (uint16_t)(u - 0x3f000000u);
  }
  u += 0xfffu + (u >> 13 & 1) - (112u << 23);
  return sign | (uint16_t)(u >> 13);
}
inline float brain_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline uint16_t float_to_brain(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

// Rows of a checkpoint tensor.
struct Source {
  const uint8_t* data = nullptr;
  int dtype = OCT_F32;  // of dense data
  int ggml = 0;         // else the type of the blocks

  int64_t row_bytes(int64_t cols) const {
    switch (ggml) {
      case kGgmlQ4_0: return cols / 32 * 18;
      case kGgmlQ4_1: return cols / 32 * 20;
      case kGgmlQ8_0: return cols / 32 * 34;
      case kGgmlQ4K: return cols / 256 * 144;
    }
    return cols * (dtype == OCT_F32 ? 4 : 2);
  }
  float scalar(int64_t i) const {  // dense only
    if (dtype == OCT_F32) {
      float f;
      memcpy(&f, data + i * 4, 4);
      return f;
    }
    uint16_t h;
    memcpy(&h, data + i * 2, 2);
    return dtype == OCT_BF16 ? brain_to_float(h) : half_to_float(h);
  }
};

// Where row r of a tensor goes among the stored outputs: runs of `run` rows, each followed by room for the others.
struct Columns {
  int run, first;
  int64_t at(int64_t r) const { return r / run * kPanel + first + r % run; }
};

// Scales and minima of a Q4_K super-block: eight 6-bit pairs in 12 bytes.
inline void q4k_scale(const uint8_t* packed, int group, uint8_t& scale, uint8_t& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
    minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
  }
}

// Writes the 32 values of group g of one output: q are bytes (weight + 128) or nibbles, one a value.
inline void put_group(PackKind kind, uint8_t* group, int column, const uint8_t* q) {
  for (int i = 0; i < kGroup; i++) {
    int step = i / 4, byte = i % 4;
    if (kind == kQ8) group[(step * kPanel + column) * 4 + byte] = q[i];
    else group[(step % 4 * kPanel + column) * 4 + byte] |= step < 4 ? q[i] : (uint8_t)(q[i] << 4);
  }
}

inline void pack_dense_row(const Source& s, int64_t r, int64_t cols, PackKind kind, uint8_t* panel, int column) {
  if (kind == kF32) {
    for (int64_t k = 0; k < cols; k++) ((float*)panel)[k * kPanel + column] = s.scalar(r * cols + k);
  } else if (kind == kBF16 && s.dtype == OCT_BF16) {
    const uint8_t* row = s.data + r * cols * 2;
    for (int64_t k = 0; k < cols; k++) memcpy(panel + ((k / 2 * kPanel + column) * 2 + k % 2) * 2, row + k * 2, 2);
  } else if (kind == kBF16) {
    for (int64_t k = 0; k < cols; k++)
      ((uint16_t*)panel)[(k / 2 * kPanel + column) * 2 + k % 2] = float_to_brain(s.scalar(r * cols + k));
  } else {  // kQ8, quantised here: scale = largest magnitude / 127
    constexpr int64_t kBytes = kGroup * kPanel + 2 * kPanel;
    for (int64_t g = 0; g * kGroup < cols; g++) {
      float x[kGroup] = {}, largest = 0;
      for (int i = 0; i < kGroup && g * kGroup + i < cols; i++) {
        x[i] = s.scalar(r * cols + g * kGroup + i);
        largest = fmaxf(largest, fabsf(x[i]));
      }
      uint16_t half = float_to_half(largest / 127);
      float scale = half_to_float(half);
      uint8_t q[kGroup];
      for (int i = 0; i < kGroup; i++) {
        float v = scale > 0 ? rintf(x[i] / scale) : 0;
        q[i] = (uint8_t)(128 + (int)fmaxf(-127, fminf(127, v)));
      }
      uint8_t* group = panel + g * kBytes;
      put_group(kind, group, column, q);
      memcpy(group + kGroup * kPanel + 2 * column, &half, 2);
    }
  }
}

inline void pack_block_row(const Source& s, int64_t r, int64_t cols, PackKind kind, uint8_t* panel, int column) {
  const uint8_t* block = s.data + r * s.row_bytes(cols);
  const int64_t nibble_bytes = kGroup * kPanel / 2;
  for (int64_t g = 0; g < cols / kGroup; g++) {
    uint8_t q[kGroup];
    if (kind == kQ8) {
      uint8_t* group = panel + g * (kGroup * kPanel + 2 * kPanel);
      for (int i = 0; i < kGroup; i++) q[i] = (uint8_t)(block[2 + i] + 128);
      put_group(kind, group, column, q);
      memcpy(group + kGroup * kPanel + 2 * column, block, 2);
      block += 34;
    } else if (kind == kQ4 || kind == kQ4M) {
      int head = kind == kQ4 ? 2 : 4;
      uint8_t* group = panel + g * (nibble_bytes + head * kPanel);
      for (int i = 0; i < 16; i++) q[i] = block[head + i] & 15, q[i + 16] = block[head + i] >> 4;
      put_group(kind, group, column, q);
      memcpy(group + nibble_bytes + 2 * column, block, 2);
      if (kind == kQ4M) memcpy(group + nibble_bytes + 2 * kPanel + 2 * column, block + 2, 2);
      block += head + 16;
    } else {  // kQ4K: a block is 256 values: d, dmin, 12 bytes of scales, then 4 x 32 bytes of two groups each
      int64_t in = g % 8;
      const int64_t group_bytes = nibble_bytes + 2 * kPanel, super_bytes = 8 * group_bytes + 4 * kPanel;
      uint8_t* super = panel + g / 8 * super_bytes;
      uint8_t* group = super + in * group_bytes;
      const uint8_t* nibbles = block + 16 + in / 2 * 32;
      for (int i = 0; i < kGroup; i++) q[i] = in % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
      put_group(kind, group, column, q);
      q4k_scale(block + 4, (int)in, group[nibble_bytes + column], group[nibble_bytes + kPanel + column]);
      if (in == 7) {
        memcpy(super + 8 * group_bytes + 2 * column, block, 2);
        memcpy(super + 8 * group_bytes + 2 * kPanel + 2 * column, block + 2, 2);
        block += 144;
      }
    }
  }
}

// Outputs that pad the last panel are left zero: their scales are zero.
inline void pack_rows(const Source& s, int64_t rows, int64_t cols, PackKind kind, Columns columns, uint8_t* out) {
  int64_t bytes = panel_bytes(kind, cols);
  for (int64_t r = 0; r < rows; r++) {
    int64_t column = columns.at(r);
    uint8_t* panel = out + column / kPanel * bytes;
    if (s.ggml) pack_block_row(s, r, cols, kind, panel, (int)(column % kPanel));
    else pack_dense_row(s, r, cols, kind, panel, (int)(column % kPanel));
  }
}

}  // namespace octavo
