// A formula, one address an argument -> the formula over the elements there, read and written in packs.
#pragma once

#include "arguments.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace todist {

// So many elements that one instruction moves.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

template <class T>
constexpr int kWidest = 16 / sizeof(T);

template <class Op, class T>
using FormulaOf = typename Op::template Formula<arithmetic_t<T>>;

template <class Op, size_t K, class T, int kWidth>
__device__ __forceinline__ void read(Pack<T, kWidth>& pack, const T* from) {
  constexpr Role kRole = Op::kArguments[K].role;
  if constexpr (kRole == Role::kOptional) {
    if (from) {
      pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        pack.values[i] = static_cast<T>(0.f);
      }
    }
  } else if constexpr (kRole != Role::kNew && kRole != Role::kWritten) {
    pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
  }
}

template <class Op, size_t K, class T, int kWidth>
__device__ __forceinline__ void write(const Pack<T, kWidth>& pack, T* to) {
  constexpr Role kRole = Op::kArguments[K].role;
  if constexpr (kRole == Role::kNew || overwrites(kRole)) {
    *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
  }
}

template <class Op, size_t K, class T>
__device__ __forceinline__ T* pointer(void* data, int64_t offset) {
  if constexpr (Op::kArguments[K].role == Role::kOptional) {
    return data ? static_cast<T*>(data) + offset : nullptr;
  } else {
    return static_cast<T*>(data) + offset;
  }
}

// The pointers are those of the tensors, null where an optional list is not there; the offsets are in elements.
template <class Op, int kWidth, class T, size_t... K>
__device__ __forceinline__ void apply(const FormulaOf<Op, T>& formula, void* const* data, const int64_t* offsets,
                                      std::index_sequence<K...>) {
  using A = arithmetic_t<T>;
  T* const pointers[] = {pointer<Op, K, T>(data[K], offsets[K])...};
  Pack<T, kWidth> packs[sizeof...(K)];
  (read<Op, K, T, kWidth>(packs[K], pointers[K]), ...);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    A values[] = {load<Op, K>(&packs[K].values[i])...};
    formula(values[K]...);
    (store<Op, K>(&packs[K].values[i], values[K]), ...);
  }
  (write<Op, K, T, kWidth>(packs[K], pointers[K]), ...);
}

}  // namespace todist
