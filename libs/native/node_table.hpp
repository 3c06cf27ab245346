// Blocks by sequence hash: one of the index's shards, an open-addressing table of node numbers.
//
// Invariants
//   T1  A node's `sequence` does not change while a pinned reader may reach it; `ranks` is one
//       atomic word; readers look at nothing else of a node.
//   T2  A slot is written by one 32-bit store. A removed slot becomes a tombstone; tombstones right
//       before an empty slot become empty, which cuts no probe for another key short.
//   T3  A full table is replaced as a whole; the old one and unlinked nodes wait in limbo.
//   T4  Everything else is read and written under the shard's lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <unordered_map>
#include <utility>

#include "flat_map.hpp"
#include "limbo.hpp"
#include "node_space.hpp"

namespace kvmesh {

// What a new node starts with, before anyone else can see it.
struct Seed {
  RankSet::Word ranks;
  NodeId parent;
  uint64_t local;
};

// What a node with several children keeps about them.
struct Fork {
  uint32_t count = 0;
  NodeId all = 0;  // exclusive or of the children's numbers: the last one's when count is 1
  FlatMap held;    // rank * 4 + lowest tier -> children that the rank holds at that tier
};

class alignas(64) Shard {
 public:
  static constexpr uint32_t BITS = 8;
  static constexpr uint32_t COUNT = 1 << BITS;
  static constexpr NodeId FORK = 1u << 31;

  Shard(const Epochs& epochs, const NodeSpace& nodes) : nodes_(nodes), limbo(epochs) {
    table_.store(create(16), std::memory_order_release);
  }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  ~Shard();

  static uint32_t of(uint64_t sequence) { return sequence >> (64 - BITS); }

  // --- for readers and writers alike ---

  // The block's node, or 0.
  NodeId find(uint64_t sequence) const {
    const Table& table = *table_.load(std::memory_order_acquire);
    for (uint32_t at = table.home(sequence);; at = table.next(at)) {
      const uint32_t slot = table.slots()[at].load(std::memory_order_acquire);
      if (slot == 0) return 0;
      if (names(slot, sequence, false)) return slot & NUMBER;
    }
  }

  // Inlined by force: as calls without effects GCC drops them.
  [[gnu::always_inline]] void prefetch_slot(uint64_t sequence) const {
    const Table& table = *table_.load(std::memory_order_acquire);
    __builtin_prefetch(&table.slots()[table.home(sequence)]);
  }
  // Fetches the node that the block's first slot names, most likely its own.
  [[gnu::always_inline]] void prefetch_node(uint64_t sequence) const {
    const Table& table = *table_.load(std::memory_order_acquire);
    const uint32_t slot = table.slots()[table.home(sequence)].load(std::memory_order_acquire);
    __builtin_prefetch(&nodes_[slot & NUMBER], 1);
  }

  // --- for the holder of the lock ---

  void lock() {
    for (uint32_t spins = 1; locked_.exchange(true, std::memory_order_acquire); ++spins) {
      while (locked_.load(std::memory_order_relaxed)) {
        if (++spins % 64 == 0) std::this_thread::yield();
      }
    }
  }
  void unlock() { locked_.store(false, std::memory_order_release); }

  // The block's node, or with `seed.ranks` ROOT the root's, keyed by its salt and apart from
  // blocks; and whether it was added just now.
  std::pair<NodeId, bool> obtain(uint64_t sequence, const Seed& seed, NodeSpace::Arena& arena,
                                 uint64_t epoch);

  // Takes the node's slot away.
  void unlink(NodeId id);

  size_t bytes() const;

 private:
  static constexpr uint32_t NUMBER = (1u << NodeSpace::BITS) - 1;
  static constexpr uint32_t TOMBSTONE = NUMBER;

  // slots(): the low bits of the sequence hash above the node's number; 0 is empty.
  struct alignas(16) Table {
    uint32_t capacity;
    std::atomic<uint32_t>* slots() const {
      return reinterpret_cast<std::atomic<uint32_t>*>(const_cast<Table*>(this) + 1);
    }
    uint32_t home(uint64_t sequence) const {
      return static_cast<uint32_t>((sequence << BITS >> 32) * capacity >> 32);
    }
    uint32_t next(uint32_t at) const { return at + 1 == capacity ? 0 : at + 1; }
    static size_t bytes(uint32_t capacity) { return sizeof(Table) + 4ull * capacity; }
  };

  static uint32_t tagged(uint64_t sequence, NodeId id) {
    return static_cast<uint32_t>(sequence) << NodeSpace::BITS | id;
  }

  // Whether a slot names the block, or the root, with this key.
  bool names(uint32_t slot, uint64_t sequence, bool root) const {
    if (((slot ^ tagged(sequence, 0)) & ~NUMBER) != 0 || (slot & NUMBER) == TOMBSTONE) return false;
    const Node& found = nodes_[slot & NUMBER];
    return found.sequence == sequence &&
           (found.ranks.load(std::memory_order_acquire) == RankSet::ROOT) == root;
  }

  Table* create(uint32_t capacity);
  void grow(uint64_t epoch);

  // What every block touches comes first, in one cache line.
  std::atomic<Table*> table_{nullptr};
  const NodeSpace& nodes_;
  std::atomic<bool> locked_{false};
  uint32_t used_ = 0;   // slots that are not empty
  uint32_t limit_ = 0;  // how many may be
  uint32_t live_ = 0;   // slots that name a node

 public:
  size_t blocks = 0;  // nodes with at least one holder
  Limbo limbo;
  std::unordered_map<NodeId, Fork> forks;
};

}  // namespace kvmesh
