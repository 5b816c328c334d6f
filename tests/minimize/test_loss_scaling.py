"""LossScaling: the scale, the counters and the weights of keras.optimizers.LossScaleOptimizer, and steps that change nothing."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import helpers
import xla_lamb.minimize as minimize
from xla_lamb.keras import Lamb
from xla_lamb.minimize import LossScaling

BACKEND = keras.backend.backend()
RATE = 0.05
SHAPES = [(3, 5), (7,), (4,)]
NEAR = 5e-6  # of the largest value of a variable, as in test_keras.py
INNER = {
    "lamb": (lambda: Lamb(RATE, variant="keras"), lambda: keras.optimizers.Lamb(RATE)),
    "adam": (lambda: keras.optimizers.Adam(RATE),) * 2,
}


def built(optimizer, dtype="float32"):
    """Variables, and the optimizer that was built with them."""
    variables = [keras.Variable(x, dtype=dtype, name=f"v{i}") for i, x in enumerate(helpers.tree(SHAPES))]
    optimizer.build(variables)
    return variables


def apply(optimizer, grads, variables, run=None):
    """As in Model.fit: in place on TensorFlow, on the values of variables on JAX."""
    grads = [ops.convert_to_tensor(g) for g in grads]
    if BACKEND == "tensorflow":
        return optimizer.apply(grads, variables)
    run = run or optimizer.stateless_apply
    states = run([v.value for v in optimizer.variables], grads, [v.value for v in variables])[::-1]
    for targets, new in zip((optimizer.variables, variables), states):
        for v, value in zip(targets, new):
            v.assign(value)


def values(variables):
    return [ops.convert_to_numpy(v) for v in variables]


def poisoned(grads, value):
    """With one element of the last gradient alone."""
    grads = [g.copy() for g in grads]
    grads[-1][1] = value
    return grads


# The numbers of keras.optimizers.LossScaleOptimizer --------------------------------------------------------------------------

SEQUENCE = [None, None, None, np.inf, None, None, np.nan, -np.inf, None, None, None]  # what is in the gradients besides numbers


def trace(optimizer, inner):
    """(scale, counter, iterations) after each step; gradients are those of a loss that was multiplied by the scale."""
    variables = built(optimizer)
    run = None if BACKEND == "tensorflow" else jax.jit(optimizer.stateless_apply)  # Keras's jax.lax.cond would be compiled in every step
    rows = []
    for g, bad in zip(helpers.gradients(len(SEQUENCE), SHAPES, scale=1.0), SEQUENCE):
        scale = np.float32(ops.convert_to_numpy(optimizer.scale_loss(np.float32(1.0))))
        g = [x * scale for x in g]
        apply(optimizer, g if bad is None else poisoned(g, bad), variables, run)
        rows.append(tuple(float(x) for x in (optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations)))
    return rows, values(variables), values(inner.variables)


@pytest.mark.parametrize("kind", INNER)
def test_dynamic_scale_like_keras_step_by_step(kind):
    (ours, theirs), options = (make() for make in INNER[kind]), dict(initial_scale=8.0, dynamic_growth_steps=2)
    rows, weights, state = trace(LossScaling(ours, **options), ours)
    peer_rows, peer_weights, peer_state = trace(keras.optimizers.LossScaleOptimizer(theirs, **options), theirs)
    assert rows == peer_rows
    assert [scale for scale, _, _ in rows] == [8, 16, 16, 8, 8, 16, 8, 4, 4, 8, 8]  # grown, kept, halved, counted anew
    assert rows[-1][1:] == (1, 8)
    helpers.assert_near(weights, peer_weights, NEAR)
    helpers.assert_near(state, peer_state, NEAR)


def test_control_another_growth_is_seen():
    ours, theirs = (make() for make in INNER["adam"])
    rows, weights, _ = trace(LossScaling(ours, 8.0, 3), ours)
    peer_rows, peer_weights, _ = trace(keras.optimizers.LossScaleOptimizer(theirs, 8.0, 2), theirs)
    assert rows != peer_rows
    helpers.assert_near(weights, peer_weights, NEAR)  # a scale in powers of two is not seen in the weights


@pytest.mark.parametrize("kind", INNER)
def test_static_scale_like_keras_loss_scale_factor(kind):
    """A factor that is no power of two, and a step in the middle that does not happen."""
    ours, theirs = LossScaling(INNER[kind][0](), 24.0, dynamic=False), INNER[kind][1]()
    theirs.loss_scale_factor = 24.0
    a, b = built(ours), built(theirs)
    for i, g in enumerate(helpers.gradients(5, SHAPES, scale=1.0)):
        g = [x * np.float32(24) for x in g]
        apply(ours, poisoned(g, np.nan) if i == 2 else g, a)
        if i != 2:
            apply(theirs, g, b)
    helpers.assert_near(values(a), values(b), NEAR)
    assert int(ours.iterations) == 4 and float(ours.loss_scale) == 24.0
    assert len(ours.variables) == len(ours.inner.variables)  # nothing to keep for a scale that stays
    wrong = built(INNER[kind][1]())
    assert max(map(helpers.error, values(wrong), values(b))) > 100 * NEAR


def test_mixed_float16_model_trains_as_with_keras():
    """Its compile adds no second loss scaling. The first steps overflow float16."""
    histories, scales = [], []
    for optimizer in (
        LossScaling(Lamb(RATE, variant="keras"), 2.0**24, 3),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(RATE), 2.0**24, 3),
    ):
        keras.utils.set_random_seed(1)
        policy = keras.mixed_precision.DTypePolicy("mixed_float16")
        x = keras.Input((5,))
        layers = [keras.layers.Dense(n, activation="tanh", bias_initializer="random_normal", dtype=policy) for n in (7, 2)]
        model = keras.Model(x, layers[1](layers[0](x)))
        model.dtype_policy = policy  # what compile looks at
        model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
        assert model.optimizer is optimizer
        data = np.random.default_rng(0).normal(size=(80, 5)).astype("float32")
        fit = model.fit(data, data[:, :2] + 1, batch_size=8, epochs=3, shuffle=False, verbose=0)
        histories.append(fit.history["loss"])
        scales.append((float(optimizer.dynamic_scale), int(optimizer.iterations)))
    assert scales[0] == scales[1]
    assert 10 < scales[0][1] < 28  # of 30 steps some were skipped
    # Weights that differ by float32's rounding now and then round to another float16, which is 1e-3 of an activation.
    np.testing.assert_allclose(*histories, rtol=1e-3)
    assert histories[0][-1] < 0.9 * histories[0][0]


# Steps that do not happen ---------------------------------------------------------------------------------------------------

AROUND = {
    "lamb": lambda: LossScaling(Lamb(RATE, weight_decay=0.1)),
    "lamb of Keras": lambda: LossScaling(keras.optimizers.Lamb(RATE, weight_decay=0.1)),
    "adam": lambda: LossScaling(keras.optimizers.Adam(RATE, weight_decay=0.1, amsgrad=True, clipvalue=0.1)),
    "static": lambda: LossScaling(Lamb(RATE), dynamic=False),
    "lamb that clips": lambda: LossScaling(Lamb(RATE, global_clipnorm=0.1, nonfinite="skip")),
    "lamb that clips values": lambda: LossScaling(Lamb(RATE, clipvalue=0.1)),
    "value": lambda: LossScaling(minimize.ClipByValue(Lamb(RATE), 0.1)),
    "norm": lambda: LossScaling(minimize.ClipByNorm(keras.optimizers.SGD(RATE, 0.9), 0.1)),
    "global norm": lambda: LossScaling(minimize.ClipByGlobalNorm(Lamb(RATE), 0.1)),
    "decay": lambda: LossScaling(minimize.DecoupledWeightDecay(Lamb(RATE), 0.1)),
    "averages": lambda: LossScaling(minimize.StochasticWeightAveraging(minimize.MovingAverage(Lamb(RATE)), period=1)),
    "average of a guest": lambda: LossScaling(minimize.MovingAverage(keras.optimizers.Adam(RATE))),
    "average outside": lambda: minimize.MovingAverage(LossScaling(Lamb(RATE))),
    "lookahead": lambda: LossScaling(minimize.Lookahead(Lamb(RATE), sync_period=2)),
    "accumulation": lambda: LossScaling(minimize.GradientAccumulation(Lamb(RATE), 2)),
    "hidden": lambda: LossScaling(minimize.OptimizerWrapper(Lamb(RATE), transform_gradients=without_infinities)),
    "hidden between clippers": lambda: LossScaling(
        minimize.ClipByValue(minimize.OptimizerWrapper(minimize.ClipByGlobalNorm(Lamb(RATE), 0.1), transform_gradients=without_infinities), 0.1)
    ),
}


def without_infinities(grads_and_vars):
    """What somebody does who has not heard of loss scaling."""
    return [(ops.where(ops.isfinite(g), g, ops.zeros_like(g)), v) for g, v in grads_and_vars]


@pytest.mark.parametrize("name", AROUND)
def test_a_skipped_step_changes_no_bit(name):
    optimizer = AROUND[name]()
    variables = built(optimizer)
    scaling = next(w for w in optimizer.chain() if isinstance(w, LossScaling))
    own = [id(v) for v in scaling._variables]
    everything = lambda: helpers.bits(values([*variables, *(v for v in optimizer.variables if id(v) not in own)]))
    first, second, third = helpers.gradients(3, SHAPES, scale=1e4)
    apply(optimizer, first, variables)
    before = everything()
    for i, value in enumerate((np.inf, -np.inf, np.nan), 1):
        apply(optimizer, poisoned(second, value), variables)
        assert everything() == before
        assert float(scaling.loss_scale) == (2.0**15 if name == "static" else 2.0 ** (15 - i))
    for grads in (second, third):
        apply(optimizer, grads, variables)
    assert everything() != before and all(np.all(np.isfinite(x)) for x in values(variables))


def test_control_without_loss_scaling_infinities_are_not_hidden():
    optimizer = minimize.MovingAverage(Lamb(RATE))
    variables = built(optimizer)
    apply(optimizer, poisoned(helpers.tree(SHAPES, 1), np.inf), variables)
    assert not np.all(np.isfinite(values(optimizer.averages)[-1])) and int(optimizer.iterations) == 1


def test_a_scale_whose_norm_overflows_is_halved():
    """In float32 models a scale may grow until the squares of finite gradients overflow: the clipped step would be NaN."""
    optimizer = LossScaling(minimize.ClipByGlobalNorm(keras.optimizers.SGD(1.0), 0.5), 2.0**65)
    variables = built(optimizer)
    before, grads = values(variables), helpers.tree(SHAPES, 1)
    for _ in range(6):
        scale = np.float32(ops.convert_to_numpy(optimizer.loss_scale))
        apply(optimizer, [g * scale for g in grads], variables)
    skipped = int(np.log2(2.0**65 / float(optimizer.loss_scale)))
    assert 1 <= skipped <= 4 and int(optimizer.iterations) == 6 - skipped
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads))
    expected = [p - (6 - skipped) * 0.5 / norm * g.astype(np.float64) for p, g in zip(before, grads)]
    helpers.assert_near(values(variables), expected, 1e-6)


def test_the_scale_stays_where_float32_can_divide_by_it():
    for start, bad, gradient in ((2.0**126, None, 2.0**-20), (2.0**-126, np.inf, 1.0)):
        optimizer = LossScaling(keras.optimizers.SGD(1.0), start, 1)
        variables = built(optimizer)
        grads = [np.full(s, gradient, np.float32) for s in SHAPES]
        if bad is None:  # a gradient of 2**-146 alone would not grow the scale further
            grads = [g * np.float32(2.0**20) for g in grads]
        apply(optimizer, grads if bad is None else poisoned(grads, bad), variables)
        assert float(optimizer.loss_scale) == start
    # The least scale still divides: a gradient of 2**-120 is one of 64.
    before = values(variables)
    apply(optimizer, [np.full(s, 2.0**-120, np.float32) for s in SHAPES], variables)
    helpers.assert_near(values(variables), [x - 64.0 for x in before], 1e-6)
    assert float(optimizer.loss_scale) == 2.0**-125


def test_a_loss_of_16_bits_is_scaled_in_32():
    optimizer = LossScaling(Lamb(RATE))  # 3 * 2**15 is infinite in float16
    scaled = optimizer.scale_loss(ops.convert_to_tensor(3.0, "float16"))
    assert float(scaled) == 3.0 * 2**15 and keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert keras.backend.standardize_dtype(optimizer.scale_loss(ops.convert_to_tensor(3.0, "float32")).dtype) == "float32"


# What cannot be meant -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [dict(initial_scale=x) for x in (0, -1.0, float("nan"), float("inf"), 2.0**127, 2.0**-127, True, "dynamic", None)]
    + [dict(dynamic_growth_steps=x) for x in (0, -5, 1.5, True, None)],
    ids=str,
)
def test_bad_arguments(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        LossScaling(Lamb(), **options)


def test_orders_that_make_no_sense():
    multiplied = "would see gradients that are multiplied by the loss scale. Put LossScaling around it"
    for around in (
        lambda inner: minimize.ClipByGlobalNorm(inner, 1.0),
        lambda inner: minimize.MovingAverage(minimize.ClipByValue(inner, 1.0)),
        lambda inner: minimize.OptimizerWrapper(inner, transform_unaggregated_gradients=lambda pairs: pairs),
        lambda inner: minimize.GradientAccumulation(inner, 2),
    ):
        with pytest.raises(ValueError, match=multiplied):
            around(LossScaling(Lamb()))
    with pytest.raises(ValueError, match="there is a LossScaling inside this LossScaling already"):
        LossScaling(minimize.MovingAverage(LossScaling(Lamb())))
    with pytest.raises(ValueError, match="use xla_lamb.minimize.LossScaling in its place"):
        LossScaling(keras.optimizers.LossScaleOptimizer(Lamb()))
    with pytest.raises(ValueError, match="loss_scale_factor=2.0"):
        LossScaling(Lamb(loss_scale_factor=2.0))


# Tapes ----------------------------------------------------------------------------------------------------------------------


def test_tensorflow_what_each_step_sees():
    """Unscaled in float32 where somebody looks, and scaled in the gradients' own type where replicas are summed up."""
    import tensorflow as tf

    seen = {}

    def look(step):
        def function(grads_and_vars):
            seen[step] = [(g.dtype.name, np.asarray(g, np.float64)) for g, _ in grads_and_vars]
            return grads_and_vars

        return function

    functions = {step: look(step) for step in ("transform_unaggregated_gradients", "aggregate_gradients", "transform_gradients")}
    w, b = keras.Variable(np.zeros(3), dtype="float16"), keras.Variable(np.zeros(3), dtype="float32")
    optimizer = LossScaling(minimize.OptimizerWrapper(Lamb(), **functions), 2.0**12)
    exact = np.array([2.0**-26, 3.0, -0.5])  # the first is below the least number of float16
    optimizer.minimize(lambda: tf.reduce_sum((tf.cast(w.value, tf.float32) + b.value) * tf.constant(exact, tf.float32)), [w, b])
    for step, scale, dtypes in (
        ("transform_unaggregated_gradients", 1, ["float32", "float32"]),
        ("aggregate_gradients", 2.0**12, ["float16", "float32"]),
        ("transform_gradients", 1, ["float32", "float32"]),
    ):
        assert [dtype for dtype, _ in seen[step]] == dtypes, step
        for _, value in seen[step]:
            np.testing.assert_array_equal(value, exact * scale, step)


def test_tensorflow_small_gradients_survive_float16():
    import tensorflow as tf

    moments = []
    for optimizer in (LossScaling(Lamb(), 2.0**15), Lamb()):
        w = keras.Variable(np.ones(3), dtype="float16")
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(tf.cast(w.value, tf.float32) * 2.0**-26))
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])
        moments += values(getattr(optimizer, "inner", optimizer)._momentums)
    np.testing.assert_allclose(moments[0], 0.1 * 2.0**-26, rtol=1e-6)
    np.testing.assert_array_equal(moments[1], 0.0)


def test_tensorflow_no_replica_can_hide_an_infinity():
    """A function that makes zeros of it before the replicas are summed up."""
    import tensorflow as tf

    w = tf.Variable([1.0, 2.0])
    optimizer = LossScaling(minimize.OptimizerWrapper(Lamb(RATE), transform_unaggregated_gradients=without_infinities), 8.0)
    for factor, iterations, scale in ((1.0, 1, 8), (np.inf, 1, 4), (np.nan, 1, 2), (1.0, 2, 2)):
        optimizer.minimize(lambda: tf.reduce_sum(w) * factor, [w])
        assert (int(optimizer.iterations), float(optimizer.loss_scale)) == (iterations, scale)


def test_tensorflow_each_way_through_the_steps_divides_once():
    """As Adam alone, whose step would show a gradient that was divided twice or never through its epsilon."""
    import tensorflow as tf

    start = tf.constant([1.0, -2.0])
    loss = lambda w: tf.reduce_sum(tf.square(w))

    def minimized(optimizer, w):
        optimizer.minimize(lambda: loss(w), [w])

    def with_tape(optimizer, w):
        with tf.GradientTape() as tape:
            value = loss(w)
        optimizer.minimize(value, [w], tape)

    def by_hand(optimizer, w):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss(w))
        optimizer.apply_gradients([(tape.gradient(value, w), w)])

    def in_two(optimizer, w):
        optimizer.apply_gradients(list(optimizer.compute_gradients(lambda: loss(w), [w])))

    def aggregated(optimizer, w):
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: loss(w), [w], aggregate=True), aggregate=False)

    def own_gradients(optimizer, w):
        optimizer.apply_gradients([(2 * w, w)], aggregate=False)

    adam = lambda: keras.optimizers.Adam(0.1, epsilon=1.0)
    w = tf.Variable(start)
    peer = adam()
    for _ in range(2):
        peer.apply([2 * w], [w])
    for way in (minimized, with_tape, by_hand, in_two, aggregated, own_gradients):
        mine, optimizer = tf.Variable(start), LossScaling(adam(), 64.0)
        for _ in range(2):
            way(optimizer, mine)
        np.testing.assert_allclose(mine, w, rtol=1e-6, err_msg=way.__name__)
        assert int(optimizer.step_counter) == (0 if way is own_gradients else 2)
    wrong = tf.Variable(start)
    LossScaling(adam(), 64.0).apply([2 * start], [wrong])  # of a loss that was not scaled
    assert np.max(np.abs(wrong - start)) < 0.02


def test_tensorflow_scaled_gradients_cannot_skip_the_division():
    import tensorflow as tf

    w = tf.Variable([1.0])
    optimizer = LossScaling(Lamb(RATE))
    grads_and_vars = optimizer.compute_gradients(lambda: tf.reduce_sum(w), [w])
    for pairs in (grads_and_vars, list(grads_and_vars)):
        with pytest.raises(ValueError, match="these gradients are multiplied by the loss scale.*needs aggregate=True here"):
            optimizer.apply_gradients(pairs, aggregate=False)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(w))
    with pytest.raises(ValueError, match="these gradients are multiplied by the loss scale"):
        optimizer.apply_gradients([(tape.gradient(loss, w), w)], aggregate=False)
    assert float(w[0]) == 1.0 and int(optimizer.iterations) == 0


def test_tensorflow_given_aggregated_gradients_that_are_not_finite_are_skipped():
    import tensorflow as tf

    w = tf.Variable([1.0, 2.0])
    optimizer = LossScaling(minimize.ClipByValue(Lamb(RATE), 1.0))
    optimizer.apply_gradients([(tf.constant([np.inf, 1.0]), w)], aggregate=False)
    assert int(optimizer.iterations) == 0 and w.numpy().tolist() == [1.0, 2.0]
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)], aggregate=False)
    assert int(optimizer.iterations) == 1 and float(optimizer.loss_scale) == 2.0**15
