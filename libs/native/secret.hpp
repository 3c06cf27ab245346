// Secret permutation of hash-table keys, different in each process, so that clients cannot choose
// colliding keys: they choose engine hashes and, with some work, sequence hashes.
#pragma once

#include <cstdint>
#include <random>

namespace kvmesh {

struct Secret {
  uint64_t add, multiply;

  static Secret draw() {
    std::random_device device;
    const auto word = [&] { return uint64_t{device()} << 32 | device(); };
    const uint64_t add = word();
    return {add, word() | 1};
  }
};

inline const Secret SECRET = Secret::draw();

// All bits of the result depend on all of the key. A single product would leave evenly spaced keys
// evenly spaced, and with some secrets in few slots.
inline uint64_t scattered(uint64_t key) {
  const uint64_t product = (key ^ SECRET.add) * SECRET.multiply;
  return (product ^ product >> 32) * 0x9E3779B97F4A7C15;
}

}  // namespace kvmesh
