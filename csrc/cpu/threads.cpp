#include "threads.h"

#include <chrono>

namespace octavo {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kSpins = 1000;  // some 40 us of pauses before the first yield
// A worker without work yields this long before it sleeps: longer than an engine needs between two steps, since waking
// up on a busy machine can cost a time slice.
constexpr std::chrono::milliseconds kStayAwake{2};

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads), shares_(new Share[threads]) {
  for (int t = 1; t < threads; t++) threads_.emplace_back(&ThreadPool::worker, this, t);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& t : threads_) t.join();
}

void ThreadPool::run(void (*work)(void*, int), void* arg) {
  if (size_ > 1) {
    work_ = work;
    arg_ = arg;
    // The lock orders this with a worker that is about to sleep, so that no wake-up is lost.
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
    if (sleepers_.load(std::memory_order_relaxed)) wake_.notify_all();
  }
  work(arg, 0);
  barrier();
}

void ThreadPool::reset_counters() {
  ticket_.store(0, std::memory_order_relaxed);
  for (int t = 0; t < size_; t++) shares_[t].taken.store(0, std::memory_order_relaxed);
}

void ThreadPool::barrier() {
  if (size_ == 1) return reset_counters();
  unsigned epoch = epoch_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    reset_counters();
    epoch_.store(epoch + 1, std::memory_order_release);
    return;
  }
  for (int i = 0; epoch_.load(std::memory_order_acquire) == epoch; i++) {
    if (i < kSpins) pause();
    else sched_yield();
  }
}

void ThreadPool::worker(int thread) {
  unsigned seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && !has_work(seen); i++) pause();
    auto sleep_at = std::chrono::steady_clock::now() + kStayAwake;
    while (!has_work(seen) && std::chrono::steady_clock::now() < sleep_at) sched_yield();
    if (!has_work(seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_relaxed);
      wake_.wait(lock, [&] { return has_work(seen); });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen++;
    if (stop_) return;
    work_(arg_, thread);
    barrier();
  }
}

}  // namespace octavo
