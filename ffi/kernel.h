// The CPU kernel. It knows neither XLA nor its FFI.
#ifndef XLA_LAMB_FFI_KERNEL_H_
#define XLA_LAMB_FFI_KERNEL_H_

#include <cstdint>
#include <functional>

#include "ffi/step.h"

namespace xla_lamb {

// Threads that help the calling thread, which does all work that they do not take: a pool that is busy or empty costs time, never the
// result and never a deadlock.
struct Pool {
  int64_t threads = 0;
  std::function<void(std::function<void()>)> schedule;
};

// The result has the same bits for every pool and every instruction set.
void Run(const Step& step, const Pool& pool);
void Run(const GradNorm& norm, const Pool& pool);

// The instruction set that Run uses: "avx512", "avx2" or "baseline"; XLA_LAMB_CPU in the environment asks for a lesser one.
const char* InstructionSet();

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_KERNEL_H_
