// Memory of tables: in huge pages where the system has them, so that a table that is filled for the
// first time costs few page faults, and look-ups little translation of addresses.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace kvmesh {

// Small pieces are the heap's, medium ones parts of huge pages, which all tables share, and large
// ones mappings of their own.
class TableMemory {
 public:
  // The caller passes the memory to `release`. `alignment` is at most ALIGNMENT.
  static void* allocate(size_t bytes, size_t alignment);
  static void release(void* memory, size_t bytes);

  struct Release {
    size_t bytes;
    void operator()(void* memory) const { release(memory, bytes); }
  };
  template <typename T>
  using Array = std::unique_ptr<T[], Release>;
  // An array of `count` zeroed elements.
  template <typename T>
  static Array<T> array(size_t count) {
    const size_t bytes = count * sizeof(T);
    return {static_cast<T*>(std::memset(allocate(bytes, alignof(T)), 0, bytes)), Release{bytes}};
  }

 private:
  static constexpr size_t ALIGNMENT = 128;

  void* take(size_t bytes);
  void give(char* at, size_t bytes);
  void forget(std::map<char*, size_t>::iterator range);

  static TableMemory& shared();

  std::mutex mutex_;
  std::map<char*, size_t> free_;               // sizes of the free ranges, none beside another
  std::set<std::pair<size_t, char*>> by_size_;  // the same
};

}  // namespace kvmesh
