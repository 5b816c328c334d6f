"""Averages of the weights: against Keras's moving average, optax.lookahead and float64; swapping in and out. test_on_jax.py runs this file once more on JAX."""

import jax
import keras
import ml_dtypes
import numpy as np
import optax
import pytest
from keras import ops

import helpers
import xla_lamb
import xla_lamb.keras
from xla_lamb.minimize import (
    AveragedWeights,
    ClipByGlobalNorm,
    GradientAccumulation,
    Lookahead,
    LossScaling,
    MovingAverage,
    StochasticWeightAveraging,
)

BACKEND = keras.backend.backend()
SHAPES = [(3, 2), (5,)]
SGD = keras.optimizers.SGD
KINDS = {np.float16: "float16", ml_dtypes.bfloat16: "bfloat16", np.float32: "float32", np.float64: "float64"}


def values(variables):
    return [np.asarray(ops.convert_to_numpy(v), np.float64) for v in variables]


def start(dtype="float32", scale=1.0):
    return [keras.Variable(x, dtype=dtype, name=f"v{i}") for i, x in enumerate(helpers.tree(SHAPES, scale=scale))]


def train(optimizer, gradients, variables=None):
    """The variables, and their values after each step."""
    variables = variables or start()
    optimizer.build(variables)
    after = []
    for grads in gradients:
        optimizer.apply([ops.convert_to_tensor(g) for g in grads], variables)
        after.append(values(variables))
    return variables, after


def furthest(a, b):
    return max(map(helpers.error, a, b))


GRADS = helpers.gradients(10, SHAPES, scale=1.0)
NAN = [np.full(s, np.nan, np.float32) for s in SHAPES]


# The rules -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lamb], ids=lambda x: x.__name__)
def test_moving_average_like_keras(peer):
    reference = peer(0.1, use_ema=True, ema_momentum=0.7)
    theirs, _ = train(reference, GRADS)
    ours = MovingAverage(xla_lamb.keras.Lamb(0.1, variant="keras") if peer is keras.optimizers.Lamb else peer(0.1), 0.7)
    variables, after = train(ours, GRADS)
    helpers.assert_near(values(variables), values(theirs), 1e-6)
    helpers.assert_near(values(ours.averages), values(reference._model_variables_moving_average), 2e-6)
    average = after[0]
    for weights in after[1:]:
        average = [0.7 * a + 0.3 * w for a, w in zip(average, weights)]
    helpers.assert_near(values(ours.averages), average, 1e-6)
    other = MovingAverage(peer(0.1), 0.71)
    train(other, GRADS)
    assert furthest(values(other.averages), average) > 1e-4


def test_moving_average_at_its_ends():
    """Momentum 0 is the weights, and the first step is the average itself, wherever the variables came from."""
    ours = MovingAverage(SGD(0.1), 0.0)
    variables, _ = train(ours, GRADS[:3])
    assert helpers.bits(values(ours.averages)) == helpers.bits(values(variables))
    ours = MovingAverage(SGD(0.1), 0.999)
    variables = start()
    ours.build(variables)
    assert helpers.bits(values(ours.averages)) == helpers.bits(values(variables))  # before any step
    _, after = train(ours, GRADS[:1], variables)
    assert helpers.bits(values(ours.averages)) == helpers.bits(after[0])


@pytest.mark.parametrize("start_at, period", [(0, 1), (0, 4), (3, 2), (50, 2)])
def test_stochastic_weight_averaging_is_the_mean_of_the_weights_that_count(start_at, period):
    """The steps that count are those of tfa.optimizers.SWA(start_averaging, average_period). What differs: before the first of them, its averages are zeros, and ours the weights.

    In the paper (algorithm 1, line 8) it is a running mean too, over the weights at the end of each cycle; there the weights that training begins with are its first entry.
    """
    ours = StochasticWeightAveraging(SGD(0.1), start=start_at, period=period)
    variables, after = train(ours, GRADS)
    counted = after[start_at::period] or after[-1:]
    mean = [np.mean([w[i] for w in counted], axis=0) for i in range(len(SHAPES))]
    helpers.assert_near(values(ours.averages), mean, 5e-7)
    others = after[start_at + 1 :: period] or after[-2:-1]
    assert furthest(values(ours.averages), [np.mean([w[i] for w in others], axis=0) for i in range(len(SHAPES))]) > 1e-3


FAST = {
    "sgd": (lambda: SGD(0.1), lambda: optax.sgd(0.1)),
    "momentum": (lambda: SGD(0.1, momentum=0.9), lambda: optax.sgd(0.1, momentum=0.9)),
    "lamb": (lambda: xla_lamb.keras.Lamb(0.1, weight_decay=0.1), lambda: optax.lamb(0.1, weight_decay=0.1)),
    "our lamb": (lambda: xla_lamb.keras.Lamb(0.1, weight_decay=0.1), lambda: xla_lamb.lamb(0.1, weight_decay=0.1)),
}


def lookahead_of_optax(name, period, part):
    """The parameters after each step."""
    params = optax.LookaheadParams.init_synced(helpers.tree(SHAPES))
    transformation = optax.lookahead(FAST[name][1](), sync_period=period, slow_step_size=part)

    def step(carry, grads):
        params, state = carry
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, trace = jax.lax.scan(step, (params, transformation.init(params)), [np.stack(g) for g in zip(*GRADS)])
    return [jax.tree.map(lambda x: x[i], trace) for i in range(len(GRADS))]


@pytest.mark.parametrize("name, period, part", [("sgd", 1, 0.5), ("momentum", 3, 0.8), ("lamb", 4, 0.5), ("our lamb", 2, 1.0)])
def test_lookahead_like_optax(name, period, part):
    ours = Lookahead(FAST[name][0](), sync_period=period, slow_step_size=part)
    _, after = train(ours, GRADS)
    trace = lookahead_of_optax(name, period, part)
    for step, params in enumerate(trace):
        helpers.assert_near(after[step], params.fast, 5e-6)
    helpers.assert_near(values(ours.averages), trace[-1].slow, 5e-6)


def test_control_lookahead_with_other_settings():
    _, after = train(Lookahead(SGD(0.1), sync_period=3, slow_step_size=0.5), GRADS)
    for period, part in ((4, 0.5), (3, 0.6)):
        assert furthest(after[-1], lookahead_of_optax("sgd", period, part)[-1].fast) > 1e-3


# Types, missing gradients, steps that are none -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=KINDS.get)
@pytest.mark.parametrize("wrap", [lambda o: MovingAverage(o, 0.999), lambda o: StochasticWeightAveraging(o, period=1)], ids=["moving", "stochastic"])
def test_averages_of_sixteen_bit_variables_are_float32_and_move_on(dtype, wrap):
    """In 16 bits an average of momentum 0.999 stays where it is: Keras's does, which is the control."""
    dtype = KINDS[dtype]
    variables = [keras.Variable(np.ones(4), dtype=dtype)]
    ours = wrap(SGD(1.0))
    ours.build(variables)
    grads = [ops.convert_to_tensor(np.full(4, 2.0**-6), dtype)]
    after = []
    for _ in range(6):
        ours.apply(grads, variables)
        after.append(values(variables)[0])
    expected = after[0]
    for i, w in enumerate(after[1:], 1):
        momentum = 0.999 if isinstance(ours, MovingAverage) else i / (i + 1)
        expected = momentum * expected + (1 - momentum) * w
    assert ours.averages[0].dtype == "float32"
    helpers.assert_near(values(ours.averages), [expected], 1e-6)
    assert helpers.error(values(ours.averages)[0], after[0]) > 1e-4
    with ours.averaged_weights():
        assert variables[0].dtype == dtype
        helpers.assert_near(values(variables), [expected], 2.0**-8)
    assert np.array_equal(values(variables)[0], after[-1])
    if isinstance(ours, MovingAverage):
        peer = SGD(1.0, use_ema=True, ema_momentum=0.999)
        variables = [keras.Variable(np.ones(4), dtype=dtype)]
        peer.build(variables)
        peer.apply(grads, variables)
        first = values(peer._model_variables_moving_average)[0]
        peer.apply(grads, variables)
        assert np.array_equal(values(peer._model_variables_moving_average)[0], first)


def test_lookahead_of_sixteen_bit_variables_keeps_its_slow_weights_in_float32():
    """Slow weights of bfloat16 could not take a tenth of each step, and would stay at 1."""
    variables = [keras.Variable(np.ones(3), dtype="bfloat16")]
    ours = Lookahead(SGD(1.0), sync_period=1, slow_step_size=0.1)
    ours.build(variables)
    slow = np.float64(1)
    for _ in range(40):
        fast = np.float64(np.asarray(slow, ml_dtypes.bfloat16)) - 2.0**-6
        slow = slow + 0.1 * (np.float64(np.asarray(fast, ml_dtypes.bfloat16)) - slow)
        ours.apply([ops.full((3,), 2.0**-6, "bfloat16")], variables)
    helpers.assert_near(values(ours.averages), [np.full(3, slow)], 1e-6)
    assert slow < 1 - 2.0**-6
    assert np.all(np.asarray(slow, ml_dtypes.bfloat16).astype(np.float64) == values(variables)[0])


@pytest.mark.parametrize("wrap", [lambda o: MovingAverage(o, 0.9), lambda o: StochasticWeightAveraging(o, period=1), lambda o: Lookahead(o, 2, 0.3)])
def test_averages_of_float64_variables_are_float64(wrap, x64):
    variables = start("float64")
    before = values(variables)
    grads = helpers.gradients(5, SHAPES, scale=1.0, dtype=np.float64)
    ours = wrap(SGD(0.5))  # which float32 holds: Keras's learning rate is one
    train(ours, grads, variables)
    w, averages = before, before
    for i, g in enumerate(grads):
        w = [x - 0.5 * y for x, y in zip(w, g)]
        if isinstance(ours, Lookahead):
            if i % 2:
                averages = w = [a + 0.3 * (x - a) for a, x in zip(averages, w)]
        else:
            momentum = i / (i + 1) if isinstance(ours, StochasticWeightAveraging) else 0.9 * (i > 0)
            averages = [momentum * a + (1 - momentum) * x for a, x in zip(averages, w)]
    assert {a.dtype for a in ours.averages} == {"float64"}
    helpers.assert_near(values(ours.averages), averages, 1e-14)
    helpers.assert_near(values(variables), w, 1e-14)


def test_variables_without_a_gradient_are_averaged_as_they_are():
    variables, first = start(), values(start())
    ours = MovingAverage(SGD(0.1), 0.5)
    ours.build(variables)
    for grads in GRADS[:3]:
        with pytest.warns(UserWarning, match="no gradient.*v1"):
            ours.apply([ops.convert_to_tensor(grads[0]), None], variables)
    assert helpers.bits(values(ours.averages)[1]) == helpers.bits(first[1])
    variables[1].assign(variables[1] + 1)  # by the user
    ours.apply([ops.convert_to_tensor(g) for g in GRADS[3]], variables)
    assert furthest(values(ours.averages)[1:], [first[1]]) > 0.1


@pytest.mark.parametrize(
    "wrap",
    [lambda o: MovingAverage(o, 0.6), lambda o: StochasticWeightAveraging(o, 1, 2), lambda o: Lookahead(o, 2, 0.3)],
    ids=["moving", "stochastic", "lookahead"],
)
@pytest.mark.parametrize("skipping", [LossScaling, lambda o, _: o], ids=["loss scaling", "nonfinite"])
def test_skipped_steps_do_not_count(wrap, skipping):
    lamb = lambda: xla_lamb.keras.Lamb(0.1, nonfinite="skip")
    good = wrap(lamb())
    scale = 1.0
    expected, _ = train(good, GRADS[:5])
    ours = skipping(wrap(lamb()), scale)
    averaging = ours.inner if isinstance(ours, LossScaling) else ours
    variables = start()
    ours.build(variables)
    for grads in [NAN, GRADS[0], NAN, NAN, *GRADS[1:5], NAN]:
        scaled = float(ops.convert_to_numpy(ours.loss_scale)) if isinstance(ours, LossScaling) else 1.0
        before = helpers.bits(values([*variables, *averaging.averages]))
        ours.apply([ops.convert_to_tensor(np.float32(scaled) * g) for g in grads], variables)
        assert (helpers.bits(values([*variables, *averaging.averages])) == before) == (grads is NAN)
    helpers.assert_near(values(variables), values(expected), 1e-6)
    helpers.assert_near(values(averaging.averages), values(good.averages), 1e-6)
    assert int(ours.iterations) == 5


def test_averages_see_steps_and_not_the_batches_of_an_accumulation():
    for order in (lambda: MovingAverage(GradientAccumulation(SGD(0.1), 2), 0.6), lambda: GradientAccumulation(MovingAverage(SGD(0.1), 0.6), 2)):
        ours, plain = order(), MovingAverage(SGD(0.1), 0.6)
        train(ours, GRADS[:7])
        train(plain, [[(a + b) / 2 for a, b in zip(*GRADS[i : i + 2])] for i in (0, 2, 4)])
        averaging = ours if isinstance(ours, MovingAverage) else ours.inner
        helpers.assert_near(values(averaging.averages), values(plain.averages), 1e-6)


def test_averages_in_one_another():
    """The outer one averages what lookahead made of the weights."""
    ours = MovingAverage(Lookahead(SGD(0.1), 2, 0.3), 0.6)
    variables, after = train(ours, GRADS[:6])
    average = after[0]
    for weights in after[1:]:
        average = [0.6 * a + 0.4 * w for a, w in zip(average, weights)]
    helpers.assert_near(values(ours.averages), average, 1e-6)
    lookahead = Lookahead(SGD(0.1), 2, 0.3)
    alone, _ = train(lookahead, GRADS[:6])
    assert helpers.bits(values(alone)) == helpers.bits(values(variables))
    assert helpers.bits(values(ours.inner.averages)) == helpers.bits(values(lookahead.averages))


# Swapping ------------------------------------------------------------------------------------------------------------------


def trained():
    optimizer = MovingAverage(SGD(0.1), 0.9)
    variables, _ = train(optimizer, GRADS[:4])
    return optimizer, variables, helpers.bits(values(variables)), helpers.bits(values(optimizer.averages))


def test_swap_in_and_out():
    optimizer, variables, own, averages = trained()
    assert own != averages
    with optimizer.averaged_weights():
        assert helpers.bits(values(variables)) == averages
        assert helpers.bits(values(optimizer.averages)) == averages
    assert helpers.bits(values(variables)) == own
    optimizer.use_averaged_weights()
    assert helpers.bits(values(variables)) == averages
    optimizer.use_own_weights()
    assert helpers.bits(values(variables)) == own
    assert helpers.bits(values(optimizer.averages)) == averages


def test_swap_out_after_an_exception():
    optimizer, variables, own, averages = trained()
    with pytest.raises(ZeroDivisionError):
        with optimizer.averaged_weights():
            assert helpers.bits(values(variables)) == averages
            1 / 0
    assert helpers.bits(values(variables)) == own


def test_swaps_that_make_no_sense():
    optimizer, variables, own, averages = trained()
    with pytest.raises(RuntimeError, match="own weights in the variables already"):
        optimizer.use_own_weights()
    with optimizer.averaged_weights():
        with pytest.raises(RuntimeError, match="averages in the variables already"):
            optimizer.use_averaged_weights()
        with pytest.raises(RuntimeError, match="averages in the variables already"):
            with optimizer.averaged_weights():
                raise AssertionError("not here")
        assert helpers.bits(values(variables)) == averages
    assert helpers.bits(values(variables)) == own
    with pytest.raises(RuntimeError, match="no averages yet"):
        MovingAverage(SGD(0.1)).use_averaged_weights()
    with pytest.raises(RuntimeError, match="no averages yet"):
        with MovingAverage(SGD(0.1)).averaged_weights():
            raise AssertionError("not here")


def test_no_step_while_the_averages_are_in():
    optimizer, variables, own, averages = trained()
    grads = [ops.convert_to_tensor(g) for g in GRADS[0]]
    for outer in (optimizer, ClipByGlobalNorm(optimizer, 1.0)):
        with optimizer.averaged_weights():
            with pytest.raises(RuntimeError, match="call use_own_weights"):
                outer.apply(grads, variables)
            assert helpers.bits(values(variables)) == averages
        assert helpers.bits(values(variables)) == own and int(optimizer.iterations) == 4
    optimizer.apply(grads, variables)
    assert helpers.bits(values(variables)) != own


def test_compiled_tensorflow_steps_while_the_averages_are_in_are_told_of_afterwards():
    import tensorflow as tf

    optimizer, variables, own, _ = trained()
    step = tf.function(lambda: optimizer.apply([tf.constant(g) for g in GRADS[0]], variables), autograph=False)
    step()
    own = helpers.bits(values(variables))
    optimizer.use_averaged_weights()
    step(), step()
    with pytest.raises(RuntimeError, match="took 2 steps while its averages were in the variables"):
        optimizer.use_own_weights()
    assert helpers.bits(values(variables)) == own
    with optimizer.averaged_weights():
        pass


# Model.fit -----------------------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X[:, :1] * 2 + 1


def compiled(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
    return model


def mse(weights):
    return float(np.mean((X.astype(np.float64) @ weights[0] + weights[1] - Y) ** 2))


def test_callback_in_fit_evaluate_and_predict_as_keras_does():
    options = dict(batch_size=8, epochs=3, validation_data=(X, Y), verbose=0, shuffle=False)
    peer = compiled(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.8))
    theirs = peer.fit(X, Y, callbacks=[keras.callbacks.SwapEMAWeights()], **options).history
    # Around it something that forwards, as users have it.
    ours = MovingAverage(ClipByGlobalNorm(keras.optimizers.Adam(0.1), 1e9), 0.8)
    model = compiled(LossScaling(ours, 1.0))
    history = model.fit(X, Y, callbacks=[AveragedWeights()], **options).history
    np.testing.assert_allclose(history["val_loss"], theirs["val_loss"], rtol=1e-5)
    np.testing.assert_allclose(history["loss"], theirs["loss"], rtol=1e-5)

    own, averages = values(model.trainable_variables), values(ours.averages)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), mse(own), rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0, callbacks=[AveragedWeights()]), mse(averages), rtol=1e-5)
    assert abs(mse(own) - mse(averages)) > 1e-2 * mse(own)
    averaged = model.predict(X, verbose=0, callbacks=[AveragedWeights()])
    np.testing.assert_allclose(averaged, X @ averages[0] + averages[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ own[0] + own[1], rtol=1e-5, atol=1e-5)
    # Nothing of this has touched the weights or the averages, and training goes on.
    assert helpers.bits(values(model.trainable_variables)) == helpers.bits(own)
    assert helpers.bits(values(ours.averages)) == helpers.bits(averages)
    model.fit(X, Y, callbacks=[AveragedWeights()], **options)
    assert int(model.optimizer.iterations) == 18


def test_callback_after_an_evaluation_that_failed():
    model = compiled(MovingAverage(SGD(0.1), 0.5))
    callback = AveragedWeights()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    own, averages = values(model.trainable_variables), values(model.optimizer.averages)

    def fail(batch, logs):
        raise ZeroDivisionError

    for again in (
        lambda: model.evaluate(X, Y, verbose=0, callbacks=[callback]),
        lambda: model.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=[callback]),
    ):
        with pytest.raises(ZeroDivisionError):
            model.evaluate(X, Y, verbose=0, callbacks=[callback, keras.callbacks.LambdaCallback(on_test_batch_begin=fail)])
        assert helpers.bits(values(model.trainable_variables)) == helpers.bits(averages)
        # Somebody else's callback cannot know what to do, and says so instead of training the averages.
        with pytest.raises(RuntimeError, match="call use_own_weights"):
            model.fit(X, Y, verbose=0, callbacks=[AveragedWeights()])
        result = again()
        if isinstance(result, float):
            np.testing.assert_allclose(result, mse(averages), rtol=1e-5)
            assert helpers.bits(values(model.trainable_variables)) == helpers.bits(own)
    assert int(model.optimizer.iterations) == 6


def test_callback_without_averages():
    for optimizer in (SGD(0.1), ClipByGlobalNorm(SGD(0.1), 1.0)):
        model = compiled(optimizer)
        with pytest.raises(TypeError, match="keeps no averages: put MovingAverage"):
            model.evaluate(X, Y, verbose=0, callbacks=[AveragedWeights()])
        with pytest.raises(TypeError, match="keeps no averages: put MovingAverage"):
            model.fit(X, Y, verbose=0, callbacks=[AveragedWeights()])


def test_lookahead_in_fit_with_its_slow_weights_in_the_validation():
    ours = Lookahead(xla_lamb.keras.Lamb(0.1), sync_period=2, slow_step_size=0.5)
    model = compiled(ours)
    start = values(model.trainable_variables)
    losses = model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y), callbacks=[AveragedWeights()], shuffle=False).history["val_loss"]
    np.testing.assert_allclose(losses[0], mse(values(ours.averages)), rtol=1e-5)
    # Three steps: the slow weights are half-way to where the first two led.
    fast = compiled(xla_lamb.keras.Lamb(0.1))
    fast.fit(X[:16], Y[:16], batch_size=8, verbose=0, shuffle=False)
    helpers.assert_near(values(ours.averages), [(a + b) / 2 for a, b in zip(start, values(fast.trainable_variables))], 1e-5)


# What is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MovingAverage(SGD(0.1), 1.0), r"momentum must be in \[0, 1\), not 1.0"),
        (lambda: MovingAverage(SGD(0.1), -0.1), r"momentum must be in \[0, 1\), not -0.1"),
        (lambda: MovingAverage(SGD(0.1), float("nan")), r"momentum must be in \[0, 1\), not nan"),
        (lambda: MovingAverage(SGD(0.1), "0.9"), r"momentum must be in \[0, 1\), not '0.9'"),
        (lambda: StochasticWeightAveraging(SGD(0.1), start=-1), "start must be a number of steps, 0 or more, not -1"),
        (lambda: StochasticWeightAveraging(SGD(0.1), period=0), "period must be a number of steps, 1 or more, not 0"),
        (lambda: StochasticWeightAveraging(SGD(0.1), period=2.0), "period must be a number of steps, 1 or more, not 2.0"),
        (lambda: Lookahead(SGD(0.1), sync_period=0), "sync_period must be a number of steps, 1 or more, not 0"),
        (lambda: Lookahead(SGD(0.1), slow_step_size=0), r"slow_step_size must be in \(0, 1\], not 0"),
        (lambda: Lookahead(SGD(0.1), slow_step_size=1.5), r"slow_step_size must be in \(0, 1\], not 1.5"),
        (lambda: MovingAverage(SGD(0.1, use_ema=True)), r"use_ema=True.*MovingAverage\(\.\.\., momentum=\.\.\.\)"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "optimizer, settings",
    [
        (lambda: MovingAverage(SGD(0.1), 0.7), dict(momentum=0.7)),
        (lambda: StochasticWeightAveraging(SGD(0.1), 3, 4), dict(start=3, period=4)),
        (lambda: Lookahead(SGD(0.1), 3, 0.25), dict(sync_period=3, slow_step_size=0.25)),
    ],
)
def test_config(optimizer, settings):
    ours = optimizer()
    again = type(ours).from_config(ours.get_config())
    assert {name: getattr(again, name) for name in settings} == settings
    helpers.assert_near(values(train(again, GRADS)[0]), values(train(ours, GRADS)[0]), 0.0)
    helpers.assert_near(values(again.averages), values(ours.averages), 0.0)
