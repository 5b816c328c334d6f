"""xla_lamb.keras.Lamb: keras.optimizers.Lamb's numbers, variables and checkpoints, and what ours adds. On the TensorFlow backend; test_keras_jax.py runs
this file once more on JAX."""

import functools
import json
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import helpers
import model64
import xla_lamb
from xla_lamb.keras import LAMB, Lamb

BACKEND = keras.backend.backend()
RATE = 1e-2
STEPS = 6
X = np.random.default_rng(0).normal(size=(8 * STEPS, 5)).astype("float32")
Y = X[:, :2] * 2 + 1
NEAR = 5e-6  # of the largest value of a variable, against keras.optimizers.Lamb in float32


def build(dtype=None):
    keras.utils.set_random_seed(1)
    # No variable starts at zero: the first trust ratios would be of a norm that is rounding for the most part.
    dense = lambda units, **options: keras.layers.Dense(units, bias_initializer="random_normal", dtype=dtype, **options)
    layers = [
        dense(7, activation="tanh", name="inner"),
        keras.layers.LayerNormalization(beta_initializer="random_normal", name="norm", dtype=dtype),
        dense(2, name="outer"),
    ]
    return keras.Sequential([keras.Input((5,)), *layers], name="net")


def fit(optimizer, model=None, jit=BACKEND == "jax", epochs=1, **options):
    model = model or build()
    if optimizer is not None:
        model.compile(optimizer, loss="mse", jit_compile=jit)
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, **options)
    return model


@functools.lru_cache(maxsize=None)
def trained(kind, jit=BACKEND == "jax", **options):
    """What many tests begin with or compare with, traced and compiled once: a model after fit, for reading alone."""
    return fit(kind(**{"learning_rate": RATE, **options}), jit=jit)


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    trained.cache_clear()
    excluded.cache_clear()


def values(variables):
    return [np.asarray(ops.convert_to_numpy(v), np.float64) for v in variables]


def assert_alike(ours, peer, tolerance=NEAR):
    """Two trained models: weights and every variable of the optimizers, by order, name and shape."""
    helpers.assert_near(values(ours.trainable_variables), values(peer.trainable_variables), tolerance)
    mine, theirs = ours.optimizer.variables, peer.optimizer.variables
    assert [(v.name, tuple(v.shape), v.dtype) for v in mine] == [(v.name, tuple(v.shape), v.dtype) for v in theirs]
    helpers.assert_near(values(mine), values(theirs), tolerance)


def apart(a, b):
    return max(map(helpers.error, values(a.trainable_variables), values(b.trainable_variables)))


# The numbers of keras.optimizers.Lamb --------------------------------------------------------------------------------------

SETTINGS = {
    "plain": {},
    "decay, betas, clipvalue, loss scale": dict(weight_decay=0.1, beta_1=0.8, beta_2=0.95, epsilon=1e-3, clipvalue=0.05, loss_scale_factor=128.0),
    "off, ema, callable": dict(global_clipnorm=0.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, learning_rate=lambda: 3e-3),
    "accumulation, clipnorm": dict(gradient_accumulation_steps=2, clipnorm=0.1),
    "accumulation, ema": dict(gradient_accumulation_steps=3, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "schedule, global_clipnorm": dict(
        learning_rate=keras.optimizers.schedules.PolynomialDecay(RATE, STEPS, 1e-3, power=2.0), weight_decay=0.1, global_clipnorm=0.3
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_fit_like_keras(name):
    options = {"learning_rate": RATE, **SETTINGS[name]}
    assert_alike(fit(Lamb(variant="keras", implementation="fused", **options)), trained(keras.optimizers.Lamb, **SETTINGS[name]))


@pytest.mark.parametrize("name", ["decay, betas, clipvalue, loss scale", "accumulation, clipnorm"])
def test_fit_with_jit_or_without(name):
    """The other way than above: under jit_compile=True on TensorFlow, without on JAX. The peer's numbers are the same either way."""
    options, jit = {"learning_rate": RATE, **SETTINGS[name]}, BACKEND == "tensorflow"
    assert_alike(fit(Lamb(variant="keras", implementation="fused", **options), jit=jit), trained(keras.optimizers.Lamb, **SETTINGS[name]))


def test_run_eagerly_like_keras():
    model = build()
    model.compile(Lamb(RATE, variant="keras", weight_decay=0.1), loss="mse", run_eagerly=True)
    assert_alike(fit(None, model), trained(keras.optimizers.Lamb, weight_decay=0.1))


def excluding(kind, **options):
    """A model and its optimizer, which knows variables by themselves and by names."""
    model, optimizer = build(), kind(RATE, weight_decay=0.3, **options)
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[-2:], var_names=["bias", "gamma", "inner"])
    return model, optimizer


@functools.lru_cache(maxsize=None)
def excluded():
    model, optimizer = excluding(Lamb, variant="keras")
    return fit(optimizer, model)


def test_exclude_from_weight_decay_like_keras():
    """Keras searches the patterns in "kernel" on JAX and in "net/inner/kernel" on TensorFlow."""
    model, peer = excluding(keras.optimizers.Lamb)
    assert_alike(excluded(), fit(peer, model))
    assert apart(trained(Lamb, variant="keras", weight_decay=0.3), model) > 1e-4


def test_loss_scale_optimizer_like_keras():
    """With an infinite gradient in the middle, where LossScaleOptimizer skips the step."""
    x = X.copy()
    x[17] = np.inf
    models = []
    for kind in (lambda **k: Lamb(variant="keras", **k), keras.optimizers.Lamb):
        model = build()
        model.compile(keras.optimizers.LossScaleOptimizer(kind(learning_rate=RATE), initial_scale=64.0), loss="mse", jit_compile=BACKEND == "jax")
        model.fit(x, Y, batch_size=8, verbose=0, shuffle=False)
        models.append(model)
    assert_alike(*models)
    assert int(models[0].optimizer.iterations) == STEPS - 1


def test_control_the_default_is_another_formula():
    ours, peer = trained(Lamb, jit=True, weight_decay=0.1, epsilon=1e-7), trained(keras.optimizers.Lamb, weight_decay=0.1)
    assert ours.optimizer.epsilon == peer.optimizer.epsilon
    assert apart(ours, peer) > 100 * NEAR


# LAMB as published, against the float64 model -------------------------------------------------------------------------------

SHAPES = [(3, 5), (17,), (7, 3, 2), (40,)]
NAMES = ["dense/kernel", "dense/bias", "stack/kernel", "norm/gamma"]


def variables_of(arrays, dtype="float32"):
    scoped = []
    for path, x in zip(NAMES, arrays):
        layer, name = path.split("/")
        with keras.name_scope(layer):
            scoped.append(keras.Variable(x, dtype=dtype, name=name))
    return scoped


def train(optimizer, arrays, gradients, dtype="float32"):
    """Steps through apply, eagerly: (variables, first moments, second moments)."""
    variables = variables_of(arrays, dtype)
    optimizer.build(variables)
    for g in gradients:
        optimizer.apply([ops.convert_to_tensor(x) for x in g], variables)
    return values(variables), values(optimizer._momentums), values(optimizer._velocities)


@pytest.mark.parametrize(
    "options, rules",
    [
        (dict(), dict(decay_mask=None)),
        (dict(exclude_from_weight_decay=["bias$", "norm/"]), dict(decay_mask=[True, False, True, False])),
        (dict(exclude_from_layer_adaptation=["^dense/"]), dict(adapt_mask=[False, False, True, True])),
        (dict(layer_axes={"stack": 1}), dict(layer_axes=[0, 0, 1, 0])),
        (dict(global_clipnorm=0.5), dict(rules=dict(max_grad_norm=0.5))),
        (dict(eps_root=1e-4, ratio_bounds=(0.1, 0.9)), dict(rules=dict(eps_root=1e-4, ratio_bounds=(0.1, 0.9)))),
        (dict(variant="nvlamb"), dict(rules=dict(max_grad_norm=1.0))),
        (dict(variant="deepspeed"), dict(preset="deepspeed")),
    ],
    ids=lambda x: "-".join(map(str, x)) or "plain",
)
def test_against_the_model(options, rules):
    params, grads = helpers.tree(SHAPES), helpers.gradients(5, SHAPES, scale=1.0)
    base = model64.PRESETS[rules.pop("preset", "optax")].replace(weight_decay=0.1, **rules.pop("rules", {}))
    model = helpers.run_model(params, grads, base, RATE, **rules)
    p, m, v = train(Lamb(RATE, weight_decay=0.1, implementation="fused", **options), params, grads)
    helpers.assert_near(p, model.p, 1e-6)
    helpers.assert_near(m, model.m, 1e-6)
    helpers.assert_near(v, model.v, 1e-6)


def test_tf_addons_names():
    """Excluded from decay means excluded from the trust ratio, unless there is a list for that."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(5, SHAPES, scale=1.0)
    rules = model64.PRESETS["tf_addons"].replace(weight_decay=0.1)
    mask = [True, False, True, False]
    model = helpers.run_model(params, grads, rules, RATE, decay_mask=mask)
    for options in (dict(weight_decay=0.1), dict(weight_decay_rate=0.1), dict(weight_decay_rate=0.1, exclude_from_layer_adaptation=[])):
        helpers.assert_near(train(LAMB(RATE, exclude_from_weight_decay=["bias", "norm"], **options), params, grads)[0], model.p, 1e-6)
    both = helpers.run_model(params, grads, rules, RATE, decay_mask=mask, adapt_mask=[True, True, False, True])
    optimizer = LAMB(RATE, weight_decay=0.1, exclude_from_weight_decay=["bias", "norm"], exclude_from_layer_adaptation=["stack"])
    helpers.assert_near(train(optimizer, params, grads)[0], both.p, 1e-6)
    assert max(map(helpers.error, both.p, model.p)) > 1e-4
    with pytest.raises(ValueError, match="weight_decay=0.1 and weight_decay_rate=0.2 are one setting"):
        LAMB(weight_decay=0.1, weight_decay_rate=0.2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_variables(dtype):
    """Keras computes in the variable's type: 0.999 is 1 in bfloat16, and nothing moves or all is NaN (traps 1 and 2)."""
    kind = getattr(ml_dtypes, dtype, None) or np.float16
    params = helpers.tree(SHAPES, dtype=kind)
    params[0] = np.full(SHAPES[0], 200, kind)  # a norm whose square float16 does not hold
    grads = helpers.gradients(8, SHAPES, scale=1.0, dtype=kind)
    model = helpers.run_model(params, grads, model64.PRESETS["optax"].replace(weight_decay=0.1), RATE)
    optimizer = Lamb(RATE, weight_decay=0.1)
    p, m, v = train(optimizer, params, grads, dtype)
    for actual, expected in zip(p, model.p):
        assert np.max(np.abs(actual - expected)) <= 8 * float(np.finfo(kind).eps if kind is np.float16 else 2.0**-7) * np.max(np.abs(expected))
    helpers.assert_near(m, model.m, 0.02)  # of parameters that were rounded in each of the eight steps
    assert {v.dtype for v in (*optimizer._momentums, *optimizer._velocities)} == {"float32"}
    assert all(np.any(a != np.asarray(b, np.float64)) for a, b in zip(p, params))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_mixed_precision_fits(policy):
    model = build(dtype=policy)
    inner = Lamb(RATE, weight_decay=0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if policy == "mixed_float16" else inner
    model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
    losses = model.fit(X, Y, batch_size=8, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0] and np.isfinite(losses).all()


def test_moments_in_bfloat16():
    optimizer = Lamb(RATE, moment_dtype="bfloat16")
    assert {v.dtype for v in fit(optimizer).optimizer._velocities} == {"bfloat16"}


# Habits --------------------------------------------------------------------------------------------------------------------


def test_accumulation_leaves_everything_alone_between_steps():
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    optimizer = Lamb(RATE, gradient_accumulation_steps=3)
    variables = variables_of(params)
    optimizer.build(variables)
    for i, g in enumerate(grads):
        before = [helpers.bits(x) for x in (*values(variables), *values(optimizer._momentums), *values(optimizer._velocities))]
        optimizer.apply([ops.convert_to_tensor(x) for x in g], variables)
        after = [helpers.bits(x) for x in (*values(variables), *values(optimizer._momentums), *values(optimizer._velocities))]
        assert (before == after) == (i < 2)
    assert int(optimizer.iterations) == 1
    assert all(np.all(x == 0) for x in values(optimizer._accumulated_gradients))
    mean = [np.mean([g[k] for g in grads], axis=0, dtype=np.float64) for k in range(len(SHAPES))]
    helpers.assert_near(values(variables), helpers.run_model(params, [mean], model64.PRESETS["optax"], RATE).p, 1e-6)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_skip_of_a_step_that_is_not_finite(accumulate):
    params = helpers.tree(SHAPES)
    optimizer = Lamb(RATE, nonfinite="skip", gradient_accumulation_steps=accumulate)
    variables = variables_of(params)
    optimizer.build(variables)
    grads = helpers.gradients(1, SHAPES)[0]
    bad = [x.copy() for x in grads]
    bad[1][3] = np.nan
    take = lambda g: optimizer.apply([ops.convert_to_tensor(x) for x in g], variables)
    for _ in range(accumulate or 1):
        take(grads)
    count, before = int(optimizer.iterations), [helpers.bits(x) for x in values(variables) + values(optimizer._velocities)]
    for g in [bad] if accumulate is None else [bad, grads]:
        take(g)
    assert int(optimizer.iterations) == count == 1
    assert [helpers.bits(x) for x in values(variables) + values(optimizer._velocities)] == before
    for _ in range(accumulate or 1):
        take(grads)
    assert int(optimizer.iterations) == 2
    helpers.assert_near(values(variables), helpers.run_model(params, [grads, grads], model64.PRESETS["optax"], RATE).p, 1e-6)


def test_missing_gradients_shrink_the_list():
    params, grads = helpers.tree(SHAPES), helpers.gradients(2, SHAPES)
    variables = variables_of(params)
    optimizer = Lamb(RATE)
    optimizer.build(variables)
    tensors = lambda g: [ops.convert_to_tensor(x) for x in g]
    with pytest.warns(UserWarning, match="dense/bias"):
        first = tensors(grads[0])
        optimizer.apply([first[0], None, first[2], first[3]], variables)
    optimizer.apply(tensors(grads[1]), variables)
    here = helpers.run_model(params, grads, model64.PRESETS["optax"], RATE)
    for i in (0, 2, 3):
        helpers.assert_near(values(variables)[i : i + 1], here.p[i : i + 1], 1e-6)
    assert np.array_equal(values(optimizer._momentums)[1], np.float64(np.float32(0.1) * grads[1][1])) or np.allclose(
        values(optimizer._momentums)[1], 0.1 * grads[1][1], rtol=1e-6
    )
    # Another order than at build time.
    order = [3, 1, 0, 2]
    other, shuffled = variables_of(params), Lamb(RATE)
    shuffled.build(other)
    for g in grads:
        shuffled.apply([tensors(g)[i] for i in order], [other[i] for i in order])
    helpers.assert_near(values(other), here.p, 1e-6)


def test_constraints_and_gradients_that_overwrite():
    params, grads = helpers.tree(SHAPES), helpers.gradients(1, SHAPES)[0]
    variables = variables_of(params)
    variables[0].constraint = keras.constraints.NonNeg()
    variables[2].overwrite_with_gradient = True
    optimizer = Lamb(RATE)
    optimizer.build(variables)
    optimizer.apply([ops.convert_to_tensor(x) for x in grads], variables)
    model = helpers.run_model(params, [grads], model64.PRESETS["optax"], RATE)
    helpers.assert_near(values(variables[:1]), [np.maximum(model.p[0], 0)], 1e-6)
    assert np.array_equal(values(variables)[2], grads[2])
    helpers.assert_near(values(variables[3:]), model.p[3:], 1e-6)


def test_custom_loop():
    """apply_gradients as in a custom train_step, and stateless_apply as in a loop in JAX."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(2, SHAPES)
    expected = helpers.run_model(params, grads, model64.PRESETS["optax"], RATE).p
    variables, optimizer = variables_of(params), Lamb(RATE)
    for g in grads:
        optimizer.apply_gradients(zip([ops.convert_to_tensor(x) for x in g], variables))
    helpers.assert_near(values(variables), expected, 1e-6)

    variables, optimizer = variables_of(params), Lamb(RATE)
    optimizer.build(variables)
    weights, state = [v.value for v in variables], [v.value for v in optimizer.variables]
    if BACKEND != "jax":
        with pytest.raises(ValueError, match="stateless_apply is not supported"):
            optimizer.stateless_apply(state, grads[0], weights)
        return
    import jax

    step = jax.jit(lambda weights, state, grads: optimizer.stateless_apply(state, grads, weights), donate_argnums=(0, 1))
    for g in grads:
        weights, state = step(weights, state, g)
    helpers.assert_near([np.asarray(w) for w in weights], expected, 1e-6)


def test_custom_train_step():
    """A model with a train_step of its own, of the backend's kind, in fit."""

    class OnTensorFlow(keras.Sequential):
        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    class OnJax(keras.Sequential):
        def train_step(self, state, data):
            import jax

            weights, others, slots, metrics = state
            x, y = data

            def loss_of(weights):
                outputs, changed = self.stateless_call(weights, others, x, training=True)
                return self.compute_loss(y=y, y_pred=outputs), changed

            (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
            weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
            return {"loss": loss}, (weights, changed, slots, metrics)

    kind = OnTensorFlow if BACKEND == "tensorflow" else OnJax
    model = fit(Lamb(RATE, weight_decay=0.1, epsilon=1e-7), kind([keras.Input((5,)), *build().layers], name="net"), jit=True)
    helpers.assert_near(values(model.trainable_variables), values(trained(Lamb, jit=True, weight_decay=0.1, epsilon=1e-7).trainable_variables), 1e-6)
    assert apart(model, build()) > 1e-3


def test_learning_rate_can_be_set():
    """As callbacks do, without compiling again."""
    model = fit(Lamb(RATE))
    before = values(model.trainable_variables)
    model.optimizer.learning_rate = 0.0
    fit(None, model)
    helpers.assert_near(values(model.trainable_variables), before, 0)


def test_sparse_gradients():
    """An embedding's gradient has an index for each row, also for one that comes twice (trap 15)."""
    rows = np.array([[1, 3, 3], [1, 0, 3]])
    peers = []
    for dense in (False, True):
        keras.utils.set_random_seed(2)
        embedding = keras.layers.Embedding(6, 4)
        embedding.build()
        model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)])
        if dense:
            table = embedding.embeddings
            embedding.call = lambda i, table=table: ops.matmul(ops.one_hot(i, 6), table)
        model.compile(Lamb(RATE, weight_decay=0.01, loss_scale_factor=8.0, global_clipnorm=1.0), loss="mse", jit_compile=False)
        model.fit(rows, np.ones((2, 1)), batch_size=2, epochs=3, verbose=0)
        peers.append(values(model.trainable_variables))
    helpers.assert_near(peers[0], peers[1], 1e-6)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        params, optimizer = helpers.tree([(6, 4)])[0], Lamb(RATE)
        table = keras.Variable(params)
        slices = tf.IndexedSlices(tf.constant(helpers.tree([(3, 4)], 5)[0]), tf.constant([4, 1, 4]), (6, 4))
        optimizer.apply([slices], [table])
        dense = np.zeros((6, 4))
        np.add.at(dense, [4, 1, 4], slices.values.numpy().astype(np.float64))
        helpers.assert_near(values([table]), helpers.run_model([params], [[dense]], model64.PRESETS["optax"], RATE).p, 1e-6)


def test_trust_ratios():
    params, grads = helpers.tree(SHAPES), helpers.gradients(2, SHAPES)
    optimizer = Lamb(RATE, weight_decay=0.1, exclude_from_layer_adaptation=["norm"], layer_axes={"stack": 1})
    with pytest.raises(RuntimeError, match="record_trust_ratios"):
        optimizer.trust_ratios()
    names = [v.name for v in trained(Lamb).optimizer.variables]
    assert optimizer.record_trust_ratios() and not optimizer.record_trust_ratios()
    train(optimizer, params, grads)
    table = optimizer.trust_ratios()
    one = helpers.run_model(params, grads[:1], model64.PRESETS["optax"].replace(weight_decay=0.1), RATE, adapt_mask=[1, 1, 1, 0], layer_axes=[0, 0, 1, 0])
    assert np.isclose(table["dense/kernel"].param_norm, np.linalg.norm(one.p[0]), rtol=1e-6)
    assert len(table) == 3 + 7 and table["norm/gamma"].ratio == 1
    row = table["stack/kernel[6]"]
    assert np.isclose(row.ratio, row.param_norm / row.update_norm, rtol=1e-6) and np.isclose(row.param_norm, np.linalg.norm(one.p[2][6]), rtol=1e-6)
    assert "trust_ratios" not in names


# Settings survive ------------------------------------------------------------------------------------------------------------

OPTIONS = dict(
    learning_rate=0.25, beta_1=0.8, beta_2=0.9, epsilon=1e-4, weight_decay=0.1, global_clipnorm=2.0, use_ema=True, ema_momentum=0.5,
    ema_overwrite_frequency=3, loss_scale_factor=2.0, gradient_accumulation_steps=2, name="mine", variant="nvlamb", nonfinite="skip",
    exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=["norm"], layer_axes={"stack": 1}, eps_root=1e-5, moment_dtype="bfloat16",
    implementation="reference",
)  # fmt: skip


@pytest.mark.parametrize("kind", [Lamb, LAMB])
def test_every_option_is_in_the_config(kind):
    optimizer = kind(**OPTIONS)
    config = json.loads(json.dumps(optimizer.get_config()))  # as a .keras file keeps it
    for name, value in OPTIONS.items():
        assert config[name] == value, name
    again = kind.from_config(config)
    assert again.get_config() == optimizer.get_config()
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)).get_config() == config
    custom = kind(variant="paper", ratio_bounds=(0.5, 2.0), norm_bounds=(0.0, 10.0), bias_correction="none")
    same = kind.from_config(json.loads(json.dumps(custom.get_config())))
    assert same._variant == custom._variant == xla_lamb.variant("paper", ratio_bounds=(0.5, 2), norm_bounds=(0, 10), bias_correction="none")
    assert set(keras.optimizers.Lamb().get_config()) <= set(config)


def test_excluded_variables_are_known_by_identity():
    """Two variables may have one path."""
    first, second = (keras.Variable(np.ones(3, "float32"), name="same") for _ in range(2))
    optimizer = Lamb(RATE, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[second])
    optimizer.build([first, second])
    assert [optimizer._use_weight_decay(v) for v in (first, second)] == [True, False]
    again = Lamb.from_config(optimizer.get_config())
    again.build([first, second])
    assert [again._use_weight_decay(v) for v in (first, second)] == [True, False]
    assert again.get_config() == optimizer.get_config()


def test_exclusions_survive_saving(tmp_path):
    """Keras forgets what its own method excluded (trap 12)."""
    model, optimizer = excluding(Lamb, variant="keras")
    model.compile(optimizer, loss="mse", jit_compile=BACKEND == "jax")
    optimizer.build(model.trainable_variables)
    model.save(tmp_path / "fresh.keras")
    model = keras.saving.load_model(tmp_path / "fresh.keras")
    assert isinstance(model.optimizer, Lamb)
    helpers.assert_near(values(fit(None, model).trainable_variables), values(excluded().trainable_variables), 0)
    assert apart(trained(Lamb, variant="keras", weight_decay=0.3), excluded()) > 1e-4


# Checkpoints, both ways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, schedule", [("model.keras", False), ("some.weights.h5", True)], ids=["model-rate", "weights-schedule"])
def test_checkpoints_of_keras_both_ways(tmp_path, form, schedule):
    """Saved in the middle by one, loaded by the other, and on: like one run of either."""
    rate = keras.optimizers.schedules.ExponentialDecay(RATE, 5, 0.9) if schedule else RATE
    kinds = dict(ours=lambda: Lamb(rate, variant="keras", weight_decay=0.1), peer=lambda: keras.optimizers.Lamb(rate, weight_decay=0.1))
    models = {kind: fit(make()) for kind, make in kinds.items()}
    files = {kind: tmp_path / f"{kind}-{form}" for kind in kinds}
    half = {}
    for kind, model in models.items():
        model.save(files[kind]) if form.endswith(".keras") else model.save_weights(files[kind])
        half[kind] = [values(model.trainable_variables), values(model.optimizer.variables)]
    whole = [values(x) for x in (fit(None, models["peer"]).trainable_variables, models["peer"].optimizer.variables)]
    for first, second in (("peer", "ours"), ("ours", "peer")):
        other = models[second]  # compiled already
        for v in (*other.trainable_variables, *other.optimizer.variables):
            v.assign(np.zeros(v.shape))  # so that all there is comes from the file
        other.load_weights(files[first])
        assert int(other.optimizer.iterations) == STEPS
        for variables, saved in zip((other.trainable_variables, other.optimizer.variables), half[first]):
            helpers.assert_near(values(variables), saved, 0)
        fit(None, other)
        for variables, expected in zip((other.trainable_variables, other.optimizer.variables), whole):
            helpers.assert_near(values(variables), expected, NEAR)
    mine, theirs = (models[kind].optimizer.variables for kind in ("ours", "peer"))
    assert [(v.name, tuple(v.shape), v.dtype) for v in mine] == [(v.name, tuple(v.shape), v.dtype) for v in theirs]
    if form.endswith(".keras"):
        loaded = keras.saving.load_model(files["ours"])
        assert isinstance(loaded.optimizer, Lamb) and loaded.optimizer.get_config() == models["ours"].optimizer.get_config()
        helpers.assert_near(values(fit(None, loaded).trainable_variables), whole[0], NEAR)


def test_from_keras_and_back(tmp_path):
    """A .keras file holds the peer's class: it is loaded, and goes on with ours."""
    peer = keras.optimizers.Lamb(RATE, weight_decay=0.1)
    peer.exclude_from_weight_decay(var_names=["bias"])
    model = fit(peer)
    whole = values(fit(None, model).trainable_variables)

    half = keras.optimizers.Lamb(RATE, weight_decay=0.1)
    half.exclude_from_weight_decay(var_names=["bias"])
    half = fit(half)
    ours = Lamb.from_keras(half.optimizer)
    assert ours._variant.name == "keras" and int(ours.iterations) == STEPS
    half.compile(ours, loss="mse", jit_compile=BACKEND == "jax")
    helpers.assert_near(values(fit(None, half).trainable_variables), whole, NEAR)

    back = half.optimizer.to_keras()
    assert type(back) is keras.optimizers.Lamb
    half.compile(back, loss="mse", jit_compile=BACKEND == "jax")
    fit(None, model)
    assert_alike(fit(None, half), model)
    with pytest.raises(ValueError, match="cannot do what this optimizer does: .*variant='optax'"):
        Lamb(RATE).to_keras()
    with pytest.raises(TypeError, match="takes a keras.optimizers.Lamb, not a Adam"):
        Lamb.from_keras(keras.optimizers.Adam())


def test_rate_or_schedule_may_change_over_a_checkpoint(tmp_path):
    """keras.optimizers.Lamb would skip the whole state then, since one variable is more or less."""
    rate, schedule = RATE, keras.optimizers.schedules.ExponentialDecay(RATE, 5, 0.9)
    for first, second in ((rate, schedule), (schedule, rate)):
        model = trained(keras.optimizers.Lamb, learning_rate=first)
        model.save_weights(tmp_path / "a.weights.h5")
        other = build()
        other.compile(Lamb(second), loss="mse")
        other.optimizer.build(other.trainable_variables)
        other.load_weights(tmp_path / "a.weights.h5")
        helpers.assert_near(values(other.optimizer._velocities), values(model.optimizer._velocities), 0)
        assert int(other.optimizer.iterations) == STEPS


def test_an_optimizer_that_is_not_built_leaves_the_weights_usable(tmp_path):
    """As in Keras: weights alone, for fine-tuning."""
    trained(Lamb).save_weights(tmp_path / "a.weights.h5")
    other = build()
    other.compile(Lamb(RATE), loss="mse")
    with warnings.catch_warnings(record=True):
        other.load_weights(tmp_path / "a.weights.h5")
    assert int(other.optimizer.iterations) == 0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.train.Checkpoint holds TensorFlow's variables")
def test_tf_checkpoint_of_keras_both_ways(tmp_path):
    import tensorflow as tf

    ours, peer = functools.partial(Lamb, variant="keras", weight_decay=0.3), keras.optimizers.Lamb
    before = trained(Lamb, variant="keras", weight_decay=0.3), trained(peer, weight_decay=0.1)
    for model, second in zip(before, (peer, ours)):
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
        other = build()
        other.compile(second(RATE), loss="mse")
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_existing_objects_matched()
        assert_alike(other, model, 0)


# Bad input ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(variant="lamb2"), "unknown variant 'lamb2'; there are optax, tf_addons"),
        (dict(beta_1=1.0), r"beta_1 must be in \[0, 1\), not 1.0"),
        (dict(epsilon=-1.0), "epsilon must be a finite number that is not negative, not -1.0"),
        (dict(weight_decay=float("nan")), "weight_decay is NaN"),
        (dict(learning_rate=float("inf")), "learning_rate must be finite"),
        (dict(nonfinite="ignore"), "nonfinite must be one of 'propagate', 'skip', not 'ignore'"),
        (dict(moment_dtype="float16"), "moment_dtype must be"),
        (dict(implementation="fast"), "implementation must be one of"),
        (dict(exclude_from_weight_decay=["(bias"]), "exclude_from_weight_decay: '\\(bias' is not a regular expression"),
        (dict(clipnorm=1.0, global_clipnorm=1.0), "Only one of `clipnorm`"),
        (dict(wieght_decay=0.1), "not recognized: .*wieght_decay"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        Lamb(**options)


def test_strings_for_lists():
    with pytest.raises(TypeError, match="must be a list of regular expressions, not the string 'bias'"):
        Lamb(exclude_from_weight_decay="bias")


def test_variables_that_it_was_not_built_with():
    variables = variables_of(helpers.tree(SHAPES))
    optimizer = Lamb(RATE)
    optimizer.build(variables[:3])
    with pytest.raises(ValueError, match="(?s)Unknown variable: .*norm/gamma"):
        optimizer.apply([ops.convert_to_tensor(x) for x in helpers.tree(SHAPES)], variables)
    assert int(optimizer.iterations) == 0


@pytest.mark.parametrize("accumulate", [None, 2])
def test_gradients_of_another_shape(accumulate):
    variables = variables_of(helpers.tree(SHAPES))
    optimizer = Lamb(RATE, gradient_accumulation_steps=accumulate)
    optimizer.build(variables)
    variables_and_state = [*variables, *optimizer.variables]
    grads = helpers.tree(SHAPES)
    grads[1] = grads[1][:5]
    before = values(variables_and_state)
    with pytest.raises(ValueError, match=r"gradient of dense/bias has shape \(5,\), the variable \(17,\)"):
        optimizer.apply([ops.convert_to_tensor(x) for x in grads], variables)
    helpers.assert_near(values(variables_and_state), before, 0)


def test_variables_of_other_types_and_axes():
    with pytest.raises(TypeError, match="variable count must be float32, bfloat16, float16, float64, not int32"):
        Lamb(RATE).build([keras.Variable(np.zeros(3, "int32"), dtype="int32", name="count")])
    with pytest.raises(ValueError, match=r"layer_axes of w is 2, but its shape is \(3,\)"):
        Lamb(RATE, layer_axes={"w": 2}).build([keras.Variable(np.zeros(3), name="w")])


def test_checkpoint_of_another_model(tmp_path):
    """Nothing is taken of it."""
    trained(Lamb).save_weights(tmp_path / "a.weights.h5")
    model = trained(Lamb)
    store = {str(i): np.asarray(v) for i, v in enumerate(model.optimizer.variables)}
    before = values(model.optimizer.variables)
    bad = dict(store, **{"4": np.zeros(9, "float32")})
    with pytest.raises(ValueError, match=r"another model's: variable 4 has shape \(9,\), and .*bias_momentum has \(7,\)"):
        model.optimizer.load_own_variables(bad)
    with pytest.raises(ValueError, match="the saved optimizer has 12 variables, and .* has 14"):
        model.optimizer.load_own_variables({k: store[k] for k in list(store)[:12]})
    helpers.assert_near(values(model.optimizer.variables), before, 0)


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(NotImplementedError, match="tensorflow and jax backends, and this is 'torch'.*keras.optimizers.Lamb"):
        Lamb()
