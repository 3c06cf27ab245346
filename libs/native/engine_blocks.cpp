#include "engine_blocks.hpp"

namespace kvmesh {
namespace {

constexpr size_t FIRST_ROOM = 1024;

// A run whose parent its reader does not know yet follows that one's sequence hash.
template <typename IsPublished>
void attach(Run& run, IsPublished&& is_published) {
  if (!run.parent || is_published(*run.parent)) return;
  run.parent.reset();
  run.attached = true;
}

}  // namespace

Change EngineBlocks::store(uint32_t tier, const Names& names, std::optional<uint64_t> parent,
                           uint64_t previous, const Names& local) {
  reserve(names.size());
  Chain chain{names, parent, previous, local, Names(names.size())};
  for (size_t i = 0; i < names.size(); ++i) {
    chain.sequence[i] = BLOCK_HASH.pair(chain.before(i), local[i]);
    index_.prefetch(names[i]);
    if (tier == 0) sequences_.prefetch(chain.sequence[i]);
  }
  Change made;
  if (tier == 0) made.moved = correct(chain);
  for (size_t i = 0; i < names.size(); ++i) {
    const uint32_t at = obtain(names[i]);
    move(at, chain, i);
    hold(tier, at, true, made.added);
  }
  return made;
}

std::vector<Run> EngineBlocks::hold(uint32_t tier, const Names& names, bool again) {
  std::vector<Run> added;
  for (const uint64_t name : names) hold(tier, index_.find(name), again, added);
  return added;
}

void EngineBlocks::hold(uint32_t tier, uint32_t at, bool again, std::vector<Run>& added) {
  Block& block = blocks_[at];
  if (block.copies[tier] == 0) {
    add_copy(tier, at);
    extend(added, block);
  } else if (again && counted_) {
    ++block.copies[tier];
  }
}

// Moves the held blocks to which a chain gives another sequence hash, and all that follow them.
// Returns those, parents first; if there are any, recent blocks are forgotten.
Moves EngineBlocks::correct(const Chain& chain) {
  Moves made;
  std::vector<uint32_t> moved;
  for (size_t i = 0; i < chain.names.size(); ++i) {
    const uint32_t at = index_.find(chain.names[i]);
    if (at == 0 || blocks_[at].is_recent || blocks_[at].sequence() == chain.sequence[i]) continue;
    move(at, chain, i);
    moved.push_back(at);
  }
  if (moved.empty()) return made;
  forget();
  std::unordered_set<uint64_t> absent;
  for (const uint32_t at : moved = move_following(std::move(moved))) {
    absent.insert(blocks_[at].name);
    for (uint32_t tier = 0; tier < TIERS; ++tier) {
      if (blocks_[at].copies[tier] == 0) continue;
      made.names[tier].push_back(blocks_[at].name);
      extend(made.runs[tier], blocks_[at]);
    }
  }
  for (std::vector<Run>& runs : made.runs) {
    for (Run& run : runs) {
      attach(run, [&](uint64_t name) { return !absent.contains(name); });
      for (const uint64_t name : run.engine) absent.erase(name);
    }
  }
  return made;
}

// Moves what follows moved blocks, too; returns them all.
std::vector<uint32_t> EngineBlocks::move_following(std::vector<uint32_t> moved) {
  if (!follows_) follow();
  std::unordered_set<uint32_t> done(moved.begin(), moved.end());
  for (size_t i = 0; i < moved.size(); ++i) {
    const uint64_t name = blocks_[moved[i]].name, sequence = blocks_[moved[i]].sequence();
    for (auto child = children_.lower_bound({name, 0});
         child != children_.end() && child->first == name; ++child) {
      if (!done.insert(child->second).second) continue;
      Block& block = blocks_[child->second];
      place(block, sequence, block.local);
      moved.push_back(child->second);
    }
  }
  return moved;
}

// Notes the children of all blocks, once the recent ones are forgotten.
void EngineBlocks::follow() {
  follows_ = true;
  for (uint32_t at = 1; at < blocks_.size(); ++at) {
    const Block& block = blocks_[at];
    if (block.is_held() && !block.is_root) children_.emplace(block.parent, at);
  }
}

void EngineBlocks::release(uint32_t tier, const Names& names, Names& gone, Names& missing) {
  for (const uint64_t name : names) {
    const uint32_t at = index_.find(name);
    const uint32_t copies = at == 0 ? 0 : blocks_[at].copies[tier];
    if (copies == 0) {
      missing.push_back(name);
    } else if (copies > 1) {
      --blocks_[at].copies[tier];
    } else {
      gone.push_back(name);
      remove_copies(tier, at);
    }
  }
}

void EngineBlocks::clear(uint32_t tier) {
  for (const uint32_t at : by_age(tier)) remove_copies(tier, at);
}

void EngineBlocks::forget() {
  while (recent_ != 0) drop(blocks_[0].links.after);
}

std::array<std::vector<Run>, TIERS> EngineBlocks::dump() const {
  std::array<std::vector<Run>, TIERS> found;
  std::unordered_set<uint64_t> published;
  for (uint32_t tier = 0; tier < TIERS; ++tier) {
    for (const uint32_t at : by_age(tier)) extend(found[tier], blocks_[at]);
    for (Run& run : found[tier]) {
      attach(run, [&](uint64_t name) { return published.contains(name); });
      published.insert(run.engine.begin(), run.engine.end());
    }
  }
  return found;
}

// Makes room for more blocks: doubling costs less time than the maps' own growth by a quarter.
void EngineBlocks::reserve(size_t more) {
  const size_t count = index_.size() + more;
  if (count <= room_) return;
  room_ = std::max(2 * count, FIRST_ROOM);
  index_.reserve(room_);
  sequences_.reserve(room_);
}

// The slot of a block, a new one if it is not known.
uint32_t EngineBlocks::obtain(uint64_t name) {
  uint32_t at = index_.find(name);
  if (at != 0) return at;
  if (free_.empty()) {
    at = blocks_.add();
  } else {
    at = free_.back();
    free_.pop_back();
  }
  blocks_[at] = Block{};
  blocks_[at].name = name;
  index_.insert(name, at);
  return at;
}

void EngineBlocks::move(uint32_t at, const Chain& chain, size_t i) {
  Block& block = blocks_[at];
  const std::optional<uint64_t> parent = chain.parent_of(i);
  if (follows_ && !block.is_root) children_.erase({block.parent, at});
  block.parent = parent.value_or(0);
  block.is_root = !parent;
  if (follows_ && parent) children_.emplace(*parent, at);
  place(block, chain.before(i), chain.local[i]);
}

// Gives a block another place.
void EngineBlocks::place(Block& block, uint64_t previous, uint64_t local) {
  const uint64_t before = block.sequence();
  block.previous = previous;
  block.local = local;
  if (block.copies[0] != 0 && before != block.sequence()) {
    sequences_.count(before, -1);
    sequences_.count(block.sequence(), 1);
  }
}

void EngineBlocks::add_copy(uint32_t tier, uint32_t at) {
  Block& block = blocks_[at];
  if (block.is_recent) unlink(at);
  if (!block.is_held()) block.age = ++age_;
  block.copies[tier] = 1;
  ++held_[tier];
  ++kept_[tier];
  if (tier != 0) return;
  const uint64_t sequence = block.sequence();
  if (sequences_.find(sequence) == 0) {
    sequences_.insert(sequence, 1);
  } else {
    sequences_.count(sequence, 1);
  }
}

// Removes all copies in a tier of a block that has some.
void EngineBlocks::remove_copies(uint32_t tier, uint32_t at) {
  Block& block = blocks_[at];
  block.copies[tier] = 0;
  --held_[tier];
  if (tier == 0) sequences_.count(block.sequence(), -1);
  if (block.is_held()) return;
  link(at);
  if (recent_ > limit_) drop(blocks_[0].links.after);
}

// Adds a block to the recent ones, as the last.
void EngineBlocks::link(uint32_t at) {
  Block& block = blocks_[at];
  block.is_recent = true;
  block.links = {blocks_[0].links.before, 0};
  blocks_[block.links.before].links.after = at;
  blocks_[0].links.before = at;
  ++recent_;
}

void EngineBlocks::unlink(uint32_t at) {
  Block& block = blocks_[at];
  block.is_recent = false;
  blocks_[block.links.before].links.after = block.links.after;
  blocks_[block.links.after].links.before = block.links.before;
  --recent_;
}

void EngineBlocks::drop(uint32_t at) {
  unlink(at);
  index_.erase(blocks_[at].name);
  if (follows_ && !blocks_[at].is_root) children_.erase({blocks_[at].parent, at});
  free_.push_back(at);
}

// Appends a block to the last run, or begins one with it.
void EngineBlocks::extend(std::vector<Run>& runs, const Block& block) const {
  if (runs.empty() || block.is_root || block.parent != runs.back().engine.back()) {
    Run& run = runs.emplace_back();
    run.previous = block.previous;
    run.attached = !block.is_root && !is_placed(block.parent);
    if (!block.is_root && !run.attached) run.parent = block.parent;
  }
  runs.back().engine.push_back(block.name);
  runs.back().local.push_back(block.local);
}

// The slots of a tier's blocks.
std::vector<uint32_t> EngineBlocks::by_age(uint32_t tier) const {
  std::vector<uint32_t> found;
  found.reserve(held_[tier]);
  for (uint32_t at = 1; at < blocks_.size(); ++at) {
    if (blocks_[at].copies[tier] != 0) found.push_back(at);
  }
  std::ranges::sort(found, {}, [&](uint32_t at) { return blocks_[at].age; });
  return found;
}

}  // namespace kvmesh
