"""GradientAccumulation: against one step on the whole batch, Keras's gradient_accumulation_steps and float64. test_on_jax.py runs this file once more on JAX."""

import keras
import numpy as np
import pytest
from keras import ops

import helpers
import model64
import xla_lamb.keras
from xla_lamb.minimize import ClipByGlobalNorm, DecoupledWeightDecay, GradientAccumulation, LossScaling, OptimizerWrapper

BACKEND = keras.backend.backend()
SHAPES = [(3, 2), (5,)]
GRADS = helpers.gradients(8, SHAPES, scale=1.0)
NAN = [np.full(s, np.nan, np.float32) for s in SHAPES]
SGD, Adam, Lamb = keras.optimizers.SGD, keras.optimizers.Adam, xla_lamb.keras.Lamb
RATE = 0.25  # float32 holds it


def values(variables):
    return [np.asarray(ops.convert_to_numpy(v), np.float64) for v in variables]


def start(dtype="float32"):
    return [keras.Variable(x, dtype=dtype, name=f"v{i}") for i, x in enumerate(helpers.tree(SHAPES))]


def tensors(grads, dtype="float32"):
    return [ops.convert_to_tensor(g, dtype) for g in grads]


def train(optimizer, gradients, variables=None):
    variables = variables or start()
    optimizer.build(variables)
    for grads in gradients:
        optimizer.apply(tensors(grads), variables)
    return values(variables)


def mean(gradients):
    return [np.mean(np.stack(g).astype(np.float64), axis=0) for g in zip(*gradients)]


def means(gradients, steps):
    return [mean(gradients[i : i + steps]) for i in range(0, len(gradients) - steps + 1, steps)]


def sgd(gradients):
    p = [np.float64(x) for x in helpers.tree(SHAPES)]
    for grads in gradients:
        p = [x - RATE * g for x, g in zip(p, grads)]
    return p


def furthest(a, b):
    return max(map(helpers.error, a, b))


# The numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, options", [(Adam, {}), (SGD, dict(momentum=0.9)), (keras.optimizers.Lamb, {})], ids=["Adam", "momentum", "Lamb"]
)
def test_like_keras(make, options):
    """Variables, moments and `iterations`, also in the middle of a step."""
    peer = make(0.1, gradient_accumulation_steps=3, **options)
    theirs = train(peer, GRADS)
    ours = GradientAccumulation(Lamb(0.1, variant="keras") if make is keras.optimizers.Lamb else make(0.1, **options), 3)
    helpers.assert_near(train(ours, GRADS), theirs, 2e-6)
    assert int(ours.iterations) == int(peer.iterations) == 2
    known = {id(v) for v in peer._accumulated_gradients}
    moments = [v for v in peer.variables if id(v) not in known]
    mine = ours.inner.variables
    assert len(mine) == len(moments) >= 4
    helpers.assert_near(values(mine)[1:], values(moments)[1:], 2e-6)  # the first is the step, which Keras counts in batches
    # What is left of eight batches is in the sums.
    helpers.assert_near(values(ours._sums), values(peer._accumulated_gradients), 1e-6)
    assert furthest(train(GradientAccumulation(make(0.1, **options), 2), GRADS), theirs) > 1e-3


@pytest.mark.parametrize("make", [lambda: Lamb(0.1, weight_decay=0.1), lambda: ClipByGlobalNorm(Lamb(0.1, weight_decay=0.1), 1e6)], ids=["lamb", "around"])
def test_against_the_model(make):
    expected = helpers.run_model(helpers.tree(SHAPES), means(GRADS, 4), model64.PRESETS["optax"].replace(weight_decay=0.1), 0.1)
    helpers.assert_near(train(GradientAccumulation(make(), 4), GRADS), expected.p, 1e-6)
    other = helpers.run_model(helpers.tree(SHAPES), means(GRADS, 2), model64.PRESETS["optax"].replace(weight_decay=0.1), 0.1)
    assert furthest(expected.p, other.p) > 1e-3


X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X[:, :1] * 2 + 1


def fit(optimizer, batch_size, epochs=2):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, bias_initializer="random_normal")])
    model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
    model.fit(X, Y, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False)
    return values(model.trainable_variables)


def test_fit_in_micro_batches_like_whole_batches():
    """A step goes on over the end of an epoch, too."""
    lamb = lambda: Lamb(0.05, epsilon=1.0)  # a small one makes of the first gradients little more than their signs
    ours = GradientAccumulation(lamb(), 4)
    expected = fit(lamb(), 24)
    helpers.assert_near(fit(ours, 6), expected, 1e-5)
    assert int(ours.iterations) == 2
    over = GradientAccumulation(lamb(), 6)
    assert furthest(fit(over, 6, epochs=3), expected) > 1e-3  # twelve batches in three epochs of four
    assert int(over.iterations) == 2


def test_one_compiled_tensorflow_function_for_all_batches():
    import tensorflow as tf

    variables, optimizer = start(), GradientAccumulation(SGD(RATE), 3)
    optimizer.build(variables)
    traces = []

    @tf.function(autograph=False, jit_compile=True)
    def step(*grads):
        traces.append(1)
        optimizer.apply(grads, variables)

    for grads in GRADS:
        step(*tensors(grads))
    assert len(traces) == 1
    helpers.assert_near(values(variables), sgd(means(GRADS, 3)), 5e-7)


def test_compute_and_apply_with_a_tensorflow_tape():
    """In the steps of a custom loop, and with what was changed between them."""
    import tensorflow as tf

    x = np.array([1.0, 2.0, 3.0], np.float32)
    losses = [lambda k=k: tf.reduce_sum(w * x) * k for k in (1.0, 2.0, 3.0, 4.0)]
    for way in ("minimize", "two calls", "aggregated", "changed"):
        w, optimizer = tf.Variable(x), GradientAccumulation(SGD(RATE), 2)
        for loss in losses:
            if way == "minimize":
                optimizer.minimize(loss, [w])
            elif way == "two calls":
                optimizer.apply_gradients(optimizer.compute_gradients(loss, [w]))
            else:
                grads_and_vars = optimizer.compute_gradients(loss, [w], aggregate=True)
                if way == "changed":
                    optimizer.apply_gradients([(g * 2, v) for g, v in grads_and_vars], aggregate=False)
                else:
                    optimizer.apply_gradients(grads_and_vars)
        assert int(optimizer.iterations) == 2
        factor = 2 if way == "changed" else 1
        np.testing.assert_allclose(w.numpy(), x - factor * RATE * x * (1.5 + 3.5), rtol=1e-6)


def test_batches_between_change_nothing():
    variables = start()
    optimizer = GradientAccumulation(DecoupledWeightDecay(Adam(0.1), 0.1), 3)
    optimizer.build(variables)
    watched = [*variables, *optimizer.inner.variables]
    for i, grads in enumerate(GRADS):
        before = helpers.bits(values(watched))
        optimizer.apply(tensors(grads), variables)
        assert (helpers.bits(values(watched)) == before) == (i % 3 < 2)
        assert int(optimizer.iterations) == (i + 1) // 3
        if i % 3 == 2:
            assert all(np.all(x == 0) for x in values(optimizer._sums))
    adamw = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    helpers.assert_near(values(variables), train(adamw, means(GRADS, 3)), 2e-6)


def test_one_batch_a_step_is_the_optimizer_itself():
    assert helpers.bits(train(GradientAccumulation(Adam(0.1), 1), GRADS)) == helpers.bits(train(Adam(0.1), GRADS))


def test_schedules_see_steps():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.5, 0.25, 0.125])
    optimizer = GradientAccumulation(SGD(schedule), 2)
    p = [np.float64(x) for x in helpers.tree(SHAPES)]
    for rate, grads in zip([0.5, 0.5, 0.25, 0.125], means(GRADS, 2)):
        p = [x - rate * g for x, g in zip(p, grads)]
    helpers.assert_near(train(optimizer, GRADS), p, 5e-7)
    assert float(optimizer.learning_rate) == 0.125
    q = [np.float64(x) for x in helpers.tree(SHAPES)]
    for rate, grads in zip([0.5, 0.25, 0.125, 0.125], means(GRADS, 2)):
        q = [x - rate * g for x, g in zip(q, grads)]
    assert furthest(p, q) > 1e-3


# Other wrappers ------------------------------------------------------------------------------------------------------------


def clipped(grads, limit):
    norm = model64.grad_norm(grads)
    return [np.asarray(g, np.float64) * min(1.0, limit / norm) for g in grads]


def test_clipping_inside_is_of_the_mean_and_outside_of_each_batch():
    inside = train(GradientAccumulation(ClipByGlobalNorm(SGD(RATE), 0.8), 2), GRADS)
    outside = train(ClipByGlobalNorm(GradientAccumulation(SGD(RATE), 2), 0.8), GRADS)
    of_mean, of_each = sgd([clipped(g, 0.8) for g in means(GRADS, 2)]), sgd(means([clipped(g, 0.8) for g in GRADS], 2))
    helpers.assert_near(inside, of_mean, 1e-6)
    helpers.assert_near(outside, of_each, 1e-6)
    assert furthest(of_mean, of_each) > 1e-2
    if BACKEND == "tensorflow":  # on JAX, without compilation, it takes its time
        helpers.assert_near(inside, train(SGD(RATE, gradient_accumulation_steps=2, global_clipnorm=0.8), GRADS), 1e-6)


def test_own_transform_gradients():
    """Those of the accumulation itself are of the mean, too; with Python state they show what they saw."""
    seen = []

    def look(grads_and_vars):
        seen.append(values([g for g, _ in grads_and_vars]))
        return [(g * 3, v) for g, v in grads_and_vars]

    ours = train(GradientAccumulation(SGD(RATE), 2, transform_gradients=look), GRADS[:4])
    helpers.assert_near(ours, sgd([[3 * x for x in g] for g in means(GRADS[:4], 2)]), 1e-6)
    for i in (1, 3):
        helpers.assert_near(seen[i], mean(GRADS[i - 1 : i + 1]), 1e-6)


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_loss_scaling_leaves_a_batch_out_and_another_takes_its_place(bad):
    optimizer = LossScaling(GradientAccumulation(Lamb(0.1), 3), 1024.0)
    variables = start()
    optimizer.build(variables)
    batches = [*GRADS[:bad], NAN, *GRADS[bad:6]]
    scales = []
    for grads in batches:
        scale = np.float32(ops.convert_to_numpy(optimizer.loss_scale))
        scales.append(float(scale))
        optimizer.apply(tensors([scale * g for g in grads]), variables)
    assert scales == [1024.0] * (bad + 1) + [512.0] * (6 - bad)
    assert int(optimizer.iterations) == 2
    expected = helpers.run_model(helpers.tree(SHAPES), means(GRADS[:6], 3), model64.PRESETS["optax"], 0.1)
    helpers.assert_near(values(variables), expected.p, 1e-6)


def test_loss_scaling_with_nothing_but_bad_batches():
    optimizer = LossScaling(GradientAccumulation(SGD(RATE), 2), 1024.0)
    assert helpers.bits(train(optimizer, [NAN] * 5)) == helpers.bits(values(start()))
    assert int(optimizer.iterations) == 0 and float(optimizer.loss_scale) == 1024.0 / 2**5


def test_a_batch_that_is_not_finite_shows_without_loss_scaling():
    """An optimizer inside that skips such steps loses that one alone, since the sum begins anew."""
    ours = train(GradientAccumulation(SGD(RATE), 2), [GRADS[0], NAN])
    assert all(np.isnan(x).all() for x in ours)
    skipping = GradientAccumulation(Lamb(0.1, nonfinite="skip"), 2)
    ours = train(skipping, [GRADS[0], NAN, *GRADS[2:4]])
    expected = helpers.run_model(helpers.tree(SHAPES), [mean(GRADS[2:4])], model64.PRESETS["optax"], 0.1)
    helpers.assert_near(ours, expected.p, 1e-6)
    assert int(skipping.iterations) == 1


# Types, missing gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_gradients_are_summed_in_float32(dtype):
    """In 16 bits the sum of 1 and many 2**-12 stays 1: Keras's does, which is the control."""
    gradient = [1.0] + [2.0**-12] * 3
    results = {}
    for name, optimizer in (("ours", GradientAccumulation(SGD(1.0), 4)), ("keras", SGD(1.0, gradient_accumulation_steps=4))):
        variable = keras.Variable(np.zeros(3), dtype=dtype)
        optimizer.build([variable])
        for g in gradient[:-1]:
            optimizer.apply([ops.full((3,), g, dtype)], [variable])
        sums = optimizer._sums if name == "ours" else optimizer._accumulated_gradients
        results[name] = values(sums)[0], sums[0].dtype
        optimizer.apply([ops.full((3,), gradient[-1], dtype)], [variable])
        if name == "ours":
            assert variable.dtype == dtype
            np.testing.assert_allclose(values([variable])[0], -sum(gradient) / 4, rtol=2.0**-8)
    assert results["ours"][1] == "float32" and np.all(results["ours"][0] == sum(gradient[:-1]))
    assert np.all(results["keras"][0] == 1)


def test_float64_gradients_are_summed_in_float64(x64):
    """A third, too: the mean of three is not that of float32's third."""
    grads = helpers.gradients(3, SHAPES, scale=1.0, dtype=np.float64)
    variables, optimizer = start("float64"), GradientAccumulation(SGD(RATE), 3)
    first = values(variables)
    optimizer.build(variables)
    for g in grads:
        optimizer.apply(tensors(g, "float64"), variables)
    expected = [x - RATE * g for x, g in zip(first, mean(grads))]
    assert {s.dtype for s in optimizer._sums} == {"float64"}
    helpers.assert_near(values(variables), expected, 1e-15)
    assert furthest(values(variables), [x - RATE * 3 * g * np.float64(np.float32(1 / 3)) for x, g in zip(first, mean(grads))]) > 1e-9


def test_variables_without_a_gradient_are_left_alone():
    variables, optimizer = start(), GradientAccumulation(SGD(RATE, momentum=0.5), 2)
    optimizer.build(variables)
    for grads in GRADS[:4]:
        with pytest.warns(UserWarning, match="no gradient.*v1"):
            optimizer.apply([ops.convert_to_tensor(grads[0]), None], variables)
    assert helpers.bits(values(variables)[1:]) == helpers.bits(values(start())[1:])
    alone = SGD(RATE, momentum=0.5)
    first = [keras.Variable(helpers.tree(SHAPES)[0])]
    helpers.assert_near(values(variables)[:1], train(alone, [g[:1] for g in means(GRADS[:4], 2)], first), 1e-6)


def test_batches_with_gradients_of_different_variables_are_warned_of():
    """The step is for those of its last batch: what the others have summed up is lost, as in Keras."""
    variables, optimizer = start(), GradientAccumulation(SGD(RATE), 2)
    optimizer.build(variables)
    a, b = tensors(GRADS[0])
    optimizer.apply([a], variables[:1])
    with pytest.warns(UserWarning, match=r"only some have gradients of \['v0', 'v1'\], and a step is for those of its last batch"):
        optimizer.apply([b], variables[1:])
    assert helpers.bits(values(variables)[:1]) == helpers.bits(values(start())[:1])
    helpers.assert_near(values(variables)[1:], [helpers.tree(SHAPES)[1] - RATE * GRADS[0][1].astype(np.float64) / 2], 1e-6)


# Configurations, and what is refused ---------------------------------------------------------------------------------------


def test_config_round_trip():
    optimizer = GradientAccumulation(ClipByGlobalNorm(Adam(0.1), 0.5), 3, name="three")
    again = GradientAccumulation.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config() and again.steps == 3 and again.name == "three"
    assert helpers.bits(train(again, GRADS)) == helpers.bits(train(optimizer, GRADS))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GradientAccumulation(SGD(0.1), 0), "steps must be a number of batches, 1 or more, not 0"),
        (lambda: GradientAccumulation(SGD(0.1), 2.0), "steps must be a number of batches, 1 or more, not 2.0"),
        (lambda: GradientAccumulation(SGD(0.1), True), "steps must be a number of batches, 1 or more, not True"),
        (lambda: GradientAccumulation(SGD(0.1), "4"), "steps must be a number of batches, 1 or more, not '4'"),
        (lambda: GradientAccumulation(SGD(0.1), None), "steps must be a number of batches, 1 or more, not None"),
        (lambda: GradientAccumulation(SGD(0.1, gradient_accumulation_steps=2), 2), r"GradientAccumulation\(\.\.\., steps=\.\.\.\)"),
        (lambda: GradientAccumulation(ClipByGlobalNorm(GradientAccumulation(SGD(0.1), 2), 1.0), 2), "GradientAccumulation inside this GradientAccumulation"),
        (lambda: GradientAccumulation(LossScaling(SGD(0.1)), 2), "cannot be around a LossScaling"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_that_go_past_the_accumulation():
    """With aggregate=False nothing would ever be summed up, and no step would ever be taken."""
    for optimizer in (GradientAccumulation(SGD(0.1), 2), OptimizerWrapper(GradientAccumulation(SGD(0.1), 2))):
        variables = start()
        with pytest.raises(ValueError, match="leaves out transform_gradients, which is what accumulates"):
            optimizer.apply_gradients(zip(tensors(GRADS[0]), variables), aggregate=False)
        assert helpers.bits(values(variables)) == helpers.bits(values(start()))
