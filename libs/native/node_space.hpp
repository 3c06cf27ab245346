// Memory of nodes: one range of address space, given to ranks in runs.
//
// A node's number is its index, so access takes no lookup; a rank's consecutive blocks are
// adjacent, so that storing and removing them streams through memory; huge pages keep address
// translation out of the way where the system has them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "epoch.hpp"
#include "rank_set.hpp"

namespace kvmesh {

// A node's number; 0 is none.
using NodeId = uint32_t;

struct alignas(32) Node {
  uint64_t sequence;
  uint64_t local;
  std::atomic<RankSet::Word> ranks;
  NodeId parent;    // in limbo: the next node of the queue
  NodeId children;  // the only child, or FORK; in limbo: the epoch of retirement
};
static_assert(sizeof(Node) == 32);

// Retired nodes, oldest first. Not thread-safe.
struct NodeQueue {
  NodeId first = 0, last = 0;
};

class NodeSpace {
 public:
  static constexpr uint32_t BITS = 29;
  static constexpr NodeId LAST = (1u << BITS) - 2;  // LAST + 1 marks tombstones

  explicit NodeSpace(const Epochs& epochs);
  NodeSpace(const NodeSpace&) = delete;
  NodeSpace& operator=(const NodeSpace&) = delete;
  ~NodeSpace();

  Node& operator[](NodeId id) const { return base_[id]; }
  size_t bytes() const;

  // Allocator of one rank's nodes, under the rank's mutex.
  class Arena {
   public:
    explicit Arena(NodeSpace& space) : space_(space) {}
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // A node that no reader can reach.
    NodeId allocate() {
      if (queue_.first != 0 && space_.is_reusable(queue_.first)) {
        const NodeId id = queue_.first;
        queue_.first = space_[id].parent;
        return id;
      }
      if (next_ == end_) return space_.refill(*this);
      return next_++;
    }
    // Queues a node that left its table during the pin at `epoch` for reuse.
    void retire(NodeId id, uint64_t epoch);
    // Leaves retired nodes to other ranks.
    void yield() { space_.pool(queue_); }

   private:
    friend class NodeSpace;
    NodeSpace& space_;
    NodeQueue queue_;
    NodeId next_ = 0, end_ = 0;
  };

 private:
  bool is_reusable(NodeId id) const {
    return static_cast<uint32_t>(epochs_.current()) - base_[id].children >= Epochs::GRACE;
  }
  NodeId refill(Arena& arena);
  void pool(NodeQueue& queue);
  void append(NodeQueue& queue, NodeQueue more) const;

  const Epochs& epochs_;
  Node* base_;
  mutable std::mutex mutex_;
  NodeQueue pooled_;
  NodeId taken_ = 1;   // the lowest number never handed out
  NodeId backed_ = 0;  // numbers below this have memory
};

}  // namespace kvmesh
