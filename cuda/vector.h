// Vectors of kN elements of a storage type that is known when the kernel runs, as their bits: what is loaded need not be there yet when
// the next load begins. The first look at it waits.
#ifndef XLA_LAMB_CUDA_VECTOR_H_
#define XLA_LAMB_CUDA_VECTOR_H_

#include <cstdint>
#include <cstring>

#include "cuda/device.h"
#include "ffi/convert.h"

namespace xla_lamb {
namespace cuda {

// kBytes at `from`, which is aligned to as many, or to 16: as words, of which the last may be a half.
template <int kBytes>
XLA_LAMB_DEVICE void LoadBits(const char* from, Use use, uint32_t* words) {
  if constexpr (kBytes == 2) {
    words[0] = LoadGlobal<uint16_t>(from, use);
  } else if constexpr (kBytes == 4) {
    words[0] = LoadGlobal<uint32_t>(from, use);
  } else if constexpr (kBytes == 8) {
    const uint2 x = LoadGlobal<uint2>(from, use);
    words[0] = x.x, words[1] = x.y;
  } else {
    const uint4 x = LoadGlobal<uint4>(from, use);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    if constexpr (kBytes > 16) LoadBits<kBytes - 16>(from + 16, use, words + 4);
  }
}

template <int kBytes>
XLA_LAMB_DEVICE void StoreBits(const uint32_t* words, char* to, Use use) {
  if constexpr (kBytes == 2) {
    StoreGlobal(static_cast<uint16_t>(words[0]), to, use);
  } else if constexpr (kBytes == 4) {
    StoreGlobal(words[0], to, use);
  } else if constexpr (kBytes == 8) {
    StoreGlobal(uint2{words[0], words[1]}, to, use);
  } else {
    StoreGlobal(uint4{words[0], words[1], words[2], words[3]}, to, use);
    if constexpr (kBytes > 16) StoreBits<kBytes - 16>(words + 4, to + 16, use);
  }
}

XLA_LAMB_DEVICE double DoubleOf(const uint32_t* words) {
  const uint64_t bits = static_cast<uint64_t>(words[1]) << 32 | words[0];
  double x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

XLA_LAMB_DEVICE uint32_t Half(float x, Type type) {
  if (type == Type::kBF16) {
    BFloat16 narrow;
    Narrow(x, &narrow);
    return narrow.bits;
  }
  Float16 narrow;
  Narrow(x, &narrow);
  return narrow.bits;
}

template <int kBytes>
constexpr int kWordsOf = (kBytes + 3) / 4;

// T: the type of the arithmetic. 8 elements at once have 16 bits each, whatever their type. Where T is float, float64 is narrowed at once,
// and only taken with kMayBeWide.
template <typename T, int kN, bool kMayBeWide = sizeof(T) == 8>
class Vector {
 public:
  // Elements `at` to `at` + kN of `data`.
  XLA_LAMB_MEMBER void Load(const void* data, Type type, int at, Use use) {
    const char* from = static_cast<const char*>(data) + at * static_cast<int>(SizeOf(type));
    if constexpr (kHalves) {
      LoadBits<2 * kN>(from, use, words_);
    } else if (kMayBeWide && type == Type::kF64) {
      if constexpr (sizeof(T) == 8) {
        LoadBits<8 * kN>(from, use, words_);
      } else {
        uint32_t wide[2 * kN];
        LoadBits<8 * kN>(from, use, wide);
#pragma unroll
        for (int k = 0; k < kN; ++k) words_[k] = BitsOf(static_cast<float>(DoubleOf(wide + 2 * k)));
      }
    } else if (type == Type::kF32) {
      LoadBits<4 * kN>(from, use, words_);
    } else {
      LoadBits<2 * kN>(from, use, words_);
    }
  }

  // The very bits that were loaded.
  XLA_LAMB_MEMBER void Store(void* data, Type type, int at, Use use) const {
    char* to = static_cast<char*>(data) + at * static_cast<int>(SizeOf(type));
    if (kHalves || SizeOf(type) == 2) {
      StoreBits<2 * kN>(words_, to, use);
    } else if constexpr (!kHalves) {
      StoreBits<sizeof(T) * kN>(words_, to, use);
    }
  }

  XLA_LAMB_MEMBER void Get(Type type, T* values) const {
    if (type == Type::kBF16) {
#pragma unroll
      for (int k = 0; k < kN; ++k) values[k] = Widen(BFloat16{HalfAt(k)});
    } else if (type == Type::kF16) {
#pragma unroll
      for (int k = 0; k < kN; ++k) values[k] = Widen(Float16{HalfAt(k)});
    } else if constexpr (!kHalves) {
      if (sizeof(T) == 8 && type == Type::kF64) {
#pragma unroll
        for (int k = 0; k < kN; ++k) values[k] = DoubleOf(words_ + k * (sizeof(T) / 4));
      } else {
#pragma unroll
        for (int k = 0; k < kN; ++k) values[k] = FloatOf(words_[k]);
      }
    }
  }

 private:
  static constexpr bool kHalves = kN == 8;

  XLA_LAMB_MEMBER uint16_t HalfAt(int k) const { return static_cast<uint16_t>(words_[k / 2] >> (16 * (k % 2))); }

  uint32_t words_[kWordsOf<kN * (kHalves ? 2 : static_cast<int>(sizeof(T)))>];
};

// Rounds kN values to the storage type.
template <int kN, typename T>
XLA_LAMB_DEVICE void StoreVector(const T* values, void* data, Type type, int at, Use use) {
  char* to = static_cast<char*>(data) + at * static_cast<int>(SizeOf(type));
  if (kN == 8 || SizeOf(type) == 2) {
    uint32_t words[kWordsOf<2 * kN>] = {};
#pragma unroll
    for (int k = 0; k < kN; ++k) words[k / 2] |= Half(static_cast<float>(values[k]), type) << (16 * (k % 2));
    StoreBits<2 * kN>(words, to, use);
  } else if constexpr (kN != 8) {
    if (type == Type::kF32) {
      uint32_t words[kN];
#pragma unroll
      for (int k = 0; k < kN; ++k) words[k] = BitsOf(static_cast<float>(values[k]));
      StoreBits<4 * kN>(words, to, use);
    } else {
      uint32_t words[2 * kN];
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        const double wide = static_cast<double>(values[k]);
        memcpy(words + 2 * k, &wide, sizeof(wide));
      }
      StoreBits<8 * kN>(words, to, use);
    }
  }
}

// kN values in shared memory, in accesses of 16 bytes: single ones of a vector would meet in the same banks.
template <typename T>
struct alignas(16) Packed {
  T values[16 / sizeof(T)];
};

template <int kN, typename T>
XLA_LAMB_DEVICE void StoreShared(const T* values, T* to) {
  if constexpr (kN == 1) {
    *to = values[0];
  } else {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kN / kEach; ++i) {
      Packed<T> packed;
#pragma unroll
      for (int k = 0; k < kEach; ++k) packed.values[k] = values[i * kEach + k];
      reinterpret_cast<Packed<T>*>(to)[i] = packed;
    }
  }
}

template <int kN, typename T>
XLA_LAMB_DEVICE void LoadShared(const T* from, T* values) {
  if constexpr (kN == 1) {
    values[0] = *from;
  } else {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kN / kEach; ++i) {
      const Packed<T> packed = reinterpret_cast<const Packed<T>*>(from)[i];
#pragma unroll
      for (int k = 0; k < kEach; ++k) values[i * kEach + k] = packed.values[k];
    }
  }
}

}  // namespace cuda
}  // namespace xla_lamb

#endif  // XLA_LAMB_CUDA_VECTOR_H_
