// How many buckets a look-up passes, for keys that somebody chose so that they would share a home
// if keys were scattered by their upper bits, or by a constant known to all, and for random keys.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "node_table.hpp"

namespace kvmesh {

class Probes {
 public:
  explicit Probes(const std::vector<uint64_t>& keys) : keys_(keys) {}

  double of_map() const {
    FlatMap map;
    for (const uint64_t key : keys_) map.insert(key, 1);
    size_t passed = 0;
    for (size_t at = 0; at < map.count_; ++at) passed += map.buckets_[at].passed;
    return mean(passed);
  }

  // All in one table, as if they had one shard, which is the worst that keys can do.
  double of_table() const {
    const uint64_t count = 4 << 10;
    auto* const memory = std::aligned_alloc(Table::ALIGNMENT, count * sizeof(Group));
    const Table table(Table::word(new (memory) Group[count], count));
    for (const uint64_t key : keys_) table.add(key, 1);
    size_t passed = 0;
    for (const Group& group : table) passed += group.high.load() >> 32;
    std::free(memory);
    return mean(passed);
  }

  // The share of the keys that lie in the fullest shard.
  double of_shards() const {
    std::vector<size_t> sizes(Shard::COUNT);
    for (const uint64_t key : keys_) ++sizes[Key(key).shard()];
    return mean(*std::ranges::max_element(sizes));
  }

 private:
  double mean(size_t sum) const { return double(sum) / double(keys_.size()); }

  const std::vector<uint64_t>& keys_;
};

}  // namespace kvmesh

int main() {
  constexpr uint64_t COUNT = 40'000, INVERSE = 0xF1DE83E19937733D;  // of 0x9E3779B97F4A7C15
  std::vector<uint64_t> random, upper, multiplied, lower;
  std::mt19937_64 source(1);
  for (uint64_t i = 0; i < COUNT; ++i) {
    random.push_back(source());
    upper.push_back(0xABCDEF0123ull << 24 | i);
    multiplied.push_back((0xABCDEF0123ull << 24 | i) * INVERSE);
    lower.push_back(i << 24 | 0xABCDEF);
  }
  const auto print = [](const char* name, const std::vector<uint64_t>& keys) {
    const kvmesh::Probes probes(keys);
    std::printf("%s %f %f %f\n", name, probes.of_map(), probes.of_table(), probes.of_shards());
  };
  print("random", random);
  print("upper", upper);
  print("multiplied", multiplied);
  print("lower", lower);
}
