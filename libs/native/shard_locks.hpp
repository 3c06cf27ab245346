// The locks of all shards that one batch of blocks touches.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "node_table.hpp"

namespace kvmesh {

// Taken together, in the order of the shards, before the batch's first write: writers cannot
// deadlock, and the blocks in between cost no atomic exchange.
class ShardLocks {
 public:
  using Shards = std::array<std::unique_ptr<Shard>, Shard::COUNT>;

  explicit ShardLocks(const Shards& shards) : shards_(shards) {}
  ShardLocks(const ShardLocks&) = delete;
  ShardLocks& operator=(const ShardLocks&) = delete;
  ~ShardLocks() { unlock(); }

  void need(uint32_t shard) { needed_[shard / 64] |= 1ull << shard % 64; }

  bool has(uint32_t shard) const { return (needed_[shard / 64] >> shard % 64 & 1) != 0; }

  void lock() {
    for_each_needed([](Shard& shard) { shard.lock(); });
    locked_ = true;
  }

  // Forgets what was needed, too.
  void unlock() {
    if (locked_) for_each_needed([](Shard& shard) { shard.unlock(); });
    locked_ = false;
    needed_ = {};
  }

 private:
  template <typename F>
  void for_each_needed(F&& visit) const {
    for (uint32_t word = 0; word < needed_.size(); ++word) {
      for (uint64_t left = needed_[word]; left != 0; left &= left - 1) {
        visit(*shards_[word * 64 + std::countr_zero(left)]);
      }
    }
  }

  const Shards& shards_;
  std::array<uint64_t, Shard::COUNT / 64> needed_{};
  bool locked_ = false;
};

}  // namespace kvmesh
