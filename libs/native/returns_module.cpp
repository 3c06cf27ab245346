// Python bindings of what is computed for each bin of age: rates of return and life tables.
#include <nanobind/nanobind.h>

#include "life_table.hpp"

namespace nb = nanobind;
using namespace kvmesh;

namespace {

// A list or tuple of numbers, one for each bin.
Rates rates_of(nb::handle sequence) {
  const nb::object items = nb::steal(PySequence_Fast(sequence.ptr(), "rates must be a sequence"));
  if (!items.is_valid()) throw nb::python_error();
  if (PySequence_Fast_GET_SIZE(items.ptr()) != static_cast<Py_ssize_t>(BINS)) {
    throw nb::value_error("rates must be one for each bin of age");
  }
  Rates rates;
  for (size_t bin = 0; bin < BINS; ++bin) {
    rates[bin] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(items.ptr(), bin));
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return rates;
}

nb::object number(double value) {
  PyObject* const made = PyFloat_FromDouble(value);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::tuple as_tuple(const Rates& rates) {
  nb::object made = nb::steal(PyTuple_New(BINS));
  if (!made.is_valid()) throw nb::python_error();
  for (size_t bin = 0; bin < BINS; ++bin) {
    PyTuple_SET_ITEM(made.ptr(), bin, number(rates[bin]).release().ptr());
  }
  return nb::borrow<nb::tuple>(made);
}

nb::list as_list(const Rates& rates) {
  nb::object made = nb::steal(PyList_New(BINS));
  if (!made.is_valid()) throw nb::python_error();
  for (size_t bin = 0; bin < BINS; ++bin) {
    PyList_SET_ITEM(made.ptr(), bin, number(rates[bin]).release().ptr());
  }
  return nb::borrow<nb::list>(made);
}

size_t checked(size_t bin) {
  if (bin >= BINS) throw nb::index_error("no such bin of age");
  return bin;
}

nb::list learned_rates(nb::list tables, double now) {
  Rates rates{};
  bool known = false;
  for (nb::handle each : tables) {
    auto& table = nb::cast<LifeTable&>(each);
    if (table.closed) continue;
    if (known) {
      table.refine(rates, now);
    } else {
      rates = table.own_rates(now);
    }
    known = true;
  }
  return as_list(known ? rates : LifeTable(now).own_rates(now));
}

void start_all(nb::list tables, double now, double expected) {
  for (nb::handle each : tables) {
    auto& table = nb::cast<LifeTable&>(each);
    table.enter(0, now);
    table.count(1, expected);
  }
}

void grow_older(nb::list tables, size_t bin, double at) {
  checked(bin + 1);
  for (nb::handle each : tables) {
    auto& table = nb::cast<LifeTable&>(each);
    table.leave(bin, at);
    table.enter(bin + 1, at);
  }
}

}  // namespace

void bind_returns(nb::module_& m) {
  m.def("age_bin", &age_bin, nb::arg("age_s"));
  m.def(
      "share_returned",
      [](nb::handle rates, double within_s) { return share_returned(rates_of(rates), within_s); },
      nb::arg("rates"), nb::arg("within_s"));
  m.def(
      "share_within",
      [](nb::handle rates, double age_s, double seconds) {
        return share_within(rates_of(rates), age_s, seconds);
      },
      nb::arg("rates"), nb::arg("age_s"), nb::arg("seconds"));
  m.def(
      "values_by_age", [](nb::handle rates) { return as_tuple(values_by_age(rates_of(rates))); },
      nb::arg("rates"));
  m.def(
      "chances_by_age", [](nb::handle rates) { return as_tuple(chances_by_age(rates_of(rates))); },
      nb::arg("rates"));
  m.def(
      "pack_rates",
      [](nb::handle rates) {
        std::array<uint8_t, BINS> bytes;
        std::ranges::transform(rates_of(rates), bytes.begin(), packed);
        return nb::bytes(reinterpret_cast<const char*>(bytes.data()), BINS);
      },
      nb::arg("rates"));
  m.def("learned_rates", &learned_rates, nb::arg("tables"), nb::arg("now"));
  m.def("start_all", &start_all, nb::arg("tables"), nb::arg("now"), nb::arg("expected"));
  m.def("grow_older", &grow_older, nb::arg("tables"), nb::arg("bin_"), nb::arg("at"));
  nb::class_<LifeTable>(m, "LifeTable")
      .def(nb::init<double>(), nb::arg("now"))
      .def_ro_static("HALF_LIFE_S", &LifeTable::HALF_LIFE_S)
      .def_ro("closed", &LifeTable::closed)
      .def_ro("prompts", &LifeTable::prompts)
      .def_ro("returned", &LifeTable::returned)
      .def_ro("expected", &LifeTable::expected)
      .def("close", &LifeTable::close)
      .def(
          "leave", [](LifeTable& table, size_t bin, double now) { table.leave(checked(bin), now); },
          nb::arg("bin_"), nb::arg("now"))
      .def("count_return", &LifeTable::count_return, nb::arg("age_s"), nb::arg("until_s"));
}
