// Tensors -> the bytes that they span, and whether a write to one can reach another.
#pragma once

#include "check.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace todist {

struct Span {
  uintptr_t begin;
  uintptr_t end;
  bool written;
};

inline Span span_of(const View& view) {
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  int64_t elements = view.numel > 0 ? 1 : 0;
  for (size_t dim = 0; elements > 0 && dim < view.sizes.size(); ++dim) {
    elements += (view.sizes[dim] - 1) * view.strides[dim];
  }
  return {begin, begin + static_cast<uintptr_t>(elements * view.itemsize), view.written};
}

inline bool overlap(const Span& a, const Span& b) { return a.begin < b.end && b.begin < a.end; }

// Whether any span that is written overlaps another one. If so, the order of the writes matters.
inline bool order_matters(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  uintptr_t end_of_any = 0;
  uintptr_t end_of_written = 0;
  for (const Span& span : spans) {
    if (span.begin == span.end) {
      continue;
    }
    if (span.begin < (span.written ? end_of_any : end_of_written)) {
      return true;
    }
    end_of_any = std::max(end_of_any, span.end);
    end_of_written = std::max(end_of_written, span.written ? span.end : 0);
  }
  return false;
}

inline void check_writable(const char* op, const Name& name, const View& view) {
  for (size_t dim = 0; view.numel > 0 && dim < view.sizes.size(); ++dim) {
    TODIST_CHECK(view.strides[dim] != 0 || view.sizes[dim] == 1, op, ": ", name,
                 " must not overlap itself in memory; got stride 0 in dimension ", dim, " of size ", view.sizes[dim]);
  }
}

// Tensors of one shape that overlap must be the same elements in the same order if one of them is only read, and must
// not overlap if both are written. With gaps, as columns of one matrix have them, the spans do not tell; the rule is then
// the caller's to keep, as in torch.
inline void check_overlap(const char* op, const Name& name, const View& view, const Name& other, const View& written) {
  const Span a = span_of(view);
  const Span b = span_of(written);
  if (!overlap(a, b)) {
    return;
  }
  const auto bytes = static_cast<uintptr_t>(written.numel * written.itemsize);
  const bool gaps = a.end - a.begin != bytes || b.end - b.begin != bytes;
  const bool same = a.begin == b.begin && equal(view.strides, written.strides);
  TODIST_CHECK(view.written ? gaps && !same : gaps || same, op, ": ", name, " must not share memory with ", other,
               view.written ? "" : " unless it is the same tensor");
}

}  // namespace todist
