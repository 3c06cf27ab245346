#include "index.hpp"

#include <algorithm>

#include "xxh3.hpp"

namespace kvmesh {

namespace {

constexpr size_t BATCH = 32;  // blocks that are fetched ahead and locked together

}  // namespace

Index::Index() : nodes_(epochs_) {
  for (uint32_t i = 0; i < Shard::COUNT; ++i) {
    shards_[i] = std::make_unique<Shard>(tables_[i], epochs_, nodes_);
  }
}

Index::~Index() {
  for (auto& slot : chunks_) {
    const std::unique_ptr<RankChunk> chunk(slot.load(std::memory_order_relaxed));
    if (chunk == nullptr) continue;
    for (auto& rank : chunk->ranks) delete rank.load(std::memory_order_relaxed);
  }
}

bool Index::store(uint32_t rank_number, uint32_t tier, std::optional<uint64_t> parent,
                  Hashes engine, Hashes local, uint64_t salt) {
  engine.prefetch(BATCH);
  local.prefetch(BATCH);
  Rank& rank = obtain_rank(rank_number);
  rank.prefetch(tier);
  const std::lock_guard guard(rank.mutex);
  if (parent) rank.names[tier].prefetch(*parent);
  rank.expect(tier, engine.first(BATCH));
  if (!parent) {
    append(rank, tier, {0, salt, RankSet::ROOT}, engine, local);
    return true;
  }
  NodeId node = name_of(rank, tier, *parent);
  for (uint32_t other = 0; node == 0 && other < TIERS; ++other) {
    node = name_of(rank, other, *parent);
  }
  if (node == 0) return false;
  append(rank, tier, {node, 0, RankSet::EMPTY}, engine, local);
  return true;
}

void Index::attach(uint32_t rank_number, uint32_t tier, uint64_t previous, Hashes engine,
                   Hashes local) {
  Rank& rank = obtain_rank(rank_number);
  const std::lock_guard guard(rank.mutex);
  rank.expect(tier, engine.first(BATCH));
  append(rank, tier, {0, previous, RankSet::EMPTY}, engine, local);
}

void Index::reserve(uint32_t rank_number, uint32_t tier, size_t blocks) {
  Rank& rank = obtain_rank(rank_number);
  const std::lock_guard guard(rank.mutex);
  rank.names[tier].reserve(rank.names[tier].size() + blocks);
}

std::vector<uint64_t> Index::remove(uint32_t rank_number, uint32_t tier, Hashes engine) {
  Rank* const rank = this->rank(rank_number);
  std::vector<uint64_t> removed;
  if (rank == nullptr) return removed;
  removed.reserve(engine.count);
  engine.prefetch(BATCH);
  rank->prefetch(tier);
  const std::lock_guard guard(rank->mutex);
  {
    const Epochs::Pin pin(epochs_);
    for (size_t at = 0; at < engine.count; at += BATCH) {
      const Hashes some = engine.slice(at, std::min(BATCH, engine.count - at));
      remove_some(*rank, tier, some, removed, pin.epoch());
    }
  }
  epochs_.advance();
  return removed;
}

void Index::remove_some(Rank& rank, uint32_t tier, Hashes engine, std::vector<uint64_t>& removed,
                        uint64_t epoch) {
  FlatMap& names = rank.names[tier];
  NodeId held[BATCH];
  size_t count = 0;
  rank.prefetch_names(tier, engine);
  for (size_t i = 0; i < engine.count; ++i) {
    const NodeId id = names.erase(engine[i]);
    if (id == 0) continue;
    __builtin_prefetch(&node(id), 1);
    held[count++] = id;
  }
  for (size_t i = 0; i < count; ++i) removed.push_back(node(held[i]).sequence);
  drop_some(rank, tier, held, count, epoch);
}

// Drops one engine hash's hold on each of the nodes.
void Index::drop_some(Rank& rank, uint32_t tier, const NodeId* held, size_t count, uint64_t epoch) {
  ShardLocks locks(locks_);
  for (size_t i = 0; i < count; ++i) {
    const Node& block = node(held[i]);
    table_of(block.sequence).prefetch(block.sequence);
    RankSet::prefetch(block.ranks.load(std::memory_order_acquire));
    locks.need(shard_number(held[i]));
    locks.need(shard_number(block.parent));
  }
  NodeId idle[BATCH];
  size_t idles = 0;
  locks.lock();
  for (size_t i = 0; i < count; ++i) {
    const uint64_t key = uint64_t{held[i]} * TIERS + tier;
    if (!rank.again.empty() && rank.again.find(key) != 0) {
      rank.again.count(key, -1);
      continue;
    }
    NodeId parent = leave(rank, tier, held[i], epoch);
    while (parent != 0 && locks.has(shard_number(parent)) &&
           locks.has(shard_number(node(parent).parent))) {
      parent = retire(rank, parent, epoch);
    }
    if (parent != 0) idle[idles++] = parent;
  }
  locks.unlock();
  for (size_t i = 0; i < idles; ++i) release(rank, idle[i], epoch);
}

size_t Index::clear(uint32_t rank_number, std::optional<uint32_t> tier) {
  Rank* const rank = this->rank(rank_number);
  if (rank == nullptr) return 0;
  const std::lock_guard guard(rank->mutex);
  size_t removed = 0;
  {
    const Epochs::Pin pin(epochs_);
    for (uint32_t t = tier.value_or(0); t <= tier.value_or(TIERS - 1); ++t) {
      const FlatMap names = std::exchange(rank->names[t], {});
      NodeId held[BATCH];
      size_t some = 0;
      names.for_each([&](uint64_t, NodeId id) {
        held[some++] = id;
        __builtin_prefetch(&node(id), 1);
        if (some == BATCH) drop_some(*rank, t, held, std::exchange(some, 0), pin.epoch());
      });
      drop_some(*rank, t, held, some, pin.epoch());
      removed += names.size();
    }
    if (!tier) rank->arena.yield();
  }
  epochs_.advance();
  return removed;
}

void Index::append(Rank& rank, uint32_t tier, Origin origin, Hashes engine, Hashes local) {
  if ((tiers_used_.load(std::memory_order_relaxed) >> tier & 1) == 0) {
    tiers_used_.fetch_or(1u << tier, std::memory_order_relaxed);
  }
  {
    const Epochs::Pin pin(epochs_);
    for (size_t at = 0; at < engine.count; at += BATCH) {
      const size_t some = std::min(BATCH, engine.count - at), end = at + some;
      const size_t next = std::min(BATCH, engine.count - end);
      local.slice(end, next).prefetch(next);
      rank.expect(tier, engine.slice(end, next), some);
      append_some(rank, tier, origin, engine.slice(at, some), local.slice(at, some), pin.epoch());
    }
  }
  epochs_.advance();
}

void Index::append_some(Rank& rank, uint32_t tier, Origin& origin, Hashes engine, Hashes local,
                        uint64_t epoch) {
  FlatMap& names = rank.names[tier];
  ShardLocks locks(locks_);
  std::vector<NodeId> strays;  // parents made for blocks that turned out to have one
  Key keys[BATCH];
  Key previous = origin.node != 0 ? node(origin.node).sequence : origin.key;
  locks.need(previous.shard());
  for (size_t i = 0; i < engine.count; ++i) {
    keys[i] = previous = BLOCK_HASH.pair(previous.sequence, local[i]);
    table_of(previous).prefetch(previous);
    __builtin_prefetch(&shard_of(previous), 1);
    locks.need(previous.shard());
  }
  NodeId known[BATCH];
  size_t knowns = 0;
  for (; knowns < engine.count; ++knowns) {
    known[knowns] = table_of(keys[knowns]).prefetch_node(nodes(), keys[knowns]);
    if (known[knowns] == 0) break;  // nor have later blocks a node
  }
  for (size_t i = 0; i < knowns; ++i) {
    RankSet::prefetch(node(known[i]).ranks.load(std::memory_order_acquire));
  }
  locks.lock();
  bool chained = false;    // the parent was joined just now
  uint32_t parent_at = 0;  // in which tier, or above, the rank holds the parent
  for (size_t i = 0; i < engine.count; ++i) {
    const NodeId held = names.find(engine[i]);
    if (held != 0) {
      const bool same = node(held).sequence == keys[i].sequence;
      origin = {same ? held : 0, keys[i].sequence, RankSet::EMPTY};
      chained = false;
      continue;
    }
    if (origin.node == 0) origin.node = obtain(rank, origin, epoch);
    if (!chained) parent_at = lowest_at(origin.node, rank.number);
    const NodeId child = join(rank, tier, origin.node, parent_at, keys[i], local[i], epoch);
    names.insert(engine[i], child);
    if (node(child).parent != origin.node) strays.push_back(origin.node);
    origin.node = child;
    parent_at = tier;
    chained = true;
  }
  locks.unlock();
  for (const NodeId stray : strays) release(rank, stray, epoch);
}

// The node of a key, made if there is none. The caller holds its lock.
NodeId Index::obtain(Rank& rank, const Origin& origin, uint64_t epoch) {
  const bool root = origin.kind == RankSet::ROOT;
  const NodeId known = table_of(origin.key).find(nodes(), origin.key, root);
  if (known != 0) return known;
  const NodeId id = shard_of(origin.key).add(origin.key, {origin.kind, 0, 0}, rank.arena, epoch);
  if (!root) orphans_.fetch_add(1, std::memory_order_relaxed);
  return id;
}

bool Index::is_broken(uint32_t rank) const {
  const RankChunk* chunk = chunks_[rank / RankChunk::SIZE].load(std::memory_order_acquire);
  return chunk->broken[rank % RankChunk::SIZE].load(std::memory_order_acquire);
}

Index::Rank* Index::rank(uint32_t number) const {
  const RankChunk* chunk = chunks_[number / RankChunk::SIZE].load(std::memory_order_acquire);
  if (chunk == nullptr) return nullptr;
  return chunk->ranks[number % RankChunk::SIZE].load(std::memory_order_acquire);
}

Index::Rank& Index::obtain_rank(uint32_t number) {
  if (Rank* known = rank(number)) return *known;
  auto& slot = chunks_[number / RankChunk::SIZE];
  RankChunk* chunk = slot.load(std::memory_order_acquire);
  if (chunk == nullptr) {
    auto fresh = std::make_unique<RankChunk>();
    if (slot.compare_exchange_strong(chunk, fresh.get())) chunk = fresh.release();
  }
  uint32_t highest = universe();
  while (highest < number && !highest_rank_.compare_exchange_weak(highest, number)) {
  }
  auto fresh = std::make_unique<Rank>(number, nodes_);
  Rank* found = nullptr;
  auto& place = chunk->ranks[number % RankChunk::SIZE];
  return place.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
}

NodeId Index::name_of(const Rank& rank, uint32_t tier, uint64_t engine) {
  return rank.names[tier].find(engine);
}

std::vector<Match> Index::ranks() const {
  std::vector<Match> rows;
  for_each_rank([&](const Rank& rank) {
    Match row{rank.number, {}};
    for (uint32_t t = 0; t < TIERS; ++t) row.added[t] = rank.names[t].size();
    if (row.added != decltype(row.added){}) rows.push_back(row);
  });
  return rows;
}

Stats Index::stats() const {
  Stats stats;
  stats.bytes = sizeof *this + nodes_.bytes();
  for (uint32_t i = 0; i < Shard::COUNT; ++i) {
    ShardLocks locks(locks_);
    locks.need(i);
    locks.lock();
    const auto& shard = shards_[i];
    stats.blocks += shard->blocks;
    stats.bytes += shard->bytes();
  }
  for (const auto& chunk : chunks_) stats.bytes += chunk.load() != nullptr ? sizeof(RankChunk) : 0;
  for_each_rank([&](const Rank& rank) {
    for (const FlatMap& names : rank.names) {
      stats.entries += names.size();
      stats.bytes += names.bytes();
    }
    stats.bytes += sizeof rank + rank.again.bytes();
  });
  return stats;
}

}  // namespace kvmesh
