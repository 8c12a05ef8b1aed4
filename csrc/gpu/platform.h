// What differs between CUDA, HIP and the host emulator: everything else in this folder is one source for the three.
//
// Kernels use threadIdx/blockIdx/blockDim, __global__ and __device__ as CUDA has them, and from here: storage types
// with their conversions, 16-byte loads, warp collectives, the block barrier and the tensor-core product.
#pragma once
#include <stdint.h>

#if defined(OCT_EMULATE)
#include "emulate.h"
#elif defined(__HIPCC__) || defined(__HIP__)
#include <hip/hip_runtime.h>
#define OCT_HIP 1
#else
#include <cuda_runtime.h>
#define OCT_CUDA 1
#endif

#define DEVICE static __device__ __forceinline__
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEG_INF = -__builtin_huge_valf();

// ---------------------------------------------------------------- storage types
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // OCP e4m3fn: no infinity, +-448
struct e5m2 { uint8_t bits; };  // OCP e5m2, +-57344

DEVICE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
DEVICE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(int8_t x) { return float(x); }
DEVICE float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
DEVICE float to_float(f16 x) {
#if defined(OCT_CUDA)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  _Float16 h;
  memcpy(&h, &x.bits, 2);
  return float(h);
#endif
}
// Both fp8 formats are half precision with fewer mantissa bits; e4m3 has another bias and one NaN code.
DEVICE float to_float(e4m3 x) {
  if ((x.bits & 0x7f) == 0x7f) return float_of(0x7fc00000);
  return 256.0f * to_float(f16{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
DEVICE float to_float(e5m2 x) { return to_float(f16{uint16_t(x.bits << 8)}); }

// Rounding is to nearest even throughout.
template <typename T> DEVICE T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16{0x7fc0};
  return bf16{uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
#if defined(OCT_CUDA)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const _Float16 h = _Float16(x);
  memcpy(&y.bits, &h, 2);
#endif
  return y;
}
// fp8 with MANTISSA bits and exponent bias BIAS, saturated at `limit`; NaN stays NaN.
template <int MANTISSA, int BIAS> DEVICE uint8_t to_fp8(float x, float limit) {
  const uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
  if ((u & 0x7fffffff) > 0x7f800000) return uint8_t(sign | 0x7f);
  const float a = fminf(fabsf(x), limit);
  constexpr int drop = 23 - MANTISSA;
  const uint32_t v = bits_of(a);
  if (v < uint32_t(128 - BIAS) << 23)  // below the smallest normal: a multiple of the smallest step
    return uint8_t(sign | uint32_t(rintf(a * float(1 << (BIAS - 1 + MANTISSA)))));
  return uint8_t(sign | (v + ((1u << (drop - 1)) - 1) + (v >> drop & 1) - (uint32_t(127 - BIAS) << 23)) >> drop);
}
template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) { return e4m3{to_fp8<3, 7>(x, 448.0f)}; }
template <> __device__ __forceinline__ e5m2 from_float<e5m2>(float x) { return e5m2{to_fp8<2, 15>(x, 57344.0f)}; }
template <> __device__ __forceinline__ int8_t from_float<int8_t>(float x) {
  return x != x ? int8_t(0) : int8_t(fminf(fmaxf(rintf(x), -127.0f), 127.0f));
}

// ---------------------------------------------------------------- memory
struct alignas(16) Vec16 { uint32_t word[4]; };

// The only way kernels read K and V: one aligned load of 16 bytes.
DEVICE Vec16 load16(const void* p) {
#if defined(OCT_EMULATE)
  emu::count_load(p);
#endif
  return *reinterpret_cast<const Vec16*>(p);
}

template <typename C> DEVICE void unpack(const Vec16& v, float (&x)[16 / sizeof(C)]) {
  C c[16 / sizeof(C)];
  memcpy(c, &v, 16);
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(C)); i++) x[i] = to_float(c[i]);
}

// ---------------------------------------------------------------- threads
#if defined(OCT_EMULATE)
#define SHARED_MEMORY(type, name) type* name = reinterpret_cast<type*>(emu::shared_memory())
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  emu::launch(grid, block, shared, [=] { kernel(__VA_ARGS__); })
#else
#define SHARED_MEMORY(type, name)                             \
  extern __shared__ __align__(16) unsigned char shared_raw[]; \
  type* name = reinterpret_cast<type*>(shared_raw)
#if defined(OCT_HIP)
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  hipLaunchKernelGGL(kernel, grid, block, shared, static_cast<hipStream_t>(stream), __VA_ARGS__)
#else
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif
#endif

// Barrier of the block. The emulator can leave out the n-th of a kernel: its race check must notice every single one.
#if defined(OCT_EMULATE)
#define BARRIER(n) do { if ((n) != emu::left_out) __syncthreads(); } while (0)
#else
#define BARRIER(n) __syncthreads()
#endif

DEVICE float shuffle_xor(float x, int mask) {
#if defined(OCT_EMULATE)
  return emu::shuffle_xor(x, mask);
#elif defined(OCT_HIP)
  return __shfl_xor(x, mask);
#else
  return __shfl_xor_sync(0xffffffffu, x, mask);
#endif
}

// Over groups of 32 lanes, also where a warp has 64, so that every platform adds in the same order.
DEVICE float sum32(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += shuffle_xor(x, i);
  return x;
}
DEVICE float max32(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x = fmaxf(x, shuffle_xor(x, i));
  return x;
}

DEVICE float exp2_fast(float x) {
#if defined(OCT_CUDA)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// ---------------------------------------------------------------- tensor cores (CUDA and emulator)
#if !defined(OCT_HIP)
#define OCT_TENSOR_CORES 1
struct Accumulator { float c[4]; };

// d = a b + d for one 16 x 8 x 16 tile; PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <typename T> DEVICE void mma(Accumulator& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
#if defined(OCT_EMULATE)
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emu::mma(d.c, a, b, [](uint16_t bits) { return to_float(T{bits}); });
#else
  if constexpr (sizeof(T) == 2) {
    constexpr bool is_bf16 = __is_same(T, bf16);
    if constexpr (is_bf16)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                   "{%0,%1,%2,%3};"
                   : "+f"(d.c[0]), "+f"(d.c[1]), "+f"(d.c[2]), "+f"(d.c[3])
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                   "{%0,%1,%2,%3};"
                   : "+f"(d.c[0]), "+f"(d.c[1]), "+f"(d.c[2]), "+f"(d.c[3])
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// Transpose an 8 x 8 matrix of 16-bit elements held by the warp: lane 4 r + c has row r, columns 2 c and 2 c + 1.
DEVICE uint32_t transpose8x8(uint32_t x) {
#if defined(OCT_EMULATE)
  return emu::transpose8x8(x);
#else
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#endif
}

template <typename T> DEVICE uint32_t pack2(float low, float high) {
  return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}
#endif
