// The process-wide part of the ABI: choosing an instruction set, threads, memory, errors; the rest is passed on.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include <atomic>

#include "model.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#define OCT_API extern "C" __attribute__((visibility("default")))

namespace octavo {

// OCT_SETS comes from build.py: SET(portable) SET(avx2) ..., the lowest first.
#define SET(name) extern const InstructionSet set_##name;
OCT_SETS
#undef SET

double phase_seconds[OCT_PHASES];

namespace {

#define SET(name) &set_##name,
const InstructionSet* const kSets[] = {OCT_SETS};
#undef SET

const InstructionSet* current = nullptr;
ThreadPool* process_pool = nullptr;
std::atomic<int> live_models{0};
thread_local std::string last_error;

#if defined(__x86_64__)
// AMX tile registers must be asked for, once a process and before its threads use them.
bool amx_permitted() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
  if ((d & kNeeded) != kNeeded) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool runs_here(const char* name) {
#if defined(__x86_64__)
  std::string set = name;
  __builtin_cpu_init();
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (set == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == "avx512") return avx512;
  if (set == "avx512bf16") return bf16;
  if (set == "amx") return bf16 && amx_permitted();
#else
  (void)name;
#endif
  return true;
}

}  // namespace

int fail(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  last_error = text;
  return -1;
}

ThreadPool& pool() { return *process_pool; }

}  // namespace octavo

using namespace octavo;

OCT_API int oct_init(const char* isa, int threads) {
  if (threads < 0 || threads > 1024) return fail("threads must lie between 0 and 1024, not %d", threads);
  std::string wanted = isa ? isa : "";
  const InstructionSet* chosen = nullptr;
  for (const InstructionSet* set : kSets)
    if ((wanted.empty() || wanted == set->name) && runs_here(set->name)) chosen = set;
  if (!chosen) return fail("instruction set '%s' is not one of %s", wanted.c_str(), oct_isas());
  if (current && current != chosen && live_models > 0)
    return fail("the instruction set can't change from '%s' while models are loaded", current->name);
  current = chosen;
  if (threads == 0) {
    cpu_set_t cores;
    threads = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  }
  if (process_pool && process_pool->size() != threads) {
    delete process_pool;
    process_pool = nullptr;
  }
  if (!process_pool) process_pool = new ThreadPool(threads);
  return 0;
}

OCT_API const char* oct_isa(void) { return current ? current->name : ""; }

OCT_API const char* oct_isas(void) {
  static const std::string names = [] {
    std::string all;
    for (const InstructionSet* set : kSets)
      if (runs_here(set->name)) all += (all.empty() ? "" : ",") + std::string(set->name);
    return all;
  }();
  return names.c_str();
}

OCT_API int oct_threads(void) { return process_pool ? process_pool->size() : 0; }
OCT_API const char* oct_last_error(void) { return last_error.c_str(); }

OCT_API void* oct_alloc(int64_t bytes) {
  // mmap one huge page more than needed and give the unaligned ends back.
  constexpr int64_t kHuge = 2 << 20;
  int64_t page = sysconf(_SC_PAGESIZE), size = round_up(bytes > 0 ? bytes : 1, page);
  char* base = (char*)mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    fail("out of memory: can't map %lld bytes", (long long)size);
    return nullptr;
  }
  char* start = (char*)round_up((int64_t)base, kHuge);
  if (start > base) munmap(base, start - base);
  munmap(start + size, base + kHuge - start);
#if defined(MADV_HUGEPAGE)
  madvise(start, size, MADV_HUGEPAGE);
#endif
  return start;
}

OCT_API void oct_free(void* p, int64_t bytes) {
  if (p) munmap(p, round_up(bytes > 0 ? bytes : 1, sysconf(_SC_PAGESIZE)));
}

OCT_API int64_t oct_kv_block_bytes(const oct_spec* spec, int32_t block_size, int32_t dtype) {
  if (!current) return fail("call oct_init first");
  return current->kv_block_bytes(spec, block_size, dtype);
}

OCT_API int oct_step(oct_model* m, const oct_kv* kv, const oct_batch* b) {
  if (!current) return fail("call oct_init first");
  if (!m->model.ready) return fail("the model is not finished: call oct_model_finish or oct_model_load");
  return current->step(&m->model, kv, b);
}

OCT_API void oct_phases(double* seconds) {
  for (int i = 0; i < OCT_PHASES; i++) seconds[i] = phase_seconds[i], phase_seconds[i] = 0;
}

OCT_API int oct_sample(const oct_sampling* s) {
  if (!current) return fail("call oct_init first");
  return current->sample(s);
}

OCT_API double oct_measure(int what) {
  if (!current) return fail("call oct_init first");
  if (what < 0 || what > 3) return fail("there is nothing to measure under %d", what);
  return current->measure(what);
}

OCT_API oct_model* oct_model_new(const oct_spec* spec) {
  oct_model* m = new_model(spec);
  if (m) live_models++;
  return m;
}

OCT_API void oct_model_free(oct_model* m) {
  if (!m) return;
  if (m->model.step_state) current->free_state(m->model.step_state);
  for (auto& chunk : m->model.chunks) oct_free(chunk.data, chunk.bytes);
  delete m;
  live_models--;
}
