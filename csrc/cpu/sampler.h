// The sampler: one row of logits and its parameters to one token, its raw log-probability, rank and alternatives.
//
// Order of edits (vLLM's): allowed-token mask, bias, repetition, frequency and presence penalty, temperature, then
// min-p, top-k, top-p, then the draw. Greedy rows (temperature below 1e-5) take the maximum of the edited logits.
// All of it goes by one ranking: larger logit first, lower id first among equals. min-p, top-k and top-p each keep a
// prefix of it, so no sort is needed: a bound leaves few candidates, bisection on the bits of their logits finds the
// cut (sampler_select.h).
// Log-probability, rank and alternatives are of the logits as they came in.
// A row's result depends on that row alone: sums run in 16 lanes and chunks of 1,024 on every instruction set.
#pragma once
#include "buffer.h"
#include "model.h"
#include "sampler_select.h"
#include "threads.h"

namespace octavo {
namespace OCT_ISA {

constexpr float kGreedyBelow = 1e-5f;       // a smaller temperature is greedy
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

// Buffers of one thread.
struct SampleScratch {
  Buffer memory;
  float *x = nullptr, *groups = nullptr;  // edited logits, padded with -inf; maxima (sampler_select.h)
  double* sums = nullptr;                 // of chunks
  int32_t* every_id = nullptr;  // 0, 1, 2 ...
  Candidates kept;
  float *work_x = nullptr, *work_p = nullptr;
  int padded = 0;

  void reserve(int vocab) {
    if (padded == (vocab + kChunk - 1) / kChunk * kChunk) return;
    padded = (vocab + kChunk - 1) / kChunk * kChunk;
    const int64_t n = padded + 16;  // compressing stores may touch a vector more
    float* base = memory.reserve_array<float>(n * 9);
    x = base;
    kept = {base + n, base + 2 * n, (int32_t*)(base + 3 * n), 0};
    work_x = base + 4 * n;
    work_p = base + 5 * n;
    groups = base + 6 * n;
    sums = (double*)(base + 7 * n);
    every_id = (int32_t*)(base + 8 * n);
    for (int i = 0; i < padded; i++) every_id[i] = i;
  }
};

// Copies a row into x and finds its groups; false when it has a NaN or +inf, or nothing but -inf.
static bool copy_row(const float* row, int vocab, SampleScratch& s, float& top) {
  int whole = vocab / kLanes * kLanes;
  vi bad = {};
  for (int i = 0; i < whole; i += kLanes) {
    vf v = load(row + i);
    bad |= ~(v < splat(INFINITY));
    store(s.x + i, v);
  }
  bool ok = lane_bits(bad) == 0;
  for (int i = whole; i < vocab; i++) {
    ok &= row[i] < INFINITY;
    s.x[i] = row[i];
  }
  for (int i = vocab; i < s.padded; i++) s.x[i] = -INFINITY;
  top = find_groups(s.x, s.padded, s.groups);
  return ok && top > -INFINITY;
}

static const char* check_ids(const int32_t* ids, int n, int vocab) {
  for (int i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= vocab) return "an edit names a token id outside the vocabulary";
  return nullptr;
}

// Mask, bias and penalties of row i, in x. Returns what is wrong, or nullptr.
static const char* edit_row(const oct_sampling& a, int i, float* x, bool& edited) {
  if (a.masks && a.masks[i]) {
    edited = true;
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
    edited = true;
    for (int j = 0; j < a.n_bias[i]; j++) x[a.bias_ids[i][j]] += a.bias_values[i][j];
  }
  float repetition = a.repetition[i], presence = a.presence[i], frequency = a.frequency[i];
  if (a.seen_ids && a.n_seen[i] && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f)) {
    if (const char* wrong = check_ids(a.seen_ids[i], a.n_seen[i], a.vocab)) return wrong;
    edited = true;
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

// The n first of the ranking of x, by insertion; the k-th group spares nearly all comparisons.
static void top_of(const SampleScratch& s, int n, double lse, int32_t* ids, float* logprobs) {
  const float* x = s.x;
  const int groups = s.padded / 16;
  float least = n <= groups ? kth_largest(s.groups, groups, n) : -INFINITY;
  int have = 0;
  for (int stripe = 0; stripe < s.padded; stripe += kStripe) {
    uint32_t any = 0;
    for (int lane = 0; lane < 16; lane += kLanes)
      any |= lane_bits(load(s.groups + stripe / 16 + lane) >= splat(least));
    for (int i = stripe; any && i < stripe + kStripe; i += kLanes)
      for (uint32_t bits = lane_bits(load(x + i) >= splat(least)); bits; bits &= bits - 1) {
        int id = i + __builtin_ctz(bits);
        if (x[id] == -INFINITY || (have == n && x[id] <= x[ids[n - 1]])) continue;
        int at = have < n ? have++ : n - 1;
        for (; at > 0 && x[ids[at - 1]] < x[id]; at--) ids[at] = ids[at - 1];
        ids[at] = id;
      }
  }
  // Fewer finite logits than wanted: the lowest ids among those at -inf follow.
  for (int id = 0; have < n; id++)
    if (x[id] == -INFINITY) ids[have++] = id;
  for (int j = 0; j < n; j++) logprobs[j] = logprob_of(x[ids[j]], lse);
}

// Chunk sums of exp((x - top) * scale) into s.sums; returns their total.
static double weigh_row(SampleScratch& s, float top, float scale) {
  double total = 0;
  for (int c = 0; c < s.padded; c += kChunk) {
    Sum16 sum;
    for (int i = c; i < c + kChunk; i += 16)
      OCT_UNROLL for (int w = 0; w < 16; w += kLanes) sum.add(w, exp((load(s.x + i + w) - splat(top)) * splat(scale)));
    total += s.sums[c / kChunk] = sum.total();
  }
  return total;
}

// The token at u of the cumulative sum over the whole row, in id order.
static int draw_any(SampleScratch& s, float top, float scale, double u) {
  double target = u * weigh_row(s, top, scale), sum = 0, before = 0;
  int start = 0;
  for (int c = 0; c < s.padded; c += kChunk) {
    double here = s.sums[c / kChunk];
    if (here > 0) start = c, before = sum;
    sum += here;
    if (sum > target) break;
  }
  for (int i = 0; i < kChunk; i += kLanes)
    store(s.work_p + i, exp((load(s.x + start + i) - splat(top)) * splat(scale)));
  return start + scan(s.work_p, kChunk, before, target);
}

// Draws from the edited logits in s.x, whose maximum is `top`.
static int draw_token(const oct_sampling& a, int i, float top, SampleScratch& s) {
  const float scale = 1.0f / a.temperature[i], min_p = a.min_p[i], top_p = a.top_p[i];
  const int k = a.top_k[i], groups = s.padded / 16;
  const double u = uniform(a.seed[i], a.choice[i], a.position[i]);
  const bool by_rank = k > 0 && k < a.vocab;
  if (!by_rank && min_p <= 0 && top_p >= 1) return draw_any(s, top, scale, u);

  Candidates& kept = s.kept;
  double whole = 0;  // the mass that top_p is a share of
  if (by_rank) {
    float least = k <= groups ? kth_largest(s.groups, groups, k) : -INFINITY;
    gather(s.x, s.every_id, s.groups, s.padded, least, top, scale, kept);
    keep_count(kept, k, s.work_x, s.work_p);
  } else if (min_p > 0) {
    float least = top + a.temperature[i] * (logf(min_p) - 0.01f);  // a little low; the weights decide
    gather(s.x, s.every_id, s.groups, s.padded, least, top, scale, kept);
  } else {
    whole = weigh_row(s, top, scale);
    for (int64_t n = 64;; n *= 8) {
      float least = n <= groups ? kth_largest(s.groups, groups, (int)n) : -INFINITY;
      gather(s.x, s.every_id, s.groups, s.padded, least, top, scale, kept);
      if (n > groups || mass(kept.p, pad(kept.x, kept.p, kept.n)) >= (double)top_p * whole) break;
    }
  }
  if (min_p > 0) keep_weighty(kept, min_p);
  if (by_rank || min_p > 0) whole = mass(kept.p, pad(kept.x, kept.p, kept.n));
  if (top_p < 1) keep_nucleus(kept, (double)top_p * whole, s.work_x, s.work_p);
  return kept.id[draw(kept, u)];
}

// Row i whole. Returns what is wrong, or nullptr.
static const char* sample_row(const oct_sampling& a, int i, SampleScratch& s) {
  const float* row = a.logits + (int64_t)i * a.vocab;
  const int forced = a.forced ? a.forced[i] : -1, n_top = a.n_top[i];
  if (forced >= a.vocab) return "the forced token is outside the vocabulary";
  if (n_top > a.top_stride) return "more alternatives are asked for than top_stride has room for";
  if (n_top > a.vocab) return "more alternatives are asked for than the vocabulary has";
  float top;
  if (!copy_row(row, a.vocab, s, top)) return "its logits hold NaN or +inf, or no finite value";

  double lse = 0;
  if (n_top >= 0) {
    lse = log_sum_exp(s.x, s.padded, top);
    if (n_top > 0) {
      int64_t at = (int64_t)i * a.top_stride;
      top_of(s, n_top, lse, a.top_ids + at, a.top_logprobs + at);
    }
  }
  int token = forced;
  if (forced < 0) {
    bool edited = false;
    if (const char* wrong = edit_row(a, i, s.x, edited)) return wrong;
    if (edited) top = find_groups(s.x, s.padded, s.groups);
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
