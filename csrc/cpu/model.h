// A loaded model: the spec with its own copies of the arrays, and every weight in the form the step reads.
// Layouts are the same for all instruction sets (pack.h describes them).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <map>
#include <string>
#include <vector>

#include "kernels.h"
#include "pack.h"

namespace octavo {

struct Matrix {          // y[n] = x[k] . W^T + bias
  int32_t n = 0, k = 0;  // outputs, inputs, without padding
  PackKind kind = kF32;
  const uint8_t* data = nullptr;  // packed panels of 32 outputs; NULL: there is no such matrix
  const float* bias = nullptr;    // [n padded to 32], or NULL
};

struct Norm {
  const float* weight = nullptr;  // NULL: there is no such norm
  const float* bias = nullptr;
};

struct Expert { Matrix gate_up, down; };

struct Layer {
  Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm;
  const float* q_norm = nullptr;  // [head_size] or [heads * head_size]
  const float* k_norm = nullptr;  // [head_size] or [kv_heads * head_size]
  Matrix q, k, v;                 // one product with three parts
  Matrix o, gate_up, down;        // gate_up: each panel holds 16 gates and their 16 ups; without gates up alone
  Matrix router;
  std::vector<Expert> experts;
  int32_t window = 0, rope = 0;
  bool moe = false;
};

struct Table {  // rows that are looked up, kept as they came
  const uint8_t* data = nullptr;
  int32_t dtype = OCT_F32;  // an oct_dtype, or kGgml + the ggml type of its blocks
  int64_t rows = 0, cols = 0, row_bytes = 0;
};
constexpr int32_t kGgml = 1000;

// One stored weight: what save() writes and load() maps.
struct Blob {
  enum Form : int32_t { kVector, kTable, kMatrix };
  int32_t form = kVector;
  int32_t type = 0;  // kTable: as Table::dtype. kMatrix: PackKind
  int64_t rows = 0, cols = 0, bytes = 0;
  uint8_t* data = nullptr;
};

struct Model {
  oct_spec spec;  // pointers lead into the vectors below
  std::vector<float> inv_freq, rope_scale;
  std::vector<int32_t> layer_window, layer_rope, layer_moe;

  // Filled by finish() and load() from the blobs.
  std::vector<Layer> layers;
  Table embed, positions;
  Norm final_norm;
  Matrix lm_head;
  bool ready = false;

  std::map<std::string, Blob> blobs;  // by canonical name; gate and up share "gate_up"
  std::map<std::string, int> given;   // names that oct_model_set* got
  struct Chunk { uint8_t* data; int64_t bytes, used; };
  std::vector<Chunk> chunks;  // huge-page memory the blobs lie in
  void* step_state = nullptr;  // of the instruction set in use; freed through its table

  uint8_t* allocate(int64_t bytes);  // 64-byte aligned, zeroed; NULL when memory is out
};

// Records the reason for oct_last_error() and returns -1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// What each compiled instruction set offers (step.cpp).
struct InstructionSet {
  const char* name;
  int (*step)(Model*, const oct_kv*, const oct_batch*);
  void (*free_state)(void*);
  int64_t (*kv_block_bytes)(const oct_spec*, int32_t block_size, int32_t dtype);
  int (*sample)(const oct_sampling*);
  double (*measure)(int what);
};

oct_model* new_model(const oct_spec* spec);  // model.cpp

class ThreadPool;
ThreadPool& pool();  // of the process, made by oct_init
extern double phase_seconds[OCT_PHASES];  // what oct_phases gives; the first thread of a step adds to it

}  // namespace octavo

struct oct_model { octavo::Model model; };
