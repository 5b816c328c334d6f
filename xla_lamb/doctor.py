"""Says what this installation will do: versions, the library, what is registered where, and which path each device takes and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import xla_lamb
from xla_lamb import config, library

_PACKAGES = ("jax", "jaxlib", "optax", "tensorflow", "keras", "numpy")


def report() -> dict[str, Any]:
    """Everything as plain values; starts JAX's and TensorFlow's runtimes if they are installed."""
    try:
        loaded, problem = library.load(), None
    except library.Unavailable as error:
        loaded, problem = None, str(error)
    try:
        implementation = config.implementation(None)
    except ValueError as error:
        implementation = str(error)
    return {
        "xla_lamb": xla_lamb.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "implementation": implementation,
        "library": {
            "path": loaded.path if loaded else None,
            "problem": problem,
            "instruction_set": loaded.instruction_set if loaded else None,
            "xla_ffi": _text(loaded.ffi_version) if loaded else None,
            "cuda": _cuda(loaded) if loaded and loaded.cuda else None,
            "handlers": [{"name": h.name, "platform": h.platform} for h in loaded.handlers] if loaded else [],
        },
        "jax": _framework("jax", loaded, _jax_devices, lambda: library.jax_ffi_version()),
        "tensorflow": _framework("tensorflow", loaded, _tensorflow_devices, lambda: library.tensorflow_ffi_version(loaded) if loaded else None),
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in report["packages"].items())
    lib = report["library"]
    lines = [
        f"xla_lamb {report['xla_lamb']}, Python {report['python']} on {report['machine']}",
        f"packages: {packages}",
        f"implementation: {report['implementation']}",
        f"library: {lib['path']} (XLA FFI {lib['xla_ffi']}, {lib['instruction_set']} loops)" if lib["path"] else f"library: none: {lib['problem']}",
    ]
    if lib["path"]:
        lines.append(f"CUDA: {_cuda_text(lib['cuda'])}")
    for name in ("jax", "tensorflow"):
        framework = report[name]
        if framework["problem"]:
            lines.append(f"{name}: {framework['problem']}")
            continue
        lines.append(f"{name}: XLA FFI {framework['xla_ffi']}")
        for platform_name, calls in framework["registered"].items():
            lines.append(f"  registered for {platform_name}: {', '.join(calls) or 'nothing'}")
        lines += [f"  {d['device']}: {d['path']}" + (f", because {d['why']}" if d["why"] else "") for d in framework["devices"]]
    return "\n".join(lines)


def _cuda(loaded: library.Library) -> dict[str, Any]:
    return {"runtime": loaded.cuda.runtime, "driver": loaded.cuda.driver, "problem": library.cuda_problem(loaded)}


def _cuda_text(cuda: dict[str, Any] | None) -> str:
    if cuda is None:
        return "no kernels: the library was built for the CPU alone"
    driver = f"the driver supports CUDA {cuda['driver']}" if cuda["driver"] else "this machine has no NVIDIA driver"
    return f"kernels built with CUDA {cuda['runtime']}; {driver}" + (f"; {cuda['problem']}" if cuda["problem"] else "")


def _framework(name: str, loaded, devices, ffi_version) -> dict[str, Any]:
    result: dict[str, Any] = {"problem": None, "xla_ffi": None, "registered": {}, "devices": []}
    if importlib.util.find_spec(name) is None:
        result["problem"] = "not installed"
        return result
    try:
        from xla_lamb import step  # needs JAX, which makes the program for TensorFlow too
    except Exception as error:
        result["problem"] = f"JAX cannot be imported: {error}"
        return result
    try:
        result["xla_ffi"] = _text(ffi_version())
    except library.Unavailable as error:
        result["xla_ffi"] = f"none: {error}"
    try:
        options = step.Options(config.implementation(None), name)
        for platform_name in step.PLATFORMS:
            registered = library.why_not(name, platform_name) is None
            result["registered"][platform_name] = [h.name for h in loaded.handlers if h.platform == platform_name] if registered else []
        for device, platform_name in devices():
            why = step.why_not_fused(platform_name, options)
            result["devices"].append({"device": device, "path": "reference" if why else "fused kernel", "why": why})
    except Exception as error:  # a backend that does not start is what one wants to read about here
        result["problem"] = f"{type(error).__name__}: {error}"
    return result


def _jax_devices() -> list[tuple[str, str]]:
    import jax

    # JAX calls CUDA and ROCm devices alike "gpu".
    gpu = lambda device: "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return [(str(d), gpu(d) if d.platform == "gpu" else d.platform) for d in jax.devices()]


def _tensorflow_devices() -> list[tuple[str, str]]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    gpu = "rocm" if tf.test.is_built_with_rocm() else "cuda"
    names = {"CPU": "cpu", "GPU": gpu, "TPU": "tpu"}
    return [(d.name, names.get(d.device_type, d.device_type.lower())) for d in tf.config.list_logical_devices()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version else None
