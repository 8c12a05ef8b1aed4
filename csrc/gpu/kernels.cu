// The entry points of kernels.h.
#include <stdarg.h>
#include <stdio.h>

#include "cache.h"
#include "launch.h"
#include "pointwise.h"

int octg_attention_float(const octg_attention& a, void* stream);
int octg_attention_bf16(const octg_attention& a, void* stream);
int octg_attention_f16(const octg_attention& a, void* stream);

static thread_local char last_error[256];

int octg_fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return -1;
}

int octg_launched(const char* kernel) {
#if defined(OCT_EMULATE)
  (void)kernel;
  return 0;
#elif defined(OCT_HIP)
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? 0 : octg_fail("%s: %s", kernel, hipGetErrorString(error));
#else
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? 0 : octg_fail("%s: %s", kernel, cudaGetErrorString(error));
#endif
}

extern "C" {
const char* octg_platform(void) {
#if defined(OCT_EMULATE)
  return "emulator";
#elif defined(OCT_HIP)
  return "hip";
#else
  return "cuda";
#endif
}
int octg_abi(void) { return OCTG_ABI; }
const char* octg_last_error(void) { return last_error; }
#if defined(OCT_EMULATE)
int64_t octg_emulated_loads(void) { return emu::loads; }
#endif

// Few query rows leave most of the GPU idle unless keys are split; many rows fill it and need no second pass.
int64_t octg_workspace(const octg_attention* a) {
  if (a->max_len <= OCTG_PART || a->max_q * (a->heads / a->kv_heads) > 16) return 0;
  const int64_t parts = (a->max_len + OCTG_PART - 1) / OCTG_PART;
  const int64_t floats = int64_t(a->rows) * a->heads * parts * (a->head_size + 2);
  return floats <= OCTG_MOST_WORKSPACE ? floats : 0;
}

int octg_paged_attention(const octg_attention* a, void* stream) {
  if (check_shape(a->head_size, a->block_size, a->kv_dtype)) return -1;
  if (a->kv_heads < 1 || a->heads % a->kv_heads)
    return octg_fail("%d query heads can't share %d KV heads", a->heads, a->kv_heads);
  if (a->seqs < 1 || a->max_q < 1 || a->rows < 1) return 0;
  if (octg_workspace(a) && !a->workspace) return octg_fail("no workspace: octg_workspace() says how much is needed");
  switch (a->dtype) {
    case OCTG_F32: return octg_attention_float(*a, stream);
    case OCTG_BF16: return octg_attention_bf16(*a, stream);
    case OCTG_F16: return octg_attention_f16(*a, stream);
    default: return octg_fail("dtype %d is no activation dtype: want float32, bfloat16 or float16", a->dtype);
  }
}

int octg_reshape_and_cache(const octg_cache_write* w, void* stream) {
  if (check_shape(w->head_size, w->block_size, w->kv_dtype)) return -1;
  if (w->rotary_dim < 0 || w->rotary_dim > w->head_size || w->rotary_dim % 2)
    return octg_fail("rotary_dim %d: want an even number up to the head size %d", w->rotary_dim, w->head_size);
  if (w->rows < 1) return 0;
  const octg_cache_write args = *w;
  const int threads = (w->head_size + 31) / 32 * 32;
  return with_type(w->dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_kv_type<T>(args.dtype, args.kv_dtype, [&](auto kv_tag) {
      auto kernel = cache_write<T, typename decltype(kv_tag)::type>;
      LAUNCH(kernel, dim3(args.rows, args.kv_heads + (args.q ? args.heads : 0)), dim3(threads), threads / 32 * 8, stream,
             args);
      return octg_launched("cache_write");
    });
  });
}

int octg_copy_blocks(void* storage, const int64_t* pairs, int n, int64_t num_blocks, int64_t block_bytes, void* stream) {
  if (n < 1) return 0;
  char* bytes = static_cast<char*>(storage);
  if (block_bytes % 16 == 0) {
    auto kernel = copy_blocks<Vec16>;
    LAUNCH(kernel, dim3(n, 2), dim3(256), 0, stream, bytes, pairs, num_blocks, block_bytes);
  } else {
    auto kernel = copy_blocks<char>;
    LAUNCH(kernel, dim3(n, 2), dim3(256), 0, stream, bytes, pairs, num_blocks, block_bytes);
  }
  return octg_launched("copy_blocks");
}

int octg_swap_blocks(void* dst, const void* src, const int64_t* pairs, int n, int64_t block_bytes, void* stream) {
  for (int i = 0; i < n;) {
    int m = 1;  // neighbours move together
    while (i + m < n && pairs[2 * (i + m)] == pairs[2 * i] + m && pairs[2 * (i + m) + 1] == pairs[2 * i + 1] + m) m++;
    const char* from = static_cast<const char*>(src) + pairs[2 * i] * block_bytes;
    char* to = static_cast<char*>(dst) + pairs[2 * i + 1] * block_bytes;
#if defined(OCT_EMULATE)
    (void)stream;
    memcpy(to, from, m * block_bytes);
#elif defined(OCT_HIP)
    const hipError_t error = hipMemcpyAsync(to, from, m * block_bytes, hipMemcpyDefault, static_cast<hipStream_t>(stream));
    if (error != hipSuccess) return octg_fail("swap_blocks: %s", hipGetErrorString(error));
#else
    const cudaError_t error =
        cudaMemcpyAsync(to, from, m * block_bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return octg_fail("swap_blocks: %s", cudaGetErrorString(error));
#endif
    i += m;
  }
  return 0;
}

int octg_rms_norm(void* out, const void* x, void* residual, const float* weight, int rows, int n, float eps, int dtype,
                  void* stream) {
  if (rows < 1) return 0;
  return with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto kernel = rms_norm<T>;
    LAUNCH(kernel, dim3(rows), dim3(ROW_THREADS), ROW_THREADS / 32 * 4, stream, static_cast<T*>(out),
           static_cast<const T*>(x), static_cast<T*>(residual), weight, n, eps);
    return octg_launched("rms_norm");
  });
}

int octg_silu_mul(void* out, const void* gate_up, int rows, int n, int dtype, void* stream) {
  if (rows < 1) return 0;
  return with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto kernel = silu_mul<T>;
    LAUNCH(kernel, dim3(rows), dim3(ROW_THREADS), 0, stream, static_cast<T*>(out), static_cast<const T*>(gate_up), n);
    return octg_launched("silu_mul");
  });
}

int octg_sample(int32_t* token, const float* logits, const float* temperature, const uint64_t* seed,
                const uint32_t* choice, const uint32_t* position, int rows, int vocab, void* stream) {
  if (rows < 1) return 0;
  if (vocab < 1) return octg_fail("a vocabulary of %d tokens", vocab);
  auto kernel = sample_rows;
  LAUNCH(kernel, dim3(rows), dim3(ROW_THREADS), (ROW_THREADS + 1) * 8 + ROW_THREADS * 4, stream, token, logits,
         temperature, seed, choice, position, vocab);
  return octg_launched("sample_rows");
}
}
