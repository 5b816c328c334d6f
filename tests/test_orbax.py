"""Orbax checkpoints of optax.lamb and of xla_lamb.lamb, each loaded into the other in the middle of a run."""

import functools
import os
import re
import signal
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import helpers
import model64
import xla_lamb

NEAR = 2e-6  # ours against optax.lamb, of each parameter's largest value
SHAPES = {"dense": {"kernel": (3, 5), "bias": (5,)}, "norm": {"scale": (5,)}}
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 2e-2, 4, 20)
HALF = 4


def matrices(params):
    return jax.tree.map(lambda x: np.ndim(x) > 1, params)


def tree(seed, scale=1.0, dtype=np.float32):
    leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return structure.unflatten(helpers.tree(leaves, seed, scale, dtype))


def gradients(first, last, dtype=np.float32):
    return [tree(100 + i, 0.1 * (1 + i % 3), dtype) for i in range(first, last)]


def save(path, value):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, value)


def load(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def both(**arguments):
    return {"ours": xla_lamb.lamb(**arguments), "peer": optax.lamb(**arguments)}


@functools.lru_cache(maxsize=None)
def compiled(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, params, state, grads):
    for g in grads:
        params, state = compiled(tx)(params, state, g)
    return params, state


# Arguments that change the tree of the state; those of both, and what only ours has.
CASES = {
    "number": dict(learning_rate=1e-2),
    "schedule": dict(learning_rate=SCHEDULE, weight_decay=0.1),
    "mask": dict(learning_rate=SCHEDULE, weight_decay=0.1, mask=matrices),
    "scheduled decay": dict(learning_rate=1e-2, weight_decay=optax.linear_schedule(0.2, 0.0, 8), mask=matrices),
}


@pytest.mark.parametrize("case", CASES)
def test_in_the_middle_of_a_run(tmp_path, case):
    makers = both(**CASES[case])
    params = tree(0)
    whole = {who: run(tx, params, tx.init(params), gradients(0, 2 * HALF)) for who, tx in makers.items()}
    for who, tx in makers.items():
        save(tmp_path / who, dict(zip(("params", "opt_state"), run(tx, params, tx.init(params), gradients(0, HALF)))))
    for source, target in (("ours", "ours"), ("peer", "ours"), ("ours", "peer")):
        restored = load(tmp_path / source, {"params": params, "opt_state": makers[target].init(params)})
        p, s = run(makers[target], restored["params"], restored["opt_state"], gradients(HALF, 2 * HALF))
        assert int(helpers.moments(s)[0]) == 2 * HALF
        for expected_params, expected_state in whole.values():
            helpers.assert_near(p, expected_params, NEAR)
            helpers.assert_near(s, expected_state, 2e-5)
        if source == target:
            assert helpers.bits((p, s)) == helpers.bits(whole["ours"])


def test_control_a_lost_state_shows(tmp_path):
    """Parameters that go on without their moments end elsewhere."""
    tx, params = xla_lamb.lamb(1e-2), tree(0)
    expected, _ = run(tx, params, tx.init(params), gradients(0, 2 * HALF))
    middle, _ = run(tx, params, tx.init(params), gradients(0, HALF))
    p, _ = run(tx, middle, tx.init(middle), gradients(HALF, 2 * HALF))
    assert max(map(helpers.error, jax.tree.leaves(p), jax.tree.leaves(expected))) > 1e-3


def test_train_state_and_exclusion_list(tmp_path):
    """A TrainState of optax.lamb with a mask becomes one of ours with a list, and back."""
    model, x = nn.Dense(5), np.ones((2, 3), np.float32)
    variables = model.init(jax.random.key(0), x)
    made = {
        "peer": optax.lamb(SCHEDULE, weight_decay=0.1, mask=matrices),
        "ours": xla_lamb.lamb(SCHEDULE, weight_decay=0.1, exclude_from_weight_decay=["bias"]),
    }
    create = lambda who: TrainState.create(apply_fn=model.apply, params=variables["params"], tx=made[who]).replace(step=jnp.int32(0))
    step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(lambda p: jnp.sum(jnp.square(s.apply_fn({"params": p}, x) - 1)))(s.params)))

    def go_on(state, steps):
        for _ in range(steps):
            state = step(state)
        return state

    expected = go_on(create("peer"), 2 * HALF)
    for source, target in (("peer", "ours"), ("ours", "peer")):
        save(tmp_path / source, go_on(create(source), HALF))
        state = load(tmp_path / source, create(target))
        assert state.tx is made[target] and int(state.step) == HALF
        state = go_on(state, HALF)
        helpers.assert_near(state.params, expected.params, 2e-5)  # the bias is all update, in which optax rounds 1 - b2^t
        assert int(state.step) == int(helpers.moments(state.opt_state)[0]) == 2 * HALF


def test_nnx_optimizer(tmp_path):
    x = np.ones((2, 3), np.float32)
    makers = both(learning_rate=SCHEDULE, weight_decay=0.1)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(jnp.square(model(x) - 1)))(model))

    def create(who, steps):
        model = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, makers[who], wrt=nnx.Param)
        for _ in range(steps):
            step(model, optimizer)
        return model, optimizer

    expected, _ = create("peer", 2 * HALF)
    for source, target in (("peer", "ours"), ("ours", "peer")):
        save(tmp_path / source, nnx.state(create(source, HALF)))
        taken = create(target, 0)
        nnx.update(taken, load(tmp_path / source, nnx.state(taken)))
        assert int(taken[1].step[...]) == HALF
        for _ in range(HALF):
            step(*taken)
        helpers.assert_near(nnx.state(taken[0]), nnx.state(expected), 2e-5)


# 16 bits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
def test_moments_of_sixteen_bit_parameters(tmp_path, dtype):
    """optax.lamb keeps them in the parameters' type. Ours are float32: into its state they are cast, and the numbers are the same."""
    theirs, ours, params = optax.lamb(1e-2), xla_lamb.lamb(1e-2), tree(0, dtype=dtype)
    p, s = run(theirs, params, theirs.init(params), gradients(0, HALF, dtype))
    assert {x.dtype for x in jax.tree.leaves(helpers.moments(s)[1:])} == {np.dtype(dtype)}
    save(tmp_path / "peer", {"params": p, "opt_state": s})
    restored = load(tmp_path / "peer", {"params": params, "opt_state": ours.init(params)})["opt_state"]
    assert {x.dtype for x in jax.tree.leaves(helpers.moments(restored)[1:])} == {np.dtype(np.float32)}
    assert jax.tree.map(np.array_equal, restored, s) == jax.tree.map(lambda _: True, s)

    model = model64.State(*([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (p, *helpers.moments(s)[1:])), HALF)
    for g in gradients(HALF, 2 * HALF, dtype):
        model, _ = model64.step(model, jax.tree.leaves(g), model64.PRESETS["optax"], 1e-2, store_p=dtype)
    q, r = run(ours, p, restored, gradients(HALF, 2 * HALF, dtype))
    for a, e in zip(jax.tree.leaves(q), model.p):
        assert helpers.ulps(a, e, dtype) <= 2
    save(tmp_path / "ours", {"params": q, "opt_state": r})
    back = load(tmp_path / "ours", {"params": params, "opt_state": s})["opt_state"]
    assert jax.tree.map(np.array_equal, back, jax.tree.map(lambda new, old: new.astype(old.dtype), r, s)) == jax.tree.map(lambda _: True, s)

    # As they were saved: bfloat16 is a moment's type that we have, float16 is none: its squares underflow.
    as_saved = load(tmp_path / "peer", {"params": params, "opt_state": s})["opt_state"]
    if dtype == np.float16:
        with pytest.raises(TypeError, match=r"the state of dense/bias, a float16 parameter.* not float16: .*init\(params\)"):
            ours.update(gradients(0, 1, dtype)[0], as_saved, p)
    else:
        _, after = run(ours, p, as_saved, gradients(HALF, HALF + 1, dtype))
        assert {x.dtype for x in jax.tree.leaves(helpers.moments(after)[1:])} == {np.dtype(dtype)}


# What is refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, params = tmp_path_factory.mktemp("orbax") / "optax", tree(0)
    save(path, {"params": params, "opt_state": optax.lamb(1e-2).init(params)})
    return path


def test_checkpoint_of_another_model(checkpoint):
    """Orbax names the tensors."""
    params = {**tree(0), "head": {"kernel": np.ones((5, 2), np.float32)}}
    with pytest.raises(ValueError, match=r"mu\.head"):
        load(checkpoint, {"params": params, "opt_state": xla_lamb.lamb(1e-2).init(params)})


def test_checkpoint_of_another_shape(checkpoint):
    params = tree(0)
    restored = load(checkpoint, {"params": params, "opt_state": xla_lamb.lamb(1e-2).init(params)})["opt_state"]
    params["dense"]["kernel"] = np.ones((3, 7), np.float32)
    with pytest.raises(ValueError, match=r"\(3, 7\).*\(3, 5\)"):  # Orbax
        load(checkpoint, {"params": params, "opt_state": xla_lamb.lamb(1e-2).init(params)})
    with pytest.raises(ValueError, match=re.escape("the first moment in the state of dense/kernel has shape (3, 5), the parameter (3, 7)")):
        xla_lamb.lamb(1e-2).update(params, restored, params)


def test_checkpoint_of_other_arguments(checkpoint):
    """A schedule has a counter in the state, and a mask a field, in optax.lamb as in ours."""
    params = tree(0)
    for lamb in (xla_lamb.lamb, optax.lamb):
        with pytest.raises(ValueError, match=r"opt_state\[3\]"):
            load(checkpoint, {"params": params, "opt_state": lamb(SCHEDULE).init(params)})


def test_checkpoint_without_a_target(checkpoint):
    """Lists and dictionaries are no optimizer's state: the error says what to do."""
    params, restored = tree(0), load(checkpoint)
    with pytest.raises(ValueError, match=r"not the state of LAMB.*list of dict.*init\(params\) as its target"):
        xla_lamb.lamb(1e-2).update(params, restored["opt_state"], params)


# Killed -------------------------------------------------------------------------------------------------------------------

TRAIN = """
import sys
import orbax.checkpoint as ocp
import test_orbax as this

def train(tx, path):
    params = this.tree(0)
    state = tx.init(params)
    manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    for i in range(100_000):
        params, state = this.run(tx, params, state, this.gradients(i, i + 1))
        manager.save(i + 1, args=ocp.args.StandardSave({"params": params, "opt_state": state}))
        yield i + 1

makers = this.both(**this.CASES["mask"])
for steps in zip(*(train(tx, f"{sys.argv[1]}/{who}") for who, tx in makers.items())):
    print(*steps, flush=True)
"""


def test_killed_and_taken_over_by_the_other(tmp_path):
    """A process that trains with both saves every step, and is killed while it saves one; from the last whole checkpoint the other goes on."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(helpers.TESTS), str(helpers.ROOT)]))
    child = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert any(line == "4 4\n" for line in child.stdout), "it ended by itself"
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL

    makers = both(**CASES["mask"])
    params = tree(0)
    for source in makers:
        with ocp.CheckpointManager(tmp_path / source) as manager:
            last = manager.latest_step()
            for target, tx in makers.items():
                start = {"params": params, "opt_state": tx.init(params)}
                restored = manager.restore(last, args=ocp.args.StandardRestore(start))
                assert int(helpers.moments(restored)[0]) == last >= 1
                p, s = run(tx, restored["params"], restored["opt_state"], gradients(last, last + HALF))
                expected = run(tx, params, start["opt_state"], gradients(0, last + HALF))  # as if nobody had been killed
                helpers.assert_near(p, expected[0], NEAR)
                if source == target:
                    assert helpers.bits((p, s)) == helpers.bits(expected)
