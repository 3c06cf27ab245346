// The limit: a bare open-addressing table of 64-bit keys, half full. Prints CPU nanoseconds for one
// insertion and one look-up at the given number of keys.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <vector>

int main(int, char** argv) {
  const size_t count = std::atoll(argv[1]);
  int bits = 1;
  while ((size_t{1} << bits) < 2 * count) ++bits;
  std::mt19937_64 random(1);
  std::vector<uint64_t> keys(count), table(size_t{1} << bits);
  for (auto& key : keys) key = random() | 1;
  const size_t mask = table.size() - 1;
  const auto probe = [&](uint64_t key) {
    size_t at = key >> (64 - bits);
    while (table[at] != 0 && table[at] != key) at = (at + 1) & mask;
    return at;
  };
  const std::clock_t start = std::clock();
  for (const uint64_t key : keys) table[probe(key)] = key;
  const std::clock_t filled = std::clock();
  size_t sum = 0;
  for (const uint64_t key : keys) sum += probe(key);
  const std::clock_t found = std::clock();
  const auto each = [&](std::clock_t from, std::clock_t to) {
    return 1e9 * static_cast<double>(to - from) / CLOCKS_PER_SEC / count;
  };
  std::printf("%f %f %zu\n", each(start, filled), each(filled, found), sum & 1);
}
