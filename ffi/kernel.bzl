"""The kernel and how it is compiled."""

# One result for every instruction set and compiler: no contraction to fused multiply-adds. Square roots may be vectorized, since
# nobody looks at errno or traps.
COPTS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]

_X86_64 = {
    "avx2": ["-mavx2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"],
}

def kernel(name, copts = [], **kwargs):
    """A cc_library with the hot loops of kernel_isa.cc once for each instruction set, and kernel.cc, which picks one at run time.

    Args:
      name: of the library; the loops are NAME_baseline, NAME_avx2 and NAME_avx512, together the files of NAME_loops.
      copts: added to COPTS.
      **kwargs: of the cc_library.
    """
    for isa, flags in dict(baseline = [], **_X86_64).items():
        native.cc_library(
            name = name + "_" + isa,
            srcs = ["kernel_isa.cc"],
            copts = COPTS + flags + copts,
            linkstatic = True,
            local_defines = ["XLA_LAMB_ISA=" + isa],
            tags = ["manual"],  # `bazel build //...` must not try AVX elsewhere
            deps = [":kernel_headers"],
        )
    loops = [name + "_baseline"] + select({
        "@platforms//cpu:x86_64": [name + "_" + isa for isa in _X86_64],
        "//conditions:default": [],
    })
    native.filegroup(
        name = name + "_loops",
        testonly = True,
        srcs = loops,
    )
    native.cc_library(
        name = name,
        srcs = ["kernel.cc"],
        copts = COPTS + copts,
        linkstatic = True,
        deps = [":kernel_headers"] + loops,
        **kwargs
    )
