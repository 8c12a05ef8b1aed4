// Runs CUDA kernels on the host, one fiber a thread, to compare them with float64 and to look for races and overruns.
//
// A block is a set of fibers on one OS thread. A fiber runs until it waits for others (barrier, shuffle, mma), then
// the next one does. Shared memory is a heap block of exactly the size asked for, filled with NaN, so that AddressSanitizer
// sees overruns and a missing initialisation shows. Under ThreadSanitizer each fiber is a thread of its own and only
// barriers and collectives order them. What it can't show: weak memory order, timing, the real instructions.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EMU_INTERNAL __attribute__((noinline, no_sanitize("thread")))
#else
#define EMU_INTERNAL __attribute__((noinline))
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {
constexpr int GROUP = 32;  // lanes that a collective of the kernels spans
constexpr size_t STACK = 64 << 10;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulator: %s\n", what);
  abort();
}

// Switching saves what a call must keep; ucontext does the same with two system calls more.
#if defined(__x86_64__)
extern "C" void emu_switch(void** from, void* to);
__asm__(
    ".text\n.weak emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#endif

struct Barrier {  // of a block or of a group of lanes
  int arrived = 0;
  unsigned generation = 0;
  char tags[2];
};

struct Fiber {
  dim3 thread;
  int index = 0;
  bool done = false;
  std::unique_ptr<char[]> stack;
#if defined(__x86_64__)
  void* context = nullptr;
#else
  ucontext_t context;
#endif
  void* tsan = nullptr;
};

struct Block {
  dim3 index, grid, size;
  // Plain pointers: a container's own code would be watched by ThreadSanitizer.
  Fiber* fibers = nullptr;
  int count = 0;
  Barrier* groups = nullptr;
  uint32_t* deposits = nullptr;  // one collective's operands, 8 words a lane, two sets used in turn
  Barrier all;
  int live = 0, current = 0, waiting = 0;
  unsigned char* shared = nullptr;
  const std::function<void()>* body = nullptr;
#if defined(__x86_64__)
  void* main = nullptr;
#else
  ucontext_t main;
#endif
  void* tsan_main = nullptr;
  char begun, ended;
};
inline thread_local Block* block = nullptr;
inline long loads = 0;  // 16-byte loads so far
inline int left_out = 0;  // barrier that a check leaves out

EMU_INTERNAL inline void count_load(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) & 15) fail("a 16-byte load is not aligned");
  loads++;
}
inline void* shared_memory() { return block->shared; }
EMU_INTERNAL inline Fiber& self() { return block->fibers[block->current]; }

EMU_INTERNAL inline void switch_to(int next) {
  Block& b = *block;
  const int from = b.current;
  if (next == from) return;
  b.current = next;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(next < 0 ? b.tsan_main : b.fibers[next].tsan, 1);
#endif
#if defined(__x86_64__)
  emu_switch(from < 0 ? &b.main : &b.fibers[from].context, next < 0 ? b.main : b.fibers[next].context);
#else
  swapcontext(from < 0 ? &b.main : &b.fibers[from].context, next < 0 ? &b.main : &b.fibers[next].context);
#endif
}

EMU_INTERNAL inline void run_next() {
  Block& b = *block;
  const int n = b.count;
  for (int i = 1; i <= n; i++) {
    const int next = (b.current + i) % n;
    if (!b.fibers[next].done) return switch_to(next);
  }
  switch_to(-1);
}

// Waits until `count` fibers have arrived. Two tags in turn: with one, a later arrival would leak into this one.
EMU_INTERNAL inline void wait(Barrier& barrier, int count) {
  Block& b = *block;
  const unsigned generation = barrier.generation;
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&barrier.tags[generation & 1]);
#endif
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
    b.waiting = 0;
  } else {
    while (barrier.generation == generation) {
      if (++b.waiting > 4 * b.count) fail("deadlock: a barrier or collective is not reached by all");
      run_next();
    }
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&barrier.tags[generation & 1]);
#endif
}

EMU_INTERNAL inline void barrier() {
  if (block->live != block->count) fail("a barrier after some threads have ended");
  wait(block->all, block->live);
}

// Every lane of a group gives n words and then sees those of all: words[lane * 8 + i].
EMU_INTERNAL inline const uint32_t* exchange(const uint32_t* mine, int n) {
  Block& b = *block;
  const int group = b.current / GROUP, lane = b.current % GROUP;
  Barrier& barrier = b.groups[group];
  uint32_t* words = b.deposits + (group * 2 + (barrier.generation & 1)) * GROUP * 8;
  for (int i = 0; i < n; i++) words[lane * 8 + i] = mine[i];
  wait(barrier, GROUP);
  return words;
}

EMU_INTERNAL inline float shuffle_xor(float x, int mask) {
  uint32_t word;
  memcpy(&word, &x, 4);
  const int lane = block->current % GROUP;
  word = exchange(&word, 1)[(lane ^ mask) * 8];
  memcpy(&x, &word, 4);
  return x;
}

EMU_INTERNAL inline uint32_t transpose8x8(uint32_t x) {
  const int lane = block->current % GROUP, row = lane / 4, column = lane % 4 * 2;
  const uint32_t* words = exchange(&x, 1);
  uint32_t out = 0;
  for (int i = 0; i < 2; i++) {  // element (row, column + i) of the result is (column + i, row) of what came in
    const uint32_t word = words[((column + i) * 4 + row / 2) * 8];
    out |= (word >> (row % 2 * 16) & 0xffff) << (16 * i);
  }
  return out;
}

// d [16 x 8] += a [16 x 16] b [16 x 8], fragments as PTX lays them out.
template <typename Convert>
EMU_INTERNAL void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Convert convert) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const uint32_t* words = exchange(mine, 6);
  const int lane = block->current % GROUP;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const int quad = k % 8 / 2, half = 16 * (k % 2);
      const uint32_t wa = words[(row % 8 * 4 + quad) * 8 + row / 8 + 2 * (k / 8)];
      const uint32_t wb = words[(column * 4 + quad) * 8 + 4 + k / 8];
      sum += convert(uint16_t(wa >> half)) * convert(uint16_t(wb >> half));
    }
    d[i] += sum;
  }
}

EMU_INTERNAL inline void enter() {
  Block& b = *block;
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&b.begun);
#endif
  (*b.body)();
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&b.ended);
#endif
  self().done = true;
  b.live--;
  b.waiting = 0;
  run_next();
  fail("a fiber that has ended was run");
}

EMU_INTERNAL inline void run_block(Block& b) {
  block = &b;
  b.all = Barrier();
  for (int i = 0; i < b.count / GROUP; i++) b.groups[i] = Barrier();
  b.live = b.count;
  b.waiting = 0;
#if defined(__SANITIZE_THREAD__)
  b.tsan_main = __tsan_get_current_fiber();
  __tsan_release(&b.begun);
#endif
  for (int i = 0; i < b.count; i++) {
    Fiber& fiber = b.fibers[i];
    fiber.done = false;
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
    auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK) & ~uintptr_t(15);
    auto* frame = reinterpret_cast<void**>(top) - 8;  // six registers, the entry, and a return address nobody uses
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(&enter);
    fiber.context = frame;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&enter), 0);
#endif
  }
  b.current = -1;
  switch_to(0);
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&b.ended);
  for (int i = 0; i < b.count; i++) __tsan_destroy_fiber(b.fibers[i].tsan);
#endif
}

EMU_INTERNAL inline void launch(dim3 grid, dim3 size, size_t shared, const std::function<void()>& body) {
  Block b;
  b.grid = grid;
  b.size = size;
  b.body = &body;
  const int n = int(size.x * size.y * size.z);
  if (n % GROUP || n > 1024) fail("a block must be whole groups of 32 threads, at most 1024");
  std::vector<Fiber> fibers(n);
  std::vector<Barrier> groups(n / GROUP);
  std::vector<uint32_t> deposits(size_t(n / GROUP) * 2 * GROUP * 8);
  b.fibers = fibers.data();
  b.count = n;
  b.groups = groups.data();
  b.deposits = deposits.data();
  for (int i = 0; i < n; i++) {
    b.fibers[i].index = i;
    b.fibers[i].thread = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
    b.fibers[i].stack.reset(new char[STACK]);
  }
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        b.index = dim3(x, y, z);
        std::unique_ptr<unsigned char[]> memory(new unsigned char[shared]);  // 16-byte aligned by malloc
        b.shared = memory.get();
        memset(b.shared, 0xff, shared);
        run_block(b);
      }
  block = nullptr;
}
}  // namespace emu

#define threadIdx (emu::self().thread)
#define blockIdx (emu::block->index)
#define blockDim (emu::block->size)
#define gridDim (emu::block->grid)
#define __syncthreads() emu::barrier()
