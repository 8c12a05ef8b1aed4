// What both attention kernels share: which rows and keys a block has, masking, and the merge of parts.
//
// The rows of a block are neighbours in (token, query head of one KV head): decode packs the heads that share a KV
// head, prefill packs tokens too. Keys are walked in parts of OCTG_PART positions counted from position 0. A part is
// reduced on its own and parts are merged in order, by one block or, split, by `merge_parts` (Flash-Decoding, Dao et
// al. 2023): the same operations on the same numbers, so the bits don't tell which.
#pragma once
#include "kernels.h"
#include "platform.h"

constexpr int TILE = 128;  // keys between two looks at the running maximum; divides OCTG_PART

struct Place {
  int seq, kv_head, group;           // group: query heads of a KV head
  int first, rows;                   // of the block, counted in the sequence's (token, head of the group)
  int q_row;                         // row of the sequence's first token in q
  int position;                      // of that token
  int low, high;                     // keys that any row of the block may see
  int first_part, end_part;
};

// Grid: (row tiles * parts if split, kv heads, sequences). False where there is nothing to do.
DEVICE bool find_place(const octg_attention& a, int tile_rows, bool split, int parts, Place& p) {
  p.seq = blockIdx.z;
  p.kv_head = blockIdx.y;
  p.group = a.heads / a.kv_heads;
  const int tokens = a.q_start[p.seq + 1] - a.q_start[p.seq];
  const int tile = split ? blockIdx.x / parts : blockIdx.x;
  p.first = tile * tile_rows;
  if (p.first >= tokens * p.group) return false;
  p.rows = min(tile_rows, tokens * p.group - p.first);
  p.q_row = a.q_start[p.seq];
  p.position = a.seq_lens[p.seq] - tokens;
  p.high = p.position + (p.first + p.rows - 1) / p.group + 1;
  p.low = a.window ? max(0, p.position + p.first / p.group - a.window + 1) : 0;
  p.first_part = p.low / OCTG_PART;
  p.end_part = (p.high + OCTG_PART - 1) / OCTG_PART;
  if (split) {
    const int part = blockIdx.x % parts;
    if (part < p.first_part || part >= p.end_part) return false;
    p.first_part = part;
    p.end_part = part + 1;
  }
  return true;
}

// Element of q and out where (token, head of the group) `row` of the block begins.
DEVICE int64_t query_offset(const octg_attention& a, const Place& p, int row) {
  const int at = p.first + row;
  return (int64_t(p.q_row + at / p.group) * a.heads + p.kv_head * p.group + at % p.group) * a.head_size;
}

DEVICE bool visible(const octg_attention& a, const Place& p, int row, int key) {
  const int position = p.position + (p.first + row) / p.group;
  return row < p.rows && key <= position && (!a.window || key > position - a.window);
}

// Scores in units of log 2, so that the softmax is exp2.
DEVICE float score(const octg_attention& a, float dot, float scale) {
  const float s = dot * scale;
  return (a.softcap > 0 ? a.softcap * tanhf(s / a.softcap) : s) * LOG2E;
}

// Softmax over some keys: maximum, sum of exp2(score - maximum), and a weighted sum of values kept elsewhere.
struct State { float max, sum; };

struct Factors { float old, added; };

// Takes `part` into `total` and says by what to multiply the two weighted sums. A part without keys changes nothing.
DEVICE Factors merge(State& total, const State& part) {
  if (part.max == NEG_INF) return {1.0f, 0.0f};
  const float top = fmaxf(total.max, part.max);
  const Factors f{exp2_fast(total.max - top), exp2_fast(part.max - top)};
  total.sum = fmaf(total.sum, f.old, part.sum * f.added);
  total.max = top;
  return f;
}
DEVICE float merged(float total, float part, const Factors& f) { return fmaf(total, f.old, part * f.added); }

// Workspace: weighted sums [rows][heads][parts][head_size], then maxima and sums [rows][heads][parts] each.
DEVICE int64_t part_index(const octg_attention& a, int parts, int64_t query, int part) {
  return query / a.head_size * parts + part;
}
DEVICE float* part_states(const octg_attention& a, int parts) {
  return a.workspace + int64_t(a.rows) * a.heads * parts * a.head_size;
}
DEVICE void store_part(const octg_attention& a, int parts, int64_t query, int part, int d, float x, const State& s) {
  const int64_t i = part_index(a, parts, query, part);
  a.workspace[i * a.head_size + d] = x;
  if (d == 0) {
    part_states(a, parts)[2 * i] = s.max;
    part_states(a, parts)[2 * i + 1] = s.sum;
  }
}

// Grid (heads, tokens of the longest sequence, sequences), a thread a dimension.
template <typename T> __global__ void merge_parts(octg_attention a, int parts) {
  const int seq = blockIdx.z, tokens = a.q_start[seq + 1] - a.q_start[seq], token = blockIdx.y, d = threadIdx.x;
  if (token >= tokens || d >= a.head_size) return;
  const int position = a.seq_lens[seq] - tokens + token;
  const int first = a.window ? max(0, position - a.window + 1) / OCTG_PART : 0;
  const int64_t query = (int64_t(a.q_start[seq] + token) * a.heads + blockIdx.x) * a.head_size;
  State total{NEG_INF, 0};
  float sum = 0;
  for (int part = first; part <= position / OCTG_PART; part++) {
    const int64_t i = part_index(a, parts, query, part);
    const float* state = part_states(a, parts) + 2 * i;
    const Factors f = merge(total, State{state[0], state[1]});
    sum = merged(sum, a.workspace[i * a.head_size + d], f);
  }
  static_cast<T*>(a.out)[query + d] = from_float<T>(sum / total.sum);
}

DEVICE int log2_of(int power) {
  int n = 0;
  while (power >> (n + 1)) n++;
  return n;
}
