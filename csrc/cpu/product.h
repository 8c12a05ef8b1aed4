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

// One of the products of a phase: rows [row0, row0 + rows) of an operand times a matrix. Row r goes to row r of the
// target, output 0 to its column `column`.
struct Product {
  const Matrix* w;
  const Operand* a;
  int row0, rows;
  Target target;
  int64_t column;
  int cuts = 0;  // of the rows; run_products sets it

  int panels() const { return (w->n + kPanel - 1) / kPanel; }
};

// Sets without bf16 products read bf16 rows as float. A thread widens the rows once for all the panels that it takes.
struct Widened {
  Buffer buffer;
  const bf16* of = nullptr;  // the rows that are in the buffer
  int rows = 0;
  int64_t stride = 0;

  const float* get(const Operand& a, int row0, int n) {
    const bf16* from = a.b16 + (int64_t)row0 * a.bf16_stride;
    if (of == from && rows == n) return buffer.as<float>();
    stride = row_stride_bytes((int64_t)a.groups * kGroup * 4) / 4;
    float* to = buffer.reserve_array<float>((int64_t)(n + kPanel) * stride);
    for (int r = 0; r < n; r++)
      for (int i = 0; i < a.groups * kGroup; i += kLanes)
        store(to + r * stride + i, load_bf16(from + (int64_t)r * a.bf16_stride + i));
    of = from, rows = n;
    return to;
  }
};

// A thread's own memory for products. forget() at the start of each phase: operands change between them.
struct ProductScratch {
  Buffer unpacked, sums;
  Widened widened;
  void forget() { widened.of = nullptr; }
};

// What a kernel reads of the rows from row0 on; `row` below counts from there.
class Rows {
 public:
  Rows(const Product& p, ProductScratch& scratch) : groups_((int)(padded_inputs(p.w->kind, p.w->k) / kGroup)) {
    const Operand& a = *p.a;
    row_groups_ = a.groups;
    int form = form_of(p.w->kind);
    if (form == kFormBF16 && !kNativeBF16) {
      data_ = (const uint8_t*)scratch.widened.get(a, p.row0, p.rows);
      stride_ = scratch.widened.stride, element_ = 4;
    } else if (form == kFormF32) {
      data_ = (const uint8_t*)(a.f32 + (int64_t)p.row0 * a.f32_stride), stride_ = a.f32_stride, element_ = 4;
    } else if (form == kFormBF16) {
      data_ = (const uint8_t*)(a.b16 + (int64_t)p.row0 * a.bf16_stride), stride_ = a.bf16_stride, element_ = 2;
    } else {
      data_ = (const uint8_t*)(a.q8 + (int64_t)p.row0 * a.q8_stride), stride_ = a.q8_stride, element_ = 1;
      scale_ = a.scale + (int64_t)p.row0 * a.groups, sum_ = a.sum + (int64_t)p.row0 * a.groups;
    }
  }
  TileInput from(int row) const {
    TileInput in = {};
    in.a = data_ + row * stride_ * element_, in.stride = stride_;
    if (scale_) in.scale = scale_ + (int64_t)row * row_groups_, in.sum = sum_ + (int64_t)row * row_groups_;
    in.groups = groups_, in.row_groups = row_groups_;
    return in;
  }
  int groups() const { return groups_; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t stride_ = 0;
  int element_ = 0, groups_, row_groups_;
  const float* scale_ = nullptr;
  const int32_t* sum_ = nullptr;
};

#if defined(__AMX_BF16__)
// The tile whose sums are complete: its rows are finished one by one between the products of the next one.
struct Unfinished {
  const Target& target;
  float* sums = nullptr;
  int left = 0;  // rows
  int64_t row = 0, column = 0;
  int outputs = 0;
  const float* bias = nullptr;

  void some(int rows) {
    if (rows > left) rows = left;
    if (rows == 0) return;
    finish_tile(target, sums, rows, row, column, outputs, bias);
    sums += rows * kPanel, row += rows, left -= rows;
  }
};

// multiply() for bf16 weights. A slab of a panel stays in L1 while all rows of the cut go by.
static void multiply_amx(const Product& p, Range panels, Range cut, ProductScratch& scratch) {
  constexpr int kSlabGroups = 9;
  const Matrix& w = *p.w;
  const Rows rows(p, scratch);
  const TileInput in = rows.from(cut.begin);
  const bf16* a = (const bf16*)in.a;
  const int groups = in.groups, n = cut.end - cut.begin, tiles = (n + 31) / 32;
  const int slabs = tiles > 1 ? (groups + kSlabGroups - 1) / kSlabGroups : 1;
  const int64_t bytes = panel_bytes(w.kind, w.k);
  float* sums = scratch.sums.reserve_array<float>((int64_t)tiles * 32 * kPanel);
  Unfinished before = {p.target};
  configure_tiles(64);
  for (int panel = panels.begin; panel < panels.end; panel++) {
    const uint8_t *packed = w.data + panel * bytes, *ahead = packed + bytes;
    for (int slab = 0; slab < slabs; slab++) {
      const Range part = range(groups, slab, slabs);
      for (int t = 0; t < tiles; t++) {
        const int count = n - t * 32 < 32 ? n - t * 32 : 32;
        AmxVisit v;
        v.w = packed + part.begin * 2048;
        v.stride = in.stride;
        v.a = a + t * 32 * v.stride + part.begin * 32;
        v.groups = part.end - part.begin;
        v.first = slab == 0, v.fetch_w = t == 0;
        v.ahead = ahead, v.ahead_lines = 32 / tiles;
        ahead += v.groups * v.ahead_lines * 64;
        const int each = (before.left + v.groups - 1) / v.groups;
        auto between = [&]() __attribute__((always_inline)) { before.some(each); };
        float* c = sums + t * 32 * kPanel;
        if (count > 16) amx_visit<true>(v, c, between);
        else amx_visit<false>(v, c, between);
        if (slab + 1 < slabs) continue;
        before.sums = c, before.left = count, before.row = p.row0 + cut.begin + t * 32;
        before.column = p.column + panel * kPanel;
        before.outputs = w.n - panel * kPanel < kPanel ? w.n - panel * kPanel : kPanel;
        before.bias = w.bias ? w.bias + panel * kPanel : nullptr;
      }
    }
  }
  before.some(32);
}
#endif

// The panels [panels.begin, panels.end) for the rows `cut` of a product.
static void multiply(const Product& p, Range panels, Range cut, ProductScratch& scratch) {
  const Matrix& w = *p.w;
#if defined(__AMX_BF16__)
  if (w.kind == kBF16) return multiply_amx(p, panels, cut, scratch);
#endif
  const Kernel& kernel = kernel_of(w.kind, p.rows);
  const Rows rows(p, scratch);
  const int groups = rows.groups(), n = cut.end - cut.begin, tiles = (n + kernel.max_rows - 1) / kernel.max_rows;
  const int64_t bytes = panel_bytes(w.kind, w.k);
  const int ahead_lines = (int)(bytes / groups + 63) / 64 / tiles;
  uint8_t* unpacked = kernel.unpack ? scratch.unpacked.reserve_array<uint8_t>((int64_t)groups * kUnpackedBytes) : nullptr;
  if (kernel.prepare) kernel.prepare();
  alignas(64) float tile[32 * kPanel];
  for (int panel = panels.begin; panel < panels.end; panel++) {
    const uint8_t* packed = w.data + panel * bytes;
    if (kernel.unpack) kernel.unpack(packed, groups, unpacked);
    const float* bias = w.bias ? w.bias + panel * kPanel : nullptr;
    const int outputs = w.n - panel * kPanel < kPanel ? w.n - panel * kPanel : kPanel;
    for (int t = 0; t < tiles; t++) {
      Range part = range(n, t, tiles, kernel.grain);
      int first = cut.begin + part.begin, count = part.end - part.begin;
      if (count == 0) continue;
      TileInput in = rows.from(first);
      in.ahead_lines = ahead_lines;
      in.ahead = packed + bytes + (int64_t)t * groups * ahead_lines * 64;
      kernel.tile[count](unpacked ? unpacked : packed, in, tile);
      finish_tile(p.target, tile, count, p.row0 + first, p.column + panel * kPanel, outputs, bias);
    }
  }
}

// In how many cuts the rows of a product are worked on: what an L2 cache holds beside the rest at a time, and enough
// that `threads` have three panels each. Many rows are shared out among the threads, which then find in their caches
// what they wrote the phase before; few are not, so that each weight is read by one thread only.
constexpr int kOwnRows = 128;
static int row_cuts(const Product& p, int panels, int threads) {
  const int most = (p.rows + kPanel - 1) / kPanel;
  int64_t bytes = (int64_t)p.rows * p.w->k * (form_of(p.w->kind) == kFormQ8 ? 1 : kNativeBF16 ? 2 : 4);
  int cuts = (int)((bytes + (3 << 18) - 1) / (3 << 18));
  if (panels * cuts < threads * 3) cuts = (threads * 3 + panels - 1) / panels;
  if (p.rows >= kOwnRows * threads) cuts = (int)round_up(cuts, threads);
  return cuts < most ? cuts : most;
}

// All products of a phase, by all threads; the caller puts a barrier behind it. The tasks, a panel and a cut of rows
// each, stand in one line that is shared out. A thread takes its share from the front a few panels at a time, then helps
// the others: one that loses its core for a while doesn't hold them all up.
static void run_products(Product* products, int count, ThreadPool& pool, int thread, ProductScratch& scratch) {
  scratch.forget();
  const int threads = pool.size();
  int panels = 0, tasks = 0;
  for (int i = 0; i < count; i++) panels += products[i].rows ? products[i].panels() : 0;
  for (int i = 0; i < count; i++) {
    Product& p = products[i];
    p.cuts = p.rows ? row_cuts(p, panels, threads) : 0;
    tasks += p.cuts * p.panels();
  }
  int step = (int)((48 << 10) / panel_bytes(products[0].w->kind, products[0].w->k));
  if (step > tasks / (threads * 3)) step = tasks / (threads * 3);
  if (step < 1) step = 1;
  for (int other = 0; other < threads; other++) {
    const int of = (thread + other) % threads;
    const Range share = range(tasks, of, threads);
    for (int at; (at = share.begin + pool.take_of(of) * step) < share.end;) {
      const int end = at + step < share.end ? at + step : share.end;
      Product* p = products;
      for (int base = 0; at < end; at++) {  // at least one panel a round; a run ends with its product and cut
        for (; at - base >= p->cuts * p->panels(); p++) base += p->cuts * p->panels();
        const int panel = (at - base) % p->panels(), cut = (at - base) / p->panels();
        const int run = end - at < p->panels() - panel ? end - at : p->panels() - panel;
        multiply(*p, {panel, panel + run}, range(p->rows, cut, p->cuts, kPanel), scratch);
        at += run - 1;
      }
    }
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
