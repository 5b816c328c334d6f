"""Finds the shared library, checks versions, and registers its handlers with JAX and with TensorFlow.

Nothing here can break a framework: a library that is missing, broken, of another interface or refused gives a reason in words, and
whoever asks takes the reference instead.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import struct
import sys
import threading
import warnings

LIBRARY_VARIABLE = "XLA_LAMB_LIBRARY"
LIBRARY_NAME = "libxla_lamb.so"
INTERFACE = 3  # as in ffi/registry.cc
# As XLA spells the platforms, and as JAX does.
_JAX_PLATFORM = {"Host": "cpu", "CUDA": "cuda"}
_TENSORFLOW_API = ("XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv")
_TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")

_lock = threading.RLock()


class Unavailable(Exception):
    """Why the kernel cannot be used: one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Handler:
    index: int
    name: str
    platform: str  # as JAX spells it
    address: int


@dataclasses.dataclass(frozen=True)
class Cuda:
    scratch_bytes: int  # of the result that each call has for the kernel's own use
    runtime: str  # version of CUDA that the library was built with
    driver: str | None  # version that this machine's driver supports; None without a driver


@dataclasses.dataclass(frozen=True)
class Library:
    path: str
    functions: ctypes.CDLL
    ffi_version: tuple[int, int]
    instruction_set: str
    handlers: tuple[Handler, ...]
    cuda: Cuda | None  # None if it was built for the CPU alone


def candidates() -> list[pathlib.Path]:
    """Where the library may be: XLA_LAMB_LIBRARY alone if it is set; else beside this file, or where Bazel built it."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return [pathlib.Path(named)]
    package = pathlib.Path(__file__).resolve().parent
    # In Bazel's runfiles this file is a link into the source tree, and the library lies beside the link.
    beside = pathlib.Path(__file__).absolute().parent
    places = [beside / LIBRARY_NAME, package / LIBRARY_NAME, package.parent / "bazel-bin" / "xla_lamb" / LIBRARY_NAME]
    return list(dict.fromkeys(places))


@functools.lru_cache(maxsize=None)
def _load() -> Library | str:
    places = candidates()
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        named = f" (the environment variable {LIBRARY_VARIABLE})" if os.environ.get(LIBRARY_VARIABLE) else ""
        return f"there is no {' or '.join(map(str, places))}{named}; build it with `make build` or install the wheel"
    try:
        _check_whole(path)
        functions = ctypes.CDLL(str(path))
        functions.xla_lamb_interface.restype = ctypes.c_int
        interface = functions.xla_lamb_interface()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}"
    if interface != INTERFACE:
        return f"{path} has interface {interface}, and this xla_lamb needs {INTERFACE}: build or install both from one version"
    functions.xla_lamb_instruction_set.restype = ctypes.c_char_p
    functions.xla_lamb_handler.restype = ctypes.c_bool
    handlers = []
    name, platform, address = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_void_p()
    while functions.xla_lamb_handler(len(handlers), ctypes.byref(name), ctypes.byref(platform), ctypes.byref(address)):
        handlers.append(Handler(len(handlers), name.value.decode(), _JAX_PLATFORM[platform.value.decode()], address.value))
    return Library(
        path=str(path),
        functions=functions,
        ffi_version=(functions.xla_lamb_ffi_major(), functions.xla_lamb_ffi_minor()),
        instruction_set=functions.xla_lamb_instruction_set().decode(),
        handlers=tuple(handlers),
        cuda=_cuda(functions),
    )


def _cuda(functions: ctypes.CDLL) -> Cuda | None:
    scratch, runtime, driver = ctypes.c_int64(), ctypes.c_int(), ctypes.c_int()
    functions.xla_lamb_cuda.restype = ctypes.c_bool
    if not functions.xla_lamb_cuda(ctypes.byref(scratch), ctypes.byref(runtime), ctypes.byref(driver)):
        return None
    text = lambda version: f"{version // 1000}.{version % 1000 // 10}"
    return Cuda(scratch.value, text(runtime.value), text(driver.value) if driver.value else None)


def cuda_problem(library: Library) -> str | None:
    """Why a GPU of this machine cannot run the library's CUDA kernels. Initializes CUDA, which a process that will fork may not want."""
    problem = ctypes.create_string_buffer(1024)
    library.functions.xla_lamb_cuda_problem(problem, ctypes.c_size_t(len(problem)))
    return problem.value.decode() or None


def _check_whole(path: pathlib.Path) -> None:
    """Raises OSError if an ELF file ends before its last part, the table of sections: the loader of a copy that broke off ends the
    process with SIGBUS."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        raise OSError("it is not a 64-bit ELF library")
    (start,) = struct.unpack_from("<Q", header, 40)
    entry, count = struct.unpack_from("<HH", header, 58)
    if start + entry * count > size:
        raise OSError(f"it is truncated: {size} bytes of {start + entry * count}")


def load() -> Library:
    """The library.

    Raises:
      Unavailable: if it is missing, cannot be loaded, or is of another interface.
    """
    with _lock:
        result = _load()
    if isinstance(result, str):
        raise Unavailable(result)
    return result


def why_not(framework: str, platform: str) -> str | None:
    """Why the kernel cannot be used by "jax" or "tensorflow" on "cpu" or "cuda"; None if it can. Registers it on the first call."""
    with _lock:
        return _why_not(framework, platform)


@functools.lru_cache(maxsize=None)
def _why_not(framework: str, platform: str) -> str | None:
    try:
        library = load()
        handlers = [h for h in library.handlers if h.platform == platform]
        if not handlers:
            return f"{library.path} holds no kernel for {platform}"
        if platform == "cuda" and (problem := cuda_problem(library)):
            return problem
        {"jax": _register_with_jax, "tensorflow": _register_with_tensorflow}[framework](library, handlers)
    except Unavailable as error:
        return str(error)
    return None


_warned: set[str] = set()


def warn_once(framework: str, platform: str, why: str | None = None) -> None:
    """Says once in a process why the reference is used where a kernel could be: `why`, or what `why_not` says. A platform that this build has
    no kernel for, and a type that the kernel does not take, are as designed: no warning."""
    try:
        if not any(h.platform == platform for h in load().handlers):
            return
    except Unavailable:
        if platform != "cpu":
            return
    why = why or why_not(framework, platform)
    if why is not None and why not in _warned:
        _warned.add(why)
        warnings.warn(f"xla_lamb runs its slower reference on {platform}, because {why}", RuntimeWarning, stacklevel=2)


def _claim(framework: str, handlers: list[Handler]) -> list[Handler]:
    """The handlers that still have to be registered. A second copy of this package in the process must not register a name again."""
    registry = sys.__dict__.setdefault("_xla_lamb_handlers", {})
    todo = []
    for handler in handlers:
        key = (framework, handler.name, handler.platform)
        known = registry.setdefault(key, handler.address)
        if known != handler.address:
            raise Unavailable(f"another copy of xla_lamb has registered {handler.name} with {framework} in this process")
        if (key, "done") not in registry:
            registry[(key, "done")] = True
            todo.append(handler)
    return todo


def jax_ffi_version() -> tuple[int, int] | None:
    """The version of jaxlib's XLA FFI, as its headers say; None if it has none. Does not import JAX."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        header = pathlib.Path(folder) / "include" / "xla" / "ffi" / "api" / "c_api.h"
        if header.is_file():
            text = header.read_text()
            numbers = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
            if all(numbers):
                return int(numbers[0][1]), int(numbers[1][1])
    return None


def check_version(framework: str, theirs: tuple[int, int] | None, ours: tuple[int, int]) -> None:
    """Raises Unavailable if `framework` would refuse the handlers: JAX says so only when its backend starts, and then does not start."""
    if theirs is None:
        raise Unavailable(f"this {framework} has no XLA FFI")
    if theirs[0] != ours[0] or theirs[1] < ours[1]:
        raise Unavailable(f"this {framework} has XLA FFI {theirs[0]}.{theirs[1]}, and the library needs {ours[0]}.{ours[1]}")


def _register_with_jax(library: Library, handlers: list[Handler]) -> None:
    check_version("jaxlib", jax_ffi_version(), library.ffi_version)
    import jax

    if not hasattr(jax, "ffi"):
        raise Unavailable(f"jax {jax.__version__} has no jax.ffi")
    for handler in _claim("jax", handlers):
        platform = "CUDA" if handler.platform == "cuda" else handler.platform
        jax.ffi.register_ffi_target(handler.name, jax.ffi.pycapsule(ctypes.c_void_p(handler.address)), platform=platform)


def tensorflow_api() -> int:
    """The address of TensorFlow's XLA_FFI_Api; TensorFlow must be importable.

    Raises:
      Unavailable: if this TensorFlow does not export it.
    """
    import tensorflow as tf

    folder = pathlib.Path(tf.sysconfig.get_lib())
    for name in _TENSORFLOW_LIBRARIES:
        path = folder / name
        if not path.is_file():
            continue
        functions = ctypes.CDLL(str(path))
        for symbol in _TENSORFLOW_API:
            function = getattr(functions, symbol, None)
            if function is not None:
                function.restype = ctypes.c_void_p
                function.argtypes = []
                return function()
    raise Unavailable(f"tensorflow {tf.__version__} exports no XLA FFI ({' or '.join(_TENSORFLOW_API)} in {folder})")


def tensorflow_ffi_version(library: Library) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.functions.xla_lamb_api_version(ctypes.c_void_p(tensorflow_api()), ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _register_with_tensorflow(library: Library, handlers: list[Handler]) -> None:
    check_version("tensorflow", tensorflow_ffi_version(library), library.ffi_version)
    register = library.functions.xla_lamb_register
    register.restype = ctypes.c_bool
    api = ctypes.c_void_p(tensorflow_api())
    for handler in _claim("tensorflow", handlers):
        reason = ctypes.create_string_buffer(1024)
        if not register(api, handler.index, reason, ctypes.c_size_t(len(reason))):
            raise Unavailable(f"TensorFlow refused {handler.name}: {reason.value.decode(errors='replace')}")
