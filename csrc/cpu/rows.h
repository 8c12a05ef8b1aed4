// What happens to single rows between the products: table look-up, norms, activation functions.
#pragma once
#include "convert.h"
#include "model.h"
#include "operand.h"

namespace octavo {
namespace OCT_ISA {

// ---------------------------------------------------------------- look-up
// Row `r` of a table as float. GGUF blocks are decoded here; out has `cols` values.
static void table_row(const Table& t, int64_t r, float* out) {
  const uint8_t* row = t.data + r * t.row_bytes;
  if (t.dtype == OCT_F32) {
    memcpy(out, row, t.cols * 4);
  } else if (t.dtype == OCT_BF16) {
    for (int64_t i = 0; i < t.cols; i++) out[i] = bf16_to_float(((const bf16*)row)[i]);
  } else if (t.dtype == OCT_F16) {
    for (int64_t i = 0; i < t.cols; i++) out[i] = half_to_float(((const uint16_t*)row)[i]);
  } else if (t.dtype == kGgml + kGgmlQ4K) {
    for (const uint8_t* b = row; b < row + t.row_bytes; b += 144) {
      uint16_t d, dmin;
      memcpy(&d, b, 2);
      memcpy(&dmin, b + 2, 2);
      for (int g = 0; g < 8; g++) {
        uint8_t scale, minimum;
        q4k_scale(b + 4, g, scale, minimum);
        float s = half_to_float(d) * scale, m = half_to_float(dmin) * minimum;
        for (int i = 0; i < 32; i++) {
          uint8_t byte = b[16 + g / 2 * 32 + i];
          *out++ = s * (g % 2 ? byte >> 4 : byte & 15) - m;
        }
      }
    }
  } else {
    int type = t.dtype - kGgml, head = type == kGgmlQ4_1 ? 4 : 2, size = head + (type == kGgmlQ8_0 ? 32 : 16);
    for (const uint8_t* b = row; b < row + t.row_bytes; b += size, out += 32) {
      uint16_t d, m = 0;
      memcpy(&d, b, 2);
      if (type == kGgmlQ4_1) memcpy(&m, b + 2, 2);
      float s = half_to_float(d), minimum = type == kGgmlQ4_0 ? -8 * s : half_to_float(m);
      if (type == kGgmlQ8_0)
        for (int i = 0; i < 32; i++) out[i] = s * (int8_t)b[2 + i];
      else
        for (int i = 0; i < 16; i++) {
          out[i] = s * (b[head + i] & 15) + minimum;
          out[i + 16] = s * (b[head + i] >> 4) + minimum;
        }
    }
  }
}

// ---------------------------------------------------------------- norms
// Sums walk the row in four interleaved vectors; n need not be a multiple of anything.
template <class F> OCT_INLINE float sum_row(const float* x, int n, F f) {
  vf acc[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    OCT_UNROLL for (int j = 0; j < 4; j++) acc[j] += f(load(x + i + j * kLanes));
  for (; i + kLanes <= n; i += kLanes) acc[0] += f(load(x + i));
  if (i < n) {
    float tail[kLanes];
    vf v;
    memcpy(tail, x + i, (n - i) * 4);
    for (int j = n - i; j < kLanes; j++) tail[j] = x[i];  // a value f can take; its lanes are cleared below
    v = f(load(tail));
    memcpy(tail, &v, sizeof v);
    for (int j = n - i; j < kLanes; j++) tail[j] = 0;
    acc[0] += load(tail);
  }
  return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

// RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016). out and x may be the same; both may be written up
// to the next whole vector (rows and weights are padded to 32).
static void norm_row(const oct_spec& spec, const Norm& norm, const float* x, int n, float* out) {
  float mean = 0;
  if (spec.flags & OCT_LAYER_NORM) mean = sum_row(x, n, [](vf v) { return v; }) / n;
  vf shift = splat(mean);
  float square = sum_row(x, n, [shift](vf v) { return (v - shift) * (v - shift); });
  vf scale = splat(1.0f / sqrtf(square / n + spec.norm_eps));
  for (int i = 0; i < n; i += kLanes) {
    vf y = (load(x + i) - shift) * scale;
    if (norm.weight) y = y * load(norm.weight + i);
    if (norm.bias) y = y + load(norm.bias + i);
    store(out + i, y);
  }
  for (int i = n; i < round_up(n, kLanes); i++) out[i] = 0;
}

// ---------------------------------------------------------------- activation functions
// erf to 2e-7: a polynomial in x^2 up to 1, beyond that 1 - exp(-x^2) P(1 / (1 + x/2)); both fitted to double precision.
OCT_INLINE vf erf(vf x) {
  const vf one = splat(1.0f);
  vf a = abs(x), s = a * a;
  vf near = splat(-0.0005654105916619301f);
  near = fma(near, s, splat(0.004923277534544468f));
  near = fma(near, s, splat(-0.026716385036706924f));
  near = fma(near, s, splat(0.11280364543199539f));
  near = fma(near, s, splat(-0.37612348794937134f));
  near = fma(near, s, splat(1.1283791065216064f)) * a;
  vf b = min(a, splat(4.0f)), t = one / fma(b, splat(0.5f), one);  // erf(4) is 1 in float
  vf p = splat(-0.05354061722755432f);
  p = fma(p, t, splat(-0.057338736951351166f));
  p = fma(p, t, splat(0.4038383662700653f));
  p = fma(p, t, splat(0.10126824676990509f));
  p = fma(p, t, splat(0.33084067702293396f));
  p = fma(p, t, splat(0.2736181616783142f));
  p = fma(p, t, splat(0.0006064087501727045f));
  vf y = a < one ? near : one - exp(-(b * b)) * p;
  return (vf)((vu)y | ((vu)x & 0x80000000u));
}

OCT_INLINE vf activate(int act, vf x) {
  switch (act) {
    case OCT_SILU: return silu(x);
    case OCT_GELU: return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.70710678f)));
    case OCT_GELU_TANH: {
      vf inner = splat(0.7978845608f) * fma(x * x * x, splat(0.044715f), x);
      return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
    }
    default: return max(x, vf{});
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
