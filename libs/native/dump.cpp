// Dump: the blocks of a rank, as chains that `store` and `attach` restore.
#include <algorithm>

#include "index.hpp"

namespace kvmesh {

std::vector<Chain> Index::chains(const Rank& rank, uint32_t tier) const {
  std::vector<std::pair<uint64_t, NodeId>> entries;
  rank.names[tier].for_each([&](uint64_t engine, NodeId id) { entries.emplace_back(engine, id); });
  std::ranges::sort(entries);  // since the order in the map differs between processes
  FlatMap places;              // node -> index in entries + 1
  for (size_t i = 0; i < entries.size(); ++i) {
    const NodeId id = entries[i].second;
    if (places.find(id) == 0) places.insert(id, static_cast<uint32_t>(i + 1));
  }
  std::vector<uint32_t> next(entries.size());  // index + 1 of the block that continues the chain
  std::vector<bool> first(entries.size(), true);
  for (size_t i = 0; i < entries.size(); ++i) {
    const uint32_t parent = places.find(node(entries[i].second).parent);
    if (places.find(entries[i].second) != i + 1 || parent == 0 || next[parent - 1] != 0) continue;
    next[parent - 1] = static_cast<uint32_t>(i + 1);
    first[i] = false;
  }
  std::vector<Chain> chains;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!first[i]) continue;
    const Node& before = node(node(entries[i].second).parent);
    const bool root = before.ranks.load(std::memory_order_acquire) == RankSet::ROOT;
    Chain& chain = chains.emplace_back(Chain{tier, root, before.sequence, {}, {}});
    for (size_t at = i + 1; at != 0; at = next[at - 1]) {
      chain.engine.push_back(entries[at - 1].first);
      chain.local.push_back(node(entries[at - 1].second).local);
    }
  }
  return chains;
}

std::vector<Chain> Index::dump(uint32_t number) const {
  const Rank* const rank = this->rank(number);
  if (rank == nullptr) return {};
  const std::lock_guard guard(rank->mutex);
  std::vector<Chain> all;
  for (uint32_t tier = 0; tier < TIERS; ++tier) {
    std::ranges::move(chains(*rank, tier), std::back_inserter(all));
  }
  return all;
}

}  // namespace kvmesh
