// A read-only view of packed little-endian 64-bit hashes, at any alignment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvmesh {

struct Hashes {
  const uint8_t* data;
  size_t count;

  uint64_t operator[](size_t i) const {
    uint64_t hash;
    std::memcpy(&hash, data + 8 * i, sizeof hash);
    return hash;
  }
  Hashes first(size_t length) const { return {data, std::min(length, count)}; }

  // Fetches the first `length`. Inlined by force: as a call without effects GCC drops it.
  [[gnu::always_inline]] void prefetch(size_t length) const {
    for (size_t at = 0; at < 8 * std::min(length, count); at += 64) __builtin_prefetch(data + at);
  }
  Hashes slice(size_t from, size_t length) const { return {data + 8 * from, length}; }
};

}  // namespace kvmesh
