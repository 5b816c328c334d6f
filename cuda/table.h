// What a launch is told: an argument of the kernel, by value. So it needs no copy to the device and no memory that must outlive the call,
// and a CUDA graph that records the launch holds it. There are two sizes of it: see policy.h.
//
// Terms: a layer is what has norms of its own. A chunk is a run of tiles of one layer, and the unit of work. A layer of one chunk is
// finished by one block at once; the chunks of larger layers come first in the order of work and share their sums in scratch memory.
#ifndef XLA_LAMB_CUDA_TABLE_H_
#define XLA_LAMB_CUDA_TABLE_H_

#include <cstdint>

#include "cuda/policy.h"
#include "ffi/step.h"

namespace xla_lamb {
namespace cuda {

struct TensorEntry {
  const void* parameter;
  const void* gradient;
  const void* first_moment;
  const void* second_moment;
  void* output;
  void* first_moment_out;
  void* second_moment_out;
  int64_t layer_size;
  uint32_t layers;
  uint32_t first_chunk;
  uint32_t first_row;   // of `sums` and `trust`
  uint8_t decays;
  uint8_t adapt;        // Adapt
  uint8_t aligned;      // every layer of every buffer begins at a whole vector
  uint8_t stays;        // u of a whole layer fits the slots of the chip
};

// Scratch memory.
struct Scratch {
  uint32_t* next_chunk;  // the first one that no block has taken
  uint32_t* arrived;     // [parts] of the first chunk of each layer: how many are summed, or kReady
  uint32_t* following;   // [parts] the chunk that the same block took next
  double* sums;          // [parts, 2] of squares of p and u
};

template <int kTensors>
struct StepTable {
  static constexpr int kCapacity = kTensors;
  TensorEntry tensors[kTensors];
  int32_t count;
  uint32_t chunks;
  uint32_t tiles;  // of a chunk
  uint32_t slots;  // of a block; 0 if u does not wait on the chip
  uint32_t rows;
  Types types;
  Decay decay;
  bool emit_updates;
  bool prefetch;   // the next chunks of all blocks fit the L2 cache
  double norm_bounds[2];
  double ratio_bounds[2];
  const void* scalars;
  void* sums;
  void* trust;
  Scratch scratch;
};

struct GradientEntry {
  const void* data;
  int64_t row_size;
  int64_t first_chunk;  // in a row
  int64_t aligned;
};

template <int kTensors>
struct NormTable {
  static constexpr int kCapacity = kTensors;
  GradientEntry gradients[kTensors];
  int32_t count;
  Type type;
  int64_t chunks;   // of a row
  int64_t first_row;
  uint32_t rows;
  uint32_t parts;   // of a row; part k sums chunks k, k + parts, ...
  void* result;     // [rows, 2]
  bool more;        // add to the result, which an earlier launch began
  uint32_t* arrived;  // [rows]
  double* sums;       // [rows, parts, 2]: the sum of squares, and 1 if all is finite, else 0
};

static_assert(sizeof(StepTable<kMaxTensors>) <= 32764 && sizeof(NormTable<kMaxTensors>) <= 32764, "CUDA takes no larger argument");
static_assert(sizeof(StepTable<kMaxTensorsInGraph>) <= 4096 && sizeof(NormTable<kMaxTensorsInGraph>) <= 4096, "of old");

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_TABLE_H_
