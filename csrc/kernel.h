// Lists of tensors, a formula for one element -> checks -> the formula over all elements of all tensors, in parallel.
#pragma once

#include "check.h"
#include "fresh.h"
#include "handle.h"
#include "layout.h"
#include "memory.h"
#include "numeric.h"
#include "parallel.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace todist {

enum class Role {
  kNew,      // is made here and returned
  kUpdated,  // is read and overwritten
  kRead,
  kOptional,  // is read; zeros if the list is empty
};

struct Argument {
  const char* name;
  Role role;
  size_t like = 0;  // for a new one: the argument whose strides it takes
};

// What is said of an op, once:
//
//   struct Op {
//     static constexpr const char* kName;                     // as messages call it
//     static constexpr std::array<Argument, N> kArguments;    // the new ones first; one that is written first of all
//     using Numbers;                                          // what is the same for all elements of a tensor
//     template <class A> using Formula;                       // made from Numbers; takes an A& for each argument
//   };

constexpr int64_t kShare = 65536;  // elements a thread, at least
constexpr int64_t kZeros = 4096;   // elements in the block of zeros that stands for a list that is not there
alignas(64) inline constexpr char zeros[kZeros * sizeof(double)] = {};

template <class Op>
constexpr size_t kCount = Op::kArguments.size();

template <class Op>
constexpr size_t new_count() {
  size_t count = 0;
  for (const Argument& argument : Op::kArguments) {
    count += argument.role == Role::kNew;
  }
  return count;
}

template <class Op, size_t K, class T>
inline arithmetic_t<T> load(const T* from) {
  if constexpr (Op::kArguments[K].role == Role::kNew) {
    return 0;
  } else {
    return static_cast<arithmetic_t<T>>(*from);
  }
}

template <class Op, size_t K, class T>
inline void store(T* to, arithmetic_t<T> value) {
  if constexpr (Op::kArguments[K].role == Role::kNew || Op::kArguments[K].role == Role::kUpdated) {
    *to = static_cast<T>(value);
  }
}

// All strides are 1: the compiler makes vectors of it.
template <class Op, class T, size_t... K>
TODIST_CLONES void row(const typename Op::template Formula<arithmetic_t<T>>& given,
                       const std::array<T*, sizeof...(K)>& given_pointers, int64_t length, std::index_sequence<K...>) {
  const auto formula = given;  // copies, which no write through the pointers can change
  const std::array<T*, sizeof...(K)> pointers = given_pointers;
  TODIST_INDEPENDENT
  for (int64_t i = 0; i < length; ++i) {
    std::array<arithmetic_t<T>, sizeof...(K)> values{load<Op, K>(pointers[K] + i)...};
    formula(values[K]...);
    (store<Op, K>(pointers[K] + i, values[K]), ...);
  }
}

template <class Op, class T, size_t... K>
void strided_row(const typename Op::template Formula<arithmetic_t<T>>& formula,
                 const std::array<T*, sizeof...(K)>& pointers, const std::array<int64_t, sizeof...(K)>& strides,
                 int64_t length, std::index_sequence<K...>) {
  for (int64_t i = 0; i < length; ++i) {
    std::array<arithmetic_t<T>, sizeof...(K)> values{load<Op, K>(pointers[K] + i * strides[K])...};
    formula(values[K]...);
    (store<Op, K>(pointers[K] + i * strides[K], values[K]), ...);
  }
}

template <class Op>
struct Entry;

template <class Op>
using Chunk = void (*)(const Entry<Op>&, const typename Op::Numbers&, int64_t begin, int64_t end);

// One tensor of each list: those of one index.
template <class Op>
struct Entry {
  std::array<void*, kCount<Op>> data;  // null where the list is not there
  Layout<kCount<Op>> layout;
  Chunk<Op> chunk;
};

template <class Op, class T>
void chunk(const Entry<Op>& entry, const typename Op::Numbers& numbers, int64_t begin, int64_t end) {
  constexpr size_t N = kCount<Op>;
  const typename Op::template Formula<arithmetic_t<T>> formula(numbers);
  std::array<int64_t, N> strides = entry.layout.inner.strides;
  std::array<bool, N> absent{};
  int64_t longest = end - begin;
  for (size_t k = 0; k < N; ++k) {
    if (Op::kArguments[k].role == Role::kOptional && !entry.data[k]) {
      absent[k] = true;
      strides[k] = 1;
      longest = std::min(longest, kZeros);
    }
  }
  const bool plain = std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 1; });
  walk(entry.layout, begin, end, [&](const std::array<int64_t, N>& offsets, int64_t length) {
    for (int64_t done = 0; done < length; done += longest) {
      std::array<T*, N> pointers;
      for (size_t k = 0; k < N; ++k) {
        pointers[k] = absent[k] ? reinterpret_cast<T*>(const_cast<char*>(zeros))
                                : static_cast<T*>(entry.data[k]) + offsets[k] + done * strides[k];
      }
      const int64_t now = std::min(longest, length - done);
      if (plain) {
        row<Op, T>(formula, pointers, now, std::make_index_sequence<N>());
      } else {
        strided_row<Op, T>(formula, pointers, strides, now, std::make_index_sequence<N>());
      }
    }
  });
}

template <class Op>
Chunk<Op> chunk_for(const Name& name, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return chunk<Op, double>;
    case ScalarType::Float:
      return chunk<Op, float>;
    case ScalarType::Half:
      return chunk<Op, torch::headeronly::Half>;
    case ScalarType::BFloat16:
      return chunk<Op, torch::headeronly::BFloat16>;
    default:
      fail(Op::kName, ": ", name, " must be float64, float32, float16 or bfloat16; got ", toString(dtype));
  }
}

// The arguments that are given, in the order of kArguments.
template <class Op>
using Lists = std::array<const List*, kCount<Op> - new_count<Op>()>;

template <class Op>
using Views = std::array<std::optional<View>, kCount<Op>>;

template <class Op>
void check_lengths(const Lists<Op>& lists) {
  for (size_t k = 1; k < lists.size(); ++k) {
    const Argument& argument = Op::kArguments[k + new_count<Op>()];
    if (argument.role != Role::kOptional || !lists[k]->empty()) {
      check_same_length(Op::kName, Op::kArguments[new_count<Op>()].name, lists[0]->size(), argument.name,
                        lists[k]->size());
    }
  }
}

// The tensors of index i, each checked by itself and against the others.
template <class Op>
Views<Op> views_of(const Lists<Op>& lists, size_t i) {
  constexpr size_t kNew = new_count<Op>();
  const auto name = [i](size_t k) { return Name{Op::kArguments[k].name, i}; };
  Views<Op> views;
  for (size_t k = kNew; k < views.size(); ++k) {
    if (lists[k - kNew]->empty()) {
      continue;
    }
    const bool written = Op::kArguments[k].role == Role::kUpdated;
    const View& view = views[k].emplace((*lists[k - kNew])[i], written ? Access::kWrite : Access::kRead);
    check_cpu(Op::kName, name(k), view);
    check_alike(Op::kName, name(k), view, name(kNew), *views[kNew]);
    if (written) {
      check_writable(Op::kName, name(k), view);
    }
  }
  for (size_t k = kNew; k < views.size(); ++k) {
    for (size_t j = kNew; j < views.size(); ++j) {
      if (views[k] && views[j] && views[j]->written && (j < k || !views[k]->written)) {
        check_overlap(Op::kName, name(k), *views[k], name(j), *views[j]);
      }
    }
  }
  return views;
}

template <class Op>
Entry<Op> entry_of(const Views<Op>& views, Chunk<Op> chunk) {
  Entry<Op> entry;
  std::array<const View*, kCount<Op>> present{};
  for (size_t k = 0; k < present.size(); ++k) {
    present[k] = views[k] ? &*views[k] : nullptr;
    entry.data[k] = views[k] ? views[k]->data : nullptr;
  }
  entry.layout = layout_of(present);
  entry.chunk = chunk;
  return entry;
}

// Runs the op over lists of tensors and returns the new ones: all of the first new argument, then all of the second, and
// so on. Everything is checked before anything is written. numbers_of(i) gives the Numbers of the tensors of index i.
template <class Op, class NumbersOf>
StableIValue run(const Lists<Op>& lists, const NumbersOf& numbers_of) {
  constexpr size_t kNew = new_count<Op>();
  const size_t n = lists[0]->size();
  check_lengths<Op>(lists);
  std::vector<Entry<Op>> entries;
  std::vector<Span> spans;
  std::vector<int64_t> starts{0};
  std::vector<Owned> made(kNew * n);
  entries.reserve(n);
  spans.reserve(kNew == 0 ? n * kCount<Op> : 0);
  starts.reserve(n + 1);
  for (size_t i = 0; i < n; ++i) {
    Views<Op> views = views_of<Op>(lists, i);
    const auto chunk = chunk_for<Op>({Op::kArguments[kNew].name, i}, views[kNew]->dtype);
    for (size_t k = 0; k < kNew; ++k) {
      const size_t like = Op::kArguments[k].like;
      Owned& one = made[k * n + i] = empty_like((*lists[like - kNew])[i], *views[like]);
      views[k].emplace(one.get(), Access::kWrite);
    }
    for (size_t k = 0; kNew == 0 && k < views.size(); ++k) {
      if (views[k]) {
        spans.push_back(span_of(*views[k]));
      }
    }
    entries.push_back(entry_of<Op>(views, chunk));
    starts.push_back(starts.back() + entries.back().layout.numel);
  }

  const auto part = [&](size_t i, int64_t begin, int64_t end) {
    entries[i].chunk(entries[i], numbers_of(i), begin, end);
  };
  parallel_over(starts, kShare, order_matters(std::move(spans)), part);

  StableListHandle returned = nullptr;
  if (kNew > 0) {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(made.size(), &returned));
  }
  for (Owned& one : made) {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_push_back(returned, torch::stable::detail::from(one.release())));
  }
  return torch::stable::detail::from(returned);
}

}  // namespace todist
