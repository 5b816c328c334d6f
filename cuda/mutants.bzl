"""The CUDA kernel with a fault, each of which kernel_test must find: a test that cannot fail proves nothing."""

load("@local_python//:python.bzl", "PYTHON")
load("//tools:sanitizers.bzl", "SANITIZERS", "sanitized")
load("//ffi:kernel.bzl", "COPTS")

# name: (what is replaced, by what, under which of SANITIZERS, what the test says)
MUTANTS = {
    "removed_barrier": (
        "  __syncthreads();\n  if (threadIdx.x != 0) return;\n  for (int i = 1;",
        "  if (threadIdx.x != 0) return;\n  for (int i = 1;",
        "",
        "FAILED",
    ),
    "removed_barrier_race": (
        "  __syncthreads();\n  if (threadIdx.x != 0) return;\n  for (int i = 1;",
        "  if (threadIdx.x != 0) return;\n  for (int i = 1;",
        "thread_",
        "data race",
    ),
    "removed_order_between_blocks": (
        "StoreRelease(arrived, kReady);",
        "__atomic_store_n(arrived, kReady, __ATOMIC_RELAXED);",
        "thread_",
        "data race",
    ),
    "wrong_index": (
        "StoreShared<kCount>(u, Slot(work.slot) + at);",
        "StoreShared<kCount>(u, Slot(work.slot + 1) + at);",
        "address_",
        "heap-buffer-overflow",
    ),
    "unwritten_output": (
        "StoreVector<kCount>(second, second_moment_out, m_type, at, use);",
        "",
        "",
        "FAILED",
    ),
    "waits_for_blocks_that_do_not_run": (
        "!(full && all_taken)",
        "!full",
        "",
        "deadlock",
    ),
    "sums_in_order_of_arrival": (
        "table_.scratch.sums[2 * chunk.index] = p_square;\n      table_.scratch.sums[2 * chunk.index + 1] = u_square;\n" +
        "      shared_.last = FetchAdd(arrived, 1) + 1 == chunk.chunks;",
        "const uint32_t place = FetchAdd(arrived, 1);\n      table_.scratch.sums[2 * (chunk.first + place)] = p_square;\n" +
        "      table_.scratch.sums[2 * (chunk.first + place) + 1] = u_square;\n      shared_.last = place + 1 == chunk.chunks;",
        "",
        "other bits",
    ),
}

def test_program(sanitizers):
    """The launcher and kernel_test.cc, compiled once for the kernel and all of its mutants: NAME_launcher and NAME_test_program.

    Args:
      sanitizers: an entry of SANITIZERS, which is the beginning of the names.
    """
    copts = COPTS + sanitized(SANITIZERS[sanitizers])
    native.cc_library(
        name = sanitizers + "launcher",
        testonly = True,
        srcs = [":launch.cc"],
        hdrs = [":headers"],
        copts = copts,
        linkstatic = True,
        deps = [
            "//cuda/emulation",
            "//ffi:step",
        ],
    )
    native.cc_library(
        name = sanitizers + "test_program",
        testonly = True,
        srcs = [":kernel_test.cc"],
        copts = copts,
        linkstatic = True,
        deps = [
            ":" + sanitizers + "launcher",
            "//ffi:kernel",
            "//ffi:kernel_headers",
            "//ffi:kernel_testing",
        ],
        alwayslink = True,  # nothing refers to main
    )

def kernel_for_host(name, sanitizers, copts = []):
    """The kernel, compiled for the emulation, with its launcher.

    Args:
      name: of the library, whose source is NAME.cc.
      sanitizers: an entry of SANITIZERS.
      copts: for this one alone.
    """
    native.cc_library(
        name = name,
        testonly = True,
        srcs = [name + ".cc"],
        hdrs = [":headers"],
        copts = COPTS + ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"] + sanitized(SANITIZERS[sanitizers]) + copts,
        linkstatic = True,
        visibility = ["//cuda:__subpackages__"],
        deps = [
            ":" + sanitizers + "launcher",
            "//cuda/emulation",
            "//ffi:step",
        ],
        alwayslink = True,  # the launcher, of which there may be many kernels, refers to it
    )

def mutant_test(name, old, new, sanitizers, expected):
    """A test that kernel_test fails on a kernel with `new` in place of `old`, and says `expected`."""
    native.genrule(
        name = name + "_source",
        srcs = [":kernel.cu"],
        outs = [name + "_kernel.cc"],
        cmd = "'%s' $(location //tools:replace.py) $< $@ '%s' '%s'" % (PYTHON, old, new),
        tools = ["//tools:replace.py"],
    )
    kernel_for_host(name + "_kernel", sanitizers, ["-Wno-unused-variable", "-Og"])  # -O3 takes three times as long
    native.cc_binary(
        name = name + "_kernel_test",
        testonly = True,
        linkopts = SANITIZERS[sanitizers],
        deps = [
            ":" + name + "_kernel",
            ":" + sanitizers + "test_program",
        ],
    )
    native.sh_test(
        name = name + "_test",
        timeout = "moderate",
        srcs = [":must_fail.sh"],
        args = ["'%s'" % expected, "$(location :%s_kernel_test)" % name] + (["quick"] if sanitizers else []),
        data = [":%s_kernel_test" % name],
    )
