// Blocks by sequence hash: one of the index's shards, an open-addressing table of node numbers.
//
// Groups of twelve slots, one cache line each. A slot has a tag, some bits of the scattered sequence
// hash, beside the node's number, so that a lookup compares twelve tags at once and touches no node
// but, nearly always, the right one. A node is in the first group from its home on that had a free
// slot, and each full group before counts that the node `passed`: a lookup ends at a group that
// nothing passed, or else after one round.
//
// Invariants
//   T1  A node's `sequence` does not change while a pinned reader may reach it; `ranks` is one
//       atomic word; readers read nothing else of a node.
//   T2  A slot's number is written before its tag, and a tag goes before its number is written
//       again. A reader that finds another block's number detects it by the node's `sequence`.
//   T3  A node never moves within a table, and its passing is counted before it is added and until
//       after it is removed: a reader finds each node that is present throughout.
//   T4  A full table is replaced as a whole; the old one and unlinked nodes wait in limbo.
//   T5  Everything else is read and written under the shard's lock.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "flat_map.hpp"
#include "limbo.hpp"
#include "node_space.hpp"
#include "secret.hpp"

namespace kvmesh {

inline constexpr uint32_t SHARD_BITS = 8;

// A block's sequence hash, or the salt of a root, with the bits that place it in a table.
struct Key {
  Key() = default;
  Key(uint64_t sequence) : sequence(sequence), bits(scattered(sequence)) {}

  uint32_t shard() const { return bits >> (64 - SHARD_BITS); }

  uint64_t sequence, bits;
};

// Initial state of a new node, before other threads can see it.
struct Seed {
  RankSet::Word ranks;
  NodeId parent;
  uint64_t local;
};

// Data about the children of a node with several.
struct Fork {
  uint32_t count = 0;
  NodeId all = 0;  // exclusive or of the children's numbers: the last one's when count is 1
  FlatMap held;    // rank * 4 + lowest tier -> children that the rank holds at that tier
};

// A set of a group's slots, for iteration: a bit for each, not in the order of the slots.
class Slots {
 public:
  // From the highest bits of the bytes that are the tags of slots 0..7 and 8..11.
  Slots(uint64_t low, uint64_t high) : bits_((low & TOPS) >> 7 | (high & TOPS >> 32) >> 6) {}

  explicit operator bool() const { return bits_ != 0; }
  uint32_t first() const {
    const auto bit = static_cast<uint32_t>(std::countr_zero(bits_));
    return bit >> 3 | (bit & 1) << 3;
  }
  void drop_first() { bits_ &= bits_ - 1; }

  static constexpr uint64_t TOPS = 0x8080808080808080;

 private:
  uint64_t bits_;
};

struct alignas(64) Group {
  static constexpr uint32_t WIDTH = 12;

  // A tag's highest bit is set, so that it differs from a free slot's 0.
  std::atomic<uint64_t> low{0};   // the tags of slots 0..7, a byte each
  std::atomic<uint64_t> high{0};  // those of slots 8..11, and above them how many nodes passed
  std::atomic<NodeId> nodes[WIDTH]{};

  static uint64_t tag(uint64_t scattered) { return (scattered & 0x7F) | 0x80; }

  // --- for the holder of the lock ---

  Slots used() const {
    return {low.load(std::memory_order_relaxed), high.load(std::memory_order_relaxed)};
  }
  Slots free() const {
    return {~low.load(std::memory_order_relaxed), ~high.load(std::memory_order_relaxed)};
  }
  void fill(uint32_t slot, uint64_t tag, NodeId id) {
    nodes[slot].store(id, std::memory_order_release);
    toggle(slot, tag);
  }
  void toggle(uint32_t slot, uint64_t tag) {
    auto& word = slot < 8 ? low : high;
    const uint64_t flipped = word.load(std::memory_order_relaxed) ^ tag << slot % 8 * 8;
    word.store(flipped, std::memory_order_release);
  }
  void count_passing(int delta) {
    const uint64_t passed = static_cast<uint64_t>(static_cast<int64_t>(delta)) << 32;
    high.store(high.load(std::memory_order_relaxed) + passed, std::memory_order_release);
  }
};
static_assert(sizeof(Group) == 64);

// A shard's table as one word: where its groups are, and how many.
class Table {
 public:
  explicit Table(uint64_t word)
      : groups_(reinterpret_cast<Group*>(word & ~CODE)),
        count_((4 | (word & 3)) << ((word & CODE) >> 2)) {}

  // Packs a table. `count` is 4 to 7 times a power of 2; `groups` is aligned to ALIGNMENT.
  static uint64_t word(Group* groups, uint64_t count) {
    const uint64_t power = std::bit_width(count) - 3;
    return reinterpret_cast<uint64_t>(groups) | power << 2 | (count >> power & 3);
  }
  static constexpr size_t ALIGNMENT = 128;

  // The next larger number of groups: each growth moves all nodes, but room takes memory. Counts of 5
  // and 7 times a power of 2 follow each other, each by a factor of about the root of 2.
  uint64_t grown() const {
    const uint64_t quarter = uint64_t{1} << (std::bit_width(count_) - 3);
    return count_ < SMALL ? 2 * count_ : count_ + count_ / quarter / 2 * quarter;
  }
  static constexpr uint64_t FIRST = 5 << 4;  // of a new table

  Group* begin() const { return groups_; }
  Group* end() const { return groups_ + count_; }
  uint64_t count() const { return count_; }
  Group* home(uint64_t scattered) const {  // its highest byte chose the shard
    return groups_ + ((scattered << 8 >> 32) * count_ >> 32);
  }
  Group* next(Group* group) const { return group + 1 == end() ? groups_ : group + 1; }

  // The node of the block, or of the root, with this key; 0 if there is none.
  NodeId find(const Node* nodes, Key key, bool root = false) const {
    NodeId found = 0;
    search(key, [&](Group*, uint32_t, NodeId id) {
      const Node& node = nodes[id];
      const bool match = node.sequence == key.sequence &&
                         (node.ranks.load(std::memory_order_acquire) == RankSet::ROOT) == root;
      if (match) found = id;
      return match;
    });
    return found;
  }

  // Inlined by force: as calls without effects GCC drops them.
  [[gnu::always_inline]] void prefetch(Key key) const {
    __builtin_prefetch(home(key.bits), 1);
  }
  // Fetches the node that most likely is the block's, and returns it; 0 if there is none.
  [[gnu::always_inline]] NodeId prefetch_node(const Node* nodes, Key key) const {
    NodeId found = 0;
    search(key, [&](Group*, uint32_t, NodeId id) {
      __builtin_prefetch(nodes + id, 1);
      found = id;
      return true;
    });
    return found;
  }

  // --- for the holder of the lock ---

  // The table must have a free slot.
  void add(Key key, NodeId id) const {
    Group* group = home(key.bits);
    Slots free = group->free();
    for (; !free; free = group->free()) {
      group->count_passing(1);
      group = next(group);
    }
    group->fill(free.first(), Group::tag(key.bits), id);
  }
  void remove(Key key, NodeId id) const {
    search(key, [&](Group* group, uint32_t slot, NodeId other) {
      if (other != id) return false;
      group->toggle(slot, Group::tag(key.bits));
      for (Group* full = home(key.bits); full != group; full = next(full)) full->count_passing(-1);
      return true;
    });
  }

 private:
  friend class Probes;  // of tests/native

  // Calls visit(group, slot, id) for each slot that may name the block, until it returns true.
  template <typename F>
  void search(Key key, F&& visit) const {
    const uint64_t tags = Group::tag(key.bits) * (~uint64_t{0} / 0xFF);
    Group* group = home(key.bits);
    for (uint64_t left = count_; left != 0; --left, group = next(group)) {
      const uint64_t low = group->low.load(std::memory_order_acquire);
      const uint64_t high = group->high.load(std::memory_order_acquire);
      for (Slots slots(equal(low, tags), equal(high, tags)); slots; slots.drop_first()) {
        const uint32_t slot = slots.first();
        if (visit(group, slot, group->nodes[slot].load(std::memory_order_acquire))) return;
      }
      if (high >> 32 == 0) return;
    }
  }

  static constexpr uint64_t CODE = ALIGNMENT - 1;
  static constexpr uint64_t SMALL = 256;

  // The highest bit of each byte in which the two words are equal.
  static uint64_t equal(uint64_t one, uint64_t other) {
    const uint64_t differ = one ^ other;
    return ~(((differ & ~Slots::TOPS) + ~Slots::TOPS) | differ) & Slots::TOPS;
  }

  Group* groups_;
  uint64_t count_;
};

class alignas(64) Shard {
 public:
  static constexpr uint32_t COUNT = 1 << SHARD_BITS;
  static constexpr NodeId FORK = 1u << 31;
  using Tables = std::array<std::atomic<uint64_t>, COUNT>;

  // Readers load the shard's table from `table`.
  Shard(std::atomic<uint64_t>& table, const Epochs& epochs, const NodeSpace& nodes);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  ~Shard();

  // --- all that follows is for the holder of the lock ---

  // A node for a block that has none, or with `seed.ranks` ROOT for the root of a namespace, keyed
  // by its salt and apart from blocks.
  NodeId add(Key key, const Seed& seed, NodeSpace::Arena& arena, uint64_t epoch) {
    if (live_ >= limit_) [[unlikely]] grow(epoch);
    const NodeId id = arena.allocate();
    Node& fresh = nodes_[id];
    fresh.sequence = key.sequence;
    fresh.local = seed.local;
    fresh.parent = seed.parent;
    fresh.children = 0;
    fresh.ranks.store(seed.ranks, std::memory_order_relaxed);
    table().add(key, id);
    ++live_;
    return id;
  }

  // Removes the node from the table.
  void unlink(NodeId id) {
    table().remove(nodes_[id].sequence, id);
    --live_;
  }

  size_t bytes() const;

 private:
  Table table() const { return Table(table_.load(std::memory_order_relaxed)); }
  uint64_t create(uint64_t groups);
  void grow(uint64_t epoch);

  // Members that every new block touches come first, in one cache line.
  std::atomic<uint64_t>& table_;
  Node* const nodes_;
  uint64_t live_ = 0;   // nodes in the table
  uint64_t limit_ = 0;  // nodes at which the table grows

 public:
  size_t blocks = 0;  // nodes with at least one holder
  Limbo limbo;
  std::unordered_map<NodeId, Fork> forks;
};

}  // namespace kvmesh
