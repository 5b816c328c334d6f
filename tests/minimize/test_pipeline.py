"""The steps of minimize: their order, arguments and contracts, every way through them, and what is said when something is wrong.

Runs on both of Keras's backends; what needs a tape has tensorflow in its name."""

import logging
import types
import warnings

import conftest  # noqa: F401  (settings of the environment, before Keras is imported)
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import helpers
import model64
import xla_lamb.keras
from xla_lamb import minimize
from xla_lamb.minimize import ClipByGlobalNorm, DifferentialPrivacy, GradientAccumulation, GradsAndVars, LossScaling, MovingAverage, OptimizerWrapper
from xla_lamb.minimize import gradients as gradients_module

BACKEND = keras.backend.backend()
Lamb, SGD, Adam = xla_lamb.keras.Lamb, keras.optimizers.SGD, keras.optimizers.Adam
GRADIENTS = ["transform_unaggregated_gradients", "aggregate_gradients", "transform_gradients"]
LAST = ["skip_updates", "apply_updates"]
FIT = ["transform_loss", *GRADIENTS, *LAST]  # Keras computes the gradients itself
STEPS = ["transform_loss", "get_gradients", *GRADIENTS, *LAST]
# What Recorder multiplies by in each step: primes, so that a product says which steps ran, and how often.
FACTORS = {"transform_loss": 3, "get_gradients": 5, "transform_unaggregated_gradients": 7, "aggregate_gradients": 11, "transform_gradients": 13}
ALL = 3 * 5 * 7 * 11 * 13
RATE = 2.0**-10  # so that all numbers are exact in float32


class Recorder(OptimizerWrapper):
    """Notes each step, with what it got, and multiplies by the step's factor."""

    def __init__(self, inner, log=None, label="", **options):
        super().__init__(inner, **options)
        object.__setattr__(self, "log", [] if log is None else log)  # untracked
        object.__setattr__(self, "label", label)

    def note(self, step, *arguments):
        replica = BACKEND != "tensorflow" or (tf.distribute.get_replica_context() is not None and not tf.distribute.in_cross_replica_context())
        self.log.append((f"{self.label}{step}", tuple(map(self.kind, arguments)), replica))

    @staticmethod
    def kind(x):
        if isinstance(x, GradsAndVars):
            assert all(tuple(g.shape) == tuple(v.shape) for g, v in zip(x.raw, x.variables))
            return f"{len(x)} pairs"
        if isinstance(x, list):
            assert all(isinstance(v, (tf.Variable, keras.Variable)) for v in x)
            return f"{len(x)} variables"
        if isinstance(x, tf.GradientTape):
            return "tape"
        assert x.shape == ()
        return "loss"

    def times(self, step, pairs):
        return [(g * FACTORS[step], v) for g, v in pairs]

    def transform_loss(self, loss):
        self.note("transform_loss", loss)
        return super().transform_loss(loss) * FACTORS["transform_loss"]

    def get_gradients(self, loss, variables, tape):
        self.note("get_gradients", loss, variables, tape)
        pairs = super().get_gradients(loss, variables, tape)
        return [(None if g is None else tf.convert_to_tensor(g) * FACTORS["get_gradients"], v) for g, v in pairs]

    def transform_unaggregated_gradients(self, grads_and_vars):
        self.note("transform_unaggregated_gradients", grads_and_vars)
        return super().transform_unaggregated_gradients(self.times("transform_unaggregated_gradients", grads_and_vars))

    def aggregate_gradients(self, grads_and_vars):
        self.note("aggregate_gradients", grads_and_vars)
        return self.times("aggregate_gradients", super().aggregate_gradients(grads_and_vars))

    def transform_gradients(self, grads_and_vars):
        self.note("transform_gradients", grads_and_vars)
        return super().transform_gradients(self.times("transform_gradients", grads_and_vars))

    def skip_updates(self, grads_and_vars):
        self.note("skip_updates", grads_and_vars)
        return super().skip_updates(grads_and_vars)

    def apply_updates(self, grads_and_vars):
        self.note("apply_updates", grads_and_vars)
        super().apply_updates(grads_and_vars)

    def ran(self):
        """The names of the steps, and then none."""
        names = [step for step, _, _ in self.log]
        assert all(replica for _, _, replica in self.log)
        self.log.clear()
        return names


def pair(a=(1.0, 2.0), b=((3.0,),)):
    """Two variables of the backend."""
    return [keras.Variable(np.array(a, "float32"), name="a"), keras.Variable(np.array(b, "float32"), name="b")]


def reset(variables):
    for v, x in zip(variables, pair()):
        v.assign(x)


def numbers(variables):
    return [np.array(ops.convert_to_numpy(v), np.float64) for v in variables]


def assert_stepped(variables, before, factor):
    """One step of SGD from `before` on the sum of squares, its gradient multiplied by `factor`; exactly."""
    for v, p in zip(numbers(variables), before):
        np.testing.assert_array_equal(v, p - RATE * factor * 2 * p)


# Order, arguments and numbers ------------------------------------------------------------------------------------------------


def squares(variables):
    return tf.add_n([tf.reduce_sum(tf.convert_to_tensor(v) ** 2) for v in variables])


def tape_outside(optimizer, variables):
    with tf.GradientTape() as tape:
        loss = squares(variables)
    return optimizer.minimize(loss, variables, tape)


def tape_inside(optimizer, variables):
    with tf.GradientTape() as tape:
        loss = squares(variables)
        return optimizer.minimize(loss, variables, tape)


def persistent(optimizer, variables):
    with tf.GradientTape(persistent=True) as tape:
        loss = squares(variables)
    result = optimizer.minimize(loss, variables, tape)
    assert tape.gradient(loss, variables[0]) is not None
    return result


def persistent_inside(optimizer, variables):
    with tf.GradientTape(persistent=True) as tape:
        loss = squares(variables)
        return optimizer.minimize(loss, variables, tape)


def own_loop(aggregate_first, aggregate_then, through=lambda x: x):
    def way(optimizer, variables):
        pairs = through(optimizer.compute_gradients(lambda: squares(variables), variables, aggregate=aggregate_first))
        return optimizer.apply_gradients(pairs, aggregate=aggregate_then)

    return way


def scaled_first(optimizer, variables):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(squares(variables))
    return optimizer.minimize(loss, variables, tape)


class TestTensorflowOrder:
    """Every way that TensorFlow offers to go through the steps."""

    WAYS = {
        "tape outside": tape_outside,
        "tape inside": tape_inside,
        "persistent": persistent,
        "persistent, inside": persistent_inside,
        "callable": lambda optimizer, variables: optimizer.minimize(lambda: squares(variables), variables),
        "callable and tape": lambda optimizer, variables: optimizer.minimize(lambda: squares(variables), variables, tf.GradientTape()),
        "tf.function": tf.function(tape_outside),
        "tf.function, inside": tf.function(tape_inside),
        "jit": tf.function(tape_outside, jit_compile=True),
        "compute, apply": own_loop(False, True),
        "aggregated, apply": own_loop(True, True),
        "aggregated, not again": own_loop(True, False),
        "list": own_loop(False, True, list),
        "aggregated, list": own_loop(True, True, list),
        "aggregated, zip": own_loop(True, True, lambda pairs: zip(*zip(*pairs))),
        "aggregated, slice": own_loop(True, True, lambda pairs: pairs[:]),
        "in tf.function": tf.function(own_loop(True, True, list)),
        "scale_loss, minimize": scaled_first,
    }

    @pytest.mark.parametrize("way", WAYS)
    def test_every_step_once_and_in_order(self, way):
        variables = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
        optimizer = Recorder(SGD(RATE))
        optimizer.build(variables)
        before = numbers(variables)
        with autograph_messages() as messages:
            iterations = self.WAYS[way](optimizer, variables)
        assert all("on a persistent tape inside its context" in m for m in messages)  # TensorFlow's word on what its user wrote; none of AutoGraph
        assert bool(messages) == (way == "persistent, inside")
        assert int(iterations) == 1 == int(optimizer.iterations)
        kinds = {step: arguments for step, arguments, _ in optimizer.log}
        assert optimizer.ran() == STEPS
        assert kinds["transform_loss"] == ("loss",) and kinds["get_gradients"] == ("loss", "2 variables", "tape")
        assert all(kinds[step] == ("2 pairs",) for step in [*GRADIENTS, *LAST])
        assert_stepped(variables, before, ALL)

    def test_control_another_product_is_seen(self):
        variables = pair()
        before = numbers(variables)
        tape_outside(Recorder(SGD(RATE)), variables)
        with pytest.raises(AssertionError):
            assert_stepped(variables, before, ALL * 13)

    def test_neither_aggregated_nor_to_be(self):
        """As asked: without steps 4 and 5."""
        optimizer, variables = Recorder(SGD(RATE)), pair()
        before = numbers(variables)
        own_loop(False, False)(optimizer, variables)
        assert optimizer.ran() == [s for s in STEPS if s not in GRADIENTS[1:]]
        assert_stepped(variables, before, ALL / 11 / 13)

    def test_changed_gradients_are_new_ones(self):
        """They do not know what is behind them: apply_gradients is told by `aggregate`."""
        optimizer, variables = Recorder(SGD(RATE)), pair()
        changed = lambda pairs: [(g * 2, v) for g, v in pairs]
        before = numbers(variables)
        own_loop(True, False, changed)(optimizer, variables)
        assert optimizer.ran() == STEPS
        assert_stepped(variables, before, 2 * ALL)

    def test_gradients_of_another_optimizer_are_new_ones(self):
        first, second, variables = Recorder(SGD(RATE)), Recorder(SGD(RATE)), pair()
        pairs = first.compute_gradients(lambda: squares(variables), variables, aggregate=True)
        second.apply_gradients(pairs)
        assert second.ran() == [*GRADIENTS[1:], *LAST]

    def test_keras_loop(self):
        optimizer, variables = Recorder(SGD(RATE)), pair()
        for _ in range(2):
            reset(variables)
            before = numbers(variables)
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(squares(variables))
            optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables))
            assert optimizer.ran() == FIT
            assert_stepped(variables, before, ALL / 5)

    def test_naive_loop(self):
        """Without scale_loss: apply_gradients does what its name says, after a loop of Keras's too."""
        optimizer, variables = Recorder(SGD(RATE)), pair()
        optimizer.scale_loss(tf.ones(()))
        optimizer.apply_gradients([(tf.ones(2), variables[0]), (tf.ones((1, 1)), variables[1])])
        optimizer.log.clear()
        reset(variables)
        before = numbers(variables)
        with tf.GradientTape() as tape:
            loss = squares(variables)
        optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables))
        assert optimizer.ran() == [*GRADIENTS[1:], *LAST]
        assert_stepped(variables, before, 11 * 13)

    def test_loss_of_several_elements_counts_with_its_sum(self):
        variables = pair()
        before = numbers(variables)
        OptimizerWrapper(SGD(RATE)).minimize(lambda: [tf.convert_to_tensor(v) ** 2 for v in variables], variables)
        assert_stepped(variables, before, 1)

    def test_train_steps(self):
        """An overridden train_step, of both styles, and Model of this module."""

        class Own(keras.Model):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = ops.sum(self(data[0]) ** 2)
                self.optimizer.minimize(loss, self.trainable_variables, tape)
                return {"loss": loss}

        class KerasStyle(keras.Model):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = self.optimizer.scale_loss(ops.sum(self(data[0]) ** 2))
                self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
                return {"loss": loss}

        for kind, steps, factor in ((Own, STEPS, ALL), (KerasStyle, FIT, ALL / 5), (minimize.Model, STEPS, ALL)):
            fit_once(kind, steps, factor, jit_compile=True)
        fit_once(Own, STEPS, ALL, jit_compile=False)

    def test_model_shows_the_loss_of_keras(self):
        losses = []
        for kind, optimizer in ((minimize.Model, OptimizerWrapper(SGD(0.1), transform_loss=lambda loss: loss * 100)), (keras.Model, SGD(10.0)), (minimize.Model, SGD(10.0))):
            model = one_weight(kind)
            model.compile(optimizer, loss="mse")
            x = np.array([[1.0], [2.0], [4.0], [8.0]], "float32") / 64
            losses.append(model.fit(x, 3 * x, sample_weight=np.arange(4.0), batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"])
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
        np.testing.assert_array_equal(losses[1], losses[2])


class autograph_messages:
    """Collects what TensorFlow logs, such as that AutoGraph could not convert something."""

    def __enter__(self):
        self.messages, self.handler = [], logging.Handler(logging.WARNING)
        self.handler.emit = lambda record: self.messages.append(record.getMessage())
        tf.get_logger().addHandler(self.handler)
        return self.messages

    def __exit__(self, *exception):
        tf.get_logger().removeHandler(self.handler)


def one_weight(kind=keras.Model):
    """y = 2 * x, with one weight."""
    x = keras.Input((1,))
    return kind(x, keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(2.0))(x))


def fit_once(kind, steps, factor, optimizer=None, **options):
    optimizer = optimizer or Recorder(SGD(RATE))
    model = one_weight(kind)
    model.compile(optimizer, loss=lambda y, y_pred: ops.sum(y_pred**2), **options)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    ran = optimizer.ran()
    assert ran and ran == steps * (len(ran) // len(steps))  # functions may be traced more than once
    assert_stepped(model.trainable_variables, [np.array([[2.0]])], factor)


@pytest.mark.parametrize("options", [dict(jit_compile=False), dict(jit_compile=True), dict(run_eagerly=True)], ids=str)
def test_fit(options):
    fit_once(keras.Model, FIT, ALL / 5, **options)


def test_apply_with_and_without_scale_loss():
    variables = pair()
    optimizer = Recorder(SGD(RATE))
    optimizer.build(variables)
    for scaled in (False, True, False):
        reset(variables)
        before = numbers(variables)
        factor = optimizer.scale_loss(ops.ones(())) if scaled else 1
        optimizer.apply([2 * factor * ops.convert_to_tensor(v) for v in variables])
        assert optimizer.ran() == (FIT if scaled else [*GRADIENTS[1:], *LAST])
        assert_stepped(variables, before, ALL / 5 if scaled else 11 * 13)


def nested(log, recorders=2):
    optimizer = SGD(RATE)
    for i in reversed(range(recorders)):
        kind = Recorder if i == recorders - 1 else Outer
        optimizer = kind(optimizer, log, f"{i} ")
    return optimizer


class Outer(Recorder):
    """Leaves the way of aggregation to the one inside."""

    aggregate_gradients = OptimizerWrapper.aggregate_gradients


def test_nested_the_outer_one_is_first_and_for_the_loss_the_last():
    """Recorder notes a step before it asks the one inside, so functions tell of the order of the losses."""
    seen = []

    def tell(name):
        return lambda x: (seen.append(name), x)[1]

    options = lambda label: dict(
        transform_loss=[tell(f"{label} loss 1"), tell(f"{label} loss 2")],
        transform_unaggregated_gradients=tell(f"{label} unaggregated"),
        transform_gradients=[tell(f"{label} gradients 1"), tell(f"{label} gradients 2")],
    )
    optimizer = OptimizerWrapper(OptimizerWrapper(SGD(RATE), aggregate_gradients=tell("aggregation"), **options("inner")), **options("outer"))
    variables = pair()
    optimizer.build(variables)
    optimizer.scale_loss(ops.ones(()))
    optimizer.apply([ops.ones(v.shape) for v in variables], variables)
    assert seen == [
        *["inner loss 1", "inner loss 2", "outer loss 1", "outer loss 2"],
        *["outer unaggregated", "inner unaggregated", "aggregation"],
        *["outer gradients 1", "outer gradients 2", "inner gradients 1", "inner gradients 2"],
    ]


def test_nested_every_step_of_every_wrapper_once():
    log, variables = [], pair()
    optimizer = nested(log)
    optimizer.build(variables)
    before = numbers(variables)
    factor = optimizer.scale_loss(ops.ones(()))
    optimizer.apply([2 * factor * ops.convert_to_tensor(v) for v in variables], variables)
    names = [step for step, _, _ in log]
    both = lambda step: [f"{i} {step}" for i in range(2)]
    assert names == [*both("transform_loss"), *both(GRADIENTS[0]), "1 aggregate_gradients", *both(GRADIENTS[2]), *both(LAST[0]), *both(LAST[1])]
    assert_stepped(variables, before, 3**2 * 7**2 * 11 * 13**2)


def test_tensorflow_nested_get_gradients():
    log, variables = [], pair()
    nested(log).minimize(lambda: squares(variables), variables)
    assert [s for s, _, _ in log if "get_gradients" in s] == ["0 get_gradients", "1 get_gradients"]
    factor = 9 * 25 * 49 * 11 * 169
    np.testing.assert_allclose(numbers(variables)[0], [1 - RATE * factor * 2, 2 - RATE * factor * 4], rtol=1e-6)


# Functions of the constructor ---------------------------------------------------------------------------------------------------


def run(optimizer, variables=None, gradients=None):
    """One step with all hooks: the variables."""
    variables = variables or pair()
    optimizer.build(variables)
    scale = optimizer.scale_loss(ops.ones(()))
    optimizer.apply(gradients or [2 * scale * ops.convert_to_tensor(v) for v in variables], variables)
    return variables


@pytest.mark.parametrize("step", ["transform_unaggregated_gradients", "aggregate_gradients", "transform_gradients"])
def test_functions_single_or_several_and_what_they_may_return(step):
    times = lambda k, kind: lambda pairs: kind((g * k, v) for g, v in pairs)
    for given, factor in (
        (times(2, list), 2),
        (times(2, tuple), 2),
        (times(2, iter), 2),
        (lambda pairs: pairs.scaled(2.0), 2),
        (lambda pairs: pairs, 1),
        (lambda pairs, k=4: times(k, list)(pairs), 4),
        (types.MethodType(lambda self, pairs: pairs.scaled(self), 3.0), 3),
    ):
        variables = pair()
        before = numbers(variables)
        assert_stepped(run(OptimizerWrapper(SGD(RATE), **{step: given}), variables), before, factor)
    if step != "aggregate_gradients":
        shift = lambda pairs: [(g + v, v) for g, v in pairs]  # does not commute with the others
        for several in ([times(2, list), shift], (times(2, list), shift), (f for f in (times(2, list), shift))):
            variables = pair()
            before = numbers(variables)
            assert_stepped(run(OptimizerWrapper(SGD(RATE), **{step: several}), variables), before, 2.5)


@pytest.mark.parametrize("how", ["sum", "mean", None])
def test_on_one_replica_sum_and_mean_are_the_gradients(how):
    variables = pair()
    before = numbers(variables)
    assert_stepped(run(OptimizerWrapper(SGD(RATE), aggregate_gradients=how), variables), before, 1)


@pytest.mark.parametrize("step", FACTORS.keys() - {"get_gradients"})
def test_what_is_no_function_is_refused_with_the_contract(step):
    for wrong, why in (
        (lambda a, b: a, "cannot be called with one"),
        (lambda: None, "cannot be called with one"),
        (lambda pairs, *, norm: pairs, "cannot be called with one"),
        ("clip", "is no function"),
        (3, "is no function"),
        (np.ones(2), "is no function"),
        (SGD(), "is no function"),
        ([None], "is no function"),
    ):
        with pytest.raises(TypeError, match=f"{step} takes functions of one argument: it gets the .* and returns .*({why})"):
            OptimizerWrapper(SGD(), **{step: wrong})
    if step == "aggregate_gradients":
        for wrong in ("avg", [lambda pairs: pairs]):
            with pytest.raises(TypeError, match='It also takes "sum" and "mean"'):
                OptimizerWrapper(SGD(), aggregate_gradients=wrong)


@pytest.mark.parametrize("step", ["transform_unaggregated_gradients", "aggregate_gradients", "transform_gradients"])
def test_what_a_function_must_not_return(step):
    def clip(pairs):
        return wrong(pairs)

    for wrong, error, why in (
        (lambda pairs: None, ValueError, "returned None"),
        (lambda pairs: pairs[:1], ValueError, "returned 1 pairs"),
        (lambda pairs: [*pairs, pairs[0]], ValueError, "returned 3 pairs"),
        (lambda pairs: [(None, v) for g, v in pairs], ValueError, "None as the gradient of a: return zeros"),
        (lambda pairs: [(g[None], v) for g, v in pairs], ValueError, r"of a of shape \(1, 2\), and the variable has \(2,\)"),
        (lambda pairs: [(0.0, v) for g, v in pairs], ValueError, r"of a of shape \(\), and the variable has \(2,\)"),
        (lambda pairs: pairs[::-1], ValueError, "a gradient of b at place 0, where that of a was"),
        (lambda pairs: [g for g, _ in pairs], (TypeError, ValueError), "no pairs|a gradient of .* at place 0"),
        (lambda pairs: 3, TypeError, "which are no pairs"),
        (lambda pairs: {"a": 1}, TypeError, "which are no pairs"),
        (lambda pairs: GradsAndVars(pairs[:1]), ValueError, "returned 1 pairs"),
    ):
        variables = pair()
        optimizer = OptimizerWrapper(Lamb(), **{step: clip})
        with pytest.raises(error, match=f"clip, as {step},.*({why}).*") as caught:
            run(optimizer, variables)
        assert "must return 2 (gradient, variable) pairs" in str(caught.value) or "gradient of" in str(caught.value)
        assert int(optimizer.iterations) == 0
        np.testing.assert_array_equal(numbers(variables)[0], [1, 2])


def test_the_same_of_methods_names_the_class():
    class Forgetful(OptimizerWrapper):
        def transform_gradients(self, grads_and_vars):
            super().transform_gradients(grads_and_vars)

    for optimizer in (Forgetful(SGD()), OptimizerWrapper(Forgetful(SGD()))):
        with pytest.raises(ValueError, match="Forgetful, as transform_gradients, returned None"):
            run(optimizer)


class TestTensorflowUnknownShapes:
    @pytest.mark.parametrize("step", GRADIENTS)
    def test_of_functions_in_python_are_those_of_the_variables(self, step):
        hidden = lambda pairs: [(tf.numpy_function(lambda x: 2 * x, [g], g.dtype), v) for g, v in pairs]
        variables = pair()
        optimizer = OptimizerWrapper(SGD(RATE), **{step: hidden})
        optimizer.build(variables)
        before = numbers(variables)
        tf.function(lambda: optimizer.minimize(lambda: squares(variables), variables))()
        assert_stepped(variables, before, 2)

    def test_of_the_gradients_themselves(self):
        x = tf.Variable([1.0, 2.0])
        optimizer = OptimizerWrapper(Lamb(0.1))
        optimizer.build([x])

        @tf.custom_gradient
        def through(x):
            return x, lambda g: tf.numpy_function(lambda g: g, [g], tf.float32)

        tf.function(lambda: optimizer.minimize(lambda: tf.reduce_sum(through(x) ** 2), [x]))()
        alone = tf.Variable([1.0, 2.0])
        Lamb(0.1).apply([tf.constant([2.0, 4.0])], [alone])
        np.testing.assert_array_equal(x, alone)

    @pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
    def test_norm_and_finite(self, dtype):
        @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype)])
        def measured(g):
            pairs = GradsAndVars([(g, tf.constant(0.0)), (tf.constant([1.0]), tf.constant(0.0))])
            return pairs.global_norm, pairs.finite

        g = np.array([[300.0, -400.0], [0.0, 1200.0]])
        norm, finite = measured(tf.constant(g, dtype))
        assert bool(finite) and abs(float(norm) / np.sqrt(1 + np.sum(g**2)) - 1) < 1e-6
        assert not bool(measured(tf.constant([[np.nan, 1.0]], dtype))[1])

    def test_another_one_is_an_error_when_it_is_known(self):
        wrong = lambda pairs: [(tf.numpy_function(lambda x: x[None], [g], g.dtype), v) for g, v in pairs]
        variables = pair()
        optimizer = OptimizerWrapper(SGD(RATE), transform_gradients=wrong)
        optimizer.build(variables)
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not compatible with expected shape"):
            tf.function(lambda: optimizer.minimize(lambda: squares(variables), variables))()


# Losses, tapes and variables that cannot be ---------------------------------------------------------------------------------------


class TestTensorflowWrongUse:
    def used(variables):
        with tf.GradientTape() as tape:
            loss = squares(variables)
        tape.gradient(loss, variables)
        return loss, tape

    def unwatched(variables):
        loss = squares(variables)
        with tf.GradientTape() as tape:
            pass
        return loss, tape

    CASES = {
        "no tape": (lambda v: (squares(v), v), ValueError, "cannot be differentiated without the tape.*: pass tape="),
        "used tape": (lambda v, f=used: (f(v)[0], v, f(v)[1]), ValueError, "the tape recorded nothing, or was used already"),
        "tape not entered": (lambda v: (squares(v), v, tf.GradientTape()), ValueError, "the tape recorded nothing"),
        "tape after the loss": (lambda v, f=unwatched: (f(v)[0], v, f(v)[1]), ValueError, r"no variable has a gradient: \['a', 'b'\]"),
        "None": (lambda v: (lambda: None, v), ValueError, "the loss function returned no loss"),
        "None and tape": (lambda v: (None, v, tf.GradientTape()), ValueError, "the tape recorded nothing|no loss"),
        "a number": (lambda v: (lambda: 3.0, v), TypeError, "the loss must be a tensor that was computed from the variables, not 3.0"),
        "of other variables": (lambda v: (lambda: tf.constant(3.0), v), ValueError, r"no variable has a gradient: \['a', 'b'\]. Was the loss computed from them"),
        "integers": (lambda v: (lambda: tf.cast(squares(v), tf.int32), v), ValueError, "no variable has a gradient"),
        "no variables": (lambda v: (lambda: squares(v), []), ValueError, "there are no variables"),
        "a tensor": (lambda v: (lambda: squares(v), [tf.ones(2)]), TypeError, "variables must be tf.Variables or Keras variables"),
        "an array": (lambda v: (lambda: squares(v), [np.ones(2)]), TypeError, "variables must be tf.Variables or Keras variables"),
        "a name": (lambda v: (lambda: squares(v), "a"), TypeError, "variables must be tf.Variables or Keras variables"),
        "a layer": (lambda v: (lambda: squares(v), keras.layers.Dense(1)), TypeError, "variables must be tf.Variables or Keras variables"),
        "twice": (lambda v: (lambda: squares(v), [v[0], v[1], v[0]]), ValueError, r"more than once: \['a'\]"),
        "no tape at all": (lambda v: (squares(v), v, "tape"), TypeError, "tape must be a tf.GradientTape, not 'tape'"),
        "forward accumulator": (lambda v: (squares(v), v, tf.autodiff.ForwardAccumulator), TypeError, "tape must be a tf.GradientTape"),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_is_refused_and_changes_nothing(self, case):
        arguments, error, why = self.CASES[case]
        variables = [tf.Variable([1.0, 2.0], name="a"), tf.Variable([[3.0]], name="b")]
        optimizer = OptimizerWrapper(SGD(RATE))
        with pytest.raises(error, match=why):
            optimizer.minimize(*arguments(variables))
        assert int(optimizer.iterations) == 0
        np.testing.assert_array_equal(variables[0], [1, 2])
        assert int(optimizer.minimize(lambda: squares(variables), variables)) == 1  # it can still be used

    def test_variables_of_any_collection_or_alone(self):
        for given in (tuple, iter, lambda v: dict(enumerate(v)).values(), lambda v: v[0]):
            variables = [tf.Variable([1.0, 2.0])]
            before = numbers(variables)
            OptimizerWrapper(SGD(RATE)).minimize(lambda: squares(variables), given(variables))
            assert_stepped(variables, before, 1)

    @pytest.mark.parametrize("inner", [Lamb, SGD])
    def test_variables_without_gradient_are_left_alone_with_a_warning(self, inner):
        for way in (lambda o, v: o.minimize(lambda: squares(v[:1]), v), lambda o, v: o.apply_gradients([(tf.ones(2), v[0]), (None, v[1])])):
            for kind in (lambda x, name: tf.Variable(x, name=name), lambda x, name: keras.Variable(x, name=name)):
                variables = [kind([1.0, 2.0], "there"), kind([3.0], "missing")]
                optimizer = OptimizerWrapper(inner(0.1))
                with pytest.warns(UserWarning, match=r"no gradient, and are left alone: \['missing'\]"):
                    way(optimizer, variables)
                there, missing = numbers(variables)
                assert missing == 3 and np.all(there < [1, 2]) and int(optimizer.iterations) == 1

    def test_slices_are_dense(self):
        """Of an embedding with repeated rows, against the dense gradient in NumPy."""
        start = np.arange(12, dtype="float32").reshape(4, 3) + 1
        rows = np.array([1, 3, 1, 1])
        dense = np.zeros((4, 3), "float32")
        np.add.at(dense, rows, np.float32(2.0))
        for inner in (lambda: Lamb(0.1), lambda: Adam(0.1)):
            for wrap in (OptimizerWrapper, lambda o: ClipByGlobalNorm(o, 1.0)):
                table, alone = tf.Variable(start), tf.Variable(start)
                wrap(inner()).minimize(lambda: tf.reduce_sum(tf.gather(table, rows) * 2), [table])
                wrap(inner()).apply_gradients([(tf.constant(dense), alone)])
                np.testing.assert_array_equal(table, alone)
                assert np.any(np.asarray(table) != start)


@pytest.mark.parametrize("given", [None, 3, [1.0, 2.0], ["ab"], [(1.0,)]], ids=str)
def test_apply_gradients_wants_pairs(given):
    with pytest.raises(TypeError, match=r"apply_gradients takes \(gradient, variable\) pairs|variables must be"):
        OptimizerWrapper(SGD()).apply_gradients(given)


def test_apply_gradients_the_wrong_way_round():
    (v,) = pair()[:1]
    for given in ([(v, ops.ones(2))], [ops.ones(2)], [ops.ones(2), ops.ones(2)]):
        with pytest.raises(TypeError, match="variables must be|takes .* pairs"):
            OptimizerWrapper(SGD()).apply_gradients(given)


def test_apply_of_other_numbers_of_gradients_and_of_nothing():
    variables = pair()
    optimizer = OptimizerWrapper(SGD())
    with pytest.raises(ValueError, match="call optimizer.build"):
        optimizer.apply([ops.ones(2)])
    optimizer.build(variables)
    with pytest.raises(ValueError, match="there are 2 variables, but 1 gradients"):
        optimizer.apply([ops.ones(2)])
    optimizer.apply([], [])
    assert int(optimizer.iterations) == 0
    with pytest.raises(ValueError, match="no variables"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply_gradients([(ops.ones(2), pair()[0])])


@pytest.mark.parametrize("inner", [Lamb, Adam])
def test_gradients_of_any_kind(inner):
    """Lists, arrays of float64, and a GradsAndVars that somebody has made."""
    for kind in (lambda g, v: [(g.tolist(), v)], lambda g, v: [(g.astype("float32"), v)], lambda g, v: GradsAndVars([(g.tolist(), v), (None, keras.Variable(1.0))])):
        (ours, alone) = pair()[0], pair()[0]
        g = np.array([0.5, -0.25])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            OptimizerWrapper(inner(0.1)).apply_gradients(kind(g, ours))
        inner(0.1).apply([ops.convert_to_tensor(g, "float32")], [alone])
        np.testing.assert_array_equal(numbers([ours]), numbers([alone]))


def test_without_a_tape_on_jax():
    if BACKEND == "tensorflow":
        return  # there is one
    with pytest.raises(NotImplementedError, match="a tape is TensorFlow's.*use Model.fit, or stateless_apply"):
        OptimizerWrapper(SGD()).minimize(lambda: 1.0, pair())


# What goes from step to step ----------------------------------------------------------------------------------------------------


def several(dtype="float32", scale=1.0):
    arrays = helpers.tree([(3, 5), (17,), (), (0,)], scale=scale, dtype=np.float64)
    return [(ops.cast(ops.convert_to_tensor(x), dtype), keras.Variable(np.zeros_like(x), dtype=dtype)) for x in arrays]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_norm_and_finite_of_scaled_gradients_against_numpy(dtype):
    given = several(dtype, scale=100.0)  # a norm whose square float16 does not hold
    pairs = GradsAndVars(given)
    arrays = [np.asarray(ops.convert_to_numpy(ops.cast(g, "float32")), np.float64) for g, _ in given]
    norm = model64.grad_norm(arrays)
    for factor in (1.0, 0.125, -3.0):
        scaled = pairs if factor == 1 else pairs.scaled(factor)
        assert abs(float(scaled.global_norm) / (norm * abs(factor)) - 1) < 1e-6
        assert bool(scaled.finite)
        for (g, _), x in zip(scaled, arrays):
            np.testing.assert_array_equal(ops.convert_to_numpy(ops.cast(g, "float32")), (x * factor).astype("float32"))
    assert keras.backend.standardize_dtype(pairs.scaled(2.0)[0][0].dtype) == "float32"
    assert keras.backend.standardize_dtype(pairs[0][0].dtype) == dtype
    clipped = pairs.scaled(2.0).clipped(norm)
    assert abs(float(clipped.global_norm) / norm - 1) < 1e-6
    assert abs(model64.grad_norm([np.asarray(g, np.float64) for g, _ in clipped]) / norm - 1) < 1e-6
    assert abs(float(pairs.clipped(norm * 2).global_norm) / norm - 1) < 1e-6


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_anywhere(bad):
    for place in range(3):
        given = several()
        g, v = given[place]
        flat = np.array(ops.convert_to_numpy(g)).ravel()
        flat[-1] = bad
        given[place] = (ops.reshape(ops.convert_to_tensor(flat), v.shape), v)
        pairs = GradsAndVars(given)
        assert not bool(pairs.finite) and not bool(pairs.scaled(0.0).finite) and not np.isfinite(float(pairs.global_norm))
        assert all(np.all(np.isnan(ops.convert_to_numpy(g))) for g, _ in pairs.clipped(1.0))
    pairs = GradsAndVars(several())
    assert not bool(pairs.scaled(bad).finite) and bool(pairs.finite)


def test_norms_that_overflow_do_not_clip_to_zero():
    pairs = GradsAndVars([(ops.full((2,), 2e38), pair()[0])]).scaled(4.0)
    assert np.all(np.isnan(ops.convert_to_numpy(pairs.clipped(1.0)[0][0])))


def test_nothing_is_multiplied_before_somebody_looks(monkeypatch):
    calls = []
    times = gradients_module._times
    monkeypatch.setattr(gradients_module, "_times", lambda g, scale: (calls.append(g), times(g, scale))[1])
    pairs = GradsAndVars(several()).scaled(2.0).clipped(0.5).skipped(ops.convert_to_tensor(False)).scaled(3.0)
    assert bool(pairs.finite) and float(pairs.global_norm) > 0 and len(pairs) == 4 and repr(pairs)
    assert not calls
    variables = pair()
    optimizer = LossScaling(ClipByGlobalNorm(OptimizerWrapper(Lamb(0.1, global_clipnorm=0.2)), 0.5))
    run(optimizer, variables)
    assert not calls
    list(pairs), pairs[0], pairs[-1]
    assert len(calls) == 4  # once


def test_a_norm_is_measured_once(monkeypatch):
    calls = []
    measure = gradients_module._norm_and_finite
    monkeypatch.setattr(gradients_module, "_norm_and_finite", lambda grads: (calls.append(1), measure(grads))[1])
    run(LossScaling(ClipByGlobalNorm(OptimizerWrapper(Lamb(0.1, global_clipnorm=0.2, nonfinite="skip")), 0.5)))
    assert len(calls) == 1


def test_tensorflow_norms_in_branches_of_a_graph():
    v = tf.Variable([3.0, 4.0])

    @tf.function
    def norms(g, flag):
        pairs = GradsAndVars([(g, v)])
        parts = [tf.cond(flag, lambda: pairs.scaled(k).global_norm, lambda: tf.zeros((), pairs.global_norm.dtype)) for k in (1.0, 2.0, 3.0)]
        return [*parts, pairs.global_norm]

    np.testing.assert_allclose([float(x) for x in norms(tf.constant([3.0, 4.0]), tf.constant(True))], [5, 10, 15, 5], rtol=1e-6)


# The numbers of the optimizer inside ------------------------------------------------------------------------------------------------

SHAPES = [(3, 4), (5,), (2, 2, 2)]
PATHS = ["dense/kernel", "dense/bias", "stack/kernel"]


def tree_variables(dtype="float32"):
    variables = []
    for path, x in zip(PATHS, helpers.tree(SHAPES)):
        layer, name = path.split("/")
        with keras.name_scope(layer):
            variables.append(keras.Variable(x, dtype=dtype, name=name))
    return variables


def trained(optimizer, dtype="float32", grads=None, naive=True):
    """Three steps: the values of the variables, and of the innermost optimizer's."""
    variables = tree_variables(dtype)
    optimizer.build(variables)
    for g in grads or helpers.gradients(3, SHAPES, scale=1.0):
        optimizer.apply([ops.cast(ops.convert_to_tensor(x), dtype) for x in g], variables)
    inner = optimizer.chain()[-1] if isinstance(optimizer, OptimizerWrapper) else optimizer
    return [np.array(ops.convert_to_numpy(ops.cast(v, "float64" if v.dtype == "float64" else "float32"))) for v in [*variables, *inner.variables]]


ALIKE = {
    "Lamb": lambda: Lamb(0.1),
    "Lamb, decay": lambda: Lamb(0.1, weight_decay=0.1, exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=["bias"], layer_axes={"stack": 1}),
    "Lamb, clipnorm": lambda: Lamb(0.1, clipnorm=0.5),
    "Lamb, clipvalue": lambda: Lamb(0.1, clipvalue=0.2),
    "LAMB": lambda: xla_lamb.keras.LAMB(0.1, weight_decay_rate=0.1),
    "Lamb, schedule": lambda: Lamb(keras.optimizers.schedules.PolynomialDecay(0.1, 3)),
    "Adam": lambda: Adam(0.1, weight_decay=0.1),
    "SGD": lambda: SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "AdamW, global_clipnorm": lambda: keras.optimizers.AdamW(0.1, global_clipnorm=0.3),
    "own": lambda: Own(0.1),
}


class Own(keras.optimizers.Optimizer):
    """What a user writes: descent with the sign of the sum of all gradients so far."""

    def build(self, variables):
        super().build(variables)
        self.sums = [self.add_variable_from_reference(v, "sum") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(ops.convert_to_tensor(total)))


@pytest.mark.parametrize("name", ALIKE)
def test_bitwise_those_of_the_optimizer_alone(name):
    alone = trained(ALIKE[name]())
    nest = OptimizerWrapper(OptimizerWrapper(ALIKE[name](), transform_gradients=lambda pairs: pairs))
    assert helpers.bits(trained(nest)) == helpers.bits(alone)


def test_control_of_bitwise():
    assert helpers.bits(trained(OptimizerWrapper(Lamb(0.1), transform_gradients=lambda pairs: pairs.scaled(1.001)))) != helpers.bits(trained(Lamb(0.1)))


def test_bitwise_in_sixteen_bits():
    dtype = "bfloat16"
    assert helpers.bits(trained(OptimizerWrapper(Lamb(0.1)), dtype)) == helpers.bits(trained(Lamb(0.1), dtype))


@pytest.mark.parametrize("options, rules", [(dict(global_clipnorm=0.5), {}), (dict(variant="nvlamb"), dict(max_grad_norm=1.0))], ids=["argument", "variant"])
def test_global_norm_of_lamb_against_the_model(options, rules):
    """The limit is below every norm."""
    grads = helpers.gradients(3, SHAPES, scale=1.0)
    base = model64.PRESETS["optax"].replace(max_grad_norm=rules.get("max_grad_norm", 0.5), weight_decay=0.01)
    assert min(map(model64.grad_norm, grads)) > base.max_grad_norm
    model = helpers.run_model(helpers.tree(SHAPES), grads, base, 0.1)
    ours = trained(OptimizerWrapper(Lamb(0.1, weight_decay=0.01, **options)))
    helpers.assert_near(ours[: len(SHAPES)], model.p, 1e-6)
    off = trained(OptimizerWrapper(Lamb(0.1, weight_decay=0.01, **{**options, "global_clipnorm": 0.0})))  # as in Keras
    free = helpers.run_model(helpers.tree(SHAPES), grads, base.replace(max_grad_norm=None), 0.1)
    helpers.assert_near(off[: len(SHAPES)], free.p, 1e-6)
    assert max(map(helpers.error, off[: len(SHAPES)], model.p)) > 1e-4  # the control


@pytest.mark.parametrize("wrap", [OptimizerWrapper, lambda o: ClipByGlobalNorm(o, 1e6)], ids=["alone", "clipped"])
def test_nonfinite_skip_of_lamb(wrap):
    grads = helpers.gradients(3, SHAPES, scale=1.0)
    good = trained(wrap(Lamb(0.1, nonfinite="skip")), grads=[grads[0], grads[2]])
    grads[1][1][2] = np.inf
    optimizer = wrap(Lamb(0.1, nonfinite="skip"))
    assert helpers.bits(trained(optimizer, grads=grads)) == helpers.bits(good)
    assert int(optimizer.iterations) == 2
    assert np.isnan(trained(wrap(Lamb(0.1)), grads=grads)[1]).any()  # the control


class EverySecond(OptimizerWrapper):
    """A user's own reason to skip."""

    def build(self, variables):
        super().build(variables)
        self.calls = self.add_variable((), "zeros", "int", name="calls")

    def skip_updates(self, grads_and_vars):
        calls = ops.convert_to_tensor(self.calls) + 0
        self.calls.assign_add(1)
        odd, inside = ops.equal(calls % 2, 1), super().skip_updates(grads_and_vars)
        return odd if inside is None else ops.logical_or(odd, inside)


@pytest.mark.parametrize("inner", [lambda: Lamb(0.1, nonfinite="skip"), lambda: Lamb(0.1), lambda: Adam(0.1), lambda: Own(0.1)])
def test_own_skip_updates_changes_nothing(inner):
    grads = helpers.gradients(4, SHAPES, scale=1.0)
    optimizer = EverySecond(inner())
    assert helpers.bits(trained(optimizer, grads=grads)) == helpers.bits(trained(inner(), grads=grads[::2]))
    assert int(optimizer.iterations) == 2


def test_own_skip_updates_in_fit():
    model = one_weight()
    model.compile(EverySecond(Lamb(0.1, nonfinite="skip")), loss="mse", jit_compile=True)
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=1, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_constraints_of_variables_are_kept():
    for inner in (Lamb(100.0), SGD(100.0)):
        variables = pair()
        variables[0].constraint = keras.constraints.NonNeg()
        run(OptimizerWrapper(inner), variables)
        assert np.all(numbers(variables)[0] == 0) and np.all(numbers(variables)[1] < 0)


# Inner optimizers and orders that make no sense --------------------------------------------------------------------------------------

functions = dict(transform_gradients=lambda pairs: pairs)
aggregation = dict(aggregate_gradients=lambda pairs: pairs)
dp = lambda inner: DifferentialPrivacy(inner, 1.0, 1.0)
REFUSED = {
    "a name": (lambda: OptimizerWrapper("lamb"), TypeError, r"such as xla_lamb.keras.Lamb\(1e-3\), not 'lamb'"),
    "a class": (lambda: OptimizerWrapper(Lamb), TypeError, "inner must be a Keras 3 optimizer"),
    "nothing": (lambda: OptimizerWrapper(None), TypeError, "inner must be a Keras 3 optimizer"),
    "loss scale optimizer": (lambda: OptimizerWrapper(keras.optimizers.LossScaleOptimizer(SGD())), ValueError, "use xla_lamb.minimize.LossScaling in its place"),
    "loss scale optimizer outside": (lambda: keras.optimizers.LossScaleOptimizer(OptimizerWrapper(SGD())), ValueError, "put an xla_lamb.minimize.LossScaling around all"),
    "loss scale factor": (lambda: OptimizerWrapper(SGD(loss_scale_factor=8.0)), ValueError, r"loss_scale_factor=8.0.*leave it out, and use xla_lamb.minimize.LossScaling"),
    "ema": (lambda: OptimizerWrapper(Lamb(use_ema=True)), ValueError, "use_ema=True.*use xla_lamb.minimize.MovingAverage"),
    "accumulation": (lambda: OptimizerWrapper(Adam(gradient_accumulation_steps=4)), ValueError, "gradient_accumulation_steps=4.*use xla_lamb.minimize.GradientAccumulation"),
    "clipping of scaled gradients": (lambda: ClipByGlobalNorm(LossScaling(Lamb()), 1.0), ValueError, "Put LossScaling around it instead"),
    "functions of scaled gradients": (lambda: OptimizerWrapper(LossScaling(Lamb()), **functions), ValueError, "Put LossScaling around it instead"),
    "scaled, deeper": (lambda: OptimizerWrapper(MovingAverage(LossScaling(Lamb())), **functions), ValueError, "Put LossScaling around it instead"),
    "accumulated scaled ones": (lambda: GradientAccumulation(LossScaling(Lamb()), 2), ValueError, "Put LossScaling around it instead"),
    "two scales": (lambda: LossScaling(OptimizerWrapper(LossScaling(Lamb()))), ValueError, "one is enough"),
    "two aggregations": (lambda: OptimizerWrapper(OptimizerWrapper(SGD(), **aggregation), aggregate_gradients="mean"), ValueError, "give one of them the way to do it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_to_do(case):
    make, error, why = REFUSED[case]
    with pytest.raises(error, match=why):
        make()


def test_tensorflow_refused_orders_of_privacy():
    with pytest.raises(ValueError, match="Put the GradientAccumulation inside"):
        GradientAccumulation(dp(SGD()), 2)
    with pytest.raises(ValueError, match="computes the gradients of each example itself"):
        Recorder(dp(SGD()))
    with pytest.raises(ValueError, match="the get_gradients of the Recorder inside would never be asked"):
        dp(Recorder(SGD()))


class Halved(OptimizerWrapper):
    """Hands lists to the methods of super(), in every step."""

    half = lambda self, pairs: [(g / 2, v) for g, v in pairs]
    transform_unaggregated_gradients = lambda self, pairs: OptimizerWrapper.transform_unaggregated_gradients(self, self.half(pairs))
    aggregate_gradients = lambda self, pairs: OptimizerWrapper.aggregate_gradients(self, self.half(pairs))
    transform_gradients = lambda self, pairs: OptimizerWrapper.transform_gradients(self, self.half(pairs))
    apply_updates = lambda self, pairs: OptimizerWrapper.apply_updates(self, self.half(pairs))


def test_lists_for_super_are_for_the_wrappers_inside_what_others_are():
    """Also a step that is not to be taken: inside, GradientAccumulation has to leave its gradients out."""
    variables = pair()
    optimizer = LossScaling(Halved(GradientAccumulation(OptimizerWrapper(SGD(RATE), transform_gradients=lambda pairs: pairs.scaled(1.0)), 2)), 8.0)
    optimizer.build(variables)
    before = numbers(variables)
    for factor in (1.0, np.nan, 3.0):
        scale = optimizer.scale_loss(ops.ones(())) * factor
        optimizer.apply([2 * scale * ops.convert_to_tensor(v) for v in variables], variables)
    assert int(optimizer.iterations) == 1
    assert_stepped(variables, before, (1 + 3) / 2 / 16)


def test_lists_for_super_are_checked():
    class Wrong(OptimizerWrapper):
        def transform_gradients(self, grads_and_vars):
            return super().transform_gradients(grads_and_vars[:1])

    with pytest.raises(ValueError, match="Wrong, as transform_gradients, returned 1 pairs"):
        run(OptimizerWrapper(Wrong(ClipByGlobalNorm(SGD(), 1.0))))


def test_orders_that_make_sense():
    orders = [
        lambda: LossScaling(GradientAccumulation(ClipByGlobalNorm(MovingAverage(Lamb(0.1)), 1.0), 2)),
        lambda: MovingAverage(LossScaling(ClipByGlobalNorm(Lamb(0.1), 1.0))),
        lambda: OptimizerWrapper(LossScaling(OptimizerWrapper(Lamb(0.1), **aggregation))),
        lambda: ClipByGlobalNorm(minimize.ClipByValue(minimize.ClipByNorm(ClipByGlobalNorm(Lamb(0.1), 1.0), 2.0), 3.0), 0.5),
    ]
    for make in orders:
        run(make())


def test_mixed_float16_models():
    """Keras's compile puts a LossScaleOptimizer around every optimizer that is none, which would go past the steps: LossScaling is one, and others are refused."""
    x = keras.Input((1,))
    model = keras.Model(x, keras.layers.Dense(1, dtype="mixed_float16")(x))
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(ValueError, match="xla_lamb.minimize.LossScaling around all other wrappers"):
        model.compile(MovingAverage(LossScaling(Lamb(0.1))), loss="mse")
    model.compile(OptimizerWrapper(Lamb(0.1)), loss="mse", auto_scale_loss=False)
    model.compile(LossScaling(MovingAverage(Adam(0.1)), 64.0), loss="mse")
    assert isinstance(model.optimizer, OptimizerWrapper)
    model.fit(np.ones((2, 1)), np.zeros((2, 1)), batch_size=1, verbose=0)
    assert int(model.optimizer.iterations) == 2


# What Keras asks of an optimizer --------------------------------------------------------------------------------------------------------


def test_learning_rate():
    inner = Lamb(0.1)
    optimizer = ClipByGlobalNorm(LossScaling(inner).inner, 1.0)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    optimizer.learning_rate.assign(0.5)
    assert float(inner.learning_rate) == 0.5
    scheduled = LossScaling(Lamb(keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0)))
    assert float(scheduled.learning_rate) == 1.0
    run(scheduled)
    assert float(scheduled.learning_rate) == 0.75
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.1


def test_callbacks_that_set_the_learning_rate():
    model = one_weight()
    model.compile(LossScaling(MovingAverage(Lamb(1.0))), loss="mse")
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.125, patience=1, min_delta=1e9)
    history = model.fit(np.ones((2, 1)), np.ones((2, 1)), epochs=2, verbose=0, callbacks=[halve, plateau]).history
    assert history["learning_rate"] == [0.5, 0.25]
    assert float(model.optimizer.learning_rate) == float(model.optimizer.inner.inner.learning_rate) == 0.25 * 0.125


def test_variables_and_set_weights():
    optimizer = LossScaling(MovingAverage(Lamb(0.1)))
    variables = run(optimizer)
    inner = optimizer.inner.inner
    assert [v.name for v in optimizer.variables] == ["step_counter", "dynamic_scale", *(v.name for v in optimizer.inner.variables)]
    assert optimizer.inner.variables[-len(inner.variables) :] == inner.variables
    assert sum(v is inner.iterations for v in optimizer.variables) == 1
    weights = [np.array(ops.convert_to_numpy(v)) for v in optimizer.variables]
    run(optimizer, variables)
    optimizer.set_weights(weights)
    assert helpers.bits([np.array(ops.convert_to_numpy(v)) for v in optimizer.variables]) == helpers.bits(weights)
    with pytest.raises(ValueError, match="must have the shapes"):
        optimizer.set_weights([weights[0] + 1, *weights[1:3]])
    assert int(optimizer.variables[0]) == weights[0]


def test_exclude_from_weight_decay_is_that_of_inner():
    decayed = lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5)
    wrapped, alone = OptimizerWrapper(decayed()), decayed()
    for optimizer in (wrapped, alone):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    expected = helpers.bits(trained(alone))
    assert helpers.bits(trained(wrapped)) == expected
    assert helpers.bits(trained(OptimizerWrapper(decayed()))) != expected


def test_trust_ratio_logger_finds_the_lamb_inside():
    logger = xla_lamb.keras.TrustRatioLogger()
    model = one_weight()
    model.compile(LossScaling(ClipByGlobalNorm(Lamb(0.5), 1.0)), loss="mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), epochs=2, batch_size=2, verbose=0, callbacks=[logger])
    assert logger.steps == [1, 2]
    assert [row.ratio for row in logger.history[0]] == pytest.approx([2.0], rel=1e-4)  # |p| = 2, |u| = 1


def test_overwritten_variables_are_refused():
    variables = pair()
    variables[1].overwrite_with_gradient = True
    with pytest.raises(NotImplementedError, match="float8"):
        OptimizerWrapper(Lamb()).build(variables)


def test_tensorflow_the_fused_step_under_a_tape_that_still_records():
    variable = tf.Variable([1.0, 2.0])
    optimizer = LossScaling(ClipByGlobalNorm(Lamb(0.1), 1.0))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(variable**2)
        optimizer.minimize(loss, [variable], tape)
        assert tape.gradient(loss, variable).numpy().tolist() == [2.0, 4.0]
    assert (variable.numpy() < [1.0, 2.0]).all()


def test_tensorflow_autograph_translates_the_functions_of_the_user():
    variable = tf.Variable([1.0, 2.0])

    def positive(grads_and_vars):
        found = []
        for g, v in grads_and_vars:
            if g[0] < 0:
                g = -g
            found.append((g, v))
        return found

    def loss():
        if variable[0] > 0:
            value = -tf.reduce_sum(variable)
        else:
            value = tf.reduce_sum(variable)
        return value

    optimizer = LossScaling(OptimizerWrapper(keras.optimizers.SGD(0.5), transform_loss=loss_twice_if_negative, transform_gradients=[positive]))
    tf.function(lambda: optimizer.minimize(loss, [variable]))()
    assert variable.numpy().tolist() == [0.0, 1.0]


def loss_twice_if_negative(loss):
    if loss < 0:
        loss = 2 * loss
    return loss
