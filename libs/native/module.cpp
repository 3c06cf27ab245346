// Python bindings of the native core: argument checks, buffers in, bytes out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <deque>

#include "buffers.hpp"
#include "gather.hpp"
#include "index.hpp"
#include "watchdog.hpp"
#include "xxh3.hpp"

namespace nb = nanobind;
using namespace kvmesh;

void bind_engine_events(nb::module_& m);
void bind_returns(nb::module_& m);
void bind_words(nb::module_& m);

namespace {

nb::bytes uninitialized(size_t size) {
  PyObject* raw = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (raw == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(raw);
}

uint8_t* writable(nb::bytes& bytes) {
  return reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes.ptr()));
}

void write_hash(uint8_t* words, size_t i, uint64_t hash) {
  std::memcpy(words + 8 * i, &hash, sizeof hash);
}

// Releasing the GIL costs more than hashing less than this.
constexpr size_t LONG = 16 << 10;

uint64_t xxh3(nb::handle data, uint64_t seed) {
  const View view(data);
  const Xxh3 hash(seed);
  if (view.size() < LONG) return hash(view.data(), view.size());
  const nb::gil_scoped_release released;
  return hash(view.data(), view.size());
}

std::pair<nb::bytes, nb::bytes> block_hashes(nb::handle tokens, size_t block_size,
                                             uint64_t previous) {
  const View view(tokens);
  if (block_size == 0) throw nb::value_error("block_size must be positive");
  if (view.size() % 4 != 0) throw nb::value_error("tokens must be whole 32-bit words");
  const size_t count = view.size() / 4 / block_size;
  nb::bytes local = uninitialized(8 * count), sequence = uninitialized(8 * count);
  uint8_t *to_local = writable(local), *to_sequence = writable(sequence);
  const nb::gil_scoped_release released;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = BLOCK_HASH(view.data() + 4 * block_size * i, 4 * block_size);
    previous = BLOCK_HASH.pair(previous, hash);
    write_hash(to_local, i, hash);
    write_hash(to_sequence, i, previous);
  }
  return {local, sequence};
}

nb::bytes sequence_hashes(nb::handle local, uint64_t previous) {
  const View view(local);
  const Hashes locals = hashes(view);
  nb::bytes sequence = uninitialized(view.size());
  uint8_t* out = writable(sequence);
  const nb::gil_scoped_release released;
  for (size_t i = 0; i < locals.count; ++i) {
    previous = BLOCK_HASH.pair(previous, locals[i]);
    write_hash(out, i, previous);
  }
  return sequence;
}

void check_rank(uint64_t rank) {
  if (rank >= MAX_RANKS) throw nb::value_error("rank is out of range");
}

// The arguments of a call that adds blocks, checked.
struct Blocks {
  Blocks(uint64_t rank, uint64_t tier, nb::handle engine, nb::handle local)
      : engine_view(engine), local_view(local) {
    check_rank(rank);
    check_tier(tier);
    if (this->engine().count != this->local().count) {
      throw nb::value_error("engine and local hashes differ in number");
    }
  }
  Hashes engine() const { return hashes(engine_view); }
  Hashes local() const { return hashes(local_view); }

  View engine_view, local_view;
};

bool store(Index& index, uint64_t rank, uint64_t tier, std::optional<uint64_t> parent,
           nb::handle engine, nb::handle local, uint64_t salt) {
  const Blocks blocks(rank, tier, engine, local);
  const nb::gil_scoped_release released;
  return index.store(rank, tier, parent, blocks.engine(), blocks.local(), salt);
}

void attach(Index& index, uint64_t rank, uint64_t tier, uint64_t previous, nb::handle engine,
            nb::handle local) {
  const Blocks blocks(rank, tier, engine, local);
  const nb::gil_scoped_release released;
  index.attach(rank, tier, previous, blocks.engine(), blocks.local());
}

// A dumped chain, to be added to a rank.
struct Segment {
  Segment(uint64_t rank, nb::tuple fields)
      : tier(nb::cast<uint64_t>(fields[0])),
        root(nb::cast<bool>(fields[1])),
        previous(nb::cast<uint64_t>(fields[2])),
        blocks(rank, tier, fields[3], fields[4]) {}

  uint64_t tier;
  bool root;
  uint64_t previous;
  Blocks blocks;
};

void load(Index& index, uint64_t rank, nb::list segments) {
  std::deque<Segment> chains;
  std::array<size_t, TIERS> counts{};
  for (nb::handle each : segments) {
    const Segment& chain = chains.emplace_back(rank, nb::cast<nb::tuple>(each));
    counts[chain.tier] += chain.blocks.engine().count;
  }
  const nb::gil_scoped_release released;
  for (uint32_t tier = 0; tier < TIERS; ++tier) {
    if (counts[tier] != 0) index.reserve(rank, tier, counts[tier]);
  }
  for (const auto& [tier, root, previous, blocks] : chains) {
    if (root) {
      index.store(rank, tier, std::nullopt, blocks.engine(), blocks.local(), previous);
    } else {
      index.attach(rank, tier, previous, blocks.engine(), blocks.local());
    }
  }
}

nb::bytes remove_blocks(Index& index, uint64_t rank, uint64_t tier, nb::handle engine) {
  check_rank(rank);
  check_tier(tier);
  const View view(engine);
  const Hashes names = hashes(view);
  std::vector<uint64_t> removed;
  {
    const nb::gil_scoped_release released;
    removed = index.remove(rank, tier, names);
  }
  return packed(removed);
}

size_t clear(Index& index, uint64_t rank, std::optional<uint64_t> tier) {
  check_rank(rank);
  check_tier(tier.value_or(0));
  const nb::gil_scoped_release released;
  return index.clear(rank, tier);
}

nb::bytes packed_rows(const Match* rows, size_t count) {
  return nb::bytes(reinterpret_cast<const char*>(rows), count * sizeof(Match));
}

// Matches of the query in progress; kept to reuse its memory.
thread_local std::vector<Match> matches;
thread_local std::vector<size_t> ends;

nb::bytes find(const Index& index, nb::handle sequence) {
  const View view(sequence);
  const Hashes prompt = hashes(view);
  matches.clear();
  {
    const nb::gil_scoped_release released;
    index.find(prompt, matches);
  }
  return packed_rows(matches.data(), matches.size());
}

nb::list find_batch(const Index& index, nb::list sequences) {
  std::deque<View> views;
  std::vector<Hashes> prompts;
  for (nb::handle sequence : sequences) prompts.push_back(hashes(views.emplace_back(sequence)));
  matches.clear();
  ends.clear();
  {
    const nb::gil_scoped_release released;
    index.find_batch(prompts, matches, ends);
  }
  nb::list found;
  size_t from = 0;
  for (const size_t end : ends) {
    found.append(packed_rows(matches.data() + from, end - from));
    from = end;
  }
  return found;
}

nb::object interface(const char* name) {
  return nb::module_::import_("kvmesh.index.interface").attr(name);
}

nb::list dump(const Index& index, uint64_t rank) {
  check_rank(rank);
  std::vector<Chain> chains;
  {
    const nb::gil_scoped_release released;
    chains = index.dump(rank);
  }
  const nb::object segment = interface("OverlapSegment");
  nb::list segments;
  for (const Chain& chain : chains) {
    segments.append(segment(chain.tier, chain.root, chain.previous, packed(chain.engine),
                            packed(chain.local)));
  }
  return segments;
}

nb::bytes ranks(const Index& index) {
  std::vector<Match> rows;
  {
    const nb::gil_scoped_release released;
    rows = index.ranks();
  }
  return packed_rows(rows.data(), rows.size());
}

nb::object stats(const Index& index) {
  Stats stats;
  {
    const nb::gil_scoped_release released;
    stats = index.stats();
  }
  return interface("IndexStats")(stats.blocks, stats.entries, stats.bytes);
}

template <typename T>
Numbers<T> numbers(const View& view) {
  return {view.data(), view.size() / sizeof(T)};
}

// Too short to be worth releasing the GIL.
double gather(nb::handle overlap, nb::handle loads, nb::handle slots, nb::handle columns,
              nb::handle node_of_slot, nb::handle group_of_node, nb::handle rows, nb::handle places,
              nb::handle predicted, nb::handle shared, double blocks, double block_size) {
  View to_overlap(overlap, PyBUF_WRITABLE), to_loads(loads, PyBUF_WRITABLE);
  const View candidates(slots), counted(columns), beside(node_of_slot), grouped(group_of_node),
      found(rows), named(places), expected(predicted), active(shared);
  const size_t count = candidates.size() / sizeof(int64_t);
  if (to_overlap.size() != TIERS * count * sizeof(double)) {
    throw nb::value_error("overlap must have TIERS numbers for each slot");
  }
  if (to_loads.size() != 3 * count * sizeof(double)) {
    throw nb::value_error("loads must have three numbers for each slot");
  }
  const Fleet fleet{numbers<double>(counted), active.size() / sizeof(double),
                    grouped.size() / sizeof(int64_t), numbers<int64_t>(beside),
                    numbers<int64_t>(grouped)};
  const Prompt prompt{numbers<std::array<uint32_t, 1 + TIERS>>(found), numbers<int64_t>(named),
                      numbers<double>(expected), numbers<double>(active), blocks, block_size};
  return Gathering(fleet, prompt)
      .gather(numbers<int64_t>(candidates), to_overlap.doubles(), to_loads.doubles());
}

}  // namespace

NB_MODULE(_native, m) {
  // An interpreter that ends keeps what module globals hold; that is no leak of the bindings.
  nb::set_leak_warnings(false);
  m.doc() = "Native core of kvmesh: block hashing, the prefix index, an engine's blocks, a router's view of a fleet, rates of return, and a watchdog.";
  m.def("xxh3", &xxh3, nb::arg("data"), nb::arg("seed") = 0);
  m.def("block_hashes", &block_hashes, nb::arg("tokens"), nb::arg("block_size"),
        nb::arg("previous") = 0);
  m.def("sequence_hashes", &sequence_hashes, nb::arg("local"), nb::arg("previous") = 0);
  m.def("gather", &gather, nb::arg("overlap"), nb::arg("loads"), nb::arg("slots"),
        nb::arg("columns"), nb::arg("node_of_slot"), nb::arg("group_of_node"), nb::arg("rows"),
        nb::arg("places"), nb::arg("predicted"), nb::arg("shared"), nb::arg("blocks"),
        nb::arg("block_size"));
  nb::class_<Index>(m, "NativePrefixIndex")
      .def(nb::init<>())
      .def("store", &store, nb::arg("rank"), nb::arg("tier"), nb::arg("parent").none(),
           nb::arg("engine"), nb::arg("local"), nb::arg("salt") = 0)
      .def("attach", &attach, nb::arg("rank"), nb::arg("tier"), nb::arg("previous"),
           nb::arg("engine"), nb::arg("local"))
      .def("load", &load, nb::arg("rank"), nb::arg("segments"))
      .def("remove", &remove_blocks, nb::arg("rank"), nb::arg("tier"), nb::arg("engine"))
      .def("clear", &clear, nb::arg("rank"), nb::arg("tier") = nb::none())
      .def("find", &find, nb::arg("sequence"))
      .def("find_batch", &find_batch, nb::arg("sequences"))
      .def("dump", &dump, nb::arg("rank"))
      .def("ranks", &ranks)
      .def("stats", &stats);
  nb::class_<Watchdog>(m, "Watchdog")
      .def(nb::init<double, unsigned>(), nb::arg("step"), nb::arg("looks"))
      .def("tick", &Watchdog::tick)
      .def("stop", &Watchdog::stop);
  bind_engine_events(m);
  bind_returns(m);
  bind_words(m);
}
