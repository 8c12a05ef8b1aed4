// Between the QKV product and attention: qk-norm, rotary positions, and every new key and value into the cache.
//
// Everything here is done row by row with the same operations, so a row's bits don't depend on its neighbours.
#pragma once
#include "kv_convert.h"
#include "step.h"

namespace octavo {
namespace OCT_ISA {

// cos and sin of every position so far, per kind of rotary: [n_rope][positions][cos: half | sin: half]. Grown on
// demand.
struct RopeTable {
  int positions, half;
  float values[];  // 64-byte aligned below
  float* line(int rope, int position) { return values + 14 + ((int64_t)rope * positions + position) * 2 * half; }
};

static void rope_table_reserve(StepContext& ctx, int last_position) {
  const oct_spec& spec = ctx.spec();
  RopeTable* table = ctx.tables.as<RopeTable>();
  if (table && last_position < table->positions) return;
  int positions = 1024, half = spec.rotary_dim / 2;
  while (positions <= last_position) positions *= 2;
  table = (RopeTable*)ctx.tables.reserve(64 + (int64_t)spec.n_rope * positions * spec.rotary_dim * 4);
  table->positions = positions;
  table->half = half;
  for (int r = 0; r < spec.n_rope; r++)
    for (int p = 0; p < positions; p++) {
      float* line = table->line(r, p);
      for (int i = 0; i < half; i++) {
        float angle = (float)p * spec.inv_freq[r * half + i];  // in f32, as the reference implementations do
        line[i] = (float)::cos((double)angle) * spec.rope_scale[r];
        line[half + i] = (float)::sin((double)angle) * spec.rope_scale[r];
      }
    }
}

// x *= weight / rms(x), n values.
static void rms_norm_in_place(float* x, const float* weight, int n, float eps) {
  vf squares = {};
  int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (int i = whole; i < n; i++) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / (float)n + eps);
  for (int i = 0; i < whole; i += kLanes) store(x + i, load(x + i) * splat(scale) * load(weight + i));
  for (int i = whole; i < n; i++) x[i] = x[i] * scale * weight[i];
}

static void qk_norm(const oct_spec& spec, float* heads, int n, const float* weight) {
  if (!weight) return;
  if (spec.flags & OCT_QK_NORM_FULL) return rms_norm_in_place(heads, weight, n * spec.head_size, spec.norm_eps);
  for (int h = 0; h < n; h++) rms_norm_in_place(heads + h * spec.head_size, weight, spec.head_size, spec.norm_eps);
}

// Rotates one head in place. line: cos[half], sin[half].
static void rotate(float* x, const float* line, int half, bool interleaved) {
  const float *cos = line, *sin = line + half;
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// Stores one encoded head of K or V at token `slot` of its block.
template <class Lane> static void scatter_k(const KvLayout& layout, uint8_t* tile, int token, const void* code) {
  const Lane* from = (const Lane*)code;
  Lane* to = (Lane*)tile + token;
  for (int i = 0; i < layout.dims / layout.group; i++) to[i * kTile] = from[i];
}
template <class Element> static void scatter_v(const KvLayout& layout, uint8_t* v, int token, const void* code) {
  const Element* from = (const Element*)code;
  const int group = layout.group;
  Element* to = (Element*)v + (int64_t)(token / group) * layout.dims * group;
#if defined(__AVX512BW__)
  // Sixteen lanes at a time: the element is moved to its place in the lane, the other bytes are left alone.
  constexpr int kSize = sizeof(Element);
  if (kSize * group == 4) {
    const int place = token % group * kSize;
    const __mmask64 mine = 0x1111111111111111ull * (((1u << kSize) - 1) << place);
    for (int i = 0; i < layout.dims; i += kLanes) {
      typedef Element line __attribute__((vector_size(kSize * kLanes)));
      line x;
      memcpy(&x, from + i, sizeof x);
      vu lanes = __builtin_convertvector(x, vu) << (uint32_t)(8 * place);
      _mm512_mask_storeu_epi8(to + i * group, mine, (__m512i)lanes);
    }
    return;
  }
#endif
  for (int i = 0; i < layout.dims; i++) to[i * group + token % group] = from[i];
}

static void kv_write(const KvLayout& layout, uint8_t* piece, int slot, const float* k, const float* v) {
  alignas(64) uint8_t code[2][4 * kMaxHeadSize];
  float scale[2] = {encode(k, layout.dims, layout.dtype, code[0]), encode(v, layout.dims, layout.dtype, code[1])};
  int token = layout.tiled ? slot % kTile : slot, tokens = layout.tiled ? kTile : layout.block_size;
  if (layout.dtype == OCT_I8) {
    float* scales = (float*)(piece + layout.scale_offset);
    scales[token] = scale[0];
    scales[tokens + token] = scale[1];
  }
  if (!layout.tiled) {
    int64_t bytes = (int64_t)layout.dims * layout.element;
    memcpy(piece + token * bytes, code[0], (size_t)bytes);
    memcpy(piece + layout.v_offset + token * bytes, code[1], (size_t)bytes);
    return;
  }
  if (layout.group * layout.element == 4) scatter_k<uint32_t>(layout, piece, token, code[0]);
  else scatter_k<uint16_t>(layout, piece, token, code[0]);
  if (layout.element == 4) scatter_v<uint32_t>(layout, piece + layout.v_offset, token, code[1]);
  else if (layout.element == 2) scatter_v<uint16_t>(layout, piece + layout.v_offset, token, code[1]);
  else scatter_v<uint8_t>(layout, piece + layout.v_offset, token, code[1]);
}

static void rope_and_write(StepContext& ctx, int layer, int thread) {
  const oct_spec& spec = ctx.spec();
  const oct_kv& kv = *ctx.kv;
  const Layer& weights = ctx.model->layers[(size_t)layer];
  const KvLayout layout(spec, kv.block_size, kv.dtype);
  const int size = spec.head_size, rope = weights.rope, q_width = spec.heads * size;
  RopeTable* table = ctx.tables.as<RopeTable>();
  alignas(64) float k_head[kMaxHeadSize] = {}, v_head[kMaxHeadSize] = {};  // the tail above head_size stays zero
  // Neighbouring tokens share cache lines: many rows are cut by tiles.
  Range rows = range(ctx.n_rows, thread, ctx.threads(), ctx.n_rows >= 32 * ctx.threads() ? kTile : 1);
  for (int row = rows.begin; row < rows.end; row++) {
    float* q = ctx.qkv + (int64_t)row * ctx.qkv_stride;
    float *k = q + q_width, *v = k + spec.kv_heads * size;
    int position = ctx.row_pos[row];
    qk_norm(spec, q, spec.heads, weights.q_norm);
    qk_norm(spec, k, spec.kv_heads, weights.k_norm);
    if (rope >= 0 && spec.rotary_dim)
      for (int h = 0; h < spec.heads + spec.kv_heads; h++)
        rotate(q + h * size, table->line(rope, position), table->half, spec.flags & OCT_ROPE_INTERLEAVED);

    if (ctx.bf16_compute()) {
      bf16* out = (bf16*)ctx.q + (int64_t)row * q_width;
      int i = 0;
      for (; i + kLanes <= q_width; i += kLanes) store_rounded(out + i, load(q + i));
      for (; i < q_width; i++) out[i] = float_to_bf16(q[i]);
    } else {
      memcpy((float*)ctx.q + (int64_t)row * q_width, q, 4 * (size_t)q_width);
    }

    const int32_t* blocks = ctx.batch->tables + ctx.batch->table_line[ctx.row_seq[row]] * ctx.batch->table_stride;
    int block = blocks[position / kv.block_size], slot = position % kv.block_size;
    for (int h = 0; h < spec.kv_heads; h++) {
      memcpy(k_head, k + h * size, 4 * (size_t)size);
      memcpy(v_head, v + h * size, 4 * (size_t)size);
      kv_write(layout, layout.piece(kv, block, layer, h, slot), slot, k_head, v_head);
    }
  }
}

}  // namespace OCT_ISA
}  // namespace octavo
