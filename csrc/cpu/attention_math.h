// The online softmax of one query row over a group of 64 keys, and the merge of splits.
//
// One function for every kernel and every number of rows. Scores are kept in units of log2, so that the exponential is
// a plain power of two. The state starts at (kNothing, 0, 0), and a group in which a row sees no key leaves every bit
// of its state as it was: the maximum stays, the correction is exactly 1 and the weights are exactly 0.
#pragma once
#include "attention_plan.h"

namespace octavo {
namespace OCT_ISA {

constexpr float kNothing = -1e30f;

// t = scale * score in log2 units, or cap * tanh(scale * score).
struct SoftmaxParams {
  float scale, cap;
  bool capped;

  explicit SoftmaxParams(const oct_spec& spec) {
    const float log2e = 1.44269504f;
    capped = spec.attn_softcap > 0;
    scale = capped ? spec.attn_scale / spec.attn_softcap : spec.attn_scale * log2e;
    cap = spec.attn_softcap * log2e;
  }
};

// 2^x for x <= 0 to about 1 unit in the last place; exactly 1 at 0, 0 below -126, NaN for NaN.
OCT_INLINE vf exp2_negative(vf x) {
#if defined(__AVX512F__)
  vf n = _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - n;
#else
  vi whole = round_to_int(x < splat(-126.0f) ? splat(-126.0f) : x);
  vf r = x - to_float(whole);
#endif
  vf p = splat(1.535336188319500e-4f);
  p = fma(p, r, splat(1.339887440266574e-3f));
  p = fma(p, r, splat(9.618437357674640e-3f));
  p = fma(p, r, splat(5.550332471162809e-2f));
  p = fma(p, r, splat(2.402264791363012e-1f));
  p = fma(p, r, splat(6.931472028550421e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  __mmask16 counts = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, p, n);
#else
  vf e = p * (vf)((whole + 127) << 23);
  return x < splat(-126.0f) ? (vf){} : e;
#endif
}

OCT_INLINE vi lane_numbers() {
  vi v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}
// Sum and maximum over the lanes, in every lane. The maximum is of lanes without NaN.
OCT_INLINE vf sum_lanes(vf v) {
  OCT_UNROLL for (int w = kLanes / 2; w; w /= 2) v += __builtin_shuffle(v, lane_numbers() ^ splat_i32(w));
  return v;
}
OCT_INLINE vf max_lanes(vf v) {
  OCT_UNROLL for (int w = kLanes / 2; w; w /= 2) v = max(v, __builtin_shuffle(v, lane_numbers() ^ splat_i32(w)));
  return v;
}

struct SoftmaxState { float maximum, sum; };

OCT_INLINE void store_weight(float* p, vf v) { store(p, v); }
OCT_INLINE void store_weight(bf16* p, vf v) { store_rounded(p, v); }

// The body of softmax_group; kAll: every key is seen, which spares the masks and changes no bit.
template <bool kAll, class W>
static __attribute__((noinline)) float softmax_keys(const float* scores, int first_key, int low, int high,
                                                    const SoftmaxParams& params, const float* v_scale,
                                                    SoftmaxState& state, W* weights) {
  constexpr int kVectors = kGroupKeys / kLanes;
  vf t[kVectors];
  vi seen[kVectors];
  vf top = splat(kNothing);
  OCT_UNROLL for (int i = 0; i < kVectors; i++) t[i] = load(scores + i * kLanes) * splat(params.scale);
  if (params.capped)
    for (int i = 0; i < kVectors; i++) t[i] = splat(params.cap) * tanh(t[i]);
  OCT_UNROLL for (int i = 0; i < kVectors; i++) {
    vi key = lane_numbers() + splat_i32(first_key + i * kLanes);
    seen[i] = (key >= splat_i32(low)) & (key <= splat_i32(high));
    top = max(kAll ? t[i] : seen[i] ? t[i] : splat(kNothing), top);
  }
  vf before = splat(state.maximum), highest = max(max_lanes(top), before);
  vf total = {};
  OCT_UNROLL for (int i = 0; i < kVectors; i++) {
    vf w = exp2_negative(t[i] - highest);
    if (!kAll) w = seen[i] ? w : (vf){};
    total += w;
    if (v_scale) w = w * load(v_scale + i * kLanes);
    if (!kAll) w = seen[i] ? w : (vf){};
    store_weight(weights + i * kLanes, w);
  }
  vf factor = exp2_negative(before - highest);
  state.maximum = highest[0];
  state.sum = state.sum * factor[0] + sum_lanes(total)[0];
  return factor[0];
}

// scores: 64 raw scores of keys first_key ... of which the row sees [low, high]. weights: its 64 weights, times
// v_scale[i] when that is given. Returns the factor for what was accumulated before.
template <class W>
OCT_INLINE float softmax_group(const float* scores, int first_key, int low, int high, const SoftmaxParams& params,
                               const float* v_scale, SoftmaxState& state, W* weights) {
  bool all = low <= first_key && high >= first_key + kGroupKeys - 1;
  return all ? softmax_keys<true>(scores, first_key, low, high, params, v_scale, state, weights)
             : softmax_keys<false>(scores, first_key, low, high, params, v_scale, state, weights);
}

// One vector from kLanes of them: lane i is vector i folded by f as sum_lanes and max_lanes fold, bit for bit.
template <class F> OCT_INLINE vf fold_each(vf* v, F f) {
  OCT_UNROLL for (int half = kLanes / 2; half; half /= 2) {
    // A vector holds the folded parts of kLanes / (2 * half) rows one after the other, each of 2 * half lanes.
    vi first, second;
    for (int i = 0; i < kLanes; i++) {
      first[i] = i / half * 2 * half + i % half;
      second[i] = first[i] + half;
    }
    OCT_UNROLL for (int i = 0; i < half; i++)
      v[i] = f(__builtin_shuffle(v[2 * i], v[2 * i + 1], first), __builtin_shuffle(v[2 * i], v[2 * i + 1], second));
  }
  return v[0];
}

// softmax_group for kLanes rows at a time, with its bits: what one row does alone after the other is done side by side.
// low, high, state, factor: of each row. scores and weights: [kLanes][64].
template <bool kAll, class W>
static __attribute__((noinline)) void softmax_rows(float* scores, int first_key, const int* low, const int* high,
                                                   const SoftmaxParams& params, const float* v_scale,
                                                   SoftmaxState* state, W* weights, float* factor) {
  constexpr int kVectors = kGroupKeys / kLanes;
  auto seen = [&](int r, int i) __attribute__((always_inline)) {
    vi key = lane_numbers() + splat_i32(first_key + i * kLanes);
    return (key >= splat_i32(low[r])) & (key <= splat_i32(high[r]));
  };
  vf each[kLanes];
  for (int r = 0; r < kLanes; r++) {
    vf top = splat(kNothing);
    OCT_UNROLL for (int i = 0; i < kVectors; i++) {
      float* at = scores + r * kGroupKeys + i * kLanes;
      vf t = load(at) * splat(params.scale);
      if (params.capped) t = splat(params.cap) * tanh(t);
      store(at, t);
      top = max(kAll ? t : seen(r, i) ? t : splat(kNothing), top);
    }
    each[r] = top;
  }
  float maxima[kLanes], sums[kLanes];
  for (int r = 0; r < kLanes; r++) maxima[r] = state[r].maximum, sums[r] = state[r].sum;
  const vf before = load(maxima);
  const vf highest = max(fold_each(each, [](vf a, vf b) { return max(a, b); }), before);
  const vf shrink = exp2_negative(before - highest);
  float tops[kLanes];
  store(tops, highest);
  for (int r = 0; r < kLanes; r++) {
    const vf top = splat(tops[r]);
    vf total = {};
    OCT_UNROLL for (int i = 0; i < kVectors; i++) {
      vf w = exp2_negative(load(scores + r * kGroupKeys + i * kLanes) - top);
      if (!kAll) w = seen(r, i) ? w : (vf){};
      total += w;
      if (v_scale) w = w * load(v_scale + i * kLanes);
      if (!kAll) w = seen(r, i) ? w : (vf){};
      store_weight(weights + r * kGroupKeys + i * kLanes, w);
    }
    each[r] = total;
  }
  store(sums, load(sums) * shrink + fold_each(each, [](vf a, vf b) { return a + b; }));
  store(factor, shrink);
  for (int r = 0; r < kLanes; r++) state[r] = {tops[r], sums[r]};
}

// (total, out) of each row becomes the merge of itself and a later split's (part, values). out, values: [rows][dims].
static __attribute__((noinline)) void merge_splits(SoftmaxState* total, float* out, const SoftmaxState* part,
                                                   const float* values, int rows, int dims) {
  for (int row0 = 0; row0 < rows; row0 += kLanes) {
    const int n = rows - row0 < kLanes ? rows - row0 : kLanes;
    float before[kLanes] = {}, added[kLanes] = {}, a[kLanes], b[kLanes], highest[kLanes];
    for (int i = 0; i < n; i++) before[i] = total[row0 + i].maximum, added[i] = part[row0 + i].maximum;
    store(highest, max(load(before), load(added)));
    store(a, exp2_negative(load(before) - load(highest)));
    store(b, exp2_negative(load(added) - load(highest)));
    for (int i = 0; i < n; i++) {
      SoftmaxState& state = total[row0 + i];
      state = {highest[i], state.sum * a[i] + part[row0 + i].sum * b[i]};
      const int64_t at = (int64_t)(row0 + i) * dims;
      for (int d = 0; d < dims; d += kLanes)
        store(out + at + d, load(out + at + d) * splat(a[i]) + load(values + at + d) * splat(b[i]));
    }
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
