// Python bindings of a pre-tokenizer's words and their tokens.
#include <nanobind/nanobind.h>

#include "known_words.hpp"

namespace nb = nanobind;
using namespace kvmesh;

namespace {

std::string_view ascii(nb::handle text) {
  if (!PyUnicode_IS_ASCII(text.ptr())) throw nb::value_error("the text has characters beyond ASCII");
  return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text.ptr())),
          static_cast<size_t>(PyUnicode_GET_LENGTH(text.ptr()))};
}

// A node from (kind, 128 flags, least, most, nexts); `nodes` is the number of nodes.
PatternNode node_of(nb::tuple fields, size_t nodes) {
  const auto kind = nb::cast<uint8_t>(fields[0]);
  const auto flags = nb::cast<nb::bytes>(fields[1]);
  if (kind > static_cast<uint8_t>(PatternNode::Kind::END) || flags.size() != 128) {
    throw nb::value_error("no such node");
  }
  PatternNode node{static_cast<PatternNode::Kind>(kind), {}, nb::cast<size_t>(fields[2]),
                   nb::cast<size_t>(fields[3]), {}};
  for (size_t c = 0; c < 128; ++c) node.members[c] = flags.c_str()[c] != 0;
  for (nb::handle next : nb::cast<nb::tuple>(fields[4])) {
    node.nexts.push_back(nb::cast<size_t>(next));
    if (node.nexts.back() >= nodes) throw nb::value_error("no such node");
  }
  if (node.kind != PatternNode::Kind::END && node.nexts.empty()) {
    throw nb::value_error("a node without an end");
  }
  return node;
}

WordSplitter splitter_of(nb::list patterns) {
  std::vector<WordPattern> made;
  for (nb::handle pattern : patterns) {
    const auto fields = nb::cast<nb::list>(pattern);
    if (nb::len(fields) == 0) throw nb::value_error("a pattern without nodes");
    std::vector<PatternNode> nodes;
    for (nb::handle node : fields) {
      nodes.push_back(node_of(nb::cast<nb::tuple>(node), nb::len(fields)));
    }
    made.emplace_back(std::move(nodes));
  }
  return WordSplitter(std::move(made));
}

class WordTokens {
 public:
  WordTokens(nb::list patterns, uint64_t seed) : splitter_(splitter_of(patterns)), known_(seed) {}

  nb::list words(nb::str whole) const {
    const std::string_view text = ascii(whole);
    nb::list found;
    splitter_.split(text.data(), 0, text.size(), [&](size_t start, size_t end) {
      found.append(nb::str(text.data() + start, end - start));
    });
    return found;
  }

  nb::list find(nb::str whole) {
    const std::string_view text = ascii(whole);
    nb::list found;
    std::vector<uint32_t> tokens;
    tokens.reserve(text.size() / 3 + KnownWords::MOST_TOKENS);
    const auto flush = [&] {
      if (tokens.empty()) return;
      found.append(nb::bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4));
      tokens.clear();
    };
    splitter_.split(text.data(), 0, text.size(), [&](size_t start, size_t end) {
      if (const KnownWords::Entry* entry = known_.find(text.substr(start, end - start))) {
        tokens.insert(tokens.end(), entry->tokens.begin(), entry->tokens.begin() + entry->count);
        return;
      }
      flush();
      found.append(nb::str(text.data() + start, end - start));
    });
    flush();
    return found;
  }

  void keep(nb::str word, nb::bytes tokens) {
    if (tokens.size() % 4 != 0) throw nb::value_error("tokens must be whole 32-bit words");
    std::vector<uint32_t> packed(tokens.size() / 4);
    std::copy_n(tokens.c_str(), tokens.size(), reinterpret_cast<char*>(packed.data()));
    known_.keep(ascii(word), packed.data(), packed.size());
  }

 private:
  WordSplitter splitter_;
  KnownWords known_;
};

}  // namespace

void bind_words(nb::module_& m) {
  nb::class_<WordTokens>(m, "WordTokens")
      .def(nb::init<nb::list, uint64_t>(), nb::arg("patterns"), nb::arg("seed"))
      .def("words", &WordTokens::words, nb::arg("text"))
      .def("find", &WordTokens::find, nb::arg("text"))
      .def("keep", &WordTokens::keep, nb::arg("word"), nb::arg("tokens"));
}
