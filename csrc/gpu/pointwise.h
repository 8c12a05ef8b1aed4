// The small kernels around attention: norm, activation, sampling. One block a row.
#pragma once
#include "platform.h"

constexpr int ROW_THREADS = 256;

// Grid (rows). Shared: a float for every 32 threads. The order of additions depends on n alone.
template <typename T>
__global__ void rms_norm(T* out, const T* x, T* residual, const float* weight, int n, float eps) {
  SHARED_MEMORY(float, sums);
  const int64_t row = int64_t(blockIdx.x) * n;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    T value = x[row + i];
    if (residual) residual[row + i] = value = from_float<T>(to_float(value) + to_float(residual[row + i]));
    sum = fmaf(to_float(value), to_float(value), sum);
  }
  sum = sum32(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  BARRIER(1);
  sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; i++) sum += sums[i];
  const float scale = 1.0f / sqrtf(sum / n + eps);
  const T* normed = residual ? residual : x;
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    out[row + i] = from_float<T>(to_float(normed[row + i]) * scale * weight[i]);
}

// Grid (rows).
template <typename T> __global__ void silu_mul(T* out, const T* gate_up, int n) {
  const T* gate = gate_up + int64_t(blockIdx.x) * 2 * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float g = to_float(gate[i]), up = to_float(gate[n + i]);
    out[int64_t(blockIdx.x) * n + i] = from_float<T>(g / (1.0f + expf(-g)) * up);
  }
}

// 53 bits of Philox4x32-10 in [0, 1) (Salmon et al. 2011).
DEVICE double philox_uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c[4] = {choice, position, 0, 0}, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    for (int j = 0; j < 4; j++) c[j] = next[j];
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * (1.0 / 9007199254740992.0);
}

// Grid (rows), ROW_THREADS threads, each with a contiguous slice of the ids. Shared: doubles [threads + 1], int [threads].
__global__ void sample_rows(int32_t* token, const float* logits, const float* temperature, const uint64_t* seed,
                            const uint32_t* choice, const uint32_t* position, int vocab) {
  SHARED_MEMORY(double, mass);
  int* best = reinterpret_cast<int*>(mass + ROW_THREADS + 1);
  const int row = blockIdx.x, tid = threadIdx.x, slice = (vocab + ROW_THREADS - 1) / ROW_THREADS;
  const int first = min(tid * slice, vocab), end = min(first + slice, vocab);
  const float* x = logits + int64_t(row) * vocab;
  int mine = first;
  for (int i = first; i < end; i++)
    if (x[i] > x[mine]) mine = i;
  best[tid] = mine;
  BARRIER(1);
  int top = 0;
  for (int t = 0; t < ROW_THREADS && best[t] < vocab; t++)
    if (x[best[t]] > x[top]) top = best[t];
  const float t = temperature[row];
  if (t < 1e-5f) {
    if (tid == 0) token[row] = top;
    return;
  }
  double sum = 0;
  for (int i = first; i < end; i++) sum += double(expf((x[i] - x[top]) / t));
  mass[tid + 1] = sum;
  BARRIER(2);
  if (tid == 0) {
    mass[0] = 0;
    for (int i = 1; i <= ROW_THREADS; i++) mass[i] += mass[i - 1];
    token[row] = top;  // what is left when rounding keeps every sum at or below the target
  }
  BARRIER(3);
  const double target = philox_uniform(seed[row], choice[row], position[row]) * mass[ROW_THREADS];
  if (!(mass[tid] <= target && target < mass[tid + 1])) return;
  double running = mass[tid];
  int last = first;
  for (int i = first; i < end; i++) {
    const double weight = double(expf((x[i] - x[top]) / t));
    if (weight > 0) last = i;
    running += weight;
    if (running > target) break;
  }
  token[row] = last;
}
