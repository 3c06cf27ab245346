#include "node_space.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

namespace kvmesh {

namespace {

constexpr size_t SPACE = sizeof(Node) << NodeSpace::BITS;
constexpr uint32_t RUN = 32;       // nodes handed out together
constexpr uint32_t STEP = 1 << 16;  // nodes that get memory together: 2 MiB, one huge page

}  // namespace

NodeSpace::NodeSpace(const Epochs& epochs) : epochs_(epochs) {
  void* memory = mmap(nullptr, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<Node*>(memory);
#ifdef MADV_HUGEPAGE
  madvise(memory, SPACE, MADV_HUGEPAGE);  // refused where there are none: then normal pages
#endif
}

NodeSpace::~NodeSpace() {
  for (NodeId id = 1; id < taken_; ++id) {
    RankSet::destroy(base_[id].ranks.load(std::memory_order_relaxed));
  }
  munmap(base_, SPACE);
}

size_t NodeSpace::bytes() const {
  const std::lock_guard guard(mutex_);
  return sizeof(Node) * taken_;
}

NodeId NodeSpace::refill(Arena& arena) {
  const std::lock_guard guard(mutex_);
  if (pooled_.first != 0 && is_reusable(pooled_.first)) {
    const NodeId id = pooled_.first;
    NodeQueue some{id, id};
    for (uint32_t i = 1; i < RUN && some.last != pooled_.last; ++i) {
      const NodeId next = base_[some.last].parent;
      if (!is_reusable(next)) break;
      some.last = next;
    }
    pooled_.first = some.last != pooled_.last ? base_[some.last].parent : 0;
    base_[some.last].parent = arena.queue_.first;
    if (arena.queue_.first == 0) arena.queue_.last = some.last;
    arena.queue_.first = some.first != some.last ? base_[id].parent : arena.queue_.first;
    return id;
  }
  if (taken_ + RUN > LAST) throw std::length_error("the prefix index is full");
  if (taken_ + RUN > backed_) {
    if (mprotect(base_ + backed_, STEP * sizeof(Node), PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    backed_ += STEP;
  }
  arena.next_ = taken_;
  taken_ += RUN;
  arena.end_ = taken_;
  return arena.next_++;
}

void NodeSpace::pool(NodeQueue& queue) {
  const std::lock_guard guard(mutex_);
  append(pooled_, std::exchange(queue, {}));
}

void NodeSpace::append(NodeQueue& queue, NodeQueue more) const {
  if (more.first == 0) return;
  if (queue.first == 0) {
    queue.first = more.first;
  } else {
    base_[queue.last].parent = more.first;
  }
  queue.last = more.last;
}

void NodeSpace::Arena::retire(NodeId id, uint64_t epoch) {
  space_[id].ranks.store(RankSet::RETIRED, std::memory_order_release);
  space_[id].parent = 0;
  space_[id].children = static_cast<uint32_t>(epoch);
  space_.append(queue_, {id, id});
}

}  // namespace kvmesh
