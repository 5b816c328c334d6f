// Launching the kernels, whose code is in kernel.cu. launch.cc makes the tables.
#ifndef XLA_LAMB_CUDA_KERNEL_H_
#define XLA_LAMB_CUDA_KERNEL_H_

#include <cuda_runtime.h>

#include "cuda/table.h"

namespace xla_lamb {
namespace cuda {

Kind KindOf(const Types& types);

// Elements that a thread reads or writes at once, so that the widest type is accessed in 16 bytes.
int VectorOf(Kind kind);
int VectorOf(Type type);

// Elements of a tile.
int64_t TileOf(Kind kind);
int64_t TileOf(Type type);

// Shared memory of a block, besides its slots.
int64_t SharedBytes();

// For both sizes of tables.
template <int kTensors>
cudaError_t Run(Part part, const StepTable<kTensors>& table, int blocks, cudaStream_t stream);
template <int kTensors>
cudaError_t Run(const NormTable<kTensors>& table, int blocks, cudaStream_t stream);

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_KERNEL_H_
