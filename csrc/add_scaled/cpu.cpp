// params, updates, alpha -> params[i] += alpha * updates[i], in place, on the CPU.
#include "../check.h"
#include "../layout.h"
#include "../memory.h"
#include "../numeric.h"
#include "../parallel.h"
#include "formula.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <utility>

namespace todist {
namespace {

constexpr const char* kOp = "add_scaled_";
constexpr int64_t kShare = 262144;  // elements a thread, at least

using Row = void (*)(void*, const void*, const std::array<int64_t, 2>& offsets, const std::array<int64_t, 2>& strides,
                     int64_t length, double alpha);

template <class T>
TODIST_CLONES void row(void* params, const void* updates, const std::array<int64_t, 2>& offsets,
                       const std::array<int64_t, 2>& strides, int64_t length, double alpha) {
  using A = arithmetic_t<T>;
  T* param = static_cast<T*>(params) + offsets[0];
  const T* update = static_cast<const T*>(updates) + offsets[1];
  const A scale = static_cast<A>(alpha);
  if (strides[0] == 1 && strides[1] == 1) {
    for (int64_t i = 0; i < length; ++i) {
      param[i] = static_cast<T>(add_scaled<A>(static_cast<A>(param[i]), static_cast<A>(update[i]), scale));
    }
    return;
  }
  for (int64_t i = 0; i < length; ++i) {
    T& here = param[i * strides[0]];
    here = static_cast<T>(add_scaled<A>(static_cast<A>(here), static_cast<A>(update[i * strides[1]]), scale));
  }
}

Row row_for(const Name& name, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return row<double>;
    case ScalarType::Float:
      return row<float>;
    case ScalarType::Half:
      return row<torch::headeronly::Half>;
    case ScalarType::BFloat16:
      return row<torch::headeronly::BFloat16>;
    default:
      fail(kOp, ": ", name, " must be float64, float32, float16 or bfloat16; got ", toString(dtype));
  }
}

struct Pair {
  void* param;
  const void* update;
  Layout<2> layout;
  Row row;
};

Pair pair_of(size_t i, const View& param, const View& update) {
  const Name param_name{"params", i};
  const Name update_name{"updates", i};
  check_cpu(kOp, param_name, param);
  check_cpu(kOp, update_name, update);
  check_alike(kOp, update_name, update, param_name, param);
  check_writable(kOp, param_name, param);
  check_disjoint_or_same(kOp, update_name, update, param_name, param);
  return {param.data, update.data, layout_of<2>({&param, &update}), row_for(param_name, param.dtype)};
}

void add_scaled_(const std::vector<Tensor>& params, const std::vector<Tensor>& updates, double alpha) {
  check_same_length(kOp, "params", params.size(), "updates", updates.size());
  std::vector<Pair> pairs;
  std::vector<Span> spans;
  std::vector<int64_t> starts{0};
  pairs.reserve(params.size());
  spans.reserve(2 * params.size());
  starts.reserve(params.size() + 1);
  for (size_t i = 0; i < params.size(); ++i) {
    const View param(params[i], Access::kWrite);
    const View update(updates[i], Access::kRead);
    pairs.push_back(pair_of(i, param, update));
    spans.push_back(span_of(param));
    spans.push_back(span_of(update));
    starts.push_back(starts.back() + param.numel);
  }

  const auto chunk = [&](size_t i, int64_t begin, int64_t end) {
    const Pair& pair = pairs[i];
    walk(pair.layout, begin, end, [&](const std::array<int64_t, 2>& offsets, int64_t length) {
      pair.row(pair.param, pair.update, offsets, pair.layout.inner.strides, length, alpha);
    });
  };
  if (!order_matters(std::move(spans))) {
    parallel_over(starts, kShare, chunk);
    return;
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto alone = [&](size_t, int64_t begin, int64_t end) { chunk(i, begin, end); };
    parallel_over({0, pairs[i].layout.numel}, kShare, alone);
  }
}

}  // namespace
}  // namespace todist

STABLE_TORCH_LIBRARY_IMPL(todist, CPU, library) { library.impl("add_scaled_", TORCH_BOX(&todist::add_scaled_)); }
