// What every kernel must do, whatever it runs on: cases of all types, sizes and alignments against the formulas in plain double.
// Used by the tests of the CPU kernel and of the CUDA kernel.
#ifndef XLA_LAMB_FFI_KERNEL_TESTING_H_
#define XLA_LAMB_FFI_KERNEL_TESTING_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ffi/step.h"

namespace xla_lamb {

inline int failures = 0;
inline int checks = 0;

inline void Check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  if (std::getenv("XLA_LAMB_FIRST_FAILURE") != nullptr) std::exit(1);  // for what must fail: it is enough
}

inline int Report() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

// A kernel under test.
struct Kernel {
  std::function<void(const Step&)> step;
  std::function<void(const GradNorm&)> norm;
};

constexpr Type kAllTypes[] = {Type::kF32, Type::kBF16, Type::kF16, Type::kF64};

inline bool Wide(const Types& types) { return types.parameter == Type::kF64; }

inline double Get(const std::vector<char>& bytes, int64_t offset, Type type, int64_t i) {
  const char* at = bytes.data() + offset + i * SizeOf(type);
  const auto read = [at](auto x) {
    std::memcpy(&x, at, sizeof(x));
    return Load<double>(x);
  };
  switch (type) {
    case Type::kF32: return read(float());
    case Type::kF64: return read(double());
    case Type::kBF16: return read(BFloat16());
    default: return read(Float16());
  }
}

inline void Put(std::vector<char>* bytes, int64_t offset, Type type, int64_t i, double value) {
  char* at = bytes->data() + offset + i * SizeOf(type);
  const auto write = [at, value](auto x) {
    Store(value, &x);
    std::memcpy(at, &x, sizeof(x));
  };
  switch (type) {
    case Type::kF32: return write(float());
    case Type::kF64: return write(double());
    case Type::kBF16: return write(BFloat16());
    default: return write(Float16());
  }
}

struct Case {
  Types types;
  Decay decay = Decay::kInRatio;
  std::vector<std::pair<int64_t, int64_t>> shapes;  // size, layers
  bool aligned = false;   // to 16 bytes; else each tensor begins one element after such an address
  bool in_place = true;   // else into buffers of their own
  double scalars[kNumScalars] = {0.01, 0.9, 0.1, 0.999, 0.001, 1e-6, 0, 0.1, 0.19, 0.001999, 0.5, 0};
};

// Every third tensor does not decay.
inline bool Decays(size_t tensor) { return tensor % 3 != 2; }

inline int64_t Layers(const Case& c) {
  int64_t layers = 0;
  for (const auto& shape : c.shapes) layers += shape.second;
  return layers;
}

// The tensors of a case. They end exactly where the address sanitizer watches.
struct Buffers {
  std::vector<std::vector<char>> p, g, m, v;
  std::vector<char> scalars;
};

// The normal numbers that every case is filled with, in this order. Made once: that takes longer than what is tested.
inline double Normal(size_t i) {
  static std::mt19937 random(7);
  static std::normal_distribution<double> normal;
  static std::vector<double> made;
  while (made.size() <= i) made.push_back(normal(random));
  return made[i];
}

inline int64_t Offset(const Case& c, Type type) { return c.aligned ? 16 : SizeOf(type); }

inline std::vector<char> Scalars(const Case& c) {
  const Type type = Wide(c.types) ? Type::kF64 : Type::kF32;
  std::vector<char> bytes(static_cast<size_t>(kNumScalars * SizeOf(type)));
  for (int i = 0; i < kNumScalars; ++i) Put(&bytes, 0, type, i, c.scalars[i]);
  return bytes;
}

inline Buffers Make(const Case& c) {
  size_t next = 0;
  Buffers b;
  for (const auto& shape : c.shapes) {
    const auto fill = [&](Type type, bool square) {
      std::vector<char> bytes(static_cast<size_t>(Offset(c, type) + shape.first * SizeOf(type)));
      for (int64_t i = 0; i < shape.first; ++i) {
        const double x = Normal(next++);
        Put(&bytes, Offset(c, type), type, i, square ? x * x : x);
      }
      return bytes;
    };
    b.p.push_back(fill(c.types.parameter, false));
    b.g.push_back(fill(c.types.gradient, false));
    b.m.push_back(fill(c.types.first_moment, false));
    b.v.push_back(fill(c.types.second_moment, true));
  }
  b.scalars = Scalars(c);
  return b;
}

// A step from `in` to `out`, which may be one.
inline Step MakeStep(const Case& c, const Buffers& in, Buffers* out, Part part) {
  Step step;
  step.part = part;
  step.types = c.types;
  step.types.output = c.types.parameter;
  step.decay = c.decay;
  step.norm_bounds[1] = step.ratio_bounds[1] = std::numeric_limits<double>::infinity();
  step.scalars = in.scalars.data();
  for (size_t i = 0; i < c.shapes.size(); ++i) {
    const int64_t p = Offset(c, c.types.parameter), m = Offset(c, c.types.first_moment);
    Tensor t;
    t.size = c.shapes[i].first;
    t.layers = c.shapes[i].second;
    t.parameter = in.p[i].data() + p;
    t.gradient = in.g[i].data() + Offset(c, c.types.gradient);
    t.first_moment = (part == Part::kApply ? *out : in).m[i].data() + m;
    t.second_moment = (part == Part::kApply ? *out : in).v[i].data() + m;
    t.output = out->p[i].data() + p;
    t.first_moment_out = out->m[i].data() + m;
    t.second_moment_out = out->v[i].data() + m;
    t.decays = Decays(i);
    step.tensors.push_back(t);
  }
  return step;
}

// Runs one step, and changes `b` to what comes out. Returns the trust ratios, and with them everything else that was written.
inline std::vector<char> RunCase(const Kernel& kernel, const Case& c, Buffers* b, bool in_halves) {
  const size_t width = Wide(c.types) ? 8 : 4;
  std::vector<char> trust(static_cast<size_t>(Layers(c)) * 3 * width, '\xff'), sums(static_cast<size_t>(Layers(c)) * 2 * width, '\xff');
  Buffers separate = *b;  // of NaN, which shows where nothing is written
  for (auto* tensors : {&separate.p, &separate.m, &separate.v}) {
    for (std::vector<char>& bytes : *tensors) std::fill(bytes.begin(), bytes.end(), '\xff');
  }
  Buffers* out = c.in_place ? b : &separate;
  const Buffers before = c.in_place ? Buffers() : *b;
  if (in_halves) {
    Step first = MakeStep(c, *b, out, Part::kMoments);
    first.sums = sums.data();
    kernel.step(first);
    Step second = MakeStep(c, *b, out, Part::kApply);
    second.sums = sums.data();
    second.trust = trust.data();
    kernel.step(second);
  } else {
    Step step = MakeStep(c, *b, out, Part::kStep);
    step.trust = trust.data();
    kernel.step(step);
  }
  if (!c.in_place) {
    Check(b->p == before.p && b->g == before.g && b->m == before.m && b->v == before.v, "an input changed that is no output");
    for (size_t i = 0; i < b->p.size(); ++i) {  // what lies before the tensors is nobody's
      std::copy_n(before.p[i].begin(), Offset(c, c.types.parameter), separate.p[i].begin());
      std::copy_n(before.m[i].begin(), Offset(c, c.types.first_moment), separate.m[i].begin());
      std::copy_n(before.v[i].begin(), Offset(c, c.types.first_moment), separate.v[i].begin());
    }
    *b = separate;
  }
  std::vector<char> all = trust;
  for (const auto* tensors : {&b->p, &b->m, &b->v}) {
    for (const std::vector<char>& bytes : *tensors) all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

// The formulas once more, in double, in the most naive way.
inline void CheckAgainstModel(const Case& c, const Buffers& before, const Buffers& after, const std::string& what) {
  const double* s = c.scalars;
  const int64_t at_p = Offset(c, c.types.parameter), at_g = Offset(c, c.types.gradient), at_m = Offset(c, c.types.first_moment);
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    const int64_t size = c.shapes[t].second == 0 ? 0 : c.shapes[t].first / c.shapes[t].second;
    const bool decays = Decays(t);
    for (int64_t layer = 0; layer < c.shapes[t].second; ++layer) {
      std::vector<double> p(size), m(size), v(size), u(size);
      long double pp = 0, uu = 0;  // more exact than the kernel, or this would be the error that the test sees
      for (int64_t k = 0; k < size; ++k) {
        const int64_t i = layer * size + k;
        p[k] = Get(before.p[t], at_p, c.types.parameter, i);
        double g = Get(before.g[t], at_g, c.types.gradient, i) * s[kGradScale];
        if (decays && c.decay == Decay::kL2) g += s[kWeightDecay] * p[k];
        m[k] = s[kB1] * Get(before.m[t], at_m, c.types.first_moment, i) + s[kOneMinusB1] * g;
        v[k] = s[kB2] * Get(before.v[t], at_m, c.types.second_moment, i) + s[kOneMinusB2] * g * g;
        if (decays && c.decay == Decay::kDecoupled) p[k] -= s[kWeightDecay] * p[k];
        u[k] = m[k] / s[kBiasCorrection1] / (std::sqrt(v[k] / s[kBiasCorrection2]) + s[kEps]);
        if (decays && c.decay == Decay::kInRatio) u[k] += s[kWeightDecay] * p[k];
        pp += p[k] * p[k];
        uu += u[k] * u[k];
      }
      const double ratio = pp > 0 && uu > 0 ? static_cast<double>(std::sqrt(pp / uu)) : 1;
      double largest = 0, worst_p = 0, worst_m = 0, worst_v = 0;
      const auto worse = [](double worst, double expected, double found) {
        const double error = std::fabs(expected - found);
        return error > worst || std::isnan(error) ? error : worst;  // std::max would drop a NaN
      };
      for (int64_t k = 0; k < size; ++k) {
        const int64_t i = layer * size + k;
        const double expected = p[k] - s[kLearningRate] * ratio * u[k];
        largest = std::max(largest, std::fabs(expected));
        worst_p = worse(worst_p, expected, Get(after.p[t], at_p, c.types.parameter, i));
        worst_m = worse(worst_m, m[k], Get(after.m[t], at_m, c.types.first_moment, i));
        worst_v = worse(worst_v, v[k], Get(after.v[t], at_m, c.types.second_moment, i));
      }
      const auto ulp = [](Type type) { return type == Type::kF64 ? 1e-15 : type == Type::kF32 ? 2.4e-7 : type == Type::kF16 ? 1e-3 : 8e-3; };
      const double loose = c.types.first_moment == Type::kBF16 ? 1e-3 : 0;  // u comes from rounded moments
      const std::string tensor = " of tensor " + std::to_string(t) + ", layer " + std::to_string(layer);
      Check(worst_p <= (2 * ulp(c.types.parameter) + loose) * largest, what + ": parameters" + tensor);
      Check(worst_m <= 4 * ulp(c.types.first_moment) * 5, what + ": first moments" + tensor);
      Check(worst_v <= 4 * ulp(c.types.first_moment) * 25, what + ": second moments" + tensor);
    }
  }
}

inline std::string Name(const Case& c) {
  const auto name = [](Type type) { return type == Type::kF64 ? "f64" : type == Type::kF32 ? "f32" : type == Type::kF16 ? "f16" : "bf16"; };
  return std::string("p ") + name(c.types.parameter) + ", g " + name(c.types.gradient) + ", m " + name(c.types.first_moment) + ", decay " +
         std::to_string(static_cast<int>(c.decay)) + (c.aligned ? ", aligned" : "") + (c.in_place ? "" : ", not in place");
}

// Every combination of types that there is.
inline std::vector<Types> AllTypes() {
  std::vector<Types> all;
  for (Type parameter : kAllTypes) {
    for (Type gradient : kAllTypes) {
      for (Type moment : kAllTypes) {
        if (parameter == Type::kF64 ? moment == Type::kF64 : moment == Type::kF32 || moment == Type::kBF16) {
          all.push_back({parameter, gradient, moment, moment, parameter});
        }
      }
    }
  }
  return all;
}

// One case as a whole and in halves; returns the bits that the whole left.
inline std::vector<char> TestCase(const Kernel& kernel, const Case& c) {
  const Buffers before = Make(c);
  Buffers whole = before, halves = before;
  const std::vector<char> bits = RunCase(kernel, c, &whole, false);
  CheckAgainstModel(c, before, whole, Name(c));
  RunCase(kernel, c, &halves, true);
  CheckAgainstModel(c, before, halves, Name(c) + ", in halves");
  return bits;
}

inline void TestSkip(const Kernel& kernel, const std::vector<std::pair<int64_t, int64_t>>& shapes) {
  for (bool halves : {false, true}) {
    for (bool in_place : {false, true}) {
      Case c;
      c.shapes = shapes;
      c.in_place = in_place;
      c.scalars[kSkip] = 1;
      c.scalars[kGradScale] = std::numeric_limits<double>::quiet_NaN();
      const Buffers before = Make(c);
      Buffers after = before;
      const std::vector<char> all = RunCase(kernel, c, &after, halves);
      Check(after.p == before.p && after.m == before.m && after.v == before.v, "a skipped step changed something");
      Check(std::all_of(all.begin(), all.begin() + Layers(c) * 12, [](char x) { return x == 0; }), "the ratios of a skipped step are 0");
    }
  }
}

inline void TestUpdatesIntoGradients(const Kernel& kernel, const std::vector<std::pair<int64_t, int64_t>>& shapes) {
  for (Decay decay : {Decay::kInRatio, Decay::kDecoupled}) {
    Case c;
    c.shapes = shapes;
    c.decay = decay;
    const Buffers before = Make(c);
    Buffers after = before;
    const int64_t offset = Offset(c, Type::kF32);
    Step step = MakeStep(c, after, &after, Part::kStep);
    std::vector<float> trust(static_cast<size_t>(Layers(c)) * 3);
    step.trust = trust.data();
    step.emit_updates = true;
    for (size_t i = 0; i < step.tensors.size(); ++i) step.tensors[i].output = after.g[i].data() + offset;
    kernel.step(step);
    Check(after.p == before.p, "updates were asked for, and the parameters changed");
    Buffers applied = before;
    for (size_t t = 0; t < c.shapes.size(); ++t) {
      for (int64_t i = 0; i < c.shapes[t].first; ++i) {
        Put(&applied.p[t], offset, Type::kF32, i, Get(before.p[t], offset, Type::kF32, i) + Get(after.g[t], offset, Type::kF32, i));
      }
    }
    applied.m = after.m;
    applied.v = after.v;
    CheckAgainstModel(c, before, applied, "updates");
  }
}

// Two rows of scalars: the second half of every tensor is skipped.
inline void TestBatch(const Kernel& kernel) {
  Case c;
  c.shapes = {{20, 2}, {80 * 1000, 2}, {6, 6}};
  const Buffers before = Make(c);
  Buffers after = before;
  Step step = MakeStep(c, after, &after, Part::kStep);
  std::vector<char> rows = Scalars(c);
  c.scalars[kSkip] = 1;
  const std::vector<char> skipped = Scalars(c);
  rows.insert(rows.end(), skipped.begin(), skipped.end());
  step.scalars = rows.data();
  step.rows = 2;
  std::vector<float> trust(static_cast<size_t>(Layers(c)) * 3);
  step.trust = trust.data();
  kernel.step(step);
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    const size_t half = 4 + static_cast<size_t>(c.shapes[t].first) / 2 * 4;
    Check(std::equal(after.p[t].begin() + half, after.p[t].end(), before.p[t].begin() + half), "the skipped half changed");
    Check(!std::equal(after.p[t].begin() + 4, after.p[t].begin() + half, before.p[t].begin() + 4), "the other half did not change");
  }
}

inline std::vector<double> RunGradNorm(const Kernel& kernel, GradNorm norm) {
  const Type type = norm.type == Type::kF64 ? Type::kF64 : Type::kF32;
  std::vector<char> bytes(static_cast<size_t>(norm.rows * 2 * SizeOf(type)), '\xff');
  norm.result = bytes.data();
  kernel.norm(norm);
  std::vector<double> result;
  for (int64_t i = 0; i < norm.rows * 2; ++i) result.push_back(Get(bytes, 0, type, i));
  return result;
}

inline void TestGradNorm(const Kernel& kernel, const std::vector<int64_t>& sizes) {
  for (Type type : kAllTypes) {
    for (bool aligned : {false, true}) {
      for (int64_t rows : {1, 3}) {
        const int64_t offset = aligned ? 16 : SizeOf(type);
        std::vector<std::vector<char>> buffers;
        std::vector<double> expected(static_cast<size_t>(rows));
        GradNorm norm;
        norm.type = type;
        norm.rows = rows;
        for (int64_t size : sizes) {
          buffers.emplace_back(static_cast<size_t>(offset + rows * size * SizeOf(type)));
          for (int64_t i = 0; i < rows * size; ++i) {
            Put(&buffers.back(), offset, type, i, 0.001 * static_cast<double>(i % 1000));
            const double x = Get(buffers.back(), offset, type, i);
            expected[static_cast<size_t>(i / size)] += x * x;
          }
        }
        for (size_t i = 0; i < sizes.size(); ++i) norm.gradients.push_back({buffers[i].data() + offset, rows * sizes[i]});
        std::vector<double> found = RunGradNorm(kernel, norm);
        const double tolerance = type == Type::kF64 ? 1e-12 : 1.2e-7;
        for (int64_t row = 0; row < rows; ++row) {
          Check(std::fabs(found[2 * row] - expected[row]) <= tolerance * expected[row] && found[2 * row + 1] == 1, "sum of squares");
        }
        // The last element of the largest gradient is in the last row.
        const size_t largest = static_cast<size_t>(std::max_element(sizes.begin(), sizes.end()) - sizes.begin());
        Put(&buffers[largest], offset, type, rows * sizes[largest] - 1, type == Type::kF16 ? INFINITY : NAN);
        found = RunGradNorm(kernel, norm);
        for (int64_t row = 0; row < rows; ++row) Check(found[2 * row + 1] == (row + 1 < rows ? 1 : 0), "a gradient that is not finite");
      }
    }
  }
  // Squares overflow a float64, the elements do not.
  std::vector<double> huge(10, 1e200);
  GradNorm norm;
  norm.type = Type::kF64;
  norm.gradients = {{huge.data(), 10}};
  const std::vector<double> found = RunGradNorm(kernel, norm);
  Check(found[1] == 1 && std::isinf(found[0]), "finite elements with an infinite norm");
}

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_KERNEL_TESTING_H_
