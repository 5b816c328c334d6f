"""optax.lamb beside ours and beside the float64 model, over 100 steps: who drifts from whom."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def test_control_another_formula_is_further_away():
    """The tolerances above tell one formula from its neighbour."""
    params, grads = helpers.tree(), helpers.gradients(STEPS)
    peer, _ = helpers.run_updates(optax.lamb(1e-2, weight_decay=0.01), params, grads)
    for other in (dict(decay="decoupled"), dict(correction="none"), dict(eps=1e-3), dict(b2=0.998)):
        model = helpers.run_model(params, grads, model64.Rules(**{"weight_decay": 0.01, **other}), 1e-2)
        assert max(helpers.error(a, b) for a, b in zip(model.p, peer)) > 5e-5, other
