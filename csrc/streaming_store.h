// Results -> memory past the cache, whose lines are then not read before they are overwritten.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>
#define TODIST_STREAMS
#endif

namespace todist {

constexpr size_t kLine = 64;    // bytes of the cache that come and go together
constexpr size_t kBurst = 256;  // bytes sent at once; with 1 KB, reads wait for writes

#ifdef TODIST_STREAMS

inline bool can_stream() {
  static const bool can = __builtin_cpu_supports("avx");
  return can;
}

// Whether there is memory behind an address. If not, the first write brings a page of zeros into the cache, and to send
// something past it then takes longer than to overwrite them.
inline bool has_page(const void* address) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char there = 0;
  void* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) / page * page);
  return mincore(begin, 1, &there) == 0 && (there & 1) != 0;
}

// Sends one burst, to where a line begins. By 16 bytes at a time it would be no gain.
__attribute__((target("avx"))) inline void stream(void* to, const void* from) {
  for (size_t i = 0; i < kBurst / sizeof(__m256i); ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
  }
}

// Comes before anything that tells another thread that the results are there.
inline void end_streams() { _mm_sfence(); }

#else

inline bool can_stream() { return false; }
inline bool has_page(const void*) { return false; }
inline void stream(void*, const void*) {}
inline void end_streams() {}

#endif

}  // namespace todist
