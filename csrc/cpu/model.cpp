// Loading: weights come in under their canonical names, are packed at once, and are bound to the layers at the end.
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <new>

#include "convert.h"
#include "image.h"

#define OCT_API extern "C" __attribute__((visibility("default")))

namespace octavo {

uint8_t* Model::allocate(int64_t bytes) {
  constexpr int64_t kChunk = 64 << 20;
  int64_t size = round_up(bytes, 64);
  if (chunks.empty() || chunks.back().used + size > chunks.back().bytes) {
    int64_t chunk = size > kChunk ? round_up(size, 2 << 20) : kChunk;
    uint8_t* data = (uint8_t*)oct_alloc(chunk);
    if (!data) return nullptr;
    chunks.push_back({data, chunk, 0});
  }
  Chunk& chunk = chunks.back();
  uint8_t* p = chunk.data + chunk.used;
  chunk.used += size;
  return p;
}

namespace {

bool ends_with(const std::string& s, const char* suffix) {
  size_t n = strlen(suffix);
  return s.size() >= n && s.compare(s.size() - n, n, suffix) == 0;
}

// What the spec says about a canonical name.
struct Role {
  enum { kUnknown, kVector, kTable, kMatrix } form = kUnknown;
  int64_t rows = 0, cols = 0;
  std::string blob;       // name it is stored under
  bool gate = false, up = false;  // half of a gate_up matrix, or of its bias
};

Role role_of(const Model& m, const std::string& name) {
  const oct_spec& s = m.spec;
  int64_t q = (int64_t)s.heads * s.head_size, kv = (int64_t)s.kv_heads * s.head_size, h = s.hidden;
  Role role;
  role.blob = name;
  auto matrix = [&](int64_t rows, int64_t cols) { role.form = Role::kMatrix; role.rows = rows; role.cols = cols; };
  auto vector = [&](int64_t n) { role.form = Role::kVector; role.rows = n; role.cols = 1; };
  auto table = [&](int64_t rows) { role.form = Role::kTable; role.rows = rows; role.cols = h; };

  std::string part = name;
  int layer = 0, expert = 0, used = 0;
  bool in_layer = sscanf(name.c_str(), "layers.%d.%n", &layer, &used) == 1 && used > 0;
  if (in_layer) {
    if (layer < 0 || layer >= s.layers) return role;
    part = name.substr(used);
  }
  bool bias = ends_with(part, ".bias");
  if (bias) part.resize(part.size() - 5);
  int64_t inter = s.inter;
  int skip = 0;
  if (in_layer && sscanf(part.c_str(), "experts.%d.%n", &expert, &skip) == 1 && skip > 0) {
    if (expert < 0 || expert >= s.experts) return role;
    part = part.substr(skip);
    inter = s.moe_inter;
    if (part != "gate" && part != "up" && part != "down") return role;
  }
  if (!in_layer) {
    if (part == "embed" && !bias) table(s.vocab);
    else if (part == "positions" && !bias) table((int64_t)s.max_position + s.learned_positions);
    else if (part == "final_norm") vector(h);
    else if (part == "lm_head") matrix(s.vocab, h);
  } else if (part == "attn_norm" || part == "attn_post_norm" || part == "mlp_norm" || part == "mlp_post_norm") {
    vector(h);
  } else if (part == "q_norm" || part == "k_norm") {
    if (!bias) vector(s.flags & OCT_QK_NORM_FULL ? (part == "q_norm" ? q : kv) : s.head_size);
  } else if (part == "q") {
    matrix(q, h);
  } else if (part == "k" || part == "v") {
    matrix(kv, h);
  } else if (part == "o") {
    matrix(h, q);
  } else if (part == "down") {
    matrix(h, inter);
  } else if (part == "router") {
    matrix(s.experts, h);
  } else if (part == "up" || (part == "gate" && s.flags & OCT_GATED)) {
    matrix(inter, h);
    role.gate = part == "gate";
    role.up = part == "up" && s.flags & OCT_GATED;
    size_t at = name.rfind(part);
    role.blob = name.substr(0, at) + (s.flags & OCT_GATED ? "gate_up" : "up") + (bias ? ".bias" : "");
  }
  if (bias && role.form == Role::kMatrix) vector(role.rows);
  return role;
}

// A panel of a gate_up matrix holds 16 gates, then their 16 ups.
Columns columns_of(const Role& role) {
  if (role.gate) return {16, 0};
  if (role.up) return {16, 16};
  return {32, 0};
}

int64_t stored_rows(const Role& role) {  // outputs of the stored matrix, padded
  return role.gate || role.up ? round_up(role.rows, 16) * 2 : round_up(role.rows, kPanel);
}

Blob* reserve(Model& m, const std::string& name, Blob want) {
  auto found = m.blobs.find(name);
  if (found != m.blobs.end()) {  // the second half of gate_up, or a weight given again
    Blob& b = found->second;
    if (b.form != want.form || b.type != want.type || b.rows != want.rows || b.cols != want.cols) {
      fail("%s: gate and up (or two tensors of one name) must be kept in the same form", name.c_str());
      return nullptr;
    }
    return &b;
  }
  want.data = m.allocate(want.bytes);
  if (!want.data) return nullptr;
  return &(m.blobs[name] = want);
}

int set_matrix(Model& m, const std::string& name, const Role& role, PackKind kind, const Source& source) {
  int64_t rows = stored_rows(role);
  Blob want{Blob::kMatrix, kind, rows, role.cols, rows / kPanel * panel_bytes(kind, role.cols), nullptr};
  Blob* blob = reserve(m, name, want);
  if (!blob) return -1;
  pack_rows(source, role.rows, role.cols, kind, columns_of(role), blob->data);
  return 0;
}

// One entry for dense and GGUF data.
int set_weight(Model& m, const std::string& name, const Source& source, int64_t rows, int64_t cols, int kind) {
  if (m.ready) return fail("%s: the model is finished, no weight can be given any more", name.c_str());
  Role role = role_of(m, name);
  if (role.form == Role::kUnknown) return fail("%s: no weight of this model has that name", name.c_str());
  if (role.form == Role::kVector && rows == 1) rows = cols, cols = 1;
  if (rows != role.rows || cols != role.cols)
    return fail("%s: has shape [%lld, %lld], the model wants [%lld, %lld]", name.c_str(), (long long)rows,
                (long long)cols, (long long)role.rows, (long long)role.cols);
  if (role.form == Role::kVector) {
    if (source.ggml) return fail("%s: a vector can't be given as GGUF blocks", name.c_str());
    int64_t n = stored_rows(role);
    Blob* blob = reserve(m, role.blob, {Blob::kVector, 0, n, 1, n * 4, nullptr});
    if (!blob) return -1;
    Columns columns = columns_of(role);
    for (int64_t r = 0; r < rows; r++) ((float*)blob->data)[columns.at(r)] = source.scalar(r);
  } else if (role.form == Role::kTable) {
    int64_t row_bytes = source.row_bytes(cols);
    int32_t type = source.ggml ? kGgml + source.ggml : source.dtype;
    Blob* blob = reserve(m, role.blob, {Blob::kTable, type, rows, cols, rows * row_bytes, nullptr});
    if (!blob) return -1;
    memcpy(blob->data, source.data, rows * row_bytes);
  } else if (set_matrix(m, role.blob, role, (PackKind)kind, source) < 0) {
    return -1;
  }
  m.given[name] = 1;
  if (name == "embed" && m.spec.flags & OCT_TIED) {
    Role head = role;
    head.form = Role::kMatrix;
    if (set_matrix(m, "lm_head", head, (PackKind)kind, source) < 0) return -1;
    m.given["lm_head"] = 1;
  }
  return 0;
}

int64_t layers_bytes(const Model& m) {
  int64_t total = 0;
  for (auto& entry : m.blobs) total += entry.second.bytes;
  return total;
}

}  // namespace

namespace {

// Binds blobs to the layers; keeps the first name that is missing.
class Binder {
 public:
  explicit Binder(Model& m) : m_(m) {}
  Norm norm(const std::string& name, bool needed) {
    return {vector(name, needed), vector(name + ".bias", false)};
  }
  const float* vector(const std::string& name, bool needed) {
    const Blob* b = find(name, needed);
    return b ? (const float*)b->data : nullptr;
  }
  Matrix matrix(const std::string& name, int32_t n, int32_t k, bool needed) {
    Matrix matrix;
    const Blob* b = find(name, needed);
    if (!b) return matrix;
    matrix.n = n;
    matrix.k = k;
    matrix.kind = (PackKind)b->type;
    matrix.data = b->data;
    matrix.bias = vector(name + ".bias", false);
    return matrix;
  }
  Table table(const std::string& name, bool needed) {
    Table t;
    const Blob* b = find(name, needed);
    if (b) t = {b->data, b->type, b->rows, b->cols, b->bytes / b->rows};
    return t;
  }
  // gate_up counts as missing when one half was never given (an image was whole when it was written).
  Matrix gate_up(const std::string& prefix, int32_t inter, bool from_image) {
    if (!(m_.spec.flags & OCT_GATED)) return matrix(prefix + "up", inter, m_.spec.hidden, true);
    if (!from_image)
      for (const char* half : {"gate", "up"})
        if (!m_.given.count(prefix + half)) note(prefix + half);
    return matrix(prefix + "gate_up", (int32_t)round_up(inter, 16) * 2, m_.spec.hidden, true);
  }
  const std::string& missing() const { return missing_; }

 private:
  const Blob* find(const std::string& name, bool needed) {
    auto found = m_.blobs.find(name);
    if (found != m_.blobs.end()) return &found->second;
    if (needed) note(name);
    return nullptr;
  }
  void note(const std::string& name) {
    if (missing_.empty()) missing_ = name;
  }
  Model& m_;
  std::string missing_;
};

}  // namespace

int bind(Model& m, bool from_image) {
  const oct_spec& s = m.spec;
  Binder b(m);
  m.embed = b.table("embed", true);
  m.positions = b.table("positions", s.learned_positions >= 0);
  m.final_norm = b.norm("final_norm", !(s.flags & OCT_NO_FINAL_NORM));
  m.lm_head = b.matrix("lm_head", s.vocab, s.hidden, true);
  bool pre = !(s.flags & OCT_NORM_POST), post = s.flags & (OCT_NORM_POST | OCT_NORM_SANDWICH);
  bool qk_norm = s.flags & (OCT_QK_NORM_HEAD | OCT_QK_NORM_FULL);
  int32_t q = s.heads * s.head_size, kv = s.kv_heads * s.head_size;
  m.layers.assign(s.layers, Layer());
  for (int i = 0; i < s.layers; i++) {
    Layer& l = m.layers[i];
    std::string at = "layers." + std::to_string(i) + ".";
    l.window = m.layer_window[i];
    l.rope = m.layer_rope[i];
    l.moe = m.layer_moe[i] != 0;
    l.attn_norm = b.norm(at + "attn_norm", pre);
    l.attn_post_norm = b.norm(at + "attn_post_norm", post);
    l.mlp_norm = b.norm(at + "mlp_norm", pre && !(s.flags & OCT_PARALLEL));
    l.mlp_post_norm = b.norm(at + "mlp_post_norm", post);
    l.q_norm = b.vector(at + "q_norm", qk_norm);
    l.k_norm = b.vector(at + "k_norm", qk_norm);
    l.q = b.matrix(at + "q", q, s.hidden, true);
    l.k = b.matrix(at + "k", kv, s.hidden, true);
    l.v = b.matrix(at + "v", kv, s.hidden, true);
    l.o = b.matrix(at + "o", s.hidden, q, true);
    if (!l.moe) {
      l.gate_up = b.gate_up(at, s.inter, from_image);
      l.down = b.matrix(at + "down", s.hidden, s.inter, true);
      continue;
    }
    l.router = b.matrix(at + "router", s.experts, s.hidden, true);
    for (int e = 0; e < s.experts; e++) {
      std::string expert = at + "experts." + std::to_string(e) + ".";
      l.experts.push_back({b.gate_up(expert, s.moe_inter, from_image),
                           b.matrix(expert + "down", s.hidden, s.moe_inter, true)});
    }
  }
  if (!b.missing().empty()) return fail("the weight %s is missing", b.missing().c_str());
  m.ready = true;
  return 0;
}

oct_model* new_model(const oct_spec* spec) {
  const oct_spec& s = *spec;
  if (s.vocab < 1 || s.hidden < 1 || s.layers < 1 || s.heads < 1 || s.kv_heads < 1 || s.head_size < 1 ||
      s.heads % s.kv_heads || s.head_size % 2 || s.rotary_dim > s.head_size || s.rotary_dim % 2) {
    fail("the spec makes no sense: vocab %d, hidden %d, layers %d, heads %d, kv_heads %d, head_size %d, rotary_dim %d",
         s.vocab, s.hidden, s.layers, s.heads, s.kv_heads, s.head_size, s.rotary_dim);
    return nullptr;
  }
  if (s.compute != OCT_F32 && s.compute != OCT_BF16) {
    fail("compute must be float32 or bfloat16, not dtype %d", s.compute);
    return nullptr;
  }
  oct_model* model = new (std::nothrow) oct_model();
  if (!model) {
    fail("out of memory");
    return nullptr;
  }
  Model& m = model->model;
  m.spec = s;
  if (s.n_rope > 0) {
    m.inv_freq.assign(s.inv_freq, s.inv_freq + (size_t)s.n_rope * (s.rotary_dim / 2));
    m.rope_scale.assign(s.rope_scale, s.rope_scale + s.n_rope);
  }
  auto copy = [&](const int32_t* from, int32_t otherwise) {
    return from ? std::vector<int32_t>(from, from + s.layers) : std::vector<int32_t>(s.layers, otherwise);
  };
  m.layer_window = copy(s.layer_window, 0);
  m.layer_rope = copy(s.layer_rope, s.n_rope > 0 ? 0 : -1);
  m.layer_moe = copy(s.layer_moe, 0);
  m.spec.inv_freq = m.inv_freq.data();
  m.spec.rope_scale = m.rope_scale.data();
  m.spec.layer_window = m.layer_window.data();
  m.spec.layer_rope = m.layer_rope.data();
  m.spec.layer_moe = m.layer_moe.data();
  return model;
}

}  // namespace octavo

using namespace octavo;

OCT_API int oct_model_set(oct_model* m, const char* name, const void* data, int dtype, int64_t rows, int64_t cols,
                          int quant) {
  Source source;
  source.data = (const uint8_t*)data;
  source.dtype = dtype;
  if (dtype != OCT_F32 && dtype != OCT_BF16 && dtype != OCT_F16)
    return fail("%s: dense weights are float32, bfloat16 or float16, not dtype %d", name, dtype);
  if (quant != OCT_W_F32 && quant != OCT_W_BF16 && quant != OCT_W_Q8)
    return fail("%s: dense weights are kept as float32, bfloat16 or int8; 4 bits come from GGUF blocks only", name);
  return set_weight(m->model, name, source, rows, cols, quant);
}

OCT_API int oct_model_set_gguf(oct_model* m, const char* name, const void* blocks, int ggml_type, int64_t rows,
                               int64_t cols) {
  Source source;
  source.data = (const uint8_t*)blocks;
  source.ggml = ggml_type;
  int kind = packed_kind(ggml_type);
  if (kind < 0) return fail("%s: GGUF type %d can't be used without requantisation", name, ggml_type);
  int64_t block = ggml_type == kGgmlQ4K ? 256 : 32;
  if (cols % block)
    return fail("%s: %lld columns are no multiple of the block of %lld", name, (long long)cols, (long long)block);
  return set_weight(m->model, name, source, rows, cols, kind);
}

OCT_API int oct_model_finish(oct_model* m) { return bind(m->model, false); }

OCT_API int oct_model_save(oct_model* m, const char* path, const char* key) {
  if (!m->model.ready) return fail("an unfinished model can't be saved");
  return save_image(m->model, path, key);
}

OCT_API int oct_model_load(oct_model* m, const char* path, const char* key) {
  if (m->model.ready || !m->model.blobs.empty()) return fail("%s: the model has weights already", path);
  return load_image(m->model, path, key) < 0 ? -1 : bind(m->model, true);
}

OCT_API int64_t oct_model_bytes(const oct_model* m) { return layers_bytes(m->model); }
