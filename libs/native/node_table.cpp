#include "node_table.hpp"

#include <algorithm>
#include <new>

namespace kvmesh {

namespace {

constexpr uint32_t AHEAD = 8;  // slots whose nodes are fetched ahead while a table grows

}  // namespace

Shard::~Shard() { ::operator delete(table_.load(std::memory_order_relaxed)); }

Shard::Table* Shard::create(uint32_t capacity) {
  Table* table = new (limbo.allocate(Table::bytes(capacity))) Table{capacity};
  for (uint32_t i = 0; i < capacity; ++i) new (&table->slots()[i]) std::atomic<uint32_t>(0);
  limit_ = capacity - capacity / 5;
  return table;
}

// Grows the table by half, or only sweeps out tombstones where they are what fills it.
void Shard::grow(uint64_t epoch) {
  Table* old = table_.load(std::memory_order_relaxed);
  Table* fresh = create(live_ * 2 > old->capacity ? old->capacity * 3 / 2 : old->capacity);
  const auto slot_at = [&](uint32_t at) {
    return old->slots()[std::min(at, old->capacity - 1)].load(std::memory_order_relaxed);
  };
  for (uint32_t from = 0; from < old->capacity; ++from) {
    __builtin_prefetch(&nodes_[slot_at(from + AHEAD) & NUMBER]);
    const NodeId id = slot_at(from) & NUMBER;
    if (id == 0 || id == TOMBSTONE) continue;
    uint32_t at = fresh->home(nodes_[id].sequence);
    while (fresh->slots()[at].load(std::memory_order_relaxed) != 0) at = fresh->next(at);
    fresh->slots()[at].store(slot_at(from), std::memory_order_relaxed);
  }
  used_ = live_;
  table_.store(fresh, std::memory_order_release);
  limbo.retire(old, Table::bytes(old->capacity), epoch);
}

std::pair<NodeId, bool> Shard::obtain(uint64_t sequence, const Seed& seed, NodeSpace::Arena& arena,
                                      uint64_t epoch) {
  if (used_ >= limit_) grow(epoch);
  const Table& table = *table_.load(std::memory_order_relaxed);
  const bool root = seed.ranks == RankSet::ROOT;
  uint32_t at = table.home(sequence), free = table.capacity, slot;
  for (; (slot = table.slots()[at].load(std::memory_order_relaxed)) != 0; at = table.next(at)) {
    if (names(slot, sequence, root)) return {slot & NUMBER, false};
    if ((slot & NUMBER) == TOMBSTONE && free == table.capacity) free = at;
  }
  const NodeId id = arena.allocate();
  Node& fresh = nodes_[id];
  fresh.sequence = sequence;
  fresh.local = seed.local;
  fresh.parent = seed.parent;
  fresh.children = 0;
  fresh.ranks.store(seed.ranks, std::memory_order_relaxed);
  if (free == table.capacity) {
    free = at;
    ++used_;
  }
  ++live_;
  table.slots()[free].store(tagged(sequence, id), std::memory_order_release);
  return {id, true};
}

void Shard::unlink(NodeId id) {
  const uint64_t sequence = nodes_[id].sequence;
  const Table& table = *table_.load(std::memory_order_relaxed);
  uint32_t at = table.home(sequence);
  while (table.slots()[at].load(std::memory_order_relaxed) != tagged(sequence, id)) {
    at = table.next(at);
  }
  --live_;
  table.slots()[at].store(TOMBSTONE, std::memory_order_release);
  if (table.slots()[table.next(at)].load(std::memory_order_relaxed) != 0) return;
  // Nothing lies beyond: this tombstone and those right before it hold up no probe.
  do {
    table.slots()[at].store(0, std::memory_order_release);
    --used_;
    at = at == 0 ? table.capacity - 1 : at - 1;
  } while ((table.slots()[at].load(std::memory_order_relaxed) & NUMBER) == TOMBSTONE);
}

size_t Shard::bytes() const {
  size_t total = sizeof(Shard) + limbo.bytes();
  for (const auto& [id, fork] : forks) total += sizeof(fork) + 32 + fork.held.bytes();
  return total;
}

}  // namespace kvmesh
