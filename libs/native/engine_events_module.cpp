// Python bindings of what an adapter does for each block of an engine's KV events.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "buffers.hpp"
#include "engine_blocks.hpp"
#include "msgpack_columns.hpp"

using namespace kvmesh;

namespace {

nb::object as_list(const std::vector<uint64_t>& values) {
  nb::object made = nb::steal(PyList_New(static_cast<Py_ssize_t>(values.size())));
  if (!made.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* const value = PyLong_FromUnsignedLongLong(values[i]);
    if (value == nullptr) throw nb::python_error();
    PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return made;
}

// The result of a function that raises ValueError, without a C++ exception.
nb::object invalid(const char* fault) {
  PyErr_SetString(PyExc_ValueError, fault);
  return {};
}

nb::object packed_tokens(nb::handle raw) {
  const View view(raw);
  TokenColumn column(view.data(), view.size());
  const auto size = static_cast<Py_ssize_t>(4 * column.count());
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, size));
  if (!bytes.is_valid()) throw nb::python_error();
  column.read(reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes.ptr())));
  return column.fault() == nullptr ? bytes : invalid(column.fault());
}

nb::object folded_hashes(nb::handle raw) {
  const View view(raw);
  Names hashes;
  const char* const fault = read_hashes(view.data(), view.size(), hashes);
  return fault == nullptr ? as_list(hashes) : invalid(fault);
}

Names names_of(nb::list list) {
  Names names(nb::len(list));
  for (size_t i = 0; i < names.size(); ++i) {
    names[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list.ptr(), i));
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return names;
}

// The local hashes of so many blocks, which may have further keys (an empty sequence: none has).
Names local_hashes(nb::handle tokens, size_t count, nb::tuple extras) {
  const View view(tokens);
  const size_t size = view.size() / count;
  if (size * count != view.size() || size == 0 || size % 4 != 0) {
    throw nb::value_error("every block must have as many tokens");
  }
  Names local(count);
  for (size_t i = 0; i < count; ++i) local[i] = BLOCK_HASH(view.data() + size * i, size);
  if (nb::len(extras) == 0) return local;
  if (nb::len(extras) != count) throw nb::value_error("extras must be one for each block");
  for (size_t i = 0; i < count; ++i) local[i] ^= nb::cast<uint64_t>(extras[i]);
  return local;
}

// A run as the fields of `Stored` after the tier: parent, engine, local, salt and previous.
nb::object as_tuple(const Run& run) {
  const nb::object none = nb::none();
  const nb::object parent = run.parent ? nb::int_(*run.parent) : none;
  const bool is_root = !run.parent && !run.attached;
  return nb::make_tuple(parent, packed(run.engine), packed(run.local),
                        nb::int_(is_root ? run.previous : 0),
                        run.attached ? nb::object(nb::int_(run.previous)) : none);
}

nb::list as_tuples(const std::vector<Run>& runs) {
  nb::list made;
  for (const Run& run : runs) made.append(as_tuple(run));
  return made;
}

nb::object position(const EngineBlocks& blocks, uint64_t name) {
  const std::optional<Position> found = blocks.position(name);
  if (!found) return nb::none();
  return nb::make_tuple(found->previous, found->sequence);
}

nb::list hold(EngineBlocks& blocks, uint64_t tier, nb::list list, bool again) {
  check_tier(tier);
  const Names names = names_of(list);
  if (blocks.known(names) != names.size()) throw nb::value_error("a block has no position");
  return as_tuples(blocks.hold(tier, names, again));
}

nb::list as_list(const Moves& moved) {
  nb::list tiers;
  for (size_t tier = 0; tier < TIERS; ++tier) {
    if (moved.names[tier].empty()) continue;
    tiers.append(nb::make_tuple(tier, packed(moved.names[tier]), as_tuples(moved.runs[tier])));
  }
  return tiers;
}

nb::object store(EngineBlocks& blocks, uint64_t tier, nb::list list, std::optional<uint64_t> parent,
                 uint64_t salt, nb::handle tokens, nb::tuple extras) {
  check_tier(tier);
  const Names names = names_of(list);
  if (names.empty()) throw nb::value_error("there are no blocks");
  if (parent) {
    const std::optional<Position> before = blocks.position(*parent);
    if (!before) return nb::none();
    salt = before->sequence;
  }
  const Change made =
      blocks.store(tier, names, parent, salt, local_hashes(tokens, names.size(), extras));
  return nb::make_tuple(as_tuples(made.added), as_list(made.moved));
}

nb::tuple release(EngineBlocks& blocks, uint64_t tier, nb::list list) {
  check_tier(tier);
  Names gone, missing;
  blocks.release(tier, names_of(list), gone, missing);
  return nb::make_tuple(packed(gone), as_list(missing));
}

nb::list dump(const EngineBlocks& blocks) {
  nb::list tiers;
  for (const std::vector<Run>& runs : blocks.dump()) tiers.append(as_tuples(runs));
  return tiers;
}

}  // namespace

void bind_engine_events(nb::module_& m) {
  m.def("packed_tokens", &packed_tokens, nb::arg("raw"));
  m.def("folded_hashes", &folded_hashes, nb::arg("raw"));
  nb::class_<EngineBlocks>(m, "EngineBlocks")
      .def(nb::init<size_t, bool>(), nb::arg("recent"), nb::arg("counted"))
      .def(
          "held",
          [](const EngineBlocks& blocks, uint64_t tier) {
            check_tier(tier);
            return blocks.held(tier);
          },
          nb::arg("tier"))
      .def("kept",
           [](const EngineBlocks& blocks) {
             nb::list kept;
             for (size_t tier = 0; tier < TIERS; ++tier) kept.append(blocks.kept(tier));
             return kept;
           })
      .def(
          "copies",
          [](const EngineBlocks& blocks, uint64_t tier, uint64_t name) {
            check_tier(tier);
            return blocks.copies(tier, name);
          },
          nb::arg("tier"), nb::arg("name"))
      .def("position", &position, nb::arg("name"))
      .def(
          "known",
          [](const EngineBlocks& blocks, nb::list list) { return blocks.known(names_of(list)); },
          nb::arg("names"))
      .def(
          "leading",
          [](const EngineBlocks& blocks, nb::handle sequence) {
            const View view(sequence);
            return blocks.leading(hashes(view));
          },
          nb::arg("sequence"))
      .def("store", &store, nb::arg("tier"), nb::arg("names"), nb::arg("parent").none(),
           nb::arg("salt"), nb::arg("tokens"), nb::arg("extras"))
      .def("hold", &hold, nb::arg("tier"), nb::arg("names"), nb::arg("again") = true)
      .def("release", &release, nb::arg("tier"), nb::arg("names"))
      .def(
          "clear",
          [](EngineBlocks& blocks, uint64_t tier) {
            check_tier(tier);
            blocks.clear(tier);
          },
          nb::arg("tier"))
      .def("forget", &EngineBlocks::forget)
      .def("dump", &dump);
}
