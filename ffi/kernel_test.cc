// The kernel alone: against a plain double model, on odd sizes and unaligned buffers, under pools that help, that come too late or
// that never come. Built a second time under the address and undefined-behaviour sanitizers.
#include "ffi/kernel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace xla_lamb {
namespace {

int failures = 0;
int checks = 0;

void Check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

// A pool of real threads.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool pool() {
    Pool pool;
    pool.threads = static_cast<int64_t>(threads_.size());
    pool.schedule = [this](std::function<void()> task) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
      }
      wake_.notify_one();
    };
    return pool;
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
};

double Get(const std::vector<char>& bytes, int64_t offset, Type type, int64_t i) {
  const char* at = bytes.data() + offset + i * SizeOf(type);
  switch (type) {
    case Type::kF32: {
      float x;
      std::memcpy(&x, at, sizeof(x));
      return x;
    }
    case Type::kF64: {
      double x;
      std::memcpy(&x, at, sizeof(x));
      return x;
    }
    case Type::kBF16: {
      BFloat16 x;
      std::memcpy(&x, at, sizeof(x));
      return Widen(x);
    }
    case Type::kF16: {
      Float16 x;
      std::memcpy(&x, at, sizeof(x));
      return Widen(x);
    }
  }
  return 0;
}

void Put(std::vector<char>* bytes, int64_t offset, Type type, int64_t i, double value) {
  char* at = bytes->data() + offset + i * SizeOf(type);
  switch (type) {
    case Type::kF32: {
      const float x = static_cast<float>(value);
      std::memcpy(at, &x, sizeof(x));
      break;
    }
    case Type::kF64: std::memcpy(at, &value, sizeof(value)); break;
    case Type::kBF16: {
      BFloat16 x;
      Narrow(static_cast<float>(value), &x);
      std::memcpy(at, &x, sizeof(x));
      break;
    }
    case Type::kF16: {
      Float16 x;
      Narrow(static_cast<float>(value), &x);
      std::memcpy(at, &x, sizeof(x));
      break;
    }
  }
}

// Tensors whose buffers end exactly where the sanitizer watches, and begin one element after an aligned address.
struct Buffers {
  std::vector<std::vector<char>> p, g, m, v;
};

struct Case {
  Types types;
  Decay decay = Decay::kInRatio;
  std::vector<std::pair<int64_t, int64_t>> shapes;  // size, layers
  double scalars[kNumScalars] = {0.01, 0.9, 0.1, 0.999, 0.001, 1e-6, 0, 0.1, 0.19, 0.001999, 0.5, 0};
};

Buffers Make(const Case& c) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  Buffers b;
  for (const auto& shape : c.shapes) {
    const auto fill = [&](Type type, bool square) {
      std::vector<char> bytes(static_cast<size_t>((shape.first + 1) * SizeOf(type)));
      for (int64_t i = 0; i < shape.first; ++i) {
        const double x = normal(random);
        Put(&bytes, SizeOf(type), type, i, square ? x * x : x);
      }
      return bytes;
    };
    b.p.push_back(fill(c.types.parameter, false));
    b.g.push_back(fill(c.types.gradient, false));
    b.m.push_back(fill(c.types.first_moment, false));
    b.v.push_back(fill(c.types.second_moment, true));
  }
  return b;
}

Step MakeStep(const Case& c, Buffers* b, Part part) {
  Step step;
  step.part = part;
  step.types = c.types;
  step.types.output = c.types.parameter;
  step.decay = c.decay;
  step.norm_bounds[1] = step.ratio_bounds[1] = std::numeric_limits<double>::infinity();
  step.scalars = c.scalars;
  for (size_t i = 0; i < c.shapes.size(); ++i) {
    Tensor t;
    t.size = c.shapes[i].first;
    t.layers = c.shapes[i].second;
    t.parameter = t.output = b->p[i].data() + SizeOf(c.types.parameter);
    t.gradient = b->g[i].data() + SizeOf(c.types.gradient);
    t.first_moment = t.first_moment_out = b->m[i].data() + SizeOf(c.types.first_moment);
    t.second_moment = t.second_moment_out = b->v[i].data() + SizeOf(c.types.second_moment);
    t.decays = i % 3 != 2;
    step.tensors.push_back(t);
  }
  return step;
}

int64_t Layers(const Case& c) {
  int64_t layers = 0;
  for (const auto& shape : c.shapes) layers += shape.second;
  return layers;
}

// Runs one step in place and returns everything that it wrote.
std::vector<char> RunCase(const Case& c, Buffers* b, const Pool& pool, bool in_halves) {
  const size_t width = c.types.parameter == Type::kF64 ? 8 : 4;
  std::vector<char> trust(static_cast<size_t>(Layers(c)) * 3 * width), sums(static_cast<size_t>(Layers(c)) * 2 * width);
  if (in_halves) {
    Step first = MakeStep(c, b, Part::kMoments);
    first.sums = sums.data();
    Run(first, pool);
    Step second = MakeStep(c, b, Part::kApply);
    second.sums = sums.data();
    second.trust = trust.data();
    Run(second, pool);
  } else {
    Step step = MakeStep(c, b, Part::kStep);
    step.trust = trust.data();
    Run(step, pool);
  }
  std::vector<char> all = trust;
  for (size_t i = 0; i < b->p.size(); ++i) {
    all.insert(all.end(), b->p[i].begin(), b->p[i].end());
    all.insert(all.end(), b->m[i].begin(), b->m[i].end());
    all.insert(all.end(), b->v[i].begin(), b->v[i].end());
  }
  return all;
}

// The formulas once more, in double, in the most naive way.
void CheckAgainstModel(const Case& c, const Buffers& before, const Buffers& after, const std::string& what) {
  const double* s = c.scalars;
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    const int64_t size = c.shapes[t].first / c.shapes[t].second;
    const bool decays = t % 3 != 2;
    for (int64_t layer = 0; layer < c.shapes[t].second; ++layer) {
      std::vector<double> p(size), m(size), v(size), u(size);
      long double pp = 0, uu = 0;  // more exact than the kernel, or this would be the error that the test sees
      for (int64_t k = 0; k < size; ++k) {
        const int64_t i = layer * size + k;
        p[k] = Get(before.p[t], SizeOf(c.types.parameter), c.types.parameter, i);
        double g = Get(before.g[t], SizeOf(c.types.gradient), c.types.gradient, i) * s[kGradScale];
        if (decays && c.decay == Decay::kL2) g += s[kWeightDecay] * p[k];
        m[k] = s[kB1] * Get(before.m[t], SizeOf(c.types.first_moment), c.types.first_moment, i) + s[kOneMinusB1] * g;
        v[k] = s[kB2] * Get(before.v[t], SizeOf(c.types.second_moment), c.types.second_moment, i) + s[kOneMinusB2] * g * g;
        if (decays && c.decay == Decay::kDecoupled) p[k] -= s[kWeightDecay] * p[k];
        u[k] = m[k] / s[kBiasCorrection1] / (std::sqrt(v[k] / s[kBiasCorrection2]) + s[kEps]);
        if (decays && c.decay == Decay::kInRatio) u[k] += s[kWeightDecay] * p[k];
        pp += p[k] * p[k];
        uu += u[k] * u[k];
      }
      const double ratio = pp > 0 && uu > 0 ? static_cast<double>(std::sqrt(pp / uu)) : 1;
      double largest = 0, worst_p = 0, worst_m = 0;
      for (int64_t k = 0; k < size; ++k) {
        const int64_t i = layer * size + k;
        const double expected = p[k] - s[kLearningRate] * ratio * u[k];
        largest = std::max(largest, std::fabs(expected));
        worst_p = std::max(worst_p, std::fabs(expected - Get(after.p[t], SizeOf(c.types.parameter), c.types.parameter, i)));
        worst_m = std::max(worst_m, std::fabs(m[k] - Get(after.m[t], SizeOf(c.types.first_moment), c.types.first_moment, i)));
      }
      const auto ulp = [](Type type) { return type == Type::kF64 ? 1e-15 : type == Type::kF32 ? 2.4e-7 : type == Type::kF16 ? 1e-3 : 8e-3; };
      const double loose = c.types.first_moment == Type::kBF16 ? 1e-3 : 0;  // u comes from rounded moments
      Check(worst_p <= (2 * ulp(c.types.parameter) + loose) * largest, what + ": parameters of tensor " + std::to_string(t));
      Check(worst_m <= 4 * ulp(c.types.first_moment) * 5, what + ": first moments of tensor " + std::to_string(t));
    }
  }
}

const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {0, 1}, {1, 1}, {7, 1}, {8, 1}, {9, 1}, {127, 1}, {129, 1}, {4095, 1}, {4097, 1}, {12, 4}, {0, 3},
    {32 * 1024, 1}, {32 * 1024 + 1, 1}, {200 * 1000, 2}, {5, 5}, {100 * 1000, 1}};

void TestTypesAndPools() {
  Threads two(2), eight(8);
  // A pool whose tasks all run after the call, as when other work keeps it busy; and one that never runs any while it may be asked.
  std::vector<std::function<void()>> kept;
  Pool late;
  late.threads = 4;
  late.schedule = [&kept](std::function<void()> task) { kept.push_back(std::move(task)); };

  const Type all[] = {Type::kF32, Type::kBF16, Type::kF16, Type::kF64};
  for (Type parameter : all) {
    for (Type gradient : all) {
      for (Type moment : all) {
        const bool wide = parameter == Type::kF64;
        if (wide ? moment != Type::kF64 : moment != Type::kF32 && moment != Type::kBF16) continue;
        for (Decay decay : {Decay::kInRatio, Decay::kDecoupled, Decay::kL2}) {
          Case c;
          c.types = {parameter, gradient, moment, moment, parameter};
          c.decay = decay;
          c.shapes = kShapes;
          const std::string what = "types " + std::to_string(static_cast<int>(parameter)) + std::to_string(static_cast<int>(gradient)) +
                                   std::to_string(static_cast<int>(moment)) + " decay " + std::to_string(static_cast<int>(decay));
          const Buffers before = Make(c);
          Buffers alone = before;
          const std::vector<char> result = RunCase(c, &alone, Pool(), false);
          CheckAgainstModel(c, before, alone, what);
          for (const Pool& pool : {two.pool(), eight.pool(), late}) {
            Buffers again = before;
            Check(RunCase(c, &again, pool, false) == result, what + ": other bits with a pool of " + std::to_string(pool.threads));
          }
          Buffers halves = before;
          CheckAgainstModel(c, before, (RunCase(c, &halves, two.pool(), true), halves), what + " in halves");
        }
      }
    }
  }
  for (const std::function<void()>& task : kept) task();  // long after their calls have returned
}

void TestSkip() {
  for (bool halves : {false, true}) {
    Case c;
    c.shapes = kShapes;
    c.scalars[kSkip] = 1;
    c.scalars[kGradScale] = std::numeric_limits<double>::quiet_NaN();
    const Buffers before = Make(c);
    Buffers after = before;
    RunCase(c, &after, Pool(), halves);
    Check(after.p == before.p && after.m == before.m && after.v == before.v, "a skipped step changed something");
  }
}

void TestUpdatesIntoGradients() {
  Case c;
  c.shapes = kShapes;
  const Buffers before = Make(c);
  Buffers after = before;
  Step step = MakeStep(c, &after, Part::kStep);
  std::vector<float> trust(static_cast<size_t>(Layers(c)) * 3);
  step.trust = trust.data();
  step.emit_updates = true;
  for (size_t i = 0; i < step.tensors.size(); ++i) step.tensors[i].output = after.g[i].data() + 4;
  Run(step, Pool());
  Check(after.p == before.p, "updates were asked for, and the parameters changed");
  Buffers applied = before;
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    for (int64_t i = 0; i < c.shapes[t].first; ++i) {
      Put(&applied.p[t], 4, Type::kF32, i, Get(before.p[t], 4, Type::kF32, i) + Get(after.g[t], 4, Type::kF32, i));
    }
  }
  applied.m = after.m;
  applied.v = after.v;
  CheckAgainstModel(c, before, applied, "updates");
}

void TestBatch() {
  // Two rows of scalars: the second half of every tensor is skipped.
  Case c;
  c.shapes = {{20, 2}, {80 * 1000, 2}, {6, 6}};
  double rows[2][kNumScalars];
  std::memcpy(rows[0], c.scalars, sizeof(rows[0]));
  std::memcpy(rows[1], c.scalars, sizeof(rows[1]));
  rows[1][kSkip] = 1;
  const Buffers before = Make(c);
  Buffers after = before;
  Step step = MakeStep(c, &after, Part::kStep);
  step.scalars = &rows[0][0];
  step.rows = 2;
  std::vector<float> trust(static_cast<size_t>(Layers(c)) * 3);
  step.trust = trust.data();
  Run(step, Pool());
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    const size_t half = 4 + static_cast<size_t>(c.shapes[t].first) / 2 * 4;
    Check(std::equal(after.p[t].begin() + half, after.p[t].end(), before.p[t].begin() + half), "the skipped half changed");
    Check(!std::equal(after.p[t].begin() + 4, after.p[t].begin() + half, before.p[t].begin() + 4), "the other half did not change");
  }
}

void TestGradNorm() {
  Threads three(3);
  for (Type type : {Type::kF32, Type::kBF16, Type::kF16, Type::kF64}) {
    std::vector<std::vector<char>> buffers;
    double expected = 0;
    for (int64_t size : {0, 1, 9, 100000, 32768}) {
      buffers.emplace_back(static_cast<size_t>((size + 1) * SizeOf(type)));
      for (int64_t i = 0; i < size; ++i) {
        Put(&buffers.back(), SizeOf(type), type, i, 0.001 * static_cast<double>(i % 1000));
        const double x = Get(buffers.back(), SizeOf(type), type, i);
        expected += x * x;
      }
    }
    GradNorm norm;
    norm.type = type;
    for (const auto& bytes : buffers) norm.gradients.push_back({bytes.data() + SizeOf(type), static_cast<int64_t>(bytes.size()) / SizeOf(type) - 1});
    double sums[2] = {0, 0};
    bool finite = false;
    norm.sum_of_squares = &sums[0];
    norm.finite = &finite;
    Run(norm, Pool());
    norm.sum_of_squares = &sums[1];
    Run(norm, three.pool());
    Check(finite && std::fabs(sums[0] - expected) <= 1e-12 * expected, "sum of squares");
    Check(sums[0] == sums[1], "the sum of squares depends on the number of threads");
    Put(&buffers[3], SizeOf(type), type, 77777, type == Type::kF16 ? INFINITY : NAN);
    Run(norm, three.pool());
    Check(!finite, "a gradient that is not finite");
  }
  // Squares overflow a float64, the elements do not.
  std::vector<double> huge(10, 1e200);
  GradNorm norm;
  norm.type = Type::kF64;
  norm.gradients = {{huge.data(), 10}};
  double sum = 0;
  bool finite = false;
  norm.sum_of_squares = &sum;
  norm.finite = &finite;
  Run(norm, Pool());
  Check(finite && std::isinf(sum), "finite elements with an infinite norm");
}

void TestConversions() {
  // Every float16 and bfloat16 survives the way to float and back; rounding is to nearest, ties to even.
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 half = {static_cast<uint16_t>(bits)};
    Float16 half_again;
    Narrow(Widen(half), &half_again);
    if (std::isnan(Widen(half))) {
      Check(std::isnan(Widen(half_again)), "float16 NaN");
    } else {
      Check(half_again.bits == half.bits, "float16 " + std::to_string(bits));
    }
    const BFloat16 brain = {static_cast<uint16_t>(bits)};
    BFloat16 brain_again;
    Narrow(Widen(brain), &brain_again);
    if (std::isnan(Widen(brain))) {
      Check(std::isnan(Widen(brain_again)), "bfloat16 NaN");
    } else {
      Check(brain_again.bits == brain.bits, "bfloat16 " + std::to_string(bits));
    }
  }
  const std::pair<float, uint16_t> halves[] = {{65504.0f, 0x7bff}, {65519.0f, 0x7bff}, {65520.0f, 0x7c00}, {1e30f, 0x7c00},
                                               {0x1p-24f, 0x0001}, {0x1p-25f, 0x0000}, {0x1.8p-24f, 0x0002}, {1.0f + 0x1p-11f, 0x3c00},
                                               {1.0f + 0x1.8p-10f, 0x3c02}, {-0.0f, 0x8000}};
  for (const auto& pair : halves) {
    Float16 x;
    Narrow(pair.first, &x);
    Check(x.bits == pair.second, "rounding to float16");
  }
}

}  // namespace
}  // namespace xla_lamb

int main() {
  std::printf("instruction set: %s\n", xla_lamb::InstructionSet());
  xla_lamb::TestConversions();
  xla_lamb::TestTypesAndPools();
  xla_lamb::TestSkip();
  xla_lamb::TestUpdatesIntoGradients();
  xla_lamb::TestBatch();
  xla_lamb::TestGradNorm();
  std::printf("%d checks, %d failed\n", xla_lamb::checks, xla_lamb::failures);
  return xla_lamb::failures == 0 ? 0 : 1;
}
