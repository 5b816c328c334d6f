// The CUDA kernels.
//
// Blocks take chunks of work from a counter, in order. The first pass over a chunk writes the moments and sums the squares of p and u;
// u stays in a slot of shared memory. The block that completes a layer's sums adds them up, always in the order of the chunks, and
// makes the layer's ratio known. As soon as it is, each block finishes the chunks that it holds: p comes from the L2 cache, u from the slot.
// Meanwhile blocks go on with the chunks that follow, so memory is never idle.
//
// Nobody waits for a block that is not running: a block whose slots are full gives up the oldest of them, and computes that u again from m
// and v later, unless every chunk of the layer in it has been taken; then its blocks are at work, and waiting is short. A block that waits
// for a layer has taken no chunk of it or of an earlier one that it has not begun, so blocks cannot wait for each other in a circle.
#include "cuda/kernel.h"

#include "cuda/device.h"
#include "cuda/vector.h"

namespace xla_lamb {
namespace cuda {
namespace {

constexpr uint32_t kReady = 0xffffffff;  // an arrival count that says that the layer's ratio is known

// Run-time decay: a branch that all threads take alike.

template <typename T>
XLA_LAMB_DEVICE T EffectiveGradient(Decay decay, const Coefficients<T>& c, T p, T g) {
  return decay == Decay::kL2 ? xla_lamb::EffectiveGradient<Decay::kL2>(c, p, g) : xla_lamb::EffectiveGradient<Decay::kNone>(c, p, g);
}

template <typename T>
XLA_LAMB_DEVICE T DecayedParameter(Decay decay, const Coefficients<T>& c, T p) {
  return decay == Decay::kDecoupled ? xla_lamb::DecayedParameter<Decay::kDecoupled>(c, p) : p;
}

template <typename T>
XLA_LAMB_DEVICE T Direction(Decay decay, const Coefficients<T>& c, T decayed, T m, T v) {
  return decay == Decay::kInRatio ? xla_lamb::Direction<Decay::kInRatio>(c, decayed, m, v)
                                  : xla_lamb::Direction<Decay::kNone>(c, decayed, m, v);
}

template <typename T>
XLA_LAMB_DEVICE T Output(Decay decay, bool emit_updates, const Coefficients<T>& c, T rate, T p, T decayed, T u) {
  if (!emit_updates) return xla_lamb::Output<Decay::kNone, false>(c, rate, p, decayed, u);
  return decay == Decay::kDecoupled ? xla_lamb::Output<Decay::kDecoupled, true>(c, rate, p, decayed, u)
                                    : xla_lamb::Output<Decay::kNone, true>(c, rate, p, decayed, u);
}

template <int kConstant>
struct Constant {
  static constexpr int kValue = kConstant;
};

// A chunk and its layer.
struct Chunk {
  uint32_t index;
  int32_t tensor;
  uint32_t layer;   // of the tensor
  uint32_t first;   // chunk of the layer
  uint32_t chunks;  // of the layer
  int32_t size;
  int64_t begin;    // element of the tensor
};

enum class Pass : int32_t { kNone, kFirst, kSecond };

struct Work {
  Pass pass;
  int32_t slot;  // -1: none
  Chunk chunk;
};

// Chunks that a block has taken and not begun, in order: the second one is on its way to the L2 cache while it works on the first.
struct Taken {
  uint32_t next;
  uint32_t after;
};

// The chunks of unfinished layers that a block has taken: it alone knows them, as a list through Scratch::following. They are counted from
// 0; number i had slot i modulo the number of slots.
struct Held {
  int64_t begin = 0;    // the oldest that still needs its second pass
  int64_t end = 0;
  int64_t in_slot = 0;  // the oldest whose u is in its slot
  Chunk oldest;
  uint32_t newest;
};

// At the beginning of a block's shared memory; the slots follow.
struct Shared {
  Work work;
  bool follows;  // the work is chosen already: the second pass over the same chunk
  Chunk upcoming;
  Held held;
  int64_t row;  // of the scalars:
  alignas(8) char scalars[kNumScalars * sizeof(double)];       // T each
  alignas(8) char coefficients[sizeof(Coefficients<double>)];  // Coefficients<T>; here, and not in registers, of which there are few
  bool last;
  double sums[kThreads / kWarp][2];
};
constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;

XLA_LAMB_DEVICE Shared& SharedOfBlock() { return *static_cast<Shared*>(SharedMemory()); }

// The sums over all threads; for thread 0 alone.
XLA_LAMB_DEVICE void Reduce(double* a, double* b) {
  Shared& shared = SharedOfBlock();
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    *a += __shfl_down_sync(0xffffffff, *a, offset);
    *b += __shfl_down_sync(0xffffffff, *b, offset);
  }
  const int warp = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0) {
    shared.sums[warp][0] = *a;
    shared.sums[warp][1] = *b;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads / kWarp; ++i) {
    *a += shared.sums[i][0];
    *b += shared.sums[i][1];
  }
}

// The last index whose first chunk is not beyond `chunk`.
template <typename Entry>
XLA_LAMB_DEVICE int Find(const Entry* entries, int count, int64_t chunk) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// The type of the arithmetic, and how many elements a thread accesses at once.
template <Kind kKind>
struct KindTraits {
  using T = float;
  static constexpr int kN = kKind == Kind::kHalves ? 8 : 4;
};
template <>
struct KindTraits<Kind::kFloat64> {
  using T = double;
  static constexpr int kN = 2;
};

template <Part kPart, Kind kKind, int kTensors>
class StepBlock {
 public:
  using Table = StepTable<kTensors>;
  using T = typename KindTraits<kKind>::T;
  static constexpr int kN = KindTraits<kKind>::kN;
  static constexpr int kTile = kSlotBytes / sizeof(T);

  XLA_LAMB_MEMBER explicit StepBlock(const Table& table) : table_(table), shared_(SharedOfBlock()) {}

  XLA_LAMB_MEMBER void Run() {
    Taken taken = {0, 0};  // of thread 0
    if (threadIdx.x == 0) {
      shared_.held = Held();
      shared_.row = -1;
      shared_.follows = false;
      taken.next = FetchAddRelaxed(table_.scratch.next_chunk, 1);
      taken.after = FetchAddRelaxed(table_.scratch.next_chunk, 1);
    }
    for (;;) {
      if (threadIdx.x == 0) {
        if (!shared_.follows) Choose(&taken);
        shared_.follows = false;
      }
      __syncthreads();
      const Work& work = shared_.work;
      if (work.pass == Pass::kNone) return;
      if (kPart != Part::kApply && work.pass == Pass::kFirst) {
        First(work);
      } else if (kPart != Part::kMoments) {
        Second(work);
      }
      __syncthreads();  // nobody reads shared memory any more
    }
  }

 private:
  // What comes next, into shared_.work.
  XLA_LAMB_MEMBER void Choose(Taken* taken) {
    ChooseWork(taken);
    if (shared_.work.pass == Pass::kNone) return;
    const Chunk& chunk = shared_.work.chunk;
    const int64_t row = static_cast<int64_t>(chunk.layer) * table_.rows / TensorOf(chunk).layers;
    if (row == shared_.row) return;
    shared_.row = row;
    T* scalars = reinterpret_cast<T*>(shared_.scalars);
    for (int i = 0; i < kNumScalars; ++i) scalars[i] = static_cast<const T*>(table_.scalars)[row * kNumScalars + i];
    *reinterpret_cast<Coefficients<T>*>(shared_.coefficients) = MakeCoefficients<T>(scalars);
  }

  // Of the chosen work.
  XLA_LAMB_MEMBER T Scalar(enum Scalar scalar) const { return Scalars()[scalar]; }
  XLA_LAMB_MEMBER const T* Scalars() const { return reinterpret_cast<const T*>(shared_.scalars); }
  XLA_LAMB_MEMBER const Coefficients<T>& Chosen() const { return *reinterpret_cast<const Coefficients<T>*>(shared_.coefficients); }

  XLA_LAMB_MEMBER void ChooseWork(Taken* taken) {
    Held& held = shared_.held;
    for (;;) {
      const bool holds = held.begin != held.end;
      if (holds && LoadAcquire(&table_.scratch.arrived[held.oldest.first]) == kReady) return ChooseOldest();
      const bool full = holds && held.end - (held.begin > held.in_slot ? held.begin : held.in_slot) >= table_.slots;
      const bool all_taken = holds && held.oldest.first + held.oldest.chunks <= taken->next;
      if (taken->next < table_.chunks && !(full && all_taken)) return ChooseNext(taken);
      if (!holds) {
        shared_.work.pass = Pass::kNone;
        return;
      }
      __nanosleep(100);
    }
  }

  XLA_LAMB_MEMBER void ChooseNext(Taken* taken) {
    const uint32_t next = taken->next;
    Held& held = shared_.held;
    Work& work = shared_.work;
    if constexpr (kPart == Part::kApply) {
      work = {Pass::kSecond, -1, Locate(next)};
    } else {
      const bool stays = kPart == Part::kStep && table_.slots > 0;
      work = {Pass::kFirst, stays ? static_cast<int32_t>(held.end % table_.slots) : -1, Locate(next)};
      // Whoever had the slot has lost it.
      const int64_t in_slot = held.end + 1 - table_.slots;
      if (in_slot > held.in_slot) held.in_slot = in_slot;
      if (kPart == Part::kStep && work.chunk.chunks > 1) {
        if (held.begin == held.end) {
          held.oldest = work.chunk;
        } else {
          table_.scratch.following[held.newest] = next;
        }
        held.newest = next;
        ++held.end;
      }
    }
    if (taken->after < table_.chunks) {
      shared_.upcoming = Locate(taken->after);
    } else {
      shared_.upcoming.size = 0;
    }
    *taken = {taken->after, FetchAddRelaxed(table_.scratch.next_chunk, 1)};
  }

  XLA_LAMB_MEMBER void ChooseOldest() {
    Held& held = shared_.held;
    const bool in_slot = table_.slots > 0 && held.begin >= held.in_slot;
    shared_.work = {Pass::kSecond, in_slot ? static_cast<int32_t>(held.begin % table_.slots) : -1, held.oldest};
    if (++held.begin != held.end) held.oldest = Locate(table_.scratch.following[held.oldest.index]);
  }

  XLA_LAMB_MEMBER Chunk Locate(uint32_t index) const {
    Chunk chunk;
    chunk.index = index;
    chunk.tensor = Find(table_.tensors, table_.count, index);
    const TensorEntry& tensor = table_.tensors[chunk.tensor];
    const int64_t whole = static_cast<int64_t>(table_.tiles) * kTile;
    chunk.chunks = tensor.layer_size <= whole ? 1 : static_cast<uint32_t>((tensor.layer_size + whole - 1) / whole);
    chunk.layer = (index - tensor.first_chunk) / chunk.chunks;
    chunk.first = tensor.first_chunk + chunk.layer * chunk.chunks;
    const int64_t in_layer = (index - chunk.first) * whole, left = tensor.layer_size - in_layer;
    chunk.size = static_cast<int32_t>(left < whole ? left : whole);
    chunk.begin = chunk.layer * tensor.layer_size + in_layer;
    return chunk;
  }

  XLA_LAMB_MEMBER const TensorEntry& TensorOf(const Chunk& chunk) const { return table_.tensors[chunk.tensor]; }
  XLA_LAMB_MEMBER Decay DecayOf(const Chunk& chunk) const { return TensorOf(chunk).decays ? table_.decay : Decay::kNone; }
  XLA_LAMB_MEMBER int64_t RowOf(const Chunk& chunk) const { return static_cast<int64_t>(TensorOf(chunk).first_row) + chunk.layer; }
  XLA_LAMB_MEMBER T* Trust(const Chunk& chunk) const { return static_cast<T*>(table_.trust) + 3 * RowOf(chunk); }
  XLA_LAMB_MEMBER const void* At(const Chunk& chunk, const void* data, Type type) const {
    return static_cast<const char*>(data) + chunk.begin * SizeOf(type);
  }
  XLA_LAMB_MEMBER void* At(const Chunk& chunk, void* data, Type type) const {
    return static_cast<char*>(data) + chunk.begin * SizeOf(type);
  }
  XLA_LAMB_MEMBER T* Slot(int slot) const {
    return reinterpret_cast<T*>(static_cast<char*>(SharedMemory()) + kSharedBytes) + slot * kTile;
  }

  // The types of a call, as far as the compiler can know them.
  XLA_LAMB_MEMBER Type Known(Type type) const { return kKind == Kind::kFloat32 ? Type::kF32 : type; }
  XLA_LAMB_MEMBER Type ParameterType() const { return kKind == Kind::kFloat64 ? Type::kF64 : Known(table_.types.parameter); }
  XLA_LAMB_MEMBER Type GradientType() const { return Known(table_.types.gradient); }
  XLA_LAMB_MEMBER Type OutputType() const { return Known(table_.types.output); }
  XLA_LAMB_MEMBER Type MomentType() const {
    if (kKind == Kind::kFloat64) return Type::kF64;
    return kKind == Kind::kHalves || Known(table_.types.first_moment) == Type::kBF16 ? Type::kBF16 : Type::kF32;
  }

  // Calls body(at, their number) for this thread's elements of a chunk: vectors where all is aligned, then single ones.
  template <typename Body>
  XLA_LAMB_MEMBER void ForElements(const Chunk& chunk, const Body& body) const {
    const int vectors_end = TensorOf(chunk).aligned ? chunk.size / kN * kN : 0;
#pragma unroll 1  // registers are few
    for (int at = threadIdx.x * kN; at < vectors_end; at += kThreads * kN) body(at, Constant<kN>());
#pragma unroll 1
    for (int at = vectors_end + threadIdx.x; at < chunk.size; at += kThreads) body(at, Constant<1>());
  }

  XLA_LAMB_MEMBER void PrefetchUpcoming() const {
    const Chunk& chunk = shared_.upcoming;
    if (!table_.prefetch || chunk.size == 0) return;
    const TensorEntry& tensor = TensorOf(chunk);
    PrefetchRange(chunk, tensor.parameter, ParameterType());
    if (kPart != Part::kApply) PrefetchRange(chunk, tensor.gradient, GradientType());
    PrefetchRange(chunk, tensor.first_moment, MomentType());
    PrefetchRange(chunk, tensor.second_moment, MomentType());
  }

  XLA_LAMB_MEMBER void PrefetchRange(const Chunk& chunk, const void* data, Type type) const {
    const char* begin = static_cast<const char*>(At(chunk, data, type));
    const int bytes = chunk.size * static_cast<int>(SizeOf(type));
    for (int at = threadIdx.x * kCacheLine; at < bytes; at += kThreads * kCacheLine) Prefetch(begin + at);
  }

  XLA_LAMB_MEMBER void First(const Work& work) {
    const Chunk& chunk = work.chunk;
    PrefetchUpcoming();
    double p_square = 0, u_square = 0;
    if (Scalar(kSkip) != 0) {
      const TensorEntry& tensor = TensorOf(chunk);
      Copy(chunk, tensor.first_moment, tensor.first_moment_out, MomentType());
      Copy(chunk, tensor.second_moment, tensor.second_moment_out, MomentType());
    } else {
      Moments(work, &p_square, &u_square);
    }
    Reduce(&p_square, &u_square);
    if (chunk.chunks == 1) {
      if (threadIdx.x == 0) {
        Finish(chunk, p_square, u_square);
        shared_.work.pass = Pass::kSecond;
        shared_.follows = kPart == Part::kStep;
      }
      return;
    }
    uint32_t* arrived = &table_.scratch.arrived[chunk.first];
    if (threadIdx.x == 0) {
      table_.scratch.sums[2 * chunk.index] = p_square;
      table_.scratch.sums[2 * chunk.index + 1] = u_square;
      shared_.last = FetchAdd(arrived, 1) + 1 == chunk.chunks;
    }
    __syncthreads();
    if (!shared_.last) return;
    p_square = u_square = 0;
    for (uint32_t i = threadIdx.x; i < chunk.chunks; i += kThreads) {
      p_square += table_.scratch.sums[2 * (chunk.first + i)];
      u_square += table_.scratch.sums[2 * (chunk.first + i) + 1];
    }
    Reduce(&p_square, &u_square);
    if (threadIdx.x == 0) {
      Finish(chunk, p_square, u_square);
      StoreRelease(arrived, kReady);
    }
  }

  XLA_LAMB_MEMBER void Moments(const Work& work, double* p_square, double* u_square) const {
    const Coefficients<T>& c = Chosen();
    const TensorEntry& tensor = TensorOf(work.chunk);
    const Decay decay = DecayOf(work.chunk);
    const Type p_type = ParameterType(), g_type = GradientType(), m_type = MomentType();
    const Use use = tensor.stays ? Use::kStreaming : Use::kAgain;  // the second pass reads them only without u
    const void* parameter = At(work.chunk, tensor.parameter, p_type);
    const void* gradient = At(work.chunk, tensor.gradient, g_type);
    const void* first_moment = At(work.chunk, tensor.first_moment, m_type);
    const void* second_moment = At(work.chunk, tensor.second_moment, m_type);
    void* first_moment_out = At(work.chunk, tensor.first_moment_out, m_type);
    void* second_moment_out = At(work.chunk, tensor.second_moment_out, m_type);
    ForElements(work.chunk, [&](int at, auto count) {
      constexpr int kCount = decltype(count)::kValue;
      Vector<T, kCount> p, m, v;
      Vector<T, kCount, kKind == Kind::kMixed || kKind == Kind::kFloat64> g;
      p.Load(parameter, p_type, at, Use::kAgain);
      g.Load(gradient, g_type, at, Use::kStreaming);
      m.Load(first_moment, m_type, at, Use::kStreaming);
      v.Load(second_moment, m_type, at, Use::kStreaming);
      T old[kCount], effective[kCount], first[kCount], second[kCount];
      p.Get(p_type, old);
      g.Get(g_type, effective);
      m.Get(m_type, first);
      v.Get(m_type, second);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        effective[k] = EffectiveGradient(decay, c, old[k], effective[k]);
        first[k] = FirstMoment(c, first[k], effective[k]);
        second[k] = SecondMoment(c, second[k], effective[k]);
      }
      if (m_type == Type::kBF16) {  // u comes from what is stored
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          first[k] = ThroughBFloat16(first[k]);
          second[k] = ThroughBFloat16(second[k]);
        }
      }
      StoreVector<kCount>(first, first_moment_out, m_type, at, use);
      StoreVector<kCount>(second, second_moment_out, m_type, at, use);
      T u[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T decayed = DecayedParameter(decay, c, old[k]);
        u[k] = Direction(decay, c, decayed, first[k], second[k]);
        *p_square += static_cast<double>(decayed) * static_cast<double>(decayed);
        *u_square += static_cast<double>(u[k]) * static_cast<double>(u[k]);
      }
      if (work.slot >= 0) StoreShared<kCount>(u, Slot(work.slot) + at);
    });
  }

  // Between the passes, by thread 0: what the call returns about the layer.
  XLA_LAMB_MEMBER void Finish(const Chunk& chunk, double p_square, double u_square) const {
    if constexpr (kPart == Part::kMoments) {
      T* sums = static_cast<T*>(table_.sums) + 2 * RowOf(chunk);
      sums[0] = static_cast<T>(p_square);
      sums[1] = static_cast<T>(u_square);
    } else {
      T trust[3];
      Ratio(chunk, p_square, u_square, trust);
      for (int i = 0; i < 3; ++i) Trust(chunk)[i] = trust[i];
    }
  }

  // Returns the rate: the learning rate times the ratio.
  XLA_LAMB_MEMBER T Ratio(const Chunk& chunk, double p_square, double u_square, T trust[3]) const {
    trust[0] = trust[1] = trust[2] = T(0);
    if (Scalar(kSkip) != 0) return T(0);
    const T norm_bounds[2] = {static_cast<T>(table_.norm_bounds[0]), static_cast<T>(table_.norm_bounds[1])};
    const T ratio_bounds[2] = {static_cast<T>(table_.ratio_bounds[0]), static_cast<T>(table_.ratio_bounds[1])};
    return xla_lamb::Finish(Scalars(), p_square, u_square, static_cast<Adapt>(TensorOf(chunk).adapt), norm_bounds, ratio_bounds, trust);
  }

  XLA_LAMB_MEMBER T Rate(const Chunk& chunk) const {
    if constexpr (kPart == Part::kStep) return Scalar(kLearningRate) * Trust(chunk)[2];
    const T* sums = static_cast<const T*>(table_.sums) + 2 * RowOf(chunk);
    if (threadIdx.x == 0 && chunk.index == chunk.first) Finish(chunk, sums[0], sums[1]);
    T trust[3];
    return Ratio(chunk, sums[0], sums[1], trust);
  }

  XLA_LAMB_MEMBER void Second(const Work& work) const {
    const TensorEntry& tensor = TensorOf(work.chunk);
    const bool skip = Scalar(kSkip) != 0;
    const T rate = Rate(work.chunk);
    if (kPart == Part::kApply) PrefetchUpcoming();
    if (skip && !table_.emit_updates) {
      Copy(work.chunk, tensor.parameter, tensor.output, ParameterType());
    } else if (kPart == Part::kStep && work.slot >= 0) {
      Apply<true>(work, skip, rate);
    } else {
      Apply<false>(work, skip, rate);
    }
  }

  template <bool kStays>
  XLA_LAMB_MEMBER void Apply(const Work& work, bool skip, T rate) const {
    const TensorEntry& tensor = TensorOf(work.chunk);
    const Coefficients<T>& c = Chosen();
    const Decay decay = DecayOf(work.chunk);
    const Type p_type = ParameterType(), m_type = MomentType(), out_type = OutputType();
    const void* parameter = At(work.chunk, tensor.parameter, p_type);
    const void* first_moment = At(work.chunk, kPart == Part::kStep ? tensor.first_moment_out : tensor.first_moment, m_type);
    const void* second_moment = At(work.chunk, kPart == Part::kStep ? tensor.second_moment_out : tensor.second_moment, m_type);
    void* output = At(work.chunk, tensor.output, out_type);
    ForElements(work.chunk, [&](int at, auto count) {
      constexpr int kCount = decltype(count)::kValue;
      Vector<T, kCount> p, m, v;
      p.Load(parameter, p_type, at, Use::kStreaming);
      if constexpr (!kStays) {
        m.Load(first_moment, m_type, at, Use::kStreaming);
        v.Load(second_moment, m_type, at, Use::kStreaming);
      }
      T old[kCount], u[kCount], out[kCount];
      p.Get(p_type, old);
      if constexpr (kStays) {
        LoadShared<kCount>(Slot(work.slot) + at, u);
      } else {
        T first[kCount], second[kCount];
        m.Get(m_type, first);
        v.Get(m_type, second);
#pragma unroll
        for (int k = 0; k < kCount; ++k) u[k] = Direction(decay, c, DecayedParameter(decay, c, old[k]), first[k], second[k]);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T decayed = DecayedParameter(decay, c, old[k]);
        out[k] = skip ? T(0) : Output(decay, table_.emit_updates, c, rate, old[k], decayed, u[k]);
      }
      StoreVector<kCount>(out, output, out_type, at, Use::kStreaming);
    });
  }

  // A skipped step changes no bit.
  XLA_LAMB_MEMBER void Copy(const Chunk& chunk, const void* source, void* target, Type type) const {
    if (source == target) return;
    source = At(chunk, source, type);
    target = At(chunk, target, type);
    ForElements(chunk, [&](int at, auto count) {
      Vector<T, decltype(count)::kValue> x;
      x.Load(source, type, at, Use::kStreaming);
      x.Store(target, type, at, Use::kStreaming);
    });
  }

  const Table& table_;
  Shared& shared_;
};

template <Part kPart, Kind kKind, int kTensors>
__global__ void __launch_bounds__(kThreads, BlocksPerMultiprocessor(kMajor, kKind))
    StepKernel(const __grid_constant__ StepTable<kTensors> table) {
  StepBlock<kPart, kKind, kTensors>(table).Run();
}

// The sum of squares of all gradients, by the same rules: parts that do not depend on the number of blocks, added in their order.
template <typename T, int kN, int kTensors>
class NormBlock {
 public:
  using Table = NormTable<kTensors>;
  static constexpr int kVectors = 4;
  static constexpr int kTile = kThreads * kN * kVectors;

  XLA_LAMB_MEMBER explicit NormBlock(const Table& table) : table_(table), shared_(SharedOfBlock()) {}

  XLA_LAMB_MEMBER void Run() {
    const int64_t parts = static_cast<int64_t>(table_.rows) * table_.parts;
    for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
      const int64_t row = part / table_.parts;
      double square = 0, broken = 0;
      for (int64_t chunk = part % table_.parts; chunk < table_.chunks; chunk += table_.parts) Add(row, chunk, &square, &broken);
      Reduce(&square, &broken);
      if (threadIdx.x == 0) {
        table_.sums[2 * part] = square;
        table_.sums[2 * part + 1] = broken;
        shared_.last = FetchAdd(&table_.arrived[row], 1) + 1 == table_.parts;
      }
      __syncthreads();
      if (shared_.last) Finish(row);
      __syncthreads();
    }
  }

 private:
  XLA_LAMB_MEMBER void Add(int64_t row, int64_t chunk, double* square, double* broken) const {
    const GradientEntry& gradient = table_.gradients[Find(table_.gradients, table_.count, chunk)];
    const int64_t begin = (chunk - gradient.first_chunk) * kTile;
    const char* data = static_cast<const char*>(gradient.data) + ((table_.first_row + row) * gradient.row_size + begin) * SizeOf(table_.type);
    const int64_t left = gradient.row_size - begin;
    const int size = static_cast<int>(left < kTile ? left : kTile), vectors_end = gradient.aligned ? size / kN * kN : 0;
    Vector<T, kN> x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = (i * kThreads + threadIdx.x) * kN;
      if (at < vectors_end) x[i].Load(data, table_.type, at, Use::kAgain);  // by the step
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if ((i * kThreads + static_cast<int>(threadIdx.x)) * kN < vectors_end) AddVector(x[i], square, broken);
    }
#pragma unroll 1
    for (int at = vectors_end + threadIdx.x; at < size; at += kThreads) {
      Vector<T, 1> single;
      single.Load(data, table_.type, at, Use::kAgain);
      AddVector(single, square, broken);
    }
  }

  template <int kCount>
  XLA_LAMB_MEMBER void AddVector(const Vector<T, kCount>& x, double* square, double* broken) const {
    T values[kCount];
    x.Get(table_.type, values);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      *square += static_cast<double>(values[k]) * static_cast<double>(values[k]);
      if (!(values[k] - values[k] == T(0))) *broken = 1;
    }
  }

  XLA_LAMB_MEMBER void Finish(int64_t row) const {
    double square = 0, broken = 0;
    for (uint32_t i = threadIdx.x; i < table_.parts; i += kThreads) {
      square += table_.sums[2 * (row * table_.parts + i)];
      broken += table_.sums[2 * (row * table_.parts + i) + 1];
    }
    Reduce(&square, &broken);
    if (threadIdx.x != 0) return;
    T* result = static_cast<T*>(table_.result) + 2 * (table_.first_row + row);
    const bool whole = broken == 0;
    result[0] = static_cast<T>(table_.more ? result[0] + square : square);
    result[1] = whole && (!table_.more || result[1] != 0) ? T(1) : T(0);
  }

  const Table& table_;
  Shared& shared_;
};

template <typename T, int kN, int kTensors>
__global__ void __launch_bounds__(kThreads, BlocksPerMultiprocessor(kMajor, Kind::kFloat32))
    NormKernel(const __grid_constant__ NormTable<kTensors> table) {
  NormBlock<T, kN, kTensors>(table).Run();
}

template <typename Table>
cudaError_t Launch(void (*kernel)(Table), const Table& table, int blocks, int64_t shared_bytes, cudaStream_t stream) {
  constexpr int64_t kAlwaysAllowed = 48 * 1024;
  if (shared_bytes > kAlwaysAllowed) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    // The blocks that policy.h counts on fill an SM's shared memory: none of it can stay with the L1 cache.
    if (error == cudaSuccess) error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  void* arguments[] = {const_cast<Table*>(&table)};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, static_cast<size_t>(shared_bytes), stream);
}

template <Part kPart, int kTensors>
cudaError_t RunPart(const StepTable<kTensors>& table, int blocks, cudaStream_t stream) {
  const int64_t shared_bytes = kSharedBytes + (kPart == Part::kStep ? static_cast<int64_t>(table.slots) * kSlotBytes : 0);
  switch (KindOf(table.types)) {
    case Kind::kFloat32: return Launch(StepKernel<kPart, Kind::kFloat32, kTensors>, table, blocks, shared_bytes, stream);
    case Kind::kMixed: return Launch(StepKernel<kPart, Kind::kMixed, kTensors>, table, blocks, shared_bytes, stream);
    case Kind::kHalves: return Launch(StepKernel<kPart, Kind::kHalves, kTensors>, table, blocks, shared_bytes, stream);
    default: return Launch(StepKernel<kPart, Kind::kFloat64, kTensors>, table, blocks, shared_bytes, stream);
  }
}

}  // namespace

Kind KindOf(const Types& types) {
  if (types.parameter == Type::kF64) return Kind::kFloat64;
  const Type all[] = {types.parameter, types.gradient, types.first_moment, types.second_moment, types.output};
  bool single = true, halves = true;
  for (Type type : all) {
    single = single && type == Type::kF32;
    halves = halves && SizeOf(type) == 2;
  }
  return single ? Kind::kFloat32 : halves ? Kind::kHalves : Kind::kMixed;
}

int VectorOf(Kind kind) {
  return kind == Kind::kFloat64 ? KindTraits<Kind::kFloat64>::kN : kind == Kind::kHalves ? KindTraits<Kind::kHalves>::kN : KindTraits<Kind::kMixed>::kN;
}

int VectorOf(Type type) { return static_cast<int>(16 / SizeOf(type)); }

int64_t TileOf(Kind kind) { return kSlotBytes / (kind == Kind::kFloat64 ? sizeof(double) : sizeof(float)); }

int64_t TileOf(Type type) { return NormBlock<float, 1, 1>::kTile * VectorOf(type); }

int64_t SharedBytes() { return kSharedBytes; }

template <int kTensors>
cudaError_t Run(Part part, const StepTable<kTensors>& table, int blocks, cudaStream_t stream) {
  switch (part) {
    case Part::kStep: return RunPart<Part::kStep>(table, blocks, stream);
    case Part::kMoments: return RunPart<Part::kMoments>(table, blocks, stream);
    default: return RunPart<Part::kApply>(table, blocks, stream);
  }
}

template <int kTensors>
cudaError_t Run(const NormTable<kTensors>& table, int blocks, cudaStream_t stream) {
  switch (VectorOf(table.type)) {
    case 2: return Launch(NormKernel<double, 2, kTensors>, table, blocks, kSharedBytes, stream);
    case 4: return Launch(NormKernel<float, 4, kTensors>, table, blocks, kSharedBytes, stream);
    default: return Launch(NormKernel<float, 8, kTensors>, table, blocks, kSharedBytes, stream);
  }
}

template cudaError_t Run(Part, const StepTable<kMaxTensors>&, int, cudaStream_t);
template cudaError_t Run(Part, const StepTable<kMaxTensorsInGraph>&, int, cudaStream_t);
template cudaError_t Run(const NormTable<kMaxTensors>&, int, cudaStream_t);
template cudaError_t Run(const NormTable<kMaxTensorsInGraph>&, int, cudaStream_t);

}  // namespace cuda
}  // namespace xla_lamb
