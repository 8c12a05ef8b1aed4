// How weights lie in memory: the same for every instruction set.
//
// A matrix [n][k] (outputs, inputs) is cut in panels of 32 outputs; a panel is one contiguous stream that a core reads
// once from front to back. k is padded with zeros to a multiple of 32. Inside a panel:
//   F32    [k][32] float
//   BF16   [k/2][32][2] bf16: pairs of k side by side, what vdpbf16ps and AMX read
//   Q8     per 32 k: [8][32][4] uint8 = weight + 128, four k side by side, then [32] f16 scales
//   Q4     per 32 k: [4][32][4] bytes; the low nibbles are k4 step j, the high ones step j + 4; then [32] f16 scales
//          (value = scale * (nibble - 8)); Q4M: and [32] f16 minima (value = scale * nibble + minimum)
//   Q4K    as Q4M, but scales and minima are bytes: value = d * scale * nibble - dmin * minimum; after each 8 groups
//          (256 k) stand [32] f16 d and [32] f16 dmin
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace octavo {

constexpr int kPanel = 32;
constexpr int kGroup = 32;

enum PackKind : int32_t { kF32 = 0, kBF16 = 1, kQ8 = 2, kQ4 = 3, kQ4M = 4, kQ4K = 5 };

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t padded_inputs(PackKind kind, int64_t k) { return round_up(k, kind == kQ4K ? 256 : kGroup); }

// Bytes of one panel of a matrix with k inputs.
inline int64_t panel_bytes(PackKind kind, int64_t k) {
  int64_t groups = padded_inputs(kind, k) / kGroup;
  switch (kind) {
    case kF32: return groups * kGroup * kPanel * 4;
    case kBF16: return groups * kGroup * kPanel * 2;
    case kQ8: return groups * (kGroup * kPanel + 2 * kPanel);
    case kQ4: return groups * (kGroup * kPanel / 2 + 2 * kPanel);
    case kQ4M: return groups * (kGroup * kPanel / 2 + 4 * kPanel);
    case kQ4K: return groups * (kGroup * kPanel / 2 + 2 * kPanel) + groups / 8 * 4 * kPanel;
  }
  return 0;
}

}  // namespace octavo
