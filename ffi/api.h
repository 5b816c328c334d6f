// XLA's FFI headers, with the version that our handlers report pinned to 0.1.
//
// A handler reports the version of the headers that it was compiled with, and a framework refuses one that is newer than itself.
// TensorFlow 2.18 to 2.20 take exactly 0.1 and everything later takes it too, so 0.1 fits all, whichever headers the build found. We
// use nothing that is newer: no State, and no registration struct of another size.
#ifndef XLA_LAMB_FFI_API_H_
#define XLA_LAMB_FFI_API_H_

// clang-format off: the order is the point
#include "xla/ffi/api/c_api.h"
// How the headers that were found call an error's text: 0.4 (jaxlib 0.11) renamed it, and added a field that is not looked at here.
#if XLA_FFI_API_MAJOR > 0 || XLA_FFI_API_MINOR >= 4
#define XLA_LAMB_ERROR_TEXT(suffix) XLA_FFI_Error_GetDetails##suffix
#else
#define XLA_LAMB_ERROR_TEXT(suffix) XLA_FFI_Error_GetMessage##suffix
#endif
#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 1
#include "xla/ffi/api/ffi.h"
// clang-format on

#endif  // XLA_LAMB_FFI_API_H_
