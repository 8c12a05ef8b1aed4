// One step: all layers of a batch of rows, in one run of the thread pool. Compiled once per instruction set.
#include "step.h"

#include <new>

#include "attention.h"
#include "measure.h"
#include "moe.h"
#include "product.h"
#include "sampler.h"

namespace octavo {
namespace OCT_ISA {

// All that a model's steps reuse.
struct StepState {
  StepContext ctx;
  Operand attn_in, mlp_in, attn_out, mid, head_in;
  Routing routing;
  Buffer x, qkv, q, y, row_seq, row_pos, widened_mid;
  Buffer* row_scratch = nullptr;      // [threads] one row as float
  ProductScratch* product_scratch = nullptr;  // [threads]
  int64_t x_stride = 0;
  int scratch_threads = 0;

  ~StepState() {
    delete[] row_scratch;
    delete[] product_scratch;
  }
};

static int forms(const Matrix& m) { return m.data ? form_of(m.kind) : 0; }

// Runs the layers on one thread of the pool; every method that all threads run ends with a barrier, or says otherwise.
class Runner {
 public:
  Runner(StepState& state, int thread) : s_(state), ctx_(state.ctx), spec_(state.ctx.spec()), thread_(thread) {}

  void run() {
    if (thread_ == 0) phase_began_ = now();
    embed();
    for (int i = 0; i < spec_.layers; i++) layer(i);
    head();
    release_tiles();
  }

 private:
  const Layer& at(int i) const { return ctx_.model->layers[i]; }
  float* x(int row) { return s_.x.as<float>() + row * s_.x_stride; }
  float* y(int row) { return s_.y.as<float>() + row * s_.x_stride; }
  float* scratch_row() { return s_.row_scratch[thread_].as<float>(); }
  // The barrier that ends a phase, or a part of it.
  void meet(oct_phase phase) {
    if (thread_ != 0) return ctx_.barrier();
    const double arrived = now();
    ctx_.barrier();
    const double left = now();
    phase_seconds[phase] += left - phase_began_;
    phase_seconds[OCT_IN_WAITING] += left - arrived;
    phase_began_ = left;
  }
  Range my_rows() const { return range(ctx_.n_rows, thread_, ctx_.threads()); }

  void embed() {
    const Model& m = *ctx_.model;
    Range rows = my_rows();
    for (int r = rows.begin; r < rows.end; r++) {
      table_row(m.embed, ctx_.batch->tokens[r], x(r));
      if (spec_.embedding_scale != 1.0f)
        for (int i = 0; i < spec_.hidden; i++) x(r)[i] *= spec_.embedding_scale;
      if (m.positions.data) {
        table_row(m.positions, ctx_.row_pos[r] + spec_.learned_positions, scratch_row());
        for (int i = 0; i < spec_.hidden; i++) x(r)[i] += scratch_row()[i];
      }
    }
    meet(OCT_IN_EMBEDDING);
  }

  // A row of the residual stream, normed if there is such a norm, into an operand.
  void put_normed(Operand& to, int wanted, const Norm& norm, int r) {
    float* row = scratch_row();
    if (norm.weight || norm.bias) norm_row(spec_, norm, x(r), spec_.hidden, row);
    else memcpy(row, x(r), spec_.hidden * 4);
    for (int i = spec_.hidden; i < to.groups * kGroup; i++) row[i] = 0;
    put_row(to, wanted, r, row);
  }

  // The products of one phase; the caller puts a barrier behind it.
  void products(Product* all, int count) {
    run_products(all, count, *ctx_.pool, thread_, s_.product_scratch[thread_]);
  }
  void product(const Matrix& w, const Operand& a, int rows, const Target& target) {
    Product one = {&w, &a, 0, rows, target, 0};
    products(&one, 1);
  }

  // x += scale * norm(y), for families with a norm behind the sublayer. No barrier.
  void add_normed(const Norm& norm, int r) {
    norm_row(spec_, norm, y(r), spec_.hidden, y(r));
    for (int i = 0; i < spec_.hidden; i += kLanes)
      store(x(r) + i, fma(load(y(r) + i), splat(spec_.residual_scale), load(x(r) + i)));
  }

  void layer(int i) {
    const Layer& l = at(i);
    const bool parallel = spec_.flags & OCT_PARALLEL;
    const bool behind = spec_.flags & (OCT_NORM_POST | OCT_NORM_SANDWICH);
    const int attn_forms = forms(l.q) | forms(l.k) | forms(l.v), mlp_forms = mlp_input_forms(l);
    Range rows = my_rows();
    for (int r = rows.begin; r < rows.end; r++) {
      put_normed(s_.attn_in, attn_forms, l.attn_norm, r);
      if (parallel) put_normed(s_.mlp_in, mlp_forms, l.mlp_norm.weight ? l.mlp_norm : l.attn_norm, r);
    }
    meet(OCT_IN_NORMS);

    Target qkv = store_to(ctx_.qkv, ctx_.qkv_stride);
    const int n = ctx_.n_rows;
    Product all[] = {{&l.q, &s_.attn_in, 0, n, qkv, 0},
                           {&l.k, &s_.attn_in, 0, n, qkv, l.q.n},
                           {&l.v, &s_.attn_in, 0, n, qkv, l.q.n + l.k.n}};
    products(all, 3);
    meet(OCT_IN_QKV);
    rope_and_write(ctx_, i, thread_);
    meet(OCT_IN_ROPE);
    attend(ctx_, i, thread_);
    meet(OCT_IN_ATTENTION);
    convert(s_.attn_out, forms(l.o), OCT_IN_O);
    Target out = add_to(s_.x.as<float>(), s_.x_stride, spec_.residual_scale);
    Target aside = store_to(s_.y.as<float>(), s_.x_stride);
    product(l.o, s_.attn_out, n, behind ? aside : out);
    meet(OCT_IN_O);

    for (int r = rows.begin; r < rows.end; r++) {
      if (behind) add_normed(l.attn_post_norm, r);
      if (!parallel) put_normed(s_.mlp_in, mlp_forms, l.mlp_norm, r);
    }
    meet(OCT_IN_NORMS);
    if (l.moe) {
      experts(l);
    } else {
      product(l.gate_up, s_.mlp_in, n, activation_target(s_.mid));
      meet(OCT_IN_GATE_UP);
      convert(s_.mid, forms(l.down), OCT_IN_DOWN);
      product(l.down, s_.mid, n, behind ? aside : out);
      meet(OCT_IN_DOWN);
    }
    if (behind) {
      for (int r = rows.begin; r < rows.end; r++) add_normed(l.mlp_post_norm, r);
    } else if (l.moe) {
      for (int r = rows.begin; r < rows.end; r++)
        for (int j = 0; j < spec_.hidden; j += kLanes)
          store(x(r) + j, fma(load(y(r) + j), splat(spec_.residual_scale), load(x(r) + j)));
    }
  }

  int mlp_input_forms(const Layer& l) const {
    if (!l.moe) return forms(l.gate_up);
    int all = forms(l.router);
    for (const Expert& e : l.experts) all |= forms(e.gate_up);
    return all;
  }

  // The MLP's inner activations are written in the compute type.
  Target activation_target(Operand& mid) const {
    Target t;
    t.kind = spec_.flags & OCT_GATED ? Target::kGate : Target::kActivate;
    t.act = spec_.act;
    if (ctx_.bf16_compute()) t.b16 = mid.b16, t.stride = mid.bf16_stride;
    else t.f32 = mid.f32, t.stride = mid.f32_stride;
    return t;
  }

  // Brings the rows of an operand from the compute type into the form that the next product reads.
  void convert(Operand& a, int wanted, oct_phase phase) {
    convert_rows(a, wanted, ctx_.n_rows, phase);
  }
  void convert_rows(Operand& a, int wanted, int n, oct_phase phase) {
    const int have = ctx_.bf16_compute() ? kFormBF16 : kFormF32;
    if (!(wanted & ~have)) return;
    Range rows = range(n, thread_, ctx_.threads());
    float* row = scratch_row();
    for (int r = rows.begin; r < rows.end; r++) {
      for (int i = 0; i < a.groups * kGroup; i += kLanes)
        store(row + i, have == kFormBF16 ? load_bf16(a.b16 + (int64_t)r * a.bf16_stride + i)
                                         : load(a.f32 + (int64_t)r * a.f32_stride + i));
      put_row(a, wanted & ~have, r, row);
    }
    meet(phase);
  }

  // Leaves the sum over the experts of each row in y.
  void experts(const Layer& l) {
    Routing& routing = s_.routing;
    const int k = spec_.experts_per_token, n = ctx_.n_rows;
    product(l.router, s_.mlp_in, n, store_to(routing.logits.as<float>(), spec_.experts));
    meet(OCT_IN_GATE_UP);
    if (thread_ == 0) route(routing, spec_, n);
    meet(OCT_IN_GATE_UP);
    const int32_t *slots = routing.slots.as<int32_t>(), *starts = routing.starts.as<int32_t>();
    Range rows = my_rows();
    for (int r = rows.begin; r < rows.end; r++)
      for (int i = 0; i < k; i++) copy_row(s_.mlp_in, r, routing.inputs, slots[r * k + i]);
    meet(OCT_IN_GATE_UP);
    int down_forms = 0;
    Product* all = routing.products[thread_].as<Product>();
    for (int e = 0; e < spec_.experts; e++) {
      down_forms |= forms(l.experts[e].down);
      all[e] = {&l.experts[e].gate_up, &routing.inputs, starts[e], starts[e + 1] - starts[e],
                activation_target(routing.mid), 0};
    }
    products(all, spec_.experts);
    meet(OCT_IN_GATE_UP);
    convert_rows(routing.mid, down_forms, n * k, OCT_IN_DOWN);
    for (int e = 0; e < spec_.experts; e++)
      all[e] = {&l.experts[e].down, &routing.mid, starts[e], starts[e + 1] - starts[e],
                store_to(routing.outputs.as<float>(), s_.x_stride), 0};
    products(all, spec_.experts);
    meet(OCT_IN_DOWN);
    for (int r = rows.begin; r < rows.end; r++)
      for (int j = 0; j < spec_.hidden; j += kLanes) {
        vf sum = {};
        for (int i = 0; i < k; i++) {
          const float* expert = routing.outputs.as<float>() + slots[r * k + i] * s_.x_stride;
          sum = fma(splat(routing.weights.as<float>()[r * k + i]), load(expert + j), sum);
        }
        store(y(r) + j, sum);
      }
  }

  static void copy_row(const Operand& from, int r, Operand& to, int at) {
    if (to.f32) memcpy(to.f32 + (int64_t)at * to.f32_stride, from.f32 + (int64_t)r * from.f32_stride, to.f32_stride * 4);
    if (to.b16) memcpy(to.b16 + (int64_t)at * to.bf16_stride, from.b16 + (int64_t)r * from.bf16_stride, to.bf16_stride * 2);
    if (!to.q8) return;
    memcpy(to.q8 + (int64_t)at * to.q8_stride, from.q8 + (int64_t)r * from.q8_stride, to.q8_stride);
    memcpy(to.scale + (int64_t)at * to.groups, from.scale + (int64_t)r * to.groups, to.groups * 4);
    memcpy(to.sum + (int64_t)at * to.groups, from.sum + (int64_t)r * to.groups, to.groups * 4);
  }

  void head() {
    const oct_batch& b = *ctx_.batch;
    const Model& m = *ctx_.model;
    meet(OCT_IN_NORMS);  // rows of x may have been finished by other threads
    Range logits = range(b.n_logits, thread_, ctx_.threads());
    for (int i = logits.begin; i < logits.end; i++) put_final(b.logit_rows[i], i);
    Range hidden = range(b.n_hidden, thread_, ctx_.threads());
    for (int i = hidden.begin; i < hidden.end; i++) {
      final_norm(b.hidden_rows[i]);
      memcpy(b.hidden + (int64_t)i * spec_.hidden, scratch_row(), spec_.hidden * 4);
    }
    meet(OCT_IN_HEAD);
    product(m.lm_head, s_.head_in, b.n_logits,
            store_to(b.logits, spec_.vocab, spec_.logit_scale, spec_.final_softcap));
    meet(OCT_IN_HEAD);
  }

  void final_norm(int r) {
    const Norm& norm = ctx_.model->final_norm;
    if (norm.weight || norm.bias) norm_row(spec_, norm, x(r), spec_.hidden, scratch_row());
    else memcpy(scratch_row(), x(r), spec_.hidden * 4);
  }
  void put_final(int r, int at) {
    final_norm(r);
    for (int i = spec_.hidden; i < s_.head_in.groups * kGroup; i++) scratch_row()[i] = 0;
    put_row(s_.head_in, forms(ctx_.model->lm_head), at, scratch_row());
  }

  StepState& s_;
  StepContext& ctx_;
  const oct_spec& spec_;
  const int thread_;
  double phase_began_ = 0;
};

static int check_batch(const Model& m, const oct_batch& b) {
  const oct_spec& s = m.spec;
  if (b.n_rows < 0 || b.n_seqs < 0 || b.n_logits < 0 || b.n_hidden < 0) return fail("a count of the batch is negative");
  if (b.q_start[0] != 0 || b.q_start[b.n_seqs] != b.n_rows) return fail("q_start must run from 0 to n_rows");
  for (int i = 0; i < b.n_seqs; i++) {
    if (b.q_start[i + 1] < b.q_start[i]) return fail("q_start must not fall (sequence %d)", i);
    if (b.pos_start[i] < 0) return fail("sequence %d starts at position %d", i, b.pos_start[i]);
    int end = b.pos_start[i] + b.q_start[i + 1] - b.q_start[i];
    if (m.positions.data && end > s.max_position)
      return fail("sequence %d reaches position %d, the model has %d", i, end, s.max_position);
    if (b.adapter && b.adapter[i] >= 0) return fail("no adapter %d is loaded", b.adapter[i]);
  }
  for (int i = 0; i < b.n_rows; i++)
    if (b.tokens[i] < 0 || b.tokens[i] >= s.vocab)
      return fail("row %d has token %d, the vocabulary has %d", i, b.tokens[i], s.vocab);
  for (int i = 0; i < b.n_logits; i++)
    if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.n_rows) return fail("logit row %d is not in the batch", b.logit_rows[i]);
  for (int i = 0; i < b.n_hidden; i++)
    if (b.hidden_rows[i] < 0 || b.hidden_rows[i] >= b.n_rows)
      return fail("hidden row %d is not in the batch", b.hidden_rows[i]);
  return 0;
}

static void prepare(StepState& s, const Model& m, const oct_kv* kv, const oct_batch& b) {
  const oct_spec& spec = m.spec;
  StepContext& ctx = s.ctx;
  ctx.model = &m, ctx.kv = kv, ctx.batch = &b, ctx.pool = &pool(), ctx.n_rows = b.n_rows;
  const int n = b.n_rows + kPanel, q_size = spec.heads * spec.head_size, compute = ctx.bf16_compute() ? kFormBF16 : kFormF32;
  int widest = q_size > spec.hidden ? q_size : spec.hidden;
  int attn = 0, mlp = 0, out = compute, mid = compute, expert = 0, expert_mid = compute;
  bool any_moe = false, any_dense = false;
  for (const Layer& l : m.layers) {
    attn |= forms(l.q) | forms(l.k) | forms(l.v);
    out |= forms(l.o);
    mlp |= forms(l.gate_up) | forms(l.router);
    mid |= forms(l.down);
    any_moe |= l.moe, any_dense |= !l.moe;
    for (const Expert& e : l.experts) expert |= forms(e.gate_up), expert_mid |= forms(e.down);
  }
  if (any_dense && spec.inter > widest) widest = spec.inter;
  if (any_moe && spec.moe_inter > widest) widest = spec.moe_inter;
  s.x_stride = round_up(spec.hidden, kPanel);
  ctx.x = s.x.reserve_array<float>(n * s.x_stride);
  s.y.reserve_array<float>(n * s.x_stride);
  s.attn_in.reserve(b.n_rows, spec.hidden, attn);
  s.mlp_in.reserve(b.n_rows, spec.hidden, mlp | expert);
  s.attn_out.reserve(b.n_rows, q_size, out);
  if (any_dense) s.mid.reserve(b.n_rows, spec.inter, mid);
  if (any_moe) s.routing.reserve(spec, n, ctx.threads(), expert, expert_mid);
  s.head_in.reserve(b.n_logits, spec.hidden, forms(m.lm_head));
  ctx.qkv_stride = (spec.heads + 2 * spec.kv_heads) * spec.head_size;
  ctx.qkv = s.qkv.reserve_array<float>((int64_t)n * ctx.qkv_stride);
  ctx.q = s.q.reserve((int64_t)n * q_size * (compute == kFormBF16 ? 2 : 4));
  ctx.attn = compute == kFormBF16 ? (void*)s.attn_out.b16 : (void*)s.attn_out.f32;
  ctx.attn_stride = compute == kFormBF16 ? s.attn_out.bf16_stride : s.attn_out.f32_stride;
  if (s.scratch_threads < ctx.threads()) {
    delete[] s.row_scratch;
    delete[] s.product_scratch;
    s.scratch_threads = ctx.threads();
    s.row_scratch = new Buffer[s.scratch_threads];
    s.product_scratch = new ProductScratch[s.scratch_threads];
  }
  for (int t = 0; t < ctx.threads(); t++) s.row_scratch[t].reserve_array<float>(round_up(widest, 256));
  int32_t* seq = s.row_seq.reserve_array<int32_t>(n);
  int32_t* pos = s.row_pos.reserve_array<int32_t>(n);
  for (int i = 0; i < b.n_seqs; i++)
    for (int r = b.q_start[i]; r < b.q_start[i + 1]; r++) seq[r] = i, pos[r] = b.pos_start[i] + r - b.q_start[i];
  ctx.row_seq = seq, ctx.row_pos = pos;
}

static int step(Model* m, const oct_kv* kv, const oct_batch* b) {
  if (check_batch(*m, *b) < 0) return -1;
  if (b->n_rows == 0) return 0;
  if (!m->step_state) m->step_state = new (std::nothrow) StepState();
  if (!m->step_state) return fail("out of memory");
  StepState& state = *(StepState*)m->step_state;
  prepare(state, *m, kv, *b);
  attention_plan(state.ctx);
  pool().run([](void* s, int thread) { Runner(*(StepState*)s, thread).run(); }, &state);
  return 0;
}

static void free_state(void* state) { delete (StepState*)state; }

}  // namespace OCT_ISA

#define OCT_STRING_(x) #x
#define OCT_STRING(x) OCT_STRING_(x)
#define OCT_JOIN_(a, b) a##b
#define OCT_JOIN(a, b) OCT_JOIN_(a, b)
extern const InstructionSet OCT_JOIN(set_, OCT_ISA);
const InstructionSet OCT_JOIN(set_, OCT_ISA) = {OCT_STRING(OCT_ISA), OCT_ISA::step, OCT_ISA::free_state,
                                                OCT_ISA::kv_block_bytes, OCT_ISA::sample, OCT_ISA::measure};

}  // namespace octavo
