// The emulated device: what device.h needs besides cuda_runtime.h, and what tests set and watch.
//
// A launch runs as many blocks at once as the device has room for (multiprocessors times occupancy), as a GPU does; the others wait.
//
// For ThreadSanitizer each CUDA thread is a thread of its own, and only these order two of them: __syncthreads, __syncwarp, the
// atomics below, and the begin and end of a launch. So a missing barrier is a data race whatever the schedule. Blocks that get the
// place of one that has ended come after it; the first ones, as many as the device has room for, have no order among themselves.
#ifndef XLA_LAMB_CUDA_EMULATION_EMULATION_H_
#define XLA_LAMB_CUDA_EMULATION_EMULATION_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda/emulation/cuda_runtime.h"

namespace emulation {

struct Device {
  int count = 1;               // 0: calls return cudaErrorNoDevice
  int driver_version = 12040;  // 0: calls return cudaErrorInsufficientDriver
  int capability_major = 9;
  int capability_minor = 0;
  int multiprocessors = 2;
  int threads_per_multiprocessor = 2048;
  int shared_per_multiprocessor = 228 * 1024;
  int shared_per_block_optin = 227 * 1024;
  int reserved_per_block = 1024;
  int l2_bytes = 50 * 1024 * 1024;
  bool capturing = false;      // every stream says so; launches run all the same, but take arguments of 4,096 bytes at most
};

// For tests to change between launches.
Device& device();

enum class Schedule {
  kConcurrent,   // one OS thread for each block
  kInterleaved,  // one OS thread; blocks take turns at each barrier, shuffle and wait
  kSequential,   // a block starts when the one before it has ended: one that waits for a later one is a deadlock, which aborts
};

// From the next launch on. Seed 0 runs the threads of a block, and the blocks that take turns, in ascending order; any other seed in
// an order of its own after each barrier.
void SetSchedule(Schedule schedule, uint32_t seed = 0);

// The next call of that runtime function does nothing and returns this error.
void FailNextCall(const char* function_name, cudaError_t error);

// Sees each OnAccess, one at a time; threadIdx and blockIdx say whose it is. An empty one sees nothing.
struct Access {
  const void* address;
  size_t bytes;
  bool write;
  bool streaming;  // with the hint that it leaves the caches first
};
void SetAccessHook(std::function<void(const Access&)> hook);

namespace internal {

extern bool access_hook_is_set;
void ReportAccess(const Access& access);

// Lets the other threads run. A thread that does so again and again, without ever a store in between, waits.
void Yield(bool stores);

}  // namespace internal

// From here on for device code.

// The dynamic shared memory of the calling thread's block: exactly as large as launched, and all bits are ones (NaN) at first.
void* DynamicShared();

inline void OnAccess(const Access& access) {
  if (internal::access_hook_is_set) internal::ReportAccess(access);
}

inline uint32_t FetchAddRelaxed(uint32_t* address, uint32_t value) {
  internal::Yield(value != 0);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline uint32_t FetchAddAcqRel(uint32_t* address, uint32_t value) {
  internal::Yield(value != 0);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

inline uint32_t LoadAcquire(const uint32_t* address) {
  internal::Yield(false);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline void StoreRelease(uint32_t* address, uint32_t value) {
  internal::Yield(true);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

}  // namespace emulation

#endif  // XLA_LAMB_CUDA_EMULATION_EMULATION_H_
