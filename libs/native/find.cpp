// Queries: longest prefixes by jumping (index.hpp, I1-I3 and I7), 64 ranks at a time.
#include <algorithm>
#include <bit>
#include <utility>

#include "index.hpp"

namespace kvmesh {

namespace {

constexpr size_t PINNED = 64;  // prompts of a batch that share one pin

// Some of the ranks index * 64 .. index * 64 + 63.
struct Column {
  uint32_t index;
  uint64_t ranks;

  template <typename F>
  void for_each(F&& visit) const {
    for (uint64_t left = ranks; left != 0; left &= left - 1) {
      visit(index * 64 + std::countr_zero(left));
    }
  }
};

// A rank with broken links, and the lowest tier in which it holds all blocks so far.
struct Walker {
  uint32_t rank, low;
};

// Buffers reused by the queries of one thread.
struct Scratch {
  std::vector<Column> first;  // holders of the first block
  std::vector<Column> open;   // a stack: ranks whose prefix ends between two positions
  std::vector<Walker> walkers;
  std::vector<std::array<uint32_t, TIERS>> depths;  // by rank: blocks matched by tiers 0..t
  std::vector<uint64_t> bits = std::vector<uint64_t>(MAX_RANKS / 64);  // zeros between uses
};

thread_local Scratch scratch;

// The tiers 0..t as a mask.
constexpr uint32_t upto(uint32_t tier) { return (2u << tier) - 1; }

void scatter(RankSet::Word holders, uint32_t tiers) {
  RankSet::for_each(holders, [&](uint32_t rank, uint32_t held) {
    if ((held & tiers) != 0) scratch.bits[rank / 64] |= 1ull << rank % 64;
  });
}
void wipe(RankSet::Word holders) {
  RankSet::for_each(holders, [](uint32_t rank, uint32_t) { scratch.bits[rank / 64] = 0; });
}

// Appends the ranks that hold a block in one of `tiers`.
void gather(RankSet::Word holders, uint32_t tiers, std::vector<Column>& out) {
  if (RankSet::is_bits(holders)) {
    for (uint32_t i = 0; i < RankSet::columns(holders); ++i) {
      if (const uint64_t ranks = RankSet::column(holders, i, tiers); ranks != 0) {
        out.push_back({i, ranks});
      }
    }
    return;
  }
  scatter(holders, tiers);
  RankSet::for_each(holders, [&](uint32_t rank, uint32_t) {
    const uint64_t ranks = std::exchange(scratch.bits[rank / 64], 0);
    if (ranks != 0) out.push_back({rank / 64, ranks});
  });
}

}  // namespace

class Index::Search {
 public:
  Search(const Index& index, Hashes prompt) : index_(index), prompt_(prompt) {}

  void run(std::vector<Match>& out) {
    scratch.first.clear();
    if (prompt_.count == 0) return;
    const RankSet::Word first = index_.ranks_at(prompt_[0]);
    gather(first, upto(TIERS - 1), scratch.first);
    if (scratch.first.empty()) return;
    reset_depths();
    const bool broken = index_.broken_.load(std::memory_order_acquire) != 0;
    if (broken) walk(first);
    const uint32_t used = index_.tiers_used_.load(std::memory_order_relaxed);
    for (uint32_t tier = 0; tier < TIERS; ++tier) {
      if ((used >> tier & 1) == 0) continue;
      scratch.open.clear();
      gather(first, upto(tier), scratch.open);
      if (broken) leave_out_walkers();
      jump(tier);
    }
    report(used, out);
  }

 private:
  static void reset_depths() {
    uint32_t columns = 0;
    for (const Column& column : scratch.first) columns = std::max(columns, column.index + 1);
    if (scratch.depths.size() < columns * 64) scratch.depths.resize(columns * 64);
    for (const Column& column : scratch.first) {
      column.for_each([](uint32_t rank) { scratch.depths[rank] = {}; });
    }
  }

  // A concurrent change may leave a tier's depth below that of the tier before: it then adds 0.
  static void report(uint32_t used, std::vector<Match>& out) {
    for (const Column& column : scratch.first) {
      column.for_each([&](uint32_t rank) {
        Match match{rank, {}};
        uint32_t depth = 0;
        for (uint32_t tier = 0; tier < TIERS; ++tier) {
          if ((used >> tier & 1) == 0) continue;
          const uint32_t reached = std::max(depth, scratch.depths[rank][tier]);
          match.added[tier] = reached - depth;
          depth = reached;
        }
        if (depth != 0) out.push_back(match);
      });
    }
  }

  static void settle(uint32_t tier, Column column, size_t depth) {
    column.for_each([&](uint32_t rank) {
      if (rank < scratch.depths.size()) scratch.depths[rank][tier] = static_cast<uint32_t>(depth);
    });
  }

  // Calls visit(column, those of its ranks that hold the block in tiers 0..tier) for open[from..).
  template <typename F>
  void read(size_t position, uint32_t tier, size_t from, F&& visit) {
    const RankSet::Word holders = index_.ranks_at(prompt_[position]);
    const size_t to = scratch.open.size();
    if (RankSet::is_bits(holders)) {
      for (size_t i = from; i < to; ++i) {
        const Column column = scratch.open[i];
        visit(column, column.ranks & RankSet::column(holders, column.index, upto(tier)));
      }
      return;
    }
    scatter(holders, upto(tier));
    for (size_t i = from; i < to; ++i) {
      const Column column = scratch.open[i];
      visit(column, column.ranks & scratch.bits[column.index]);
    }
    wipe(holders);
  }

  void jump(uint32_t tier) {
    const size_t last = prompt_.count - 1;
    size_t left = 0;
    read(last, tier, 0, [&](Column column, uint64_t held) {
      settle(tier, {column.index, held}, last + 1);
      column.ranks &= ~held;
      if (column.ranks != 0) scratch.open[left++] = column;
    });
    scratch.open.resize(left);
    if (last == 0) return;
    split(tier, 0, last, 0);
  }

  // Settles open[from..), which hold the block at `low` but not the one at `high`, and drops them.
  void split(uint32_t tier, size_t low, size_t high, size_t from) {
    const size_t to = scratch.open.size();
    if (from == to) return;
    if (high - low == 1) {
      for (size_t i = from; i < to; ++i) settle(tier, scratch.open[i], high);
      scratch.open.resize(from);
      return;
    }
    const size_t middle = low + (high - low) / 2;
    size_t left = from;
    read(middle, tier, from, [&](Column column, uint64_t held) {
      const uint64_t lost = column.ranks & ~held;
      if (lost != 0) scratch.open[left++] = {column.index, lost};
      if (held != 0) scratch.open.push_back({column.index, held});
    });
    split(tier, middle, high, to);
    scratch.open.resize(left);
    split(tier, low, middle, from);
  }

  // Ranks with broken links, one position after the other.
  void walk(RankSet::Word first) {
    auto& walkers = scratch.walkers;
    walkers.clear();
    for (Column& column : scratch.first) {
      column.for_each([&](uint32_t rank) {
        if (index_.is_broken(rank)) walkers.push_back({rank, lowest(RankSet::tiers(first, rank))});
      });
    }
    size_t left = walkers.size(), position = 1;
    for (; left != 0 && position < prompt_.count; ++position) {
      const RankSet::Word holders = index_.ranks_at(prompt_[position]);
      for (size_t i = 0; i < left;) {
        Walker& walker = walkers[i];
        const uint32_t at = std::max(walker.low, lowest(RankSet::tiers(holders, walker.rank)));
        end(walker, at, position);
        if (at != NO_TIER) {
          ++i;
        } else {
          std::swap(walker, walkers[--left]);
        }
      }
    }
    for (size_t i = 0; i < left; ++i) end(walkers[i], TIERS, position);
  }

  static void end(Walker& walker, uint32_t at, size_t position) {
    for (; walker.low < at; ++walker.low) {
      scratch.depths[walker.rank][walker.low] = static_cast<uint32_t>(position);
    }
  }

  static void leave_out_walkers() {
    for (const Walker& walker : scratch.walkers) {
      scratch.bits[walker.rank / 64] |= 1ull << walker.rank % 64;
    }
    size_t left = 0;
    for (Column column : scratch.open) {
      column.ranks &= ~scratch.bits[column.index];
      if (column.ranks != 0) scratch.open[left++] = column;
    }
    scratch.open.resize(left);
    for (const Walker& walker : scratch.walkers) scratch.bits[walker.rank / 64] = 0;
  }

  const Index& index_;
  const Hashes prompt_;
};

RankSet::Word Index::ranks_at(uint64_t sequence) const {
  const Key key(sequence);
  const NodeId id = table_of(key).find(nodes(), key);
  return id != 0 ? node(id).ranks.load(std::memory_order_acquire) : RankSet::EMPTY;
}

void Index::find(Hashes sequence, std::vector<Match>& out) const {
  const Epochs::Pin pin(epochs_);
  Search(*this, sequence).run(out);
}

// Every query reads the first position and the last.
void Index::prefetch_slots(Hashes prompt) const {
  if (prompt.count == 0) return;
  for (const uint64_t sequence : {prompt[0], prompt[prompt.count - 1]}) {
    table_of(sequence).prefetch(sequence);
  }
}
void Index::prefetch_nodes(Hashes prompt) const {
  if (prompt.count == 0) return;
  for (const uint64_t sequence : {prompt[0], prompt[prompt.count - 1]}) {
    table_of(sequence).prefetch_node(nodes(), sequence);
  }
}

void Index::find_batch(const std::vector<Hashes>& prompts, std::vector<Match>& out,
                       std::vector<size_t>& ends) const {
  for (size_t at = 0; at < prompts.size(); at += PINNED) {
    const Epochs::Pin pin(epochs_);
    const size_t end = std::min(prompts.size(), at + PINNED);
    for (size_t i = at; i < end; ++i) {
      if (i + 2 < end) prefetch_slots(prompts[i + 2]);
      if (i + 1 < end) prefetch_nodes(prompts[i + 1]);
      Search(*this, prompts[i]).run(out);
      ends.push_back(out.size());
    }
  }
}

}  // namespace kvmesh
