// The C ABI of Octavo's CPU kernels. No torch, no Python: plain structs, raw pointers, int status.
//
// One library holds every instruction set (amx, avx512bf16, avx512, avx2, portable, neon); `oct_init` picks one.
// Arithmetic contract: what a row gets is a function of (weights, instruction set, row) alone, never of the
// other rows, of how rows are cut into calls, of block size, or of the number of threads.
// Functions return 0, or a negative code with the reason in oct_last_error().
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------- library
// isa: NULL or "" = best available. threads: 0 = one a core. Call once, before anything else.
int oct_init(const char* isa, int threads);
const char* oct_isa(void);         // the set in use
const char* oct_isas(void);        // comma separated: what this build holds and this machine runs
int oct_threads(void);
const char* oct_last_error(void);  // of the calling thread
void* oct_alloc(int64_t bytes);    // 2 MiB aligned, huge pages advised, zeroed
void oct_free(void* p, int64_t bytes);
// A ceiling of this machine, measured now with all threads (about 0.2 s): 0 memory read in bytes/s; 1, 2, 3 operations/s
// of float32, bf16, int8 products of the set in use. Negative: an error.
double oct_measure(int what);

// ---------------------------------------------------------------- model
enum oct_dtype { OCT_F32 = 0, OCT_BF16 = 1, OCT_F16 = 2, OCT_I8 = 3, OCT_F8E4M3 = 4, OCT_F8E5M2 = 5 };
// How a matrix is kept: F32/BF16 as they are; Q8 = int8 with one scale per 32 inputs (Q8_0), activations likewise;
// Q4 = 4 bits with scale and minimum per 32 inputs (Q4_0/Q4_1/Q4_K blocks, reordered, never requantised).
enum oct_quant { OCT_W_F32 = 0, OCT_W_BF16 = 1, OCT_W_Q8 = 2, OCT_W_Q4 = 3 };
enum oct_act { OCT_SILU = 0, OCT_GELU = 1, OCT_GELU_TANH = 2, OCT_RELU = 3 };
enum oct_flags {
  OCT_LAYER_NORM = 1, OCT_NORM_POST = 2, OCT_NORM_SANDWICH = 4, OCT_PARALLEL = 8, OCT_GATED = 16,
  OCT_QK_NORM_HEAD = 32, OCT_QK_NORM_FULL = 64, OCT_ROPE_INTERLEAVED = 128, OCT_TIED = 256, OCT_NORM_TOPK = 512,
  OCT_NO_FINAL_NORM = 1024
};
typedef struct {
  int32_t vocab, hidden, layers, heads, kv_heads, head_size, inter, max_position;
  int32_t act, flags, rotary_dim, n_rope, learned_positions /* offset, -1 = none */;
  int32_t experts, experts_per_token, moe_inter;
  float norm_eps, attn_scale, attn_softcap, final_softcap, embedding_scale, residual_scale, logit_scale;
  const float* inv_freq;        // [n_rope][rotary_dim / 2]
  const float* rope_scale;      // [n_rope]
  const int32_t* layer_window;  // [layers], 0 = full
  const int32_t* layer_rope;    // [layers], -1 = none
  const int32_t* layer_moe;     // [layers]
  int32_t compute;              // OCT_F32: float32 throughout (parity); OCT_BF16: bf16 operands, f32 accumulation
} oct_spec;

typedef struct oct_model oct_model;
oct_model* oct_model_new(const oct_spec* spec);
// Give a weight under its canonical name (engine/model/spec.py); data is row major [out][in], copied and packed.
// dtype: an oct_dtype for dense data. quant: how to keep it (norms and biases are always kept in f32).
int oct_model_set(oct_model* m, const char* name, const void* data, int dtype, int64_t rows, int64_t cols, int quant);
// The same from GGUF blocks of ggml type `ggml_type` (2 Q4_0, 3 Q4_1, 8 Q8_0, 12 Q4_K) without requantisation.
int oct_model_set_gguf(oct_model* m, const char* name, const void* blocks, int ggml_type, int64_t rows, int64_t cols);
int oct_model_finish(oct_model* m);  // every needed weight is there, or the error names the missing one
// Packed image for a fast start: write once, then mmap. `key` must match (model id, isa, format version).
int oct_model_save(oct_model* m, const char* path, const char* key);
int oct_model_load(oct_model* m, const char* path, const char* key);  // after oct_model_new, instead of set + finish
int64_t oct_model_bytes(const oct_model* m);
void oct_model_free(oct_model* m);

// ---------------------------------------------------------------- KV cache
// Storage is [block][layer][kv head][K tile | V tile]: a block is one contiguous run of oct_kv_block_bytes bytes,
// so copies, swaps and tiers move it with one memcpy.
typedef struct {
  void* data;           // num_blocks * oct_kv_block_bytes, from oct_alloc
  int64_t num_blocks;
  int32_t block_size;   // tokens, any integer from 1
  int32_t dtype;        // oct_dtype
} oct_kv;
int64_t oct_kv_block_bytes(const oct_spec* spec, int32_t block_size, int32_t dtype);

// ---------------------------------------------------------------- step
typedef struct {
  int32_t n_rows, n_seqs;
  const int32_t* tokens;      // [n_rows]
  const int32_t* q_start;     // [n_seqs + 1], rows of each sequence
  const int32_t* pos_start;   // [n_seqs], position of its first row; its KV before that is in the cache
  const int32_t* tables;      // block tables, int32, one line of table_stride a slot
  int64_t table_stride;
  const int32_t* table_line;  // [n_seqs], line in `tables`
  int32_t n_logits;
  const int32_t* logit_rows;  // [n_logits], rows that get logits
  float* logits;              // [n_logits][vocab]
  int32_t n_hidden;
  const int32_t* hidden_rows; // [n_hidden]
  float* hidden;              // [n_hidden][hidden], after the final norm
  const int32_t* adapter;     // [n_seqs] or NULL: LoRA adapter, -1 = none
} oct_batch;
// All layers in one call: writes the KV of every row, then attends. Allocates nothing after warm-up.
int oct_step(oct_model* m, const oct_kv* kv, const oct_batch* b);
// Where steps spent their time, as the first thread saw it: seconds of each phase since the last call. A phase ends when
// all threads are done with it; the waiting for them is counted once more by itself.
enum oct_phase {
  OCT_IN_EMBEDDING, OCT_IN_NORMS, OCT_IN_QKV, OCT_IN_ROPE /* and KV write */, OCT_IN_ATTENTION, OCT_IN_O, OCT_IN_GATE_UP,
  OCT_IN_DOWN, OCT_IN_HEAD, OCT_IN_WAITING, OCT_PHASES
};
void oct_phases(double* seconds /* [OCT_PHASES] */);

// ---------------------------------------------------------------- sampling
// Stateless: out[i] is a function of row i's logits and parameters alone.
typedef struct {
  int32_t n, vocab;
  float* logits;                // [n][vocab], changed in place
  const float* temperature;     // [n], 0 = greedy
  const float* top_p;           // [n]
  const float* min_p;           // [n]
  const int32_t* top_k;         // [n], 0 = off
  const uint64_t* seed;         // [n]
  const uint32_t* choice;       // [n]
  const uint32_t* position;     // [n], position of the token that is drawn
  const float* repetition;      // [n], 1 = off
  const float* presence;        // [n]
  const float* frequency;       // [n]
  const int32_t* const* seen_ids;     // [n] or NULL: distinct ids seen in prompt or output ...
  const int32_t* const* seen_counts;  // ... how often in the output (0 = prompt only)
  const int32_t* n_seen;        // [n]
  const int32_t* const* bias_ids;     // [n] or NULL
  const float* const* bias_values;
  const int32_t* n_bias;        // [n]
  const uint32_t* const* masks; // [n] or NULL: allowed-token bitmask, (vocab + 31) / 32 words; NULL entry = all
  const int32_t* n_top;         // [n]: alternatives wanted; -1 = no logprobs at all
  int32_t top_stride;
  int32_t* token;               // [n]
  float* logprob;               // [n] raw
  int32_t* rank;                // [n]
  int32_t* top_ids;             // [n][top_stride]
  float* top_logprobs;          // [n][top_stride]
  const int32_t* forced;        // [n] or NULL: >= 0: don't draw, report this token (scoring a prompt)
} oct_sampling;
int oct_sample(const oct_sampling* s);

#ifdef __cplusplus
}
#endif
