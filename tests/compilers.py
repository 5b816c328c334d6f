"""XLA's compilers for GPUs and TPUs, on a machine that has neither: what they make of a LAMB step, in figures.

The compilers are JAX plugins. `make venv` puts them into .venv/compilers, where only the children of `compile_steps` look: JAX loads
every plugin that it finds, and TensorFlow crashes beside one.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).absolute().parent
ROOT = TESTS.parent
COMPILERS = Path(sys.prefix) / "compilers"

# Figures in which GPUs differ, as in GpuTargetConfigProto below: compute capability, multiprocessors, their float32 units and
# bytes of shared memory (one block gets 1 KB less), bytes of L2 and of memory, bytes a second, GHz.
GPUS = {
    "A100": ((8, 0), 108, 64, 164 << 10, 40 << 20, 80 << 30, 2.039e12, 1.41),
    "H100": ((9, 0), 132, 128, 228 << 10, 50 << 20, 80 << 30, 3.35e12, 1.98),
    "H200": ((9, 0), 132, 128, 228 << 10, 50 << 20, 141 << 30, 4.8e12, 1.98),
    "B200": ((10, 0), 148, 128, 228 << 10, 126 << 20, 180 << 30, 8.0e12, 1.965),
}

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: {units}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}  l2_cache_size: {l2}  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""


def gpu_target(name):
    """The GpuTargetConfigProto, as text, of one of GPUS."""
    (major, minor), cores, units, shared, l2, memory, bandwidth, clock = GPUS[name]
    return _GPU.format(
        name=name, major=major, minor=minor, cores=cores, units=units, shared=shared, optin=shared - 1024, l2=l2, memory=memory,
        bandwidth=bandwidth, clock=clock,
    )


def compile_steps(jobs, timeout=500, **env):
    """Compiles each of `jobs`, a dictionary of arguments of `compile_step`, in one child process: a list of its results.

    `env`: variables of the child's environment.
    """
    assert COMPILERS.is_dir(), f"there is no {COMPILERS}, which holds XLA's compilers for GPUs and TPUs: run `make venv`"
    full = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, TESTS, COMPILERS))),
        JAX_PLATFORMS="cpu",  # a plugin's compiler needs no device of it, and must not look for one
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # two processes share no TPU here
        TPU_LOG_DIR="disabled",
        XLA_FLAGS="",
        **env,
    )
    code = "import compilers, json, sys; print(json.dumps([compilers.compile_step(**job) for job in json.load(sys.stdin)]))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(jobs), env=full, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# In the child -------------------------------------------------------------------------------------------------------------


def compile_step(
    target, shapes, step="xla_lamb", method="step", donate=True, mesh=None, specs=None, moment_specs=None, explicit=False, partitioned=True,
    stats=False, **options,
):  # fmt: skip
    """Compiles one step over float32 tensors of `shapes`, as a training loop has it: (params, state, grads) -> (params, state).

    Args:
      target: one of GPUS, or a topology of TPUs such as "v5e:2x2".
      step: "xla_lamb", "optax" (its lamb) or "textbook".
      method: "step", or "update" of xla_lamb and optax: (grads, state, params) -> (updates, state).
      donate: the first two arguments.
      mesh: names and sizes of the axes of the mesh that the step runs on; None: one device.
      specs: for each tensor the entries of its PartitionSpec: None, names of axes, or lists of them. None: each device has a copy of all.
      moment_specs: those of the moments, where they differ.
      explicit: whether the axes of the mesh are explicit, instead of automatic.
      partitioned: False for calls of which XLA does not know how to partition them.
      stats: also return the trust ratios.
      options: of xla_lamb.lamb.

    Returns:
      A dictionary: `error`; or `calls` (our custom calls in order), `aliases` (results of the module in the buffer of an argument),
      `call_aliases` (the same of the calls), `copies` (types), `collectives` (opcode and bytes of the result of each), `kernels` and `bytes` (on
      GPUs), `accessed` (bytes by the compiler's own account, on TPUs), `instructions` (of the module), `temporary` (bytes), `parameters`, and
      `compile_s`.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    import helpers
    from xla_lamb import sharding

    mesh = mesh or {"x": 1}
    devices = math.prod(mesh.values())
    platform = "cuda" if target in GPUS else "tpu"
    if platform == "cuda":
        hosts = max(1, devices // 8)
        slices = max(1, hosts // 8)
        topology = f"{slices}x{hosts // slices}x{min(devices, 8)}"
        found = topologies.get_topology_desc(platform="cuda", topology_name="", topology=topology, target_config=gpu_target(target))
    else:
        found = topologies.get_topology_desc(platform="tpu", topology_name=target)
    kinds = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,) * len(mesh)
    names, sizes = tuple(mesh), tuple(mesh.values())
    mesh = jax.sharding.Mesh(np.array(found.devices[:devices]).reshape(sizes), names, axis_types=kinds)

    def place(tree, specs):
        """The leaves with the specs of the parameters, in turn; a state has first its count."""

        def one(x, spec):
            spec = jax.sharding.PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

        leaves, structure = jax.tree.flatten(tree)
        scalars = len(leaves) % len(shapes)
        specs = [[]] * len(shapes) if specs is None else specs
        return structure.unflatten([one(x, spec) for x, spec in zip(leaves, [[]] * scalars + specs * (len(leaves) // len(shapes)))])

    init, function = _step(step, method, stats, options)
    params = place([jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes], specs)
    state = place(jax.eval_shape(init, params), moment_specs or specs)
    traced = jax.jit(function, donate_argnums=(0, 1) if donate else ()).trace(params, state, params)
    try:
        with contextlib.nullcontext() if partitioned else mock.patch.object(sharding, "is_partitioned", lambda module: False):
            lowered = traced.lower()
    except NotImplementedError as error:
        return {"error": str(error)}
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    hlo = compiled.as_text()
    result = {
        "calls": helpers.lamb_calls(hlo),
        "aliases": helpers.aliases(hlo),
        "call_aliases": sum(pairs.count("}: (") for pairs in re.findall(r"output_to_operand_aliasing=\{(.*?)\)\}", hlo)),
        "copies": helpers.copies(hlo),
        "collectives": [(op, size_of(kind)) for kind, op in helpers.collectives(hlo)],
        "instructions": len(helpers.opcodes(hlo)),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "parameters": sum(math.prod(shape) for shape in shapes),
        "compile_s": seconds,
    }
    if platform == "cuda":
        result["kernels"], result["bytes"] = kernels(hlo), bytes_moved(hlo)
    else:
        result["accessed"] = compiled.cost_analysis()["bytes accessed"]
    return result


def _step(name, method, stats, options):
    """(init, step) of a contender."""
    import jax.numpy as jnp
    import optax

    import xla_lamb

    rate, b1, b2, eps, decay = 1e-2, 0.9, 0.999, 1e-6, 0.01
    theirs = optax.lamb(rate, b1, b2, eps, weight_decay=decay)
    if name == "optax":
        if method == "update":
            return theirs.init, theirs.update

        def with_optax(p, s, g):
            updates, s = theirs.update(g, s, p)
            return optax.apply_updates(p, updates), s

        return theirs.init, with_optax
    if name == "textbook":

        def tensor(p, g, m, v, t):
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            u = (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps) + decay * p
            p_norm, u_norm = jnp.sqrt(jnp.sum(p * p)), jnp.sqrt(jnp.sum(u * u))
            ratio = jnp.where((p_norm == 0) | (u_norm == 0), 1.0, p_norm / u_norm)
            return p - rate * ratio * u, m, v

        def textbook(p, s, g):
            count, m, v = s
            count += 1
            p, m, v = zip(*(tensor(*four, count.astype(jnp.float32)) for four in zip(p, g, m, v)))
            return list(p), (count, list(m), list(v))

        return lambda p: (jnp.zeros((), jnp.int32), p, p), textbook
    opt = xla_lamb.lamb(rate, b1, b2, eps, weight_decay=decay, **options)
    if method == "update":
        return opt.init, opt.update
    return opt.init, lambda p, s, g: opt.step(g, s, p, stats=stats)


# Counting what a GPU executes ---------------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$", re.M)
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # the first number of a type's name is its bits; pred has 8
# They name or pass values; an asynchronous operation is counted where it starts.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "async-done", "async-update", "copy-done")


def size_of(kind):
    """The bytes of a type of an HLO text; of all its elements if it is a tuple."""
    return sum(int(bits or 8) * math.prod(int(d) for d in dims.split(",") if d) // 8 for bits, dims in _SHAPE.findall(kind))


def executed(hlo):
    """(opcode, bytes of the operands and of the results) of each kernel, copy and library call of one run of an optimized module."""
    computations, entry = {}, None
    for is_entry, name, body in _COMPUTATION.findall(hlo):
        computations[name] = body
        entry = name if is_entry else entry
    assert entry, "no HLO module"

    def walk(name):
        found = _INSTRUCTION.findall(computations[name])
        assert len(found) == len(computations[name].splitlines()), "an instruction was not understood"
        sizes = {result: size_of(kind) for result, kind, _, _, _ in found}
        for result, _, op, operands, attributes in found:
            if op in ("call", "async-start"):
                yield from walk(re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", attributes)[1])
            elif op in ("while", "conditional"):
                raise ValueError(f"how often a {op} runs is not in the text")
            elif op not in _FREE:
                yield op, sizes[result] + sum(sizes[x] for x in re.findall(r"%([\w.\-]+)", operands))

    return list(walk(entry))


def kernels(hlo):
    """How many kernels, copies and library calls one run of an optimized module has."""
    return len(executed(hlo))


def bytes_moved(hlo):
    """Bytes that they read and write, if each moves all of its operands and its results once, and nothing stays in a cache."""
    return sum(size for _, size in executed(hlo))
