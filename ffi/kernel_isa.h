// The hot loops, which are compiled once for each instruction set.
#ifndef XLA_LAMB_FFI_KERNEL_ISA_H_
#define XLA_LAMB_FFI_KERNEL_ISA_H_

#include <cstdint>

#include "ffi/kernel.h"

namespace xla_lamb {

// Consecutive elements of one layer.
struct Range {
  int64_t size;
  const void* parameter;
  const void* gradient;
  const void* first_moment;
  const void* second_moment;
  void* output;
  void* first_moment_out;
  void* second_moment_out;
};

struct Sums {
  double parameter = 0;
  double direction = 0;
};

struct Loops {
  // First pass: new moments, and the sums of squares of p and u.
  Sums (*moments)(const Range&, const Types&, Decay, const double* scalars);
  // Second pass: p - rate * u, or the difference to p; u is recomputed.
  void (*apply)(const Range&, const Types&, Decay, const double* scalars, double rate, bool emit_updates);
  double (*sum_of_squares)(const void* data, Type, int64_t size);
};

extern const Loops kLoops_baseline;
extern const Loops kLoops_avx2;
extern const Loops kLoops_avx512;

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_KERNEL_ISA_H_
