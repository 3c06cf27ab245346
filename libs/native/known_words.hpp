// Splits ASCII text into a pre-tokenizer's words, and caches their tokens.
//
// A pattern is a graph of nodes, as `kvmesh.frontend.tokenizer.word_patterns` makes it of a regular
// expression; matching backtracks as Python's `re` does. Callers hold the GIL, which guards the cache.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "xxh3.hpp"

namespace kvmesh {

struct PatternNode {
  enum class Kind : uint8_t { RUN, POSSESSIVE_RUN, NOT_FOLLOWED_BY, FOLLOWED_BY, EITHER, END };

  Kind kind;
  std::bitset<128> members;   // characters of a run, or that (must not) follow
  size_t least, most;         // length of a run
  std::vector<size_t> nexts;  // nodes behind this one; of EITHER in the order in which to try them
};

class WordPattern {
 public:
  static constexpr size_t NONE = SIZE_MAX;

  explicit WordPattern(std::vector<PatternNode> nodes) : nodes_(std::move(nodes)) {}

  // The end of the word that begins at `at` of a text that ends at `end`; NONE if none does.
  size_t match(const char* text, size_t at, size_t end) const { return match(0, text, at, end); }

 private:
  size_t match(size_t index, const char* text, size_t at, size_t end) const {
    const PatternNode& node = nodes_[index];
    switch (node.kind) {
      case PatternNode::Kind::END:
        return at;
      case PatternNode::Kind::EITHER:
        for (const size_t next : node.nexts) {
          if (const size_t found = match(next, text, at, end); found != NONE) return found;
        }
        return NONE;
      case PatternNode::Kind::NOT_FOLLOWED_BY:
      case PatternNode::Kind::FOLLOWED_BY: {
        const bool follows = at < end && node.members[static_cast<uint8_t>(text[at])];
        if (follows != (node.kind == PatternNode::Kind::FOLLOWED_BY)) return NONE;
        return match(node.nexts[0], text, at, end);
      }
      default:
        break;
    }
    const size_t limit = std::min(end - at, node.most);
    size_t length = 0;
    while (length < limit && node.members[static_cast<uint8_t>(text[at + length])]) ++length;
    const size_t least =
        node.kind == PatternNode::Kind::RUN ? node.least : std::max(node.least, length);
    for (size_t taken = length + 1; taken-- > least;) {
      const size_t found = match(node.nexts[0], text, at + taken, end);
      if (found != NONE) return found;
    }
    return NONE;
  }

  std::vector<PatternNode> nodes_;
};

// The words of a text by several patterns, each of which splits the words of the one before.
class WordSplitter {
 public:
  explicit WordSplitter(std::vector<WordPattern> patterns) : patterns_(std::move(patterns)) {}

  // Call `use(start, end)` for each word. What no pattern matches is a word, too.
  template <typename Use>
  void split(const char* text, size_t start, size_t end, const Use& use, size_t level = 0) const {
    if (start == end) return;
    if (level == patterns_.size()) {
      use(start, end);
      return;
    }
    size_t at = start;
    while (at < end) {
      const size_t found = patterns_[level].match(text, at, end);
      if (found == WordPattern::NONE || found == at) {
        ++at;
        continue;
      }
      split(text, start, at, use, level + 1);
      split(text, at, found, use, level + 1);
      start = at = found;
    }
    split(text, start, end, use, level + 1);
  }

 private:
  std::vector<WordPattern> patterns_;
};

// A cache of `SETS` sets of `WAYS` words, each set in the order of its last use; 4 MiB when full.
class KnownWords {
 public:
  static constexpr size_t LONGEST = 30, MOST_TOKENS = 6;

  struct Entry {
    uint64_t hash;  // 0: free
    uint8_t length, count;
    std::array<char, LONGEST> text;
    std::array<uint32_t, MOST_TOKENS> tokens;
  };
  static_assert(sizeof(Entry) == 64, "an entry is a cache line");

  explicit KnownWords(uint64_t seed)
      : hash_(seed), entries_(static_cast<Entry*>(std::calloc(SETS * WAYS, sizeof(Entry)))) {
    if (entries_ == nullptr) throw std::bad_alloc();
  }

  // The tokens of a word; null if they are not known.
  const Entry* find(std::string_view word) {
    return word.size() > LONGEST ? nullptr : find(word, key(word));
  }

  // Keep the tokens of a word in place of that of its set whose last use is longest ago.
  void keep(std::string_view word, const uint32_t* tokens, size_t count) {
    if (word.size() > LONGEST || count > MOST_TOKENS) return;
    const uint64_t hash = key(word);
    if (find(word, hash) != nullptr) return;
    Entry entry{hash, static_cast<uint8_t>(word.size()), static_cast<uint8_t>(count), {}, {}};
    std::copy(word.begin(), word.end(), entry.text.begin());
    std::copy(tokens, tokens + count, entry.tokens.begin());
    Entry* set = set_of(hash);
    std::move_backward(set, set + WAYS - 1, set + WAYS);
    set[0] = entry;
  }

 private:
  static constexpr size_t SETS = 1 << 14, WAYS = 4;

  struct Free {
    void operator()(Entry* entries) const { std::free(entries); }
  };

  uint64_t key(std::string_view word) const {
    return hash_(reinterpret_cast<const uint8_t*>(word.data()), word.size()) | 1;
  }

  const Entry* find(std::string_view word, uint64_t key) {
    Entry* set = set_of(key);
    for (size_t way = 0; way < WAYS; ++way) {
      if (set[way].hash != key || word != std::string_view(set[way].text.data(), set[way].length)) {
        continue;
      }
      if (way == 0) return set;
      std::swap(set[way], set[way - 1]);
      return set + way - 1;
    }
    return nullptr;
  }

  Entry* set_of(uint64_t key) const { return &entries_[(key >> 32) % SETS * WAYS]; }

  Xxh3 hash_;
  std::unique_ptr<Entry[], Free> entries_;
};

}  // namespace kvmesh
