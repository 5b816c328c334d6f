"""@local_cuda: the CUDA toolkit of this machine, if it has one.

nvcc is looked for in $CUDA_HOME, on PATH, and among the packages of the Python that @local_python found (nvidia-cuda-nvcc and what it
needs). Only the static runtime is linked, so the library needs no CUDA library to be loaded. $XLA_LAMB_CUDA says whether: 1 fails where
there is no toolkit (--config=cuda), 0 builds for the CPU alone (--config=cpu); otherwise it depends on the machine.
"""

load("@local_python//:python.bzl", "PYTHON")

# Machine code for these, and PTX, which a driver compiles for what is newer (of 9.0 for 11.0, of the last one for the rest).
_ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
_PTX = ["90", "120"]

_FIND_WHEEL = """
import glob, importlib.util, os
spec = importlib.util.find_spec("nvidia")
for folder in (spec.submodule_search_locations if spec else None) or []:
    for nvcc in sorted(glob.glob(os.path.join(folder, "*", "bin", "nvcc"))):
        print(nvcc)
"""

_BUILD = """
cc_library(
    name = "runtime",
    srcs = ["libcudart_static.a"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    visibility = ["//visibility:public"],
)
"""

def _find_nvcc(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME", "")
    if home:
        nvcc = repository_ctx.path(home + "/bin/nvcc")
        if not nvcc.exists:
            fail("CUDA_HOME is %s, but there is no bin/nvcc in it." % home)
        return nvcc
    nvcc = repository_ctx.which("nvcc")
    if nvcc:
        return nvcc
    found = repository_ctx.execute([PYTHON, "-c", _FIND_WHEEL]).stdout.splitlines()
    return repository_ctx.path(found[-1]) if found else None

def _toolkit(repository_ctx, nvcc):
    """The folder of the toolkit; nvcc may be a script somewhere else that calls the real one."""
    dry = repository_ctx.execute([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"])
    for line in dry.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return line[len("#$ TOP="):]
    fail("%s does not work:\n%s%s" % (nvcc, dry.stdout, dry.stderr))

def _static_runtime(repository_ctx, toolkit):
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]:
        path = repository_ctx.path("%s/%s/libcudart_static.a" % (toolkit, folder))
        if path.exists:
            return path
    fail("There is no libcudart_static.a in the CUDA toolkit %s." % toolkit)

def _code_flags(repository_ctx, nvcc):
    known = repository_ctx.execute([nvcc, "--list-gpu-code"]).stdout.split("\n")
    flags, missing = [], []
    for architecture in _ARCHITECTURES:
        if "sm_" + architecture in known:
            code = ["sm_" + architecture] + (["compute_" + architecture] if architecture in _PTX else [])
            flags.append("-gencode=arch=compute_%s,code=[%s]" % (architecture, ",".join(code)))
        else:
            missing.append("sm_" + architecture)
    if not flags:
        fail("%s knows none of sm_%s." % (nvcc, ", sm_".join(_ARCHITECTURES)))
    if missing:
        print("%s is too old for %s: such a GPU will run PTX of an older one, if any." % (nvcc, ", ".join(missing)))
    return flags

def _local_cuda_impl(repository_ctx):
    wanted = repository_ctx.os.environ.get("XLA_LAMB_CUDA", "")
    if wanted not in ["", "0", "1"]:
        fail("XLA_LAMB_CUDA must be 0, 1 or nothing, not %r." % wanted)
    nvcc = None if wanted == "0" else _find_nvcc(repository_ctx)
    if nvcc:
        repository_ctx.symlink(_static_runtime(repository_ctx, _toolkit(repository_ctx, nvcc)), "libcudart_static.a")
        repository_ctx.file("BUILD", _BUILD)
    else:
        repository_ctx.file("BUILD", "")
        missing = "There is no nvcc in CUDA_HOME, on PATH or among the packages of %s" % PYTHON
        if wanted == "1":
            fail(missing + ": install a CUDA toolkit, or run `make venv`.")
        print("For the CPU alone: XLA_LAMB_CUDA is 0." if wanted == "0" else missing + ": the library will be for the CPU alone.")
    repository_ctx.file("cuda.bzl", "NVCC = %r\nCODE_FLAGS = %r\n" % (
        str(nvcc) if nvcc else "",
        _code_flags(repository_ctx, nvcc) if nvcc else [],
    ))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["XLA_LAMB_CUDA", "CUDA_HOME", "PATH"],
    local = True,
)
