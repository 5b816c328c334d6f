// The handlers of the custom calls: they check and decode what XLA hands over and call a kernel. xla_lamb/step.py makes the calls.
#ifndef XLA_LAMB_FFI_HANDLERS_H_
#define XLA_LAMB_FFI_HANDLERS_H_

#include "ffi/api.h"

namespace xla_lamb {

XLA_FFI_Error* StepOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MomentsOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ApplyOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* GradNormOnCpu(XLA_FFI_CallFrame* frame);

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_HANDLERS_H_
