// Paged causal attention over the block tables: decode rows and prefill chunks, mixed as they come.
//
// What a query row gets depends on its own query and on the keys and values of positions up to its own as they are
// stored, nothing else: every row walks the same groups of 64 keys from position 0 (from the group that holds its
// window's first key) with the same arithmetic, whoever computes it and whichever rows are computed with it. Keys that
// a row doesn't see get a weight of exactly 0. (A NaN in a value that a row doesn't see, of a later token of its own
// sequence, would still reach it: that sequence is lost anyway.)
// After: Dao, FlashAttention-2 (2023); Kwon et al., PagedAttention (2023); Dao et al., Flash-Decoding (2023).
//
//   attention_rope.h   norms, rotary, cache writes      attention_math.h  online softmax, merge of splits
//   attention_plan.h   tasks                            attention_f32.h   tile products, any set and dtype
//   kv_layout.h        the cache's bytes                attention_bf16.h, attention_amx.h  the same, faster
//   kv_convert.h       its element types                attention_kernels.h  which is used when
#pragma once
#include "attention_kernels.h"

namespace octavo {
namespace OCT_ISA {

static int64_t raw_tile_bytes(int dims) { return 2 * (int64_t)kTile * dims * 4 + 2 * kTile * 4; }

// Hands out the thread's scratch; with base == nullptr it only measures.
static int64_t carve_scratch(uint8_t* base, int dims, AttentionScratch& s) {
  int64_t at = 0;
  auto take = [&](auto*& field, int64_t bytes) {
    field = (typename std::remove_reference<decltype(field)>::type)(base + at);
    at += (bytes + 63) / 64 * 64;
  };
  take(s.query, kUnitRows * dims * 4);
  take(s.query_scale, kUnitRows * 4);
  take(s.scores, kUnitRows * kGroupKeys * 4);
  take(s.weights, kUnitRows * kGroupKeys * 4);
  take(s.factor, kUnitRows * 4);
  take(s.low, kUnitRows * 4);
  take(s.high, kUnitRows * 4);
  take(s.part, kUnitRows * dims * 4);
  take(s.total, kUnitRows * dims * 4);
  take(s.part_state, kUnitRows * (int64_t)sizeof(SoftmaxState));
  take(s.total_state, kUnitRows * (int64_t)sizeof(SoftmaxState));
  take(s.v_scale, kGroupKeys * 4);
  take(s.k_tiles, kGroupKeys * dims * 4);
  take(s.v_tiles, kGroupKeys * dims * 4);
  take(s.raw, kGroupTiles * raw_tile_bytes(dims));
  return (at + 4095) / 4096 * 4096;
}
static int64_t attention_scratch_bytes(const oct_spec& spec) {
  AttentionScratch s;
  return carve_scratch(nullptr, padded_dims(spec), s);
}

// The keys of one sequence, layer and KV head, as tiles.
struct KeyWalk {
  const KvLayout& layout;
  const oct_kv& kv;
  const int32_t* blocks;
  int layer, head, end;  // end: number of tokens with KV

  // The bytes of tile `t` where they lie; tiled layouts only.
  uint8_t* stored(int t) const {
    int64_t token = (int64_t)t * kTile;
    return layout.piece(kv, blocks[token / kv.block_size], layer, head, (int)(token % kv.block_size));
  }

  RawTile get(int t, uint8_t* buffer) const {
    if (!layout.tiled) return gather(t, buffer);
    uint8_t* tile = stored(t);
    const float* scales = (const float*)(tile + layout.scale_offset);
    RawTile raw = {tile, tile + layout.v_offset, scales, scales + kTile};
    int valid = end - t * kTile;
    if (valid >= kTile) return raw;
    // A weight of 0 hides any finite value, but not the NaN that a float format may have left behind the end.
    if (layout.dtype != OCT_I8) {
      raw.v = zero_behind(raw.v, valid, buffer);
    } else {
      memset(buffer, 0, kTile * 4);
      raw.v_scale = (float*)memcpy(buffer, raw.v_scale, (size_t)valid * 4);
    }
    return raw;
  }

 private:
  const uint8_t* zero_behind(const uint8_t* v, int valid, uint8_t* buffer) const {
    int group = layout.group, line = layout.dims * group * layout.element;
    int lines = (valid + group - 1) / group;
    memcpy(buffer, v, (size_t)(lines * line));
    memset(buffer + lines * line, 0, (size_t)(kTile / group - lines) * (size_t)line);
    if (valid % group)  // group is 2 here
      for (int d = 0; d < layout.dims; d++)
        memset(buffer + (lines - 1) * line + (d * group + 1) * layout.element, 0, (size_t)layout.element);
    return buffer;
  }

  // Tokens of flat blocks put into tile form; zero behind the end.
  RawTile gather(int t, uint8_t* buffer) const {
    uint8_t *k = buffer, *v = k + kTile * layout.dims * layout.element;
    float* scales = (float*)(v + kTile * layout.dims * layout.element);
    int tokens = end - t * kTile < kTile ? end - t * kTile : kTile;
    if (tokens < kTile) memset(buffer, 0, (size_t)(2 * kTile * layout.dims * layout.element + 2 * kTile * 4));
    const int64_t line = (int64_t)layout.dims * layout.element;
    for (int i = 0; i < tokens; i++) {
      int token = t * kTile + i, slot = token % kv.block_size;
      const uint8_t* piece = layout.piece(kv, blocks[token / kv.block_size], layer, head, slot);
      const uint8_t *k_from = piece + slot * line, *v_from = piece + layout.v_offset + slot * line;
      if (layout.group * layout.element == 4) scatter_k<uint32_t>(layout, k, i, k_from);
      else scatter_k<uint16_t>(layout, k, i, k_from);
      if (layout.element == 4) scatter_v<uint32_t>(layout, v, i, v_from);
      else if (layout.element == 2) scatter_v<uint16_t>(layout, v, i, v_from);
      else scatter_v<uint8_t>(layout, v, i, v_from);
      if (layout.dtype == OCT_I8) {
        const float* from = (const float*)(piece + layout.scale_offset);
        scales[i] = from[slot], scales[kTile + i] = from[layout.block_size + slot];
      }
    }
    return {k, v, scales, scales + kTile};
  }
};

// One unit's rows of one KV head: their queries are loaded, their splits are closed one by one.
struct UnitWalk {
  StepContext& ctx;
  const TileKernel& kernel;
  const KvLayout& layout;
  const AttentionUnit& unit;
  AttentionScratch& s;
  const SoftmaxParams& softmax;
  KeyWalk keys;
  int window, group, dims, first_position;

  UnitWalk(StepContext& ctx, const TileKernel& kernel, const KvLayout& layout, const AttentionUnit& unit,
           AttentionScratch& s, const SoftmaxParams& softmax, int layer, int head)
      : ctx(ctx), kernel(kernel), layout(layout), unit(unit), s(s), softmax(softmax),
        keys{layout, *ctx.kv, nullptr, layer, head, 0},
        window(ctx.model->layers[(size_t)layer].window), group(ctx.spec().heads / ctx.spec().kv_heads),
        dims(layout.dims) {
    const oct_batch& b = *ctx.batch;
    int q_rows = b.q_start[unit.seq + 1] - b.q_start[unit.seq];
    keys.blocks = b.tables + b.table_line[unit.seq] * b.table_stride;
    keys.end = b.pos_start[unit.seq] + q_rows;
    first_position = b.pos_start[unit.seq];
  }

  int position(int r) const { return first_position + (unit.row0 + r) / group; }
  int low(int r) const { return window > 0 && position(r) >= window ? position(r) - window + 1 : 0; }
  // Where row r stands in ctx.q and ctx.attn, in elements of one row's width.
  int64_t row_of(int r) const { return ctx.batch->q_start[unit.seq] + (unit.row0 + r) / group; }
  int column_of(int r) const { return (keys.head * group + (unit.row0 + r) % group) * layout.head_size; }

  void load_queries() {
    if (kernel.begin) kernel.begin(unit.rows);
    const int width = ctx.spec().heads * layout.head_size, bytes = ctx.bf16_compute() ? 2 : 4;
    for (int r = 0; r < unit.rows; r++) {
      const uint8_t* q = (const uint8_t*)ctx.q + (row_of(r) * width + column_of(r)) * bytes;
      kernel.load_query(q, ctx.bf16_compute(), layout.head_size, dims, r, s);
      s.low[r] = low(r), s.high[r] = position(r);
    }
  }

  // Fills s.part and s.part_state with the split's result. False when no row sees any of its keys.
  bool split(int index) {
    int from = std::max(index * kSplitKeys, low(0)) / kGroupKeys;
    int to = std::min((index + 1) * kSplitKeys - 1, position(unit.rows - 1)) / kGroupKeys;
    for (int r = 0; r < unit.rows; r++) s.part_state[r] = {kNothing, 0};
    memset(s.part, 0, (size_t)unit.rows * (size_t)dims * 4);
    for (int g = from; g <= to; g++) {
      look_ahead(g, from, to);
      group_of_keys(g);
      fetch_ahead(s.ahead, INT32_MAX);
    }
    return from <= to;
  }

  void group_of_keys(int g) {
    RawTile raw[kGroupTiles];
    int tiles = std::min(kGroupTiles, position(unit.rows - 1) / kTile + 1 - g * kGroupTiles);
    for (int t = 0; t < tiles; t++) {
      raw[t] = keys.get(g * kGroupTiles + t, s.raw + t * raw_tile_bytes(dims));
      if (kernel.v_scale_unit != 0)
        for (int i = 0; i < kTile; i++) s.v_scale[t * kTile + i] = raw[t].v_scale[i] * kernel.v_scale_unit;
    }
    kernel.scores(raw, tiles, unit.rows, dims, s);
    const float* v_scale = kernel.v_scale_unit != 0 ? s.v_scale : nullptr;
    if (kernel.bf16_weights) soften(g, v_scale, (bf16*)s.weights);
    else soften(g, v_scale, (float*)s.weights);
    kernel.values(raw, tiles, unit.rows, dims, s);
  }
  template <class W> void soften(int g, const float* v_scale, W* weights) {
    const int first = g * kGroupKeys;
    int r = 0;
    for (; r + kLanes <= unit.rows; r += kLanes) {
      fetch_ahead(s.ahead, 2 * kLanes);
      const bool all = s.low[r + kLanes - 1] <= first && s.high[r] >= first + kGroupKeys - 1;
      (all ? softmax_rows<true, W> : softmax_rows<false, W>)(s.scores + r * kGroupKeys, first, s.low + r, s.high + r,
                                                             softmax, v_scale, s.part_state + r,
                                                             weights + r * kGroupKeys, s.factor + r);
    }
    for (; r < unit.rows; r++) {
      fetch_ahead(s.ahead, 2);
      s.factor[r] = softmax_group(s.scores + r * kGroupKeys, first, s.low[r], s.high[r], softmax, v_scale,
                                  s.part_state[r], weights + r * kGroupKeys);
    }
  }

  // What comes after group g of a split's groups from ... to: the next group of this head, or, where a thread has only
  // a part of the keys, the same groups of the next head.
  void look_ahead(int g, int from, int to) {
    s.ahead.at = s.ahead.end = 0;
    int next = g + 1, last = position(unit.rows - 1) / kGroupKeys;
    int64_t offset = 0;
    const bool last_head = keys.head + 1 == unit.head0 + unit.heads;
    if (unit.parts > 1 && g == to) {
      if (last_head) offset = -(unit.heads - 1) * layout.head_bytes;
      else next = from, offset = layout.head_bytes;
    } else if (g == last) {
      if (last_head) return;
      next = low(0) / kGroupKeys, offset = layout.head_bytes;
    }
    if (!layout.tiled || next > last) return;
    int tiles = std::min(kGroupTiles, position(unit.rows - 1) / kTile + 1 - next * kGroupTiles);
    for (int t = 0; t < kGroupTiles; t++)
      s.ahead.tile[t] = keys.stored(next * kGroupTiles + std::min(t, tiles - 1)) + offset;
    s.ahead.end = layout.piece_bytes;
  }

  void start_total() {
    for (int r = 0; r < unit.rows; r++) s.total_state[r] = {kNothing, 0};
    memset(s.total, 0, (size_t)unit.rows * (size_t)dims * 4);
  }
  void merge_part() { merge_splits(s.total_state, s.total, s.part_state, s.part, unit.rows, dims); }
  void write_total() {
    for (int r = 0; r < unit.rows; r++) {
      vf sum = splat(s.total_state[r].sum);
      float* row = s.total + r * dims;
      for (int d = 0; d < dims; d += kLanes) store(row + d, load(row + d) / sum);
      int64_t at = row_of(r) * ctx.attn_stride + column_of(r);
      if (!ctx.bf16_compute()) memcpy((float*)ctx.attn + at, row, (size_t)layout.head_size * 4);
      else for (int d = 0; d < layout.head_size; d++) ((bf16*)ctx.attn)[at + d] = float_to_bf16(row[d]);
    }
  }

  float* partial(int split, int r) const {
    int64_t line = ((int64_t)split * unit.heads + keys.head - unit.head0) * unit.rows + r;
    return ctx.partial.as<float>() + unit.partial + line * partial_stride(ctx.spec());
  }
  void save_part(int split) {
    for (int r = 0; r < unit.rows; r++) {
      float* to = partial(split, r);
      memcpy(to, s.part + r * dims, (size_t)dims * 4);
      memcpy(to + dims, &s.part_state[r], sizeof(SoftmaxState));
    }
  }
  void merge_saved() {
    start_total();
    for (int split = 0; split < unit.splits; split++) {
      for (int r = 0; r < unit.rows; r++) {
        const float* from = partial(split, r);
        memcpy(s.part + r * dims, from, (size_t)dims * 4);
        memcpy(&s.part_state[r], from + dims, sizeof(SoftmaxState));
      }
      merge_part();
    }
    write_total();
  }
};

static void attend_with(StepContext& ctx, const TileKernel& kernel, const KvLayout& layout, int layer, int thread) {
  auto* plan = ctx.plan.as<AttentionPlan>();
  AttentionScratch s;
  carve_scratch(ctx.scratch.as<uint8_t>() + thread * plan->scratch_bytes, layout.dims, s);
  const SoftmaxParams softmax(ctx.spec());
  for (int next; (next = ctx.take()) < plan->n_tasks;) {
    const AttentionTask& task = plan->tasks()[next];
    AttentionUnit& unit = plan->units()[task.unit];
    const int begin = task.part * unit.splits_per_part;
    const int end = std::min(unit.splits, begin + unit.splits_per_part);
    const int heads_end = unit.head0 + unit.heads;
    if (unit.parts == 1) {
      for (int head = unit.head0; head < heads_end; head++) {
        UnitWalk walk(ctx, kernel, layout, unit, s, softmax, layer, head);
        walk.load_queries();
        walk.start_total();
        for (int split = begin; split < end; split++)
          if (walk.split(split)) walk.merge_part();
        walk.write_total();
      }
      continue;
    }
    for (int split = begin; split < end; split++)
      for (int head = unit.head0; head < heads_end; head++) {
        UnitWalk walk(ctx, kernel, layout, unit, s, softmax, layer, head);
        walk.load_queries();
        walk.split(split);
        walk.save_part(split);
      }
    if (unit.left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
    unit.left.store(unit.parts, std::memory_order_relaxed);  // for the next layer; a barrier lies between
    for (int head = unit.head0; head < unit.head0 + unit.heads; head++)
      UnitWalk(ctx, kernel, layout, unit, s, softmax, layer, head).merge_saved();
  }
}

// oct_kv_block_bytes: bytes of one block over all layers, or -1.
static int64_t kv_block_bytes(const oct_spec* spec, int32_t block_size, int32_t dtype) {
  if (block_size < 1) return fail("block size must be 1 or more, not %d", block_size);
  if (dtype < OCT_F32 || dtype > OCT_F8E5M2) return fail("KV dtype %d is not one of 0 to %d", dtype, OCT_F8E5M2);
  if (spec->head_size < 1 || spec->head_size > kMaxHeadSize)
    return fail("head size must lie between 1 and %d, not %d", kMaxHeadSize, spec->head_size);
  return KvLayout(*spec, block_size, dtype).block_bytes;
}

static void attend(StepContext& ctx, int layer, int thread) {
  const KvLayout layout(ctx.spec(), ctx.kv->block_size, ctx.kv->dtype);
  attend_with(ctx, tile_kernel(ctx.kv->dtype, ctx.bf16_compute()), layout, layer, thread);
}

}  // namespace OCT_ISA
}  // namespace octavo
