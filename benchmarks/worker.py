"""Measures the contenders of one framework, in this process: `python -m benchmarks.worker '{"framework": "jax", ...}'`.

They take turns, A B C A B C, so that whatever else the machine does meets all of them alike. The last line
on standard output is the result, as JSON.
"""

import gc
import json
import sys
import time

import numpy as np
from tqdm import tqdm

from benchmarks import process, sets

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


class Contender:
    """One way to step the tensors."""

    steps = 1         # how many steps one call of `step` takes
    path = None       # what was compiled, for ours: "fused" or "reference"
    temporary = None  # bytes of temporary memory by the compiler's account, where it gives one

    def prepare(self):
        """Traces and compiles; returns the seconds of each."""
        return None, None

    def ready(self):
        """Whatever has to come before a step and is no part of it."""

    def step(self):
        """Takes `steps` steps, until their results are there."""
        raise NotImplementedError


def values(shapes):
    """For each shape a parameter and a gradient, of a size as in training."""
    random = np.random.default_rng(0)
    for shape in shapes:
        yield 0.02 * random.standard_normal(shape, np.float32), 1e-3 * random.standard_normal(shape, np.float32)


def measure(contenders, repeats):
    """Times and memory of each contender, {name: figures}."""
    results = {}
    for name, contender in contenders.items():
        print(f"  {name}: trace, compile", file=sys.stderr)
        trace, compile = contender.prepare()
        contender.ready()
        contender.step()  # the first step touches its memory for the first time
        gc.collect()
        contender.ready()
        before, counted = process.resident(), process.reset_peak()
        contender.step()
        above = max(0, process.peak() - before) if counted else None
        results[name] = {"path": contender.path, "trace_s": trace, "compile_s": compile,
                         "peak_above_arrays_bytes": above, "temporary_bytes": contender.temporary, "seconds": []}
    for _ in tqdm(range(repeats), desc="  rounds", file=sys.stderr, leave=False, disable=None):
        for name, contender in contenders.items():
            contender.ready()
            begin = time.perf_counter()
            contender.step()
            results[name]["seconds"].append((time.perf_counter() - begin) / contender.steps)
    return results


def main():
    job = json.loads(sys.argv[1])
    if job["framework"] == "jax":
        from benchmarks import contenders_jax as framework
    else:
        from benchmarks import contenders_tensorflow as framework
    contenders, about = framework.contenders(sets.shapes(job["set"]), set(job["contenders"]), job["loop"])
    results = measure(contenders, job["repeats"])
    print(json.dumps({"results": results, "peak_bytes": process.peak(), **about()}))


if __name__ == "__main__":
    main()
