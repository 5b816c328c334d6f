"""Shared by the tests: trees, steps through the library, distances, HLO text, and fresh processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import model64

TESTS = Path(__file__).absolute().parent
ROOT = TESTS.parent

# A scalar, an empty tensor, a size just above a block, more than one axis. Few, since XLA takes its time for each in the reference.
SHAPES = [(3, 5), (17,), (), (0,), (7, 3, 2), (4097,)]


def tree(shapes=SHAPES, seed=0, scale=1.0, dtype=np.float32):
    """A list of NumPy arrays with normal entries."""
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=s) * scale).astype(dtype) for s in shapes]


def gradients(steps, shapes=SHAPES, seed=1, scale=0.1, dtype=np.float32):
    """One tree a step, of sizes that change from step to step, so that a wrong moment shows."""
    return [tree(shapes, seed + i, scale * (1 + i % 3), dtype) for i in range(steps)]


# Steps through the library ------------------------------------------------------------------------------------------------


def moments(state):
    """(count, mu, nu) of an optimizer state with optax.lamb's tree."""
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x)]
    assert len(found) == 1, state
    return found[0].count, found[0].mu, found[0].nu


def _is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def run_steps(opt, params, grads, jit=True, **options):
    """Steps in place through opt.step: (params, state)."""
    params = jax.tree.map(jnp.asarray, params)
    state = opt.init(params)

    def step(g, s, p):
        return opt.step(g, s, p, **options)

    step = jax.jit(step) if jit else step
    for g in grads:
        params, state = step(jax.tree.map(jnp.asarray, g), state, params)[:2]
    return params, state


def run_updates(tx, params, grads, jit=True):
    """Steps as an optax transformation: update, then apply_updates: (params, state)."""
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)

    def step(g, s, p):
        updates, s = tx.update(g, s, p)
        return optax.apply_updates(p, updates), s

    step = jax.jit(step) if jit else step
    for g in grads:
        params, state = step(jax.tree.map(jnp.asarray, g), state, params)
    return params, state


def run_model(params, grads, rules, learning_rate, **options):
    """The float64 model over the same gradients; learning_rate is a number or a function of the count from 0."""
    state = model64.init(params)
    for g in grads:
        rate = learning_rate(state.t) if callable(learning_rate) else learning_rate
        state, _ = model64.step(state, g, rules, rate, **options)
    return state


# Distances ----------------------------------------------------------------------------------------------------------------


def ulp(dtype, at):
    """The distance between neighbours of a float type at |at|."""
    info = ml_dtypes.finfo(dtype)
    at = np.maximum(np.abs(np.asarray(at, np.float64)), float(info.smallest_normal))
    return float(info.eps) * np.exp2(np.floor(np.log2(at)))


def ulps(actual, expected, dtype, at=None):
    """The largest distance, in ulps of `at` (elementwise; default: of the largest |expected|)."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.size:
        return 0.0
    at = np.max(np.abs(expected)) if at is None else at
    distance = np.abs(actual - expected) / ulp(dtype, at)
    assert np.all(np.isfinite(distance)), "not finite"
    return float(np.max(distance))


def error(actual, expected):
    """The largest distance over the largest |expected| of one tensor."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.size:
        return 0.0
    top = np.max(np.abs(expected))
    distance = float(np.max(np.abs(actual - expected)))
    assert np.isfinite(distance), "not finite"
    return distance / float(top) if top else distance


def assert_near(actual, expected, tolerance):
    """Tree against tree, leaf by leaf, relative to each tensor's largest value."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        assert (e_ := error(a, e)) <= tolerance, f"leaf {i} of shape {np.shape(e)}: {e_:.3g} > {tolerance:.3g}"


def bits(x):
    """The bits of every leaf."""
    return [(np.asarray(leaf).dtype.name, np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(x)]


# HLO ----------------------------------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.M)
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


def opcodes(hlo):
    """(type, opcode) of every instruction of an HLO text."""
    return _INSTRUCTION.findall(hlo)


def lamb_calls(hlo):
    """The targets of our custom calls in an HLO text, in order."""
    return re.findall(r'custom_call_target="(xla_lamb_\w+)"', hlo)


def aliases(hlo):
    """How many outputs of the module share their buffer with an argument."""
    header = hlo.split("\n", 1)[0]
    return len(_ALIAS.findall(header))


def copies(hlo, least=2):
    """The types of the copies of at least `least` elements; scalars, like the step counter, are free."""
    found = []
    for kind, op in opcodes(hlo):
        if op in ("copy", "copy-start"):
            dims = re.match(r"\(?\w+\[([\d,]*)\]", kind).group(1)
            if np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64) >= least:
                found.append(kind)
    return found


def collectives(hlo):
    """(type, opcode) of each collective operation; an asynchronous one is there once."""
    every = ("all-", "reduce-scatter", "collective-", "ragged-all-")
    return [(kind, op.removesuffix("-start")) for kind, op in opcodes(hlo) if op.startswith(every) and not op.endswith("-done")]


def emulated_library():
    """The library whose kernel for the CPU is the CUDA kernel under emulation, and which has none for CUDA."""
    path = ROOT / "cuda" / "emulation" / "libxla_lamb_emulated.so"  # beside the tests in Bazel's runfiles
    if not path.exists():
        path = ROOT / "bazel-bin" / "cuda" / "emulation" / path.name
    assert path.exists(), f"there is no {path}: build it with `tools/bazel.sh build //cuda/emulation/...`"
    return path


# Fresh processes ----------------------------------------------------------------------------------------------------------


def python(code, *args, path=ROOT, timeout=300, check=True, **env):
    """Runs code in a fresh interpreter, where JAX has one device: the CompletedProcess. `path` is where xla_lamb is found."""
    env.setdefault("XLA_FLAGS", None)
    full = dict(os.environ, PYTHONPATH=os.pathsep.join([str(path), str(TESTS)] + [p for p in sys.path if p and p != str(ROOT)]))
    full.update({k: str(v) for k, v in env.items() if v is not None})
    for name in (k for k, v in env.items() if v is None):
        full.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=full, cwd=path, capture_output=True, text=True, timeout=timeout
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


FIT = """
import keras, numpy as np, xla_lamb.keras
from xla_lamb.minimize import *
def lamb(**options):
    return xla_lamb.keras.Lamb(implementation="fused", **options)
for layers, optimizer in {fits}:
    dense = [keras.layers.Dense(40 + i % 3, activation="relu") for i in range(layers)]
    model = keras.Sequential([keras.Input((40,)), *dense])
    model.compile(eval(optimizer), loss="mse", jit_compile=True)
    model.fit(np.ones((8, 40), "float32"), np.ones((8, model.output_shape[-1]), "float32"), batch_size=4, verbose=0)
"""


def train_steps(folder, backend, fits):
    """The optimized HLO of Model.fit's train step for each of `fits`: (number of layers, code of the optimizer). XLA itself writes down each program
    that it compiles, in a fresh process for all; LLVM, which comes after that, need not optimize."""
    modules = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step|one_step_on_data"
    python(FIT.format(fits=fits), KERAS_BACKEND=backend, XLA_FLAGS=f"{modules} --xla_backend_optimization_level=0", JAX_PLATFORMS="cpu")
    paths = sorted(Path(folder).glob("*after_optimizations.txt"), key=lambda path: int(re.search(r"module_(\d+)", path.name)[1]))
    steps = [text for text in (path.read_text() for path in paths) if re.search("train_step|one_step_on_data", text.split("\n")[0])]
    assert len(steps) == len(fits)
    return steps
