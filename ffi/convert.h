// Conversions of bfloat16 and float16, in integer arithmetic without branches: every instruction set gives the same bits and every
// compiler vectorises them. Rounding is to nearest even, NaN stays NaN. They are exact also where denormal numbers are flushed to
// zero, as XLA does on its threads.
#ifndef XLA_LAMB_FFI_CONVERT_H_
#define XLA_LAMB_FFI_CONVERT_H_

#include <cstdint>

#include "ffi/arithmetic.h"

namespace xla_lamb {

// The element types that the kernels take.
enum class Type : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };

XLA_LAMB_INLINE int64_t SizeOf(Type type) {
  return type == Type::kF64 ? 8 : (type == Type::kF32 ? 4 : 2);
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

XLA_LAMB_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

XLA_LAMB_INLINE float FloatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

XLA_LAMB_INLINE float Widen(BFloat16 x) {
  return FloatOf(static_cast<uint32_t>(x.bits) << 16);
}

XLA_LAMB_INLINE float Widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  // The exponent's bias grows from 15 to 127; infinity and NaN move to the top exponent. A subnormal number is built as 2^-14 plus
  // its value, from which 2^-14 is subtracted exactly.
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  const uint32_t subnormal =
      BitsOf(FloatOf(magnitude + (113u << 23)) - FloatOf(113u << 23));
  const uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
  return FloatOf(sign | (magnitude >= (31u << 23) ? special : finite));
}

XLA_LAMB_INLINE void Narrow(float x, BFloat16* out) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>(
      (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

XLA_LAMB_INLINE void Narrow(float x, Float16* out) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal =
      (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the spacing is 2^-24, which is the spacing of floats at 0.5.
  const uint32_t subnormal =
      BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  out->bits = static_cast<uint16_t>(
      ((bits >> 16) & 0x8000u) | (magnitude >= (143u << 23) ? special : finite));
}

// Between a storage type and the type of the arithmetic.
template <typename T, typename S>
XLA_LAMB_INLINE T Load(S x) {
  if constexpr (sizeof(S) == 2) {
    return static_cast<T>(Widen(x));
  } else {
    return static_cast<T>(x);
  }
}

template <typename S, typename T>
XLA_LAMB_INLINE void Store(T x, S* out) {
  if constexpr (sizeof(S) == 2) {
    Narrow(static_cast<float>(x), out);
  } else {
    *out = static_cast<S>(x);
  }
}

// What a number is worth once it is stored as bfloat16.
template <typename T>
XLA_LAMB_INLINE T ThroughBFloat16(T x) {
  BFloat16 stored;
  Narrow(static_cast<float>(x), &stored);
  return static_cast<T>(Widen(stored));
}

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_CONVERT_H_
