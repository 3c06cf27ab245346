// Map from a 64-bit key to a non-zero 32-bit value, for one thread at a time.
//
// Buckets of five entries, one cache line each. A key is stored in the first bucket from its home
// on that had a free entry, and each full bucket before counts that it `passed`: a search ends at a
// bucket that nothing passed, nearly always the first, or else after one round, and a removal moves
// nothing but the last entry of its bucket. All but small maps grow by a quarter, to save memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "secret.hpp"
#include "table_memory.hpp"

namespace kvmesh {

class FlatMap {
 public:
  FlatMap() = default;
  FlatMap(FlatMap&& other) noexcept { *this = std::move(other); }
  FlatMap& operator=(FlatMap&& other) noexcept {
    buckets_ = std::move(other.buckets_);
    count_ = std::exchange(other.count_, 0);
    size_ = std::exchange(other.size_, 0);
    limit_ = std::exchange(other.limit_, 0);
    return *this;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t bytes() const { return count_ * sizeof(Bucket); }

  // The value of `key`, or 0.
  uint32_t find(uint64_t key) const {
    if (size_ == 0) return 0;
    size_t at = home(key);
    for (size_t left = count_; left != 0; --left, at = next(at)) {
      const Bucket& bucket = buckets_[at];
      if (const uint32_t i = bucket.entry_of(key); i < bucket.used) return bucket.values[i];
      if (bucket.passed == 0) return 0;
    }
    return 0;
  }

  // Makes room for so many keys in all.
  void reserve(size_t keys) {
    if (keys > limit_) resize(keys * 16 / 15 / WIDTH + 1);
  }

  // Grows if so many more keys would make it grow.
  void expect(size_t keys) {
    while (size_ + keys > limit_) resize(grown());
  }

  // Adds a key that the map does not have.
  void insert(uint64_t key, uint32_t value) {
    if (size_ >= limit_) resize(grown());
    ++size_;
    place(key, value);
  }

  // Removes `key` and returns the value it had, or 0.
  uint32_t erase(uint64_t key) {
    if (size_ == 0) return 0;
    size_t at = home(key);
    for (size_t left = count_; left != 0; --left, at = next(at)) {
      Bucket& bucket = buckets_[at];
      if (const uint32_t i = bucket.entry_of(key); i < bucket.used) {
        --size_;
        for (size_t full = home(key); full != at; full = next(full)) --buckets_[full].passed;
        return bucket.take(i);
      }
      if (bucket.passed == 0) return 0;
    }
    return 0;
  }

  // Adds to the value of `key`. An absent key counts as 0; a key whose value becomes 0 is removed.
  void count(uint64_t key, int delta) {
    const uint32_t sum = erase(key) + delta;
    if (sum != 0) insert(key, sum);
  }

  // Inlined by force: as a call without effects GCC drops it.
  [[gnu::always_inline]] void prefetch(uint64_t key) const {
    __builtin_prefetch(buckets_.get() + home(key), 1);
  }

  template <typename F>
  void for_each(F&& visit) const {
    for (size_t at = 0; at < count_; ++at) {
      const Bucket& bucket = buckets_[at];
      for (uint32_t i = 0; i < bucket.used; ++i) visit(bucket.keys[i], bucket.values[i]);
    }
  }

 private:
  static constexpr uint32_t WIDTH = 5;
  static constexpr size_t SMALL = 256;

  struct alignas(64) Bucket {
    uint64_t keys[WIDTH];
    uint32_t values[WIDTH];
    uint32_t used : 8;
    uint32_t passed : 24;  // keys stored in later buckets because this one was full

    // Position of the key; `used` or more if absent. Branch-free: branches would be mispredicted.
    uint32_t entry_of(uint64_t key) const {
      uint32_t found = WIDTH;
      for (uint32_t i = WIDTH; i-- > 0;) found = keys[i] == key ? i : found;
      return found;
    }
    uint32_t take(uint32_t i) {
      const uint32_t value = values[i];
      --used;
      keys[i] = keys[used];
      values[i] = values[used];
      return value;
    }
  };
  static_assert(sizeof(Bucket) == 64);

  friend class Probes;  // of tests/native

  size_t home(uint64_t key) const { return (scattered(key) >> 32) * count_ >> 32; }
  size_t next(size_t at) const { return at + 1 == count_ ? 0 : at + 1; }
  size_t grown() const { return count_ < SMALL ? 1 + count_ * 2 : count_ * 5 / 4; }

  void place(uint64_t key, uint32_t value) {
    size_t at = home(key);
    for (; buckets_[at].used == WIDTH; at = next(at)) ++buckets_[at].passed;
    Bucket& bucket = buckets_[at];
    bucket.keys[bucket.used] = key;
    bucket.values[bucket.used] = value;
    ++bucket.used;
  }

  void resize(size_t count) {
    const auto old = std::exchange(buckets_, TableMemory::array<Bucket>(count));
    const size_t had = std::exchange(count_, count);
    limit_ = count * WIDTH * 15 / 16;
    for (size_t at = 0; at < had; ++at) {
      for (uint32_t i = 0; i < old[at].used; ++i) place(old[at].keys[i], old[at].values[i]);
    }
  }

  TableMemory::Array<Bucket> buckets_;
  size_t count_ = 0;
  size_t size_ = 0;
  size_t limit_ = 0;  // the size at which the map grows
};

}  // namespace kvmesh
