// A storage type -> the type that its arithmetic is done in, and that of a choice in it; and what a loop tells the compiler
// about itself.
#pragma once

#include <type_traits>

namespace todist {

template <class T>
using arithmetic_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A choice that all elements share. On the CPU it is as wide as what it chooses from: one of another width keeps the
// compiler from making vectors of a loop over float16 or bfloat16. On CUDA that would take registers.
#ifdef __CUDACC__
template <class A>
using Choice = bool;
#else
template <class A>
using Choice = A;
#endif

}  // namespace todist

// One clone of the function an instruction set; the loader picks the best that the processor has.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define TODIST_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define TODIST_CLONES
#endif

// Before a loop: what one round writes, no other round reads. Spares a test of every pair of pointers, and vectors
// where there are too many pairs to test.
#if defined(__clang__)
#define TODIST_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define TODIST_INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define TODIST_INDEPENDENT __pragma(loop(ivdep))
#else
#define TODIST_INDEPENDENT
#endif
