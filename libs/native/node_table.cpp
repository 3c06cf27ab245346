#include "node_table.hpp"

#include <new>

namespace kvmesh {

Shard::Shard(std::atomic<uint64_t>& table, const Epochs& epochs, const NodeSpace& nodes)
    : table_(table), nodes_(&nodes[0]), limbo(epochs) {
  table_.store(create(Table::FIRST), std::memory_order_release);
}

Shard::~Shard() { TableMemory::release(table().begin(), table().count() * sizeof(Group)); }

uint64_t Shard::create(uint64_t groups) {
  auto* const memory = limbo.allocate(groups * sizeof(Group), Table::ALIGNMENT);
  limit_ = groups * Group::WIDTH * 9 / 10;
  return Table::word(new (memory) Group[groups], groups);
}

void Shard::grow(uint64_t epoch) {
  const Table old = table();
  const uint64_t word = create(old.grown());
  const Table fresh(word);
  const auto for_each_in = [&](const Group& group, auto&& visit) {
    for (Slots slots = group.used(); slots; slots.drop_first()) {
      visit(group.nodes[slots.first()].load(std::memory_order_relaxed));
    }
  };
  for (Group& group : old) {
    for_each_in(*old.next(&group), [&](NodeId id) { __builtin_prefetch(nodes_ + id); });
    for_each_in(group, [&](NodeId id) { fresh.add(nodes_[id].sequence, id); });
  }
  table_.store(word, std::memory_order_release);
  limbo.retire(old.begin(), old.count() * sizeof(Group), epoch);
}

size_t Shard::bytes() const {
  size_t total = sizeof(Shard) + limbo.bytes();
  for (const auto& [id, fork] : forks) total += sizeof(fork) + 32 + fork.held.bytes();
  return total;
}

}  // namespace kvmesh
