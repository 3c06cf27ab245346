// Arrays of numbers in MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md), read
// without an object for each: the tokens and block hashes of engines' KV events.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvmesh {

// A fault is remembered and not thrown, since to throw costs more than to read a message: what
// follows it reads as zeros.
class MsgpackReader {
 public:
  MsgpackReader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  // The length of an array, which is read next.
  size_t array() {
    const uint8_t type = byte();
    if ((type & 0xF0) == 0x90) return checked(type & 0x0F);
    if (type == 0xDC) return checked(big_endian(2));
    if (type == 0xDD) return checked(big_endian(4));
    return fail("expected an array");
  }
  bool is_array() const {
    return at_ != end_ && ((*at_ & 0xF0) == 0x90 || *at_ == 0xDC || *at_ == 0xDD);
  }
  // A token id. Without a branch for its size, which no predictor knows.
  uint32_t token() {
    if (static_cast<size_t>(end_ - at_) < LONGEST) return checked_token(integer(byte()));
    const uint8_t type = *at_;
    const uint8_t size = TOKEN_BYTES[type];
    if (size == INVALID) return checked_token(integer(byte()));
    uint64_t word;
    std::memcpy(&word, at_ + 1, sizeof word);
    at_ += 1 + size;
    const uint64_t bits = 8 * size;
    const uint64_t value = size == 0 ? type : __builtin_bswap64(word) >> ((64 - bits) & 63);
    return static_cast<uint32_t>(value);
  }
  // A block hash: an integer modulo 2**64, or the last 8 bytes of a digest.
  uint64_t hash() {
    const uint8_t type = byte();
    if (type == 0xC4) return digest(big_endian(1));
    if (type == 0xC5) return digest(big_endian(2));
    if (type == 0xC6) return digest(big_endian(4));
    return integer(type);
  }
  void end() {
    if (at_ != end_) fail("bytes follow the array");
  }
  // The first fault; null if there is none.
  const char* fault() const { return fault_; }
  uint8_t fail(const char* what) {
    if (fault_ == nullptr) fault_ = what;
    at_ = end_;
    return 0;
  }

 private:
  static constexpr const char* CUT_OFF = "the array is cut off";
  static constexpr size_t LONGEST = 9;  // bytes of an integer
  static constexpr uint8_t INVALID = 0xFF;
  // Bytes that follow the type of an unsigned integer of at most 32 bits.
  static constexpr std::array<uint8_t, 256> TOKEN_BYTES = [] {
    std::array<uint8_t, 256> sizes{};
    for (size_t type = 0x80; type < sizes.size(); ++type) sizes[type] = INVALID;
    sizes[0xCC] = 1;
    sizes[0xCD] = 2;
    sizes[0xCE] = 4;
    return sizes;
  }();

  uint32_t checked_token(uint64_t value) {
    if (value > UINT32_MAX) return fail("a token id is not a uint32");
    return static_cast<uint32_t>(value);
  }
  uint8_t byte() { return at_ == end_ ? fail(CUT_OFF) : *at_++; }
  uint64_t big_endian(size_t bytes) {
    if (static_cast<size_t>(end_ - at_) < bytes) return fail(CUT_OFF);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value = value << 8 | *at_++;
    return value;
  }
  // An integer of the type, modulo 2**64.
  uint64_t integer(uint8_t type) {
    if (type < 0x80) return type;
    if (type >= 0xE0) return static_cast<uint64_t>(static_cast<int8_t>(type));
    switch (type) {
      case 0xCC: return big_endian(1);
      case 0xCD: return big_endian(2);
      case 0xCE: return big_endian(4);
      case 0xCF: return big_endian(8);
      case 0xD0: return static_cast<uint64_t>(static_cast<int8_t>(big_endian(1)));
      case 0xD1: return static_cast<uint64_t>(static_cast<int16_t>(big_endian(2)));
      case 0xD2: return static_cast<uint64_t>(static_cast<int32_t>(big_endian(4)));
      case 0xD3: return big_endian(8);
      default: return fail("expected an integer");
    }
  }
  uint64_t digest(size_t size) {
    if (static_cast<size_t>(end_ - at_) < size) return fail(CUT_OFF);
    const size_t used = size < 8 ? size : 8;
    at_ += size - used;
    return big_endian(used);
  }
  // Each element has at least a byte: a length beyond the rest would only claim memory.
  size_t checked(size_t count) {
    return count > static_cast<size_t>(end_ - at_) ? fail(CUT_OFF) : count;
  }

  const uint8_t* at_;
  const uint8_t* end_;
  const char* fault_ = nullptr;
};

// Token ids, or the first of each pair of neighbours.
class TokenColumn {
 public:
  TokenColumn(const uint8_t* data, size_t size) : reader_(data, size), count_(reader_.array()) {}

  size_t count() const { return count_; }
  const char* fault() const { return reader_.fault(); }
  // Writes `count` uint32.
  void read(uint8_t* out) {
    const bool pairs = count_ != 0 && reader_.is_array();
    for (size_t i = 0; i < count_; ++i) {
      if (pairs && reader_.array() != 2) reader_.fail("expected pairs of tokens");
      const uint32_t token = reader_.token();
      if (pairs) reader_.token();
      std::memcpy(out + 4 * i, &token, sizeof token);
    }
    reader_.end();
  }

 private:
  MsgpackReader reader_;
  size_t count_;
};

// Block hashes; null, or the fault for which there are none.
inline const char* read_hashes(const uint8_t* data, size_t size, std::vector<uint64_t>& hashes) {
  MsgpackReader reader(data, size);
  hashes.resize(reader.array());
  for (uint64_t& hash : hashes) hash = reader.hash();
  reader.end();
  return reader.fault();
}

}  // namespace kvmesh
