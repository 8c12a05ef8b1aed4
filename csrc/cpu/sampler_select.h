// Vector passes of the sampler: sums in a fixed order, the cut of a ranking by bisection, the inverse-CDF draw.
//
// Arrays have a length that is a multiple of kChunk (whole rows) or of 16 (candidate lists), padded with entries of
// logit -inf and weight 0, which no pass counts.
#pragma once
#include <math.h>

#include "simd.h"

namespace octavo {
namespace OCT_ISA {

constexpr int kChunk = 1024;

// One bit a lane of a comparison's result.
OCT_INLINE uint32_t lane_bits(vi condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)condition);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= (uint32_t)(condition[i] & 1) << i;
  return bits;
#endif
}

// Sixteen partial sums whatever the vector width, then halved: one order on every instruction set.
struct Sum16 {
  vf part[16 / kLanes] = {};
  void add(int lane, vf v) { part[lane / kLanes] += v; }
  float total() const {
    float lane[16];
    memcpy(lane, part, sizeof lane);
    for (int w = 8; w; w /= 2)
      for (int i = 0; i < w; i++) lane[i] += lane[i + w];
    return lane[0];
  }
};

static float maximum(const float* x, int n) {
  vf top = splat(-INFINITY);
  for (int i = 0; i < n; i += kLanes) top = max(load(x + i), top);
  return max_lane(top);
}

static int find_first(const float* x, int n, float value) {
  for (int i = 0; i < n; i += kLanes)
    if (uint32_t bits = lane_bits(load(x + i) == splat(value))) return i + __builtin_ctz(bits);
  return 0;
}

// Tokens that may still be drawn, in id order. Padded behind n to a multiple of 16.
struct Candidates {
  float* x;     // edited logits
  float* p;     // exp((x - max) / temperature)
  int32_t* id;
  int n;
};

static int pad(Candidates& c) {
  int padded = (c.n + 15) / 16 * 16;
  for (int i = c.n; i < padded; i++) c.x[i] = -INFINITY, c.p[i] = 0, c.id[i] = 0;
  return padded;
}

struct Head { int count; double mass; };

// Number and weight of the entries with x >= least.
static Head head_of(const float* x, const float* p, int n, float least) {
  Head head = {0, 0};
  for (int c = 0; c < n; c += kChunk) {
    Sum16 sum;
    vi count = {};
    int end = c + kChunk < n ? c + kChunk : n;
    for (int i = c; i < end; i += 16)
      OCT_UNROLL for (int w = 0; w < 16; w += kLanes) {
        vi in = load(x + i + w) >= splat(least);
        count -= in;
        sum.add(w, (vf)((vi)load(p + i + w) & in));
      }
    for (int i = 0; i < kLanes; i++) head.count += count[i];
    head.mass += sum.total();
  }
  return head;
}

static double mass(const float* p, int n) {
  double total = 0;
  for (int c = 0; c < n; c += kChunk) {
    Sum16 sum;
    int end = c + kChunk < n ? c + kChunk : n;
    for (int i = c; i < end; i += 16)
      OCT_UNROLL for (int w = 0; w < 16; w += kLanes) sum.add(w, load(p + i + w));
    total += sum.total();
  }
  return total;
}
static double mass(Candidates& c) { return mass(c.p, pad(c)); }

// Floats as integers of the same order.
OCT_INLINE uint32_t order_key(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
OCT_INLINE float from_order_key(uint32_t k) {
  uint32_t u = k & 0x80000000u ? k & 0x7fffffffu : ~k;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static bool reaches(const Head& head, int count, double weight) { return head.count >= count && head.mass >= weight; }

// Collects into `out` every entry that `keep` (a vector of x and p to lane masks) accepts.
template <class Keep> static void gather(const float* x, const float* p, int n, Candidates& out, Keep keep) {
  out.n = 0;
  for (int i = 0; i < n; i += kLanes)
    for (uint32_t bits = lane_bits(keep(load(x + i), load(p + i))); bits; bits &= bits - 1) {
      int id = i + __builtin_ctz(bits);
      out.x[out.n] = x[id];
      out.p[out.n] = p[id];
      out.id[out.n++] = id;
    }
}

// A head of the ranking that has at least `count` entries and `weight` of mass, and not many more: the range below the
// maximum is doubled until it holds them.
static void gather_top(const float* x, const float* p, int n, float top, float temperature, int count, double weight,
                       Candidates& out) {
  float least = -INFINITY;
  for (float width = 2 * temperature; width < 1e4f; width *= 2)
    if (reaches(head_of(x, p, n, top - width), count, weight)) {
      least = top - width;
      break;
    }
  // Entries at -inf are no candidates, even where fewer than `count` others are left.
  gather(x, p, n, out, [least](vf x, vf) { return (vi)(x >= splat(least)) & (vi)(x > splat(-INFINITY)); });
}

static void gather_mass(const float* x, const float* p, int n, float least, Candidates& out) {
  gather(x, p, n, out, [least](vf, vf p) { return (vi)(p >= splat(least)); });
}

// Keeps the entries above `cut` and the first `ties` that equal it.
static void keep_above(Candidates& c, float cut, int ties) {
  int n = 0;
  for (int i = 0; i < c.n; i++)
    if (c.x[i] > cut || (c.x[i] == cut && ties-- > 0)) {
      c.x[n] = c.x[i];
      c.p[n] = c.p[i];
      c.id[n++] = c.id[i];
    }
  c.n = n;
}

static void keep_mass(Candidates& c, float least) {
  int n = 0;
  for (int i = 0; i < c.n; i++)
    if (c.p[i] >= least) {
      c.x[n] = c.x[i];
      c.p[n] = c.p[i];
      c.id[n++] = c.id[i];
    }
  c.n = n;
}

// The largest value v such that the entries with x >= v are `count` or more and weigh `weight` or more; the lowest
// value there is when all together don't. Bisection on the bits.
static float cut_of(Candidates& c, int count, double weight) {
  int n = pad(c);
  float lowest = INFINITY, highest = -INFINITY;
  for (int i = 0; i < c.n; i++) {
    lowest = c.x[i] < lowest ? c.x[i] : lowest;
    highest = c.x[i] > highest ? c.x[i] : highest;
  }
  uint32_t low = order_key(lowest), high = order_key(highest) + 1;  // low reaches, high doesn't
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    (reaches(head_of(c.x, c.p, n, from_order_key(middle)), count, weight) ? low : high) = middle;
  }
  return from_order_key(low);
}

// top-k: the first `count` of the ranking.
static void keep_count(Candidates& c, int count) {
  if (c.n <= count) return;
  float cut = cut_of(c, count, 0);
  int above = 0;
  for (int i = 0; i < c.n; i++) above += c.x[i] > cut;
  keep_above(c, cut, count - above);
}

// top-p: the shortest head of the ranking that weighs `weight` or more; one entry at least.
static void keep_nucleus(Candidates& c, double weight) {
  float cut = cut_of(c, 1, weight);
  int above = 0, equal = 0;
  double heavier = 0, each = 0;
  for (int i = 0; i < c.n; i++) {
    if (c.x[i] > cut) above++, heavier += c.p[i];
    if (c.x[i] == cut) equal++, each = c.p[i];
  }
  int ties = above ? 0 : 1;
  while (ties < equal && heavier + ties * each < weight) ties++;
  keep_above(c, cut, ties);
}

// Index i with probability p[i] / sum(p): the inverse of the cumulative sum at u in [0, 1). Never one of weight 0;
// the last one with weight, should rounding let the target slip past the end.
static int draw(const float* p, int n, double u) {
  double target = u * mass(p, n), sum = 0, before = 0;
  int start = 0;
  for (int c = 0; c < n; c += kChunk) {
    double here = mass(p + c, c + kChunk < n ? kChunk : n - c);
    if (here > 0) start = c, before = sum;
    sum += here;
    if (sum > target) break;
  }
  int last = start;
  for (int i = start; i < n && i < start + kChunk; i++) {
    if (!(p[i] > 0)) continue;
    last = i;
    before += p[i];
    if (before > target) break;
  }
  return last;
}

}  // namespace OCT_ISA
}  // namespace octavo
