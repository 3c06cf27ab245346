// Arguments and results of the bindings: buffers in, bytes out.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "hashes.hpp"
#include "index.hpp"

namespace kvmesh {

namespace nb = nanobind;

// A borrowed view of any object with the buffer protocol, for the length of one call.
class View {
 public:
  explicit View(nb::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) throw nb::python_error();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&buffer_); }

  const uint8_t* data() const { return static_cast<const uint8_t*>(buffer_.buf); }
  double* doubles() { return static_cast<double*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

inline Hashes hashes(const View& view) {
  if (view.size() % 8 != 0) throw nb::value_error("hashes must be whole 64-bit words");
  return {view.data(), view.size() / 8};
}

inline nb::bytes packed(const std::vector<uint64_t>& values) {
  return nb::bytes(reinterpret_cast<const char*>(values.data()), 8 * values.size());
}

inline void check_tier(uint64_t tier) {
  if (tier >= TIERS) throw nb::value_error("tier is out of range");
}

}  // namespace kvmesh
