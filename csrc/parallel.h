// Lengths of many tensors -> their elements, laid end to end and dealt out evenly to the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace todist {

// Calls chunk(tensor, begin, end). starts[i] is where tensor i begins in the row of all elements; starts.back() its end.
// A thread gets `share` elements or more: choose it so that they take longer than waking a thread does, some 50 us.
template <class Chunk>
void parallel_over(const std::vector<int64_t>& starts, int64_t share, const Chunk& chunk) {
  torch::stable::parallel_for(0, starts.back(), share, [&](int64_t begin, int64_t end) {
    auto tensor = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (; begin < end; ++tensor) {
      const int64_t stop = std::min(end, starts[tensor + 1]);
      chunk(tensor, begin - starts[tensor], stop - starts[tensor]);
      begin = stop;
    }
  });
}

}  // namespace todist
