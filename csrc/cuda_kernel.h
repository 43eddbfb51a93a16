// Lists of tensors, a formula for one element -> checks -> the formula over all elements of all tensors, on CUDA.
#pragma once

#include "arguments.h"
#include "cuda_device.h"
#include "cuda_element.h"
#include "layout.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace todist {

constexpr int64_t kChunk = 2048;  // elements of one tensor that a block does at a time; full packs of every width

// One member of an array of what cannot be made without its numbers.
template <class Member>
union Slot {
  char empty;
  Member member;

  Slot() : empty() {}
};

// Tensors whose elements all lie in the same order without gaps: as many of them as a launch carries. Their chunks are
// laid end to end, and a block finds by halving which tensor a chunk is of.
template <class Op, class T>
struct Table {
  static constexpr size_t kBytes =
      kCount<Op> * sizeof(void*) + 2 * sizeof(int64_t) + sizeof(bool) + sizeof(FormulaOf<Op, T>);
  static constexpr int32_t kMost = (kParameterBytes - 32) / kBytes;

  void* data[kMost][kCount<Op>];
  int64_t numel[kMost];
  int64_t first_chunk[kMost + 1];  // the last one says how many there are
  Slot<FormulaOf<Op, T>> formulas[kMost];
  bool aligned[kMost];  // to the widest packs
  int32_t count;
};

template <class Op, class T>
__global__ void __launch_bounds__(kThreads) run_table(const __grid_constant__ Table<Op, T> table) {
  constexpr int kWidth = kWidest<T>;
  constexpr auto kAll = std::make_index_sequence<kCount<Op>>();
  for (int64_t chunk = blockIdx.x; chunk < table.first_chunk[table.count]; chunk += gridDim.x) {
    int32_t tensor = 0;
    for (int32_t end = table.count; end - tensor > 1;) {
      const int32_t middle = (tensor + end) / 2;
      (chunk < table.first_chunk[middle] ? end : tensor) = middle;
    }
    const FormulaOf<Op, T> formula = table.formulas[tensor].member;
    void* const* data = table.data[tensor];
    const int64_t begin = (chunk - table.first_chunk[tensor]) * kChunk;
    const int64_t left = table.numel[tensor] - begin;
    const int32_t length = static_cast<int32_t>(left < kChunk ? left : kChunk);
    const int32_t packed = table.aligned[tensor] ? length - length % kWidth : 0;
    int64_t offsets[kCount<Op>];
    const auto at = [&](int32_t i) {
#pragma unroll
      for (size_t k = 0; k < kCount<Op>; ++k) {
        offsets[k] = begin + i;
      }
    };
    for (int32_t i = static_cast<int32_t>(threadIdx.x) * kWidth; i < packed; i += kThreads * kWidth) {
      at(i);
      apply<Op, kWidth, T>(formula, data, offsets, kAll);
    }
    for (int32_t i = packed + static_cast<int32_t>(threadIdx.x); i < length; i += kThreads) {
      at(i);
      apply<Op, 1, T>(formula, data, offsets, kAll);
    }
  }
}

constexpr int32_t kMostLoops = 36;  // 2**36 elements: no GPU holds tensors that need more

// One tensor of any strides.
template <class Op, class T>
struct Strided {
  void* data[kCount<Op>];
  int64_t numel;
  int64_t sizes[kMostLoops];  // the fastest first
  int64_t strides[kMostLoops][kCount<Op>];
  Slot<FormulaOf<Op, T>> formula;
  int32_t loops;
  bool narrow;  // positions fit into 32 bits, which are divided faster
};

template <class Op, class T>
__global__ void __launch_bounds__(kThreads) run_strided(const __grid_constant__ Strided<Op, T> tensor) {
  const FormulaOf<Op, T> formula = tensor.formula.member;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < tensor.numel; i += step) {
    int64_t offsets[kCount<Op>] = {};
    int64_t rest = i;
    for (int32_t loop = 0; loop < tensor.loops; ++loop) {
      const int64_t size = tensor.sizes[loop];
      const int64_t above = tensor.narrow ? static_cast<uint32_t>(rest) / static_cast<uint32_t>(size) : rest / size;
      const int64_t index = rest - above * size;
      rest = above;
#pragma unroll
      for (size_t k = 0; k < kCount<Op>; ++k) {
        offsets[k] += index * tensor.strides[loop][k];
      }
    }
    apply<Op, 1, T>(formula, tensor.data, offsets, std::make_index_sequence<kCount<Op>>());
  }
}

// One tensor of each list: those of one index.
template <class Op>
struct CudaEntry {
  std::array<void*, kCount<Op>> data;  // null where the list is not there
  Layout<kCount<Op>> layout;
  ScalarType dtype;
  int32_t device;
};

template <class Op>
CudaEntry<Op> cuda_entry_of(const Views<Op>& views) {
  CudaEntry<Op> entry{{}, {}, views[0]->dtype, views[0]->device};
  std::array<const View*, kCount<Op>> present{};
  for (size_t k = 0; k < present.size(); ++k) {
    present[k] = views[k] ? &*views[k] : nullptr;
    entry.data[k] = views[k] ? views[k]->data : nullptr;
  }
  entry.layout = layout_of(present);
  const size_t loops = entry.layout.outer.size() + 1;
  TODIST_CHECK(loops <= kMostLoops, Op::kName, ": tensors must have at most ", kMostLoops,
               " dimensions with gaps between them on CUDA; got ", loops);
  return entry;
}

// Whether all the tensors that are there lie in memory in the order of the loops, without gaps.
template <class Op>
bool plain(const CudaEntry<Op>& entry) {
  for (size_t k = 0; k < kCount<Op>; ++k) {
    if (entry.data[k] && entry.layout.inner.strides[k] != 1) {
      return false;
    }
  }
  return entry.layout.outer.empty();
}

template <class Op, class T, class Numbers>
void launch_strided(const CudaEntry<Op>& entry, const Numbers& numbers) {
  Strided<Op, T> tensor;
  tensor.numel = entry.layout.numel;
  tensor.loops = static_cast<int32_t>(entry.layout.outer.size()) + 1;
  tensor.narrow = tensor.numel <= std::numeric_limits<uint32_t>::max();
  tensor.formula.member = FormulaOf<Op, T>(numbers);
  std::copy(entry.data.begin(), entry.data.end(), tensor.data);
  for (int32_t i = 0; i < tensor.loops; ++i) {
    const Loop<kCount<Op>>& loop = i == 0 ? entry.layout.inner : entry.layout.outer[i - 1];
    tensor.sizes[i] = loop.size;
    std::copy(loop.strides.begin(), loop.strides.end(), tensor.strides[i]);
  }
  launch(entry.device, run_strided<Op, T>, (tensor.numel + kThreads - 1) / kThreads, tensor);
}

template <class Op, class T>
class Filled {
 public:
  Filled() { clear(); }

  template <class Numbers>
  void add(const CudaEntry<Op>& entry, const Numbers& numbers) {
    if (table_.count == Table<Op, T>::kMost || entry.device != device_) {
      flush();
    }
    device_ = entry.device;
    const int32_t i = table_.count++;
    const int64_t numel = entry.layout.numel;
    uintptr_t bits = 0;
    for (size_t k = 0; k < kCount<Op>; ++k) {
      table_.data[i][k] = entry.data[k];
      bits |= reinterpret_cast<uintptr_t>(entry.data[k]);
    }
    table_.aligned[i] = bits % sizeof(Pack<T, kWidest<T>>) == 0;
    table_.numel[i] = numel;
    table_.first_chunk[i + 1] = table_.first_chunk[i] + (numel + kChunk - 1) / kChunk;
    table_.formulas[i].member = FormulaOf<Op, T>(numbers);
  }

  void flush() {
    if (table_.count > 0) {
      launch(device_, run_table<Op, T>, table_.first_chunk[table_.count], table_);
      clear();
    }
  }

 private:
  void clear() {
    table_.count = 0;
    table_.first_chunk[0] = 0;
  }

  Table<Op, T> table_;
  int32_t device_ = 0;
};

// The entries begin..end of one dtype; no two of them write where the other one reads.
template <class Op, class T, class NumbersOf>
void launch_entries(const std::vector<CudaEntry<Op>>& entries, size_t begin, size_t end, ScalarType dtype,
                    const NumbersOf& numbers_of) {
  Filled<Op, T> table;
  for (size_t i = begin; i < end; ++i) {
    const CudaEntry<Op>& entry = entries[i];
    if (entry.dtype != dtype || entry.layout.numel == 0) {
      continue;
    }
    if (plain(entry)) {
      table.add(entry, numbers_of(i));
    } else {
      launch_strided<Op, T>(entry, numbers_of(i));
    }
  }
  table.flush();
}

// As `run` in cpu_kernel.h. Nothing waits for the device: numbers come from the CPU, and the next use of what is written
// follows on the same stream.
template <class Op, class NumbersOf>
StableIValue run(const Lists<Op>& lists, const NumbersOf& numbers_of) {
  constexpr size_t kNew = new_count<Op>();
  const size_t n = lists[0]->size();
  check_lengths<Op>(lists);
  std::vector<CudaEntry<Op>> entries;
  std::vector<Span> spans;
  std::vector<ScalarType> dtypes;
  std::vector<Owned> made(kNew * n);
  entries.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    Views<Op> views = views_of<Op>(lists, i, check_cuda);
    const ScalarType dtype = views[kNew]->dtype;
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
      with_type(Op::kName, Name{Op::kArguments[kNew].name, i}, dtype, [](auto) {});
      dtypes.push_back(dtype);
    }
    make_new<Op>(lists, i, views, made);
    add_spans<Op>(views, spans);
    entries.push_back(cuda_entry_of<Op>(views));
  }

  const auto between = [&](size_t begin, size_t end, ScalarType dtype) {
    with_type(Op::kName, Name{Op::kArguments[kNew].name, begin}, dtype, [&](auto type) {
      launch_entries<Op, typename decltype(type)::type>(entries, begin, end, dtype, numbers_of);
    });
  };
  if (order_matters(std::move(spans))) {
    for (size_t i = 0; i < n; ++i) {
      between(i, i + 1, entries[i].dtype);
    }
  } else {
    for (const ScalarType dtype : dtypes) {
      between(0, n, dtype);
    }
  }
  return returned<Op>(std::move(made));
}

}  // namespace todist
