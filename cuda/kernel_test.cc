// The CUDA kernel on the emulated device: what every kernel must do, on chips of several sizes and in several orders of execution, which
// may not change a bit. Built plain and under the address, undefined-behaviour and thread sanitizers; and again from source that was broken on
// purpose (see mutants.bzl), where it must fail.
#include <cuda_runtime.h>

#include <cstdlib>
#include <iterator>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/launch.h"
#include "cuda/policy.h"
#include "emulation.h"
#include "ffi/kernel.h"
#include "ffi/kernel_testing.h"

namespace xla_lamb {
namespace {

using emulation::Schedule;

// Memory that holds garbage, as scratch memory does.
struct Garbage {
  std::vector<uint64_t> words = std::vector<uint64_t>(static_cast<size_t>(cuda::ScratchBytes()) / 8, 0xfff7fff7fff7fff7);
  void* data() { return words.data(); }
};

template <typename Call>
void Launch(const Call& call) {
  static Garbage scratch;
  const std::string problem = cuda::Launch(call, scratch.data(), cuda::ScratchBytes(), nullptr);
  Check(problem.empty(), problem);
}

Kernel Cuda() {
  return {[](const Step& step) { Launch(step); }, [](const GradNorm& norm) { Launch(norm); }};
}

// A chip: its multiprocessors, and how many slots each of its blocks has.
struct Chip {
  const char* name;
  int multiprocessors;
  int slots;
  Schedule schedule;
  uint32_t seed;
};

const Chip kChips[] = {
    {"one block after another", 1, 3, Schedule::kSequential, 0},
    {"few slots", 2, 1, Schedule::kInterleaved, 0},
    {"in turns", 2, 4, Schedule::kInterleaved, 1},
    {"at once", 1, 2, Schedule::kConcurrent, 2},
};

void Set(const Chip& chip) {
  emulation::Device& device = emulation::device();
  device = emulation::Device();
  device.multiprocessors = chip.multiprocessors;
  const int blocks = cuda::BlocksPerMultiprocessor(device.capability_major, cuda::Kind::kFloat32);
  device.shared_per_multiprocessor = blocks * (chip.slots * cuda::kSlotBytes + 1024 + device.reserved_per_block);
  device.shared_per_block_optin = device.shared_per_multiprocessor;
  emulation::SetSchedule(chip.schedule, chip.seed);
}

// Sizes around a vector, a block's vectors, a tile (2,048 doubles, 4,096 floats) and what a chip holds; and layers that begin anywhere.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{0, 1},    {1, 1},    {7, 1},      {8, 1},     {1023, 1},  {4096, 1},
                                                          {4097, 1}, {20000, 1}, {90001, 1}, {0, 3},     {12, 4},    {5, 5},
                                                          {3 * 4099, 3}, {2 * 30000, 2}, {0, 0}, {255, 1}};

// For the address sanitizer: all but the largest, with layers that do not fit the few slots either.
const std::vector<std::pair<int64_t, int64_t>> kSmallerShapes = {{0, 1},    {1, 1},  {7, 1},        {8, 1},         {1023, 1}, {4096, 1},
                                                                 {4097, 1}, {0, 3},  {12, 4},       {5, 5},         {3 * 4099, 3},
                                                                 {2 * 25001, 2}, {0, 0}, {255, 1}};

// For the thread sanitizer, which takes its time: a layer that fits the slots, a small one, and some that fit no chip of few slots.
const std::vector<std::pair<int64_t, int64_t>> kFewShapes = {{4097, 1}, {255, 1}, {2 * 20001, 2}};

// How much there is time for.
enum class Extent { kFull, kSmaller, kQuick };

const std::vector<std::pair<int64_t, int64_t>>& Shapes(Extent extent) {
  return extent == Extent::kFull ? kShapes : extent == Extent::kSmaller ? kSmallerShapes : kFewShapes;
}

void TestTypes(Extent extent) {
  const std::vector<Types> all = AllTypes();
  for (size_t turn = 0; turn < all.size(); turn += extent == Extent::kQuick ? 5 : 1) {
    Case c;
    c.types = all[turn];
    c.decay = static_cast<Decay>(turn % 3);
    c.aligned = turn % 2 == 0;
    c.in_place = turn / 2 % 2 == 0;
    c.shapes = Shapes(extent);
    std::vector<char> bits;
    for (const Chip& chip : kChips) {
      if (chip.schedule == Schedule::kConcurrent && turn % 4 != 0) continue;  // it is slow where there are fewer cores
      Set(chip);
      if (bits.empty()) {
        bits = TestCase(Cuda(), c);
      } else {
        Buffers again = Make(c);
        Check(RunCase(Cuda(), c, &again, false) == bits, Name(c) + ": other bits on the chip " + chip.name);
      }
    }
  }
}

// An L2 cache of whole lines: streaming ones leave first, apart from those that are in use by the threads of a block now; then the least
// recently used. What is written goes to memory when it leaves.
class Cache {
 public:
  explicit Cache(int64_t bytes) : capacity_(static_cast<size_t>(bytes / kLine)) {}

  void Access(const emulation::Access& access) {
    requested += static_cast<int64_t>(access.bytes);
    const uintptr_t line = reinterpret_cast<uintptr_t>(access.address) / kLine;
    auto found = lines_.find(line);
    if (found != lines_.end()) {
      Line& known = found->second;
      known.dirty = known.dirty || access.write;
      order_[access.streaming].splice(order_[access.streaming].end(), order_[known.streaming], known.at);
      known.streaming = access.streaming;
      return;
    }
    if (!access.write) moved += kLine;  // a line that is written is written as a whole, in parts
    if (lines_.size() == capacity_) Evict();
    std::list<uintptr_t>& order = order_[access.streaming];
    order.push_back(line);
    lines_[line] = {access.write, access.streaming, std::prev(order.end())};
  }

  void Flush() {
    while (!lines_.empty()) Evict();
  }

  int64_t requested = 0;  // bytes
  int64_t moved = 0;      // bytes, from and to memory

 private:
  static constexpr int64_t kLine = 128;
  static constexpr size_t kInUse = 512;
  struct Line {
    bool dirty;
    bool streaming;
    std::list<uintptr_t>::iterator at;
  };

  void Evict() {
    std::list<uintptr_t>& order = order_[order_[true].size() > kInUse || order_[false].empty()];
    auto line = lines_.find(order.front());
    if (line->second.dirty) moved += kLine;
    lines_.erase(line);
    order.pop_front();
  }

  size_t capacity_;
  std::list<uintptr_t> order_[2];  // of streaming lines in [true]
  std::unordered_map<uintptr_t, Line> lines_;
};

// Bytes for each parameter of a step on float32 tensors of these sizes.
double Traffic(const std::vector<int64_t>& sizes, int64_t l2_bytes, int64_t* requested) {
  Case c;
  c.aligned = true;
  int64_t elements = 0;
  for (int64_t size : sizes) {
    c.shapes.push_back({size, 1});
    elements += size;
  }
  Buffers b = Make(c);
  Cache cache(l2_bytes);
  emulation::SetAccessHook([&cache](const emulation::Access& access) { cache.Access(access); });
  RunCase(Cuda(), c, &b, false);
  emulation::SetAccessHook(nullptr);
  cache.Flush();
  *requested = cache.requested / elements;
  return static_cast<double>(cache.moved) / static_cast<double>(elements);
}

// BERT-large on an H200, both made smaller by the number of its SMs: 12 slots of 4,096 elements instead of 132 times as many, an L2 cache
// of 50 MB / 132, and each tensor of a 132th. A step moves 28 bytes for each parameter of a layer that stays on the chip, and 40 for one
// that does not.
void TestTraffic() {
  Set({"a slice of an H200", 1, 4, Schedule::kInterleaved, 0});
  const int64_t kScale = 132, l2_bytes = 50 * 1000 * 1000 / kScale;
  std::vector<int64_t> bert = {30522 * 1024 / kScale};
  for (int layer = 0; layer < 24; ++layer) {
    for (int i = 0; i < 4; ++i) bert.push_back(1024 * 1024 / kScale);
    for (int i = 0; i < 2; ++i) bert.push_back(4096 * 1024 / kScale);
  }
  int64_t requested;
  const double of_bert = Traffic(bert, l2_bytes, &requested);
  std::printf("BERT-large on an H200: %.2f bytes for each parameter through memory (floor 28)\n", of_bert);
  Check(of_bert >= 28 && of_bert < 30.5, "bytes for each parameter of BERT-large: " + std::to_string(of_bert));
  const double of_matrix = Traffic(std::vector<int64_t>(20, 4096 * 1024 / kScale), l2_bytes, &requested);
  std::printf("matrices of 4096 x 1024: %.2f\n", of_matrix);
  Check(of_matrix >= 28 && of_matrix < 29, "bytes for each parameter of a matrix that stays: " + std::to_string(of_matrix));
  Check(requested <= 33, "bytes for each parameter that the kernel asks for: " + std::to_string(requested));
  const double of_embedding = Traffic({30522 * 1024 / kScale}, l2_bytes, &requested);
  std::printf("the embedding, larger than the chip's memory: %.2f\n", of_embedding);
  Check(of_embedding > 32 && of_embedding < 41, "bytes for each parameter of a tensor that does not stay: " + std::to_string(of_embedding));
}

// The moments have the very bits that the CPU kernel gives them; the parameters may differ where the sums of a norm, which every kernel
// adds in an order of its own, round to another float.
void TestSameMomentsAsOnTheCpu() {
  for (const Types& types : AllTypes()) {
    Case c;
    c.types = types;
    c.decay = Decay::kL2;
    c.shapes = {{4097, 1}, {6 * 1001, 6}};
    Buffers cuda = Make(c), cpu = Make(c);
    RunCase(Cuda(), c, &cuda, false);
    RunCase({[](const Step& step) { Run(step, Pool()); }, nullptr}, c, &cpu, false);
    Check(cuda.m == cpu.m && cuda.v == cpu.v, Name(c) + ": other moments than on the CPU");
  }
}

// While a CUDA graph records, and with an old driver, launches are smaller; so they are beyond 400 tensors. The bits are the same.
void TestManyTensors(Extent extent) {
  Set({"at rest", 2, 4, Schedule::kInterleaved, 0});
  Case c;
  // More than one of the largest launches; every so many tensors a large one, of which the smallest launches have one too.
  const int64_t tensors = extent == Extent::kFull ? 1000 : 450, large = extent == Extent::kFull ? 7 : 29;
  for (int64_t i = 0; i < tensors; ++i) c.shapes.push_back({i % large == 0 ? 4097 : i % 50, 1});
  const Buffers before = Make(c);
  std::vector<std::vector<char>> bits;
  std::vector<std::vector<double>> norms;
  for (int way = 0; way < 3; ++way) {
    emulation::device().capturing = way == 1;
    emulation::device().driver_version = way == 2 ? 12000 : 12040;
    Buffers b = before;
    bits.push_back(RunCase(Cuda(), c, &b, false));
    CheckAgainstModel(c, before, b, "many tensors, way " + std::to_string(way));
    GradNorm norm;
    for (size_t i = 0; i < before.g.size(); ++i) norm.gradients.push_back({before.g[i].data() + Offset(c, Type::kF32), c.shapes[i].first});
    norms.push_back(RunGradNorm(Cuda(), norm));
  }
  Check(bits[1] == bits[0] && bits[2] == bits[0], "smaller launches gave other bits");
  for (const std::vector<double>& norm : norms) Check(norm[1] == 1 && std::fabs(norm[0] / norms[0][0] - 1) < 1e-6, "norms of many gradients");
}

void TestErrors() {
  Case c;
  c.shapes = {{5000, 1}};
  Set({"more shared memory than is always allowed", 1, 4, Schedule::kInterleaved, 0});
  const Buffers before = Make(c);
  Buffers b = before;
  Step step = MakeStep(c, b, &b, Part::kStep);
  std::vector<float> trust(3);
  step.trust = trust.data();
  Garbage scratch;
  const auto launch = [&] { return cuda::Launch(step, scratch.data(), cuda::ScratchBytes(), nullptr); };
  const char* const calls[] = {"cudaGetDevice", "cudaDeviceGetAttribute", "cudaStreamIsCapturing", "cudaMemsetAsync", "cudaFuncSetAttribute", "cudaLaunchKernel"};
  for (const char* call : calls) {
    emulation::FailNextCall(call, cudaErrorNoKernelImageForDevice);
    Check(launch().find("cudaErrorNoKernelImageForDevice") != std::string::npos, std::string("an error of ") + call);
  }
  Check(b.p == before.p && b.m == before.m, "a step that failed changed something");
  std::string problem = cuda::Launch(step, scratch.data(), cuda::ScratchBytes() - 1, nullptr);
  Check(problem.find(std::to_string(cuda::ScratchBytes())) != std::string::npos, "scratch memory that is too small");
  problem = cuda::Launch(step, static_cast<char*>(scratch.data()) + 4, cuda::ScratchBytes(), nullptr);
  Check(problem.find("aligned") != std::string::npos, "scratch memory that is not aligned");
  step.tensors[0].size = step.tensors[0].layers = int64_t{1} << 31;
  Check(launch().find("layers") != std::string::npos, "too many layers");
}

void TestProblem() {
  emulation::Device& device = emulation::device();
  device = emulation::Device();
  device.driver_version = cuda::RuntimeVersion();
  Check(cuda::Problem().empty(), "a device that fits: " + cuda::Problem());
  device.capability_major = 7;
  device.capability_minor = 5;
  Check(cuda::Problem().find("compute capability 7.5") != std::string::npos, "a device that is too old: " + cuda::Problem());
  device.count = 0;
  Check(cuda::Problem().empty(), "no device");
  device.driver_version = 0;
  Check(cuda::Problem().empty() && cuda::DriverVersion() == 0, "no driver");
  device.driver_version = cuda::RuntimeVersion() - 1000;
  Check(cuda::Problem().find("the NVIDIA driver supports CUDA " + std::to_string(device.driver_version / 1000)) != std::string::npos,
        "a driver that is too old: " + cuda::Problem());
}

}  // namespace
}  // namespace xla_lamb

int main(int, char** arguments) {
  using namespace xla_lamb;
  const std::string argument = arguments[1] == nullptr ? "" : arguments[1];
  const Extent extent = argument == "quick" ? Extent::kQuick : argument == "smaller" ? Extent::kSmaller : Extent::kFull;
  const bool quick = extent == Extent::kQuick;
  TestTypes(extent);
  for (const Chip& chip : kChips) {
    if (quick && &chip != &kChips[1] && &chip != &kChips[3]) continue;  // a race is one whatever the order of the blocks
    Set(chip);
    TestSkip(Cuda(), Shapes(extent));
    TestUpdatesIntoGradients(Cuda(), Shapes(extent));
    if (!quick) TestBatch(Cuda());
    TestGradNorm(Cuda(), quick                          ? std::vector<int64_t>{9, 20000}
                         : extent == Extent::kSmaller ? std::vector<int64_t>{0, 1, 9, 20000, 8192}
                                                        : std::vector<int64_t>{0, 1, 9, 100000, 32768});
  }
  if (!quick) TestSameMomentsAsOnTheCpu();
  if (!quick) TestManyTensors(extent);
  if (extent == Extent::kFull) TestTraffic();  // counts accesses that the others make too
  TestErrors();
  TestProblem();
  return Report();
}
