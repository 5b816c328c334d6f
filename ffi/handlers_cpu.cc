#include <functional>
#include <initializer_list>
#include <utility>

#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "ffi/kernel.h"

namespace xla_lamb {
namespace {

namespace ffi = xla::ffi;

struct Cpu {
  using Tag = ffi::ThreadPool;
  using Context = ffi::ThreadPool;
  static constexpr bool kScratch = false;  // XLA's allocator gives none on CPU; the kernel uses the heap
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  template <typename Call>
  static ffi::Error Run(Context& threads, const Call& call, Scratch) {
    Pool pool;
    pool.threads = threads.num_threads();
    pool.schedule = [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); };
    xla_lamb::Run(call, pool);
    return ffi::Error::Success();
  }
};

}  // namespace

XLA_FFI_Error* StepOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Cpu>::Call<Part::kStep>(frame); }
XLA_FFI_Error* MomentsOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Cpu>::Call<Part::kMoments>(frame); }
XLA_FFI_Error* ApplyOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Cpu>::Call<Part::kApply>(frame); }
XLA_FFI_Error* GradNormOnCpu(XLA_FFI_CallFrame* frame) { return Handlers<Cpu>::CallGradNorm(frame); }

}  // namespace xla_lamb
