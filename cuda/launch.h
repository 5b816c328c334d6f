// The CUDA kernel's interface: plain pointers to device memory, and no CUDA header, so that its callers compile without a toolkit.
#ifndef XLA_LAMB_CUDA_LAUNCH_H_
#define XLA_LAMB_CUDA_LAUNCH_H_

#include <cstdint>
#include <string>

#include "ffi/step.h"

struct CUstream_st;  // CUDA's own name

namespace xla_lamb {
namespace cuda {

using Stream = CUstream_st*;  // a cudaStream_t

// Device memory that every launch needs for its own use, whatever the tensors.
int64_t ScratchBytes();

// Enqueue one call: a memset and a kernel for each 400 tensors, in a CUDA graph for each 48 (see policy.h). Nothing is allocated, copied or
// waited for, so a graph can record it; it holds the table of tensors by value, as an argument of the kernel. Returns what went wrong,
// with CUDA's name for it, or nothing.
std::string Launch(const Step& step, void* scratch, int64_t scratch_bytes, Stream stream);
std::string Launch(const GradNorm& norm, void* scratch, int64_t scratch_bytes, Stream stream);

// Versions as CUDA counts them (13000 is 13.0) of the runtime in this library, and of the machine's driver: 0 without one.
int RuntimeVersion();
int DriverVersion();

// Why a device of this machine cannot run the kernel; nothing if all can, or if there is no device.
std::string Problem();

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_LAUNCH_H_
