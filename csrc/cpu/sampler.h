// The sampler: one row of logits and its parameters to one token, its raw log-probability, rank and alternatives.
//
// Order of edits (vLLM's): allowed-token mask, bias, repetition, frequency and presence penalty, temperature, then
// min-p, top-k, top-p, then the draw. Greedy rows (temperature below 1e-5) take the maximum of the edited logits.
// All of it goes by one ranking: larger logit first, lower id first among equals. min-p, top-k and top-p each keep a
// prefix of it, so no sort is needed: the cut is found by bisection on the bits of the logits (sampler_select.h).
// Log-probability, rank and alternatives are of the logits as they came in.
// A row's result depends on that row alone: sums run in 16 lanes and chunks of 1,024 on every instruction set.
#pragma once
#include "buffer.h"
#include "model.h"
#include "sampler_select.h"
#include "threads.h"

namespace octavo {
namespace OCT_ISA {

constexpr float kGreedyBelow = 1e-5f;   // a smaller temperature is greedy
constexpr float kLowestLogprob = -9999.0f;  // reported instead of -inf, which JSON doesn't have

// Philox4x32-10 (Salmon et al., 2011): the first 53 bits of the block at counter (choice, position), as [0, 1).
static double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c[4] = {choice, position, 0, 0};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
    memcpy(c, next, sizeof c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  uint64_t bits = (uint64_t)c[0] << 32 | c[1];
  return (double)(bits >> 11) * 0x1p-53;
}

// Buffers of one thread. x and p have the vocabulary padded with -inf and 0 to whole chunks.
struct SampleScratch {
  Buffer memory;
  float *x = nullptr, *p = nullptr;  // edited logits; exp((x - max) / temperature)
  Candidates kept;
  int padded = 0;

  void reserve(int vocab) {
    padded = (vocab + kChunk - 1) / kChunk * kChunk;
    float* base = memory.reserve_array<float>((int64_t)padded * 5);
    x = base;
    p = base + padded;
    kept = {base + 2 * (int64_t)padded, base + 3 * (int64_t)padded, (int32_t*)(base + 4 * (int64_t)padded), 0};
  }
};

// Copies a row into x; false when it has a NaN or +inf, or nothing but -inf.
static bool copy_row(const float* row, int vocab, SampleScratch& s) {
  int whole = vocab / kLanes * kLanes;
  vi bad = {};
  vf top = splat(-INFINITY);
  for (int i = 0; i < whole; i += kLanes) {
    vf v = load(row + i);
    bad |= ~(v < splat(INFINITY));
    top = max(v, top);
    store(s.x + i, v);
  }
  bool ok = lane_bits(bad) == 0;
  float highest = max_lane(top);
  for (int i = whole; i < vocab; i++) {
    ok &= row[i] < INFINITY;
    highest = row[i] > highest ? row[i] : highest;
    s.x[i] = row[i];
  }
  for (int i = vocab; i < s.padded; i++) s.x[i] = -INFINITY;
  return ok && highest > -INFINITY;
}

static const char* check_ids(const int32_t* ids, int n, int vocab) {
  for (int i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= vocab) return "an edit names a token id outside the vocabulary";
  return nullptr;
}

// Mask, bias and penalties of row i, in x. Returns what is wrong, or nullptr.
static const char* edit_row(const oct_sampling& a, int i, float* x) {
  if (a.masks && a.masks[i]) {
    const uint32_t* mask = a.masks[i];
    for (int t = 0; t < a.vocab; t += 32) {
      uint32_t banned = ~mask[t / 32];
      if (t + 32 > a.vocab) banned &= (1u << (a.vocab - t)) - 1;
      if (banned == 0xffffffffu)
        for (int b = 0; b < 32; b++) x[t + b] = -INFINITY;
      else
        for (; banned; banned &= banned - 1) x[t + __builtin_ctz(banned)] = -INFINITY;
    }
  }
  if (a.bias_ids && a.n_bias[i]) {
    if (const char* wrong = check_ids(a.bias_ids[i], a.n_bias[i], a.vocab)) return wrong;
    for (int j = 0; j < a.n_bias[i]; j++) x[a.bias_ids[i][j]] += a.bias_values[i][j];
  }
  float repetition = a.repetition[i], presence = a.presence[i], frequency = a.frequency[i];
  if (a.seen_ids && a.n_seen[i] && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f)) {
    if (const char* wrong = check_ids(a.seen_ids[i], a.n_seen[i], a.vocab)) return wrong;
    for (int j = 0; j < a.n_seen[i]; j++) {
      float& v = x[a.seen_ids[i][j]];
      int count = a.seen_counts[i][j];
      v = v > 0 ? v / repetition : v * repetition;
      v -= frequency * (float)count;
      if (count > 0) v -= presence;
    }
  }
  return nullptr;
}

// log(sum(exp(x))) over the padded row whose maximum is `top`.
static double log_sum_exp(const float* x, int padded, float top) {
  double total = 0;
  for (int c = 0; c < padded; c += kChunk) {
    Sum16 sum;
    for (int i = c; i < c + kChunk; i += 16)
      OCT_UNROLL for (int w = 0; w < 16; w += kLanes) sum.add(w, exp(load(x + i + w) - splat(top)));
    total += sum.total();
  }
  return (double)top + ::log(total);
}

static float logprob_of(float raw, double lse) {
  float value = (float)((double)raw - lse);
  return value > kLowestLogprob ? value : kLowestLogprob;
}

// Place of a token in the ranking of the raw row, from 1.
static int rank_of(const float* row, int vocab, int token) {
  const float value = row[token];
  int before = 0, i = 0;
  for (; i + kLanes <= vocab; i += kLanes) before += __builtin_popcount(lane_bits(load(row + i) > splat(value)));
  for (; i < vocab; i++) before += row[i] > value;
  for (i = 0; i < token; i++) before += row[i] == value;
  return before + 1;
}

// The n first of the ranking of x, by insertion; nearly every vector fails the first comparison.
static void top_of(const float* x, int padded, int n, double lse, int32_t* ids, float* logprobs) {
  int have = 0;
  float least = -INFINITY;  // the weakest kept value once n are kept
  for (int i = 0; i < padded; i += kLanes) {
    uint32_t bits = lane_bits(load(x + i) > splat(least));
    for (; bits; bits &= bits - 1) {
      int id = i + __builtin_ctz(bits);
      float v = x[id];
      if (have == n && !(v > least)) continue;
      int at = have < n ? have++ : n - 1;
      for (; at > 0 && x[ids[at - 1]] < v; at--) ids[at] = ids[at - 1];
      ids[at] = id;
      if (have == n) least = x[ids[n - 1]];
    }
  }
  // Fewer finite logits than wanted: the lowest ids among those at -inf follow.
  for (int id = 0; have < n; id++)
    if (x[id] == -INFINITY) ids[have++] = id;
  for (int j = 0; j < n; j++) logprobs[j] = logprob_of(x[ids[j]], lse);
}

// Draws from the edited logits in s.x, whose maximum is `top`.
static int draw_token(const oct_sampling& a, int i, float top, SampleScratch& s) {
  const float scale = 1.0f / a.temperature[i];
  for (int j = 0; j < s.padded; j += kLanes) {
    vf d = load(s.x + j) - splat(top);
    vf p = exp(d * splat(scale));
    store(s.p + j, p);
  }
  double u = uniform(a.seed[i], a.choice[i], a.position[i]);
  const int k = a.top_k[i];
  const float min_p = a.min_p[i], top_p = a.top_p[i];
  bool by_rank = k > 0 && k < a.vocab;
  if (!by_rank && min_p <= 0 && top_p >= 1) return draw(s.p, s.padded, u);

  Candidates& kept = s.kept;
  if (by_rank) {
    gather_top(s.x, s.p, s.padded, top, a.temperature[i], k, 0, kept);
    keep_count(kept, k);
  } else if (min_p <= 0) {
    gather_top(s.x, s.p, s.padded, top, a.temperature[i], 1, (double)top_p * mass(s.p, s.padded), kept);
  } else {
    gather_mass(s.x, s.p, s.padded, min_p, kept);
  }
  if (by_rank && min_p > 0) keep_mass(kept, min_p);
  if (top_p < 1) {
    double whole = by_rank || min_p > 0 ? mass(kept) : mass(s.p, s.padded);
    keep_nucleus(kept, (double)top_p * whole);
  }
  return kept.id[draw(kept.p, pad(kept), u)];
}

// Row i whole. Returns what is wrong, or nullptr.
static const char* sample_row(const oct_sampling& a, int i, SampleScratch& s) {
  const float* row = a.logits + (int64_t)i * a.vocab;
  const int forced = a.forced ? a.forced[i] : -1, n_top = a.n_top[i];
  if (forced >= a.vocab) return "the forced token is outside the vocabulary";
  if (n_top > a.top_stride) return "more alternatives are asked for than top_stride has room for";
  if (n_top > a.vocab) return "more alternatives are asked for than the vocabulary has";
  if (!copy_row(row, a.vocab, s)) return "its logits hold NaN or +inf, or no finite value";

  double lse = 0;
  if (n_top >= 0) {
    lse = log_sum_exp(s.x, s.padded, maximum(s.x, s.padded));
    if (n_top > 0) {
      int64_t at = (int64_t)i * a.top_stride;
      top_of(s.x, s.padded, n_top, lse, a.top_ids + at, a.top_logprobs + at);
    }
  }
  int token = forced;
  if (forced < 0) {
    if (const char* wrong = edit_row(a, i, s.x)) return wrong;
    float top = maximum(s.x, s.padded);
    if (!(top > -INFINITY && top < INFINITY)) return "no token is allowed, or a bias is not finite";
    token = a.temperature[i] < kGreedyBelow ? find_first(s.x, s.padded, top) : draw_token(a, i, top, s);
  }
  a.token[i] = token;
  if (n_top >= 0) {
    a.logprob[i] = logprob_of(row[token], lse);
    a.rank[i] = rank_of(row, a.vocab, token);
  }
  return nullptr;
}

// All rows over the pool (oct_sample). 0, or -1 with the first row at fault; the other rows are done all the same.
static int sample(const oct_sampling* arguments) {
  struct Job {
    const oct_sampling& a;
    std::mutex mutex;
    int row = INT32_MAX;
    const char* wrong = nullptr;
  } job{*arguments, {}};
  auto work = [](void* arg, int) {
    Job& job = *(Job*)arg;
    static thread_local SampleScratch scratch;
    scratch.reserve(job.a.vocab);
    for (int i; (i = pool().take()) < job.a.n;) {
      const char* wrong = sample_row(job.a, i, scratch);
      if (!wrong) continue;
      std::lock_guard<std::mutex> lock(job.mutex);
      if (i < job.row) job.row = i, job.wrong = wrong;
    }
  };
  pool().run(work, &job);
  return job.wrong ? fail("sampling row %d: %s", job.row, job.wrong) : 0;
}

}  // namespace OCT_ISA
}  // namespace octavo
