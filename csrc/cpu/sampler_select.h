// Vector passes of the sampler: sums in a fixed order, heads of the ranking without a sort, the inverse-CDF draw.
//
// A row is padded with -inf to whole chunks of 1,024. Sums run in 16 lanes, whatever the vector width, and chunk by
// chunk in double. `groups` holds the maximum of every 16 entries (entry i belongs to group i / 256 * 16 + i % 16): at
// least k entries are as large as the k-th largest group, and seldom many more, so that value finds the few entries
// worth looking at without touching the rest.
#pragma once
#include <math.h>

#include "simd.h"

namespace octavo {
namespace OCT_ISA {

constexpr int kChunk = 1024;
constexpr int kStripe = 256;  // entries behind 16 groups

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

// Sixteen partial sums, then halved.
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

// Fills groups of the row x; returns the maximum of all.
static float find_groups(const float* x, int padded, float* groups) {
  vf top = splat(-INFINITY);
  for (int stripe = 0; stripe < padded; stripe += kStripe)
    for (int lane = 0; lane < 16; lane += kLanes) {
      vf m = load(x + stripe + lane);
      for (int i = 16; i < kStripe; i += 16) m = max(load(x + stripe + lane + i), m);
      store(groups + stripe / 16 + lane, m);
      top = max(m, top);
    }
  return max_lane(top);
}

static int find_first(const float* x, int n, float value) {
  for (int i = 0; i < n; i += kLanes)
    if (uint32_t bits = lane_bits(load(x + i) == splat(value))) return i + __builtin_ctz(bits);
  return 0;
}

// Tokens that may still be drawn, in id order. x and p can be padded behind n to a multiple of 16.
struct Candidates {
  float* x;     // edited logits
  float* p;     // exp((x - max) / temperature)
  int32_t* id;
  int n;
};

static int pad(float* x, float* p, int n) {
  int padded = (n + 15) / 16 * 16;
  for (int i = n; i < padded; i++) x[i] = -INFINITY, p[i] = 0;
  return padded;
}

struct Head { int count; double mass; };

// Number and weight of the entries with x >= least; n is a multiple of 16.
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

// The k-th largest of n values (n a multiple of 16, 1 <= k <= n), by bisection on the bits.
static float kth_largest(const float* x, int n, int k) {
  uint32_t low = order_key(-INFINITY), high = order_key(INFINITY);  // k values reach low, fewer reach high
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    vi count = {};
    for (int i = 0; i < n; i += kLanes) count -= load(x + i) >= splat(from_order_key(middle));
    int reach = 0;
    for (int i = 0; i < kLanes; i++) reach += count[i];
    (reach >= k ? low : high) = middle;
  }
  return from_order_key(low);
}

// x, p (and id, unless null) at `bits` of the vector at `from`, to place n of the output; returns the new n.
OCT_INLINE int keep_lanes(const float* x, const float* p, const int32_t* id, int from, uint32_t bits, float* out_x,
                          float* out_p, int32_t* out_id, int n) {
#if defined(__AVX512F__)
  _mm512_mask_compressstoreu_ps(out_x + n, (__mmask16)bits, load(x + from));
  _mm512_mask_compressstoreu_ps(out_p + n, (__mmask16)bits, load(p + from));
  if (id) _mm512_mask_compressstoreu_epi32(out_id + n, (__mmask16)bits, (__m512i)load_i32(id + from));
  return n + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1, n++) {
    int i = from + __builtin_ctz(bits);
    out_x[n] = x[i];
    out_p[n] = p[i];
    if (id) out_id[n] = id[i];
  }
  return n;
#endif
}

// Collects the entries of the row with x >= least (never -inf) and their weights. every_id: 0, 1, 2 ...
static void gather(const float* x, const int32_t* every_id, const float* groups, int padded, float least, float top,
                   float scale, Candidates& out) {
  out.n = 0;
  for (int stripe = 0; stripe < padded; stripe += kStripe) {
    uint32_t any = 0;
    for (int lane = 0; lane < 16; lane += kLanes)
      any |= lane_bits(load(groups + stripe / 16 + lane) >= splat(least));
    for (int i = stripe; any && i < stripe + kStripe; i += kLanes) {
      vi in = (load(x + i) >= splat(least)) & (load(x + i) > splat(-INFINITY));
      out.n = keep_lanes(x, x, every_id, i, lane_bits(in), out.x, out.p, out.id, out.n);
    }
  }
  int n = pad(out.x, out.p, out.n);
  for (int i = 0; i < n; i += kLanes) store(out.p + i, exp((load(out.x + i) - splat(top)) * splat(scale)));
}

// Keeps the entries above `cut` and the first `ties` that equal it.
static void keep_above(Candidates& c, float cut, int ties) {
  int n = 0, padded = pad(c.x, c.p, c.n);
  for (int i = 0; i < padded; i += kLanes) {
    uint32_t bits = lane_bits(load(c.x + i) > splat(cut)), equal = lane_bits(load(c.x + i) == splat(cut));
    for (; equal && ties > 0; equal &= equal - 1, ties--) bits |= equal & -equal;
    n = keep_lanes(c.x, c.p, c.id, i, bits, c.x, c.p, c.id, n);  // never writes ahead of where it reads
  }
  c.n = n;
}

static void keep_weighty(Candidates& c, float least) {
  int n = 0, padded = pad(c.x, c.p, c.n);
  for (int i = 0; i < padded; i += kLanes)
    n = keep_lanes(c.x, c.p, c.id, i, lane_bits(load(c.p + i) >= splat(least)), c.x, c.p, c.id, n);
  c.n = n;
}

struct Cut { float value; Head above; };

// The largest value that `count` or more entries reach which weigh `weight` or more, and what is above it; the lowest
// value when all together don't. Bisection on the bits; what is decided leaves the work list, so that long lists cost
// a few passes, not thirty. work_x and work_p have room for the candidates.
static Cut cut_of(const Candidates& c, int count, double weight, float* work_x, float* work_p) {
  memcpy(work_x, c.x, (size_t)c.n * 4);
  memcpy(work_p, c.p, (size_t)c.n * 4);
  int n = c.n;
  float lowest = INFINITY, highest = -INFINITY;
  for (int i = 0; i < n; i++) {
    lowest = c.x[i] < lowest ? c.x[i] : lowest;
    highest = c.x[i] > highest ? c.x[i] : highest;
  }
  uint32_t low = order_key(lowest), high = order_key(highest) + 1;  // low reaches, high doesn't
  Head above = {0, 0};                                              // of the entries at high and over it
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    float value = from_order_key(middle);
    int padded = pad(work_x, work_p, n), left = 0;
    Head head = head_of(work_x, work_p, padded, value);
    bool reaches = above.count + head.count >= count && above.mass + head.mass >= weight;
    if (reaches) {
      low = middle;
    } else {
      high = middle;
      above.count += head.count;
      above.mass += head.mass;
    }
    if (head.count == (reaches ? n : 0)) continue;  // nothing was decided
    for (int i = 0; i < padded; i += kLanes) {
      vi in = load(work_x + i) >= splat(value), real = load(work_x + i) > splat(-INFINITY);
      uint32_t stay = lane_bits(reaches ? in : real & ~in);
      left = keep_lanes(work_x, work_p, nullptr, i, stay, work_x, work_p, nullptr, left);
    }
    n = left;
  }
  return {from_order_key(low), above};
}

// top-k: the first `count` of the ranking.
static void keep_count(Candidates& c, int count, float* work_x, float* work_p) {
  if (c.n <= count) return;
  Cut cut = cut_of(c, count, 0, work_x, work_p);
  keep_above(c, cut.value, count - cut.above.count);
}

// top-p: the shortest head of the ranking that weighs `weight` or more; one entry at least.
static void keep_nucleus(Candidates& c, double weight, float* work_x, float* work_p) {
  Cut cut = cut_of(c, 1, weight, work_x, work_p);
  int equal = 0;
  double each = 0;
  for (int i = 0; i < c.n; i++)
    if (c.x[i] == cut.value) equal++, each = c.p[i];
  int ties = cut.above.count ? 0 : 1;
  while (ties < equal && cut.above.mass + ties * each < weight) ties++;
  keep_above(c, cut.value, ties);
}

// The first i whose cumulative weight exceeds target, less `before`. Never one of weight 0; the last one with weight,
// should rounding let the target slip past the end.
static int scan(const float* p, int n, double before, double target) {
  int last = 0;
  for (int i = 0; i < n; i++) {
    if (!(p[i] > 0)) continue;
    last = i;
    before += p[i];
    if (before > target) break;
  }
  return last;
}

// Index of a candidate with probability p / sum(p): the inverse of the cumulative sum at u in [0, 1).
static int draw(Candidates& c, double u) {
  int n = pad(c.x, c.p, c.n), start = 0;
  double target = u * mass(c.p, n), sum = 0, before = 0;
  for (int at = 0; at < n; at += kChunk) {
    double here = mass(c.p + at, at + kChunk < n ? kChunk : n - at);
    if (here > 0) start = at, before = sum;
    sum += here;
    if (sum > target) break;
  }
  return start + scan(c.p + start, start + kChunk < n ? kChunk : n - start, before, target);
}

}  // namespace OCT_ISA
}  // namespace octavo
