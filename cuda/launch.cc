// Host side of a launch: the table of tensors, and how many blocks and slots the device has room for.
#include "cuda/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/kernel.h"
#include "cuda/policy.h"
#include "cuda/table.h"

namespace xla_lamb {
namespace cuda {
namespace {

// Scratch memory, from its beginning: what has to be zero first (a counter and the arrivals), then the rest.
constexpr int64_t kCounterBytes = 16;
constexpr int64_t kScratchBytes = kCounterBytes + static_cast<int64_t>(kMaxParts) * (2 * sizeof(uint32_t) + 2 * sizeof(double));

std::string Describe(const char* what, cudaError_t error) {
  return std::string(what) + " failed with " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
}

#define XLA_LAMB_RETURN_IF_ERROR(call)                                      \
  do {                                                                      \
    const cudaError_t error = (call);                                       \
    if (error != cudaSuccess) return Describe(#call, error);                \
  } while (false)

// A kernel that is used for the first time may be loaded by its launch, which a thread that captures a graph may otherwise not do.
class AllowLoading {
 public:
  AllowLoading() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowLoading() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What a kernel may take of the current device.
struct Room {
  int blocks;      // at once
  int64_t slots;   // of a block
  int64_t l2_bytes;
};

std::string Measure(Kind kind, Room* room) {
  int device, major, multiprocessors, shared, shared_of_block, reserved, l2;
  XLA_LAMB_RETURN_IF_ERROR(cudaGetDevice(&device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  XLA_LAMB_RETURN_IF_ERROR(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
  const int blocks = BlocksPerMultiprocessor(major, kind);
  const int64_t bytes = std::min<int64_t>(shared / blocks - reserved, shared_of_block);
  room->blocks = multiprocessors * blocks;
  room->slots = std::max<int64_t>((bytes - SharedBytes()) / kSlotBytes, 1);
  room->l2_bytes = l2;
  return "";
}

bool Aligned(const void* data, int64_t bytes) { return data == nullptr || reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Tensors that have layers, as entries without their places in the order of work.
std::vector<TensorEntry> Entries(const Step& step) {
  const Types& types = step.types;
  const int vector = VectorOf(KindOf(types));
  std::vector<TensorEntry> entries;
  int64_t row = 0;
  for (const Tensor& t : step.tensors) {
    if (t.layers > 0) {
      TensorEntry entry = {};
      entry.parameter = t.parameter;
      entry.gradient = t.gradient;
      entry.first_moment = t.first_moment;
      entry.second_moment = t.second_moment;
      entry.output = t.output;
      entry.first_moment_out = t.first_moment_out;
      entry.second_moment_out = t.second_moment_out;
      entry.layer_size = t.size / t.layers;
      entry.layers = static_cast<uint32_t>(t.layers);
      entry.first_row = static_cast<uint32_t>(row);
      entry.decays = t.decays;
      entry.adapt = static_cast<uint8_t>(t.adapt);
      const auto aligned = [vector](const void* data, Type type) { return Aligned(data, std::min<int64_t>(16, vector * SizeOf(type))); };
      entry.aligned = aligned(t.parameter, types.parameter) && aligned(t.gradient, types.gradient) &&
                      aligned(t.first_moment, types.first_moment) && aligned(t.second_moment, types.second_moment) &&
                      aligned(t.output, types.output) && aligned(t.first_moment_out, types.first_moment) &&
                      aligned(t.second_moment_out, types.second_moment) && (t.layers == 1 || entry.layer_size % vector == 0);
      entries.push_back(entry);
    }
    row += t.layers;
  }
  return entries;
}

int64_t ChunksOfLayer(const TensorEntry& entry, int64_t chunk_size) {
  return std::max<int64_t>((entry.layer_size + chunk_size - 1) / chunk_size, 1);
}

// Chunks of layers of more than one: they need parts of the scratch memory.
int64_t Parts(const TensorEntry* entries, int count, int64_t chunk_size) {
  int64_t parts = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t chunks = ChunksOfLayer(entries[i], chunk_size);
    if (chunks > 1) parts += chunks * entries[i].layers;
  }
  return parts;
}

// One launch, of no more than kTensors.
template <int kTensors>
std::string LaunchSome(const Step& step, const TensorEntry* entries, int count, const Room& room, void* scratch, cudaStream_t stream) {
  StepTable<kTensors> table = {};
  const int64_t tile = TileOf(KindOf(step.types));
  table.tiles = 1;
  while (Parts(entries, count, tile * table.tiles) > kMaxParts) table.tiles *= 2;
  const int64_t chunk_size = tile * table.tiles;
  table.count = count;
  std::copy_n(entries, count, table.tensors);
  // First the layers of more than one chunk: their chunks' numbers are those of parts of the scratch memory.
  std::stable_partition(table.tensors, table.tensors + count,
                        [chunk_size](const TensorEntry& entry) { return ChunksOfLayer(entry, chunk_size) > 1; });
  int64_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    TensorEntry& entry = table.tensors[i];
    const int64_t of_layer = ChunksOfLayer(entry, chunk_size);
    entry.first_chunk = static_cast<uint32_t>(chunks);
    entry.stays = table.tiles == 1 && of_layer <= room.blocks * room.slots;
    chunks += of_layer * entry.layers;
    if (chunks > INT32_MAX) return "a launch cannot have more than " + std::to_string(INT32_MAX) + " layers";
  }
  const int64_t parts = Parts(entries, count, chunk_size);
  table.chunks = static_cast<uint32_t>(chunks);
  table.slots = table.tiles == 1 ? static_cast<uint32_t>(room.slots) : 0;
  table.rows = static_cast<uint32_t>(step.rows);
  table.types = step.types;
  table.decay = step.decay;
  table.emit_updates = step.emit_updates;
  const int64_t element_bytes = SizeOf(step.types.parameter) + SizeOf(step.types.gradient) + 2 * SizeOf(step.types.first_moment);
  table.prefetch = room.blocks * chunk_size * element_bytes <= room.l2_bytes / kPrefetchPartOfL2;
  std::copy_n(step.norm_bounds, 2, table.norm_bounds);
  std::copy_n(step.ratio_bounds, 2, table.ratio_bounds);
  table.scalars = step.scalars;
  table.sums = step.sums;
  table.trust = step.trust;
  char* at = static_cast<char*>(scratch);
  table.scratch.next_chunk = reinterpret_cast<uint32_t*>(at);
  table.scratch.arrived = reinterpret_cast<uint32_t*>(at + kCounterBytes);
  table.scratch.following = table.scratch.arrived + kMaxParts;
  table.scratch.sums = reinterpret_cast<double*>(table.scratch.following + kMaxParts);
  XLA_LAMB_RETURN_IF_ERROR(cudaMemsetAsync(scratch, 0, static_cast<size_t>(kCounterBytes + parts * sizeof(uint32_t)), stream));
  const int blocks = static_cast<int>(std::min<int64_t>(chunks, room.blocks));
  XLA_LAMB_RETURN_IF_ERROR(Run(step.part, table, blocks, stream));
  return "";
}

template <int kTensors>
std::string LaunchAll(const Step& step, const Room& room, void* scratch, cudaStream_t stream) {
  const std::vector<TensorEntry> entries = Entries(step);
  const int count = static_cast<int>(entries.size());
  std::string problem;
  for (int begin = 0; begin < count && problem.empty(); begin += kTensors) {
    problem = LaunchSome<kTensors>(step, entries.data() + begin, std::min(kTensors, count - begin), room, scratch, stream);
  }
  return problem;
}

template <int kTensors>
std::string LaunchAll(const GradNorm& norm, const Room& room, void* scratch, cudaStream_t stream) {
  const int vector = VectorOf(norm.type);
  const int64_t tile = TileOf(norm.type);
  const int count = static_cast<int>(norm.gradients.size());
  for (int begin = 0; begin == 0 || begin < count; begin += kTensors) {
    NormTable<kTensors> table = {};
    table.count = std::min(kTensors, count - begin);
    table.type = norm.type;
    table.result = norm.result;
    table.more = begin > 0;
    for (int i = 0; i < table.count; ++i) {
      const Gradient& gradient = norm.gradients[static_cast<size_t>(begin + i)];
      GradientEntry& entry = table.gradients[i];
      entry.data = gradient.data;
      entry.row_size = gradient.size / norm.rows;
      entry.first_chunk = table.chunks;
      entry.aligned = Aligned(gradient.data, 16) && (norm.rows == 1 || entry.row_size % vector == 0);
      table.chunks += (entry.row_size + tile - 1) / tile;
    }
    // As many parts as give the device work, and as fit the scratch memory: a count that depends on the shapes alone.
    table.parts = static_cast<uint32_t>(std::clamp<int64_t>(kNormParts / norm.rows, 1, std::max<int64_t>(table.chunks, 1)));
    const int64_t rows_at_once = kMaxParts / table.parts;
    for (int64_t row = 0; row < norm.rows; row += rows_at_once) {
      table.first_row = row;
      table.rows = static_cast<uint32_t>(std::min(rows_at_once, norm.rows - row));
      table.arrived = static_cast<uint32_t*>(scratch);
      table.sums = reinterpret_cast<double*>(table.arrived + kMaxParts);
      XLA_LAMB_RETURN_IF_ERROR(cudaMemsetAsync(table.arrived, 0, table.rows * sizeof(uint32_t), stream));
      const int64_t work = static_cast<int64_t>(table.rows) * table.parts;
      XLA_LAMB_RETURN_IF_ERROR(Run(table, static_cast<int>(std::min<int64_t>(work, room.blocks)), stream));
    }
  }
  return "";
}

// Whether a launch on the stream may have kMaxTensors.
std::string MayBeLarge(cudaStream_t stream, bool* may) {
  cudaStreamCaptureStatus status;
  XLA_LAMB_RETURN_IF_ERROR(cudaStreamIsCapturing(stream, &status));
  *may = status == cudaStreamCaptureStatusNone && DriverVersion() >= kLargeArguments;
  return "";
}

std::string CheckScratch(const void* scratch, int64_t bytes) {
  if (bytes < kScratchBytes) {
    return "the scratch memory has " + std::to_string(bytes) + " bytes, but this library needs " + std::to_string(kScratchBytes) +
           ": lower the program again with this version of xla_lamb";
  }
  return Aligned(scratch, 16) ? "" : "the scratch memory must be aligned to 16 bytes";
}

}  // namespace

int64_t ScratchBytes() { return kScratchBytes; }

std::string Launch(const Step& step, void* scratch, int64_t scratch_bytes, Stream stream) {
  const AllowLoading allow_loading;
  std::string problem = CheckScratch(scratch, scratch_bytes);
  Room room;
  bool large = false;
  if (problem.empty()) problem = Measure(KindOf(step.types), &room);
  if (problem.empty()) problem = MayBeLarge(stream, &large);
  if (!problem.empty()) return problem;
  return large ? LaunchAll<kMaxTensors>(step, room, scratch, stream) : LaunchAll<kMaxTensorsInGraph>(step, room, scratch, stream);
}

std::string Launch(const GradNorm& norm, void* scratch, int64_t scratch_bytes, Stream stream) {
  const AllowLoading allow_loading;
  std::string problem = CheckScratch(scratch, scratch_bytes);
  Room room;
  bool large = false;
  if (problem.empty()) problem = Measure(Kind::kFloat32, &room);
  if (problem.empty()) problem = MayBeLarge(stream, &large);
  if (!problem.empty()) return problem;
  return large ? LaunchAll<kMaxTensors>(norm, room, scratch, stream) : LaunchAll<kMaxTensorsInGraph>(norm, room, scratch, stream);
}

int RuntimeVersion() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string Problem() {
  const auto text = [](int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); };
  if (DriverVersion() == 0) return "";
  // CUDA's drivers run what was built with any release of the same major version.
  if (DriverVersion() / 1000 < RuntimeVersion() / 1000) {
    return "the NVIDIA driver supports CUDA " + text(DriverVersion()) + ", and the library was built with CUDA " + text(RuntimeVersion());
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no device, or none that is visible
    return "";
  }
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
      continue;
    }
    if (major < kOldestMajor) {
      return "GPU " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
             ", and the library's kernels need " + std::to_string(kOldestMajor) + ".0";
    }
  }
  return "";
}

}  // namespace cuda
}  // namespace xla_lamb
