// A matrix product of a step: panels and row blocks over the threads, and what becomes of each finished tile.
#pragma once
#include "gemm_amx_int.h"
#include "gemm_bf16.h"
#include "gemm_int.h"
#include "rows.h"

namespace octavo {
namespace OCT_ISA {

// Where y = x . W^T + bias goes. Exactly one of f32 and b16 is set.
struct Target {
  enum Kind {
    kStore,     // out = scale * y, soft-capped
    kAdd,       // out += scale * y (f32 only)
    kActivate,  // out = act(y)
    kGate       // out[16 p + i] = act(y[32 p + i]) * y[32 p + 16 + i]
  } kind = kStore;
  float* f32 = nullptr;
  bf16* b16 = nullptr;
  int64_t stride = 0;  // in elements
  float scale = 1.0f, softcap = 0.0f;
  int act = 0;
};

static Target store_to(float* out, int64_t stride, float scale = 1.0f, float softcap = 0.0f) {
  Target t;
  t.f32 = out, t.stride = stride, t.scale = scale, t.softcap = softcap;
  return t;
}
static Target add_to(float* out, int64_t stride, float scale) {
  Target t = store_to(out, stride, scale);
  t.kind = Target::kAdd;
  return t;
}

// Puts up to 32 values of one row in place.
OCT_INLINE void put_values(const Target& t, int64_t at, const float* y, int n) {
  if (t.b16) {
    if (n % kLanes == 0) {
      for (int i = 0; i < n; i += kLanes) store_bf16(t.b16 + at + i, load(y + i));
    } else {
      for (int i = 0; i < n; i++) t.b16[at + i] = float_to_bf16(y[i]);
    }
  } else if (n % kLanes == 0) {
    for (int i = 0; i < n; i += kLanes) store(t.f32 + at + i, load(y + i));
  } else {
    for (int i = 0; i < n; i++) t.f32[at + i] = y[i];
  }
}

// out row = act(gates) * ups.
template <class Act> OCT_INLINE void gate_rows(const Target& t, float* tile, int rows, int64_t at, int n, Act act) {
  for (int r = 0; r < rows; r++, at += t.stride) {
    float* y = tile + r * kPanel;
    OCT_UNROLL for (int i = 0; i < kPanel / 2; i += kLanes) store(y + i, act(load(y + i)) * load(y + i + kPanel / 2));
    put_values(t, at, y, n);
  }
}

// rows x [32] values of one panel; the first output of the panel stands at `column` of the target, n of them count.
static void finish_tile(const Target& t, float* tile, int rows, int64_t row0, int64_t column, int n,
                        const float* bias) {
  if (bias)
    for (int r = 0; r < rows; r++)
      OCT_UNROLL for (int i = 0; i < kPanel; i += kLanes)
        store(tile + r * kPanel + i, load(tile + r * kPanel + i) + load(bias + i));
  if (t.kind == Target::kGate) {
    int64_t at = row0 * t.stride + column / 2;
    if (t.act == OCT_SILU) gate_rows(t, tile, rows, at, n / 2, [](vf v) { return silu(v); });
    else gate_rows(t, tile, rows, at, n / 2, [&](vf v) { return activate(t.act, v); });
    return;
  }
  for (int r = 0; r < rows; r++) {
    float* y = tile + r * kPanel;
    int64_t at = (row0 + r) * t.stride + column;
    switch (t.kind) {
      case Target::kStore:
        if (t.scale != 1.0f || t.softcap > 0)
          OCT_UNROLL for (int i = 0; i < kPanel; i += kLanes) {
            vf v = load(y + i) * splat(t.scale);
            if (t.softcap > 0) v = splat(t.softcap) * tanh(v / splat(t.softcap));
            store(y + i, v);
          }
        put_values(t, at, y, n);
        break;
      case Target::kAdd:
        if (n == kPanel) {
          OCT_UNROLL for (int i = 0; i < kPanel; i += kLanes)
            store(t.f32 + at + i, fma(load(y + i), splat(t.scale), load(t.f32 + at + i)));
        } else {
          for (int i = 0; i < n; i++) {
            float sum[kLanes];
            store(sum, fma(splat(y[i]), splat(t.scale), splat(t.f32[at + i])));
            t.f32[at + i] = sum[0];
          }
        }
        break;
      case Target::kActivate:
        OCT_UNROLL for (int i = 0; i < kPanel; i += kLanes) store(y + i, activate(t.act, load(y + i)));
        put_values(t, at, y, n);
        break;
      case Target::kGate: break;
    }
  }
}

// The rows that a kernel reads, and where the form it wants lies.
static TileInput tile_input(const Matrix& w, const Operand& a, int row, const float* widened, int64_t widened_stride) {
  TileInput in = {};
  in.groups = (int)(padded_inputs(w.kind, w.k) / kGroup);
  in.row_groups = a.groups;
  if (widened) {
    in.a = widened + row * widened_stride, in.stride = widened_stride;
  } else if (form_of(w.kind) == kFormF32) {
    in.a = a.f32 + (int64_t)row * a.f32_stride, in.stride = a.f32_stride;
  } else if (form_of(w.kind) == kFormBF16) {
    in.a = a.b16 + (int64_t)row * a.bf16_stride, in.stride = a.bf16_stride;
  } else {
    in.a = a.q8 + (int64_t)row * a.q8_stride, in.stride = a.q8_stride;
    in.scale = a.scale + (int64_t)row * a.groups, in.sum = a.sum + (int64_t)row * a.groups;
  }
  return in;
}

// Sets without bf16 products read bf16 rows as float: widened once per product and thread.
static const float* widen_rows(const Operand& a, int row0, int rows, Buffer& scratch, int64_t& stride) {
  stride = row_stride_bytes((int64_t)a.groups * kGroup * 4) / 4;
  float* to = scratch.reserve_array<float>((int64_t)(rows + kPanel) * stride);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < a.groups * kGroup; i += kLanes)
      store(to + r * stride + i, load_bf16(a.b16 + (int64_t)(row0 + r) * a.bf16_stride + i));
  return to;
}

constexpr Kernel kF32Kernel = float_kernel<false>();

// The kernel for so many rows. Kernels of one kind give the same bits; from some rows on another one is faster.
static const Kernel& kernel_of(PackKind kind, int rows) {
#if defined(__AMX_INT8__)
  const bool many = rows > 32;
  if (many && kind == kQ8) return kManyQ8;
  if (many && kind == kQ4) return kManyQ4;
  if (many && kind == kQ4M) return kManyQ4M;
  if (many && kind == kQ4K) return kManyQ4K;
#endif
  (void)rows;
  switch (kind) {
    case kF32: return kF32Kernel;
    case kBF16: return kBF16Kernel;
    case kQ8: return kQ8Kernel;
    case kQ4: return kQ4Kernel;
    case kQ4M: return kQ4MKernel;
    case kQ4K: break;
  }
  return kQ4KKernel;
}

// Rows of the operand that are worked on together: equal blocks of what leaves an L2 cache room for the rest, so that
// each panel finds them there. (The panels come again for the next block.)
static int row_block(const Kernel& kernel, int rows, int64_t row_bytes) {
  int64_t most = (3 << 18) / row_bytes;
  if (most < 4 * kernel.max_rows) most = 4 * kernel.max_rows;
  int blocks = (int)((rows + most - 1) / most);
  return (int)round_up((rows + blocks - 1) / blocks, kernel.max_rows);
}

// What thread `thread` of `threads` does of rows [row0, row0 + rows) of `a` times w. Outputs start at `column` of the
// target. The threads share nothing; the caller puts a barrier behind it.
static void multiply(const Matrix& w, const Operand& a, int row0, int rows, const Target& target, int64_t column,
                     int thread, int threads, Buffer& scratch) {
  const Kernel& kernel = kernel_of(w.kind, rows);
  const int panels = (w.n + kPanel - 1) / kPanel;
  const int64_t bytes = panel_bytes(w.kind, w.k);
  // More threads than panels: cut the rows as well.
  int row_cuts = threads > panels ? (threads + panels - 1) / panels : 1;
  if (row_cuts > rows) row_cuts = rows;
  Range items = range(panels * row_cuts, thread, threads);
  if (items.begin == items.end) return;
  const float* widened = nullptr;
  int64_t widened_stride = 0;
  if (w.kind == kBF16 && !kNativeBF16) widened = widen_rows(a, row0, rows, scratch, widened_stride);
  const int form = form_of(w.kind), element_bytes = widened || form == kFormF32 ? 4 : form == kFormBF16 ? 2 : 1;
  const int block = row_block(kernel, rows, tile_input(w, a, 0, widened, widened_stride).stride * element_bytes);
  if (kernel.prepare) kernel.prepare();
  const int groups = (int)(padded_inputs(w.kind, w.k) / kGroup);
  uint8_t* unpacked = kernel.unpack ? scratch.reserve_array<uint8_t>((int64_t)groups * kUnpackedBytes) : nullptr;
  const int ahead_lines = (int)(bytes / groups + 63) / 64;
  alignas(64) float tile[32 * kPanel];
  for (int start = 0; start < rows; start += block) {
    for (int item = items.begin; item < items.end; item++) {
      int panel = item / row_cuts, end = start + block < rows ? start + block : rows;
      Range cut = range(end - start, item % row_cuts, row_cuts, kernel.grain);
      int n = cut.end - cut.begin, tiles = (n + kernel.max_rows - 1) / kernel.max_rows;
      const float* bias = w.bias ? w.bias + panel * kPanel : nullptr;
      int outputs = w.n - panel * kPanel < kPanel ? w.n - panel * kPanel : kPanel;
      const uint8_t* weights = w.data + panel * bytes;
      if (kernel.unpack) {
        kernel.unpack(weights, groups, unpacked);
        weights = unpacked;
      }
      for (int t = 0; t < tiles; t++) {
        Range part = range(n, t, tiles, kernel.grain);
        int first = start + cut.begin + part.begin, count = part.end - part.begin;
        if (count == 0) continue;
        TileInput in = tile_input(w, a, widened ? first : row0 + first, widened, widened_stride);
        in.ahead_lines = ahead_lines / tiles;
        in.ahead = w.data + (panel + 1) * bytes + (int64_t)t * in.groups * in.ahead_lines * 64;
        kernel.tile[count](weights, in, tile);
        finish_tile(target, tile, count, row0 + first, column + panel * kPanel, outputs, bias);
      }
    }
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
