// Aborts a process whose event loop hangs, even while it holds the GIL.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

namespace kvmesh {

// Checks every `step` seconds; aborts after `looks` checks in a row without a tick between them.
// It counts checks instead of time: a process that was stopped for a while has made only one.
class Watchdog {
 public:
  Watchdog(double step, unsigned looks)
      : step_(step), looks_(looks), thread_([this] { watch(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() { stop(); }

  void tick() noexcept { ticks_.fetch_add(1, std::memory_order_relaxed); }

  void stop() {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void watch() {
    std::unique_lock<std::mutex> held(mutex_);
    uint64_t seen = 0;
    for (unsigned missed = 0; missed < looks_;) {
      changed_.wait_for(held, step_, [this] { return stopped_; });
      if (stopped_) return;
      const uint64_t ticks = ticks_.load(std::memory_order_relaxed);
      missed = ticks == seen ? missed + 1 : 0;
      seen = ticks;
    }
    abort();
  }

  // Python's faulthandler writes all stacks on this signal. A core would hold arenas of KV blocks.
  [[noreturn]] static void abort() {
    static constexpr char WORD[] = "the event loop hangs: ending this process, its stacks follow\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, WORD, sizeof(WORD) - 1);
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    std::raise(SIGABRT);
    _exit(134);
  }

  const std::chrono::duration<double> step_;
  const unsigned looks_;
  std::atomic<uint64_t> ticks_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace kvmesh
