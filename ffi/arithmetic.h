// The arithmetic of one element of a LAMB step, and of one tensor's trust ratio: the only place where C++ spells the formulas. CPU
// and CUDA kernels share it; xla_lamb/reference.py is its specification.
//
// Everything has internal linkage and is forced inline: the same header is compiled once for each instruction set, and the linker must
// never replace a baseline function by its AVX-512 twin.
#ifndef XLA_LAMB_FFI_ARITHMETIC_H_
#define XLA_LAMB_FFI_ARITHMETIC_H_

#include <cstdint>

#ifdef __CUDACC__
#define XLA_LAMB_INLINE static __host__ __device__ __forceinline__
#else
#define XLA_LAMB_INLINE static inline __attribute__((always_inline))
#endif

namespace xla_lamb {

// The layout of the vector of scalars, the first operand of the calls. xla_lamb/reference.py names the same positions.
enum Scalar : int {
  kLearningRate = 0,
  kB1 = 1,
  kOneMinusB1 = 2,  // separate from b1: 1 - 0.999f is off by 1.3e-5 of itself
  kB2 = 3,
  kOneMinusB2 = 4,
  kEps = 5,
  kEpsRoot = 6,
  kWeightDecay = 7,  // for Decay::kDecoupled already multiplied by the learning rate
  kBiasCorrection1 = 8,
  kBiasCorrection2 = 9,
  kGradScale = 10,
  kSkip = 11,
  kNumScalars = 12,
};

// Where weight decay enters.
enum class Decay : int32_t {
  kInRatio = 0,    // u += wd * p, inside the trust ratio
  kDecoupled = 1,  // p -= lr * wd * p, before the step and its norms
  kL2 = 2,         // g += wd * p, before the moments
  kNone = 3,       // never an attribute: what a tensor without decay gets
};

// Whether a tensor is scaled by its trust ratio.
enum class Adapt : int32_t {
  kNever = 0,
  kAlways = 1,
  kWhereDecayed = 2,  // only if the weight decay, which may be traced, is not 0
};

template <typename T>
struct Coefficients {
  T b1, one_minus_b1, b2, one_minus_b2, eps, eps_root, weight_decay;
  T inverse_bias_correction1, inverse_bias_correction2, grad_scale;
};

template <typename T, typename S>
XLA_LAMB_INLINE Coefficients<T> MakeCoefficients(const S* scalars) {
  Coefficients<T> c;
  c.b1 = static_cast<T>(scalars[kB1]);
  c.one_minus_b1 = static_cast<T>(scalars[kOneMinusB1]);
  c.b2 = static_cast<T>(scalars[kB2]);
  c.one_minus_b2 = static_cast<T>(scalars[kOneMinusB2]);
  c.eps = static_cast<T>(scalars[kEps]);
  c.eps_root = static_cast<T>(scalars[kEpsRoot]);
  c.weight_decay = static_cast<T>(scalars[kWeightDecay]);
  c.inverse_bias_correction1 = T(1) / static_cast<T>(scalars[kBiasCorrection1]);
  c.inverse_bias_correction2 = T(1) / static_cast<T>(scalars[kBiasCorrection2]);
  c.grad_scale = static_cast<T>(scalars[kGradScale]);
  return c;
}

// Rounded correctly everywhere.
#ifdef __CUDA_ARCH__
XLA_LAMB_INLINE float SquareRoot(float x) { return __fsqrt_rn(x); }
XLA_LAMB_INLINE double SquareRoot(double x) { return __dsqrt_rn(x); }
#else
XLA_LAMB_INLINE float SquareRoot(float x) { return __builtin_sqrtf(x); }
XLA_LAMB_INLINE double SquareRoot(double x) { return __builtin_sqrt(x); }
#endif

// The gradient that the moments see.
template <Decay kDecay, typename T>
XLA_LAMB_INLINE T EffectiveGradient(const Coefficients<T>& c, T p, T g) {
  g = g * c.grad_scale;
  if constexpr (kDecay == Decay::kL2) g = g + c.weight_decay * p;
  return g;
}

template <typename T>
XLA_LAMB_INLINE T FirstMoment(const Coefficients<T>& c, T m, T g) {
  return c.b1 * m + c.one_minus_b1 * g;
}

template <typename T>
XLA_LAMB_INLINE T SecondMoment(const Coefficients<T>& c, T v, T g) {
  return c.b2 * v + c.one_minus_b2 * (g * g);
}

// The parameter that the step starts from, and whose norm enters the ratio.
template <Decay kDecay, typename T>
XLA_LAMB_INLINE T DecayedParameter(const Coefficients<T>& c, T p) {
  if constexpr (kDecay == Decay::kDecoupled) return p - c.weight_decay * p;
  return p;
}

// u, from the new moments and the decayed parameter.
template <Decay kDecay, typename T>
XLA_LAMB_INLINE T Direction(const Coefficients<T>& c, T p, T m, T v) {
  const T denominator =
      SquareRoot(v * c.inverse_bias_correction2 + c.eps_root) + c.eps;
  T u = (m * c.inverse_bias_correction1) / denominator;
  if constexpr (kDecay == Decay::kInRatio) u = u + c.weight_decay * p;
  return u;
}

// What the second pass writes: the new parameter, or its difference to p. `rate` is the learning rate times the trust ratio.
template <Decay kDecay, bool kEmitUpdates, typename T>
XLA_LAMB_INLINE T Output(const Coefficients<T>& c, T rate, T p, T decayed, T u) {
  const T change = rate * u;
  if constexpr (!kEmitUpdates) return decayed - change;
  // decayed - p would round the small decay against the large parameter.
  if constexpr (kDecay == Decay::kDecoupled) return -(change + c.weight_decay * p);
  return -change;
}

// Comparisons are written so that a NaN passes through: a broken tensor must show.
template <typename T>
XLA_LAMB_INLINE T Clamp(T x, T low, T high) {
  return x < low ? low : (x > high ? high : x);
}

// The factor of u before the learning rate: phi(|p|) / |u| within its bounds, or 1 where either is 0.
template <typename T>
XLA_LAMB_INLINE T TrustRatio(T p_norm, T u_norm, const T norm_bounds[2],
                             const T ratio_bounds[2]) {
  const T phi = Clamp(p_norm, norm_bounds[0], norm_bounds[1]);
  if (phi == T(0) || u_norm == T(0)) return T(1);
  return Clamp(phi / u_norm, ratio_bounds[0], ratio_bounds[1]);
}

// Between the passes: |p|, |u| and the ratio of a layer from its sums of squares. Returns the rate.
template <typename T, typename S>
XLA_LAMB_INLINE T Finish(const S* scalars, double p_square, double u_square, Adapt adapt, const T norm_bounds[2],
                         const T ratio_bounds[2], T trust[3]) {
  trust[0] = static_cast<T>(SquareRoot(p_square));
  trust[1] = static_cast<T>(SquareRoot(u_square));
  const bool adapts = adapt == Adapt::kAlways || (adapt == Adapt::kWhereDecayed && scalars[kWeightDecay] != 0);
  trust[2] = adapts ? TrustRatio(trust[0], trust[1], norm_bounds, ratio_bounds) : T(1);
  return static_cast<T>(scalars[kLearningRate]) * trust[2];
}

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_ARITHMETIC_H_
