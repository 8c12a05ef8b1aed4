// The C ABI of Octavo's GPU kernels (and of the emulated build, where pointers are host memory). No torch: raw
// pointers and a stream. Functions return 0, or a negative code with the reason in octg_last_error(); work is queued
// on the stream and nothing waits.
//
// KV storage of a layer: keys (num_blocks, kv_heads, head_size / x, block_size, x), values (num_blocks, kv_heads,
// head_size, block_size), x = 16 / bytes of an element: the paged views of (2, num_blocks, block_size, kv_heads,
// head_size). block_size is a power of two and at least x; head_size a multiple of x, at most 256.
//
// What a row gets depends on its own query, keys and position alone: keys are cut at fixed positions (OCTG_PART),
// parts are merged in order, and prefill, decode and any chunking run the same arithmetic.
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum octg_dtype { OCTG_F32 = 0, OCTG_BF16 = 1, OCTG_F16 = 2, OCTG_I8 = 3, OCTG_F8E4M3 = 4, OCTG_F8E5M2 = 5 };
enum octg_path { OCTG_AUTO = 0, OCTG_PLAIN = 1, OCTG_TENSOR = 2 };  // OCTG_TENSOR: 16-bit KV, head 64, 96, 128, 256
enum { OCTG_ABI = 1, OCTG_PART = 256, OCTG_MOST_WORKSPACE = 1 << 26 /* floats; what needs more isn't split */ };

const char* octg_platform(void);  // "cuda", "hip" or "emulator"
int octg_abi(void);               // OCTG_ABI of the build
const char* octg_last_error(void);

typedef struct {
  void* out;                // [rows][heads][head_size], dtype
  const void* q;            // the same shape
  const void* key;          // paged views, kv_dtype
  const void* value;
  const float* k_scale;     // int8: [num_blocks][block_size][kv_heads]; fp8: one number; else null
  const float* v_scale;
  const int32_t* tables;    // [seqs][max_blocks] physical blocks
  const int32_t* q_start;   // [seqs + 1]; a sequence without rows is padding
  const int32_t* seq_lens;  // [seqs] tokens, those of this step included
  float* workspace;         // octg_workspace() floats
  int32_t rows, seqs, max_q /* rows of the longest sequence */, max_len /* tokens of it */;
  int32_t heads, kv_heads, head_size, block_size, max_blocks, window /* 0 = all */;
  int32_t dtype, kv_dtype, path;
  float scale, softcap;
} octg_attention;
int64_t octg_workspace(const octg_attention* a);  // floats needed; 0 when nothing is split
int octg_paged_attention(const octg_attention* a, void* stream);

typedef struct {
  const void* k;                // [rows][kv_heads][head_size], row stride kv_stride elements
  const void* v;
  void* q;                      // rotated in place, [rows][heads][head_size], row stride q_stride; null = none
  void* key;                    // paged views
  void* value;
  float* k_scale;               // int8: written; fp8: read; see octg_attention
  float* v_scale;
  const int64_t* slot_mapping;  // [rows] block * block_size + offset; negative = padding, skipped
  const int32_t* positions;     // [rows]; used when rotary_dim > 0
  const float* cos_sin;         // [positions][rotary_dim]: cosines, then sines
  int64_t kv_stride, q_stride;
  int32_t rows, heads, kv_heads, head_size, block_size, rotary_dim, interleaved;
  int32_t dtype, kv_dtype;
} octg_cache_write;
int octg_reshape_and_cache(const octg_cache_write* w, void* stream);  // rotary_dim 0: only writes

// Blocks of `block_bytes` of one storage (2, num_blocks, block_bytes): pairs [n][2] (source, destination) on the device.
int octg_copy_blocks(void* storage, const int64_t* pairs, int n, int64_t num_blocks, int64_t block_bytes, void* stream);
// Between device and pinned host memory, either way; pairs on the host.
int octg_swap_blocks(void* dst, const void* src, const int64_t* pairs, int n, int64_t block_bytes, void* stream);

// out = norm(x) * weight; with a residual, x + residual is what is normed and becomes the new residual. Rows of n.
int octg_rms_norm(void* out, const void* x, void* residual, const float* weight, int rows, int n, float eps, int dtype,
                  void* stream);
int octg_silu_mul(void* out, const void* gate_up /* [rows][2 n] */, int rows, int n, int dtype, void* stream);
// One token a row of logits [rows][vocab]: the largest where temperature < 1e-5 (lowest id first among equals), else
// the inverse of the cumulative sum at a Philox number keyed by (seed, choice, position).
int octg_sample(int32_t* token, const float* logits, const float* temperature, const uint64_t* seed,
                const uint32_t* choice, const uint32_t* position, int rows, int vocab, void* stream);
#ifdef __cplusplus
}
#endif
