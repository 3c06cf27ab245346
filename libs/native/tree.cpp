// Changes of one block: its holders, its links, and the counts of broken links (index.hpp, I3-I6).
#include <algorithm>

#include "index.hpp"

namespace kvmesh {

// Makes `rank`, which holds `parent` in tier `parent_at` or above, a holder of the block below it.
// The caller holds both locks.
NodeId Index::join(Rank& rank, uint32_t tier, NodeId parent, uint32_t parent_at, Key key,
                   uint64_t local, uint64_t epoch) {
  const bool whole = parent_at <= tier && !rank.broken;
  const Seed seed{whole ? RankSet::single(rank.number, tier) : RankSet::EMPTY, parent, local};
  NodeId child = find_below(parent, key);
  Shard& shard = shard_of(key);
  if (child == 0) {
    child = shard.add(key, seed, rank.arena, epoch);
    link(parent, child);
    if (whole) {
      ++shard.blocks;
      count_child(parent, {rank.number, NO_TIER, tier});
      return child;
    }
  }
  Node& block = node(child);
  const RankSet::Word holders = block.ranks.load(std::memory_order_relaxed);
  const uint32_t before = RankSet::tiers(holders, rank.number), after = before | 1u << tier;
  if (before == after) {
    rank.again.count(uint64_t{child} * TIERS + tier, 1);
    return child;
  }
  if (block.parent == 0) {
    block.parent = parent;
    block.local = local;
    orphans_.fetch_sub(1, std::memory_order_relaxed);
    link(parent, child);
  }
  shard.blocks += holders == RankSet::EMPTY;
  const Move move{rank.number, lowest(before), lowest(after)};
  if (!whole) break_links(rank, move, parent_at);
  RankSet::set(block.ranks, rank.number, tier, true, universe(), shard.limbo, epoch);
  if (move.from == move.to) return child;
  count_child(block.parent, move);
  if (rank.broken) mend_links(rank, move, child);
  return child;
}

// The node of a block whose parent is known, or 0. The caller holds both locks.
NodeId Index::find_below(NodeId parent, Key key) const {
  const NodeId only = node(parent).children;
  if (only == 0 && orphans_.load(std::memory_order_relaxed) == 0) return 0;
  if (only != 0 && only != Shard::FORK && node(only).sequence == key.sequence) return only;
  return table_of(key).find(nodes(), key);
}

// Removes `rank` as a holder of the block in this tier. The caller holds both locks. Returns the
// parent if only this block kept it alive, else 0.
NodeId Index::leave(Rank& rank, uint32_t tier, NodeId id, uint64_t epoch) {
  Node& block = node(id);
  const NodeId parent = block.parent;
  const RankSet::Word holders = block.ranks.load(std::memory_order_relaxed);
  const bool sole = holders == RankSet::single(rank.number, tier);
  if (sole && block.children == 0 && !rank.broken) [[likely]] {
    count_child(parent, {rank.number, tier, NO_TIER});
    --shard(id).blocks;
    return retire(rank, id, epoch);
  }
  const uint32_t before = RankSet::tiers(holders, rank.number), after = before & ~(1u << tier);
  const Move move{rank.number, lowest(before), lowest(after)};
  if (block.children != 0) break_links_below(rank, move, id);
  RankSet::set(block.ranks, rank.number, tier, false, universe(), shard(id).limbo, epoch);
  if (move.from != move.to) {
    if (rank.broken) mend_own_link(rank, move, lowest_at(parent, rank.number));
    count_child(parent, move);
  }
  if (block.ranks.load(std::memory_order_relaxed) != RankSet::EMPTY) return 0;
  --shard(id).blocks;
  return block.children == 0 ? retire(rank, id, epoch) : 0;
}

// Counts the links broken when the block becomes held from tier `move.to` on, while its parent is
// held only from `parent_at` on.
void Index::break_links(Rank& rank, Move move, uint32_t parent_at) {
  auto breaks = rank.breaks;
  for (uint32_t t = move.to; t < std::min(move.from, parent_at); ++t) ++breaks[t];
  set_breaks(rank, breaks);
}
void Index::mend_own_link(Rank& rank, Move move, uint32_t parent_at) {
  auto breaks = rank.breaks;
  for (uint32_t t = move.from; t < std::min(move.to, parent_at); ++t) --breaks[t];
  set_breaks(rank, breaks);
}

// The block's children in the tiers of the move gain their parent, or lose it (below).
void Index::mend_links(Rank& rank, Move move, NodeId id) {
  const auto below = children_of(id, rank.number);
  auto breaks = rank.breaks;
  for (uint32_t t = 0, children = 0; t < move.from; ++t) {
    children += below[t];
    if (t >= move.to) breaks[t] -= children;
  }
  set_breaks(rank, breaks);
}
void Index::break_links_below(Rank& rank, Move move, NodeId id) {
  const auto below = children_of(id, rank.number);
  auto breaks = rank.breaks;
  for (uint32_t t = 0, children = 0; t < move.to; ++t) {
    children += below[t];
    if (t >= move.from) breaks[t] += children;
  }
  set_breaks(rank, breaks);
}

// Removes an idle node from the tree. Returns its parent if that is now idle too.
NodeId Index::retire(Rank& rank, NodeId id, uint64_t epoch) {
  const NodeId parent = node(id).parent;
  if (parent != 0) {
    unlink(parent, id);
  } else if (node(id).ranks.load(std::memory_order_relaxed) != RankSet::ROOT) {
    orphans_.fetch_sub(1, std::memory_order_relaxed);
  }
  shard(id).unlink(id);
  rank.arena.retire(id, epoch);
  return parent != 0 && is_idle(node(parent)) ? parent : 0;
}

// The caller holds the node's lock.
bool Index::is_idle(const Node& node) {
  const RankSet::Word holders = node.ranks.load(std::memory_order_relaxed);
  return (holders == RankSet::EMPTY || holders == RankSet::ROOT) && node.children == 0;
}

// Frees a node that seemed idle when its lock was last held, and then its ancestors likewise. Our
// pin prevents its reuse meanwhile, but not its retirement by another writer.
void Index::release(Rank& rank, NodeId id, uint64_t epoch) {
  while (id != 0) {
    ShardLocks locks(locks_);
    locks.need(shard_number(id));
    locks.lock();
    if (!is_idle(node(id))) return;
    const NodeId parent = node(id).parent;
    locks.unlock();
    locks.need(shard_number(id));
    if (parent != 0) locks.need(shard_number(parent));
    locks.lock();
    if (!is_idle(node(id)) || node(id).parent != parent) return;
    id = retire(rank, id, epoch);
  }
}

void Index::link_another(NodeId parent, NodeId child) {
  Node& above = node(parent);
  Fork& fork = shard(parent).forks[parent];
  if (above.children != Shard::FORK) {
    fork.count = above.children != 0;
    fork.all = above.children;
    if (fork.count != 0) {
      RankSet::for_each(node(fork.all).ranks.load(std::memory_order_acquire),
                        [&](uint32_t rank, uint32_t tiers) {
                          fork.held.count(uint64_t{rank} * TIERS + lowest(tiers), 1);
                        });
    }
    above.children = Shard::FORK;
  }
  ++fork.count;
  fork.all ^= child;
}

void Index::unlink(NodeId parent, NodeId child) {
  Node& above = node(parent);
  if (above.children == child) {
    above.children = 0;
  } else {
    unlink_another(parent, child);
  }
}

void Index::unlink_another(NodeId parent, NodeId child) {
  Node& above = node(parent);
  auto& forks = shard(parent).forks;
  const auto found = forks.find(parent);
  Fork& fork = found->second;
  fork.all ^= child;
  --fork.count;
  const bool root = above.ranks.load(std::memory_order_relaxed) == RankSet::ROOT;
  if (fork.count > (root ? 0 : 1)) return;
  above.children = fork.all;
  forks.erase(found);
}

void Index::count_forked(NodeId parent, Move move) {
  FlatMap& held = shard(parent).forks.find(parent)->second.held;
  const uint64_t key = uint64_t{move.rank} * TIERS;
  if (move.from != NO_TIER) held.count(key + move.from, -1);
  if (move.to != NO_TIER) held.count(key + move.to, 1);
}

// Number of children of a block that the rank holds, by the lowest tier that holds them.
std::array<uint32_t, TIERS> Index::children_of(NodeId id, uint32_t rank) const {
  std::array<uint32_t, TIERS> below{};
  const NodeId children = node(id).children;
  if (children == Shard::FORK) {
    const FlatMap& held = shard(id).forks.find(id)->second.held;
    for (uint32_t t = 0; t < TIERS; ++t) below[t] = held.find(uint64_t{rank} * TIERS + t);
  } else if (children != 0) {
    const uint32_t at = lowest_at(children, rank);
    if (at != NO_TIER) below[at] = 1;
  }
  return below;
}

void Index::set_breaks(Rank& rank, const std::array<uint32_t, TIERS>& breaks) {
  const bool is = breaks != decltype(rank.breaks){};
  rank.breaks = breaks;
  if (rank.broken == is) return;
  rank.broken = is;
  RankChunk& chunk = *chunks_[rank.number / RankChunk::SIZE].load(std::memory_order_relaxed);
  broken_.fetch_add(is ? 1 : -1, std::memory_order_release);
  chunk.broken[rank.number % RankChunk::SIZE].store(is, std::memory_order_release);
}

// The lowest tier in which the rank holds the block, or NO_TIER; every rank holds a root.
uint32_t Index::lowest_at(NodeId id, uint32_t rank) const {
  const RankSet::Word word = node(id).ranks.load(std::memory_order_acquire);
  return word == RankSet::ROOT ? 0 : lowest(RankSet::tiers(word, rank));
}

}  // namespace kvmesh
