#include "engine_blocks.hpp"

namespace kvmesh {
namespace {

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
  Change made;
  for (const uint64_t name : names) index_.prefetch(name);
  if (tier == 0) made.moved = correct(names, parent, previous, local);
  for (size_t i = 0; i < names.size(); ++i) {
    const uint32_t at = obtain(names[i]);
    move(blocks_[at], next(parent, previous, local[i]));
    hold(tier, at, true, made.added);
    parent = names[i];
    previous = blocks_[at].position.sequence;
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
    if (block.recent) unlink(at);
    add_copy(tier, block);
    extend(added, block);
  } else if (again && counted_) {
    ++block.copies[tier];
  }
}

// Moves the held blocks to which a chain gives another sequence hash, and all that follow them.
// Returns those, parents first; if there are any, recent blocks are forgotten.
Moves EngineBlocks::correct(const Names& names, std::optional<uint64_t> parent, uint64_t previous,
                            const Names& local) {
  Moves made;
  std::vector<uint32_t> moved;
  for (size_t i = 0; i < names.size(); ++i) {
    const Position position = next(parent, previous, local[i]);
    const uint32_t at = index_.find(names[i]);
    if (at != 0 && !blocks_[at].recent && blocks_[at].position.sequence != position.sequence) {
      move(blocks_[at], position);
      moved.push_back(at);
    }
    parent = names[i];
    previous = position.sequence;
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
  std::unordered_multimap<uint64_t, uint32_t> children;
  for (uint32_t at = 1; at < blocks_.size(); ++at) {
    const Block& block = blocks_[at];
    if (block.is_held() && block.position.parent) children.emplace(*block.position.parent, at);
  }
  std::unordered_set<uint32_t> done(moved.begin(), moved.end());
  for (size_t i = 0; i < moved.size(); ++i) {
    const uint64_t name = blocks_[moved[i]].name, sequence = blocks_[moved[i]].position.sequence;
    const auto [first, last] = children.equal_range(name);
    for (auto child = first; child != last; ++child) {
      if (!done.insert(child->second).second) continue;
      Block& block = blocks_[child->second];
      move(block, next(name, sequence, block.position.local));
      moved.push_back(child->second);
    }
  }
  return moved;
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
  while (recent_ != 0) drop(blocks_[0].after);
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

// The slot of a block, a new one if it is not known.
uint32_t EngineBlocks::obtain(uint64_t name) {
  if (const uint32_t at = index_.find(name)) return at;
  uint32_t at = static_cast<uint32_t>(blocks_.size());
  if (free_.empty()) {
    blocks_.emplace_back();
  } else {
    at = free_.back();
    free_.pop_back();
    blocks_[at] = Block{};
  }
  blocks_[at].name = name;
  index_.insert(name, at);
  return at;
}

void EngineBlocks::move(Block& block, const Position& position) {
  if (block.copies[0] != 0 && block.position.sequence != position.sequence) {
    sequences_.count(block.position.sequence, -1);
    sequences_.count(position.sequence, 1);
  }
  block.position = position;
}

void EngineBlocks::add_copy(uint32_t tier, Block& block) {
  if (!block.is_held()) block.age = ++age_;
  block.copies[tier] = 1;
  ++held_[tier];
  ++kept_[tier];
  if (tier != 0) return;
  if (sequences_.find(block.position.sequence) == 0) {
    sequences_.insert(block.position.sequence, 1);
  } else {
    sequences_.count(block.position.sequence, 1);
  }
}

// Removes all copies in a tier of a block that has some.
void EngineBlocks::remove_copies(uint32_t tier, uint32_t at) {
  Block& block = blocks_[at];
  block.copies[tier] = 0;
  --held_[tier];
  if (tier == 0) sequences_.count(block.position.sequence, -1);
  if (block.is_held()) return;
  link(at);
  if (recent_ > limit_) drop(blocks_[0].after);
}

// Adds a block to the recent ones, as the last.
void EngineBlocks::link(uint32_t at) {
  Block& block = blocks_[at];
  block.recent = true;
  block.before = blocks_[0].before;
  block.after = 0;
  blocks_[block.before].after = at;
  blocks_[0].before = at;
  ++recent_;
}

void EngineBlocks::unlink(uint32_t at) {
  Block& block = blocks_[at];
  block.recent = false;
  blocks_[block.before].after = block.after;
  blocks_[block.after].before = block.before;
  --recent_;
}

void EngineBlocks::drop(uint32_t at) {
  unlink(at);
  index_.erase(blocks_[at].name);
  free_.push_back(at);
}

// Appends a block to the last run, or begins one with it.
void EngineBlocks::extend(std::vector<Run>& runs, const Block& block) const {
  const Position& position = block.position;
  if (runs.empty() || !position.parent || *position.parent != runs.back().engine.back()) {
    const bool attached = position.parent && !is_placed(*position.parent);
    runs.push_back({attached ? std::nullopt : position.parent, position.previous, attached, {}, {}});
  }
  runs.back().engine.push_back(block.name);
  runs.back().local.push_back(position.local);
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
