// What the parts of one step share. Compiled per instruction set.
//
// Who does what: step.cpp runs the layers (embedding, norms, matrix products, LM head); attention.h (its functions are
// declared at the end of this file) does rotary positions, the KV write and attention between the QKV and the O product.
// A row is one token of one sequence at one position. Rows of a sequence are consecutive.
#pragma once
#include "buffer.h"
#include "model.h"
#include "simd.h"
#include "threads.h"
#include "tiles.h"

#include <time.h>

namespace octavo {
namespace OCT_ISA {

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct StepContext {
  const Model* model = nullptr;
  const oct_kv* kv = nullptr;
  const oct_batch* batch = nullptr;
  ThreadPool* pool = nullptr;

  int n_rows = 0;
  const int32_t* row_seq = nullptr;  // [n_rows] sequence of a row
  const int32_t* row_pos = nullptr;  // [n_rows] its position

  // Activations. Rows are padded: reading up to row n_rows + 31 is allowed, what stands there is never used.
  float* x = nullptr;    // [n_rows][hidden] residual stream
  float* qkv = nullptr;  // [n_rows][qkv_stride] out of the QKV product, biases added: q heads, k heads, v heads
  void* q = nullptr;     // [n_rows][heads * head_size] in the compute type, rotated; written and read by attention.h
  void* attn = nullptr;  // [n_rows][attn_stride] in the compute type; columns from heads * head_size on stay zero
  int qkv_stride = 0, attn_stride = 0;  // in elements

  // For attention.h alone: plan, tables, per-thread tiles, split-KV partial results. Reserve in attention_plan (one
  // thread), then only use. Contents survive from step to step; growing a buffer loses them.
  Buffer plan, tables, scratch, partial;

  const oct_spec& spec() const { return model->spec; }
  bool bf16_compute() const { return model->spec.compute == OCT_BF16; }
  int threads() const { return pool->size(); }
  void barrier() { pool->barrier(); }
  int take() { return pool->take(); }  // next task of this phase, from 0; at most one taking loop between barriers
};

// ---------------------------------------------------------------- attention.h
// Once a step, before the threads start: the task list and the cuts of long contexts (at fixed positions).
static void attention_plan(StepContext& ctx);
// All threads, after the QKV product and a barrier: qk-norm, rotary, q to ctx.q, K and V of every row to the cache.
// The caller puts a barrier behind it.
static void rope_and_write(StepContext& ctx, int layer, int thread);
// All threads: ctx.q and the cache to ctx.attn. May use ctx.barrier() inside; all threads must then meet it.
// The caller puts a barrier behind it.
static void attend(StepContext& ctx, int layer, int thread);

}  // namespace OCT_ISA
}  // namespace octavo
