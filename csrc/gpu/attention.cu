// Attention with activations of one type, OCT_TYPE: a compilation unit each, for they are slow to compile.
#include "attention_plain.h"
#include "attention_tensor.h"
#include "launch.h"

#define NAME_OF(type) octg_attention_##type
#define NAME(type) NAME_OF(type)

namespace {
int ceil_div(int a, int b) { return (a + b - 1) / b; }

dim3 grid_of(const octg_attention& a, int tile_rows, int split, int parts) {
  const int tiles = ceil_div(a.max_q * (a.heads / a.kv_heads), tile_rows);
  return dim3(tiles * (split ? parts : 1), a.kv_heads, a.seqs);
}

template <typename T, typename C> int run_plain(const octg_attention& a, int split, int parts, void* stream) {
  auto kernel = attention_plain<T, C>;
  LAUNCH(kernel, grid_of(a, PLAIN_ROWS, split, parts), dim3(plain_threads(a.head_size)),
         plain_shared_bytes(a.head_size), stream, a, split, parts);
  return octg_launched("attention_plain");
}

#if defined(OCT_TENSOR_CORES)
template <typename T, int D, int NT> int run_tensor(const octg_attention& a, int split, int parts, void* stream) {
  auto kernel = attention_tensor<T, D, NT>;
  LAUNCH(kernel, grid_of(a, 8 * NT, split, parts), dim3(TENSOR_THREADS), tensor_shared_bytes(D, NT), stream, a, split,
         parts);
  return octg_launched("attention_tensor");
}

// Two tiles of 8 rows read the keys once for 16 rows; at head size 256 they don't fit the registers.
template <typename T> int run_tensor(const octg_attention& a, int split, int parts, void* stream) {
  const bool wide = a.max_q * (a.heads / a.kv_heads) > 8;
  switch (a.head_size) {
    case 64: return wide ? run_tensor<T, 64, 2>(a, split, parts, stream) : run_tensor<T, 64, 1>(a, split, parts, stream);
    case 96: return wide ? run_tensor<T, 96, 2>(a, split, parts, stream) : run_tensor<T, 96, 1>(a, split, parts, stream);
    case 128:
      return wide ? run_tensor<T, 128, 2>(a, split, parts, stream) : run_tensor<T, 128, 1>(a, split, parts, stream);
    default: return run_tensor<T, 256, 1>(a, split, parts, stream);
  }
}
#endif

bool fits_tensor_cores(const octg_attention& a) {
#if defined(OCT_TENSOR_CORES)
  const int d = a.head_size;
  return a.dtype != OCTG_F32 && a.kv_dtype == a.dtype && (d == 64 || d == 96 || d == 128 || d == 256);
#else
  (void)a;
  return false;
#endif
}
}  // namespace

int NAME(OCT_TYPE)(const octg_attention& a, void* stream) {
  using T = OCT_TYPE;
  const int split = octg_workspace(&a) > 0, parts = ceil_div(a.max_len, OCTG_PART);
  if (a.path == OCTG_TENSOR && !fits_tensor_cores(a))
    return octg_fail("no tensor core path for head size %d, dtype %d, KV dtype %d", a.head_size, a.dtype, a.kv_dtype);
  int status = 0;
#if defined(OCT_TENSOR_CORES)
  if constexpr (sizeof(T) == 2)
    if (a.path != OCTG_PLAIN && fits_tensor_cores(a)) {
      status = run_tensor<T>(a, split, parts, stream);
      if (status || !split) return status;
    }
  if (a.path == OCTG_PLAIN || !fits_tensor_cores(a))
#endif
    status = with_kv_type<T>(a.dtype, a.kv_dtype, [&](auto tag) {
      return run_plain<T, typename decltype(tag)::type>(a, split, parts, stream);
    });
  if (status || !split) return status;
  auto kernel = merge_parts<T>;
  LAUNCH(kernel, dim3(a.heads, a.max_q, a.seqs), dim3((a.head_size + 31) / 32 * 32), 0, stream, a, parts);
  return octg_launched("merge_parts");
}
