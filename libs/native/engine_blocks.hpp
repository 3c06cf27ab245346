// The blocks of an engine's cache by the engine's own hashes, with their positions in prompts.
//
// A block is held, with a number of copies in each tier, or recent: its copies are gone and its
// position is still known. The recent ones are a list from the one that lost its last copy first;
// the limit of their number bounds what is kept beside the engine's own blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "flat_map.hpp"
#include "hashes.hpp"
#include "index.hpp"
#include "xxh3.hpp"

namespace kvmesh {

using Names = std::vector<uint64_t>;

// The sequence hashes before a block (at the start of a prompt: the salt), and of it.
struct Position {
  uint64_t previous, sequence;
};

// Consecutive blocks, each the parent of the next. Without a parent that is known to the reader,
// `attached` ones follow the sequence hash `previous`, others the salt.
struct Run {
  std::optional<uint64_t> parent;
  uint64_t previous = 0;
  bool attached = false;
  std::vector<uint64_t> engine, local;
};

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
  EngineBlocks(size_t recent_limit, bool counted) : limit_(recent_limit), counted_(counted) {
    blocks_.add();  // slot 0 holds the ends of the list of recent blocks
  }

  size_t held(uint32_t tier) const { return held_[tier]; }
  // The number of blocks that have ever come into a tier.
  uint64_t kept(uint32_t tier) const { return kept_[tier]; }
  uint32_t copies(uint32_t tier, uint64_t name) const {
    const uint32_t at = index_.find(name);
    return at == 0 ? 0 : blocks_[at].copies[tier];
  }
  std::optional<Position> position(uint64_t name) const {
    const uint32_t at = index_.find(name);
    if (at == 0) return std::nullopt;
    return Position{blocks_[at].previous, blocks_[at].sequence()};
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

  // Adds a copy of each block of a chain, with its position. A block that the first tier is told to
  // have elsewhere moves there beforehand, with all that follow it.
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
  // One cache line. Only held blocks need their age, and only recent ones are in the list.
  struct Block {
    uint64_t name, parent, previous, local;
    std::array<uint32_t, TIERS> copies;
    union {
      uint64_t age;
      struct {
        uint32_t before, after;
      } links;
    };
    bool is_root, is_recent;

    bool is_held() const {
      return std::ranges::any_of(copies, [](uint32_t count) { return count != 0; });
    }
    uint64_t sequence() const { return BLOCK_HASH.pair(previous, local); }
  };
  static_assert(sizeof(Block) == 64);

  // Growth moves no block, and touches no memory before it is used.
  class Slots {
   public:
    Block& operator[](uint32_t at) { return chunks_[at / CHUNK][at % CHUNK]; }
    const Block& operator[](uint32_t at) const { return chunks_[at / CHUNK][at % CHUNK]; }
    uint32_t size() const { return size_; }
    uint32_t add() {
      if (size_ % CHUNK == 0) chunks_.push_back(std::make_unique<Block[]>(CHUNK));
      return size_++;
    }

   private:
    static constexpr uint32_t CHUNK = 256;
    std::vector<std::unique_ptr<Block[]>> chunks_;
    uint32_t size_ = 0;
  };

  // A chain of blocks as an event tells of it.
  struct Chain {
    const Names& names;
    std::optional<uint64_t> parent;
    uint64_t previous;
    const Names& local;
    Names sequence;

    uint64_t before(size_t i) const { return i == 0 ? previous : sequence[i - 1]; }
    std::optional<uint64_t> parent_of(size_t i) const { return i == 0 ? parent : names[i - 1]; }
  };

  uint32_t obtain(uint64_t name);
  void reserve(size_t more);
  void move(uint32_t at, const Chain& chain, size_t i);
  void place(Block& block, uint64_t previous, uint64_t local);
  Moves correct(const Chain& chain);
  std::vector<uint32_t> move_following(std::vector<uint32_t> moved);
  void follow();
  void hold(uint32_t tier, uint32_t at, bool again, std::vector<Run>& added);
  void add_copy(uint32_t tier, uint32_t at);
  void remove_copies(uint32_t tier, uint32_t at);
  void link(uint32_t at);
  void unlink(uint32_t at);
  void drop(uint32_t at);
  void extend(std::vector<Run>& runs, const Block& block) const;
  std::vector<uint32_t> by_age(uint32_t tier) const;
  // True for a held block, and for one that is about to be held.
  bool is_placed(uint64_t name) const {
    const uint32_t at = index_.find(name);
    return at != 0 && !blocks_[at].is_recent;
  }

  FlatMap index_;      // name -> slot
  FlatMap sequences_;  // sequence hash -> blocks in the engine's own memory
  Slots blocks_;
  // Parents' names and slots of the known blocks that follow them, from the first move on: most
  // engines never need them, and a search of all blocks for each move would cost much more.
  std::set<std::pair<uint64_t, uint32_t>> children_;
  bool follows_ = false;
  std::vector<uint32_t> free_;
  std::array<size_t, TIERS> held_{};
  std::array<uint64_t, TIERS> kept_{};
  size_t recent_ = 0;
  size_t room_ = 0;  // blocks for which the maps have room
  uint64_t age_ = 0;
  size_t limit_;
  bool counted_;
};

}  // namespace kvmesh
