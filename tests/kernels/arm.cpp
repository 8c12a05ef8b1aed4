// A tiny decoder through the C ABI, for checking a set on a machine without Python (test_arm.py runs it under qemu).
// Prints the logits of a prompt for three kinds of weights; exits 1 when a row's bits depend on its batch.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "kernels.h"

static uint32_t state = 12345;
static float random_float() {  // roughly in [-1, 1)
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)state / 2147483648.0f;
}

static void check(int status) {
  if (status >= 0) return;
  fprintf(stderr, "%s\n", oct_last_error());
  exit(2);
}

constexpr int kVocab = 75, kHidden = 72, kTokens = 37, kHeads = 4, kKv = 2, kHead = 16, kInter = 88, kBlock = 5;

static void set(oct_model* m, const std::string& name, int rows, int cols, int quant) {
  std::vector<float> data((size_t)rows * cols);
  for (float& x : data) x = cols == 1 ? 1 + 0.2f * random_float() : random_float() / sqrtf((float)cols);
  check(oct_model_set(m, name.c_str(), data.data(), OCT_F32, rows, cols, cols == 1 ? OCT_W_F32 : quant));
}

static std::vector<float> step(oct_model* m, const oct_kv& kv, int first, int count) {
  std::vector<int32_t> tokens, rows, table;
  for (int i = 0; i < count; i++) tokens.push_back((first + i) * 7 % kVocab), rows.push_back(i);
  for (int i = 0; i < kv.num_blocks; i++) table.push_back((int)kv.num_blocks - 1 - i);
  int32_t ends[2] = {0, count}, start = first, line = 0;
  std::vector<float> logits((size_t)count * kVocab);
  oct_batch b = {};
  b.n_rows = count, b.n_seqs = 1, b.tokens = tokens.data(), b.q_start = ends, b.pos_start = &start;
  b.tables = table.data(), b.table_stride = kv.num_blocks, b.table_line = &line;
  b.n_logits = count, b.logit_rows = rows.data(), b.logits = logits.data();
  check(oct_step(m, &kv, &b));
  return logits;
}

static void run(int quant, int compute, int kv_dtype) {
  float inv_freq[kHead / 2], rope_scale = 1;
  for (int i = 0; i < kHead / 2; i++) inv_freq[i] = powf(10000.0f, -2.0f * i / kHead);
  oct_spec s = {};
  s.vocab = kVocab, s.hidden = kHidden, s.layers = 2, s.heads = kHeads, s.kv_heads = kKv, s.head_size = kHead;
  s.inter = kInter, s.max_position = 128, s.act = OCT_SILU, s.flags = OCT_GATED, s.rotary_dim = kHead, s.n_rope = 1;
  s.learned_positions = -1, s.norm_eps = 1e-5f, s.attn_scale = 0.25f;
  s.embedding_scale = s.residual_scale = s.logit_scale = 1;
  s.inv_freq = inv_freq, s.rope_scale = &rope_scale, s.compute = compute;
  oct_model* m = oct_model_new(&s);
  if (!m) check(-1);
  state = 12345;
  set(m, "embed", kVocab, kHidden, OCT_W_F32);
  set(m, "lm_head", kVocab, kHidden, quant);
  set(m, "final_norm", kHidden, 1, 0);
  for (int i = 0; i < s.layers; i++) {
    std::string at = "layers." + std::to_string(i) + ".";
    set(m, at + "attn_norm", kHidden, 1, 0);
    set(m, at + "mlp_norm", kHidden, 1, 0);
    set(m, at + "q", kHeads * kHead, kHidden, quant);
    set(m, at + "k", kKv * kHead, kHidden, quant);
    set(m, at + "v", kKv * kHead, kHidden, quant);
    set(m, at + "o", kHidden, kHeads * kHead, quant);
    set(m, at + "gate", kInter, kHidden, quant);
    set(m, at + "up", kInter, kHidden, quant);
    set(m, at + "down", kHidden, kInter, quant);
  }
  check(oct_model_finish(m));
  oct_kv kv = {};
  kv.num_blocks = (kTokens + kBlock - 1) / kBlock, kv.block_size = kBlock, kv.dtype = kv_dtype;
  int64_t bytes = oct_kv_block_bytes(&s, kBlock, kv_dtype) * kv.num_blocks;
  kv.data = oct_alloc(bytes);
  std::vector<float> whole = step(m, kv, 0, kTokens);
  for (int at = 0, size = 1; at < kTokens; at += size, size = size % 5 + 1) {
    if (at + size > kTokens) size = kTokens - at;
    std::vector<float> part = step(m, kv, at, size);
    if (memcmp(part.data(), whole.data() + (size_t)at * kVocab, part.size() * sizeof(float))) {
      fprintf(stderr, "rows %d to %d have other bits alone\n", at, at + size);
      exit(1);
    }
  }
  for (float x : whole) printf("%.9g\n", x);
  oct_free(kv.data, bytes);
  oct_model_free(m);
}

int main() {
  check(oct_init(nullptr, 2));
  run(OCT_W_F32, OCT_F32, OCT_F32);
  run(OCT_W_BF16, OCT_BF16, OCT_BF16);
  run(OCT_W_Q8, OCT_BF16, OCT_I8);
}
