#include <initializer_list>
#include <string>

#include "cuda/launch.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"

namespace xla_lamb {
namespace {

namespace ffi = xla::ffi;

struct Cuda {
  using Tag = ffi::PlatformStream<cuda::Stream>;
  using Context = cuda::Stream;
  // Not XLA's scratch allocator: what a handler gets from it is free again when the handler returns, and a captured graph would replay
  // with somebody else's memory. A result belongs to the executable, and XLA updates the graph when it moves.
  static constexpr bool kScratch = true;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

  template <typename Call>
  static ffi::Error Run(Context stream, const Call& call, Scratch scratch) {
    const std::string problem = cuda::Launch(call, scratch.data, scratch.bytes, stream);
    return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("xla_lamb: " + problem);
  }
};

}  // namespace

XLA_FFI_Error* StepOnCuda(XLA_FFI_CallFrame* frame) { return Handlers<Cuda>::Call<Part::kStep>(frame); }
XLA_FFI_Error* MomentsOnCuda(XLA_FFI_CallFrame* frame) { return Handlers<Cuda>::Call<Part::kMoments>(frame); }
XLA_FFI_Error* ApplyOnCuda(XLA_FFI_CallFrame* frame) { return Handlers<Cuda>::Call<Part::kApply>(frame); }
XLA_FFI_Error* GradNormOnCuda(XLA_FFI_CallFrame* frame) { return Handlers<Cuda>::CallGradNorm(frame); }

}  // namespace xla_lamb
