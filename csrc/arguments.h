// Lists of tensors, what an op says of them -> checked views of all the tensors of one index, the new ones made.
#pragma once

#include "check.h"
#include "empty_like.h"
#include "handle.h"
#include "overlap.h"
#include "numeric.h"

#include <torch/headeronly/macros/Macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace todist {

enum class Role {
  kNew,      // is made here and returned
  kUpdated,  // is read and overwritten
  kWritten,  // is overwritten, whatever is in it
  kRead,
  kOptional,  // is read; zeros if the list is empty
};

constexpr bool overwrites(Role role) { return role == Role::kUpdated || role == Role::kWritten; }

struct Argument {
  const char* name;
  Role role;
  size_t like = 0;  // for a new one: the argument whose strides it takes; the first one given, if that is not there
};

// What is said of an op, once:
//
//   struct Op {
//     static constexpr const char* kName;                     // as messages call it
//     static constexpr std::array<Argument, N> kArguments;    // the new ones first; one that is written first of all
//     using Numbers;                                          // what is the same for all elements of a tensor
//     template <class A> using Formula;                       // made from Numbers; takes an A& for each argument
//   };

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
C10_HOST_DEVICE inline arithmetic_t<T> load(const T* from) {
  if constexpr (Op::kArguments[K].role == Role::kNew || Op::kArguments[K].role == Role::kWritten) {
    return 0;
  } else {
    return static_cast<arithmetic_t<T>>(*from);
  }
}

template <class Op, size_t K, class T>
C10_HOST_DEVICE inline void store(T* to, arithmetic_t<T> value) {
  if constexpr (Op::kArguments[K].role == Role::kNew || overwrites(Op::kArguments[K].role)) {
    *to = static_cast<T>(value);
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

// Whether a tensor is where its op runs; `like` is the first one given of its index.
using CheckDevice = void (*)(const char* op, const Name& name, const View& view, const Name& like, const View& model);

// The tensors of index i, each checked by itself and against the others.
template <class Op>
Views<Op> views_of(const Lists<Op>& lists, size_t i, CheckDevice check_device) {
  constexpr size_t kNew = new_count<Op>();
  const auto name = [i](size_t k) { return Name{Op::kArguments[k].name, i}; };
  Views<Op> views;
  for (size_t k = kNew; k < views.size(); ++k) {
    if (lists[k - kNew]->empty()) {
      continue;
    }
    const bool written = overwrites(Op::kArguments[k].role);
    const View& view = views[k].emplace((*lists[k - kNew])[i], written ? Access::kWrite : Access::kRead);
    check_device(Op::kName, name(k), view, name(kNew), *views[kNew]);
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

// The new tensors of index i: they go into the row `made`, all of the first argument before all of the second.
template <class Op>
void make_new(const Lists<Op>& lists, size_t i, Views<Op>& views, std::vector<Owned>& made) {
  constexpr size_t kNew = new_count<Op>();
  for (size_t k = 0; k != kNew; ++k) {
    const size_t wanted = Op::kArguments[k].like;
    const size_t like = views[wanted] ? wanted : kNew;
    Owned& one = made[k * lists[0]->size() + i] = empty_like((*lists[like - kNew])[i], *views[like]);
    views[k].emplace(one.get(), Access::kWrite);
  }
}

// The bytes that the tensors of one index span. An op that makes tensors writes to no others.
template <class Op>
void add_spans(const Views<Op>& views, std::vector<Span>& spans) {
  for (size_t k = 0; new_count<Op>() == 0 && k < views.size(); ++k) {
    if (views[k]) {
      spans.push_back(span_of(*views[k]));
    }
  }
}

// New tensors -> what an op returns; nothing, where there are none.
template <class Op>
StableIValue returned(std::vector<Owned>&& made) {
  StableListHandle list = nullptr;
  if (new_count<Op>() > 0) {
    TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(made.size(), &list));
  }
  for (Owned& one : made) {
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, torch::stable::detail::from(one.release())));
  }
  return torch::stable::detail::from(list);
}

template <class T>
struct Type {
  using type = T;
};

// Calls use(Type<T>()) with the type in which the elements of this dtype are stored.
template <class Use>
auto with_type(const char* op, const Name& name, ScalarType dtype, const Use& use) {
  switch (dtype) {
    case ScalarType::Double:
      return use(Type<double>());
    case ScalarType::Float:
      return use(Type<float>());
    case ScalarType::Half:
      return use(Type<torch::headeronly::Half>());
    case ScalarType::BFloat16:
      return use(Type<torch::headeronly::BFloat16>());
    default:
      fail(op, ": ", name, " must be float64, float32, float16 or bfloat16; got ", toString(dtype));
  }
}

}  // namespace todist
