// The prefix index: the blocks that each rank holds, and the longest prefix of a prompt in them.
//
// Blocks form a tree: a node for each sequence hash, keyed by it in one of the shards, with a link
// to its parent (or to its namespace's root) and to its only child (or to a fork record).
// A rank has a map from engine hash to node for each tier.
//
// Let m(r, b) be the lowest tier in which rank r holds block b, 4 if it holds it nowhere, and call
// r *sound* when m(r, parent of b) <= m(r, b) for each b that it holds; roots are held by all.
// Invariants
//   I1  The sequence hash of a block fixes its parent, so m(r, .) along a prompt reads one node for
//       each position, and for a sound r it never falls from one position to the next.
//   I2  Hence equal m at two positions means equal m between them. `find` reads the first and the
//       last position and bisects only where m differs: a prompt that matches whole costs two
//       reads whatever its length, and one that stops matching costs O(log length) more.
//   I3  breaks(r)[t] counts the blocks that r holds in tiers 0..t whose parent it does not hold in
//       tiers 0..t. r is sound when all four are 0; else its bit in `broken` is set, and `find`
//       walks its prefix position by position. The bit is set before the change that breaks a link
//       becomes visible, and cleared after the change that mends it.
//   I4  The ranks of a node change only under its shard's lock and its parent's shard's lock, and
//       so does the link between the two. A batch takes all the locks it needs beforehand, in the
//       order of the shards. A rank's maps and counts change under the rank's mutex, which
//       comes before any shard's lock.
//   I5  A fork record counts, for each rank and tier, the children that the rank holds with that
//       lowest tier; with one child, the child's own set gives the same. So the number of links
//       that a removal breaks is known without visiting children.
//   I6  A node lives while a rank holds it or it has children. Nodes without holders (a removed
//       middle block, or the unseen block before an attached segment) count for nothing in `find`.
//   I7  Readers take no lock and write nothing shared but their epoch pin. For a rank that does not
//       change during the call the result is exact; for one that does, each position is read
//       either before or after the change.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "epoch.hpp"
#include "flat_map.hpp"
#include "hashes.hpp"
#include "node_table.hpp"
#include "shard_locks.hpp"

namespace kvmesh {

inline constexpr uint32_t MAX_RANKS = 1 << 20;

// One rank's match: the number of leading blocks that each tier adds to the tiers before it.
struct Match {
  uint32_t rank;
  std::array<uint32_t, TIERS> added;
};
static_assert(sizeof(Match) == 20);

// Blocks that one rank holds in one tier, each the parent of the next.
struct Chain {
  uint32_t tier;
  bool root;          // `previous` is a salt; else it is the sequence hash of the block before
  uint64_t previous;
  std::vector<uint64_t> engine, local;
};

struct Stats {
  size_t blocks = 0, entries = 0, bytes = 0;
};

class Index {
 public:
  Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index();

  bool store(uint32_t rank, uint32_t tier, std::optional<uint64_t> parent, Hashes engine,
             Hashes local, uint64_t salt);
  void attach(uint32_t rank, uint32_t tier, uint64_t previous, Hashes engine, Hashes local);
  // Makes room for more blocks of the rank in the tier.
  void reserve(uint32_t rank, uint32_t tier, size_t blocks);
  // Returns the sequence hashes of the blocks that the rank held.
  std::vector<uint64_t> remove(uint32_t rank, uint32_t tier, Hashes engine);
  size_t clear(uint32_t rank, std::optional<uint32_t> tier);

  // Appends the matches of one prompt to `out`.
  void find(Hashes sequence, std::vector<Match>& out) const;
  // Appends the matches of many; ends[i] is the size of `out` after prompt i.
  void find_batch(const std::vector<Hashes>& prompts, std::vector<Match>& out,
                  std::vector<size_t>& ends) const;

  std::vector<Chain> dump(uint32_t rank) const;
  std::vector<Match> ranks() const;
  Stats stats() const;

 private:
  struct alignas(64) Rank {
    Rank(uint32_t number, NodeSpace& nodes) : arena(nodes), number(number) {}

    // Fetches what a change in this tier touches. Inlined by force: as calls without effects GCC
    // drops these.
    [[gnu::always_inline]] void prefetch(uint32_t tier) const {
      __builtin_prefetch(this, 1);
      __builtin_prefetch(&names[tier], 1);
      __builtin_prefetch(&again, 1);
    }
    // Makes room for names beforehand, and for `more`: what is fetched must not move.
    [[gnu::always_inline]] void expect(uint32_t tier, Hashes engine, size_t more = 0) {
      names[tier].expect(engine.count + more);
      prefetch_names(tier, engine);
    }
    [[gnu::always_inline]] void prefetch_names(uint32_t tier, Hashes engine) const {
      for (size_t i = 0; i < engine.count; ++i) names[tier].prefetch(engine[i]);
    }

    mutable std::mutex mutex;
    NodeSpace::Arena arena;
    FlatMap names[TIERS];  // engine hash -> node
    FlatMap again;         // node * 4 + tier -> further engine hashes that name the same block
    std::array<uint32_t, TIERS> breaks{};  // by highest tier that counts
    bool broken = false;                   // whether any of these is not 0
    const uint32_t number;
  };
  struct RankChunk {
    static constexpr uint32_t SIZE = 1024;
    std::atomic<Rank*> ranks[SIZE]{};
    std::atomic<bool> broken[SIZE]{};
  };
  // Origin of a chain of new blocks: a known node, or the key from which to make one.
  struct Origin {
    NodeId node;
    uint64_t key;
    RankSet::Word kind;
  };
  // Effect of a change of m(rank, block) from `from` to `to` on the links around the block.
  struct Move {
    uint32_t rank, from, to;
  };
  class Search;
  class Restorer;

  Node& node(NodeId id) const { return nodes_[id]; }
  uint32_t shard_number(NodeId id) const { return Key(node(id).sequence).shard(); }
  Shard& shard_of(Key key) const { return *shards_[key.shard()]; }
  Table table_of(Key key) const {
    return Table(tables_[key.shard()].load(std::memory_order_acquire));
  }
  Node* nodes() const { return &nodes_[0]; }
  Shard& shard(NodeId id) const { return shard_of(node(id).sequence); }
  RankSet::Word ranks_at(uint64_t sequence) const;
  void prefetch_slots(Hashes prompt) const;
  void prefetch_nodes(Hashes prompt) const;
  bool is_broken(uint32_t rank) const;
  uint32_t universe() const { return highest_rank_.load(std::memory_order_relaxed); }

  Rank* rank(uint32_t number) const;
  Rank& obtain_rank(uint32_t number);
  template <typename F>
  void for_each_rank(F&& visit) const {
    for (const auto& slot : chunks_) {
      const RankChunk* chunk = slot.load(std::memory_order_acquire);
      if (chunk == nullptr) continue;
      for (const auto& place : chunk->ranks) {
        const Rank* rank = place.load(std::memory_order_acquire);
        if (rank == nullptr) continue;
        const std::lock_guard guard(rank->mutex);
        visit(*rank);
      }
    }
  }
  static NodeId name_of(const Rank& rank, uint32_t tier, uint64_t engine);

  void append(Rank& rank, uint32_t tier, Origin origin, Hashes engine, Hashes local);
  void append_some(Rank& rank, uint32_t tier, Origin& origin, Hashes engine, Hashes local,
                   uint64_t epoch);
  void remove_some(Rank& rank, uint32_t tier, Hashes engine, std::vector<uint64_t>& removed,
                   uint64_t epoch);
  void drop_some(Rank& rank, uint32_t tier, const NodeId* held, size_t count, uint64_t epoch);

  NodeId obtain(Rank& rank, const Origin& origin, uint64_t epoch);
  NodeId find_below(NodeId parent, Key key) const;
  NodeId join(Rank& rank, uint32_t tier, NodeId parent, uint32_t parent_at, Key key,
              uint64_t local, uint64_t epoch);
  NodeId leave(Rank& rank, uint32_t tier, NodeId id, uint64_t epoch);
  NodeId retire(Rank& rank, NodeId id, uint64_t epoch);
  void release(Rank& rank, NodeId id, uint64_t epoch);
  static bool is_idle(const Node& node);
  uint32_t lowest_at(NodeId id, uint32_t rank) const;

  void break_links(Rank& rank, Move move, uint32_t parent_at);
  void break_links_below(Rank& rank, Move move, NodeId id);
  void mend_links(Rank& rank, Move move, NodeId id);
  void mend_own_link(Rank& rank, Move move, uint32_t parent_at);

  // Links a child without holders below `parent`.
  void link(NodeId parent, NodeId child) {
    Node& above = node(parent);
    const bool root = above.ranks.load(std::memory_order_relaxed) == RankSet::ROOT;
    if (above.children == 0 && !root) [[likely]] {
      above.children = child;
    } else {
      link_another(parent, child);
    }
  }
  void link_another(NodeId parent, NodeId child);
  void unlink(NodeId parent, NodeId child);
  void unlink_another(NodeId parent, NodeId child);
  // Inlined by force: a call passes `move` through memory, which stalls.
  [[gnu::always_inline]] void count_child(NodeId parent, Move move) {
    const Node& above = node(parent);
    if (above.children != Shard::FORK) [[likely]] return;
    if (above.ranks.load(std::memory_order_relaxed) != RankSet::ROOT) count_forked(parent, move);
  }
  void count_forked(NodeId parent, Move move);
  std::array<uint32_t, TIERS> children_of(NodeId id, uint32_t rank) const;
  void set_breaks(Rank& rank, const std::array<uint32_t, TIERS>& breaks);

  std::vector<Chain> chains(const Rank& rank, uint32_t tier) const;

  mutable Epochs epochs_;
  NodeSpace nodes_;
  alignas(64) Shard::Tables tables_{};
  std::array<std::unique_ptr<Shard>, Shard::COUNT> shards_;
  alignas(64) mutable ShardLocks::Words locks_{};
  std::array<std::atomic<RankChunk*>, MAX_RANKS / RankChunk::SIZE> chunks_{};
  std::atomic<uint32_t> highest_rank_{0};
  std::atomic<uint32_t> broken_{0};      // how many ranks are broken
  std::atomic<size_t> orphans_{0};       // blocks whose parent is not known
  std::atomic<uint32_t> tiers_used_{0};  // a mask of the tiers that ever held a block
};

}  // namespace kvmesh
