"""Builds libxla_lamb.so with nvcc and g++ alone, for the GPU of one machine, where there is no Bazel: its sources, its flags.

The flags are read from Bazel's own files: their constants are Python as well.
"""

import concurrent.futures
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the sources, also where Bazel's tests see links to them
NAME = "libxla_lamb.so"

# What ffi/BUILD.bazel and cuda/BUILD.bazel compile, with what they define for it. kernel_isa.cc comes once for each instruction set.
SOURCES = {
    "cuda/kernel.cu": [],  # it takes longest, so it starts first
    "cuda/launch.cc": [],
    "ffi/kernel.cc": [],
    "ffi/decode.cc": [],
    "ffi/handlers_cpu.cc": [],
    "ffi/handlers_cuda.cc": [],
    "ffi/registry.cc": ["-DXLA_LAMB_CUDA"],
}
LOOPS = "ffi/kernel_isa.cc"
EXPORTS = "xla_lamb/exports.lds"
# What Bazel's --compilation_mode=opt and --force_pic add.
ALWAYS = ["-fPIC", "-DNDEBUG"]


class Failed(Exception):
    """Why there is no library: for the user."""


def constant(path, name):
    """What a .bzl file assigns to `name` at its top level."""
    names = {"load": lambda *arguments: None}
    exec(compile((ROOT / path).read_text(), path, "exec"), names)
    if name not in names:
        raise Failed(f"{path} no longer has a {name}, where this build looks for its flags: follow it in benchmarks/build_bare.py")
    return names[name]


def find_nvcc():
    """nvcc in CUDA_HOME, on PATH, where CUDA's installers put it, or among Python's packages."""
    home = os.environ.get("CUDA_HOME")
    if home:
        if not os.path.isfile(f"{home}/bin/nvcc"):
            raise Failed(f"CUDA_HOME is {home}, but there is no bin/nvcc in it")
        return f"{home}/bin/nvcc"
    wheels = importlib.util.find_spec("nvidia")
    folders = ["/usr/local/cuda", *(found for place in (wheels.submodule_search_locations if wheels else None) or []
                                    for found in sorted(map(str, pathlib.Path(place).glob("*"))))]
    places = [shutil.which("nvcc"), *(f"{folder}/bin/nvcc" for folder in folders)]
    found = next((place for place in places if place and os.path.isfile(place)), None)
    if found is None:
        raise Failed("there is no nvcc in CUDA_HOME, on PATH, in /usr/local/cuda or among Python's packages: install a CUDA toolkit")
    return found


def run(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{command[0]} failed with status {done.returncode}: {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def toolkit(nvcc):
    """The toolkit's folder, which nvcc itself names: it may be a script somewhere else that calls the real one."""
    top = re.search(r"^#\$ TOP=(.+)$", run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.M)
    if not top:
        raise Failed(f"{nvcc} --dryrun does not say where its toolkit is")
    return pathlib.Path(top[1])


def static_runtime(nvcc):
    top = toolkit(nvcc)
    folders = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
    found = next((top / folder / "libcudart_static.a" for folder in folders if (top / folder / "libcudart_static.a").is_file()), None)
    if found is None:
        raise Failed(f"there is no libcudart_static.a in the CUDA toolkit {top}")
    return str(found)


def ffi_headers():
    """The folder with XLA's FFI headers, of the jaxlib that will load the library."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (pathlib.Path(folder) / "include/xla/ffi/api/ffi.h").is_file():
            return os.path.join(folder, "include")
    raise Failed("there is no jaxlib with XLA's FFI headers: install jax 0.5 or newer")


def code_flag(nvcc, arch):
    """Machine code for sm_NUMBER, and PTX, which a driver compiles for a GPU that is newer."""
    known = run([nvcc, "--list-gpu-code"]).split()
    if arch not in known:
        raise Failed(f"{nvcc} knows no {arch}, but {', '.join(known)}: a newer CUDA toolkit may")
    number = arch.removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=[sm_{number},compute_{number}]"


def commands(nvcc, arch, folder):
    """{object: the command that compiles it}, the longest first."""
    copts, headers = constant("ffi/kernel.bzl", "COPTS"), ffi_headers()
    of_isa = constant("ffi/kernel.bzl", "_X86_64") if platform.machine() == "x86_64" else {}
    by_nvcc, by_gxx = [nvcc, *constant("cuda/nvcc.bzl", "NVCC_FLAGS")], ["g++", *copts, *ALWAYS, f"-isystem{headers}"]

    def command(source, flags):
        if source.startswith("cuda/"):
            return [*by_nvcc, *([code_flag(nvcc, arch)] if source.endswith(".cu") else ["-x=c++"]), *flags]
        return [*by_gxx, *flags]

    jobs = {source: (source, flags) for source, flags in SOURCES.items()}
    for isa, flags in dict(baseline=[], **of_isa).items():
        jobs[f"{LOOPS}.{isa}"] = (LOOPS, [*flags, f"-DXLA_LAMB_ISA={isa}"])
    found = {}
    for name, (source, flags) in jobs.items():
        out = str(folder / f"{name.replace('/', '_')}.o")
        found[out] = [*command(source, flags), "-I.", "-c", source, "-o", out]
    return found


def key(arch):
    """Of what the library is made from, as far as it is ours."""
    digest = hashlib.sha256(arch.encode())
    files = [*SOURCES, LOOPS, EXPORTS, "ffi/kernel.bzl", "cuda/nvcc.bzl", "benchmarks/build_bare.py"]
    headers = [str(path.relative_to(ROOT)) for folder in ("cuda", "ffi") for path in (ROOT / folder).glob("*.h")]
    for name in sorted(files + headers):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def build(arch, folder, rebuild=False):
    """(the library's path, whether it had to be built). It lies in folder/arch.

    Raises:
      Failed: with what the compiler said.
    """
    folder = pathlib.Path(folder).absolute() / arch
    library, stamp, wanted = folder / NAME, folder / "key", key(arch)
    if not rebuild and library.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return library, False
    nvcc = find_nvcc()
    if not shutil.which("g++"):
        raise Failed("there is no g++ on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    jobs = commands(nvcc, arch, folder)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs.values()))
    run([
        "g++", "-shared", "-o", str(library), *jobs, static_runtime(nvcc), f"-Wl,--version-script={EXPORTS}", "-Wl,--no-undefined",
        "-static-libstdc++", "-static-libgcc", "-ldl", "-lpthread", "-lrt",
    ])  # fmt: skip
    stamp.write_text(wanted)
    return library, True
