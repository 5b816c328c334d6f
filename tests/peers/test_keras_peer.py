"""keras.optimizers.Lamb beside variant="keras" and the float64 model, over 100 steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import helpers
import model64
import xla_lamb
import xla_lamb.tensorflow as ours

STEPS = 100
SHAPES = [(3, 5), (17,), (1,), (7, 3, 2), (4097,)]
MASK = [True, False, True, True, False]


def run_keras(params, grads, decay, learning_rate, mask=None):
    variables = [keras.Variable(x, name=f"{'skipped' if mask and not m else 'taken'}{i}") for i, (x, m) in enumerate(zip(params, mask or params))]
    optimizer = keras.optimizers.Lamb(learning_rate, weight_decay=decay)
    if mask:
        optimizer.exclude_from_weight_decay(var_names=["skipped"])
    optimizer.build(variables)

    @tf.function(jit_compile=True)
    def step(grads):
        optimizer.apply(grads, variables)

    for g in grads:
        step([tf.constant(x) for x in g])
    return [np.asarray(v) for v in variables]


@pytest.mark.parametrize("decay", [None, 0.004])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
def test_hundred_steps(decay, mask):
    params, grads = helpers.tree(SHAPES), helpers.gradients(STEPS, SHAPES)
    model = helpers.run_model(params, grads, model64.PRESETS["keras"].replace(weight_decay=decay or 0.0), 1e-2, decay_mask=mask)
    peer = run_keras(params, grads, decay, 1e-2, mask)
    helpers.assert_near(peer, model.p, 2e-6)  # the model is the peer's formula
    for implementation in ("fused", "reference"):
        options = dict(variant="keras", weight_decay=decay, mask=mask, implementation=implementation)
        p, _ = helpers.run_steps(xla_lamb.lamb(1e-2, **options), params, grads)
        helpers.assert_near(p, model.p, 1e-6)
        helpers.assert_near(p, peer, 2e-6)


def test_hundred_steps_on_variables():
    params, grads = helpers.tree(SHAPES), helpers.gradients(STEPS, SHAPES)
    peer = run_keras(params, grads, 0.004, 1e-2)
    variables = [tf.Variable(x) for x in params]
    state = ours.init_state(variables)

    @tf.function(jit_compile=True)
    def step(grads):
        ours.lamb_step(variables, grads, state, 1e-2, variant="keras", weight_decay=0.004)

    for g in grads:
        step([tf.constant(x) for x in g])
    helpers.assert_near([v.numpy() for v in variables], peer, 2e-6)


def test_control_optax_is_another_formula():
    params, grads = helpers.tree(SHAPES), helpers.gradients(STEPS, SHAPES)
    peer = run_keras(params, grads, 0.004, 1e-2)
    p, _ = helpers.run_steps(xla_lamb.lamb(1e-2, weight_decay=0.004), params, grads)
    assert max(helpers.error(a, b) for a, b in zip(p, peer)) > 1e-4
