// The blocks of an engine's cache by the engine's own hashes, with their positions in prompts.
//
// A block is held, with a number of copies in each tier, or recent: its copies are gone and its
// position is still known. The recent ones are a list from the one that lost its last copy first;
// the limit of their number bounds what is kept beside the engine's own blocks. Slots are reused,
// so the age of a block is a number of its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "flat_map.hpp"
#include "hashes.hpp"
#include "index.hpp"
#include "xxh3.hpp"

namespace kvmesh {

// Where a block is in a prompt: after `parent`, or at the start. `previous` is the sequence hash
// before the block, or the salt.
struct Position {
  std::optional<uint64_t> parent;
  uint64_t previous = 0, local = 0, sequence = 0;
};

// Consecutive blocks, each the parent of the next. Without a parent that is known to the reader,
// `attached` ones follow the sequence hash `previous`, others the salt.
struct Run {
  std::optional<uint64_t> parent;
  uint64_t previous = 0;
  bool attached = false;
  std::vector<uint64_t> engine, local;
};

using Names = std::vector<uint64_t>;

// Blocks that have moved to other positions, by tier: their names, and as they are now.
struct Moves {
  std::array<Names, TIERS> names;
  std::array<std::vector<Run>, TIERS> runs;
};

struct Change {
  std::vector<Run> added;
  Moves moved;
};

class EngineBlocks {
 public:

  // `counted`: a held block that is stored again has one more copy.
  EngineBlocks(size_t recent_limit, bool counted) : limit_(recent_limit), counted_(counted) {}

  size_t held(uint32_t tier) const { return held_[tier]; }
  // The number of blocks that have ever come into a tier.
  uint64_t kept(uint32_t tier) const { return kept_[tier]; }
  uint32_t copies(uint32_t tier, uint64_t name) const {
    const uint32_t at = index_.find(name);
    return at == 0 ? 0 : blocks_[at].copies[tier];
  }
  const Position* position(uint64_t name) const {
    const uint32_t at = index_.find(name);
    return at == 0 ? nullptr : &blocks_[at].position;
  }
  size_t known(const Names& names) const {
    return std::ranges::count_if(names, [&](uint64_t name) { return index_.find(name) != 0; });
  }
  // The number of leading blocks of a prompt in the engine's own memory.
  size_t leading(Hashes sequence) const {
    size_t count = 0;
    while (count < sequence.count && sequences_.find(sequence[count]) != 0) ++count;
    return count;
  }

  // Adds a copy of each block of a chain, with its position. A block that the engine's own memory
  // is told to have elsewhere moves there beforehand, with all that follow it.
  Change store(uint32_t tier, const Names& names, std::optional<uint64_t> parent, uint64_t previous,
               const Names& local);
  // Adds a copy of each known block that has none in the tier, and of the others if they are
  // `again` stored; returns those that had none.
  std::vector<Run> hold(uint32_t tier, const Names& names, bool again);
  // Removes a copy of each block; those of which none is left are `gone`, others may be `missing`.
  void release(uint32_t tier, const Names& names, Names& gone, Names& missing);
  void clear(uint32_t tier);
  void forget();

  // All blocks by tier, the oldest first.
  std::array<std::vector<Run>, TIERS> dump() const;

 private:
  struct Block {
    uint64_t name = 0;
    Position position;
    uint64_t age = 0;
    std::array<uint32_t, TIERS> copies{};
    uint32_t before = 0, after = 0;  // in the list of recent ones
    bool recent = false;

    bool is_held() const {
      return std::ranges::any_of(copies, [](uint32_t count) { return count != 0; });
    }
  };

  static Position next(std::optional<uint64_t> parent, uint64_t previous, uint64_t local) {
    return {parent, previous, local, BLOCK_HASH.pair(previous, local)};
  }
  // True for a held block, and for one that has been placed and is about to be held.
  bool is_placed(uint64_t name) const {
    const uint32_t at = index_.find(name);
    return at != 0 && !blocks_[at].recent;
  }
  uint32_t obtain(uint64_t name);
  Moves correct(const Names& names, std::optional<uint64_t> parent, uint64_t previous,
                const Names& local);
  void hold(uint32_t tier, uint32_t at, bool again, std::vector<Run>& added);
  void move(Block& block, const Position& position);
  std::vector<uint32_t> move_following(std::vector<uint32_t> moved);
  void add_copy(uint32_t tier, Block& block);
  void remove_copies(uint32_t tier, uint32_t at);
  void link(uint32_t at);
  void unlink(uint32_t at);
  void drop(uint32_t at);
  void extend(std::vector<Run>& runs, const Block& block) const;
  std::vector<uint32_t> by_age(uint32_t tier) const;

  FlatMap index_;                 // name -> slot
  FlatMap sequences_;             // sequence hash -> blocks in the engine's own memory
  std::vector<Block> blocks_{1};  // slot 0 holds the ends of the list of recent ones
  std::vector<uint32_t> free_;
  std::array<size_t, TIERS> held_{};
  std::array<uint64_t, TIERS> kept_{};
  size_t recent_ = 0;
  uint64_t age_ = 0;
  size_t limit_;
  bool counted_;
};

}  // namespace kvmesh
