// What a call asks of a kernel, in plain pointers: the common language of the handlers and of the CPU and CUDA kernels. The tensors lie
// where the kernel runs; so do the scalars and the small tables.
#ifndef XLA_LAMB_FFI_STEP_H_
#define XLA_LAMB_FFI_STEP_H_

#include <cstdint>
#include <vector>

#include "ffi/arithmetic.h"
#include "ffi/convert.h"

namespace xla_lamb {

// Which part of a step a call does.
enum class Part { kStep, kMoments, kApply };

// The storage types of all tensors of one call. Arithmetic is in double where the parameters are, else in float.
struct Types {
  Type parameter = Type::kF32;
  Type gradient = Type::kF32;
  Type first_moment = Type::kF32;
  Type second_moment = Type::kF32;
  Type output = Type::kF32;  // of the new parameters, or of the updates
};

// One tensor. Its leading axes may index `layers` independent layers of size / layers elements each; each has norms and a ratio of
// its own. An output may be the very buffer of its input; otherwise the two do not overlap.
struct Tensor {
  int64_t size = 0;
  int64_t layers = 1;
  bool decays = true;
  Adapt adapt = Adapt::kAlways;
  const void* parameter = nullptr;
  const void* gradient = nullptr;       // not for kApply
  const void* first_moment = nullptr;   // for kApply the new ones
  const void* second_moment = nullptr;
  void* output = nullptr;               // not for kMoments
  void* first_moment_out = nullptr;     // not for kApply
  void* second_moment_out = nullptr;
};

struct Step {
  Part part = Part::kStep;
  Types types;
  Decay decay = Decay::kInRatio;
  bool emit_updates = false;  // output = new parameter - parameter
  double norm_bounds[2] = {0, 0};
  double ratio_bounds[2] = {0, 0};
  // `rows` vectors of kNumScalars scalars, in the type of the arithmetic. Tensors of a call with more than one row are batched: their
  // first layers / rows layers belong to row 0, and so on.
  const void* scalars = nullptr;
  int64_t rows = 1;
  std::vector<Tensor> tensors;
  // One row for each layer of each tensor, in order, in the type of the arithmetic.
  void* sums = nullptr;   // [layers, 2] sums of squares of p and u: out of kMoments, into kApply
  void* trust = nullptr;  // [layers, 3] |p|, |u| and the ratio: out of kStep and kApply
};

struct Gradient {
  const void* data = nullptr;
  int64_t size = 0;
};

struct GradNorm {
  Type type = Type::kF32;
  int64_t rows = 1;  // batch: each row of each gradient has size / rows elements
  std::vector<Gradient> gradients;
  void* result = nullptr;  // [rows, 2] in the type of the arithmetic: the sum of squares, and 1 if all is finite, else 0
};

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_STEP_H_
