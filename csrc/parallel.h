// Lengths of many tensors -> their elements, laid end to end and dealt out evenly to the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace todist {

// Calls chunk(tensor, begin, end). starts[i] is where tensor i begins in the row of all elements; starts.back() its end.
// A thread gets `share` elements or more: choose it so that they take longer than waking a thread does, some 50 us.
// In order, a tensor is done before the next one is begun.
template <class Chunk>
void parallel_over(const std::vector<int64_t>& starts, int64_t share, bool in_order, const Chunk& chunk) {
  const auto between = [&](int64_t first, int64_t last) {
    torch::stable::parallel_for(first, last, share, [&](int64_t begin, int64_t end) {
      auto tensor = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
      for (; begin < end; ++tensor) {
        const int64_t stop = std::min(end, starts[tensor + 1]);
        chunk(tensor, begin - starts[tensor], stop - starts[tensor]);
        begin = stop;
      }
    });
  };
  if (!in_order) {
    between(0, starts.back());
    return;
  }
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    between(starts[i], starts[i + 1]);
  }
}

}  // namespace todist
