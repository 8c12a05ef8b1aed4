// How the attention of a step is cut into tasks. The cuts decide who computes what, never what comes out.
//
// A unit is a run of query rows of one sequence for some KV heads; a query row is (token, head of the group), numbered
// token * group + head. Keys are walked in groups of 64 from position 0. Every 256 keys (a split) the running softmax
// is closed, and the results of the splits are merged in order, at every batch size. So a unit with a long context can
// be given to several threads in parts, each a run of splits: they leave the splits' results in ctx.partial, and
// whoever ends last merges them. A unit of one part merges as it goes.
#pragma once
#include <algorithm>
#include <atomic>

#include "attention_rope.h"

namespace octavo {
namespace OCT_ISA {

constexpr int kGroupTiles = 4;
constexpr int kGroupKeys = kGroupTiles * kTile;
constexpr int kSplitKeys = 256;  // a multiple of kGroupKeys
constexpr int kUnitRows = 48;    // query rows that share a pass over the keys

struct AttentionUnit {
  int seq, row0, rows, head0, heads;
  int splits, parts, splits_per_part;
  int64_t partial;         // first float in ctx.partial; [split][head][row][partial_stride]
  std::atomic<int> left;   // parts still to end in this layer
};
struct AttentionTask { int unit, part; float cost; };

struct AttentionPlan {
  int n_tasks, n_units;
  int64_t tasks_at, units_at, scratch_bytes;  // offsets in ctx.plan; scratch of one thread
  AttentionTask* tasks() { return (AttentionTask*)((uint8_t*)this + tasks_at); }
  AttentionUnit* units() { return (AttentionUnit*)((uint8_t*)this + units_at); }
};

inline int padded_dims(const oct_spec& spec) { return (spec.head_size + 15) / 16 * 16; }
// One query row's result of a split: dims values, then maximum and sum.
inline int partial_stride(const oct_spec& spec) { return padded_dims(spec) + 16; }

static int64_t attention_scratch_bytes(const oct_spec& spec);  // attention.h

// Walks the units of a batch in order: f(seq, row0, rows, last_position).
template <class F> static void for_each_tile(StepContext& ctx, F f) {
  const oct_batch& b = *ctx.batch;
  const int group = ctx.spec().heads / ctx.spec().kv_heads;
  for (int seq = 0; seq < b.n_seqs; seq++) {
    int rows = (b.q_start[seq + 1] - b.q_start[seq]) * group;
    for (int row0 = 0; row0 < rows; row0 += kUnitRows) {
      int n = std::min(kUnitRows, rows - row0);
      f(seq, row0, n, b.pos_start[seq] + (row0 + n - 1) / group);
    }
  }
}

static void attention_plan(StepContext& ctx) {
  const oct_spec& spec = ctx.spec();
  int last = 0, tiles = 0, all_splits = 0;
  double total = 0;
  // A key costs its bytes, whoever reads it, and the arithmetic of each row.
  auto split_cost = [](int rows) { return 8.0f + (float)rows; };
  for_each_tile(ctx, [&](int, int, int rows, int position) {
    int splits = position / kSplitKeys + 1;
    tiles++, all_splits += splits, last = std::max(last, position);
    total += splits * split_cost(rows) * spec.kv_heads;
  });
  rope_table_reserve(ctx, last);

  // The heads of a block lie side by side: one task reads them all, unless that leaves threads without work.
  const int heads = all_splits >= 8 * ctx.threads() ? spec.kv_heads : 1;
  const int n_units = tiles * (spec.kv_heads / heads), max_tasks = all_splits * (spec.kv_heads / heads);
  const int64_t units_at = 64, tasks_at = units_at + (int64_t)n_units * (int64_t)sizeof(AttentionUnit);
  auto* plan = (AttentionPlan*)ctx.plan.reserve(tasks_at + (int64_t)max_tasks * (int64_t)sizeof(AttentionTask));
  *plan = {0, 0, tasks_at, units_at, attention_scratch_bytes(spec)};

  const float part_cost = (float)(total / (8 * ctx.threads()));
  int64_t partial = 0;
  for_each_tile(ctx, [&](int seq, int row0, int rows, int position) {
    int splits = position / kSplitKeys + 1;
    float cost = split_cost(rows) * (float)heads;
    int per_part = std::max(1, (int)(part_cost / cost)), parts = (splits + per_part - 1) / per_part;
    if (ctx.threads() == 1) parts = 1, per_part = splits;
    for (int head0 = 0; head0 < spec.kv_heads; head0 += heads) {
      AttentionUnit& unit = plan->units()[plan->n_units];
      unit.seq = seq, unit.row0 = row0, unit.rows = rows, unit.head0 = head0, unit.heads = heads;
      unit.splits = splits, unit.parts = parts, unit.splits_per_part = per_part, unit.partial = partial;
      unit.left.store(parts, std::memory_order_relaxed);
      if (parts > 1) partial += (int64_t)splits * heads * rows * partial_stride(spec);
      for (int part = 0; part < parts; part++)
        plan->tasks()[plan->n_tasks++] = {plan->n_units, part, cost * (float)std::min(per_part, splits)};
      plan->n_units++;
    }
  });
  // The dearest first, so that no thread is left with a long task at the end.
  std::stable_sort(plan->tasks(), plan->tasks() + plan->n_tasks,
                   [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  ctx.partial.reserve(partial * 4 + 64);
  ctx.scratch.reserve(plan->scratch_bytes * ctx.threads());
}

}  // namespace OCT_ISA
}  // namespace octavo
