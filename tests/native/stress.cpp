// Readers against writers, meant to run under ThreadSanitizer or AddressSanitizer: `make sanitize`.
//
// Rank 0 never changes, so every answer about it must be exact. The ranks from 1 on belong to one
// writer each, which stores, removes in any order, clears and restores; after each round, with its
// own rank quiet, the writer checks that its own row is exact too.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "index.hpp"
#include "xxh3.hpp"

using namespace kvmesh;

namespace {

constexpr size_t DEPTH = 200;
constexpr uint32_t WRITERS = 3, READERS = 2;

using Words = std::vector<uint64_t>;

Hashes view(const Words& words, size_t from = 0, size_t to = SIZE_MAX) {
  const Hashes all{reinterpret_cast<const uint8_t*>(words.data()), words.size()};
  return all.slice(from, std::min(to, words.size()) - from);
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

uint32_t depth_of(const std::vector<Match>& rows, uint32_t rank) {
  uint32_t depth = 0, seen = 0;
  for (const Match& row : rows) {
    if (row.rank != rank) continue;
    ++seen;
    for (const uint32_t added : row.added) depth += added;
  }
  require(seen <= 1, "a rank has one row");
  return depth;
}

// A shared prefix and then a branch of one's own.
Words locals(uint32_t branch, size_t shared) {
  Words words(DEPTH);
  for (size_t i = 0; i < DEPTH; ++i) words[i] = i < shared ? i : branch * 1000 + i;
  return words;
}

Words chained(const Words& local) {
  Words sequence;
  uint64_t previous = 0;
  for (const uint64_t hash : local) sequence.push_back(previous = BLOCK_HASH.pair(previous, hash));
  return sequence;
}

void write(Index& index, uint32_t rank, unsigned rounds) {
  std::mt19937 random(rank);
  std::vector<Match> rows;
  for (unsigned round = 0; round < rounds; ++round) {
    const Words local = locals(rank + round % 3 * 50, random() % DEPTH), sequence = chained(local);
    const uint32_t tier = random() % TIERS;
    require(index.store(rank, tier, std::nullopt, view(sequence), view(local), 0), "a root stores");
    rows.clear();
    index.find(view(sequence), rows);
    require(depth_of(rows, rank) == DEPTH, "what a rank stored is found");
    const size_t hole = random() % DEPTH;
    index.remove(rank, tier, view(sequence, hole, hole + 1 + random() % 5));
    rows.clear();
    index.find(view(sequence), rows);
    require(depth_of(rows, rank) == hole, "a removed block ends the prefix");
    if (round % 4 == 0) {
      const auto chains = index.dump(rank);
      index.clear(rank, std::nullopt);
      for (const Chain& chain : chains) {
        const Hashes engine = view(chain.engine), part = view(chain.local);
        if (chain.root) {
          index.store(rank, chain.tier, std::nullopt, engine, part, chain.previous);
        } else {
          index.attach(rank, chain.tier, chain.previous, engine, part);
        }
      }
    }
    rows.clear();
    index.find(view(sequence), rows);
    require(depth_of(rows, rank) == hole, "a dump restores");
    index.clear(rank, std::nullopt);
  }
}

void read(const Index& index, const Words& stable, const std::atomic<bool>& stop, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Match> rows;
  std::vector<size_t> ends;
  while (!stop.load(std::memory_order_relaxed)) {
    const size_t length = 1 + random() % DEPTH;
    rows.clear();
    index.find(view(stable, 0, length), rows);
    require(depth_of(rows, 0) == length, "an unchanged rank is answered exactly");
    for (const Match& row : rows) require(row.rank <= WRITERS, "only known ranks are named");
    const Words other = chained(locals(1 + random() % WRITERS, random() % DEPTH));
    rows.clear();
    ends.clear();
    index.find_batch({view(stable), view(other), view(stable, 0, length)}, rows, ends);
    const std::vector<Match> last(rows.begin() + ends[1], rows.end());
    require(depth_of(last, 0) == length, "a batch answers as single queries do");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  Index index;
  const Words local = locals(0, DEPTH), stable = chained(local);
  index.store(0, 0, std::nullopt, view(stable), view(local), 0);
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers, writers;
  for (unsigned i = 0; i < READERS; ++i) {
    readers.emplace_back([&, i] { read(index, stable, stop, i); });
  }
  for (uint32_t rank = 1; rank <= WRITERS; ++rank) {
    writers.emplace_back([&, rank] { write(index, rank, rounds); });
  }
  for (auto& writer : writers) writer.join();
  stop.store(true);
  for (auto& reader : readers) reader.join();
  index.clear(0, std::nullopt);
  const Stats stats = index.stats();
  require(stats.blocks == 0 && stats.entries == 0, "nothing is left");
  std::puts("ok");
}
