// The locks of all shards that one batch of blocks touches.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

#include "node_table.hpp"

namespace kvmesh {

// Acquired together, in the order of the shards, before the batch's first write: writers cannot
// deadlock. A lock is a bit, so that the dozens of a batch cost one atomic change for each word.
class ShardLocks {
 public:
  using Words = std::array<std::atomic<uint64_t>, Shard::COUNT / 64>;

  explicit ShardLocks(Words& words) : words_(words) {}
  ShardLocks(const ShardLocks&) = delete;
  ShardLocks& operator=(const ShardLocks&) = delete;
  ~ShardLocks() { unlock(); }

  void need(uint32_t shard) { needed_[shard / 64] |= 1ull << shard % 64; }

  bool has(uint32_t shard) const { return (needed_[shard / 64] >> shard % 64 & 1) != 0; }

  void lock() {
    for (uint32_t i = 0; i < needed_.size(); ++i) {
      if (needed_[i] != 0) lock(words_[i], needed_[i]);
    }
    locked_ = true;
  }

  // Also clears the set of needed locks.
  void unlock() {
    for (uint32_t i = 0; locked_ && i < needed_.size(); ++i) {
      if (needed_[i] != 0) words_[i].fetch_and(~needed_[i], std::memory_order_release);
    }
    locked_ = false;
    needed_ = {};
  }

 private:
  static void lock(std::atomic<uint64_t>& word, uint64_t needed) {
    for (uint32_t spins = 1;; ++spins) {
      uint64_t held = word.load(std::memory_order_relaxed);
      if ((held & needed) == 0 &&
          word.compare_exchange_weak(held, held | needed, std::memory_order_acquire)) {
        return;
      }
      if (spins % 64 == 0) std::this_thread::yield();
    }
  }

  Words& words_;
  std::array<uint64_t, Shard::COUNT / 64> needed_{};
  bool locked_ = false;
};

}  // namespace kvmesh
