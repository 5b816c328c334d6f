// From what XLA hands over to what a kernel understands: the same calls on every platform, checked in one place. xla_lamb/step.py makes
// the calls.
#ifndef XLA_LAMB_FFI_DECODE_H_
#define XLA_LAMB_FFI_DECODE_H_

#include <cstdint>

#include "ffi/api.h"
#include "ffi/step.h"

namespace xla_lamb {

// The attributes that all parts of a step share: what is fixed when the optimizer is built. One number for each tensor, or one for all.
struct Attributes {
  xla::ffi::Span<const int32_t> decays;      // 0 or 1
  xla::ffi::Span<const int32_t> adapts;      // Adapt
  xla::ffi::Span<const int32_t> layer_axes;  // leading axes that index independent layers, those of the batch included
  int32_t decay;                             // Decay
  double norm_bounds[2];
  double ratio_bounds[2];
  bool emit_updates;
};

// Memory for the kernel's own use: a last result of uint8, on platforms whose kernel wants one.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Operands and results of a part, in the order that step.py says. `scratch` is null where there is none.
xla::ffi::Error Decode(Part part, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, const Attributes& attributes, Step* out,
                       Scratch* scratch);

// Operands: gradients. Results: [rows, 2] of float32 or, for float64 gradients, float64.
xla::ffi::Error Decode(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, GradNorm* out, Scratch* scratch);

// The four handlers of a platform, which says
//   Tag, Context          what it takes from XLA besides the buffers, as ffi::Binding names it and as the handler gets it
//   kScratch, kTraits     whether its calls have the scratch result, and what XLA may do with them
//   Run(Context, const Step& or const GradNorm&, Scratch)
template <typename Platform>
class Handlers {
 public:
  template <Part kPart>
  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    namespace ffi = xla::ffi;
    static const auto* handler = ffi::Ffi::Bind()
                                     .RemainingArgs()  // see xla_lamb/step.py
                                     .RemainingRets()
                                     .Attr<ffi::Span<const int32_t>>("decays")
                                     .Attr<ffi::Span<const int32_t>>("adapts")
                                     .Attr<ffi::Span<const int32_t>>("layer_axes")
                                     .Attr<int32_t>("decay")
                                     .Attr<double>("norm_low")
                                     .Attr<double>("norm_high")
                                     .Attr<double>("ratio_low")
                                     .Attr<double>("ratio_high")
                                     .Attr<bool>("emit_updates")
                                     .template Ctx<typename Platform::Tag>()
                                     .To(RunPart<kPart>, Platform::kTraits)
                                     .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* CallGradNorm(XLA_FFI_CallFrame* frame) {
    namespace ffi = xla::ffi;
    static const auto* handler = ffi::Ffi::Bind()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .template Ctx<typename Platform::Tag>()
                                     .To(RunGradNorm, Platform::kTraits)
                                     .release();
    return handler->Call(frame);
  }

 private:
  using Context = typename Platform::Context;

  template <Part kPart>
  static xla::ffi::Error RunPart(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, xla::ffi::Span<const int32_t> decays,
                                 xla::ffi::Span<const int32_t> adapts, xla::ffi::Span<const int32_t> layer_axes, int32_t decay,
                                 double norm_low, double norm_high, double ratio_low, double ratio_high, bool emit_updates,
                                 Context context) {
    const Attributes attributes = {decays, adapts, layer_axes, decay, {norm_low, norm_high}, {ratio_low, ratio_high}, emit_updates};
    Step step;
    Scratch scratch;
    xla::ffi::Error error = Decode(kPart, args, rets, attributes, &step, Platform::kScratch ? &scratch : nullptr);
    return error.failure() ? error : Platform::Run(context, step, scratch);
  }

  static xla::ffi::Error RunGradNorm(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, Context context) {
    GradNorm norm;
    Scratch scratch;
    xla::ffi::Error error = Decode(args, rets, &norm, Platform::kScratch ? &scratch : nullptr);
    return error.failure() ? error : Platform::Run(context, norm, scratch);
  }
};

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_DECODE_H_
