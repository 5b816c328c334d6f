"""@local_python: the Python of this machine, and the XLA FFI headers that its jaxlib or TensorFlow carries.

The interpreter is $XLA_LAMB_PYTHON, else .venv/bin/python (see the Makefile), else python3 on PATH. It is asked anew whenever the
Bazel server starts; after installing another jaxlib under a running server, run `bazel shutdown`.
"""

# Finds the packages without importing them: importing TensorFlow takes seconds.
_FIND_HEADERS = """
import importlib.util, os
for package in ("jaxlib", "tensorflow"):
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        include = os.path.join(folder, "include")
        if os.path.isfile(os.path.join(include, "xla", "ffi", "api", "ffi.h")):
            print(include)
            raise SystemExit
"""

_BUILD = """
cc_library(
    name = "ffi_headers",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _find_python(repository_ctx):
    workspace = repository_ctx.path(Label("//:WORKSPACE")).dirname
    wanted = repository_ctx.os.environ.get("XLA_LAMB_PYTHON", "")
    if not wanted:
        # Not resolved any further: the symbolic link's place is what makes it the virtual environment's Python.
        python = workspace.get_child(".venv").get_child("bin").get_child("python")
        if python.exists:
            return python
        wanted = "python3"
    if "/" in wanted:
        python = repository_ctx.path(wanted if wanted.startswith("/") else "%s/%s" % (workspace, wanted))
    else:
        python = repository_ctx.which(wanted)
    if not python or not python.exists:
        fail("There is no %s. Set XLA_LAMB_PYTHON to a Python, or run `make venv`." % wanted)
    return python

def _local_python_impl(repository_ctx):
    python = _find_python(repository_ctx)
    found = repository_ctx.execute([python, "-c", _FIND_HEADERS])
    if found.return_code:
        fail("%s cannot look for packages:\n%s" % (python, found.stderr))
    include = found.stdout.strip()
    if not include:
        fail("%s has no package with XLA's FFI headers: install jaxlib or tensorflow there, or run `make venv`, " % python +
             "or set XLA_LAMB_PYTHON to a Python that has one.")
    repository_ctx.symlink(include + "/xla/ffi/api", "include/xla/ffi/api")
    repository_ctx.file("BUILD", _BUILD)
    repository_ctx.file("python.bzl", "PYTHON = %r\n" % str(python))

local_python = repository_rule(
    implementation = _local_python_impl,
    environ = ["XLA_LAMB_PYTHON", "PYTHONPATH", "PATH"],
    local = True,
)
