// Puts the emulated CUDA kernel in the place of the CPU kernel: a library for tests in which every program for the CPU runs it.
#include <initializer_list>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "ffi/kernel.h"

namespace xla_lamb {
namespace {

namespace ffi = xla::ffi;

struct Emulated {
  using Tag = ffi::ThreadPool;
  using Context = ffi::ThreadPool;
  static constexpr bool kScratch = false;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  template <typename Call>
  static ffi::Error Run(Context&, const Call& call, Scratch) {
    static std::mutex one_grid_at_a_time;
    std::lock_guard<std::mutex> lock(one_grid_at_a_time);
    static std::vector<uint64_t> scratch(static_cast<size_t>(cuda::ScratchBytes()) / 8, 0xfff7fff7fff7fff7);
    const std::string problem = cuda::Launch(call, scratch.data(), cuda::ScratchBytes(), nullptr);
    return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("xla_lamb: " + problem);
  }
};

}  // namespace

const char* InstructionSet() { return "emulated CUDA"; }

XLA_FFI_Error* StepOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Emulated>::Call<Part::kStep>(frame); }
XLA_FFI_Error* MomentsOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Emulated>::Call<Part::kMoments>(frame); }
XLA_FFI_Error* ApplyOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Emulated>::Call<Part::kApply>(frame); }
XLA_FFI_Error* GradNormOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Emulated>::CallGradNorm(frame); }

}  // namespace xla_lamb
