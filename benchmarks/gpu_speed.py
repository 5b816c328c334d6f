"""`python -m benchmarks.gpu_speed '{"set": ...}'`: what a step costs. Part of `python -m benchmarks.gpu`, in a process of its own.

The contenders are compiled first. Then the process says so, waits for a line on standard input, so that it measures alone, and lets them
take turns over the same tensors: each takes the parameters and the state that the one before it left. Lines on standard output are JSON.
"""

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import sys
import threading
import time

from benchmarks import bare_optax, sets
from benchmarks.gpu import LEAST

OPTAX = bare_optax.install()  # before xla_lamb asks for it

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import xla_lamb  # noqa: E402

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
LEAST_COPIED = 1 << 30  # bytes; less would be copied within the caches
LOOP = 10  # steps or copies in a jitted loop
CONTENDERS = ("xla_lamb", "xla_lamb reference", "optax.lamb")


def steps():
    """{contender: (params, state, grads) -> (params, state)}, and what makes the state, which is the same for all."""
    ours = xla_lamb.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY, implementation="fused")
    plain = xla_lamb.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY, implementation="reference")
    found = {"xla_lamb": lambda p, s, g: ours.step(g, s, p), "xla_lamb reference": lambda p, s, g: plain.step(g, s, p)}
    if OPTAX:
        theirs = optax.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

        def peer(p, s, g):
            updates, s = theirs.update(g, s, p)
            return optax.apply_updates(p, updates), s

        found["optax.lamb"] = peer
    return found, ours.init


def looped(step):
    return lambda p, s, g: jax.lax.fori_loop(0, LOOP, lambda _, carry: step(*carry, g), (p, s))


_tracing = threading.Lock()


def compiled(function, *arguments):
    """(executable, its figures). Others may be compiled meanwhile, but not traced: Python would let each do so half of the time."""
    with _tracing:
        begin = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=(0, 1)).lower(*arguments)
        traced = time.perf_counter() - begin
    middle = time.perf_counter()
    executable = lowered.compile()
    analysis = executable.memory_analysis()
    return executable, {
        "trace_s": traced,
        "compile_s": time.perf_counter() - middle,
        "temporary_bytes": analysis.temp_size_in_bytes if analysis else None,
    }


def copies(parameters, least):
    """({(what, form): a jitted function}, the size of its argument, the bytes that each copy moves: at least those of a step)."""
    size = max(LEAST * parameters, least) // 8  # each float32 is read and written
    loop = lambda x: jax.lax.fori_loop(0, LOOP, lambda _, x: x + 1, x)
    functions = {
        ("copy", "call"): jax.jit(jnp.copy),
        ("x + 1", "call"): jax.jit(lambda x: x + 1),
        ("x + 1", "loop"): jax.jit(loop, donate_argnums=0),
    }
    return functions, size, 8 * size


def memory():
    """(bytes in use, the most so far) on the device; None where nobody counts."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")


def tensors(shapes):
    """Parameters and gradients of a size as in training, made on the device."""

    @functools.partial(jax.jit, static_argnums=2)
    def normal(seed, scale, shape):
        return scale * jax.random.normal(jax.random.key(seed), shape)

    return tuple([normal(2 * i + k, scale, shape) for i, shape in enumerate(shapes)] for k, scale in enumerate((0.02, 1e-3)))


def measure(shapes, contenders=CONTENDERS, forms=("call", "loop"), rounds=15, least_copied=LEAST_COPIED, until=math.inf, wait=lambda: None):
    """Times and memory of all, as a dictionary for JSON. Compiles until the time `until` and does without what is not there by then."""
    functions, init = steps()
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments = params, jax.eval_shape(init, params), params
    wanted = [(name, form) for name in contenders if name in functions for form in forms]
    report = {"missing": {name: "there is no optax" for name in contenders if name not in functions}}

    def work(name, form):
        return compiled(functions[name] if form == "call" else looped(functions[name]), *arguments)

    pool = concurrent.futures.ThreadPoolExecutor(len(wanted))
    jobs = {(name, form): pool.submit(work, name, form) for name, form in wanted}
    concurrent.futures.wait(jobs.values(), timeout=None if until == math.inf else max(0, until - time.time()))
    executables, figures = {}, {}
    for key, job in jobs.items():
        if not job.done():
            report["missing"][" ".join(key)] = "was not compiled in time"
        elif job.exception():
            report["missing"][" ".join(key)] = f"{type(job.exception()).__name__}: {job.exception()}"[:500]
        else:
            executables[key], figures[key] = job.result()
    parameters = sets.elements(shapes)
    copying, size, copied = copies(parameters, least_copied)
    wait()

    p, g = tensors(shapes)
    s = init(p)
    jax.block_until_ready((p, g, s))
    for key, executable in executables.items():
        before, peak = memory()
        p, s = jax.block_until_ready(executable(p, s, g))
        after = memory()[1]
        # The peak cannot be set back, so a contender that needs less than one before it does not show.
        figures[key]["extra_bytes"] = after - before if after is not None and after > peak else None
    x = jax.block_until_ready(jnp.ones(size, jnp.float32))
    for key, function in copying.items():
        x = jax.block_until_ready(function(x))

    seconds = {key: [] for key in [*executables, *copying]}
    for _ in range(rounds):
        for key, executable in executables.items():
            begin = time.perf_counter()
            p, s = jax.block_until_ready(executable(p, s, g))
            seconds[key].append((time.perf_counter() - begin) / (1 if key[1] == "call" else LOOP))
        for key, function in copying.items():
            begin = time.perf_counter()
            x = jax.block_until_ready(function(x))
            seconds[key].append((time.perf_counter() - begin) / (1 if key[1] == "call" else LOOP))
    return {
        **report,
        "tensors": len(shapes),
        "parameters": parameters,
        "loop": LOOP,
        "copied_bytes": copied,
        "copies": [{"what": what, "form": form, "seconds": seconds[what, form]} for what, form in copying],
        "results": [{"contender": name, "form": form, **figures[name, form], "seconds": seconds[name, form]} for name, form in executables],
    }


def main():
    job = json.loads(sys.argv[1])
    say = lambda line: print(json.dumps(line), file=sys.__stdout__, flush=True)

    def wait():
        say({"ready": True})
        sys.stdin.readline()

    jax.config.update("jax_default_device", jax.devices(job.pop("platform"))[0])  # for all threads
    with contextlib.redirect_stdout(sys.stderr):
        shapes = sets.shapes(job.pop("set"))[: job.pop("tensors", None)]
        say(measure(shapes, wait=wait, **job))
    os._exit(0)  # a compilation that came too late would go on


if __name__ == "__main__":
    main()
