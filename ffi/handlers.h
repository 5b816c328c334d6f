// The handlers of the custom calls: they decode what XLA hands over and call the kernel of their platform.
#ifndef XLA_LAMB_FFI_HANDLERS_H_
#define XLA_LAMB_FFI_HANDLERS_H_

#include "ffi/api.h"

namespace xla_lamb {

XLA_FFI_Error* StepOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MomentsOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ApplyOnCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* GradNormOnCpu(XLA_FFI_CallFrame* frame);

// In a library with CUDA.
XLA_FFI_Error* StepOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MomentsOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ApplyOnCuda(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* GradNormOnCuda(XLA_FFI_CallFrame* frame);

}  // namespace xla_lamb

#endif  // XLA_LAMB_FFI_HANDLERS_H_
