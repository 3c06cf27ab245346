// A read-only view of packed little-endian 64-bit hashes, at any alignment.
#pragma once

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
  Hashes slice(size_t from, size_t length) const { return {data + 8 * from, length}; }
};

}  // namespace kvmesh
