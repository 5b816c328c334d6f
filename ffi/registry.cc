// The table of handlers and the library's C entry points: all that is exported. xla_lamb/library.py calls them.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "cuda/launch.h"
#include "ffi/api.h"
#include "ffi/handlers.h"
#include "ffi/kernel.h"

#define XLA_LAMB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Entry {
  const char* name;
  const char* platform;  // as XLA spells it: "Host" or "CUDA"
  XLA_FFI_Handler* handler;
};

constexpr Entry kEntries[] = {
    {"xla_lamb_step", "Host", &xla_lamb::StepOnCpu},
    {"xla_lamb_moments", "Host", &xla_lamb::MomentsOnCpu},
    {"xla_lamb_apply", "Host", &xla_lamb::ApplyOnCpu},
    {"xla_lamb_grad_norm", "Host", &xla_lamb::GradNormOnCpu},
#ifdef XLA_LAMB_CUDA
    {"xla_lamb_step", "CUDA", &xla_lamb::StepOnCuda},
    {"xla_lamb_moments", "CUDA", &xla_lamb::MomentsOnCuda},
    {"xla_lamb_apply", "CUDA", &xla_lamb::ApplyOnCuda},
    {"xla_lamb_grad_norm", "CUDA", &xla_lamb::GradNormOnCuda},
#endif
};

XLA_FFI_ByteSpan Span(const char* text) { return {text, std::strlen(text)}; }

}  // namespace

// Counts the changes of operands, results, attributes and of these entry points; library.py refuses a library that speaks another one.
XLA_LAMB_EXPORT int xla_lamb_interface() { return 3; }

// The XLA FFI version that the handlers report.
XLA_LAMB_EXPORT int xla_lamb_ffi_major() { return XLA_FFI_API_MAJOR; }
XLA_LAMB_EXPORT int xla_lamb_ffi_minor() { return XLA_FFI_API_MINOR; }

XLA_LAMB_EXPORT const char* xla_lamb_instruction_set() { return xla_lamb::InstructionSet(); }

// What library.py has to know of CUDA: the bytes of the scratch result of each call there, and CUDA's versions (13000 is 13.0) of the runtime
// in the library and of the driver, 0 without one. False: the library has no CUDA.
XLA_LAMB_EXPORT bool xla_lamb_cuda(int64_t* scratch_bytes, int* runtime_version, int* driver_version) {
#ifdef XLA_LAMB_CUDA
  *scratch_bytes = xla_lamb::cuda::ScratchBytes();
  *runtime_version = xla_lamb::cuda::RuntimeVersion();
  *driver_version = xla_lamb::cuda::DriverVersion();
  return true;
#else
  *scratch_bytes = *runtime_version = *driver_version = 0;
  return false;
#endif
}

// Why a GPU of this machine cannot run the kernels, into `problem`; nothing if all can. Initializes CUDA.
XLA_LAMB_EXPORT void xla_lamb_cuda_problem(char* problem, size_t problem_size) {
#ifdef XLA_LAMB_CUDA
  std::snprintf(problem, problem_size, "%s", xla_lamb::cuda::Problem().c_str());
#else
  std::snprintf(problem, problem_size, "the library has no CUDA");
#endif
}

// Row i of the table; false when there is none.
XLA_LAMB_EXPORT bool xla_lamb_handler(int i, const char** name, const char** platform, void** handler) {
  if (i < 0 || i >= static_cast<int>(sizeof(kEntries) / sizeof(kEntries[0]))) return false;
  *name = kEntries[i].name;
  *platform = kEntries[i].platform;
  *handler = reinterpret_cast<void*>(kEntries[i].handler);
  return true;
}

// The version of a framework's XLA FFI.
XLA_LAMB_EXPORT void xla_lamb_api_version(const XLA_FFI_Api* api, int* major, int* minor) {
  *major = api->api_version.major_version;
  *minor = api->api_version.minor_version;
}

// Registers the table's row i through any framework's API. Returns true, or false with the framework's reason in `reason`.
XLA_LAMB_EXPORT bool xla_lamb_register(const XLA_FFI_Api* api, int i, char* reason, size_t reason_size) {
  const char *name, *platform;
  void* handler;
  if (!xla_lamb_handler(i, &name, &platform, &handler)) {
    std::snprintf(reason, reason_size, "there is no handler %d", i);
    return false;
  }
  // The struct has grown with XLA's versions. Zeros behind ours make it long enough for a framework with newer headers, and an older
  // one reads the part that it knows.
  struct {
    XLA_FFI_Handler_Register_Args args;
    char zeros[128];
  } padded = {};
  XLA_FFI_Handler_Register_Args& args = padded.args;
  args.struct_size = sizeof(padded);
  args.name = Span(name);
  args.platform = Span(platform);
  args.bundle.execute = kEntries[i].handler;
  XLA_FFI_Error* error = api->XLA_FFI_Handler_Register(&args);
  if (error == nullptr) return true;
  XLA_LAMB_ERROR_TEXT(_Args) message = {};
  message.struct_size = XLA_LAMB_ERROR_TEXT(_Args_STRUCT_SIZE);
  message.error = error;
  api->XLA_LAMB_ERROR_TEXT()(&message);
  std::snprintf(reason, reason_size, "%s", message.message);
  XLA_FFI_Error_Destroy_Args destroy = {};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return false;
}
