// XXH3-64 as published in the xxHash specification, in portable C++, and long inputs in AVX2.
//
// The two block hashes are exact instances of it: local = XXH3(tokens of one block, 1337) and
// sequence = XXH3(le64(previous) || le64(local), 1337). Nothing here allocates or keeps state.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvmesh {

static_assert(std::endian::native == std::endian::little, "hash arrays are little-endian");

class Xxh3 {
 public:
  explicit constexpr Xxh3(uint64_t seed) : seed_(seed), secret_(derive(seed)) {}

  uint64_t operator()(const uint8_t* in, size_t len) const {
    if (len > 240) return over_240(in, len);
    if (len > 128) return upto_240(in, len);
    if (len > 16) return upto_128(in, len);
    if (len > 8) return upto_16(read64(in), read64(in + len - 8), len);
    if (len >= 4) return upto_8(in, len);
    return upto_3(in, len);
  }

  // XXH3 of the 16 bytes le64(lo) || le64(hi).
  uint64_t pair(uint64_t lo, uint64_t hi) const { return upto_16(lo, hi, 16); }

 private:
  static constexpr size_t SECRET = 192;
  static constexpr size_t STRIPE = 64;
  static constexpr size_t LANES = 8;
  static constexpr size_t STRIPES_PER_BLOCK = (SECRET - STRIPE) / 8;
  static constexpr uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
  static constexpr uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL,
                            P64_3 = 0x165667B19E3779F9ULL, P64_4 = 0x85EBCA77C2B2AE63ULL,
                            P64_5 = 0x27D4EB2F165667C5ULL;
  using Secret = std::array<uint8_t, SECRET>;

  static constexpr Secret DEFAULT = {
      0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
      0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
      0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
      0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
      0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
      0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
      0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
      0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
      0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
      0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
      0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
      0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
  };

  static uint64_t read64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static uint32_t read32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static constexpr uint64_t swap(uint64_t v) {
    v = (v & 0x00FF00FF00FF00FFULL) << 8 | (v >> 8 & 0x00FF00FF00FF00FFULL);
    v = (v & 0x0000FFFF0000FFFFULL) << 16 | (v >> 16 & 0x0000FFFF0000FFFFULL);
    return v << 32 | v >> 32;
  }
  static uint64_t fold(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  static uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9ULL;
    return h ^ h >> 32;
  }
  static uint64_t avalanche64(uint64_t h) {
    h ^= h >> 33;
    h *= P64_2;
    h ^= h >> 29;
    h *= P64_3;
    return h ^ h >> 32;
  }

  static constexpr Secret derive(uint64_t seed) {
    Secret out{};
    for (size_t i = 0; i < SECRET; i += 8) {
      uint64_t word = 0;
      for (size_t b = 8; b-- > 0;) word = word << 8 | DEFAULT[i + b];
      word = i % 16 == 0 ? word + seed : word - seed;
      for (size_t b = 0; b < 8; ++b) out[i + b] = static_cast<uint8_t>(word >> 8 * b);
    }
    return out;
  }

  static uint64_t plain(size_t at) { return read64(DEFAULT.data() + at); }

  uint64_t upto_3(const uint8_t* in, size_t len) const {
    if (len == 0) return avalanche64(seed_ ^ plain(56) ^ plain(64));
    const uint32_t combined = static_cast<uint32_t>(in[0]) << 16 |
                              static_cast<uint32_t>(in[len >> 1]) << 24 | in[len - 1] |
                              static_cast<uint32_t>(len) << 8;
    const uint64_t flip = (read32(DEFAULT.data()) ^ read32(DEFAULT.data() + 4)) + seed_;
    return avalanche64(combined ^ flip);
  }

  uint64_t upto_8(const uint8_t* in, size_t len) const {
    const uint64_t seed = seed_ ^ swap(seed_ & 0xFFFFFFFFU);
    const uint64_t value = read32(in + len - 4) + (static_cast<uint64_t>(read32(in)) << 32);
    uint64_t h = value ^ ((plain(8) ^ plain(16)) - seed);
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25ULL;
    h ^= (h >> 35) + len;
    h *= 0x9FB21C651E98DF25ULL;
    return h ^ h >> 28;
  }

  uint64_t upto_16(uint64_t first, uint64_t last, size_t len) const {
    const uint64_t lo = first ^ ((plain(24) ^ plain(32)) + seed_);
    const uint64_t hi = last ^ ((plain(40) ^ plain(48)) - seed_);
    return avalanche(len + swap(lo) + hi + fold(lo, hi));
  }

  // The seeded secret already holds secret + seed and secret - seed in alternating words.
  uint64_t mix16(const uint8_t* in, size_t at) const {
    return fold(read64(in) ^ read64(secret_.data() + at),
                read64(in + 8) ^ read64(secret_.data() + at + 8));
  }
  // At an odd secret offset the seeded words do not line up, so the seed is added here.
  uint64_t mix16_odd(const uint8_t* in, size_t at) const {
    return fold(read64(in) ^ (plain(at) + seed_), read64(in + 8) ^ (plain(at + 8) - seed_));
  }

  uint64_t upto_128(const uint8_t* in, size_t len) const {
    uint64_t acc = len * P64_1;
    if (len > 96) acc += mix16(in + 48, 96) + mix16(in + len - 64, 112);
    if (len > 64) acc += mix16(in + 32, 64) + mix16(in + len - 48, 80);
    if (len > 32) acc += mix16(in + 16, 32) + mix16(in + len - 32, 48);
    return avalanche(acc + mix16(in, 0) + mix16(in + len - 16, 16));
  }

  uint64_t upto_240(const uint8_t* in, size_t len) const {
    uint64_t acc = len * P64_1;
    for (size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < len / 16; ++i) acc += mix16_odd(in + 16 * i, 16 * (i - 8) + 3);
    return avalanche(acc + mix16_odd(in + len - 16, 136 - 17));
  }

  void accumulate(uint64_t* acc, const uint8_t* in, size_t at) const {
    for (size_t i = 0; i < LANES; ++i) {
      const uint64_t value = read64(in + 8 * i);
      const uint64_t key = value ^ read64(secret_.data() + at + 8 * i);
      acc[i ^ 1] += value;
      acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
  }

  void scramble(uint64_t* acc) const {
    for (size_t i = 0; i < LANES; ++i) {
      const uint64_t key = read64(secret_.data() + SECRET - STRIPE + 8 * i);
      acc[i] = (acc[i] ^ acc[i] >> 47 ^ key) * P32_1;
    }
  }

  void absorb(uint64_t* acc, const uint8_t* in, size_t stripes) const {
    for (size_t s = 0; s < stripes; ++s) {
      if (s != 0 && s % STRIPES_PER_BLOCK == 0) scramble(acc);
      accumulate(acc, in + STRIPE * s, 8 * (s % STRIPES_PER_BLOCK));
    }
  }

#if defined(__x86_64__)
  [[gnu::target("avx2")]] static __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }

  [[gnu::target("avx2")]] static __m256i accumulated(__m256i acc, __m256i value, __m256i secret) {
    const __m256i key = _mm256_xor_si256(value, secret);
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    // each lane also takes the value of its neighbour
    const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
  }

  [[gnu::target("avx2")]] static __m256i scrambled(__m256i acc, __m256i secret) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(P32_1));
    const __m256i mixed =
        _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
  }

  [[gnu::target("avx2")]] void absorb_avx2(uint64_t* acc, const uint8_t* in,
                                           size_t stripes) const {
    const uint8_t* last = secret_.data() + SECRET - STRIPE;
    __m256i low = load(acc), high = load(acc + 4);
    for (size_t s = 0; s < stripes; ++s, in += STRIPE) {
      if (s != 0 && s % STRIPES_PER_BLOCK == 0) {
        low = scrambled(low, load(last));
        high = scrambled(high, load(last + 32));
      }
      const uint8_t* secret = secret_.data() + 8 * (s % STRIPES_PER_BLOCK);
      low = accumulated(low, load(in), load(secret));
      high = accumulated(high, load(in + 32), load(secret + 32));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + 4), high);
  }
#endif

  void absorb_fastest(uint64_t* acc, const uint8_t* in, size_t stripes) const {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return absorb_avx2(acc, in, stripes);
#endif
    absorb(acc, in, stripes);
  }

  uint64_t over_240(const uint8_t* in, size_t len) const {
    uint64_t acc[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const size_t stripes = (len - 1) / STRIPE;
    absorb_fastest(acc, in, stripes);
    if (stripes != 0 && stripes % STRIPES_PER_BLOCK == 0) scramble(acc);
    accumulate(acc, in + len - STRIPE, SECRET - STRIPE - 7);
    uint64_t h = len * P64_1;
    for (size_t i = 0; i < LANES; i += 2) {
      h += fold(acc[i] ^ read64(secret_.data() + 11 + 8 * i),
                acc[i + 1] ^ read64(secret_.data() + 19 + 8 * i));
    }
    return avalanche(h);
  }

  uint64_t seed_;
  Secret secret_;
};

inline constexpr uint64_t BLOCK_SEED = 1337;
inline constexpr Xxh3 BLOCK_HASH{BLOCK_SEED};

}  // namespace kvmesh
