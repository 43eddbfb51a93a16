// A broken rule -> an exception that names the argument, the rule and what was got.
#pragma once

#include "view.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

namespace todist {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The message is put together only where the rule is broken.
#define TODIST_CHECK(rule, ...)    \
  do {                             \
    if (!(rule)) {                 \
      ::todist::fail(__VA_ARGS__); \
    }                              \
  } while (false)

inline bool equal(IntHeaderOnlyArrayRef left, IntHeaderOnlyArrayRef right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end());
}

inline std::string text(IntHeaderOnlyArrayRef shape) {
  std::ostringstream out;
  out << '(';
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    out << (dim ? ", " : "") << shape[dim];
  }
  out << ')';
  return out.str();
}

// One member of a list argument: its name in messages, such as `params[3]`.
struct Name {
  const char* list;
  size_t index;
};

inline std::ostream& operator<<(std::ostream& out, const Name& name) {
  return out << '`' << name.list << '[' << name.index << "]`";
}

inline void check_same_length(const char* op, const char* list, size_t length, const char* other, size_t got) {
  TODIST_CHECK(length == got, op, ": `", other, "` must have the length of `", list, "`, ", length, "; got ", got);
}

inline void check_empty(const char* op, const char* list, size_t got, const char* where) {
  TODIST_CHECK(got == 0, op, ": `", list, "` must be empty where ", where, "; got ", got, " tensors");
}

// A float64 tensor on the CPU, of this shape, which holds numbers for the tensors of a list.
inline void check_numbers(const char* op, const char* name, const View& tensor, IntHeaderOnlyArrayRef shape) {
  TODIST_CHECK(tensor.cpu, op, ": `", name, "` must be on the CPU");
  TODIST_CHECK(tensor.dtype == ScalarType::Double, op, ": `", name, "` must be float64; got ", toString(tensor.dtype));
  TODIST_CHECK(equal(tensor.sizes, shape), op, ": `", name, "` must have the shape ", text(shape), "; got ",
               text(tensor.sizes));
}

inline void check_cpu(const char* op, const Name& name, const View& tensor, const Name&, const View&) {
  TODIST_CHECK(tensor.cpu, op, ": ", name, " must be on the CPU");
}

inline void check_cuda(const char* op, const Name& name, const View& tensor, const Name& like, const View& model) {
  TODIST_CHECK(tensor.cuda, op, ": ", name, " must be on a CUDA device");
  TODIST_CHECK(tensor.device == model.device, op, ": ", name, " must be on the device of ", like, ", cuda:", model.device,
               "; got cuda:", tensor.device);
}

inline void check_alike(const char* op, const Name& name, const View& tensor, const Name& like, const View& model) {
  TODIST_CHECK(tensor.dtype == model.dtype, op, ": ", name, " must have the dtype of ", like, ", ",
               toString(model.dtype), "; got ", toString(tensor.dtype));
  TODIST_CHECK(equal(tensor.sizes, model.sizes), op, ": ", name, " must have the shape of ", like, ", ",
               text(model.sizes), "; got ", text(tensor.sizes));
}

}  // namespace todist
