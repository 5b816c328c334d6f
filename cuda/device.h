// The few things that are spelled differently for a GPU and for the emulation on a host (see emulation/): memory accesses of up to 16
// bytes, and what blocks use to wait for one another.
#ifndef XLA_LAMB_CUDA_DEVICE_H_
#define XLA_LAMB_CUDA_DEVICE_H_

#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulation.h"
#endif

namespace xla_lamb {
namespace cuda {

// Whether data will be used again soon: streaming data leaves the caches first.
enum class Use { kAgain, kStreaming };

#ifdef __CUDACC__

#define XLA_LAMB_DEVICE static __device__ __forceinline__
#define XLA_LAMB_MEMBER __device__ __forceinline__

template <typename W>
XLA_LAMB_DEVICE W LoadGlobal(const void* from, Use use) {
  const W* at = static_cast<const W*>(from);
  return use == Use::kStreaming ? __ldcs(at) : *at;
}
template <typename W>
XLA_LAMB_DEVICE void StoreGlobal(W value, void* to, Use use) {
  W* at = static_cast<W*>(to);
  if (use == Use::kStreaming) {
    __stcs(at, value);
  } else {
    *at = value;
  }
}

// Begins to bring a cache line into the L2 cache.
XLA_LAMB_DEVICE void Prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }

// Dynamic shared memory.
XLA_LAMB_DEVICE void* SharedMemory() {
  extern __shared__ uint4 shared_memory[];
  return shared_memory;
}

// Orders nothing, so nothing that the thread has written is waited for.
XLA_LAMB_DEVICE uint32_t FetchAddRelaxed(uint32_t* at, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(value));
  return old;
}
// What this block has written is seen by whoever reads the sum, and the other way round.
XLA_LAMB_DEVICE uint32_t FetchAdd(uint32_t* at, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(value) : "memory");
  return old;
}
XLA_LAMB_DEVICE uint32_t LoadAcquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
XLA_LAMB_DEVICE void StoreRelease(uint32_t* at, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

#else

#define XLA_LAMB_DEVICE static inline
#define XLA_LAMB_MEMBER inline

static inline void CheckAligned(const void* address, size_t bytes) {  // a fault on a GPU
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  std::fprintf(stderr, "misaligned access of %zu bytes at %p\n", bytes, address);
  std::abort();
}
template <typename W>
W LoadGlobal(const void* from, Use use) {
  CheckAligned(from, sizeof(W));
  emulation::OnAccess({from, sizeof(W), false, use == Use::kStreaming});
  W value;
  std::memcpy(&value, from, sizeof(W));
  return value;
}
template <typename W>
void StoreGlobal(W value, void* to, Use use) {
  CheckAligned(to, sizeof(W));
  emulation::OnAccess({to, sizeof(W), true, use == Use::kStreaming});
  std::memcpy(to, &value, sizeof(W));
}

static inline void Prefetch(const void*) {}
static inline void* SharedMemory() { return emulation::DynamicShared(); }
static inline uint32_t FetchAddRelaxed(uint32_t* at, uint32_t value) { return emulation::FetchAddRelaxed(at, value); }
static inline uint32_t FetchAdd(uint32_t* at, uint32_t value) { return emulation::FetchAddAcqRel(at, value); }
static inline uint32_t LoadAcquire(const uint32_t* at) { return emulation::LoadAcquire(at); }
static inline void StoreRelease(uint32_t* at, uint32_t value) { emulation::StoreRelease(at, value); }

#endif

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_DEVICE_H_
