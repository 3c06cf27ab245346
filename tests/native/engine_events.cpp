// Random KV events of an engine, meant to run under a sanitizer: `make sanitize`. The counts must be
// those of the blocks that a dump has, and bytes of any kind must be a column or an error.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "engine_blocks.hpp"
#include "msgpack_columns.hpp"

using namespace kvmesh;

namespace {

constexpr size_t ROUNDS = 20'000, NAMES = 300, RECENT = 40;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

struct Engine {
  std::mt19937_64 random{7};
  EngineBlocks blocks{RECENT, true};

  uint64_t below(uint64_t limit) { return random() % limit; }
  Names chain() {
    Names names(1 + below(20));
    const uint64_t first = below(NAMES);
    for (size_t i = 0; i < names.size(); ++i) names[i] = (first + i) % NAMES;
    return names;
  }
  void store(uint32_t tier) {
    const Names names = chain();
    Names local(names.size());
    for (uint64_t& hash : local) hash = below(3);
    const uint64_t parent = (names[0] + NAMES - 1) % NAMES;
    const std::optional<Position> before = blocks.position(parent);
    if (before && below(4) != 0) {
      blocks.store(tier, names, parent, before->sequence, local);
    } else {
      blocks.store(tier, names, std::nullopt, below(3), local);
    }
  }
  void hold(uint32_t tier) {
    Names names = chain();
    std::erase_if(names, [&](uint64_t name) { return !blocks.position(name); });
    blocks.hold(tier, names, below(2) != 0);
  }
  void release(uint32_t tier) {
    Names gone, missing;
    blocks.release(tier, chain(), gone, missing);
  }
  void step() {
    const auto tier = static_cast<uint32_t>(below(TIERS));
    const uint64_t kind = below(100);
    if (kind < 45) {
      store(tier);
    } else if (kind < 60) {
      hold(tier);
    } else if (kind < 98) {
      release(tier);
    } else if (kind == 98) {
      blocks.clear(tier);
    } else {
      blocks.forget();
    }
  }
  void check() const {
    const auto tiers = blocks.dump();
    for (uint32_t tier = 0; tier < TIERS; ++tier) {
      size_t count = 0;
      for (const Run& run : tiers[tier]) {
        count += run.engine.size();
        require(run.engine.size() == run.local.size(), "a local hash for each block");
        for (const uint64_t name : run.engine) require(blocks.copies(tier, name) != 0, "a copy");
      }
      require(count == blocks.held(tier), "the blocks of a tier");
    }
  }
};

void read_any_bytes(std::mt19937_64& random) {
  std::vector<uint8_t> bytes(random() % 64);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  if (!bytes.empty()) bytes[0] = static_cast<uint8_t>(0x90 | (bytes[0] & 0x0F));
  TokenColumn column(bytes.data(), bytes.size());
  std::vector<uint8_t> out(4 * column.count());
  column.read(out.data());
  Names hashes;
  const bool malformed = read_hashes(bytes.data(), bytes.size(), hashes) != nullptr;
  require(malformed || !bytes.empty(), "an array");
}

}  // namespace

int main() {
  Engine engine;
  for (size_t round = 0; round < ROUNDS; ++round) {
    engine.step();
    if (round % 50 == 0) engine.check();
    read_any_bytes(engine.random);
  }
  engine.check();
  std::puts("ok");
}
