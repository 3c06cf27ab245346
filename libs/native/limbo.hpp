// Memory that readers may still see: allocated by a writer, freed once no pin can reach it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <new>

#include "epoch.hpp"

namespace kvmesh {

// Used by one writer at a time (under its shard's lock).
class Limbo {
 public:
  explicit Limbo(const Epochs& epochs) : epochs_(epochs) {}
  Limbo(const Limbo&) = delete;
  Limbo& operator=(const Limbo&) = delete;
  ~Limbo() {
    for (const Retired& retired : retired_) std::free(retired.memory);
  }

  // The caller passes the memory to `retire`, or frees it with `free`.
  void* allocate(size_t bytes, size_t alignment = alignof(std::max_align_t)) {
    void* memory;
    if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
    bytes_ += bytes;
    return memory;
  }

  void retire(void* memory, size_t bytes, uint64_t epoch) {
    retired_.push_back({memory, bytes, epoch});
    while (epochs_.reusable(retired_.front().epoch)) {
      bytes_ -= retired_.front().bytes;
      std::free(retired_.front().memory);
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
