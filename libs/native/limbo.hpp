// Memory that readers may still see: allocated by a writer, freed once no pin can reach it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "epoch.hpp"
#include "table_memory.hpp"

namespace kvmesh {

// Used by one writer at a time (under its shard's lock).
class Limbo {
 public:
  explicit Limbo(const Epochs& epochs) : epochs_(epochs) {}
  Limbo(const Limbo&) = delete;
  Limbo& operator=(const Limbo&) = delete;
  ~Limbo() {
    for (const Retired& retired : retired_) TableMemory::release(retired.memory, retired.bytes);
  }

  // The caller passes the memory to `retire`, or to TableMemory's `release`.
  void* allocate(size_t bytes, size_t alignment = alignof(std::max_align_t)) {
    bytes_ += bytes;
    return TableMemory::allocate(bytes, alignment);
  }

  void retire(void* memory, size_t bytes, uint64_t epoch) {
    retired_.push_back({memory, bytes, epoch});
    while (epochs_.reusable(retired_.front().epoch)) {
      bytes_ -= retired_.front().bytes;
      TableMemory::release(retired_.front().memory, retired_.front().bytes);
      retired_.pop_front();
    }
  }

  size_t bytes() const { return bytes_; }

 private:
  struct Retired {
    void* memory;
    size_t bytes;
    uint64_t epoch;
  };
  const Epochs& epochs_;
  std::deque<Retired> retired_;
  size_t bytes_ = 0;
};

}  // namespace kvmesh
