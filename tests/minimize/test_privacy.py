"""DifferentialPrivacy against float64 NumPy, optax.contrib and TF Privacy's formula; its noise; and xla_lamb.minimize.Model, whose fit it needs."""

import dp_accounting
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
from keras import ops

import helpers
import model64
from xla_lamb.keras import Lamb
from xla_lamb.minimize import (
    ClipByGlobalNorm,
    DifferentialPrivacy,
    GradientAccumulation,
    GradsAndVars,
    LossScaling,
    Model,
    MovingAverage,
    OptimizerWrapper,
)

BACKEND = keras.backend.backend()
CLIP = 2.0  # some examples are clipped, and some are not
RATE = 2.0**-6

# A net of an embedding and a dense layer, and its gradients for each example.

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 5, size=(8, 2))  # with twice the same row in some examples
Y = RNG.normal(size=(8, 2))
PARAMS = [RNG.normal(size=shape) * 0.5 for shape in [(5, 3), (3, 2), (2,)]]


def losses_of(table, w, b, ids=IDS, y=Y):
    h = tf.reduce_sum(tf.gather(table, ids), axis=1)
    return tf.reduce_sum((tf.tanh(h @ w + b) - tf.cast(y, w.dtype)) ** 2, axis=1)


def numpy_gradients(params, ids=IDS, y=Y):
    """The gradients of each example's loss in float64, by hand: arrays with the examples in front."""
    table, w, b = params
    h = table[ids].sum(axis=1)
    t = np.tanh(h @ w + b)
    d = 2 * (t - y) * (1 - t**2)
    rows = np.zeros((len(ids), *table.shape))
    for i, pair in enumerate(ids):
        for row in pair:
            rows[i, row] += w @ d[i]
    return [rows, h[:, :, None] * d[:, None, :], d]


def norms_of(grads):
    return np.sqrt(sum(np.square(g).reshape(len(g), -1).sum(axis=1) for g in grads))


def clipped_mean(grads, clip=CLIP, size=None):
    factors = np.minimum(1, clip / np.maximum(norms_of(grads), 1e-300))
    return [np.tensordot(factors, g, 1) / (size or len(g)) for g in grads]


def micro(grads, size):
    return [g.reshape(-1, size, *g.shape[1:]).mean(axis=1) for g in grads]


def variables_of(params=PARAMS, dtype="float64"):
    return [tf.Variable(p, dtype=dtype) for p in params]


def private(inner=None, clip=CLIP, noise=0.0, seed=5, **options):
    return DifferentialPrivacy(inner or keras.optimizers.SGD(1.0), clip, noise, seed=seed, **options)


def gradients_of(optimizer, variables=None, count=None):
    """What the pipeline makes of the first examples' losses."""
    variables = variables or variables_of()
    pairs = optimizer.compute_gradients(lambda: losses_of(*variables)[:count], variables)
    return [g.numpy() for g, _ in pairs]


class Linear:
    """A run with a loss whose gradients, a few numbers for each example, do not depend on the variables."""

    shapes = [(4,), (2, 3)]

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slopes = helpers.tree([(4, *s) for s in self.shapes], 1)
        self.variables = [keras.Variable(np.zeros(s, "float32")) for s in self.shapes]
        optimizer.build(self.variables)
        self.step = tf.function(lambda: optimizer.minimize(self.loss, self.variables), autograph=False)

    def loss(self):
        return sum(tf.reduce_sum(tf.multiply(c, v), axis=list(range(1, c.ndim))) for c, v in zip(self.slopes, self.variables))

    def values(self):
        return [v.numpy() for v in self.variables]

    def run(self, steps):
        """The variables before and after each step."""
        seen = [self.values()]
        for _ in range(steps):
            self.step()
            seen.append(self.values())
        return seen


def differences(seen):
    """The gradients that SGD(1.0) applied."""
    return [[a - b for a, b in zip(before, after)] for before, after in zip(seen, seen[1:])]


def distance(a, b):
    return max(map(helpers.error, a, b))


class TestTensorFlowGradients:
    def test_the_gradient_of_each_example_is_that_of_the_example_alone(self):
        variables = variables_of()
        with tf.GradientTape() as tape:
            loss = losses_of(*variables)
        ours = [g.numpy() for g, _ in private().get_gradients(loss, variables, tape)]
        helpers.assert_near(ours, numpy_gradients(PARAMS), 1e-14)
        for i in range(len(IDS)):
            with tf.GradientTape() as tape:
                alone = losses_of(*variables, ids=IDS[i : i + 1], y=Y[i : i + 1])
            alone = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(alone, variables)]
            helpers.assert_near([g[i] for g in ours], alone, 1e-14)
            assert distance([g[i - 1] for g in ours], alone) > 0.1

    def test_clipped_and_summed_as_optax_does(self):
        grads = numpy_gradients(PARAMS)
        assert 2 <= sum(norms_of(grads) > CLIP) <= len(IDS) - 2
        ours = gradients_of(private())
        helpers.assert_near(ours, clipped_mean(grads), 1e-14)
        peer = optax.contrib.differentially_private_aggregate(CLIP, 0.0, key=0)
        grads32 = [jnp.asarray(g, jnp.float32) for g in grads]
        helpers.assert_near(ours, jax.jit(peer.update)(grads32, peer.init(grads32))[0], 1e-6)
        assert distance(ours, clipped_mean(grads, clip=100.0)) > 0.1
        each = [clipped_mean([g])[0] for g in grads]  # norms of single variables
        assert distance(ours, each) > 0.1

    def test_lamb_takes_the_steps_of_the_model(self):
        variables = variables_of()
        optimizer = private(Lamb(RATE, weight_decay=0.1))
        state = model64.init(PARAMS)
        step = tf.function(lambda: optimizer.minimize(lambda: losses_of(*variables), variables))
        other = state
        for _ in range(4):
            step()
            rules = model64.PRESETS["optax"].replace(weight_decay=0.1)
            state, _ = model64.step(state, clipped_mean(numpy_gradients(state.p)), rules, RATE)
            other, _ = model64.step(other, clipped_mean(numpy_gradients(other.p), clip=100.0), rules, RATE)
        helpers.assert_near([v.numpy() for v in variables], state.p, 1e-12)
        assert distance(other.p, state.p) > 1e-4

    def test_micro_batches_are_those_of_tf_privacy(self):
        """Its formula: the means of consecutive examples are clipped, and the sum is divided by their number."""
        ours = gradients_of(private(microbatch_size=2))
        helpers.assert_near(ours, clipped_mean(micro(numpy_gradients(PARAMS), 2)), 1e-14)
        assert distance(ours, clipped_mean(numpy_gradients(PARAMS))) > 0.01

    def test_micro_batches_of_a_tape_that_still_records(self):
        expected = gradients_of(private(microbatch_size=2))
        for persistent in (True, False):
            variables = variables_of()
            with tf.GradientTape(persistent=persistent) as tape:
                pairs = private(microbatch_size=2).compute_gradients(losses_of(*variables), variables, tape)
            helpers.assert_near([g for g, _ in pairs], expected, 1e-14)

    def test_batch_size_is_what_the_sum_is_divided_by(self):
        grads = [g[:3] for g in numpy_gradients(PARAMS)]
        helpers.assert_near(gradients_of(private(batch_size=10), count=3), clipped_mean(grads, size=10), 1e-14)
        assert distance(clipped_mean(grads, size=10), clipped_mean(grads)) > 0.5

    def test_a_batch_of_no_examples_is_a_step_of_noise(self):
        """Poisson sampling draws such batches, and that there was none must not show."""
        variables = variables_of()
        for noise, size, compiled in ((0.0, 4, False), (1.0, 4, False), (1.0, None, True)):
            optimizer = private(noise=noise, batch_size=size)
            optimizer.build(variables)
            step = lambda ids: [g for g, _ in optimizer.compute_gradients(lambda: losses_of(*variables, ids=ids, y=0.0), variables)]
            if compiled:
                step = tf.function(step, input_signature=[tf.TensorSpec((None, 2), tf.int64)], autograph=False)
            assert all(np.all(np.isfinite(g)) and np.all(g) == bool(noise) for g in step(tf.zeros((0, 2), tf.int64)))

    def test_an_example_with_a_zero_gradient(self):
        variables = variables_of()
        weights = np.array([0.0] + [1.0] * 7)
        pairs = private().compute_gradients(lambda: losses_of(*variables) * weights, variables)
        helpers.assert_near([g for g, _ in pairs], clipped_mean([g[1:] for g in numpy_gradients(PARAMS)], size=8), 1e-14)

    def test_an_example_that_is_not_finite_shows_and_loss_scaling_skips_it(self):
        variables = variables_of()
        y = tf.Variable(Y)
        bad = Y.copy()
        bad[3, 0] = np.nan
        loss = lambda: losses_of(*variables, y=y)
        optimizer = LossScaling(private(noise=1.0), initial_scale=8.0)
        step = tf.function(lambda: optimizer.minimize(loss, variables), autograph=False)
        step()
        before = helpers.bits([v.numpy() for v in (*variables, optimizer.iterations)])
        y.assign(bad)
        step()
        assert helpers.bits([v.numpy() for v in (*variables, optimizer.iterations)]) == before
        assert float(optimizer.loss_scale) == 4.0
        y.assign(Y)
        step()
        assert helpers.bits([v.numpy() for v in (*variables, optimizer.iterations)]) != before
        y.assign(bad)
        assert all(np.all(np.isnan(g)) for g, _ in private(noise=1.0).compute_gradients(loss, variables))

    def test_loss_scaling_around_clips_unscaled_gradients(self):
        variables = variables_of(dtype="float32")
        around, alone = (make(private(noise=1.0)) for make in (lambda x: LossScaling(x, initial_scale=2.0**12), lambda x: x))
        expected = [g for g, _ in alone.compute_gradients(lambda: losses_of(*variables), variables)]
        ours = [g for g, _ in around.compute_gradients(lambda: losses_of(*variables), variables, aggregate=True)]
        helpers.assert_near(ours, expected, 1e-6)
        scaled = [g for g, _ in private(noise=1.0).compute_gradients(lambda: losses_of(*variables) * 2**12, variables)]
        assert distance(scaled, expected) > 0.01

    def test_what_is_inside_gets_the_private_gradient(self):
        seen = differences(Linear(private(noise=1.0)).run(4))
        assert all(model64.grad_norm(d) > 0.4 for d in seen)
        p = [np.zeros(s) for s in Linear.shapes]
        accumulated = Linear(private(GradientAccumulation(keras.optimizers.SGD(1.0), 2), noise=1.0)).run(4)
        for i in (0, 2):
            helpers.assert_near(accumulated[i + 1], p, 1e-6)
            p = [x - (a + b) / 2 for x, a, b in zip(p, seen[i], seen[i + 1])]
            helpers.assert_near(accumulated[i + 2], p, 1e-6)
        p, average = [np.zeros(s) for s in Linear.shapes], None
        averaging = MovingAverage(ClipByGlobalNorm(keras.optimizers.SGD(1.0), 0.4), 0.5)
        for d, after in zip(seen, Linear(private(averaging, noise=1.0)).run(3)[1:]):
            p = [x - g * (0.4 / model64.grad_norm(d)) for x, g in zip(p, d)]
            average = p if average is None else [(a + x) / 2 for a, x in zip(average, p)]
            helpers.assert_near(after, p, 1e-6)
        helpers.assert_near([a.numpy() for a in averaging.averages], average, 1e-6)
        assert distance(average, p) > 0.01

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_sixteen_bit_gradients_are_summed_in_float32(self, dtype):
        slopes = np.array([[1.0, 2048.0]] + [[0.5, 0.5]] * 7, dtype)
        v = tf.Variable([0.0, 0.0], dtype=dtype)
        optimizer = private(clip=1e4)
        (gradient, _), = optimizer.compute_gradients(lambda: tf.reduce_sum(slopes * v, axis=1), [v])
        assert gradient.dtype == tf.float32
        np.testing.assert_array_equal(gradient, slopes.astype("float64").mean(axis=0))
        total = tf.zeros((2,), dtype)
        for row in slopes:
            total += row
        assert float(total[1]) != slopes.astype("float64").sum(axis=0)[1]  # a sum in 16 bits has lost something

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
    def test_mixed_precision(self, policy):
        keras.utils.set_random_seed(1)
        layers = keras.layers.Embedding(5, 3, dtype=policy), keras.layers.Flatten(dtype=policy), keras.layers.Dense(2, activation="tanh", dtype=policy)
        net = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        variables = net.trainable_variables
        loss_of = keras.losses.MeanSquaredError(reduction=None)
        alone = []
        for i in range(len(IDS)):
            with tf.GradientTape() as tape:
                loss = loss_of(Y[i : i + 1], net(IDS[i : i + 1]))
            alone.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, [v.value for v in variables])])
        grads = [np.stack(g).astype("float64") for g in zip(*alone)]
        clip = float(np.median(norms_of(grads)))
        for optimizer in (private(clip=clip), LossScaling(private(clip=clip), initial_scale=2.0**8)):
            pairs = optimizer.compute_gradients(lambda: loss_of(Y, net(IDS)), variables, aggregate=True)
            assert all(g.dtype == tf.float32 for g, _ in pairs)
            # The net's own rounding is the same in a batch and alone, but for sums in another order.
            helpers.assert_near([g for g, _ in pairs], clipped_mean(grads, clip), 1e-3)
        assert distance(clipped_mean(grads), clipped_mean(grads, clip)) > 0.1


class TestTensorFlowNoise:
    SHAPES = ((100, 200), (5000,))

    def noise(self, steps=1, count=4, seed=11, jit=False, optimizer=None, **options):
        """What becomes of the gradients of examples that have none: one list of flat arrays a step."""
        optimizer = optimizer or DifferentialPrivacy(keras.optimizers.SGD(1.0), 2.0, 1.5, seed=seed, **options)
        variables = [tf.Variable(tf.zeros(s)) for s in self.SHAPES]
        optimizer.build(variables)

        def step():
            pairs = GradsAndVars([(tf.zeros((count // optimizer.microbatch_size, *s)), v) for s, v in zip(self.SHAPES, variables)])
            return [tf.reshape(g, [-1]) for g, _ in optimizer.transform_unaggregated_gradients(pairs)]

        step = tf.function(step, jit_compile=True, autograph=False) if jit else step
        return [[g.numpy() for g in step()] for _ in range(steps)]

    @pytest.mark.parametrize("jit", [True, False])
    def test_it_is_normal_with_the_deviation_that_was_asked_for(self, jit):
        for x in self.noise(jit=jit)[0]:
            z = x / (1.5 * 2.0 / 4)
            n = len(z)
            # Five standard errors, of a fixed seed.
            assert abs(z.mean()) < 5 / np.sqrt(n)
            assert abs(z.std() - 1) < 5 / np.sqrt(2 * n) < abs(1.1 * z.std() - 1)
            assert abs(np.mean(z**3)) < 5 * np.sqrt(15 / n)
            assert abs(np.mean(z**4) - 3) < 5 * np.sqrt(96 / n)
            for limit, share in ((1.0, 0.31731), (2.0, 0.04550)):
                assert abs(np.mean(np.abs(z) > limit) - share) < 5 * np.sqrt(share / n)

    @pytest.mark.parametrize("jit", [True, False])
    def test_variables_and_steps_share_none(self, jit):
        (a, b), (c, d), (e, f) = self.noise(steps=3, jit=jit)
        for x, y in ((a, b), (a, c), (a, e), (c, e), (b, d), (a, d), (c, f)):
            n = min(len(x), len(y))
            assert abs(np.corrcoef(x[:n], y[:n])[0, 1]) < 5 / np.sqrt(n)
            # Nor shifted: float32 has few equal normal numbers by chance.
            assert len(np.intersect1d(x, y)) < 0.01 * n
        assert len(np.intersect1d(a, np.roll(a, 7)[:5000])) > 0.9 * 5000  # the control
        assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 5 / np.sqrt(len(a))

    def test_it_is_that_of_the_sum(self):
        """Whatever divides the sum: the examples, batch_size, or with TF Privacy the number of micro-batches."""
        (four, _), = self.noise(count=4)
        for options, divisor in (dict(count=8), 8), (dict(count=4, batch_size=10), 10), (dict(count=6, microbatch_size=3), 2):
            (noise, _), = self.noise(**options)
            np.testing.assert_allclose(noise * divisor, four * 4, rtol=1e-6)
            assert not np.allclose(noise, four)

    def test_a_seed_repeats_the_noise_and_another_does_not(self):
        run = lambda seed, **options: self.noise(2, seed=seed, **options)
        first = run(3)
        assert helpers.bits(run(3)) == helpers.bits(first)
        for seed in (4, 3 + 2**40, -3):  # all 64 bits of the key count
            assert distance(run(seed)[0], first[0]) > 0.1
        assert distance(run(3 + 2**40, jit=True)[0], run(3, jit=True)[0]) > 0.1
        assert distance(run(None)[0], run(None)[0]) > 0.1

    def test_a_run_that_goes_on_is_that_without_a_break(self):
        whole = Linear(private(Lamb(0.1), noise=1.0))
        whole.run(2)
        other = Linear(private(Lamb(0.1), noise=1.0))
        state = lambda run: [*run.variables, *run.optimizer.variables]
        for mine, theirs in zip(state(other), state(whole), strict=True):
            mine.assign(theirs)
        assert helpers.bits(other.run(2)) == helpers.bits(whole.run(2))
        # Without its state it would have begun again.
        made = lambda: DifferentialPrivacy(keras.optimizers.SGD(1.0), 2.0, 1.5, seed=11)
        first, later, fresh = made(), made(), made()
        steps = self.noise(4, optimizer=first)
        later.build([tf.Variable(tf.zeros(s)) for s in self.SHAPES])
        later._draws.assign(2)
        assert helpers.bits(self.noise(2, optimizer=later)) == helpers.bits(steps[2:])
        assert helpers.bits(self.noise(2, optimizer=fresh)) == helpers.bits(steps[:2])

    def test_configuration(self):
        optimizer = private(Lamb(0.1), noise=1.0, batch_size=6, microbatch_size=2)
        same = DifferentialPrivacy.from_config(optimizer.get_config())
        assert same.get_config() == optimizer.get_config()
        assert helpers.bits(self.noise(optimizer=same)) == helpers.bits(self.noise(optimizer=optimizer))
        fresh = private(noise=1.0, seed=None)
        again = DifferentialPrivacy.from_config(fresh.get_config())  # which tells nobody the key
        assert fresh._key not in fresh.get_config().values() and again._key != fresh._key


# Errors ---------------------------------------------------------------------------------------------------------------------


class TestTensorFlowErrors:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            (dict(l2_norm_clip=0), "l2_norm_clip must be a positive number, not 0"),
            (dict(l2_norm_clip=float("nan")), "not nan"),
            (dict(l2_norm_clip="1"), "not '1'"),
            (dict(noise_multiplier=-1.0), "noise_multiplier must be a number, 0 or more, not -1.0"),
            (dict(noise_multiplier=float("inf")), "not inf"),
            (dict(batch_size=0), "batch_size must be a number of examples, 1 or more, not 0"),
            (dict(batch_size=2.5), "not 2.5"),
            (dict(microbatch_size=None), "microbatch_size must be a number of examples, 1 or more, not None"),
            (dict(seed="a"), "seed must be an int or None, not 'a'"),
            (dict(seed=True), "not True"),
        ],
        ids=lambda x: "" if isinstance(x, str) else str(x),
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            DifferentialPrivacy(Lamb(), **{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **arguments})

    def test_orders_that_would_not_be_private(self):
        class Own(OptimizerWrapper):
            def get_gradients(self, loss, variables, tape):
                return super().get_gradients(loss, variables, tape)

        class MyAccumulation(GradientAccumulation):
            pass

        for make, message in (
            (lambda: GradientAccumulation(private(), 2), "Put the GradientAccumulation inside"),
            (lambda: MyAccumulation(private(), 2), "Put the GradientAccumulation inside"),
            (lambda: Own(private()), "would not be asked"),
            (lambda: private(Own(Lamb())), "the get_gradients of the Own inside would never be asked"),
            (lambda: private(MovingAverage(private())), "one is enough"),
            (lambda: private(LossScaling(Lamb())), "Put LossScaling around it"),
        ):
            with pytest.raises(ValueError, match=message):
                make()

    def test_losses_that_are_no_vector(self):
        (v,) = variables_of([np.ones((3, 2))])
        for loss in (lambda: tf.reduce_sum(v), lambda: v * 2, lambda: [tf.reduce_sum(v), tf.reduce_sum(v)]):
            with pytest.raises(ValueError, match="needs the loss of each example, a vector, and this loss"):
                private().minimize(loss, [v])
        with pytest.raises(ValueError, match="microbatch_size=2 does not divide the 3 examples"):
            private(microbatch_size=2).minimize(lambda: tf.reduce_sum(v, axis=1), [v])
        np.testing.assert_array_equal(v, np.ones((3, 2)))

    def test_gradients_of_other_origin(self):
        (v,) = variables_of([np.ones((3, 2))])
        optimizer, other = private(), private()
        loss = lambda: tf.reduce_sum(v, axis=1)
        mine, theirs = (list(x.compute_gradients(loss, [v])) for x in (optimizer, other))
        foreign = [(tf.ones((3, 2), tf.float64), v)]
        for pairs in (foreign, theirs, [(2 * g, v) for g, v in mine]):
            for aggregate in (True, False):
                with pytest.raises(ValueError, match="not known to be private"):
                    optimizer.apply_gradients(pairs, aggregate=aggregate)
        with pytest.raises(ValueError, match="not known to be private"):
            optimizer.apply([g for g, _ in foreign], [v])
        # Those of a loss of scale_loss, which have no noise yet, neither clipped nor not.
        for aggregate, message in ((False, "have no noise yet"), (True, "not that of each example")):
            optimizer.scale_loss(tf.constant(1.0))
            with pytest.raises(ValueError, match=message):
                optimizer.apply_gradients(foreign, aggregate=aggregate)
        np.testing.assert_array_equal(v, np.ones((3, 2)))
        optimizer.apply_gradients(mine)
        np.testing.assert_allclose(v, 1 - np.array(clipped_mean([np.eye(3)[:, :, None] * np.ones(2)])[0]), atol=1e-15)

    def test_functions_outside_cannot_touch_the_gradients_of_each_example(self):
        (v,) = variables_of([np.ones((3, 2))])
        for function in (lambda pairs: [(2 * g, v) for g, v in pairs], lambda pairs: [(tf.reduce_sum(g, axis=0), v) for g, v in pairs]):
            optimizer = OptimizerWrapper(private(), transform_unaggregated_gradients=function)
            with pytest.raises(ValueError, match="shape"):
                optimizer.minimize(lambda: tf.reduce_sum(v, axis=1), [v])


# Model.fit ------------------------------------------------------------------------------------------------------------------

X = RNG.normal(size=(10, 3)).astype("float32")
T = (X[:, :1] * 2 + 1).astype("float32")
WEIGHTS = RNG.uniform(0.5, 1.5, size=10).astype("float32")
PENALTY = 0.05


def dense(units=1, penalty=False, **options):
    regularizer = keras.regularizers.L2(PENALTY) if penalty else None
    return keras.layers.Dense(units, kernel_initializer="ones", kernel_regularizer=regularizer, **options)


def functional(kind=Model, **options):
    x = keras.Input((3,))
    return kind(x, dense(**options)(x))


class Subclassed(Model):
    def __init__(self, **options):
        super().__init__()
        self.dense = dense(**options)

    def call(self, x):
        return self.dense(x)


def squares():
    return keras.losses.MeanSquaredError(reduction=None)


def numpy_fit(batches, clip=CLIP, rate=0.5, weights=WEIGHTS, penalty=False, epochs=1):
    """(kernel, bias, the mean loss of each epoch) of private SGD on squares of X @ kernel + bias - T."""
    kernel, bias, history = np.ones((3, 1)), np.zeros(1), []
    for _ in range(epochs):
        losses = []
        for start in range(0, 10, batches):
            x, t, s = (a[start : start + batches].astype("float64") for a in (X, T, weights))
            e = x @ kernel + bias - t
            losses.extend(s * e[:, 0] ** 2 + penalty * PENALTY * np.sum(kernel**2))
            d = 2 * s[:, None] * e
            g = clipped_mean([x[:, :, None] * d[:, None, :] + penalty * 2 * PENALTY * kernel, d], clip)
            kernel, bias = kernel - rate * g[0], bias - rate * g[1]
        history.append(np.mean(losses))
    return kernel, bias, history


class TestTensorFlowModel:
    def test_functional_and_subclassed_models_beside_each_other(self, tmp_path):
        model = functional()
        assert isinstance(model, Model) and "Functional" not in [c.__name__ for c in Subclassed.__mro__]
        Subclassed().fit  # whose class Keras would have made a functional one
        model.save(tmp_path / "model.keras")
        for other in (keras.saving.load_model(tmp_path / "model.keras"), keras.models.clone_model(model), Model.from_config(model.get_config())):
            assert isinstance(other, Model) and type(other).train_step is Model.train_step
        named = Model(inputs=model.inputs, outputs=model.outputs, name="named")
        assert named.name == "named" and isinstance(named, Model)

    def test_subclasses_that_are_functional(self):
        class Derived(Model):
            def __init__(self, name):
                inputs = keras.Input((3,))
                super().__init__(inputs, keras.layers.Dense(2)(inputs), name=name)

        class Further(Derived):
            pass

        for model in (Further("further"), Derived("derived"), Further("again")):
            assert len(model.layers) == 2 and "Functional" in [c.__name__ for c in type(model).__mro__]
            assert type(model).train_step is Model.train_step and model(np.ones((4, 3), "float32")).shape == (4, 2)
        assert Model.__bases__ == (keras.Model,)
        assert Subclassed()(X[:2]).shape[0] == 2

    def test_fit_with_all_that_it_takes(self):
        """Sample weights, a regularizer, a metric, validation and a last batch that is smaller."""
        model = functional(penalty=True)
        model.compile(private(keras.optimizers.SGD(0.5)), loss=squares(), metrics=["mae"])
        history = model.fit(X, T, batch_size=4, epochs=2, shuffle=False, sample_weight=WEIGHTS, validation_data=(X, T), verbose=0).history
        kernel, bias, losses = numpy_fit(4, penalty=True, epochs=2)
        helpers.assert_near(model.get_weights(), [kernel, bias], 1e-6)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)
        errors = X @ kernel + bias - T
        np.testing.assert_allclose(history["val_loss"][-1], np.mean(errors**2) + PENALTY * np.sum(kernel**2), rtol=1e-5)
        np.testing.assert_allclose(history["val_mae"][-1], np.mean(np.abs(errors)), rtol=1e-5)
        assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
        assert distance(numpy_fit(4, epochs=2)[:2], [kernel, bias]) > 0.01
        assert distance(numpy_fit(4, penalty=True, epochs=2, clip=100.0)[:2], [kernel, bias]) > 0.1

    def test_fit_with_jit_compile(self):
        model = Subclassed()
        model.compile(private(keras.optimizers.SGD(0.5)), loss=squares(), jit_compile=True)
        history = model.fit(X, T, batch_size=5, shuffle=False, sample_weight=WEIGHTS, verbose=0).history
        kernel, bias, losses = numpy_fit(5)
        helpers.assert_near(model.get_weights(), [kernel, bias], 1e-6)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)

    def test_loss_scaling_around_in_fit_with_batches_of_unknown_size(self):
        model = functional()
        model.compile(LossScaling(private(keras.optimizers.SGD(0.5)), initial_scale=2.0**6), loss=squares())
        history = model.fit(X, T, batch_size=4, shuffle=False, sample_weight=WEIGHTS, verbose=0).history
        kernel, bias, losses = numpy_fit(4)
        helpers.assert_near(model.get_weights(), [kernel, bias], 1e-6)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)

    def test_several_losses(self):
        x = keras.Input((3,))
        model = Model(x, [dense(name="a")(x), dense(name="b")(x)])
        losses = [squares(), keras.losses.MeanAbsoluteError(reduction=None)]
        model.compile(private(), loss=losses, loss_weights=[1.0, 0.5], run_eagerly=True)
        history = model.fit(X, [T, T], batch_size=10, shuffle=False, verbose=0).history
        e = X.astype("float64") @ np.ones((3, 1)) - T
        d, s = 2 * e, 0.5 * np.sign(e)
        grads = clipped_mean([X[:, :, None] * d[:, None, :], d, X[:, :, None] * s[:, None, :], s])
        expected = [start - g for start, g in zip([1, 0, 1, 0], grads)]
        helpers.assert_near(model.get_weights(), expected, 2e-6)  # a sum of ten that nearly cancel
        np.testing.assert_allclose(history["loss"], np.mean(e**2 + 0.5 * np.abs(e)), rtol=1e-6)

    def test_models_that_cannot_be_private(self):
        def added(x):
            class Added(keras.layers.Layer):
                def call(self, x):
                    self.add_loss(ops.mean(x**2))
                    return x

            return Added()(x)

        x = keras.Input((3,))
        two = [dense(name="a")(x), dense(name="b")(x)]
        normed = keras.layers.BatchNormalization()
        inner = keras.Sequential([normed])
        active = keras.layers.Dense(1, activity_regularizer="l2")
        for outputs, loss, message in (
            (dense()(x), "mse", "needs the loss of each example"),
            (dense()(x), lambda t, y: ops.mean((t - y) ** 2, axis=-1), "needs the loss of each example"),
            (two, [squares(), "mse"], "there is one for the batch: .'mse'.: use Keras losses with reduction=None"),
            (two, {"a": squares(), "b": keras.losses.MeanSquaredError()}, "there is one for the batch"),
            (dense()(added(x)), squares(), "losses of add_loss and of activity regularizers"),
            (active(x), squares(), "losses of add_loss and of activity regularizers"),
            (dense()(inner(x)), squares(), "replace .'batch_normalization.*'. by LayerNormalization"),
        ):
            model = Model(x, outputs)
            model.compile(private(), loss=loss, run_eagerly=True)
            before = helpers.bits(model.get_weights())
            targets = {"a": T, "b": T} if isinstance(loss, dict) else [T, T] if outputs is two else T
            with pytest.raises(ValueError, match=message):
                model.fit(X, targets, batch_size=10, verbose=0)
            if outputs is not two and "batch_norm" not in message:
                assert helpers.bits(model.get_weights()) == before
        normed.trainable = False  # then it is a constant factor
        model = Model(x, dense()(inner(x)))
        model.compile(private(), loss=squares(), run_eagerly=True)
        model.fit(X, T, batch_size=10, verbose=0)
        assert int(model.optimizer.iterations) == 1

    def test_a_plain_keras_model_cannot_be_private(self):
        for loss in ("mse", squares()):
            model = functional(keras.Model)
            model.compile(private(), loss=loss, run_eagerly=True)
            before = helpers.bits(model.get_weights())
            with pytest.raises(ValueError, match="not that of each example, and would not be private.*xla_lamb.minimize.Model"):
                model.fit(X, T, batch_size=10, verbose=0)
            assert helpers.bits(model.get_weights()) == before


# On every backend -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [lambda wrap: Lamb(0.05), lambda wrap: wrap(keras.optimizers.Adam(0.05))], ids=["plain", "wrapped"])
def test_a_model_with_other_optimizers_is_that_of_keras(make):
    """Against keras.Model with the same optimizer, which has no wrapper there."""
    results = []
    for kind, wrap in ((Model, OptimizerWrapper), (keras.Model, lambda inner: inner)):
        model = functional(kind, penalty=True)
        model.compile(make(wrap), loss="mse", metrics=["mae"], run_eagerly=BACKEND == "tensorflow", jit_compile=BACKEND == "jax")
        fitted = model.fit(X, T, batch_size=4, epochs=2, shuffle=False, sample_weight=WEIGHTS, verbose=0)
        results.append((fitted.history, model.get_weights()))
    (ours, mine), (peer, theirs) = results
    assert ours.keys() == peer.keys() == {"loss", "mae"}
    for key in peer:
        np.testing.assert_allclose(ours[key], peer[key], rtol=1e-6)
    helpers.assert_near(mine, theirs, 1e-6)
    assert distance(theirs, [np.ones((3, 1)), np.zeros(1)]) > 0.01


def test_it_says_where_it_needs_tensorflows_tape():
    if BACKEND == "tensorflow":
        assert DifferentialPrivacy(Lamb(), 1.0, 1.0).l2_norm_clip == 1.0
    else:
        with pytest.raises(NotImplementedError, match="differentially_private_aggregate"):
            DifferentialPrivacy(Lamb(), 1.0, 1.0)


def epsilon(noise_multiplier, rate, steps, delta=1e-5):
    accountant = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return accountant.compose(step, steps).get_epsilon(delta)


def test_dp_accounting_tells_epsilon():
    """For batches of 256 out of 60000 examples, 15 epochs; and more noise, fewer steps and smaller batches are more private."""
    rate, steps = 256 / 60000, 15 * 60000 // 256
    known = epsilon(1.1, rate, steps)
    assert known > epsilon(2.2, rate, steps) > epsilon(2.2, rate, steps // 2) > epsilon(2.2, rate / 2, steps // 2) > 0
    # One step without sampling, in closed form: the smallest a / (2 s^2) + log(1 - 1/a) - log(d a) / (a - 1) over the orders a.
    a = np.linspace(1.01, 64, 100000)
    bound = np.min(a / (2 * 2.0**2) + np.log1p(-1 / a) - np.log(1e-5 * a) / (a - 1))
    assert epsilon(2.0, 1.0, 1) == pytest.approx(bound, rel=0.01)
