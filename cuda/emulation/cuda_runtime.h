// The part of CUDA's language and runtime that our kernel and its launcher use, on the host: a .cu file that includes
// <cuda_runtime.h> and finds this one is plain C++. Each CUDA thread is a fiber; emulation.h says in which order they run.
//
// Grids and blocks have one dimension, warps have 32 lanes, and all streams are the calling thread: what CUDA does later, this has
// done when it returns.
#ifndef XLA_LAMB_CUDA_EMULATION_CUDA_RUNTIME_H_
#define XLA_LAMB_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Of the fiber that the calling thread runs. __thread, since thread_local would call a function at each use.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum { cudaSharedmemCarveoutMaxShared = 100 };

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

typedef struct CUstream_st* cudaStream_t;

namespace emulation {
namespace internal {

// Where a thread stands.
enum class Point : uint8_t { kNone, kSyncThreads, kSyncWarp, kShflDown, kShflXor, kShfl, kAccess, kEnd };

struct Grid {
  const void* kernel;
  void (*call)(const void* kernel, const void* argument);
  const void* argument;
  size_t argument_bytes;
  dim3 blocks, threads;
  size_t shared_bytes;
};

cudaError_t Launch(const Grid& grid);
cudaError_t SetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t MaxActiveBlocks(int* blocks, const void* kernel, int threads, size_t shared_bytes);

// Waits until all lanes in the mask are at the same point; returns what the source lane brought there.
uint64_t MeetWarp(Point point, unsigned mask, uint64_t value = 0, unsigned source = 0);

template <typename T>
T Shuffle(Point point, unsigned mask, T value, unsigned source) {
  static_assert(std::is_trivially_copyable<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = MeetWarp(point, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace internal
}  // namespace emulation

void __syncthreads();
void __nanosleep(unsigned nanoseconds);
[[noreturn]] void __trap();

inline void __syncwarp(unsigned mask = 0xffffffff) { emulation::internal::MeetWarp(emulation::internal::Point::kSyncWarp, mask); }

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return emulation::internal::Shuffle(emulation::internal::Point::kShflDown, mask, value, delta < 32 - lane ? lane + delta : lane);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulation::internal::Shuffle(emulation::internal::Point::kShflXor, mask, value, (threadIdx.x ^ lane_mask) % 32);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulation::internal::Shuffle(emulation::internal::Point::kShfl, mask, value, static_cast<unsigned>(lane) % 32);
}

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);

template <typename T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return emulation::internal::SetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <typename T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T* kernel, int threads, size_t shared_bytes) {
  return emulation::internal::MaxActiveBlocks(blocks, reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

template <typename Argument>
cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes = 0,
                             cudaStream_t = nullptr) {
  static_assert(std::is_trivially_copyable<Argument>::value, "arguments are copied to the device as bytes");
  emulation::internal::Grid grid;
  grid.kernel = reinterpret_cast<const void*>(kernel);
  grid.call = [](const void* kernel, const void* argument) {
    reinterpret_cast<void (*)(Argument)>(const_cast<void*>(kernel))(*static_cast<const Argument*>(argument));
  };
  grid.argument = arguments[0];
  grid.argument_bytes = sizeof(Argument);
  grid.blocks = blocks;
  grid.threads = threads;
  grid.shared_bytes = shared_bytes;
  return emulation::internal::Launch(grid);
}

#endif  // XLA_LAMB_CUDA_EMULATION_CUDA_RUNTIME_H_
