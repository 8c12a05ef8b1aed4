// The one pool of compute threads. The caller of run() is thread 0; the others sleep between runs.
//
// Inside a run threads meet at barrier(), which spins, then yields: a futex costs more than the whole phase, and
// spinning without end costs a time slice when another process has the core. Work between two barriers is cut by
// range(), or taken with take(), or cut and then taken with take_of(), so that who is done helps the others. The barrier
// sets the counters back to zero: at most one taking loop of each kind a phase.
#pragma once
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  int size() const { return size_; }
  void run(void (*work)(void* arg, int thread), void* arg);
  void barrier();
  int take() { return ticket_.fetch_add(1, std::memory_order_relaxed); }
  int take_of(int thread) { return shares_[thread].taken.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct alignas(64) Share { std::atomic<int> taken{0}; };

  void worker(int thread);
  void reset_counters();
  bool has_work(unsigned seen) const { return generation_.load(std::memory_order_acquire) != seen; }

  const int size_;
  std::unique_ptr<Share[]> shares_;  // [size_]
  std::vector<std::thread> threads_;
  void (*work_)(void*, int) = nullptr;
  void* arg_ = nullptr;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  alignas(64) std::atomic<unsigned> generation_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> ticket_{0};
};

struct Range { int begin, end; };
// The part of [0, n) that thread t of `threads` gets, in whole multiples of `grain`.
inline Range range(int n, int t, int threads, int grain = 1) {
  int64_t units = (n + grain - 1) / grain;
  int begin = (int)(units * t / threads) * grain, end = (int)(units * (t + 1) / threads) * grain;
  return {begin < n ? begin : n, end < n ? end : n};
}

}  // namespace octavo
