// How the CUDA kernel uses a chip: every number that is a choice and not a formula.
//
// A step has to read p, g, m and v and to write p, m and v: 28 bytes for each float32 parameter. The second pass needs the norms of the
// whole layer first, so what it needs must wait on the chip: u waits in shared memory, p in the L2 cache. A layer too large for that is
// computed again from m and v: 40 bytes.
#ifndef XLA_LAMB_CUDA_POLICY_H_
#define XLA_LAMB_CUDA_POLICY_H_

#include <cstdint>

namespace xla_lamb {
namespace cuda {

constexpr int kThreads = 256;  // of a block
constexpr int kWarp = 32;

// A tile is what a block takes at once: its u fills one slot of shared memory, 4,096 floats or 2,048 doubles. Sums are kept for each tile
// and added in order, so neither the number of blocks nor of slots changes a bit of the result.
constexpr int kSlotBytes = 16 * 1024;

constexpr int kCacheLine = 128;

// A kernel is compiled for each kind of a call's storage types.
enum class Kind {
  kFloat32,  // all of them: most calls, and the fewest registers
  kMixed,    // computed in float32
  kHalves,   // all of them 16 bits
  kFloat64,  // computed in float64
};

// How many blocks share an SM, its shared memory and its registers, by compute capability. More blocks hide more latency, but leave fewer
// registers to a thread (128 with 2 blocks, 80 with 3, 64 with 4: no kernel spills), and leave more of the shared memory unused between
// slots. Slots on an SM, and elements whose u is on the chip with float32 (counted; not measured yet):
//   A100  (164 KB, 108 SMs)              2 blocks of 5: 10, 4.4 M, a matrix of 4096 x 1024; 3 blocks of 3 would not hold it
//   H100, H200 (228 KB, 132 SMs)         3 blocks of 4: 12, 6.5 M; what 4 blocks prefetch would leave no room in the L2 cache for p
//   B200  (228 KB, 148 SMs)              4 blocks of 3: 12, 7.3 M
//   L40, RTX 4090 (100 KB, 142 and 128)  2 blocks of 3: 6, 3.5 M and 3.1 M
constexpr int BlocksPerMultiprocessor(int major, Kind kind) {
  if (major != 9 && major != 10) return 2;
  if (kind == Kind::kFloat32) return major == 9 ? 3 : 4;
  return kind == Kind::kFloat64 || (kind == Kind::kHalves && major == 9) ? 3 : 2;
}

#ifdef __CUDA_ARCH__
constexpr int kMajor = __CUDA_ARCH__ / 100;  // registers are assigned for this capability
#else
constexpr int kMajor = 0;
#endif

// While it works on one chunk, a block brings the next one into the L2 cache, if all blocks' chunks take no more than this part of it.
constexpr int kPrefetchPartOfL2 = 2;

// The oldest compute capability that the library holds code for.
constexpr int kOldestMajor = 8;

// Tensors of one launch. Their table is an argument of the kernel, of which CUDA takes 32,764 bytes, from driver 12.1 on. A launch that a CUDA
// graph records stays below the 4,096 of old: drivers have crashed over nodes with more (openxla/xla pull request 19252).
constexpr int kMaxTensors = 400;
constexpr int kMaxTensorsInGraph = 48;
constexpr int kLargeArguments = 12010;  // the driver's version

// Tiles are put together where layers of more than one tile would have more parts than this: the scratch memory has one size for all.
constexpr uint32_t kMaxParts = 1 << 17;

// The gradients' norm is summed in about this many parts.
constexpr uint32_t kNormParts = 4096;

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_POLICY_H_
