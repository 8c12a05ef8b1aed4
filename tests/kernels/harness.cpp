// The attention and sampling kernels of one instruction set, without the rest of the step.
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <sys/syscall.h>

#include <string>

#include "attention.h"
#include "sampler.h"

namespace octavo {
static thread_local std::string last_error;
static ThreadPool* current_pool = nullptr;
int fail(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  last_error = text;
  return -1;
}
ThreadPool& pool() { return *current_pool; }
}  // namespace octavo

using namespace octavo;
using namespace octavo::OCT_ISA;

#define API extern "C" __attribute__((visibility("default")))

API void* oct_alloc(int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  void* p = aligned_alloc(kHuge, (size_t)((bytes + kHuge - 1) / kHuge * kHuge));
  madvise(p, (size_t)bytes, MADV_HUGEPAGE);
  memset(p, 0, (size_t)bytes);
  return p;
}
API void oct_free(void* p, int64_t) { free(p); }

API void h_threads(int n) {
#if defined(__AMX_TILE__)
  syscall(SYS_arch_prctl, 0x1023, 18);
#endif
  delete current_pool;
  current_pool = new ThreadPool(n);
}
API const char* h_error() { return last_error.c_str(); }
API int64_t h_block_bytes(const oct_spec* spec, int block_size, int dtype) { return kv_block_bytes(spec, block_size, dtype); }
API int h_sample(const oct_sampling* s) { return sample(s); }

// One layer of one step: qkv [n_rows][(heads + 2 * kv_heads) * head_size] f32 in, attention [n_rows][heads * head_size]
// f32 out. q_norm, k_norm: weights or NULL. seconds[2]: of rope_and_write, of attend, the best of repeats[0], [1] calls.
struct Job {
  StepContext ctx;
  int layer;
  int phase;
};

API int h_attention(const oct_spec* spec, const oct_kv* kv, const oct_batch* batch, int layer, const float* qkv,
                    const float* q_norm, const float* k_norm, float* out, const int* repeats, double* seconds) {
  static Job job;
  StepContext& ctx = job.ctx;
  Model model;
  model.spec = *spec;
  model.layers.resize((size_t)spec->layers);
  for (int i = 0; i < spec->layers; i++) {
    model.layers[(size_t)i].window = spec->layer_window[i];
    model.layers[(size_t)i].rope = spec->layer_rope[i];
    model.layers[(size_t)i].q_norm = q_norm;
    model.layers[(size_t)i].k_norm = k_norm;
  }
  ctx.model = &model;
  ctx.kv = kv;
  ctx.batch = batch;
  ctx.pool = &pool();
  ctx.n_rows = batch->n_rows;
  std::vector<int32_t> row_seq, row_pos;
  for (int s = 0; s < batch->n_seqs; s++)
    for (int i = batch->q_start[s]; i < batch->q_start[s + 1]; i++) {
      row_seq.push_back(s);
      row_pos.push_back(batch->pos_start[s] + i - batch->q_start[s]);
    }
  ctx.row_seq = row_seq.data();
  ctx.row_pos = row_pos.data();
  ctx.qkv_stride = (spec->heads + 2 * spec->kv_heads) * spec->head_size;
  ctx.attn_stride = spec->heads * spec->head_size;
  static Buffer q, attn, mine;
  int64_t width = ctx.attn_stride;
  ctx.q = q.reserve((ctx.n_rows + 32) * width * 4);
  ctx.attn = attn.reserve((ctx.n_rows + 32) * width * 4);
  ctx.qkv = (float*)mine.reserve((int64_t)(ctx.n_rows + 32) * ctx.qkv_stride * 4);
  job.layer = layer;
  ctx.tables.reserve(1);
  memset(ctx.tables.data(), 0, 64);  // another model may have been here
  attention_plan(ctx);
  auto work = [](void* arg, int thread) {
    Job& job = *(Job*)arg;
    if (job.phase == 0) rope_and_write(job.ctx, job.layer, thread);
    else attend(job.ctx, job.layer, thread);
  };
  auto now = [] { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; };
  double best[2] = {1e9, 1e9};
  for (job.phase = 0; job.phase < 2; job.phase++)
    for (int i = 0; i < repeats[job.phase]; i++) {
      if (job.phase == 0) memcpy(ctx.qkv, qkv, (size_t)(ctx.n_rows * (int64_t)ctx.qkv_stride) * 4);
      double t = now();
      pool().run(work, &job);
      t = now() - t;
      if (t < best[job.phase]) best[job.phase] = t;
    }
  if (seconds) seconds[0] = best[0], seconds[1] = best[1];
  for (int64_t i = 0; i < ctx.n_rows * width; i++)
    out[i] = ctx.bf16_compute() ? bf16_to_float(((bf16*)ctx.attn)[i]) : ((float*)ctx.attn)[i];
  return 0;
}
