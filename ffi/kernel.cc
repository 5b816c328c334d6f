// How a call's work is cut, ordered and spread over threads. The loops themselves are in kernel_isa.cc.
//
// A layer needs two passes: moments and norms, then the update, once the whole layer's norms are known. A layer that fits a core's own
// cache is done by one thread, both passes at once; a larger one is cut into chunks, and its second pass follows its first while it
// is still in a shared cache. All of it is one list of items that threads take in order. An item of a second pass may wait for first
// passes, but only for items that came before it in the list, and those are in the hands of threads that are running: nobody can wait
// for a thread that has not started.
//
// Determinism: chunks do not depend on the number of threads, each leaves its sums in a place of its own, and the sums are added in
// the order of the chunks.
#include "ffi/kernel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "ffi/kernel_isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace xla_lamb {
namespace {

// Elements. p, m and v of a float32 chunk take 384 KB: the L2 cache of a server core holds them between the passes.
constexpr int64_t kChunk = 32 * 1024;
// Less work than this is not worth waking a thread.
constexpr int64_t kWorthAThread = 16 * 1024;

// Denormal numbers are flushed to zero, as in the code that XLA compiles; on every thread, whatever its own mode, or the result would
// depend on who computes it. They would also cost a hundred cycles each in the moments of rows that get no gradient.
class FloatingPointMode {
 public:
#if defined(__x86_64__)
  FloatingPointMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kMaskAllAndRoundToNearest = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    _mm_setcsr(kMaskAllAndRoundToNearest | kFlushToZero | kDenormalsAreZero);
  }
  ~FloatingPointMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatingPointMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const uint64_t kFlushToZero = uint64_t{1} << 24;
    asm volatile("msr fpcr, %0" : : "r"(kFlushToZero));
  }
  ~FloatingPointMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Choice {
  const Loops* loops;
  const char* name;
};

Choice Choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("XLA_LAMB_CPU");
  const bool any = asked == nullptr || *asked == '\0';
  const bool baseline = !any && std::strcmp(asked, "baseline") == 0;
  const bool avx2 = !any && std::strcmp(asked, "avx2") == 0;
  if (!baseline && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return {&kLoops_avx512, "avx512"};
  }
  if (!baseline && __builtin_cpu_supports("avx2")) return {&kLoops_avx2, "avx2"};
#endif
  return {&kLoops_baseline, "baseline"};  // on aarch64 the baseline has NEON
}

const Choice& Chosen() {
  static const Choice choice = Choose();
  return choice;
}

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A list of items that threads take one by one. It outlives the call in the hands of helpers that start too late to find work, so
// that the call never has to wait for them.
class Work : public std::enable_shared_from_this<Work> {
 public:
  virtual ~Work() = default;

  void Run(const Pool& pool, int64_t items, int64_t elements) {
    count_ = items;
    const int64_t helpers = std::min({pool.threads - 1, items - 1, elements / kWorthAThread});
    for (int64_t i = 0; i < helpers; ++i) {
      pool.schedule([self = shared_from_this()] { self->Help(); });
    }
    Help();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) Rest(spins);
  }

 protected:
  virtual void Do(int64_t item) = 0;

  // Waits are as short as what is left of another thread's item, unless that thread lost its core.
  static void Rest(int spins) {
    if (spins < 2000) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  void Help() {
    FloatingPointMode mode;
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= count_) return;
      Do(item);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
};

// One layer of one tensor.
struct Layer {
  int64_t tensor = 0;
  int64_t begin = 0;  // its first element in the tensor
  int64_t size = 0;
  int64_t row = 0;    // of the scalars
  int64_t first_chunk = 0;
  int64_t chunks = 0;
};

class StepWork : public Work {
 public:
  StepWork(const Step& step, int64_t threads) : step_(step), loops_(*Chosen().loops) {
    for (size_t t = 0; t < step_.tensors.size(); ++t) {
      const Tensor& tensor = step_.tensors[t];
      for (int64_t i = 0; i < tensor.layers; ++i) {
        Layer layer;
        layer.tensor = static_cast<int64_t>(t);
        layer.size = tensor.size / tensor.layers;
        layer.begin = i * layer.size;
        layer.row = i * step_.rows / tensor.layers;
        layer.chunks = (layer.size + kChunk - 1) / kChunk;
        layer.first_chunk = chunks_;
        chunks_ += layer.chunks;
        elements_ += layer.size;
        layers_.push_back(layer);
      }
    }
    sums_.resize(static_cast<size_t>(chunks_));
    scalars_ = step_.types.parameter == Type::kF64 ? ScalarsAs<double>() : ScalarsAs<float>();
    rates_.resize(layers_.size());
    waiting_ = std::vector<std::atomic<int64_t>>(layers_.size());
    Order(std::max<int64_t>(threads - 1, 1));
  }

  void RunOn(const Pool& pool) { Run(pool, static_cast<int64_t>(items_.size()), elements_); }

 private:
  enum class Pass { kBoth, kFirst, kSecond };
  struct Item {
    Pass pass;
    int64_t begin;  // kBoth: layers [begin, end); otherwise chunk `end` of layer `begin`
    int64_t end;
  };

  // A layer's second pass starts `lag` items late, so that the other threads have finished its first pass by then.
  void Order(int64_t lag) {
    std::vector<Item> late;
    int64_t since = 0;
    const auto flush = [&] {
      items_.insert(items_.end(), late.begin(), late.end());
      late.clear();
      since = 0;
    };
    const auto add = [&](Item item) {
      items_.push_back(item);
      if (!late.empty() && ++since >= lag) flush();
    };
    const int64_t layers = static_cast<int64_t>(layers_.size());
    for (int64_t l = 0; l < layers;) {
      if (layers_[l].chunks <= 1) {
        int64_t end = l, together = 0;
        while (end < layers && layers_[end].chunks <= 1 && (end == l || together + layers_[end].size <= kChunk)) {
          together += layers_[end++].size;
        }
        add({Pass::kBoth, l, end});
        l = end;
        continue;
      }
      waiting_[l].store(step_.part == Part::kApply ? 0 : layers_[l].chunks, std::memory_order_relaxed);
      if (step_.part != Part::kApply) {
        for (int64_t c = 0; c < layers_[l].chunks; ++c) add({Pass::kFirst, l, c});
        flush();
      } else {
        Finish(l);
      }
      if (step_.part != Part::kMoments) {
        for (int64_t c = 0; c < layers_[l].chunks; ++c) late.push_back({Pass::kSecond, l, c});
        if (step_.part == Part::kApply) flush();
      }
      ++l;
    }
    flush();
  }

  void Do(int64_t index) override {
    const Item item = items_[static_cast<size_t>(index)];
    switch (item.pass) {
      case Pass::kBoth:
        for (int64_t l = item.begin; l < item.end; ++l) {
          if (step_.part != Part::kApply && layers_[l].chunks > 0) First(l, 0);
          Finish(l);
          if (step_.part != Part::kMoments && layers_[l].chunks > 0) Second(l, 0);
        }
        break;
      case Pass::kFirst:
        First(item.begin, item.end);
        // Acquire and release: whoever comes last sees the sums of all.
        if (waiting_[item.begin].fetch_sub(1, std::memory_order_acq_rel) == 1) {
          Finish(item.begin);
          waiting_[item.begin].store(-1, std::memory_order_release);
        }
        break;
      case Pass::kSecond:
        if (step_.part == Part::kStep) {
          for (int spins = 0; waiting_[item.begin].load(std::memory_order_acquire) != -1; ++spins) Rest(spins);
        }
        Second(item.begin, item.end);
        break;
    }
  }

  template <typename T>
  std::vector<double> ScalarsAs() const {
    const T* scalars = static_cast<const T*>(step_.scalars);
    return std::vector<double>(scalars, scalars + step_.rows * kNumScalars);
  }

  const double* Scalars(const Layer& layer) const { return scalars_.data() + layer.row * kNumScalars; }
  bool Skipped(const Layer& layer) const { return Scalars(layer)[kSkip] != 0; }

  Range RangeOf(const Layer& layer, int64_t chunk) const {
    const Tensor& t = step_.tensors[layer.tensor];
    const int64_t begin = layer.begin + chunk * kChunk;
    const auto in = [begin](const void* data, Type type) {
      return data == nullptr ? nullptr : static_cast<const char*>(data) + begin * SizeOf(type);
    };
    const auto out = [begin](void* data, Type type) {
      return data == nullptr ? nullptr : static_cast<char*>(data) + begin * SizeOf(type);
    };
    const Types& types = step_.types;
    Range range;
    range.size = std::min(kChunk, layer.size - chunk * kChunk);
    range.parameter = in(t.parameter, types.parameter);
    range.gradient = in(t.gradient, types.gradient);
    range.first_moment = in(t.first_moment, types.first_moment);
    range.second_moment = in(t.second_moment, types.second_moment);
    range.output = out(t.output, types.output);
    range.first_moment_out = out(t.first_moment_out, types.first_moment);
    range.second_moment_out = out(t.second_moment_out, types.second_moment);
    return range;
  }

  Decay DecayOf(const Layer& layer) const { return step_.tensors[layer.tensor].decays ? step_.decay : Decay::kNone; }

  static void Keep(void* to, const void* from, int64_t bytes) {
    if (to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  void First(int64_t l, int64_t chunk) {
    const Layer& layer = layers_[l];
    const Range range = RangeOf(layer, chunk);
    if (Skipped(layer)) {
      Keep(range.first_moment_out, range.first_moment, range.size * SizeOf(step_.types.first_moment));
      Keep(range.second_moment_out, range.second_moment, range.size * SizeOf(step_.types.second_moment));
      return;
    }
    sums_[layer.first_chunk + chunk] = loops_.moments(range, step_.types, DecayOf(layer), Scalars(layer));
  }

  // Between the passes: the layer's norms and its ratio.
  void Finish(int64_t l) {
    if (step_.types.parameter == Type::kF64) {
      FinishAs<double>(l);
    } else {
      FinishAs<float>(l);
    }
  }

  template <typename T>
  void FinishAs(int64_t l) {
    const Layer& layer = layers_[l];
    T* shared = static_cast<T*>(step_.sums) + 2 * l;
    Sums total;
    if (step_.part == Part::kApply) {
      total.parameter = shared[0];
      total.direction = shared[1];
    } else {
      for (int64_t c = 0; c < layer.chunks; ++c) {
        total.parameter += sums_[layer.first_chunk + c].parameter;
        total.direction += sums_[layer.first_chunk + c].direction;
      }
    }
    if (step_.part == Part::kMoments) {
      shared[0] = static_cast<T>(total.parameter);
      shared[1] = static_cast<T>(total.direction);
      return;
    }
    T* trust = static_cast<T*>(step_.trust) + 3 * l;
    if (Skipped(layer)) {
      trust[0] = trust[1] = trust[2] = T(0);
      return;
    }
    const T norm_bounds[2] = {static_cast<T>(step_.norm_bounds[0]), static_cast<T>(step_.norm_bounds[1])};
    const T ratio_bounds[2] = {static_cast<T>(step_.ratio_bounds[0]), static_cast<T>(step_.ratio_bounds[1])};
    rates_[l] = xla_lamb::Finish(Scalars(layer), total.parameter, total.direction, step_.tensors[layer.tensor].adapt, norm_bounds,
                                 ratio_bounds, trust);
  }

  void Second(int64_t l, int64_t chunk) {
    const Layer& layer = layers_[l];
    const Range range = RangeOf(layer, chunk);
    if (Skipped(layer)) {
      const int64_t bytes = range.size * SizeOf(step_.types.output);
      if (step_.emit_updates) {
        std::memset(range.output, 0, static_cast<size_t>(bytes));
      } else {
        Keep(range.output, range.parameter, bytes);
      }
      return;
    }
    Range second = range;
    if (step_.part == Part::kStep) {
      second.first_moment = range.first_moment_out;
      second.second_moment = range.second_moment_out;
    }
    loops_.apply(second, step_.types, DecayOf(layer), Scalars(layer), rates_[l], step_.emit_updates);
  }

  const Step& step_;
  const Loops& loops_;
  std::vector<double> scalars_;
  std::vector<Layer> layers_;
  int64_t chunks_ = 0;
  int64_t elements_ = 0;
  std::vector<Item> items_;
  std::vector<Sums> sums_;    // of each chunk
  std::vector<double> rates_; // of each layer: learning rate times ratio
  std::vector<std::atomic<int64_t>> waiting_;  // of each layer: chunks without first pass; -1 when its ratio is there
};

class GradNormWork : public Work {
 public:
  explicit GradNormWork(const GradNorm& norm) : norm_(norm), loops_(*Chosen().loops) {
    for (int64_t row = 0; row < norm_.rows; ++row) {
      for (const Gradient& gradient : norm_.gradients) {
        const int64_t size = gradient.size / norm_.rows;
        for (int64_t i = 0; i < size; i += kChunk) {
          const char* data = static_cast<const char*>(gradient.data) + (row * size + i) * SizeOf(norm_.type);
          chunks_.push_back({data, std::min(kChunk, size - i), row});
          elements_ += chunks_.back().size;
        }
      }
    }
    sums_.resize(chunks_.size());
  }

  void RunOn(const Pool& pool) {
    // Chunks of small gradients are handed out together.
    int64_t together = 0;
    starts_.push_back(0);
    for (size_t i = 0; i < chunks_.size(); ++i) {
      together += chunks_[i].size;
      if (together >= kChunk || i + 1 == chunks_.size()) {
        starts_.push_back(i + 1);
        together = 0;
      }
    }
    Run(pool, static_cast<int64_t>(starts_.size()) - 1, elements_);
    if (norm_.type == Type::kF64) {
      FinishAs<double>();
    } else {
      FinishAs<float>();
    }
  }

 private:
  struct Chunk {
    const char* data;
    int64_t size;
    int64_t row;
  };

  void Do(int64_t item) override {
    for (size_t i = starts_[item]; i < starts_[item + 1]; ++i) {
      sums_[i] = loops_.sum_of_squares(chunks_[i].data, norm_.type, chunks_[i].size);
    }
  }

  template <typename T>
  void FinishAs() {
    std::vector<double> totals(static_cast<size_t>(norm_.rows));
    std::vector<bool> finite(static_cast<size_t>(norm_.rows), true);
    for (size_t i = 0; i < chunks_.size(); ++i) {
      totals[chunks_[i].row] += sums_[i];
      if (!std::isfinite(sums_[i])) finite[chunks_[i].row] = finite[chunks_[i].row] && Finite(chunks_[i]);
    }
    T* result = static_cast<T*>(norm_.result);
    for (int64_t row = 0; row < norm_.rows; ++row) {
      result[2 * row] = static_cast<T>(totals[row]);
      result[2 * row + 1] = finite[row] ? T(1) : T(0);
    }
  }

  // Squares of finite floats never overflow a float64; those of float64 may.
  bool Finite(const Chunk& chunk) const {
    if (norm_.type != Type::kF64) return false;
    const double* x = reinterpret_cast<const double*>(chunk.data);
    return std::all_of(x, x + chunk.size, [](double value) { return std::isfinite(value); });
  }

  const GradNorm& norm_;
  const Loops& loops_;
  std::vector<Chunk> chunks_;
  int64_t elements_ = 0;
  std::vector<size_t> starts_;
  std::vector<double> sums_;  // of each chunk
};

}  // namespace

void Run(const Step& step, const Pool& pool) {
  FloatingPointMode mode;
  std::make_shared<StepWork>(step, pool.threads)->RunOn(pool);
}

void Run(const GradNorm& norm, const Pool& pool) {
  std::make_shared<GradNormWork>(norm)->RunOn(pool);
}

const char* InstructionSet() { return Chosen().name; }

}  // namespace xla_lamb
