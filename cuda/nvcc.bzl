"""Compiling with nvcc."""

load("@local_cuda//:cuda.bzl", "CODE_FLAGS", "NVCC")

# No contraction to fused multiply-adds, as on the CPU: what is computed for each element has the same bits on both.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-O3,-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas"]

def nvcc_objects(name, srcs, hdrs):
    """Object files of CUDA sources, for all architectures, and of C++ that includes CUDA's headers.

    Args:
      name: of the group of all of them.
      srcs: the sources.
      hdrs: what they include.
    """
    for src in srcs:
        native.genrule(
            name = name + "_" + src.replace(".", "_"),
            srcs = [src] + hdrs,
            outs = [src.rpartition(".")[0] + ".pic.o"],
            cmd = " ".join(
                [NVCC] + NVCC_FLAGS + (CODE_FLAGS + ["--threads=2"] if src.endswith(".cu") else ["-x=c++"]) +
                ["-I.", "-c", "$(location %s)" % src, "-o", "$@"],
            ),
            message = "Compiling with nvcc",
        )
    native.filegroup(
        name = name,
        srcs = [":" + name + "_" + src.replace(".", "_") for src in srcs],
    )
