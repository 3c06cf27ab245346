// The ranks that hold a block, and their tiers: one atomic word that readers load once.
//
// Forms, by size
//   inline  up to two entries (rank << 4 | tiers) in the word itself; tiers is a non-zero bit mask
//   array   a heap array of such entries, unordered, 0 where free
//   bits    a heap bitset for each tier that occurs
// Invariants
//   S1  A word is replaced as a whole; a heap form is retired only after the word has ceased to
//       refer to it.
//   S2  Inside a heap form each entry is one atomic word, and an entry that is present throughout a
//       reader's scan never moves: the reader finds it exactly once.
//   S3  One writer at a time (the shard's lock).
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "limbo.hpp"

namespace kvmesh {

inline constexpr uint32_t TIERS = 4;
inline constexpr uint32_t NO_TIER = TIERS;

// The lowest tier of a mask, or NO_TIER.
inline uint32_t lowest(uint32_t tiers) { return std::countr_zero(tiers | 1u << NO_TIER); }

class RankSet {
 public:
  using Word = uint64_t;
  static constexpr Word EMPTY = 0;
  static constexpr Word ROOT = 0x10;     // a namespace's root: every rank holds it
  static constexpr Word RETIRED = 0x20;  // the node waits for reuse

  static bool on_heap(Word word) { return (word & 0xF) == 0 && word > RETIRED; }

  static bool is_bits(Word word) { return on_heap(word) && at(word)->planes != 0; }

  // Of a set that `is_bits`: how many columns of 64 ranks it has, and the ranks of one column that
  // hold the block in any of `tiers`.
  static uint32_t columns(Word word) { return at(word)->size; }
  static uint64_t column(Word word, uint32_t index, uint32_t tiers) {
    return at(word)->column(index, tiers);
  }

  // The tiers in which `rank` holds the block.
  static uint32_t tiers(Word word, uint32_t rank) {
    if (!on_heap(word)) {
      const auto first = static_cast<uint32_t>(word), second = static_cast<uint32_t>(word >> 32);
      if (first >> 4 == rank) return first & 0xF;
      return second >> 4 == rank ? second & 0xF : 0;
    }
    const Heap& heap = *at(word);
    return heap.planes != 0 ? heap.bits_of(rank) : heap.entry_of(rank) & 0xF;
  }

  // Calls visit(rank, tiers) for each holder, in no particular order.
  template <typename F>
  static void for_each(Word word, F&& visit) {
    if (on_heap(word)) {
      at(word)->for_each(visit);
      return;
    }
    const auto first = static_cast<uint32_t>(word), second = static_cast<uint32_t>(word >> 32);
    if ((first & 0xF) != 0) visit(first >> 4, first & 0xF);
    if ((second & 0xF) != 0) visit(second >> 4, second & 0xF);
  }

  // Fetches a heap form. Inlined by force: as a call without effects GCC drops it.
  [[gnu::always_inline]] static void prefetch(Word word) {
    if (on_heap(word)) __builtin_prefetch(at(word), 1);
  }

  // The word of a single holder.
  static Word single(uint32_t rank, uint32_t tier) { return rank << 4 | 1u << tier; }

  // Adds (`on`) or removes `rank` as a holder of the block in `tier`. `universe` bounds the ranks
  // in use.
  static void set(std::atomic<Word>& word, uint32_t rank, uint32_t tier, bool on, uint32_t universe,
                  Limbo& limbo, uint64_t epoch) {
    const Word now = word.load(std::memory_order_relaxed);
    if (on_heap(now)) {
      if (!at(now)->set(rank, tier, on)) rebuild(word, rank, tier, on, universe, limbo, epoch);
      return;
    }
    auto first = static_cast<uint32_t>(now), second = static_cast<uint32_t>(now >> 32);
    if (first != 0 && first >> 4 == rank) {
      first = flipped(first, tier);
    } else if (second != 0 && second >> 4 == rank) {
      second = flipped(second, tier);
    } else if (first == 0 || second == 0) {
      (first == 0 ? first : second) = rank << 4 | 1u << tier;
    } else {
      rebuild(word, rank, tier, on, universe, limbo, epoch);
      return;
    }
    word.store(packed(first, second), std::memory_order_release);
  }

  // Frees a heap form at once; for the index's destruction only.
  static void destroy(Word word) {
    if (on_heap(word)) TableMemory::release(at(word), at(word)->bytes());
  }

 private:
  static constexpr uint32_t MAX_ARRAY = 64;

  struct alignas(16) Heap {
    uint32_t planes;  // 0: array; else which tiers have a plane of bits
    uint32_t size;    // entries of the array, or 64-bit words of a plane
    uint32_t live;    // entries in use, or bits set; read by the writer only
    uint32_t floor;   // at this many, the next removal rebuilds, to find a smaller form

    std::atomic<uint32_t>* entries() { return reinterpret_cast<std::atomic<uint32_t>*>(this + 1); }
    std::atomic<uint64_t>* bits() { return reinterpret_cast<std::atomic<uint64_t>*>(this + 1); }
    const std::atomic<uint32_t>* entries() const { return const_cast<Heap*>(this)->entries(); }
    const std::atomic<uint64_t>* bits() const { return const_cast<Heap*>(this)->bits(); }

    static size_t bytes(uint32_t planes, uint32_t size) {
      return sizeof(Heap) + (planes == 0 ? 4ull * size : 8ull * size * std::popcount(planes));
    }
    size_t bytes() const { return bytes(planes, size); }

    uint32_t entry_of(uint32_t rank) const {
      for (uint32_t i = 0; i < size; ++i) {
        const uint32_t entry = entries()[i].load(std::memory_order_acquire);
        if (entry != 0 && entry >> 4 == rank) return entry;
      }
      return 0;
    }

    uint64_t column(uint32_t index, uint32_t tiers) const {
      if (index >= size) return 0;
      uint64_t ranks = 0;
      const std::atomic<uint64_t>* plane = bits() + index;
      for (uint32_t left = planes; left != 0; left &= left - 1, plane += size) {
        if ((left & -left & tiers) != 0) ranks |= plane->load(std::memory_order_acquire);
      }
      return ranks;
    }

    // Planes are read engine tier first: a block on its way down is stored below before it is
    // removed above, so it is never missed in between.
    uint32_t bits_of(uint32_t rank) const {
      if (rank / 64 >= size) return 0;
      uint32_t tiers = 0;
      const std::atomic<uint64_t>* plane = bits() + rank / 64;
      for (uint32_t left = planes; left != 0; left &= left - 1, plane += size) {
        const uint64_t word = plane->load(std::memory_order_acquire);
        if ((word >> rank % 64 & 1) != 0) tiers |= left & -left;
      }
      return tiers;
    }

    template <typename F>
    void for_each(F&& visit) const {
      if (planes == 0) {
        for (uint32_t i = 0; i < size; ++i) {
          const uint32_t entry = entries()[i].load(std::memory_order_acquire);
          if (entry != 0) visit(entry >> 4, entry & 0xF);
        }
        return;
      }
      for (uint32_t i = 0; i < size; ++i) for_each_in_column(i, visit);
    }

    template <typename F>
    void for_each_in_column(uint32_t column, F&& visit) const {
      uint64_t words[TIERS];
      uint64_t any = 0;
      uint32_t count = 0;
      const std::atomic<uint64_t>* plane = bits() + column;
      for (uint32_t left = planes; left != 0; left &= left - 1, plane += size) {
        any |= words[count++] = plane->load(std::memory_order_acquire);
      }
      for (; any != 0; any &= any - 1) {
        const int bit = std::countr_zero(any);
        uint32_t tiers = 0, i = 0;
        for (uint32_t left = planes; left != 0; left &= left - 1, ++i) {
          if ((words[i] >> bit & 1) != 0) tiers |= left & -left;
        }
        visit(column * 64 + bit, tiers);
      }
    }

    // False if this form cannot, or should no longer, represent the result.
    bool set(uint32_t rank, uint32_t tier, bool on) {
      return planes == 0 ? set_entry(rank, tier) : set_bit(rank, tier, on);
    }

    bool set_entry(uint32_t rank, uint32_t tier) {
      std::atomic<uint32_t>* free = nullptr;
      for (uint32_t i = 0; i < size; ++i) {
        const uint32_t entry = entries()[i].load(std::memory_order_relaxed);
        if (entry == 0) {
          free = &entries()[i];
        } else if (entry >> 4 == rank) {
          const uint32_t next = flipped(entry, tier);
          if (next == 0 && live <= floor) return false;
          live -= next == 0;
          entries()[i].store(next, std::memory_order_release);
          return true;
        }
      }
      if (free == nullptr) return false;
      ++live;
      free->store(rank << 4 | 1u << tier, std::memory_order_release);
      return true;
    }

    bool set_bit(uint32_t rank, uint32_t tier, bool on) {
      if ((planes >> tier & 1) == 0 || rank / 64 >= size || (!on && live <= floor)) return false;
      std::atomic<uint64_t>* plane = bits() + rank / 64;
      for (uint32_t below = planes & ((1u << tier) - 1); below != 0; below &= below - 1) {
        plane += size;
      }
      live += on ? 1 : -1;
      const uint64_t word = plane->load(std::memory_order_relaxed);
      plane->store(word ^ 1ull << rank % 64, std::memory_order_release);
      return true;
    }
  };
  static_assert(sizeof(Heap) == 16);

  static Heap* at(Word word) { return reinterpret_cast<Heap*>(word); }
  static Word packed(uint32_t first, uint32_t second) {
    return first != 0 ? first | static_cast<Word>(second) << 32 : second;
  }
  // An entry with one tier more or less, or 0 when none is left.
  static uint32_t flipped(uint32_t entry, uint32_t tier) {
    entry ^= 1u << tier;
    return (entry & 0xF) != 0 ? entry : 0;
  }

  static void rebuild(std::atomic<Word>& word, uint32_t rank, uint32_t tier, bool on,
                      uint32_t universe, Limbo& limbo, uint64_t epoch) {
    const Word now = word.load(std::memory_order_relaxed);
    thread_local std::vector<uint32_t> kept;  // to reuse its memory
    std::vector<uint32_t>& entries = kept;    // whose place is looked up once
    entries.clear();
    for_each(now, [&](uint32_t other, uint32_t tiers) {
      if (other != rank) entries.push_back(other << 4 | tiers);
    });
    const uint32_t after = (tiers(now, rank) & ~(1u << tier)) | static_cast<uint32_t>(on) << tier;
    if (after != 0) entries.push_back(rank << 4 | after);
    word.store(build(entries, universe, limbo), std::memory_order_release);
    if (on_heap(now)) limbo.retire(at(now), at(now)->bytes(), epoch);
  }

  static Word build(const std::vector<uint32_t>& entries, uint32_t universe, Limbo& limbo) {
    if (entries.size() <= 2) {
      return packed(entries.empty() ? 0 : entries[0], entries.size() < 2 ? 0 : entries[1]);
    }
    uint32_t planes = 0;
    for (const uint32_t entry : entries) planes |= entry & 0xF;
    const auto slots = static_cast<uint32_t>(entries.size() + entries.size() / 2);
    const uint32_t words = universe / 64 + 1;
    const bool array = entries.size() <= MAX_ARRAY && 4 * slots < 8 * words * std::popcount(planes);
    // Room for more ranks, so that the set is not built anew for each column of them.
    return reinterpret_cast<Word>(array ? build_array(entries, slots, limbo)
                                        : build_bits(entries, planes, words + words / 4, limbo));
  }

  static Heap* build_array(const std::vector<uint32_t>& entries, uint32_t slots, Limbo& limbo) {
    const auto live = static_cast<uint32_t>(entries.size());
    Heap* heap = new (limbo.allocate(Heap::bytes(0, slots))) Heap{0, slots, live, 1};
    for (uint32_t i = 0; i < slots; ++i) {
      new (&heap->entries()[i]) std::atomic<uint32_t>(i < live ? entries[i] : 0);
    }
    return heap;
  }

  static Heap* build_bits(const std::vector<uint32_t>& entries, uint32_t planes, uint32_t words,
                          Limbo& limbo) {
    const uint32_t total = words * std::popcount(planes);
    Heap* heap = new (limbo.allocate(Heap::bytes(planes, words))) Heap{planes, words, 0, 0};
    heap->floor = std::clamp(total / 2, 1u, MAX_ARRAY);  // below that an array is smaller
    for (uint32_t i = 0; i < total; ++i) new (&heap->bits()[i]) std::atomic<uint64_t>(0);
    for (const uint32_t entry : entries) {
      for (uint32_t left = entry & 0xF; left != 0; left &= left - 1) {
        heap->set_bit(entry >> 4, std::countr_zero(left), true);
      }
    }
    return heap;
  }
};

}  // namespace kvmesh
