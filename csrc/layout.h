// The strides of N tensors of one shape -> the fewest loops that walk over all of them together.
#pragma once

#include "view.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace todist {

template <size_t N>
struct Loop {
  int64_t size;
  std::array<int64_t, N> strides;  // in elements, one a tensor
};

template <size_t N>
struct Layout {
  int64_t numel;
  Loop<N> inner;
  std::vector<Loop<N>> outer;  // the fastest first; empty where one loop does it all
};

// Whether the elements lie in memory in the order of the shape, without gaps.
inline bool dense(const View& view) {
  int64_t expected = 1;
  for (size_t dim = view.sizes.size(); dim-- > 0; expected *= view.sizes[dim]) {
    if (view.sizes[dim] != 1 && view.strides[dim] != expected) {
      return false;
    }
  }
  return true;
}

// Whether they lie without gaps in the order of any of the shape's permutations.
inline bool dense_in_some_order(const View& view) {
  if (view.numel == 0 || dense(view)) {
    return true;
  }
  std::vector<std::array<int64_t, 2>> dims;
  for (size_t dim = 0; dim < view.sizes.size(); ++dim) {
    if (view.sizes[dim] != 1) {
      dims.push_back({view.strides[dim], view.sizes[dim]});
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  return std::all_of(dims.begin(), dims.end(), [&expected](const std::array<int64_t, 2>& dim) {
    const bool follows = dim[0] == expected;
    expected *= dim[1];
    return follows;
  });
}

// The first tensor gives the order of the loops: one that is written, so that writes go forward in memory. Where there
// is no tensor, a null pointer, all strides are 0.
template <size_t N>
Layout<N> layout_of(const std::array<const View*, N>& views) {
  Layout<N> layout{views[0]->numel, {}, {}};
  layout.inner.size = layout.numel;
  layout.inner.strides.fill(1);
  if (layout.numel <= 1 ||
      std::all_of(views.begin(), views.end(), [](const View* view) { return !view || dense(*view); })) {
    return layout;
  }

  std::vector<Loop<N>> loops;
  for (size_t dim = views[0]->sizes.size(); dim-- > 0;) {
    Loop<N> loop{views[0]->sizes[dim], {}};
    for (size_t k = 0; k < N; ++k) {
      loop.strides[k] = views[k] ? views[k]->strides[dim] : 0;
    }
    if (loop.size > 1) {
      loops.push_back(loop);
    }
  }
  std::stable_sort(loops.begin(), loops.end(), [](const Loop<N>& a, const Loop<N>& b) { return a.strides < b.strides; });

  layout.inner = loops[0];
  Loop<N>* last = &layout.inner;
  for (size_t i = 1; i < loops.size(); ++i) {
    bool continues = true;
    for (size_t k = 0; k < N; ++k) {
      continues = continues && loops[i].strides[k] == last->strides[k] * last->size;
    }
    if (continues) {
      last->size *= loops[i].size;
    } else {
      layout.outer.push_back(loops[i]);
      last = &layout.outer.back();
    }
  }
  return layout;
}

// Elements begin..end in the order of the loops -> row(offsets, length) for every run along the inner loop.
template <size_t N, class Row>
void walk(const Layout<N>& layout, int64_t begin, int64_t end, const Row& row) {
  if (begin >= end) {
    return;
  }
  std::array<int64_t, N> offsets{};
  const auto advance = [&offsets](const Loop<N>& loop, int64_t steps) {
    for (size_t k = 0; k < N; ++k) {
      offsets[k] += steps * loop.strides[k];
    }
  };
  int64_t position = begin % layout.inner.size;
  int64_t rest = begin / layout.inner.size;
  advance(layout.inner, position);
  std::vector<int64_t> index(layout.outer.size());
  for (size_t i = 0; i < index.size(); ++i) {
    index[i] = rest % layout.outer[i].size;
    rest /= layout.outer[i].size;
    advance(layout.outer[i], index[i]);
  }

  while (begin < end) {
    const int64_t length = std::min(layout.inner.size - position, end - begin);
    row(offsets, length);
    begin += length;
    advance(layout.inner, -position);
    position = 0;
    for (size_t i = 0; i < index.size(); ++i) {
      advance(layout.outer[i], 1);
      if (++index[i] < layout.outer[i].size) {
        break;
      }
      advance(layout.outer[i], -index[i]);
      index[i] = 0;
    }
  }
}

}  // namespace todist
