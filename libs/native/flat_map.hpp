// Map from a 64-bit key to a non-zero 32-bit value, for one thread at a time.
//
// Twelve bytes a slot, linear probing, no tombstones. A slot's home is monotone in the key's mixed
// value, so growing copies slots nearly in order; all but small maps grow by a quarter, to save
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace kvmesh {

class FlatMap {
 public:
  FlatMap() = default;
  FlatMap(FlatMap&& other) noexcept { *this = std::move(other); }
  FlatMap& operator=(FlatMap&& other) noexcept {
    slots_ = std::move(other.slots_);
    capacity_ = std::exchange(other.capacity_, 0);
    size_ = std::exchange(other.size_, 0);
    limit_ = std::exchange(other.limit_, 0);
    return *this;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t bytes() const { return capacity_ * sizeof(Slot); }

  // The value of `key`, or 0.
  uint32_t find(uint64_t key) const { return size_ != 0 ? slots_[search(key)].value : 0; }

  // Where `key` is or would be, with room for one more key; valid until the next change.
  size_t locate(uint64_t key) {
    if (size_ >= limit_) resize(grown());
    return search(key);
  }
  uint32_t value(size_t at) const { return slots_[at].value; }
  void fill(size_t at, uint64_t key, uint32_t value) {
    size_ += slots_[at].value == 0;
    slots_[at] = {key, value};
  }

  // Adds to the value of `key`, which counts as 0 where absent and is removed when it gets there.
  void count(uint64_t key, int delta) {
    const size_t at = locate(key);
    const uint32_t sum = slots_[at].value + delta;
    if (sum != 0) {
      fill(at, key, sum);
    } else if (slots_[at].value != 0) {
      erase(key, at);
    }
  }

  // Removes `key` and returns the value it had, or 0. `hint` is where it was located before.
  uint32_t erase(uint64_t key, size_t hint) {
    if (size_ == 0) return 0;
    if (hint >= capacity_ || slots_[hint].key != key || slots_[hint].value == 0) {
      hint = search(key);
    }
    const uint32_t value = slots_[hint].value;
    if (value == 0) return 0;
    close(hint);
    --size_;
    return value;
  }

  // Inlined by force: as a call without effects GCC drops it.
  [[gnu::always_inline]] void prefetch(uint64_t key) const {
    __builtin_prefetch(slots_.get() + home(key), 1);
  }

  template <typename F>
  void for_each(F&& visit) const {
    for (size_t at = 0; at < capacity_; ++at) {
      if (slots_[at].value != 0) visit(slots_[at].key, slots_[at].value);
    }
  }

 private:
  static constexpr size_t SMALL = 1024;

#pragma pack(push, 4)
  struct Slot {
    uint64_t key;
    uint32_t value;
  };
#pragma pack(pop)
  static_assert(sizeof(Slot) == 12);

  size_t home(uint64_t key) const {
    return ((key * 0x9E3779B97F4A7C15ULL) >> 32) * capacity_ >> 32;
  }
  size_t next(size_t at) const { return at + 1 == capacity_ ? 0 : at + 1; }
  size_t search(uint64_t key) const {
    size_t at = home(key);
    while (slots_[at].value != 0 && slots_[at].key != key) at = next(at);
    return at;
  }

  // Moves later slots of the same run back, so that every probe still meets its key.
  void close(size_t hole) {
    for (size_t at = next(hole); slots_[at].value != 0; at = next(at)) {
      const size_t want = home(slots_[at].key);
      const bool stays = hole <= at ? hole < want && want <= at : hole < want || want <= at;
      if (stays) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole].value = 0;
  }

  size_t grown() const {
    return capacity_ < SMALL ? 16 + capacity_ * 2 : capacity_ * 5 / 4;
  }

  void resize(size_t capacity) {
    const auto old = std::exchange(slots_, std::make_unique<Slot[]>(capacity));
    const size_t count = std::exchange(capacity_, capacity);
    limit_ = capacity * 7 / 8;
    for (size_t at = 0; at < count; ++at) {
      if (old[at].value != 0) slots_[search(old[at].key)] = old[at];
    }
  }

  std::unique_ptr<Slot[]> slots_;
  size_t capacity_ = 0;
  size_t size_ = 0;
  size_t limit_ = 0;  // the size at which the map grows
};

}  // namespace kvmesh
