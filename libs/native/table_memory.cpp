#include "table_memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>
#include <tuple>

namespace kvmesh {

namespace {

constexpr size_t MEDIUM = 1 << 10;
constexpr size_t LARGE = 1 << 20;
constexpr size_t PAGE = 64 << 10;  // the largest of any processor
constexpr size_t HUGE_PAGE = 2 << 20;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

// New memory that begins with a huge page.
char* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<char*>(memory);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) & (HUGE_PAGE - 1);
  if (before != 0) munmap(begin, before);
  munmap(begin + before + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // refused where there are none: then normal pages
#endif
  return begin + before;
}

}  // namespace

void* TableMemory::allocate(size_t bytes, size_t alignment) {
  if (bytes >= LARGE) return map(rounded(bytes, PAGE));
  if (bytes >= MEDIUM) return shared().take(rounded(bytes, ALIGNMENT));
  void* const memory = std::aligned_alloc(alignment, rounded(bytes, alignment));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void TableMemory::release(void* memory, size_t bytes) {
  if (bytes >= LARGE) {
    munmap(memory, rounded(bytes, PAGE));
  } else if (bytes >= MEDIUM) {
    shared().give(static_cast<char*>(memory), rounded(bytes, ALIGNMENT));
  } else {
    std::free(memory);
  }
}

TableMemory& TableMemory::shared() {
  static TableMemory& memory = *new TableMemory;  // never destroyed: tables may be static, too
  return memory;
}

// The smallest free range that is large enough.
void* TableMemory::take(size_t bytes) {
  const std::lock_guard guard(mutex_);
  const auto found = by_size_.lower_bound({bytes, nullptr});
  size_t left = HUGE_PAGE;
  char* at;
  if (found == by_size_.end()) {
    at = map(HUGE_PAGE);
  } else {
    std::tie(left, at) = *found;
    forget(free_.find(at));
  }
  if (left > bytes) {
    free_.emplace(at + bytes, left - bytes);
    by_size_.emplace(left - bytes, at + bytes);
  }
  return at;
}

void TableMemory::give(char* at, size_t bytes) {
  const std::lock_guard guard(mutex_);
  auto after = free_.lower_bound(at);
  if (after != free_.end() && after->first == at + bytes) {
    bytes += after->second;
    forget(after++);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == at) {
      at = before->first;
      bytes += before->second;
      forget(before);
    }
  }
  free_.emplace(at, bytes);
  by_size_.emplace(bytes, at);
}

void TableMemory::forget(std::map<char*, size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace kvmesh
