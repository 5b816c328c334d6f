// Fibers, and a scheduler that runs them: Runner (an OS thread) > Block > Thread (a fiber).
//
// This file is compiled without sanitizers, always: its own bookkeeping is shared by all fibers without synchronization that a
// sanitizer would understand. It tells whichever one is linked about stacks and about the order that CUDA promises.
#include "cuda/emulation/emulation.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" {
#define WEAK __attribute__((weak))  // null where that sanitizer is not linked
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t bytes);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack, size_t* old_bytes);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_set_fiber_name(void* fiber, const char* name);
WEAK void __tsan_acquire(void* address);
WEAK void __tsan_release(void* address);
#undef WEAK
}

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace internal {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;          // of a block
constexpr int kMaxBlocks = 32;                  // of a multiprocessor
constexpr size_t kMaxArgumentBytes = 32764, kMaxArgumentBytesOfOld = 4096;
constexpr int kDefaultSharedBytes = 48 * 1024;  // a kernel gets more if it asks
constexpr size_t kStackBytes = 256 * 1024;      // a page is used when it is touched
constexpr size_t kStaggerBytes = 448;           // between the stacks of neighbours, or all would compete for the same cache lines
constexpr size_t kGuardBytes = 64 * 1024;       // a multiple of every page size
constexpr int kPatience = 10000;                // rounds in which all that runs waits

const char* const kPointNames[] = {"nowhere",         "__syncthreads", "__syncwarp", "__shfl_down_sync",
                                   "__shfl_xor_sync", "__shfl_sync",   "an access",  "the end"};

struct Settings {
  Schedule schedule = Schedule::kInterleaved;
  uint32_t seed = 0;
} settings;

std::function<void(const Access&)> access_hook;
std::mutex access_mutex;

// The stack of a fiber or of an OS thread, and where it goes on.
struct Context {
  void* jump[5];  // of __builtin_setjmp, which is 20 times cheaper than swapcontext and unknown to sanitizers
  bool entered = false;
  Context* resumer = nullptr;   // the one that switched to this one
  const void* stack = nullptr;  // of an OS thread: as the address sanitizer tells the fiber that it switched to
  size_t stack_bytes = 0;
  void* asan_stack = nullptr;
  void* tsan_fiber = nullptr;
};

struct Block;

struct Thread {
  Context context;
  Block* block = nullptr;
  unsigned index = 0;
  Point point = Point::kEnd;
  // At a point of a warp:
  unsigned mask = 0;
  unsigned source = 0;
  uint64_t value = 0;
  // At an access:
  Access access = {};
};

class Runner;

// A place for a block, which one block after another takes.
struct Block {
  Block();
  void Reserve(unsigned count);
  void Start(Runner* runner, const Grid& grid, unsigned index);
  void Turn();
  void NextPhase();
  [[noreturn]] void Stuck();

  Runner* runner = nullptr;
  const Grid* grid = nullptr;
  unsigned index = 0;
  unsigned count = 0;  // of threads
  bool ended = false;
  void* shared = nullptr;
  // A block begins, has barriers and ends: each is a phase in which every thread arrives before any leaves. ThreadSanitizer knows it by
  // an address; two of them in turns, since a thread may arrive at the next one before another has left this one.
  unsigned phase = 0;
  char phase_addresses[2];
  Thread threads[kMaxThreads];
  unsigned order[kMaxThreads];
};

__thread Thread* current;  // null outside kernels

[[noreturn]] __attribute__((format(printf, 1, 2))) void Fail(const char* format, ...) {
  std::fprintf(stderr, "emulation: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::abort();
}

void Acquire(void* address) {
  if (__tsan_acquire) __tsan_acquire(address);
}

void Release(void* address) {
  if (__tsan_release) __tsan_release(address);
}

[[noreturn]] void RunThread();

// Apart from Switch, as __builtin_longjmp must not be in the function of its __builtin_setjmp.
[[noreturn]] __attribute__((noinline)) void GoTo(Context* to) {
  if (to->entered) __builtin_longjmp(to->jump, 1);
  to->entered = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = const_cast<void*>(to->stack);
  start.uc_stack.ss_size = to->stack_bytes;
  start.uc_link = nullptr;
  makecontext(&start, RunThread, 0);
  setcontext(&start);
  Fail("setcontext failed");
}

// What a context does first when it is entered or resumed.
void Arrive(Context* context) {
  if (!__sanitizer_finish_switch_fiber) return;
  __sanitizer_finish_switch_fiber(context->asan_stack, &context->resumer->stack, &context->resumer->stack_bytes);
}

__attribute__((noinline)) void Switch(Context* from, Context* to) {
  to->resumer = from;
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_bytes);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan_fiber, 1);  // 1: without ordering the two
  if (__builtin_setjmp(from->jump) == 0) GoTo(to);
  Arrive(from);
}

// Runs every `stride`th block from `first` on, on the calling OS thread and up to `at_once` at a time.
class Runner {
 public:
  Runner(const Grid& grid, const std::vector<Block*>& places, size_t at_once, unsigned first, unsigned stride)
      : grid_(grid), places_(places.begin(), places.end()), at_once_(at_once), next_(first), stride_(stride) {}
  void Run();
  void Resume(Thread* thread);

  bool moved = false;  // in this round something happened that may end a wait

 private:
  Context context_;
  const Grid& grid_;
  std::deque<Block*> places_;
  const size_t at_once_;
  uint64_t next_;  // the first block that has not started
  const unsigned stride_;
};

void Runner::Run() {
  context_.entered = true;
  if (__tsan_get_current_fiber) context_.tsan_fiber = __tsan_get_current_fiber();
  blockDim = {grid_.threads.x, 1, 1};
  gridDim = {grid_.blocks.x, 1, 1};

  std::minstd_rand random(settings.seed);
  std::vector<Block*> running;
  for (int idle = 0;;) {
    for (; running.size() < at_once_ && next_ < grid_.blocks.x; next_ += stride_) {
      running.push_back(places_.front());
      places_.pop_front();
      running.back()->Start(this, grid_, static_cast<unsigned>(next_));
    }
    if (running.empty()) return;
    if (settings.seed != 0) std::shuffle(running.begin(), running.end(), random);
    moved = false;
    for (Block* block : running) {
      block->Turn();
      if (block->ended) places_.push_back(block);
    }
    running.erase(std::remove_if(running.begin(), running.end(), [](const Block* block) { return block->ended; }), running.end());
    idle = moved ? 0 : idle + 1;
    if (settings.schedule == Schedule::kConcurrent) {
      if (idle != 0) std::this_thread::yield();  // what it waits for is in another OS thread
    } else if (idle > kPatience) {
      Fail("deadlock: block %u waits, and nothing that could end that can run; %u of %u blocks have not started", running[0]->index,
           grid_.blocks.x - static_cast<unsigned>(next_), grid_.blocks.x);
    }
  }
}

void Runner::Resume(Thread* thread) {
  threadIdx = {thread->index, 0, 0};
  for (;;) {
    current = thread;
    Switch(&context_, &thread->context);
    current = nullptr;
    if (thread->point != Point::kAccess) return;
    // The hook runs here, not on the fiber: it is host code, and what it touches would look like a data race between CUDA threads.
    std::lock_guard<std::mutex> lock(access_mutex);
    access_hook(thread->access);
    thread->point = Point::kNone;
  }
}

// Leaves the fiber until its runner resumes it.
void Pause(Thread* self) { Switch(&self->context, self->context.resumer); }

void LeavePhase(Thread* self) { Acquire(&self->block->phase_addresses[(self->block->phase - 1) % 2]); }

void PassPhase(Thread* self, Point point) {
  Release(&self->block->phase_addresses[self->block->phase % 2]);
  self->point = point;
  Pause(self);
  LeavePhase(self);
}

// The whole life of a fiber: one thread of one block after another. It may go on in another OS thread, so no __thread is read twice.
void RunThread() {
  Thread* const self = current;
  Arrive(&self->context);
  LeavePhase(self);
  for (;;) {
    self->block->grid->call(self->block->grid->kernel, self->block->grid->argument);
    PassPhase(self, Point::kEnd);
  }
}

Block::Block() {
  for (unsigned i = 0; i < kMaxThreads; ++i) {
    threads[i].block = this;
    threads[i].index = i;
  }
}

void Block::Reserve(unsigned wanted) {
  for (unsigned i = 0; i < wanted; ++i) {
    Context* const context = &threads[i].context;
    if (context->stack != nullptr) continue;
    void* const map = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map, kGuardBytes, PROT_NONE) != 0) Fail("no memory for the stack of a thread");
    context->stack = static_cast<char*>(map) + kGuardBytes;
    context->stack_bytes = kStackBytes - i % 64 * kStaggerBytes;
    if (__tsan_create_fiber) context->tsan_fiber = __tsan_create_fiber(0);
  }
}

void Block::Start(Runner* new_runner, const Grid& new_grid, unsigned new_index) {
  runner = new_runner;
  grid = &new_grid;
  index = new_index;
  count = grid->threads.x;
  ended = false;
  // Volatile, or it would be a call of memset, which ThreadSanitizer sees.
  volatile uint32_t* const words = static_cast<uint32_t*>(shared);
  for (size_t i = 0; i < grid->shared_bytes / 4; ++i) words[i] = 0xFFFFFFFF;
  for (size_t i = grid->shared_bytes / 4 * 4; i < grid->shared_bytes; ++i) reinterpret_cast<volatile uint8_t*>(words)[i] = 0xFF;
  for (unsigned i = 0; i < count && __tsan_set_fiber_name; ++i) {
    const std::string name = "block " + std::to_string(index) + " thread " + std::to_string(i);
    __tsan_set_fiber_name(threads[i].context.tsan_fiber, name.c_str());
  }
  Release(&phase_addresses[phase % 2]);
  NextPhase();
}

void Block::NextPhase() {
  ++phase;
  std::iota(order, order + count, 0u);
  if (settings.seed != 0) {
    std::seed_seq seeds{settings.seed, index, phase};
    std::minstd_rand random(seeds);
    std::shuffle(order, order + count, random);
  }
  for (unsigned i = 0; i < count; ++i) threads[i].point = Point::kNone;
}

// Runs each thread that can run up to the next point where it waits or lets others run.
void Block::Turn() {
  blockIdx = {index, 0, 0};
  bool ran = false;
  unsigned at_barrier = 0, at_end = 0;
  for (unsigned i = 0; i < count; ++i) {
    Thread* const thread = &threads[order[i]];
    if (thread->point == Point::kNone) {
      runner->Resume(thread);
      ran = true;
      if (thread->point != Point::kNone) runner->moved = true;
    }
    at_barrier += thread->point == Point::kSyncThreads;
    at_end += thread->point == Point::kEnd;
  }
  ended = at_end == count;
  if (at_barrier == count) {
    NextPhase();
  } else if (!ran) {
    Stuck();
  }
}

void Block::Stuck() {
  std::string where;
  for (Point point : {Point::kSyncThreads, Point::kSyncWarp, Point::kShflDown, Point::kShflXor, Point::kShfl, Point::kEnd}) {
    const auto is_there = [point](const Thread& thread) { return thread.point == point; };
    const auto there = std::count_if(threads, threads + count, is_there);
    if (there == 0) continue;
    const Thread* const first = std::find_if(threads, threads + count, is_there);
    where += (where.empty() ? "" : ", ") + std::to_string(there) + " (the first is thread " + std::to_string(first->index) + ") at " +
             kPointNames[static_cast<int>(point)];
  }
  Fail("block %u is stuck: of its %u threads are %s", index, count, where.c_str());
}

std::mutex launch_mutex;  // one grid at a time has the places and the settings

void RunGrid(const Grid& grid, size_t resident) {
  static auto& pool = *new std::vector<std::unique_ptr<Block>>;
  std::vector<Block*> places;
  for (size_t i = 0; i < std::min<size_t>(resident, grid.blocks.x); ++i) {
    if (i == pool.size()) pool.push_back(std::make_unique<Block>());
    places.push_back(pool[i].get());
    places[i]->Reserve(grid.threads.x);
    places[i]->shared = std::malloc(grid.shared_bytes);
  }
  const unsigned count = static_cast<unsigned>(places.size());
  if (settings.schedule == Schedule::kConcurrent) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i) threads.emplace_back([&, i] { Runner(grid, {places[i]}, 1, i, count).Run(); });
    for (std::thread& thread : threads) thread.join();
  } else {
    Runner(grid, places, settings.schedule == Schedule::kSequential ? 1 : count, 0, 1).Run();
  }
  for (Block* place : places) {
    Acquire(&place->phase_addresses[place->phase % 2]);
    std::free(place->shared);
  }
}

// Errors and attributes, as the runtime knows them.

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::mutex runtime_mutex;  // of the two below
std::map<std::string, cudaError_t> failing_calls;
std::map<const void*, int> shared_limits;  // of kernels that asked for more

cudaError_t Return(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What every call begins with.
cudaError_t Enter(const char* function, bool needs_device = true) {
  std::lock_guard<std::mutex> lock(runtime_mutex);
  const auto failing = failing_calls.find(function);
  if (failing != failing_calls.end()) {
    const cudaError_t error = failing->second;
    failing_calls.erase(failing);
    return Return(error);
  }
  if (needs_device && device().driver_version == 0) return Return(cudaErrorInsufficientDriver);
  if (needs_device && device().count == 0) return Return(cudaErrorNoDevice);
  return cudaSuccess;
}

// Blocks of one multiprocessor.
int Occupancy(const void* kernel, size_t threads, size_t shared_bytes) {
  {
    std::lock_guard<std::mutex> lock(runtime_mutex);
    const auto limit = shared_limits.find(kernel);
    if (shared_bytes > static_cast<size_t>(limit == shared_limits.end() ? kDefaultSharedBytes : limit->second)) return 0;
  }
  if (threads == 0 || threads > kMaxThreads) return 0;
  const int by_threads = device().threads_per_multiprocessor / static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
  const int by_shared = device().shared_per_multiprocessor / std::max(1, static_cast<int>(shared_bytes) + device().reserved_per_block);
  return std::min({by_threads, by_shared, kMaxBlocks});
}

}  // namespace

bool access_hook_is_set = false;

void ReportAccess(const Access& access) {
  Thread* const self = current;
  if (self == nullptr) return;
  self->access = access;
  self->point = Point::kAccess;
  Pause(self);
}

void Yield(bool stores) {
  Thread* const self = current;
  if (self == nullptr) return;
  if (stores) self->block->runner->moved = true;
  Pause(self);
}

// The last lane to arrive hands everyone its value. Only __syncwarp orders memory; the address of a thread is where ThreadSanitizer
// sees that.
uint64_t MeetWarp(Point point, unsigned mask, uint64_t value, unsigned source) {
  Thread* const self = current;
  const unsigned lane = self->index % kWarp;
  Thread* const warp = self - lane;
  const unsigned lanes = std::min(kWarp, self->block->count - warp->index);
  mask &= 0xffffffffu >> (kWarp - lanes);
  if ((mask >> lane & 1) == 0) Fail("thread %u of block %u is not in its own mask", self->index, self->block->index);
  const bool orders = point == Point::kSyncWarp;
  if (orders) Release(self);
  self->point = point;
  self->mask = mask;
  self->value = value;
  self->source = source;

  const auto everyone = [mask, warp](auto what) {  // downwards: in ascending order the last lane is missing longest
    for (unsigned i = kWarp; i-- > 0;) {
      if ((mask >> i & 1) != 0 && !what(&warp[i])) return false;
    }
    return true;
  };
  if (!everyone([point, mask](const Thread* other) { return other->point == point && other->mask == mask; })) {
    Pause(self);
  } else {
    uint64_t received[kWarp];
    everyone([&](Thread* other) {
      if (orders) Acquire(other);
      received[other->index % kWarp] = (mask >> other->source & 1) != 0 ? warp[other->source].value : ~uint64_t{0};  // undefined in CUDA
      return true;
    });
    everyone([&](Thread* other) {
      if (orders) Release(other);
      other->value = received[other->index % kWarp];
      other->point = Point::kNone;
      return true;
    });
  }
  if (orders) Acquire(self);
  return self->value;
}

cudaError_t Launch(const Grid& grid) {
  if (const cudaError_t error = Enter("cudaLaunchKernel")) return error;
  if (grid.blocks.y != 1 || grid.blocks.z != 1 || grid.threads.y != 1 || grid.threads.z != 1) Fail("only x is emulated");
  const int occupancy = Occupancy(grid.kernel, grid.threads.x, grid.shared_bytes);
  const bool large = !device().capturing && device().driver_version >= 12010;
  if (occupancy == 0 || grid.blocks.x == 0 || grid.argument_bytes > (large ? kMaxArgumentBytes : kMaxArgumentBytesOfOld)) {
    return Return(cudaErrorInvalidValue);
  }
  std::lock_guard<std::mutex> lock(launch_mutex);
  RunGrid(grid, static_cast<size_t>(occupancy) * device().multiprocessors);
  return cudaSuccess;
}

cudaError_t SetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (const cudaError_t error = Enter("cudaFuncSetAttribute")) return error;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= 0 && value <= 100) return cudaSuccess;  // a hint
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > device().shared_per_block_optin) {
    return Return(cudaErrorInvalidValue);
  }
  std::lock_guard<std::mutex> lock(runtime_mutex);
  shared_limits[kernel] = std::max(value, kDefaultSharedBytes);
  return cudaSuccess;
}

cudaError_t MaxActiveBlocks(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
  if (const cudaError_t error = Enter("cudaOccupancyMaxActiveBlocksPerMultiprocessor")) return error;
  if (threads <= 0) return Return(cudaErrorInvalidValue);
  *blocks = Occupancy(kernel, static_cast<size_t>(threads), shared_bytes);
  return cudaSuccess;
}

}  // namespace internal

using namespace internal;

Device& device() {
  static Device device;
  return device;
}

void SetSchedule(Schedule schedule, uint32_t seed) { settings = {schedule, seed}; }

void FailNextCall(const char* function_name, cudaError_t error) {
  std::lock_guard<std::mutex> lock(runtime_mutex);
  failing_calls[function_name] = error;
}

void SetAccessHook(std::function<void(const Access&)> hook) {
  access_hook_is_set = static_cast<bool>(hook);
  access_hook = std::move(hook);
}

void* DynamicShared() { return current->block->shared; }

}  // namespace emulation

using namespace emulation::internal;

void __syncthreads() { PassPhase(current, Point::kSyncThreads); }

void __nanosleep(unsigned) { Yield(false); }

void __trap() { Fail("__trap in thread %u of block %u", current->index, current->block->index); }

namespace {

struct Error {
  cudaError_t code;
  const char* name;
  const char* text;
};
constexpr Error kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "an argument is invalid"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "there is no memory left"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization failed"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "a grid or block is invalid"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "the driver is older than the runtime"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "there is no such kernel"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "there is no device"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "there is no such device"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "the kernel is not built for this device"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "a kernel used an invalid address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "a kernel failed"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Error& Find(cudaError_t code) {
  return *std::find_if(std::begin(kErrors), std::end(kErrors) - 1, [code](const Error& error) { return error.code == code; });
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return Find(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return Find(error).text; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulation::device().driver_version;
  return Enter(__func__, false);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = emulation::Device().driver_version;  // as if built for the default
  return Enter(__func__, false);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t error = Enter(__func__)) return error;
  *count = emulation::device().count;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t error = Enter(__func__)) return error;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = Enter(__func__)) return error;
  if (device < 0 || device >= emulation::device().count) return Return(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t error = Enter(__func__)) return error;
  const emulation::Device& d = emulation::device();
  if (device < 0 || device >= d.count) return Return(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = d.multiprocessors; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = d.l2_bytes; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = d.threads_per_multiprocessor; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = d.capability_major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = d.capability_minor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = d.shared_per_multiprocessor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = d.shared_per_block_optin; return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = d.reserved_per_block; return cudaSuccess;
  }
  return Return(cudaErrorInvalidValue);
}

cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  if (const cudaError_t error = Enter(__func__)) return error;
  if (bytes != 0) std::memset(to, byte, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (const cudaError_t error = Enter(__func__)) return error;
  if (bytes != 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return Enter(__func__); }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  if (const cudaError_t error = Enter(__func__)) return error;
  *status = emulation::device().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (const cudaError_t error = Enter(__func__)) return error;
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
