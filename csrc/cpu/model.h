// A loaded model: the spec with its own copies of the arrays, and every weight in the form the step reads.
// Layouts are the same for all instruction sets (pack.h describes them).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <map>
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Matrix {          // y[n] = x[k] . W^T + bias
  int32_t n = 0, k = 0;  // outputs, inputs, without padding
  int32_t quant = OCT_W_F32;
  int32_t kind = 0;             // PackKind: the exact block layout (pack.h)
  const void* data = nullptr;   // packed panels of 32 outputs
  const float* bias = nullptr;  // [n padded to 32], packed column order, or NULL
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
  Matrix qkv;                     // rows: all q heads, all k heads, all v heads
  Matrix o, gate_up, down;        // gate_up: gate and up interleaved in runs of 16 rows when gated, else up alone
  Matrix router;
  std::vector<Expert> experts;
  int32_t window = 0, rope = 0;
  bool moe = false;
};

struct Table {  // rows that are looked up, kept as they came
  const void* data = nullptr;
  int32_t dtype = OCT_F32;  // oct_dtype, or -1: blocks of ggml_type
  int32_t ggml_type = 0;
  int64_t rows = 0, cols = 0, row_bytes = 0;
};

struct Model {
  oct_spec spec;  // pointers lead into the vectors below
  std::vector<float> inv_freq, rope_scale;
  std::vector<int32_t> layer_window, layer_rope, layer_moe;
  std::vector<Layer> layers;
  Table embed, positions;
  Norm final_norm;
  Matrix lm_head;
};

}  // namespace octavo
