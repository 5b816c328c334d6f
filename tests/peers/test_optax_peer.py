"""optax.lamb beside ours and beside the float64 model, over 100 steps: who drifts from whom."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import helpers
import model64
import xla_lamb

STEPS = 100
MASK = [True, False, True, True, False, True]
CASES = {
    "plain": (dict(learning_rate=1e-2), {}, {}),
    "decay": (dict(learning_rate=1e-2, weight_decay=0.01), dict(weight_decay=0.01), {}),
    "mask": (dict(learning_rate=1e-2, weight_decay=0.01, mask=MASK), dict(weight_decay=0.01), dict(decay_mask=MASK)),
    "all": (
        dict(learning_rate=5e-3, b1=0.8, b2=0.99, eps=1e-4, eps_root=1e-6, weight_decay=0.02),
        dict(b1=0.8, b2=0.99, eps=1e-4, eps_root=1e-6, weight_decay=0.02),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hundred_steps(case):
    arguments, rules, lists = CASES[case]
    params, grads = helpers.tree(), helpers.gradients(STEPS)
    model = helpers.run_model(params, grads, model64.Rules(**rules), arguments["learning_rate"], **lists)
    peer, peer_state = helpers.run_updates(optax.lamb(**arguments), params, grads)
    helpers.assert_near(peer, model.p, 2e-6)  # the model is the peer's formula
    for implementation in ("fused", "reference"):
        p, s = helpers.run_steps(xla_lamb.lamb(**arguments, implementation=implementation), params, grads)
        helpers.assert_near(p, model.p, 1e-6)
        helpers.assert_near(p, peer, 2e-6)
        assert jax.tree.structure(s) == jax.tree.structure(peer_state)


def test_schedule():
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 2e-2, 20, STEPS)
    params, grads = helpers.tree(), helpers.gradients(STEPS)
    rate = lambda count: float(schedule(jnp.int32(count)))  # noqa: E731
    model = helpers.run_model(params, grads, model64.Rules(weight_decay=0.01), rate)
    peer, _ = helpers.run_updates(optax.lamb(schedule, weight_decay=0.01), params, grads)
    p, _ = helpers.run_steps(xla_lamb.lamb(schedule, weight_decay=0.01), params, grads)
    helpers.assert_near(peer, model.p, 2e-6)
    helpers.assert_near(p, model.p, 1e-6)


def test_float64(x64):
    params, grads = helpers.tree(dtype=np.float64), helpers.gradients(STEPS, dtype=np.float64)
    peer, _ = helpers.run_updates(optax.lamb(1e-2, weight_decay=0.01), params, grads)
    p, _ = helpers.run_steps(xla_lamb.lamb(1e-2, weight_decay=0.01), params, grads)
    helpers.assert_near(p, peer, 1e-13)


def test_groups():
    """Two LAMBs in multi_transform, each with its own schedule and decay."""
    labels = ["even" if i % 2 == 0 else "odd" for i in range(len(MASK))]
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 2e-2, 20, STEPS)
    groups = lambda lamb: {"even": lamb(schedule, weight_decay=0.1), "odd": lamb(1e-3, b1=0.5)}
    params, grads = helpers.tree(), helpers.gradients(STEPS)
    (p, s), (q, r) = (helpers.run_updates(optax.multi_transform(groups(lamb), labels), params, grads) for lamb in (xla_lamb.lamb, optax.lamb))
    assert jax.tree.structure(s) == jax.tree.structure(r)
    rate = lambda count: float(schedule(jnp.int32(count)))
    for start, rules, learning_rate in ((0, dict(weight_decay=0.1), rate), (1, dict(b1=0.5), 1e-3)):
        model = helpers.run_model(params[start::2], [g[start::2] for g in grads], model64.Rules(**rules), learning_rate)
        helpers.assert_near(p[start::2], model.p, 1e-6)
        helpers.assert_near(q[start::2], model.p, 4e-6)


def test_exclusion_from_layer_adaptation():
    """optax.lamb has no such argument: its users write the chain by hand, with a mask around the trust ratio too. The state goes back and forth."""
    shapes, schedule = [(3, 5), (5,), (7, 2)], optax.linear_schedule(2e-2, 1e-3, STEPS)
    as_dict = lambda arrays: dict(zip(("kernel", "bias", "out"), arrays))
    params, grads = as_dict(helpers.tree(shapes)), [as_dict(g) for g in helpers.gradients(STEPS, shapes)]
    mask = {"kernel": True, "bias": False, "out": True}
    peer = optax.chain(
        optax.scale_by_adam(eps=1e-6),
        optax.add_decayed_weights(0.1, mask),
        optax.masked(optax.scale_by_trust_ratio(), mask),
        optax.scale_by_learning_rate(schedule),
    )
    ours = xla_lamb.lamb(schedule, weight_decay=0.1, variant="tf_addons", exclude_from_weight_decay=["bias"])
    q, r = helpers.run_updates(peer, params, grads)
    p, _ = helpers.run_steps(ours, params, grads)
    helpers.assert_near(p, q, 1e-5)  # the bias is not scaled to its norm: the peer's rounding of 1 - b2^t shows
    p, s = helpers.run_updates(optax.GradientTransformation(peer.init, ours.update), params, grads)
    helpers.assert_near(p, q, 1e-5)
    assert jax.tree.structure(s) == jax.tree.structure(r)


# What optax's own tests ask of every optimizer, on problems of ours.

PROBLEMS = {
    "bowl": (lambda x: jnp.sum(jnp.square(x["a"] - 1.0)) + 3.0 * jnp.square(x["b"] - 0.5), {"a": np.full(2, 3.0, np.float32), "b": np.float32(2.0)}),
    "valley": (lambda x: jnp.square(1.0 - x["a"]) + 50.0 * jnp.square(x["b"] - x["a"] ** 2), {"a": np.float32(2.0), "b": np.float32(3.0)}),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_finds_the_minimum(problem):
    loss, start = PROBLEMS[problem]
    losses = []
    for lamb in (xla_lamb.lamb, optax.lamb):
        tx = optax.inject_hyperparams(lamb)(learning_rate=optax.cosine_decay_schedule(2e-2, 2000))

        def body(carry, _, tx=tx):
            x, state = carry
            updates, state = tx.update(jax.grad(loss)(x), state, x)
            return (optax.apply_updates(x, updates), state), loss(x)

        (x, _), curve = jax.jit(lambda x: jax.lax.scan(body, (x, tx.init(x)), length=2000))(start)
        assert loss(x) < 1e-4 < 1 < loss(start)
        losses.append(curve)
    ours, theirs = losses
    np.testing.assert_allclose(ours[:100], theirs[:100], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_of_updates(dtype):
    params = {"w": jnp.full((3, 2), 2.0, dtype), "zero": jnp.zeros(3, dtype)}
    grads = {"w": jnp.full((3, 2), 0.5, dtype), "zero": jnp.zeros(3, dtype)}
    updates = []
    for lamb in (xla_lamb.lamb, optax.lamb):
        tx = lamb(1e-2)
        u, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        updates.append(u)
    for ours, theirs in zip(*(map(np.asarray, jax.tree.leaves(u)) for u in updates)):
        assert ours.dtype == theirs.dtype == jnp.dtype(dtype) and ours.shape == theirs.shape
        assert helpers.ulps(ours, theirs, theirs.dtype) <= 2
    assert np.all(np.asarray(updates[0]["zero"]) == 0)


def test_arguments_of_others_are_passed_by():
    params, grads = {"w": np.full((3, 2), 2.0, np.float32)}, {"w": np.full((3, 2), 0.5, np.float32)}
    for lamb in (xla_lamb.lamb, optax.lamb):
        tx = optax.chain(lamb(1e-2), optax.contrib.reduce_on_plateau())
        updates, _ = tx.update(grads, tx.init(params), params, value=jnp.float32(3), something="else")
        expected, _ = lamb(1e-2).update(grads, lamb(1e-2).init(params), params)
        assert helpers.bits(updates) == helpers.bits(expected)


def test_control_another_formula_is_further_away():
    """The tolerances above tell one formula from its neighbour."""
    params, grads = helpers.tree(), helpers.gradients(STEPS)
    peer, _ = helpers.run_updates(optax.lamb(1e-2, weight_decay=0.01), params, grads)
    for other in (dict(decay="decoupled"), dict(correction="none"), dict(eps=1e-3), dict(b2=0.998)):
        model = helpers.run_model(params, grads, model64.Rules(**{"weight_decay": 0.01, **other}), 1e-2)
        assert max(helpers.error(a, b) for a, b in zip(model.p, peer)) > 5e-5, other
