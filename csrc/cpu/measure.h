// The ceilings of this machine for the set in use, by all threads of the pool: what `octavo bench` compares with.
#pragma once
#include <time.h>

#include "buffer.h"
#include "gemm_bf16.h"
#include "gemm_int.h"
#include "threads.h"
#include "tiles.h"

namespace octavo {
namespace OCT_ISA {

struct Measurement {
  int what;
  int64_t rounds;
  const uint8_t* memory;
  int64_t bytes;
  Buffer sinks;  // a cache line a thread, so that nothing is optimised away
};

static void read_memory(const Measurement& m, int thread) {
  Range mine = range((int)(m.bytes >> 12), thread, pool().size());
  vu acc[4] = {};
  for (int64_t page = mine.begin; page < mine.end; page++)
    for (const uint8_t* p = m.memory + (page << 12); p < m.memory + ((page + 1) << 12); p += 4 * sizeof(vu)) {
      __builtin_prefetch(p + 4096);
      OCT_UNROLL for (int i = 0; i < 4; i++) acc[i] |= load_u32(p + i * sizeof(vu));
    }
  acc[0] |= acc[1] | acc[2] | acc[3];
  memcpy(m.sinks.as<uint8_t>() + thread * 64, &acc, sizeof acc[0]);
}

constexpr int kChains = 12;  // independent accumulators

template <class V> OCT_INLINE void keep(const Measurement& m, int thread, const V* acc) {
  V all = acc[0];
  OCT_UNROLL for (int c = 1; c < kChains; c++) all += acc[c];
  memcpy(m.sinks.as<uint8_t>() + thread * 64, &all, sizeof all);
}

static void run_fma(const Measurement& m, int thread) {
  vf acc[kChains], x = splat(0.999f), y = splat(0.001f);
  OCT_UNROLL for (int c = 0; c < kChains; c++) acc[c] = x;
  for (int64_t i = 0; i < m.rounds; i++) {
    OCT_UNROLL for (int c = 0; c < kChains; c++) acc[c] = fma(acc[c], x, y);
    asm volatile("" : "+m"(x), "+m"(y));  // or the compiler would see the end of it
  }
  keep(m, thread, acc);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
static void run_bf16(const Measurement& m, int thread) {
  __m512 acc[kChains];
  __m512i one = _mm512_set1_epi32(0x3f803f80);
  OCT_UNROLL for (int c = 0; c < kChains; c++) acc[c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < m.rounds; i++) {
    OCT_UNROLL for (int c = 0; c < kChains; c++)
      asm volatile("vdpbf16ps %1, %1, %0" : "+v"(acc[c]) : "v"(one));
  }
  keep(m, thread, acc);
}
#endif

static void run_int8(const Measurement& m, int thread) {
  vi acc[kChains] = {};
  vu w = (vu)splat_i32(0x01020304);
  vi a = splat_i32(0x01ff01ff);
  for (int64_t i = 0; i < m.rounds; i++) {
    OCT_UNROLL for (int c = 0; c < kChains; c++) acc[c] = dot4(acc[c], w, a);
    asm volatile("" : "+m"(w), "+m"(a));
  }
  keep(m, thread, acc);
}

#if defined(__AMX_BF16__)
// With fresh operands from L1, as a product has them; registers alone run at a clock that no product sees.
static void run_tiles(const Measurement& m, int) {
  alignas(64) uint16_t operands[4][16 * 32];
  uint32_t random = 1;
  for (auto& tile : operands)
    for (auto& x : tile) random = random * 1664525u + 1013904223u, x = (uint16_t)(0x3f00 | (random >> 24 & 0x80ff));
  configure_tiles(64);
  tiles_fence();
  for (int64_t i = 0; i < m.rounds; i++) {
    _tile_loadd(4, operands[0], 64);
    _tile_loadd(6, operands[2], 64);
    if (m.what == 2) _tile_dpbf16ps(0, 4, 6); else _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, operands[3], 64);
    if (m.what == 2) _tile_dpbf16ps(1, 4, 7); else _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, operands[1], 64);
    if (m.what == 2) _tile_dpbf16ps(2, 5, 6); else _tile_dpbssd(2, 5, 6);
    if (m.what == 2) _tile_dpbf16ps(3, 5, 7); else _tile_dpbssd(3, 5, 7);
  }
  tiles_fence();
  release_tiles();
}
#endif

// Operations of one round on one thread, and the function.
static double operations(int what, void (**work)(const Measurement&, int)) {
#if defined(__AMX_BF16__)
  if (what == 2 || what == 3) {
    *work = run_tiles;
    return 4.0 * 16 * 16 * (what == 2 ? 32 : 64) * 2;
  }
#endif
  *work = run_fma;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  if (what == 2) {
    *work = run_bf16;
    return kChains * kLanes * 4.0;
  }
#endif
  if (what == 3) {
    *work = run_int8;
    return kChains * kLanes * 8.0;
  }
  return kChains * kLanes * 2.0;
}

// 0: bytes read a second from memory; 1, 2, 3: operations a second in float, bf16, int8 products. The best of five.
static double measure(int what) {
  Measurement m;
  m.what = what;
  m.sinks.reserve_array<uint8_t>(64 * pool().size());
  Buffer memory;
  void (*work)(const Measurement&, int) = read_memory;
  double amount;
  if (what == 0) {
    m.bytes = (int64_t)1 << 29;
    m.memory = memory.reserve_array<uint8_t>(m.bytes);
    if (!m.memory) return -1;
    memset(memory.data(), 1, m.bytes);
    amount = (double)m.bytes;
  } else {
    m.rounds = 500000;
    amount = operations(what, &work) * m.rounds * pool().size();
  }
  struct Job { Measurement& m; void (*work)(const Measurement&, int); } job = {m, work};
  double best = 0;
  for (int i = 0; i < 5; i++) {
    timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    pool().run([](void* p, int thread) { ((Job*)p)->work(((Job*)p)->m, thread); }, &job);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double rate = amount / ((end.tv_sec - start.tv_sec) + (end.tv_nsec - start.tv_nsec) * 1e-9);
    if (rate > best) best = rate;
  }
  return best;
}

}  // namespace OCT_ISA
}  // namespace octavo
