// Mixture of experts (Shazeer et al., 2017; Mixtral and Qwen MoE routing): each row goes through its best experts.
//
// A row's result is the sum over its experts in order of their rank, so it doesn't depend on who else is in the batch.
#pragma once
#include "product.h"

namespace octavo {
namespace OCT_ISA {

struct Routing {
  Buffer logits;   // [rows][experts]
  Buffer weights;  // [rows][experts_per_token], by rank
  Buffer slots;    // [rows][experts_per_token], where the row stands among all (row, expert) pairs, by expert
  Buffer experts;  // [rows][experts_per_token]
  Buffer starts;   // [experts + 1]
  Operand inputs, mid;
  Buffer* products = nullptr;  // [threads] lists of one product an expert
  int threads = 0;
  Buffer outputs;  // [rows * experts_per_token][hidden padded to 32]

  ~Routing() { delete[] products; }
  void reserve(const oct_spec& s, int rows, int pool_threads, int input_forms, int mid_forms) {
    if (threads < pool_threads) {
      delete[] products;
      products = new Buffer[threads = pool_threads];
    }
    for (int t = 0; t < threads; t++) products[t].reserve_array<Product>(s.experts);
    int64_t pairs = (int64_t)rows * s.experts_per_token;
    logits.reserve_array<float>((int64_t)rows * s.experts);
    weights.reserve_array<float>(pairs);
    slots.reserve_array<int32_t>(pairs);
    experts.reserve_array<int32_t>(pairs);
    starts.reserve_array<int32_t>(s.experts + 1);
    inputs.reserve((int)pairs, s.hidden, input_forms);
    mid.reserve((int)pairs, s.moe_inter, mid_forms);
    outputs.reserve_array<float>(pairs * round_up(s.hidden, kPanel));
  }
};

// One thread: softmax, the best experts of each row (the lower index among equals), rows sorted by expert.
static void route(Routing& r, const oct_spec& s, int rows) {
  const int k = s.experts_per_token;
  int32_t* starts = r.starts.as<int32_t>();
  memset(starts, 0, (s.experts + 1) * sizeof *starts);
  for (int row = 0; row < rows; row++) {
    float* p = r.logits.as<float>() + (int64_t)row * s.experts;
    float top = p[0], total = 0, kept = 0;
    for (int e = 1; e < s.experts; e++) top = p[e] > top ? p[e] : top;
    for (int e = 0; e < s.experts; e++) total += p[e] = expf(p[e] - top);
    float* weight = r.weights.as<float>() + (int64_t)row * k;
    int32_t* expert = r.experts.as<int32_t>() + (int64_t)row * k;
    for (int i = 0; i < k; i++) {
      int best = 0;
      for (int e = 1; e < s.experts; e++)
        if (p[e] > p[best]) best = e;
      weight[i] = p[best] / total;
      kept += weight[i];
      expert[i] = best;
      p[best] = -1;
      starts[best + 1]++;
    }
    if (s.flags & OCT_NORM_TOPK)
      for (int i = 0; i < k; i++) weight[i] /= kept;
  }
  for (int e = 0; e < s.experts; e++) starts[e + 1] += starts[e];
  // Fill from each expert's start, then put the starts back.
  int32_t* slot = r.slots.as<int32_t>();
  for (int64_t i = 0; i < (int64_t)rows * k; i++) slot[i] = starts[r.experts.as<int32_t>()[i]]++;
  for (int e = s.experts; e > 0; e--) starts[e] = starts[e - 1];
  starts[0] = 0;
}

}  // namespace OCT_ISA
}  // namespace octavo
