"""The same bits in every run and for every number of threads; many threads at once; a pool of one."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import xla_lamb
from xla_lamb import library

# Prints the number of threads in XLA's pool, which NPROC sets, and a hash of what three steps leave.
RUN = """
import glob, hashlib
import jax, numpy as np
import helpers, xla_lamb
shapes = [(700, 1001), (4097,), (64, 33), (3,)] + [(257,)] * 70
params, grads = helpers.tree(shapes), helpers.gradients(3, shapes)
opt = xla_lamb.lamb(1e-2, variant="nvlamb", layer_axes=[0, 0, 1, 0] + [0] * 70, implementation="fused")
result = helpers.run_steps(opt, params, grads, stats=False)
assert all(np.all(np.isfinite(x)) for x in result[0])
names = [open(f).read().strip() for f in glob.glob("/proc/self/task/*/comm")]
print("threads", names.count("tf_XLAEigen"))
print("bits", hashlib.sha256(repr(helpers.bits(result)).encode()).hexdigest())
"""


def run(nproc, **environment):
    words = helpers.python(RUN, NPROC=nproc, **environment).stdout.split()
    return int(words[words.index("threads") + 1]), words[words.index("bits") + 1]


def test_same_bits_for_every_number_of_threads():
    runs = [run(n) for n in (1, 2, 8, 8)]
    assert [threads for threads, _ in runs] == [1, 2, 8, 8], "NPROC no longer sets the pool's size: find what does"
    assert len({bits for _, bits in runs}) == 1


def test_same_bits_with_every_instruction_set():
    best = library.load().instruction_set
    lesser = {"avx512": ["avx2", "baseline"], "avx2": ["baseline"], "baseline": []}[best]
    assert len({run(2, XLA_LAMB_CPU=cpu)[1] for cpu in ["", *lesser]}) == 1
    for cpu in lesser:  # or the runs above would all have been of one set
        code = "from xla_lamb import library; print(library.load().instruction_set)"
        assert helpers.python(code, XLA_LAMB_CPU=cpu).stdout.strip() == cpu


def test_different_input_gives_different_bits():
    """The hash above sees what it should."""
    a, b = (helpers.run_steps(xla_lamb.lamb(1e-2), helpers.tree(), helpers.gradients(1, seed=s)) for s in (1, 2))
    assert helpers.bits(a) != helpers.bits(b)


def models(n):
    shapes = [(200, 301), (4097,), (5,)]
    return [(helpers.tree(shapes, seed=i), helpers.gradients(5, shapes, seed=100 * i + 1)) for i in range(n)]


def test_four_threads_step_four_models():
    """One optimizer, used by all at once: nothing in it may be shared by mistake, and a busy pool may not deadlock."""
    opt = xla_lamb.lamb(1e-2, variant="nvlamb", implementation="fused")
    inputs = models(4)
    expected = [helpers.bits(helpers.run_steps(opt, p, g)) for p, g in inputs]
    step = jax.jit(opt.step)
    start, results = threading.Barrier(4), [None] * 4

    def work(i):
        p, s = [jnp.asarray(x) for x in inputs[i][0]], opt.init(inputs[i][0])
        start.wait()
        for _ in range(10):
            q, r = p, s
            for g in inputs[i][1]:
                q, r = step(g, r, q)
            results[i] = helpers.bits((q, r))
            assert results[i] == expected[i]

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.is_alive() for t in threads), "deadlock"
    assert results == expected


ONE_THREAD = """
import threading
import jax, jax.numpy as jnp
import helpers, xla_lamb
shapes = [(700, 1001), (4097,)] + [(257,)] * 70
opt = xla_lamb.lamb(1e-2, variant="nvlamb", implementation="fused")
params, grads = helpers.tree(shapes), helpers.gradients(1, shapes)[0]
step = jax.jit(opt.step)
def work():
    p, s = params, opt.init(params)
    for _ in range(3):
        p, s = step(grads, s, p)
    jax.block_until_ready(p)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("done")
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_busy_pool_does_not_deadlock(nproc):
    """Four steps at once, of several calls each, in a pool of one thread (or two): each handler runs on a thread of that pool."""
    assert "done" in helpers.python(ONE_THREAD, NPROC=nproc, timeout=120).stdout


def test_pool_occupied_by_other_work():
    """Steps beside long matrix products in the same pool."""
    opt = xla_lamb.lamb(1e-2, implementation="fused")
    params, grads = models(1)[0]
    expected = helpers.bits(helpers.run_steps(opt, params, grads))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(700, 700)).astype(np.float32)) / 30
    burn = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ x), x))
    pending = [burn(x + i) for i in range(4)]
    assert helpers.bits(helpers.run_steps(opt, params, grads)) == expected
    jax.block_until_ready(pending)
