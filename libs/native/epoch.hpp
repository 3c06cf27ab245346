// Epoch-based reclamation: readers pin, writers retire, memory is reused when no pin can reach it.
//
// Invariants
//   E1  A pin shows an epoch that was current after the pin became visible.
//   E2  The epoch moves from e to e + 1 only while every pin shows e, so while a pin shows e the
//       current epoch is e or e + 1.
//   E3  A writer unlinks and retires inside its own pin, say at p. Its unpinning precedes the move
//       to p + 2, so a pin at p + 2 or later sees the unlinking; pins at p + 1 or earlier
//       are gone when the epoch is p + 3. Hence memory retired at p is reusable from p + 3 on.
// Pinning is one uncontended compare-and-swap on a line of the thread's own; no reader waits for
// a writer. (Fraser, "Practical lock-freedom", 2004, section 5.2.3.)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvmesh {

class Epochs {
 public:
  class Pin {
   public:
    explicit Pin(Epochs& epochs) : slot_(epochs.claim()) {
      epoch_ = slot_.load(std::memory_order_relaxed);
      for (uint64_t now; (now = epochs.current_.load()) != epoch_;) slot_.store(epoch_ = now);
    }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin() { slot_.store(0, std::memory_order_release); }

    uint64_t epoch() const { return epoch_; }

   private:
    std::atomic<uint64_t>& slot_;
    uint64_t epoch_;
  };

  static constexpr uint64_t GRACE = 3;

  uint64_t current() const { return current_.load(std::memory_order_acquire); }
  bool reusable(uint64_t retired) const { return current() >= retired + GRACE; }

  // Moves to the next epoch if every pin shows the current one.
  void advance() {
    uint64_t now = current_.load();
    const size_t used = used_.load();
    for (size_t i = 0; i < used; ++i) {
      const uint64_t shown = slots_[i].epoch.load();
      if (shown != 0 && shown != now) return;
    }
    current_.compare_exchange_strong(now, now + 1);
  }

 private:
  static constexpr size_t SLOTS = 256;
  struct alignas(64) Slot {
    std::atomic<uint64_t> epoch{0};
  };

  // A free slot, from this thread's usual one onwards. More than SLOTS pins at once spin here.
  std::atomic<uint64_t>& claim() {
    static std::atomic<size_t> threads{0};
    thread_local const size_t usual = threads.fetch_add(1, std::memory_order_relaxed) % SLOTS;
    for (size_t i = usual;; i = (i + 1) % SLOTS) {
      size_t used = used_.load();
      while (used <= i && !used_.compare_exchange_weak(used, i + 1)) {
      }
      uint64_t free = 0;
      if (slots_[i].epoch.compare_exchange_strong(free, current_.load())) return slots_[i].epoch;
    }
  }

  Slot slots_[SLOTS];
  std::atomic<size_t> used_{0};
  alignas(64) std::atomic<uint64_t> current_{GRACE};
};

}  // namespace kvmesh
