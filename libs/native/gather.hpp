// The router's data about its candidates for one prompt, gathered in one pass.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "index.hpp"

namespace kvmesh {

// Numbers in a borrowed buffer, at any alignment.
template <typename T>
struct Numbers {
  const uint8_t* data;
  size_t count;

  T operator[](size_t i) const {
    if (i >= count) throw std::out_of_range("a number is out of the range of another buffer");
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof value);
    return value;
  }
};

// A router's ranks by slot. `columns` has LOADS rows with space for all slots: prefill tokens and
// active blocks as counted, the corrections of both, and requests.
struct Fleet {
  static constexpr size_t LOADS = 5;

  Numbers<double> columns;
  size_t slots, nodes;
  Numbers<int64_t> node_of_slot;   // 1 to nodes, or 0; not read if there are no nodes
  Numbers<int64_t> group_of_node;  // of each node from the first on: 1 to nodes, or 0

  double at(size_t row, size_t slot) const { return columns[columns.count / LOADS * row + slot]; }
  double prefill_tokens(size_t slot) const { return std::max(at(0, slot) + at(2, slot), 0.0); }
  double active_blocks(size_t slot) const { return std::max(at(1, slot) + at(3, slot), 0.0); }
  double requests(size_t slot) const { return at(4, slot); }
};

// A prompt of `blocks` blocks. Each of the index's rows begins with an index into `places`, which
// maps it to a slot or, beyond those, to the number of a node; 0 if unknown. Leading blocks by slot:
// `predicted` (none, or all slots'), and `shared` with active requests.
struct Prompt {
  Numbers<std::array<uint32_t, 1 + TIERS>> rows;
  Numbers<int64_t> places;
  Numbers<double> predicted, shared;
  double blocks, block_size;
};

class Gathering {
 public:
  Gathering(const Fleet& fleet, const Prompt& prompt) : fleet_(fleet), prompt_(prompt) {
    reach_.assign(fleet.slots + 1 + fleet.nodes, Reach{});
    for (size_t i = 0; i < prompt.rows.count; ++i) {
      const auto row = prompt.rows[i];
      Reach& reach = reach_.at(prompt.places[row[0]]);
      double sum = 0;
      for (size_t tier = 0; tier < TIERS; ++tier) reach[tier] = sum += row[1 + tier];
    }
    share_between_nodes();
  }

  // Writes `overlap`, TIERS for each candidate: the leading blocks that a tier adds to those before
  // it. Writes `loads`, a row each: blocks in prefill, blocks to decode with if the prompt is
  // added, and requests. Returns the maximum over the candidates of blocks to decode with.
  double gather(Numbers<int64_t> candidates, double* overlap, double* loads) const {
    const size_t count = candidates.count;
    double most = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t slot = candidates[i];
      const double lacking = prompt_.shared[slot] - prompt_.blocks;
      add_overlap(slot, overlap + TIERS * i);
      loads[i] = fleet_.prefill_tokens(slot) / prompt_.block_size;
      const double decode = fleet_.active_blocks(slot) - lacking;
      loads[count + i] = decode;
      most = std::max(most, decode);
      loads[2 * count + i] = fleet_.requests(slot);
    }
    return most;
  }

 private:
  using Reach = std::array<double, TIERS>;  // leading blocks within tiers 0..t

  // Blocks of a node can be read by the others of its group: they count as the last tier.
  void share_between_nodes() {
    Reach* const nodes = reach_.data() + fleet_.slots;
    *nodes = Reach{};
    most_.assign(fleet_.nodes + 1, 0);
    for (size_t node = 1; node <= fleet_.nodes; ++node) {
      double& most = most_.at(fleet_.group_of_node[node - 1]);
      most = std::max(most, nodes[node].back());
    }
    for (size_t node = 1; node <= fleet_.nodes; ++node) {
      const int64_t group = fleet_.group_of_node[node - 1];
      if (group != 0) nodes[node].back() = most_[group];
    }
  }

  // A slot's own blocks, predicted ones and those of its node, whichever reach further.
  void add_overlap(size_t slot, double* overlap) const {
    const size_t node = fleet_.nodes == 0 ? 0 : fleet_.node_of_slot[slot];
    const double predicted = prompt_.predicted.count == 0 ? 0 : prompt_.predicted[slot];
    const Reach &own = reach_[slot], &beside = reach_.at(fleet_.slots + node);
    double before = 0;
    for (size_t tier = 0; tier < TIERS; ++tier) {
      const double reach = std::max({own[tier], beside[tier], predicted});
      overlap[tier] = reach - before;
      before = reach;
    }
  }

  const Fleet& fleet_;
  const Prompt& prompt_;
  // Kept to reuse their memory: by slot, then by node; by group.
  static thread_local inline std::vector<Reach> reach_;
  static thread_local inline std::vector<double> most_;
};

}  // namespace kvmesh
