// Runs single kernels in the emulator, outside of Python, so that sanitizers see nothing else.
//
//   driver KERNEL [N]    N: barrier to leave out. Status 0: results are right; 1: they aren't; a sanitizer has its own.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_plain.h"
#include "attention_tensor.h"
#include "cache.h"
#include "pointwise.h"

namespace {
uint64_t seed = 1;
float uniform() {  // in [-1, 1)
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return float(int32_t(seed >> 32)) / 2147483648.0f;
}

template <typename T> std::vector<T> random_values(size_t n) {
  std::vector<T> x(n);
  for (auto& v : x) v = from_float<T>(2 * uniform());
  return x;
}

bool close(const char* what, double worst, double limit) {
  if (worst <= limit) return true;  // not for NaN
  printf("%s: off by %g, allowed %g\n", what, worst, limit);
  return false;
}

// Sequences of 5, 64 and 700 tokens, the last rows of each as queries, blocks in scattered order and NaN around them.
template <typename T, typename C> struct Attention {
  static constexpr int SEQS = 3, KV_HEADS = 2, BLOCK = 16, MAX_BLOCKS = 44;
  int heads, head_size, q_rows, window;
  std::vector<int32_t> tables, q_start{0}, seq_lens{5, 64, 700};
  std::vector<C> key, value;
  std::vector<T> q, out;
  std::vector<float> workspace;
  float k_scale = sizeof(C) == 1 ? 0.5f : 1, v_scale = sizeof(C) == 1 ? 0.25f : 1;
  octg_attention a{};

  Attention(int heads, int head_size, int q_rows, int window) : heads(heads), head_size(head_size), q_rows(q_rows), window(window) {
    const int blocks = 1 + 4 + 44 + 2;
    key.resize(size_t(blocks) * KV_HEADS * head_size * BLOCK, from_float<C>(NAN));
    value = key;
    tables.resize(SEQS * MAX_BLOCKS);
    int used = 0;
    for (int s = 0; s < SEQS; s++) {
      q_start.push_back(q_start.back() + q_rows);
      for (int t = 0; t < seq_lens[s]; t++) {
        if (t % BLOCK == 0) tables[s * MAX_BLOCKS + t / BLOCK] = (used++ * 7 + 3) % blocks;
        for (int h = 0; h < KV_HEADS; h++)
          for (int d = 0; d < head_size; d++) {
            key[key_at(s, t, h, d)] = from_float<C>(2 * uniform());
            value[value_at(s, t, h, d)] = from_float<C>(2 * uniform());
          }
      }
    }
    q = random_values<T>(size_t(SEQS) * q_rows * heads * head_size);
    out.resize(q.size(), from_float<T>(NAN));
    a.out = out.data(), a.q = q.data(), a.key = key.data(), a.value = value.data();
    a.k_scale = &k_scale, a.v_scale = &v_scale, a.tables = tables.data(), a.q_start = q_start.data();
    a.seq_lens = seq_lens.data(), a.rows = SEQS * q_rows, a.seqs = SEQS, a.max_q = q_rows, a.max_len = 700;
    a.heads = heads, a.kv_heads = KV_HEADS, a.head_size = head_size, a.block_size = BLOCK;
    a.max_blocks = MAX_BLOCKS, a.window = window, a.scale = 1 / std::sqrt(float(head_size));
  }

  size_t place(int s, int t, int h) const {
    return (size_t(tables[s * MAX_BLOCKS + t / BLOCK]) * KV_HEADS + h) * head_size * BLOCK;
  }
  size_t key_at(int s, int t, int h, int d) const {
    const int x = 16 / sizeof(C);
    return place(s, t, h) + (d / x * BLOCK + t % BLOCK) * x + d % x;
  }
  size_t value_at(int s, int t, int h, int d) const { return place(s, t, h) + d * BLOCK + t % BLOCK; }

  double worst() const {
    double worst = 0;
    for (int s = 0; s < SEQS; s++)
      for (int row = 0; row < q_rows; row++)
        for (int head = 0; head < heads; head++) {
          const int h = head / (heads / KV_HEADS), position = seq_lens[s] - q_rows + row;
          const int low = window ? std::max(0, position - window + 1) : 0;
          const size_t at = (size_t(q_start[s] + row) * heads + head) * head_size;
          std::vector<double> score;
          double top = -INFINITY, sum = 0;
          for (int t = low; t <= position; t++) {
            double dot = 0;
            for (int d = 0; d < head_size; d++) dot += double(to_float(q[at + d])) * to_float(key[key_at(s, t, h, d)]);
            score.push_back(dot * k_scale * a.scale);
            top = std::max(top, score.back());
          }
          for (auto& x : score) sum += x = std::exp(x - top);
          for (int d = 0; d < head_size; d++) {
            double expected = 0;
            for (int t = low; t <= position; t++) expected += score[t - low] / sum * to_float(value[value_at(s, t, h, d)]);
            const double error = std::fabs(to_float(out[at + d]) - expected * v_scale);
            if (!(error <= worst)) worst = error;
          }
        }
    return worst;
  }
};

template <typename T, typename C> bool plain(int heads, int head_size, int q_rows, int window, bool split, double limit) {
  Attention<T, C> c(heads, head_size, q_rows, window);
  const int parts = (700 + OCTG_PART - 1) / OCTG_PART, tiles = (q_rows * heads / 2 + PLAIN_ROWS - 1) / PLAIN_ROWS;
  c.workspace.resize(split ? size_t(c.a.rows) * heads * parts * (head_size + 2) : 0, NAN);
  c.a.workspace = c.workspace.data();
  auto kernel = attention_plain<T, C>;
  const octg_attention a = c.a;
  const int is_split = split;
  LAUNCH(kernel, dim3(tiles * (split ? parts : 1), 2, 3), dim3(plain_threads(head_size)), plain_shared_bytes(head_size),
         nullptr, a, is_split, parts);
  auto reduce = merge_parts<T>;
  if (split) LAUNCH(reduce, dim3(heads, q_rows, 3), dim3((head_size + 31) / 32 * 32), 0, nullptr, a, parts);
  return close("attention_plain", c.worst(), limit);
}

template <typename T, int D, int NT> bool tensor(int heads, int q_rows, int window, bool split, double limit) {
  Attention<T, T> c(heads, D, q_rows, window);
  const int parts = (700 + OCTG_PART - 1) / OCTG_PART, tiles = (q_rows * heads / 2 + 8 * NT - 1) / (8 * NT);
  c.workspace.resize(split ? size_t(c.a.rows) * heads * parts * (D + 2) : 0, NAN);
  c.a.workspace = c.workspace.data();
  auto kernel = attention_tensor<T, D, NT>;
  const octg_attention a = c.a;
  const int is_split = split;
  LAUNCH(kernel, dim3(tiles * (split ? parts : 1), 2, 3), dim3(TENSOR_THREADS), tensor_shared_bytes(D, NT), nullptr, a,
         is_split, parts);
  auto reduce = merge_parts<T>;
  if (split) LAUNCH(reduce, dim3(heads, q_rows, 3), dim3(D), 0, nullptr, a, parts);
  return close("attention_tensor", c.worst(), limit);
}

// int8 KV of 3 tokens with 2 heads of 80, queries and keys rotated on the way: scales and rotation have barriers.
bool cache_writes() {
  constexpr int ROWS = 3, HEADS = 4, KV_HEADS = 2, D = 80, BLOCK = 16, ROTARY = 80;
  auto k = random_values<float>(ROWS * KV_HEADS * D), v = k, q = random_values<float>(ROWS * HEADS * D);
  const auto q_before = q;
  std::vector<int8_t> key(2 * KV_HEADS * D * BLOCK), value(key.size());
  std::vector<float> k_scale(2 * BLOCK * KV_HEADS), v_scale(k_scale.size()), turn(4 * ROTARY);
  std::vector<int64_t> slots{17, -1, 3};
  std::vector<int32_t> positions{0, 1, 3};
  for (auto& x : turn) x = uniform();
  octg_cache_write w{};
  w.k = k.data(), w.v = v.data(), w.q = q.data(), w.key = key.data(), w.value = value.data();
  w.k_scale = k_scale.data(), w.v_scale = v_scale.data(), w.slot_mapping = slots.data(), w.positions = positions.data();
  w.cos_sin = turn.data(), w.kv_stride = KV_HEADS * D, w.q_stride = HEADS * D, w.rows = ROWS, w.heads = HEADS;
  w.kv_heads = KV_HEADS, w.head_size = D, w.block_size = BLOCK, w.rotary_dim = ROTARY;
  auto kernel = cache_write<float, int8_t>;
  LAUNCH(kernel, dim3(ROWS, HEADS + KV_HEADS), dim3(96), 96 / 32 * 8, nullptr, w);
  double worst = 0;
  for (int row = 0; row < ROWS; row++)
    for (int h = 0; h < HEADS; h++)
      for (int d = 0; d < D; d++) {
        const float* t = &turn[positions[row] * ROTARY];
        const float* x = &q_before[(row * HEADS + h) * D];
        const int i = d % 40;
        const double expected = d < 40 ? double(x[i]) * t[i] - double(x[i + 40]) * t[40 + i]
                                       : double(x[i + 40]) * t[i] + double(x[i]) * t[40 + i];
        worst = std::max(worst, std::fabs(q[(row * HEADS + h) * D + d] - expected));
      }
  double step = 0;
  for (int row : {0, 2})
    for (int h = 0; h < KV_HEADS; h++)
      for (int d = 0; d < D; d++) {
        const int64_t slot = slots[row], at = ((slot / BLOCK * KV_HEADS + h) * D + d) * BLOCK + slot % BLOCK;
        const double scale = v_scale[slot * KV_HEADS + h];
        step = std::max(step, std::fabs(value[at] * scale - v[(row * KV_HEADS + h) * D + d]) / scale);
      }
  return close("rotated queries", worst, 1e-5) && close("int8 values, in steps", step, 0.501);
}

bool norm() {
  const int n = 300;
  auto x = random_values<float>(2 * n), weight = random_values<float>(n), residual = x;
  std::vector<float> out(2 * n, NAN);
  auto kernel = rms_norm<float>;
  float *o = out.data(), *r = residual.data(), *in = x.data(), *w = weight.data();
  const float eps = 1e-5f;
  LAUNCH(kernel, dim3(2), dim3(ROW_THREADS), ROW_THREADS / 32 * 4, nullptr, o, in, r, w, n, eps);
  double worst = 0;
  for (int row = 0; row < 2; row++) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += 4.0 * x[row * n + i] * x[row * n + i];
    for (int i = 0; i < n; i++)
      worst = std::max(worst, std::fabs(out[row * n + i] - 2.0 * x[row * n + i] / std::sqrt(sum / n + eps) * weight[i]));
  }
  return close("rms_norm", worst, 1e-5);
}

bool sampled() {
  const int vocab = 1000;
  auto logits = random_values<float>(2 * vocab);
  std::vector<float> temperature{0, 1};
  std::vector<uint64_t> seeds{5, 5};
  std::vector<uint32_t> choice{0, 0}, position{7, 7};
  std::vector<int32_t> token(2, -1);
  auto kernel = sample_rows;
  auto *out = token.data(), *in = reinterpret_cast<int32_t*>(logits.data());
  const float *x = reinterpret_cast<float*>(in), *t = temperature.data();
  const uint64_t* s = seeds.data();
  const uint32_t *c = choice.data(), *p = position.data();
  LAUNCH(kernel, dim3(2), dim3(ROW_THREADS), (ROW_THREADS + 1) * 8 + ROW_THREADS * 4, nullptr, out, x, t, s, c, p, vocab);
  int top = 0;
  for (int i = 0; i < vocab; i++)
    if (x[i] > x[top]) top = i;
  double sum = 0, below = 0;
  for (int i = 0; i < vocab; i++) sum += std::exp(double(x[vocab + i]));
  for (int i = 0; i < token[1]; i++) below += std::exp(double(x[vocab + i]));
  const double u = philox_uniform(5, 0, 7), width = std::exp(double(x[vocab + token[1]]));
  return close("greedy token", std::abs(token[0] - top), 0) &&
         close("drawn token's share of the sum", std::max(below / sum - u, u - (below + width) / sum), 1e-6);
}
}  // namespace

int main(int argc, char** argv) {
  const std::string kernel = argc > 1 ? argv[1] : "";
  emu::left_out = argc > 2 ? atoi(argv[2]) : 0;
  bool ok = false;
  if (kernel == "plain")
    ok = plain<float, float>(4, 64, 1, 0, true, 1e-5) && plain<float, float>(4, 64, 5, 90, false, 1e-5);
  else if (kernel == "plain_fp8")
    ok = plain<bf16, e4m3>(4, 64, 1, 0, true, 8e-3);
  else if (kernel == "tensor")
    ok = tensor<bf16, 64, 1>(8, 1, 0, true, 1e-2) && tensor<f16, 64, 2>(8, 5, 90, false, 2e-3);
  else if (kernel == "cache_write")
    ok = cache_writes();
  else if (kernel == "rms_norm")
    ok = norm();
  else if (kernel == "sample")
    ok = sampled();
  else
    printf("no kernel %s\n", kernel.c_str());
  return ok ? 0 : 1;
}
