// Small kernels prove that the emulated device computes, waits and checks as CUDA promises, and others that it reports what is wrong:
// those run in a process of their own, this program with the name of a case. Built plain and under each sanitizer.
#include "cuda/emulation/emulation.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulation {
namespace {

int failures = 0;
int checks = 0;

void Check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

const Schedule kSchedules[] = {Schedule::kSequential, Schedule::kInterleaved, Schedule::kConcurrent};

std::string Name(Schedule schedule, uint32_t seed) {
  const char* const names[] = {"concurrent", "interleaved", "sequential"};
  return std::string(names[static_cast<int>(schedule)]) + ", seed " + std::to_string(seed);
}

template <typename Argument>
cudaError_t Launch(void (*kernel)(Argument), unsigned blocks, unsigned threads, size_t shared_bytes, Argument argument) {
  void* arguments[] = {&argument};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, shared_bytes, nullptr);
}

template <typename T>
__device__ __forceinline__ T Load(const T* address) {
  OnAccess({address, sizeof(T), false, false});
  return *address;
}

template <typename T>
__device__ __forceinline__ void Store(T* address, T value) {
  OnAccess({address, sizeof(T), true, false});
  *address = value;
}

struct SumArgument {
  const double* x;
  unsigned size;
  double* block_sums;
  uint32_t* ticket;
  double* total;
  unsigned* largest;  // of all thread numbers of each block
};

template <typename T>
__device__ T BlockSum(T value, T* shared) {
  for (unsigned delta = 16; delta > 0; delta /= 2) value += __shfl_down_sync(0xffffffff, value, delta);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned warps = blockDim.x / 32;
  if (threadIdx.x < 32) {
    value = threadIdx.x < warps ? shared[threadIdx.x] : T(0);
    for (unsigned delta = 16; delta > 0; delta /= 2) value += __shfl_down_sync(0xffffffff, value, delta);
    if (threadIdx.x == 0) shared[0] = value;
  }
  __syncthreads();
  value = shared[0];
  __syncthreads();
  return value;
}

// The sum of each block, and by the last block to arrive the sum of those.
__global__ void __launch_bounds__(256, 2) Sum(const __grid_constant__ SumArgument a) {
  auto* const shared = static_cast<double*>(DynamicShared());
  double value = 0;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < a.size; i += gridDim.x * blockDim.x) value += Load(a.x + i);
  value = BlockSum(value, shared);

  unsigned largest = threadIdx.x;
  for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2) largest = std::max(largest, __shfl_xor_sync(0xffffffff, largest, lane_mask));
  largest = __shfl_sync(0xffffffff, largest, 7);
  if (threadIdx.x == blockDim.x - 32) a.largest[blockIdx.x] = largest;

  auto* const last = static_cast<uint32_t*>(DynamicShared());
  if (threadIdx.x == 0) {
    Store(a.block_sums + blockIdx.x, value);
    *last = FetchAddAcqRel(a.ticket, 1) == gridDim.x - 1;
  }
  __syncthreads();
  const bool is_last = *last != 0;
  __syncthreads();
  if (!is_last) return;
  value = BlockSum(threadIdx.x < gridDim.x ? Load(a.block_sums + threadIdx.x) : 0, shared);
  if (threadIdx.x == 0) Store(a.total, value);
}

void TestSum() {
  for (const auto& shape : {std::pair<unsigned, unsigned>{1, 32}, {5, 96}, {20, 64}, {2, 256}}) {
    const unsigned blocks = shape.first, threads = shape.second;
    for (Schedule schedule : kSchedules) {
      for (uint32_t seed : {0, 1, 2, 77}) {
        SetSchedule(schedule, seed);
        std::vector<double> x(1000), block_sums(blocks, -1);
        std::iota(x.begin(), x.end(), 1);
        std::vector<unsigned> largest(blocks);
        uint32_t ticket = 0;
        double total = -1;
        const cudaError_t error = Launch(Sum, blocks, threads, threads / 32 * sizeof(double),
                                         SumArgument{x.data(), 1000, block_sums.data(), &ticket, &total, largest.data()});
        const std::string what = std::to_string(blocks) + " blocks of " + std::to_string(threads) + ", " + Name(schedule, seed);
        Check(error == cudaSuccess && ticket == blocks && total == 500500, "sum of " + what);
        Check(std::accumulate(block_sums.begin(), block_sums.end(), 0.0) == 500500, "sums of blocks of " + what);
        Check(largest == std::vector<unsigned>(blocks, threads - 1), "largest of " + what);
      }
    }
  }
}

// Each block waits for the other one.
__global__ void Rendezvous(uint32_t* flags) {
  if (threadIdx.x == 0) {
    StoreRelease(flags + blockIdx.x, 1);
    while (LoadAcquire(flags + (gridDim.x - 1 - blockIdx.x)) == 0) __nanosleep(100);
  }
  __syncthreads();
}

// Each block waits for the one before it.
__global__ void Chain(uint32_t* turn) {
  if (threadIdx.x == 0) {
    while (LoadAcquire(turn) != blockIdx.x) __nanosleep(100);
    StoreRelease(turn, blockIdx.x + 1);
  }
}

void TestWaits() {
  for (Schedule schedule : kSchedules) {
    SetSchedule(schedule, 3);
    if (schedule != Schedule::kSequential) {
      uint32_t flags[2] = {0, 0};
      Check(Launch(Rendezvous, 2, 64, 0, flags + 0) == cudaSuccess && flags[0] == 1 && flags[1] == 1, "rendezvous " + Name(schedule, 3));
    }
    uint32_t turn = 0;
    Check(Launch(Chain, 200, 32, 0, &turn) == cudaSuccess && turn == 200, "chain " + Name(schedule, 3));
  }
}

// A warp of 20 lanes; lanes that meet in two groups; a value from a lane outside of the mask.
__global__ void Partial(unsigned* out) {
  const unsigned lane = threadIdx.x;
  const unsigned sum = __shfl_xor_sync(0xffffffff, lane, 1) + __shfl_down_sync(0xffffffff, lane, 40);
  const unsigned mask = lane < 8 ? 0xff : 0xfff00;
  const unsigned first = __shfl_sync(mask, lane, lane < 8 ? 0 : 8);
  const float outside = __shfl_down_sync(mask, 1.0f, 8);
  out[3 * lane] = sum;
  out[3 * lane + 1] = first;
  out[3 * lane + 2] = std::isnan(outside);
}

void TestPartialWarps() {
  for (uint32_t seed : {0, 5}) {
    SetSchedule(Schedule::kInterleaved, seed);
    std::vector<unsigned> out(60);
    Check(Launch(Partial, 1, 20, 0, out.data()) == cudaSuccess, "launch of a partial warp");
    bool good = true;
    for (unsigned lane = 0; lane < 20; ++lane) {
      good = good && out[3 * lane] == (lane ^ 1) + lane;
      good = good && out[3 * lane + 1] == (lane < 8 ? 0 : 8);
      good = good && out[3 * lane + 2] == (lane < 8 || lane >= 12);
    }
    Check(good, "partial warps, seed " + std::to_string(seed));
  }
}

// Neighbours exchange through shared memory: within a warp, then within the block.
struct ExchangeArgument {
  unsigned* out;
  bool sync_warp, sync_block;
};

__global__ void Exchange(const ExchangeArgument a) {
  auto* const shared = static_cast<unsigned*>(DynamicShared());
  const unsigned i = threadIdx.x;
  shared[i] = i;
  if (a.sync_warp) {
    __syncwarp();
  } else {
    __shfl_sync(0xffffffff, i, 0);  // waits too, but orders no memory
  }
  const unsigned left = shared[i ^ 1];
  __syncthreads();
  shared[i] = left;
  if (a.sync_block) __syncthreads();
  a.out[i] = shared[blockDim.x - 1 - i];
}

std::vector<unsigned> RunExchange(bool sync_warp, bool sync_block) {
  std::vector<unsigned> out(64);
  Check(Launch(Exchange, 1, 64, 64 * sizeof(unsigned), {out.data(), sync_warp, sync_block}) == cudaSuccess, "launch of an exchange");
  return out;
}

void TestExchange() {
  for (Schedule schedule : kSchedules) {
    for (uint32_t seed : {0, 1}) {
      SetSchedule(schedule, seed);
      const std::vector<unsigned> out = RunExchange(true, true);
      bool good = true;
      for (unsigned i = 0; i < 64; ++i) good = good && out[i] == ((63 - i) ^ 1);
      Check(good, "exchange " + Name(schedule, seed));
    }
  }
}


template <size_t bytes>
struct Padded {
  float* out;
  char padding[bytes - sizeof(float*)];
};

template <size_t bytes>
__global__ void WriteFirstShared(const Padded<bytes> a) {
  if (threadIdx.x == 0) *a.out = *static_cast<float*>(DynamicShared());
}

void TestUnwrittenShared() {
  float out = 0;
  Check(Launch(WriteFirstShared<16>, 1, 32, 4, {&out, {}}) == cudaSuccess && std::isnan(out), "unwritten shared memory is no NaN");
}

void TestLaunchChecks() {
  float out = 1;
  const auto refused = [&out](cudaError_t error, const char* what) {
    Check(error == cudaErrorInvalidValue && cudaPeekAtLastError() == cudaErrorInvalidValue, std::string(what) + " was launched");
    Check(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess && out == 1, std::string(what) + ": the error");
  };
  const auto kernel = &WriteFirstShared<16>;
  const Padded<16> argument = {&out, {}};
  refused(Launch(kernel, 1, 1025, 4, argument), "a block of 1025");
  refused(Launch(kernel, 0, 32, 4, argument), "no block");
  refused(Launch(kernel, 1, 0, 4, argument), "no thread");
  refused(Launch(kernel, 1, 32, 48 * 1024 + 1, argument), "too much shared memory");
  refused(Launch(WriteFirstShared<32768>, 1, 1, 4, {&out, {}}), "a large argument");
  refused(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device().shared_per_block_optin + 1), "an attribute");

  int blocks = -1;
  Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, 60 * 1024) == cudaSuccess && blocks == 0, "no occupancy");
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024) == cudaSuccess, "an attribute");
  refused(Launch(kernel, 1, 32, 100 * 1024 + 1, argument), "more shared memory than asked for");
  Check(Launch(kernel, 1, 32, 100 * 1024, argument) == cudaSuccess && std::isnan(out), "much shared memory");
  Check(Launch(WriteFirstShared<32760>, 1, 32, 4, {&(out = 1), {}}) == cudaSuccess && std::isnan(out), "an argument that just fits");
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, 60 * 1024);
  Check(blocks == 3, "occupancy by shared memory");
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 250, 0);
  Check(blocks == 8, "occupancy by threads");
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 32, 0);
  Check(blocks == 32, "occupancy by blocks");
}

void TestRuntime() {
  int value = -1;
  Check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess && value == 2, "multiprocessors");
  Check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1) == cudaErrorInvalidDevice, "a device that is not there");
  Check(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaSetDevice(0) == cudaSuccess, "setting a device");
  Check(cudaGetLastError() == cudaErrorInvalidDevice, "a success hides an error");

  device().count = 0;
  Check(cudaGetDeviceCount(&value) == cudaErrorNoDevice && value == 0, "no device");
  device().driver_version = 0;
  Check(cudaGetDevice(&value) == cudaErrorInsufficientDriver, "no driver");
  Check(cudaDriverGetVersion(&value) == cudaSuccess && value == 0, "the version of no driver");
  device() = Device();
  Check(cudaGetDeviceCount(&value) == cudaSuccess && value == 1, "one device");

  FailNextCall("cudaMemcpyAsync", cudaErrorIllegalAddress);
  FailNextCall("cudaLaunchKernel", cudaErrorNoKernelImageForDevice);
  int from = 5, to = 0;
  Check(cudaMemcpyAsync(&to, &from, 4, cudaMemcpyDefault) == cudaErrorIllegalAddress && to == 0, "a copy does not fail");
  Check(cudaMemcpyAsync(&to, &from, 4, cudaMemcpyDefault) == cudaSuccess && to == 5, "the second copy fails");
  uint32_t turn = 0;
  Check(Launch(Chain, 1, 32, 0, &turn) == cudaErrorNoKernelImageForDevice && turn == 0, "a launch does not fail");
  Check(std::string(cudaGetErrorName(cudaGetLastError())) == "cudaErrorNoKernelImageForDevice", "the name of an error");
  Check(cudaMemsetAsync(&to, 1, 4) == cudaSuccess && to == 0x01010101 && cudaStreamSynchronize(nullptr) == cudaSuccess, "memset");

  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  Check(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && mode == cudaStreamCaptureModeGlobal, "capture mode");
  cudaThreadExchangeStreamCaptureMode(&mode);
  Check(mode == cudaStreamCaptureModeRelaxed, "capture mode again");
}

void TestAccessHook() {
  for (Schedule schedule : kSchedules) {
    SetSchedule(schedule);
    std::vector<double> x(1000, 1), block_sums(4);
    std::vector<unsigned> largest(4);
    uint32_t ticket = 0;
    double total = 0;
    std::map<const void*, int> reads;
    std::set<unsigned> writers;
    SetAccessHook([&](const Access& access) {
      if (access.bytes != sizeof(double)) return;
      if (access.write) {
        writers.insert(blockIdx.x * 1000 + threadIdx.x);
      } else {
        ++reads[access.address];
      }
    });
    Launch(Sum, 4, 64, 16, {x.data(), 1000, block_sums.data(), &ticket, &total, largest.data()});
    SetAccessHook(nullptr);
    Check(total == 1000 && reads.size() == 1004, "addresses that were read");
    for (const auto& read : reads) Check(read.second == 1, "an address was read twice");
    Check(writers == std::set<unsigned>({0, 1000, 2000, 3000}), "threads that wrote");
  }
}

__global__ void Spin(const unsigned turns) {
  for (unsigned i = 0; i < turns; ++i) __nanosleep(1);
}

void MeasureSwitches() {
  SetSchedule(Schedule::kSequential);
  double best = INFINITY;
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    Launch(Spin, 1, 256, 0, 500u);
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
  }
  std::printf("%.0f ns to switch to a fiber or back\n", best / (2 * 256 * 501));
}

// What must be reported. Each case runs in a process of its own.

__global__ void ReturnsEarly(const int) {
  if (threadIdx.x == 3) return;
  __syncthreads();
}

__global__ void Diverges(const int) {
  if (threadIdx.x == 3) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

__global__ void ForeignMask(const int) { __syncwarp(threadIdx.x == 3 ? 1 : ~8u); }

__global__ void Traps(const int) {
  if (threadIdx.x == 3) __trap();
}

__global__ void OverrunsShared(unsigned* out) { *out = static_cast<unsigned*>(DynamicShared())[threadIdx.x]; }

__global__ void OverrunsGlobal(unsigned* out) { out[threadIdx.x] = 0; }

// The last block reads what the others wrote, without acquire and release; or all write the same.
struct RelaxedArgument {
  unsigned* out;
  uint32_t* ticket;
};

__global__ void Relaxed(const RelaxedArgument a) {
  a.out[blockIdx.x] = 1;
  if (__atomic_fetch_add(a.ticket, 1, __ATOMIC_RELAXED) == gridDim.x - 1) a.out[0] += a.out[1];
}

__global__ void AllWrite(unsigned* out) { *out = 1; }

struct Case {
  std::string name;
  std::function<void()> run;
  std::string report;
};

std::vector<Case> Cases() {
  static unsigned* const out = static_cast<unsigned*>(std::malloc(10 * sizeof(unsigned)));
  static uint32_t flags[2];
  std::vector<Case> cases = {
      {"sequential-rendezvous", [] { SetSchedule(Schedule::kSequential), Launch(Rendezvous, 2, 64, 0, flags + 0); },
       "deadlock: block 0 waits, and nothing that could end that can run; 1 of 2 blocks have not started"},
      {"small-device-rendezvous",
       [] {
         device().multiprocessors = 1;
         device().threads_per_multiprocessor = 64;
         SetSchedule(Schedule::kInterleaved);
         Launch(Rendezvous, 2, 64, 0, flags + 0);
       },
       "deadlock: block 0 waits, and nothing that could end that can run; 1 of 2 blocks have not started"},
      {"returns-early", [] { Launch(ReturnsEarly, 1, 64, 0, 0); },
       "block 0 is stuck: of its 64 threads are 63 (the first is thread 0) at __syncthreads, 1 (the first is thread 3) at the end"},
      {"diverges", [] { Launch(Diverges, 1, 64, 0, 0); },
       "block 0 is stuck: of its 64 threads are 63 (the first is thread 0) at __syncthreads, 1 (the first is thread 3) at __syncwarp"},
      {"foreign-mask", [] { Launch(ForeignMask, 1, 64, 0, 0); }, "thread 3 of block 0 is not in its own mask"},
      {"traps", [] { Launch(Traps, 2, 64, 0, 0); }, "__trap in thread 3 of block"},
  };
  if (kAddressSanitizer) {
    cases.push_back({"overruns-shared", [] { Launch(OverrunsShared, 1, 65, 64 * 4, out); }, "heap-buffer-overflow"});
    cases.push_back({"overruns-global", [] { Launch(OverrunsGlobal, 1, 11, 0, out); }, "heap-buffer-overflow"});
  }
  if (!kThreadSanitizer) return cases;
  for (Schedule schedule : kSchedules) {
    for (uint32_t seed : {0, 1}) {
      const auto add = [&](const std::string& name, std::function<void()> run) {
        const auto with_schedule = [schedule, seed, run] { SetSchedule(schedule, seed), run(); };
        cases.push_back({name + ", " + Name(schedule, seed), with_schedule, "data race"});
      };
      add("no barrier", [] { RunExchange(true, false); });
      add("no barrier of a warp", [] { RunExchange(false, true); });
      add("no order", [] { Launch(Relaxed, 2, 1, 0, {out, flags}); });
      add("blocks write", [] { Launch(AllWrite, 2, 1, 0, out); });
      add("threads write", [] { Launch(AllWrite, 1, 2, 0, out); });
    }
  }
  return cases;
}

void TestReports() {
  char program[4096] = {};
  Check(readlink("/proc/self/exe", program, sizeof(program) - 1) > 0, "the name of this program");
  for (const Case& c : Cases()) {
    // At its exit ThreadSanitizer would wait a second for more data races.
    std::FILE* const pipe = popen(("TSAN_OPTIONS=atexit_sleep_ms=0 '" + std::string(program) + "' '" + c.name + "' 2>&1").c_str(), "r");
    std::string output;
    for (int byte; (byte = std::getc(pipe)) != EOF;) output += static_cast<char>(byte);
    Check(pclose(pipe) != 0 && output.find(c.report) != std::string::npos, c.name + " is not reported, but: " + output);
  }
}

}  // namespace
}  // namespace emulation

int main(int count, char** arguments) {
  if (count > 1) {
    for (const auto& c : emulation::Cases()) {
      if (c.name == arguments[1]) c.run();
    }
    return 0;
  }
  emulation::TestSum();
  emulation::TestWaits();
  emulation::TestPartialWarps();
  emulation::TestExchange();
  emulation::TestUnwrittenShared();
  emulation::TestLaunchChecks();
  emulation::TestRuntime();
  emulation::TestAccessHook();
  emulation::MeasureSwitches();
  emulation::TestReports();
  std::printf("%d checks, %d failed\n", emulation::checks, emulation::failures);
  return emulation::failures == 0 ? 0 : 1;
}
