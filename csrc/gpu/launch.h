// Host side helpers of the entry points: errors, and kernels chosen by dtype.
#pragma once
#include "kernels.h"
#include "platform.h"

int octg_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));  // keeps the message, returns -1
int octg_launched(const char* kernel);                                         // 0, or the launch's error

constexpr int MAX_HEAD = 256;

template <typename T> struct Tag { using type = T; };

// Calls f with the tag of a KV dtype beside activations of T: T itself, int8 or one of the fp8. -1 for others.
template <typename T, typename F> int with_kv_type(int dtype, int kv_dtype, F f) {
  if (kv_dtype == dtype) return f(Tag<T>{});
  if (kv_dtype == OCTG_I8) return f(Tag<int8_t>{});
  if (kv_dtype == OCTG_F8E4M3) return f(Tag<e4m3>{});
  if (kv_dtype == OCTG_F8E5M2) return f(Tag<e5m2>{});
  return octg_fail("KV dtype %d can't be used with activations of dtype %d: want the same, int8 or fp8", kv_dtype, dtype);
}

template <typename F> int with_type(int dtype, F f) {
  if (dtype == OCTG_F32) return f(Tag<float>{});
  if (dtype == OCTG_BF16) return f(Tag<bf16>{});
  if (dtype == OCTG_F16) return f(Tag<f16>{});
  return octg_fail("dtype %d is no activation dtype: want float32, bfloat16 or float16", dtype);
}

inline int element_bytes(int dtype) { return dtype == OCTG_F32 ? 4 : dtype == OCTG_BF16 || dtype == OCTG_F16 ? 2 : 1; }

// 0, or -1 when the paged views have no such shape.
inline int check_shape(int head_size, int block_size, int kv_dtype) {
  const int x = 16 / element_bytes(kv_dtype);
  if (block_size < x || block_size & (block_size - 1))
    return octg_fail("block size %d: the kernels want a power of two of at least %d tokens", block_size, x);
  if (head_size % x || head_size < 1 || head_size > MAX_HEAD)
    return octg_fail("head size %d: the kernels want a multiple of %d up to %d", head_size, x, MAX_HEAD);
  return 0;
}
