"""DecoupledWeightDecay: against Keras's AdamW and `weight_decay` arguments, and float64. test_on_jax.py runs this file once more on JAX."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import helpers
import xla_lamb.keras
from xla_lamb.minimize import ClipByGlobalNorm, DecoupledWeightDecay, GradientAccumulation, LossScaling

BACKEND = keras.backend.backend()
NAMES = ["encoder/kernel", "encoder/bias", "norm/gamma"]
SHAPES = [(3, 2), (5,), (4,)]
GRADS = helpers.gradients(5, SHAPES, scale=1.0)
SGD = keras.optimizers.SGD
RATE = 0.25  # float32 holds it, as Keras's learning rate is


def values(variables):
    return [np.asarray(ops.convert_to_numpy(v), np.float64) for v in variables]


def start(dtype="float32", arrays=None):
    variables = []
    for name, x in zip(NAMES, arrays or helpers.tree(SHAPES)):
        layer, name = name.split("/")
        with keras.name_scope(layer):
            variables.append(keras.Variable(x, dtype=dtype, name=name))
    return variables


def tensors(grads, dtype="float32"):
    return [ops.convert_to_tensor(g, dtype) for g in grads]


def train(optimizer, gradients=GRADS, variables=None):
    variables = variables or start()
    optimizer.build(variables)
    for grads in gradients:
        optimizer.apply(tensors(grads), variables)
    return values(variables)


def model(decays, gradients=GRADS, weight_decay=0.1, rate=RATE, arrays=None):
    """SGD with decoupled decay in float64: decays(i, t) says whether variable i decays in step t."""
    p = [np.asarray(x, np.float64) for x in arrays or helpers.tree(SHAPES)]
    for t, grads in enumerate(gradients):
        p = [x - (rate * weight_decay * x if decays(i, t) else 0) - rate * np.asarray(g, np.float64) for i, (x, g) in enumerate(zip(p, grads))]
    return p


def furthest(a, b):
    return max(map(helpers.error, a, b))


# Which, and how much -------------------------------------------------------------------------------------------------------

PEERS = {
    "AdamW": (lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.AdamW(0.1, weight_decay=0.2)),
    "SGD": (lambda: SGD(0.1, momentum=0.9), lambda: SGD(0.1, momentum=0.9, weight_decay=0.2)),
    "Lamb": (lambda: xla_lamb.keras.Lamb(0.1, variant="keras"), lambda: keras.optimizers.Lamb(0.1, weight_decay=0.2)),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("excluded", [False, True])
def test_like_keras(name, excluded):
    inner, peer = (make() for make in PEERS[name])
    if excluded:
        peer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    theirs = train(peer)
    ours = train(DecoupledWeightDecay(inner, 0.2, ["kernel"] if excluded else None))
    helpers.assert_near(ours, theirs, 2e-6)
    assert furthest(train(DecoupledWeightDecay(PEERS[name][0](), 0.21, ["kernel"] if excluded else None)), theirs) > 1e-4


@pytest.mark.parametrize(
    "choose, which",
    [
        (lambda v: None, [0, 1, 2]),
        (lambda v: [v[0], v[2]], [0, 2]),
        (lambda v: (x for x in v[1:]), [1, 2]),
        (lambda v: (), []),
        (lambda v: ["^encoder/", "nothing has this name"], [0, 1]),
        (lambda v: (p for p in ["bias$", "gamma"]), [1, 2]),
        (lambda v: lambda variable, iterations: len(variable.shape) > 1, [0]),
        (lambda v: lambda variable, iterations: np.bool_("bias" in variable.path), [1]),
        # As in exclude_from_weight_decay, a pattern that matches nothing is none that is wrong: one list may serve several models.
        (lambda v: ["Kernel"], []),
    ],
    ids=["all", "list", "generator", "empty", "patterns", "generator of patterns", "function", "numpy bool", "no match"],
)
def test_which_variables_decay(choose, which):
    variables = start()
    optimizer = DecoupledWeightDecay(SGD(RATE), 0.1, choose(variables))
    ours = train(optimizer, variables=variables)
    assert not {id(v) for v in variables} & {id(v) for v in optimizer.variables}  # they are the model's
    helpers.assert_near(ours, model(lambda i, t: i in which), 5e-7)
    for other in range(3):
        if other in which:
            assert furthest(ours, model(lambda i, t: i in which and i != other)) > 1e-3


def test_list_of_tensorflow_variables():
    """Which have a method `value`, and all the same name."""
    import tensorflow as tf

    variables = [tf.Variable(x) for x in helpers.tree(SHAPES)]
    optimizer = DecoupledWeightDecay(SGD(RATE), 0.1, [variables[0], variables[2]])
    for grads in GRADS:
        optimizer.apply_gradients(zip(tensors(grads), variables))
    helpers.assert_near(values(variables), model(lambda i, t: i != 1), 5e-7)


def every_other(variable, iterations):
    """The kernel in even steps, the others in odd ones."""
    return ops.equal(iterations % 2, 0 if len(variable.shape) > 1 else 1)


def test_function_that_differs_from_step_to_step():
    ours = train(DecoupledWeightDecay(SGD(RATE), 0.1, every_other))
    helpers.assert_near(ours, model(lambda i, t: t % 2 == (0 if i == 0 else 1)), 5e-7)
    assert furthest(ours, model(lambda i, t: t % 2 == (1 if i == 0 else 0))) > 1e-3


def test_function_that_differs_inside_one_compiled_tensorflow_function():
    import tensorflow as tf

    variables, optimizer = start(), DecoupledWeightDecay(SGD(RATE), 0.1, every_other)
    optimizer.build(variables)
    traces = []

    @tf.function(autograph=False, jit_compile=True)
    def step(*grads):
        traces.append(1)
        optimizer.apply(grads, variables)

    for grads in GRADS:
        step(*tensors(grads))
    assert len(traces) == 1
    helpers.assert_near(values(variables), model(lambda i, t: t % 2 == (0 if i == 0 else 1)), 5e-7)


def test_function_that_differs_in_fit():
    """Compiled on both backends; also a list, whose variables are not themselves while JAX compiles them."""
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    for choose, expected in (
        (lambda model: lambda v, iterations: ops.equal(iterations % 2, 1), [0, 1, 0, 1]),
        (lambda model: model.trainable_variables[:1], [1, 1, 1, 1]),
    ):
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        # No gradient to speak of, so that the decay is all that happens.
        net.compile(DecoupledWeightDecay(ClipByGlobalNorm(SGD(0.5), 1e-9), 0.5, choose(net)), loss="mse")
        net.fit(x, y, batch_size=2, verbose=0)
        np.testing.assert_allclose(values(net.trainable_variables)[0], 0.75 ** sum(expected), rtol=1e-6)


def test_set_anew_between_steps():
    variables = start()
    optimizer = DecoupledWeightDecay(SGD(RATE), 0.1, [variables[0]])
    optimizer.build(variables)
    chosen = [[variables[0]], ["bias"], [variables[1], variables[2]], None, lambda v, iterations: False]
    for choice, grads in zip(chosen, GRADS):
        optimizer.variables_to_decay = choice
        optimizer.apply(tensors(grads), variables)
    which = [{0}, {1}, {1, 2}, {0, 1, 2}, set()]
    helpers.assert_near(values(variables), model(lambda i, t: i in which[t]), 5e-7)
    with pytest.raises(ValueError, match=r"\['other/w'\] are to decay, and are none of the variables that .* is built with: \['encoder/kernel'"):
        with keras.name_scope("other"):
            optimizer.variables_to_decay = [keras.Variable(np.ones(2), name="w")]
    assert callable(optimizer.variables_to_decay)  # the old one


def test_schedules():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.25, 0.5, 0.125])
    rates = [0.25, 0.25, 0.5, 0.5, 0.125]

    def expected(decays, rates):
        p = [np.float64(x) for x in helpers.tree(SHAPES)]
        for wd, rate, grads in zip(decays, rates, GRADS):
            p = [x - rate * wd * x - rate * np.float64(g) for x, g in zip(p, grads)]
        return p

    helpers.assert_near(train(DecoupledWeightDecay(SGD(RATE), schedule)), expected(rates, [RATE] * 5), 5e-7)
    helpers.assert_near(train(DecoupledWeightDecay(SGD(schedule), 0.1)), expected([0.1] * 5, rates), 5e-7)
    helpers.assert_near(train(SGD(schedule, weight_decay=0.1)), expected([0.1] * 5, rates), 5e-7)
    both = train(DecoupledWeightDecay(SGD(schedule), lambda iterations: 0.1 / ops.cast(iterations + 1, "float32")))
    helpers.assert_near(both, expected([0.1, 0.05, 0.1 / 3, 0.025, 0.02], rates), 5e-7)
    assert furthest(both, expected([0.1] * 5, rates)) > 1e-3


# Types ---------------------------------------------------------------------------------------------------------------------


def test_small_decay_is_not_rounded_to_the_precision_of_one():
    """10.5 times 2**-24: of 1 - shrink float32 holds 10 or 11 of it, for all elements alike; each element's own rounding is as often up as down."""
    x = np.linspace(1, 2, 4096, endpoint=False, dtype=np.float32)
    shrink = 10.5 * 2.0**-24
    variable = keras.Variable(x)
    train(DecoupledWeightDecay(SGD(RATE), shrink / RATE), [[np.zeros_like(x)]], [variable])
    decay = lambda after: np.sum(x - after, dtype=np.float64) / (shrink * np.sum(x, dtype=np.float64))
    assert abs(decay(values([variable])[0]) - 1) < 0.01
    assert abs(decay(x * (np.float32(1) - np.float32(shrink))) - 1) > 0.03


@pytest.mark.parametrize("dtype, unit", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_sixteen_bit_variables(dtype, unit):
    """The arithmetic is float32: the step and the decay round once each to the variable's type, as the model here does."""
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    p = [np.asarray(x, kind) for x in helpers.tree(SHAPES)]
    variables = start(dtype, p)
    optimizer = DecoupledWeightDecay(SGD(RATE), 0.3)
    optimizer.build(variables)
    for _ in range(4):
        optimizer.apply([ops.zeros(s, dtype) for s in SHAPES], variables)
        p = [(x.astype(np.float64) * (1 - RATE * 0.3)).astype(kind) for x in p]
    for ours, expected in zip(values(variables), p):
        np.testing.assert_allclose(ours, expected.astype(np.float64), rtol=2.1 * unit)  # a tie may go the other way once
    assert {v.dtype for v in variables} == {dtype}
    # 0.07 would be 0.0703 in bfloat16, and Keras, which multiplies in the variable's type, is further away.
    assert furthest(values(variables), [np.float64(x) for x in helpers.tree(SHAPES)]) > 0.2


def test_float64_variables(x64):
    grads, arrays = helpers.gradients(5, SHAPES, dtype=np.float64), helpers.tree(SHAPES, dtype=np.float64)
    variables = start("float64", arrays)
    optimizer = DecoupledWeightDecay(SGD(RATE), 0.1)
    optimizer.build(variables)
    for g in grads:
        optimizer.apply(tensors(g, "float64"), variables)
    expected = model(lambda i, t: True, grads, arrays=arrays)
    helpers.assert_near(values(variables), expected, 1e-14)
    assert furthest(values(variables), model(lambda i, t: True, grads, weight_decay=np.float64(np.float32(0.1)), arrays=arrays)) > 1e-10


# Only with a step ----------------------------------------------------------------------------------------------------------


def test_no_decay_without_a_step():
    """A skipped step and a batch of an accumulation leave the variables alone, whatever is in them."""
    nan = [np.full(s, np.nan, np.float32) for s in SHAPES]
    arrays = [*helpers.tree(SHAPES[:2]), np.array([np.inf, 1, np.nan, -0.0], np.float32)]
    schedule = lambda iterations: float("nan") * ops.cast(iterations, "float32")
    for weight_decay in (0.1, schedule):
        for make in (
            lambda: LossScaling(DecoupledWeightDecay(xla_lamb.keras.Lamb(0.1), weight_decay), 1.0),
            lambda: DecoupledWeightDecay(xla_lamb.keras.Lamb(0.1, nonfinite="skip"), weight_decay),
            lambda: DecoupledWeightDecay(GradientAccumulation(SGD(0.1), 2), weight_decay, every_other),
        ):
            variables, optimizer = start(arrays=arrays), make()
            optimizer.build(variables)
            optimizer.apply(tensors(nan), variables)
            assert helpers.bits(values(variables)) == helpers.bits([x.astype(np.float64) for x in arrays])
            assert int(optimizer.iterations) == 0


def test_decays_with_the_steps_of_an_accumulation():
    means = [[(a + b) / 2 for a, b in zip(*GRADS[i : i + 2])] for i in (0, 2)]
    for make in (
        lambda: DecoupledWeightDecay(GradientAccumulation(SGD(RATE), 2), 0.1, every_other),
        lambda: GradientAccumulation(DecoupledWeightDecay(SGD(RATE), 0.1, every_other), 2),
    ):
        helpers.assert_near(train(make()), model(lambda i, t: t % 2 == (0 if i == 0 else 1), means), 5e-7)


def test_variables_without_a_gradient_do_not_decay():
    """As in Keras."""
    results = []
    for optimizer in (DecoupledWeightDecay(SGD(RATE), 0.1, ["encoder"]), SGD(RATE, weight_decay=0.1)):
        variables = start()
        optimizer.build(variables)
        with pytest.warns(UserWarning, match="encoder/bias"):
            optimizer.apply([ops.convert_to_tensor(GRADS[0][0]), None, ops.zeros(4)], variables)
        results.append(values(variables))
    helpers.assert_near(results[0][:2], results[1][:2], 1e-6)
    assert np.array_equal(results[0][1], np.float64(helpers.tree(SHAPES)[1]))


def test_several_around_one_another():
    optimizer = DecoupledWeightDecay(DecoupledWeightDecay(SGD(RATE), 0.1, ["kernel"]), 0.4, ["bias"])
    p = model(lambda i, t: i == 0)
    p[1] = model(lambda i, t: i == 1, weight_decay=0.4)[1]
    helpers.assert_near(train(optimizer), p, 5e-7)


# Configurations and saved models -------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="test_weight_decay")
def chosen_function(variable, iterations):
    return ops.logical_and("kernel" in variable.path, ops.equal(iterations % 2, 0))


@keras.saving.register_keras_serializable(package="test_weight_decay")
def falling(iterations):
    return 0.5 / ops.cast(iterations + 1, "float32")


@pytest.mark.parametrize(
    "weight_decay, choose",
    [
        (0.1, lambda v: None),
        (0.1, lambda v: ["kernel$"]),
        (falling, lambda v: [v[1], v[2]]),
        (keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5), lambda v: chosen_function),
    ],
    ids=["all", "patterns", "list", "function"],
)
@pytest.mark.parametrize("built", [False, True])
def test_config_round_trip(weight_decay, choose, built):
    variables = start()
    optimizer = DecoupledWeightDecay(SGD(RATE), weight_decay, choose(variables))
    if built:
        optimizer.build(variables)
    again = DecoupledWeightDecay.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    expected = train(optimizer, variables=variables)
    assert helpers.bits(train(again)) == helpers.bits(expected)
    assert furthest(expected, model(lambda i, t: False)) > 1e-3
    third = DecoupledWeightDecay.from_config(again.get_config())  # of one that has positions
    assert helpers.bits(train(third)) == helpers.bits(expected)


def test_config_for_other_variables():
    variables = start()
    unbuilt = DecoupledWeightDecay(SGD(RATE), 0.1, [variables[1]]).get_config()
    others = [keras.Variable(x, name="other") for x in helpers.tree(SHAPES)]
    with pytest.raises(ValueError, match=r"\['encoder/bias'\] are to decay, and are none of the variables"):
        DecoupledWeightDecay.from_config(unbuilt).build(others)
    same = [keras.Variable(x, name="v") for x in helpers.tree(SHAPES)]
    with pytest.raises(ValueError, match=r"several are named \['v'\]"):
        DecoupledWeightDecay.from_config(DecoupledWeightDecay(SGD(RATE), 0.1, [same[1]]).get_config()).build(same)
    built = DecoupledWeightDecay(SGD(RATE), 0.1, [same[1]])
    built.build(same)
    # Once it was built, the positions are known.
    helpers.assert_near(train(DecoupledWeightDecay.from_config(built.get_config()), variables=same), model(lambda i, t: i == 1), 5e-7)
    with pytest.raises(ValueError, match=r"\[1\] are to decay"):
        DecoupledWeightDecay.from_config(built.get_config()).build(same[:1])


def test_list_survives_saving_a_model(tmp_path):
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    net.compile(DecoupledWeightDecay(SGD(0.5), 0.5, [net.layers[1].kernel]), loss="mse")
    net.fit(x, y, verbose=0)
    net.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    assert loaded.optimizer._given() == {"positions": [2], "paths": []}
    for model_ in (net, loaded):
        model_.optimizer.learning_rate = 0.25
        model_.fit(x, y, verbose=0)
    helpers.assert_near(values(loaded.trainable_variables), values(net.trainable_variables), 1e-6)
    with pytest.raises(AssertionError):
        loaded.optimizer.variables_to_decay = None
        loaded.compile(loaded.optimizer, loss="mse")
        for model_ in (net, loaded):
            model_.fit(x, y, verbose=0)
        helpers.assert_near(values(loaded.trainable_variables), values(net.trainable_variables), 1e-6)


# What is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: DecoupledWeightDecay(SGD(0.1), -0.1), ValueError, "weight_decay must be a finite number that is not negative, not -0.1"),
        (lambda: DecoupledWeightDecay(SGD(0.1), float("nan")), ValueError, "weight_decay is NaN"),
        (lambda: DecoupledWeightDecay(SGD(0.1), None), TypeError, "weight_decay must be a number or a function of iterations, not None"),
        (lambda: DecoupledWeightDecay(SGD(0.1), "0.1"), TypeError, "weight_decay must be a number or a function of iterations, not '0.1'"),
        (lambda: DecoupledWeightDecay(SGD(0.1), True), TypeError, "weight_decay must be a number or a function of iterations, not True"),
        (lambda: DecoupledWeightDecay(SGD(0.1), lambda: 0.1), TypeError, "weight_decay may be a function of iterations, and .* cannot be called so"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, "kernel"), TypeError, "variables must be None, a list of variables or of regular expressions, or a function, not 'kernel'"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, 3), TypeError, "variables must be None, a list .* not 3"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, ["("]), ValueError, r"variables: '\(' is not a regular expression"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, ["a", 3]), TypeError, "variables must hold regular expressions, not 3"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, [np.ones(3)]), TypeError, "variables must hold regular expressions, not array"),
        (lambda: DecoupledWeightDecay(SGD(0.1), 0.1, lambda v: True), TypeError, "variables may be a function of a variable and iterations, and .* cannot be called so"),
        (lambda: DecoupledWeightDecay(keras.optimizers.AdamW(), 0.1), ValueError, "adam_?w.* has weight_decay=0.004, and all variables would decay twice"),
        (lambda: DecoupledWeightDecay(ClipByGlobalNorm(SGD(0.1, weight_decay=0.1), 1.0), 0.1), ValueError, "would decay twice"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_list_with_a_variable_of_somebody_else():
    variables = start()
    with keras.name_scope("other"):
        other = keras.Variable(np.ones(2), name="w")
    message = r"\['other/w'\] are to decay, and are none of the variables that '.*' is built with: \['encoder/kernel', 'encoder/bias', 'norm/gamma'\]"
    with pytest.raises(ValueError, match=message):
        DecoupledWeightDecay(SGD(0.1), 0.1, [variables[0], other]).build(variables)
    with pytest.raises(ValueError, match=message):
        DecoupledWeightDecay(SGD(0.1), 0.1, [other]).apply(tensors(GRADS[0]), variables)
    assert helpers.bits(values(variables)) == helpers.bits(values(start()))


def test_a_function_that_forgets_to_return():
    variables = start()
    optimizer = DecoupledWeightDecay(SGD(0.1), 0.1, lambda variable, iterations: None)
    with pytest.raises(TypeError, match="returned None for encoder/kernel: it must return True or False"):
        optimizer.apply(tensors(GRADS[0]), variables)
    assert helpers.bits(values(variables)) == helpers.bits(values(start()))


def test_an_optimizer_that_decays_the_others_itself():
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.3)
    inner.exclude_from_weight_decay(var_names=["kernel"])
    peer = keras.optimizers.AdamW(0.1, weight_decay=0.3)
    peer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    ours = train(DecoupledWeightDecay(inner, 0.3, ["kernel"]))
    helpers.assert_near(ours, train(keras.optimizers.AdamW(0.1, weight_decay=0.3)), 2e-6)
    assert furthest(ours, train(peer)) > 1e-3
