// Lists of tensors, a formula for one element -> checks -> the formula over all elements of all tensors, in parallel.
#pragma once

#include "arguments.h"
#include "layout.h"
#include "parallel.h"
#include "streaming_store.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace todist {

constexpr int64_t kShare = 65536;  // elements a thread, at least
constexpr int64_t kZeros = 4096;   // elements in the block of zeros that stands for a list that is not there
constexpr int64_t kFar = 8 << 20;  // bytes of results that the caches next to a core do not hold
constexpr int64_t kKept = 1 << 20;  // bytes of a result that the allocator has not just got from the system
alignas(64) inline constexpr char zeros[kZeros * sizeof(double)] = {};

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

// The same, but what is new goes past the cache: it is made in a block that stays there, and sent off from it.
template <class Op, class T>
void streamed_row(const typename Op::template Formula<arithmetic_t<T>>& formula, std::array<T*, kCount<Op>> pointers,
                  int64_t length) {
  constexpr size_t kNew = new_count<Op>();
  constexpr int64_t kBlock = kBurst / sizeof(T);
  alignas(kLine) T made[kNew][kBlock];
  const auto advance = [&](int64_t count) {
    for (T*& pointer : pointers) {
      pointer += count;
    }
    length -= count;
  };
  const auto plain_row = [&](int64_t count) {
    row<Op, T>(formula, pointers, count, std::make_index_sequence<kCount<Op>>());
    advance(count);
  };
  const auto past_line = [](const T* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kLine; };

  plain_row(std::min<int64_t>(length, (kLine - past_line(pointers[0])) % kLine / sizeof(T)));
  const bool aligned = std::none_of(pointers.begin(), pointers.begin() + kNew, past_line);
  while (aligned && length >= kBlock) {
    std::array<T*, kCount<Op>> block = pointers;
    for (size_t k = 0; k < kNew; ++k) {
      block[k] = made[k];
    }
    row<Op, T>(formula, block, kBlock, std::make_index_sequence<kCount<Op>>());
    for (size_t k = 0; k < kNew; ++k) {
      stream(pointers[k], made[k]);
    }
    advance(kBlock);
  }
  plain_row(length);
}

template <class Op>
struct Entry;

template <class Op>
using Chunk = void (*)(const Entry<Op>&, const typename Op::Numbers&, bool streamed, int64_t begin, int64_t end);

// One tensor of each list: those of one index.
template <class Op>
struct Entry {
  std::array<void*, kCount<Op>> data;  // null where the list is not there
  Layout<kCount<Op>> layout;
  Chunk<Op> chunk;
};

template <class Op, class T>
void chunk(const Entry<Op>& entry, const typename Op::Numbers& numbers, bool streamed, int64_t begin, int64_t end) {
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
  for (size_t k = 0; streamed && k < new_count<Op>(); ++k) {
    const T* middle = static_cast<const T*>(entry.data[k]) + (begin + end) / 2;
    streamed = (end - begin) * static_cast<int64_t>(sizeof(T)) < kKept || has_page(middle);
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
      if (!plain) {
        strided_row<Op, T>(formula, pointers, strides, now, std::make_index_sequence<N>());
        continue;
      }
      if constexpr (new_count<Op>() > 0) {
        if (streamed) {
          streamed_row<Op, T>(formula, pointers, now);
          continue;
        }
      }
      row<Op, T>(formula, pointers, now, std::make_index_sequence<N>());
    }
  });
  if (streamed) {
    end_streams();
  }
}

template <class Op>
Chunk<Op> chunk_for(const Name& name, ScalarType dtype) {
  return with_type(Op::kName, name, dtype, [](auto type) -> Chunk<Op> {
    return chunk<Op, typename decltype(type)::type>;
  });
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
  int64_t bytes_made = 0;
  std::vector<Owned> made(kNew * n);
  entries.reserve(n);
  spans.reserve(kNew == 0 ? n * kCount<Op> : 0);
  starts.reserve(n + 1);
  for (size_t i = 0; i < n; ++i) {
    Views<Op> views = views_of<Op>(lists, i, check_cpu);
    const auto chunk = chunk_for<Op>({Op::kArguments[kNew].name, i}, views[kNew]->dtype);
    make_new<Op>(lists, i, views, made);
    add_spans<Op>(views, spans);
    entries.push_back(entry_of<Op>(views, chunk));
    starts.push_back(starts.back() + entries.back().layout.numel);
    bytes_made += static_cast<int64_t>(kNew) * views[kNew]->numel * views[kNew]->itemsize;
  }

  const bool streamed = bytes_made >= kFar && can_stream();
  const auto part = [&](size_t i, int64_t begin, int64_t end) {
    entries[i].chunk(entries[i], numbers_of(i), streamed, begin, end);
  };
  parallel_over(starts, kShare, order_matters(std::move(spans)), part);

  return returned<Op>(std::move(made));
}

}  // namespace todist
