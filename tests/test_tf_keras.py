"""xla_lamb.tf_keras.LAMB where TensorFlow Addons' LAMB is used: loops, Model.fit, wrappers, strategies, saving; refused input. Its recorded
values are in peers/test_tf_addons_peer.py."""

import json
import re
import runpy
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import helpers
import model64
import xla_lamb
from xla_lamb.tf_keras import LAMB

RUNNERS = {
    "eager": lambda f: f,
    "graph": lambda f: tf.function(f, autograph=False),
    "jit": lambda f: tf.function(f, autograph=False, jit_compile=True),
}
RUN = pytest.mark.parametrize("runner", RUNNERS)
RULES = model64.PRESETS["tf_addons"]
SHAPES = [(3, 5), (5,), (), (7, 2)]
NAMES = ["dense/kernel", "dense/bias", "scale", "table"]


def variables_of(params, names=NAMES):
    return [tf.Variable(x, name=name) for x, name in zip(params, names)]


def numpy(variables):
    return [v.numpy() for v in variables]


def run_steps(optimizer, params, grads, runner="graph"):
    variables = variables_of(params)
    step = RUNNERS[runner](lambda g: optimizer.apply_gradients(zip(g, variables)) and None)
    for g in grads:
        step([tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x for x in g])
    return variables


def assert_like(variables, optimizer, expected, tolerance=1e-6):
    """`expected`: a State of the model."""
    assert int(optimizer.iterations) == expected.t
    helpers.assert_near(numpy(variables), expected.p, tolerance)
    for slot, tensors in (("m", expected.m), ("v", expected.v)):
        # Keras keeps beta_2 in float32, and 1 - beta_2 is another number then, by 1e-5 of it.
        helpers.assert_near([optimizer.get_slot(v, slot).numpy() for v in variables], tensors, 2e-5)


# TensorFlow Addons' own tests of LAMB, with the float64 model as oracle -------------------------------------------------------

PAIR = [np.float32([1, 2]), np.float32([3, 4])]
PAIR_GRADIENTS = [np.float32([0.1, 0.1]), np.float32([0.01, 0.01])]


BASIC = {
    "decay": lambda: dict(learning_rate=0.001, epsilon=1e-7, weight_decay=0.01, decay=0.5),
    "inverse_time_decay": lambda: dict(learning_rate=tf_keras.optimizers.schedules.InverseTimeDecay(0.001, decay_steps=1.0, decay_rate=0.5)),
    "tensor": lambda: dict(learning_rate=tf.constant(0.001)),
    "callable": lambda: dict(learning_rate=lambda: 0.001),
    "defaults": dict,
}


@pytest.mark.parametrize(
    "name, dtype, runner",
    [("decay", dtype, runner) for dtype in (np.float16, np.float32, np.float64) for runner in RUNNERS]
    + [(name, np.float32, "graph") for name in BASIC if name != "decay"],
)
def test_basic(name, dtype, runner):
    options = BASIC[name]()
    optimizer = LAMB(**options)
    rules = RULES.replace(eps=options.get("epsilon", 1e-6), weight_decay=options.get("weight_decay", 0.0))
    params, grads = [[x.astype(dtype) for x in xs] for xs in (PAIR, PAIR_GRADIENTS)]
    variables = run_steps(optimizer, params, [grads] * 3, runner)
    expected = model64.init(params)
    for t in range(3):
        rate = 0.001 / (1 + 0.5 * t) if "decay" in name else 0.001
        expected, _ = model64.step(expected, grads, rules, rate, store_p=dtype)
    assert_like(variables, optimizer, expected, 1e-3 if dtype == np.float16 else 1e-6)
    assert all(helpers.error(v.numpy(), p) > 1e-4 for v, p in zip(variables, params))


@pytest.mark.parametrize("dtype, runner", [(np.float16, "eager"), (np.float32, "graph"), (np.float64, "jit")])
def test_sparse(dtype, runner):
    params = [np.array([1, 1, 2], dtype), np.array([3, 3, 4], dtype)]
    slices = [tf.IndexedSlices(tf.constant([x, x], dtype), tf.constant([0, 2]), tf.constant([3])) for x in (0.1, 0.01)]
    optimizer = LAMB()
    variables = run_steps(optimizer, params, [slices] * 3, runner)
    dense = [np.array([x, 0, x], dtype) for x in (0.1, 0.01)]
    assert_like(variables, optimizer, helpers.run_model(params, [dense] * 3, RULES, 0.001, store_p=dtype), 1e-3 if dtype == np.float16 else 1e-6)


def test_minimize_mean_square_loss_with_weight_decay():
    w, x = tf.Variable([0.1, -0.2, -0.1]), tf.constant([0.4, 0.2, -0.5])
    optimizer = LAMB(0.02, weight_decay=0.01)
    step = tf.function(lambda: optimizer.minimize(lambda: tf.reduce_mean(tf.square(x - w)), [w]) and None, autograph=False)
    for _ in range(200):
        step()
    np.testing.assert_allclose(w, x, rtol=1e-2, atol=1e-2)


def test_serialization():
    optimizer = LAMB(1e-4)
    for legacy in (False, True):
        listed = tf_keras.optimizers.serialize(optimizer, use_legacy_format=legacy)
        assert tf_keras.optimizers.deserialize(listed, use_legacy_format=legacy).get_config() == optimizer.get_config()
    assert optimizer.get_config()["learning_rate"] == 1e-4


def test_weight_decay_rate():
    assert LAMB(0.01, weight_decay_rate=0.01).get_config()["weight_decay"] == 0.01
    assert LAMB(0.01, weight_decay_rate=0.01, weight_decay=0.01).get_config()["weight_decay"] == 0.01
    with pytest.raises(ValueError, match="0.02 and 0.0: pass one"):
        LAMB(0.01, weight_decay=0.0, weight_decay_rate=0.02)


@pytest.mark.parametrize("lists, decays, adapts", [
    (dict(), [True] * 4, [True] * 4),
    (dict(exclude_from_weight_decay=["bias", "tab"]), [True, False, True, False], [True, False, True, False]),
    (dict(exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=[]), [True, False, True, True], [True, False, True, True]),
    (dict(exclude_from_weight_decay=["^dense/"], exclude_from_layer_adaptation=["e$"]), [False, False, True, True], [True, True, False, False]),
    (dict(exclude_from_layer_adaptation=["bias"]), [True] * 4, [True, False, True, True]),
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*excludes")  # "e$": TensorFlow Addons 0.23 would look at "scale:0"
def test_exclusion(lists, decays, adapts):
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    optimizer = LAMB(0.05, weight_decay=0.1, **lists)
    variables = run_steps(optimizer, params, grads)
    expected = helpers.run_model(params, grads, RULES.replace(weight_decay=0.1), 0.05, decay_mask=decays, adapt_mask=adapts)
    assert_like(variables, optimizer, expected)
    if not all(decays):  # control
        plain = helpers.run_model(params, grads, RULES.replace(weight_decay=0.1), 0.05)
        assert max(helpers.error(v.numpy(), p) for v, p in zip(variables, plain.p)) > 1e-3


# Hyper-parameters and options -------------------------------------------------------------------------------------------------


@RUN
def test_hyperparameters_change_between_steps(runner):
    """Assigned, called or scheduled, and compiled once."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(4, SHAPES)
    decay = tf.Variable(0.0)
    optimizer, variables, traces = LAMB(0.0, weight_decay=lambda: decay, beta_1=tf.constant(0.8)), variables_of(params), []
    step = RUNNERS[runner](lambda g: traces.append(1) or optimizer.apply_gradients(zip(g, variables)) and None)
    expected = model64.init(params)
    for i, g in enumerate(grads):
        optimizer.learning_rate = 0.01 * (i + 1)
        decay.assign(0.1 * i)
        step([tf.constant(x) for x in g])
        first = len(traces) if i == 0 else first
        expected, _ = model64.step(expected, g, RULES.replace(b1=0.8, weight_decay=0.1 * i), 0.01 * (i + 1))
    assert_like(variables, optimizer, expected)
    assert runner == "eager" or len(traces) == first  # TensorFlow itself traces twice where variables are made


def test_weight_decay_schedule():
    schedule = tf_keras.optimizers.schedules.PolynomialDecay(0.4, 2, 0.1)
    optimizer = LAMB(0.05, weight_decay=schedule)
    optimizer = LAMB.from_config(json.loads(json.dumps(optimizer.get_config())))
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    variables = run_steps(optimizer, params, grads)
    expected = model64.init(params)
    for g, decay in zip(grads, (0.4, 0.25, 0.1)):
        expected, _ = model64.step(expected, g, RULES.replace(weight_decay=decay), 0.05)
    assert_like(variables, optimizer, expected)


MINE = xla_lamb.Variant("mine", adapt="decay_mask", ratio_bounds=(0.0, 0.5))


@pytest.mark.parametrize("variant", ["nvlamb", "keras", "apex", "deepspeed", MINE], ids=lambda v: getattr(v, "name", v))
def test_other_variants(variant):
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    optimizer = LAMB(0.05, weight_decay=0.1, exclude_from_weight_decay=["bias"], variant=variant)
    optimizer = LAMB.from_config(json.loads(json.dumps(optimizer.get_config())))
    variables = run_steps(optimizer, params, grads)
    rules = model64.PRESETS[variant] if isinstance(variant, str) else RULES.replace(ratio_bounds=(0.0, 0.5))
    expected = helpers.run_model(params, grads, rules.replace(eps=1e-6, weight_decay=0.1), 0.05, decay_mask=[True, False, True, True])
    assert_like(variables, optimizer, expected)


EVERYTHING = dict(
    learning_rate=0.25,
    beta_1=0.8,
    beta_2=0.9,
    epsilon=1e-3,
    weight_decay=0.125,
    exclude_from_weight_decay=["a"],
    exclude_from_layer_adaptation=["b"],
    name="other",
    variant="nvlamb",
    max_grad_norm=3.0,
    nonfinite="skip",
    implementation="reference",
    clipnorm=2.0,
    clipvalue=4.0,
    decay=0.5,
)


def test_config_carries_every_option():
    optimizer = LAMB(**EVERYTHING)
    listed = json.loads(json.dumps(optimizer.get_config()))
    assert listed == EVERYTHING
    again = LAMB.from_config(listed)
    assert again.get_config() == EVERYTHING
    assert listed == EVERYTHING  # from_config takes a copy
    assert again.variant == xla_lamb.VARIANTS["nvlamb"]
    # What TensorFlow Addons can take, and nothing more, as long as none of our own options is used.
    theirs = {k: v for k, v in EVERYTHING.items() if k not in ("variant", "max_grad_norm", "nonfinite", "implementation")}
    assert LAMB(**theirs).get_config() == theirs
    # TF Models' has the other name.
    models = dict(name="LAMB", learning_rate=0.5, weight_decay_rate=0.1, decay=0.0, beta_1=0.9, beta_2=0.999, epsilon=1e-6)
    assert LAMB.from_config(models).get_config()["weight_decay"] == 0.1
    # The list that stands in for the other is listed for both.
    for empty in (None, []):
        fallen_back = LAMB(exclude_from_weight_decay=["a"], exclude_from_layer_adaptation=empty)
        assert fallen_back.get_config()["exclude_from_layer_adaptation"] == ["a"]


def test_max_grad_norm_is_global_clipnorm():
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES, scale=1.0)
    a, b = (run_steps(LAMB(0.05, **{name: 0.3}), params, grads) for name in ("max_grad_norm", "global_clipnorm"))
    helpers.assert_near(numpy(a), numpy(b), 1e-6)
    assert helpers.error(a[0].numpy(), run_steps(LAMB(0.05), params, grads)[0].numpy()) > 1e-4


@RUN
def test_a_skipped_step_changes_no_bit(runner):
    params, grads = helpers.tree(SHAPES), helpers.gradients(2, SHAPES)
    optimizer, variables = LAMB(0.05, nonfinite="skip"), variables_of(params)
    step = RUNNERS[runner](lambda g: optimizer.apply_gradients(zip(g, variables)) and None)
    step([tf.constant(x) for x in grads[0]])
    before = helpers.bits(numpy([*variables, *optimizer.weights]))
    bad = [tf.constant(x) for x in grads[1]]
    bad[1] = bad[1] * np.inf
    step(bad)
    assert helpers.bits(numpy([*variables, *optimizer.weights])) == before
    step([tf.constant(x) for x in grads[1]])
    assert_like(variables, optimizer, helpers.run_model(params, grads, RULES, 0.05))


# Variables and gradients -------------------------------------------------------------------------------------------------------


@RUN
def test_sparse_with_repeated_indices_is_the_dense_gradient(runner):
    table = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    indices, values = np.int32([3, 0, 3, 8, 3]), np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    dense = np.zeros_like(table)
    np.add.at(dense, indices, values)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(table.shape))
    ends = [run_steps(LAMB(0.05), [table], [[g]] * 3, runner) for g in (slices, dense)]
    assert helpers.bits(numpy(ends[0])) == helpers.bits(numpy(ends[1]))


def test_sixteen_bit_slices_are_summed_in_float32():
    """257 times 1: in bfloat16 the sum sticks at 256."""
    slices = tf.IndexedSlices(tf.ones((258, 1), tf.bfloat16), tf.constant([0] * 257 + [1]), tf.constant([2, 1]))
    optimizer = LAMB(0.05)
    (v,) = run_steps(optimizer, [tf.ones((2, 1), tf.bfloat16)], [[slices]])
    np.testing.assert_allclose(optimizer.get_slot(v, "m"), [[25.7], [0.1]], rtol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_sixteen_bit_variables(dtype):
    params, grads = helpers.tree(SHAPES, dtype=dtype.as_numpy_dtype), helpers.gradients(5, SHAPES, dtype=dtype.as_numpy_dtype)
    optimizer = LAMB(0.05, weight_decay=0.1)
    variables = run_steps(optimizer, params, grads)
    assert [w.dtype for w in optimizer.weights] == [tf.int64] + [tf.float32] * 8
    expected = helpers.run_model(params, grads, RULES.replace(weight_decay=0.1), 0.05, store_p=dtype.as_numpy_dtype)
    for v, e in zip(variables, expected.p):
        assert v.dtype == dtype and helpers.ulps(v.numpy(), e, dtype.as_numpy_dtype) <= 2


@pytest.mark.parametrize("runner", ["eager", "jit"])
def test_variables_without_gradient(runner):
    """They are left out, and the masks of the others stay theirs; the correction of bias counts the optimizer's steps, as theirs does."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    optimizer, variables = LAMB(0.05, weight_decay=0.1, exclude_from_weight_decay=["scale", "table"]), variables_of(params)
    step = RUNNERS[runner](lambda g: optimizer.apply_gradients(zip(g, variables)) and None)
    given = [[0, 1, 2, 3], [0, 2], [1, 3]]
    for g, indices in zip(grads, given):
        step([tf.constant(x) if i in indices else None for i, x in enumerate(g)])
    for i, v in enumerate(variables):
        state, mask = model64.init([params[i]]), [i < 2]
        for t, g in enumerate(grads):
            state.t = t
            if i in given[t]:
                state, _ = model64.step(state, [g[i]], RULES.replace(weight_decay=0.1), 0.05, decay_mask=mask)
        state.t = 3
        assert_like([v], optimizer, state)


@RUN
@pytest.mark.parametrize("sparse", [False, True])
def test_constraint(runner, sparse):
    params, grad = np.float32([[0.1, 3.0], [-1.0, 0.5]]), np.float32([[5.0, -5.0], [5.0, -5.0]])
    v = tf.Variable(params, name="v", constraint=lambda x: tf.clip_by_value(x, 0.0, 3.0))
    optimizer = LAMB(0.5)
    step = RUNNERS[runner](lambda g: optimizer.apply_gradients([(g, v)]) and None)
    step(tf.IndexedSlices(tf.constant(grad), tf.constant([0, 1]), tf.constant([2, 2])) if sparse else tf.constant(grad))
    free = helpers.run_model([params], [[grad]], RULES, 0.5).p[0]
    assert (free < 0).any() and (free > 3).any()
    helpers.assert_near([v.numpy()], [np.clip(free, 0.0, 3.0)], 1e-6)


# Models ------------------------------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).integers(0, 12, size=(24, 3)).astype(np.int32)
Y = np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32)
OPTIONS = dict(learning_rate=0.02, weight_decay=0.1, exclude_from_weight_decay=["norm", "bias"])

MODEL = '''
def make_model(seed=0):
    tf_keras.utils.set_random_seed(seed)
    layers = tf_keras.layers
    return tf_keras.Sequential([
        layers.Embedding(12, 4, input_length=3, name="embedding"),
        layers.Flatten(name="flatten"),
        layers.LayerNormalization(name="norm"),
        layers.Dense(5, activation="tanh", name="dense"),
        layers.Dense(2, name="head", dtype="float32"),
    ])
'''
exec(MODEL)  # the fresh process below has it too


def fit(model, optimizer, **options):
    model.compile(optimizer, loss="mse", **options)
    model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.fixture(scope="module")
def fitted():
    """The weights after Model.fit in graph mode, which the other ways to train must reach as well; and the model's own steps."""
    model = fit(make_model(), LAMB(**OPTIONS))
    assert int(model.optimizer.iterations) == 8
    return model.get_weights()


def test_fit_is_the_model_of_lamb(fitted):
    """Gradients from a tape, the steps from the float64 model."""
    model = make_model()
    names = [v.name for v in model.trainable_variables]
    mask = [not re.search("norm|bias", name) for name in names]
    state = model64.init(model.get_weights())

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)]

    for i in range(8):
        batch = slice(i % 4 * 6, i % 4 * 6 + 6)
        grads = [g.numpy() for g in gradients(X[batch], Y[batch])]
        state, _ = model64.step(state, grads, RULES.replace(weight_decay=0.1), 0.02, decay_mask=mask)
        model.set_weights(state.p)
    helpers.assert_near(fitted, state.p, 2e-5)  # gradients are float32, and differ as the weights do


@pytest.mark.parametrize("options", [dict(jit_compile=True), dict(run_eagerly=True)], ids=str)
def test_fit(fitted, options):
    helpers.assert_near(fit(make_model(), LAMB(**OPTIONS), **options).get_weights(), fitted, 1e-5)


def test_control_another_decay_fits_elsewhere(fitted):
    weights = fit(make_model(), LAMB(**dict(OPTIONS, weight_decay=0.11))).get_weights()
    assert max(helpers.error(w, f) for w, f in zip(weights, fitted)) > 1e-4


def test_mixed_precision(fitted):
    """Float32 variables behind a loss-scaling wrapper, float16 in the layers. The scale that `compile` chooses would overflow at first."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(LAMB(**OPTIONS), initial_scale=128)
        model = fit(make_model(), optimizer)
        predicted = model.predict(X, verbose=0)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    assert float(optimizer.loss_scale) == 128 and {w.dtype for w in optimizer.inner_optimizer.weights[1:]} == {tf.float32}
    single = make_model()
    single.set_weights(fitted)
    assert 1e-6 < helpers.error(predicted, single.predict(X, verbose=0)) < 0.03


@RUN
def test_loss_scale(runner):
    """A finite step is ours with the gradients unscaled; one that overflows leaves all but the counter and the scale."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(2, SHAPES)
    optimizer = LAMB(0.05)
    scaling = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024)
    variables = variables_of(params)
    step = RUNNERS[runner](lambda g: scaling.apply_gradients(zip(scaling.get_unscaled_gradients(g), variables)) and None)
    step([tf.constant(x * 1024) for x in grads[0]])
    assert_like(variables, optimizer, helpers.run_model(params, grads[:1], RULES, 0.05))
    before = helpers.bits(numpy([*variables, *optimizer.weights[1:]]))
    step([tf.constant(x) * np.inf for x in grads[1]])
    assert helpers.bits(numpy([*variables, *optimizer.weights[1:]])) == before
    assert (int(optimizer.iterations), float(scaling.loss_scale)) == (2, 512.0)


def train_step_hlo(read_first=False):
    """The optimized HLO of a Keras model's own train_step. The head has no bias: XLA would compute the loss from it after the update."""
    model = make_model()
    model.pop()
    model.add(tf_keras.layers.Dense(2, use_bias=False, name="last"))
    model.compile(LAMB(**OPTIONS), loss="mse")

    @tf.function(jit_compile=True)
    def step(x, y):
        old = [tf.identity(v) for v in model.trainable_variables] if read_first else []
        return model.train_step((x, y))["loss"], old

    batch = tf.constant(X[:6]), tf.constant(Y[:6])
    step(*batch)
    hlo = step.experimental_get_compiler_ir(*batch)(stage="optimized_hlo")
    kinds = {f"f32[{','.join(map(str, v.shape))}]" for v in model.trainable_variables}
    return hlo, len(model.trainable_variables), [c for c in helpers.copies(hlo) if c.split("{")[0] in kinds]


def test_a_train_step_is_one_call_in_place():
    hlo, variables, copies = train_step_hlo()
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"]
    assert helpers.aliases(hlo) >= 3 * variables
    assert copies == []


def test_control_a_result_that_needs_a_copy_has_one():
    _, variables, copies = train_step_hlo(read_first=True)
    assert len(copies) >= variables


# Saving -------------------------------------------------------------------------------------------------------------------------


def test_h5_holds_the_run(tmp_path):
    options = dict(OPTIONS, exclude_from_layer_adaptation=["head"], max_grad_norm=1.0, nonfinite="skip", clipvalue=2.0)
    model = fit(make_model(), LAMB(**options))
    model.save(tmp_path / "model.h5", save_format="h5")
    other = tf_keras.models.load_model(tmp_path / "model.h5")
    assert type(other.optimizer) is LAMB
    assert json.dumps(other.optimizer.get_config(), default=float) == json.dumps(model.optimizer.get_config(), default=float)
    for m in (model, other):
        m.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    assert int(other.optimizer.iterations) == 12
    assert helpers.bits(other.get_weights() + other.optimizer.get_weights()) == helpers.bits(model.get_weights() + model.optimizer.get_weights())


def test_checkpoint_holds_the_run(tmp_path):
    model = fit(make_model(), LAMB(**OPTIONS))
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "checkpoint")
    other = make_model(seed=1)
    other.compile(LAMB(**dict(OPTIONS, learning_rate=0.7)), loss="mse")
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    for m in (model, other):
        m.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    status.assert_consumed()
    assert helpers.bits(other.get_weights()) == helpers.bits(model.get_weights())


class TheirState(tf_keras.optimizers.legacy.Adam):
    """Slots and hyper-parameters under TF Models' names; of 16-bit variables, slots of 16 bits."""

    def __init__(self):
        super().__init__(0.25)
        self._set_hyper("weight_decay_rate", 0.75)


def their_checkpoint(path, dtype):
    v, optimizer = tf.Variable([1.0, 2.0], dtype=dtype), TheirState()
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([0.1, 0.2], dtype), v)])
    tf.train.Checkpoint(v=v, optimizer=optimizer).write(str(path))
    return v, optimizer


@pytest.mark.parametrize("dtype, began", [(tf.float32, False), (tf.float32, True), (tf.float16, False)], ids=str)
def test_tf_models_checkpoint(tmp_path, dtype, began):
    v, theirs = their_checkpoint(tmp_path / "checkpoint", dtype)
    w, optimizer = tf.Variable([0.0, 0.0], dtype=dtype), LAMB(0.5)
    if began:
        optimizer.apply_gradients([(w + 1, w)])
    status = tf.train.Checkpoint(v=w, optimizer=optimizer).read(str(tmp_path / "checkpoint"))
    state = model64.State([v.numpy()], *([theirs.get_slot(v, s).numpy()] for s in "mv"), 3)
    expected, _ = model64.step(state, [np.float64([0.1, 0.2])], RULES.replace(weight_decay=0.75), 0.25)
    optimizer.apply_gradients([(tf.constant([0.1, 0.2]), w)])
    status.assert_consumed()
    assert optimizer.get_slot(w, "m").dtype == tf.float32
    assert_like([w], optimizer, expected, 1e-3 if dtype == tf.float16 else 1e-6)


# tf.distribute, in a process of its own, since only a fresh TensorFlow can have two CPUs ---------------------------------------------

STRATEGIES = (
    """
import sys
import numpy as np, tensorflow as tf, tf_keras
from xla_lamb.tf_keras import LAMB
"""
    + MODEL
    + """
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
given = np.load(sys.argv[1], allow_pickle=True)
X, Y, options, out = given["x"], given["y"], given["options"].item(), {}

def run(name, strategy, wrap=lambda optimizer: optimizer, **more):
    with strategy.scope():
        model = make_model()
        optimizer = LAMB(**options, **more)
        model.compile(wrap(optimizer), loss="mse")
    model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    for v in model.trainable_variables:
        for x in (v, optimizer.get_slot(v, "m"), optimizer.get_slot(v, "v")):
            replicas = [r.numpy().tobytes() for r in strategy.experimental_local_results(x)]
            assert len(replicas) == strategy.num_replicas_in_sync and len(set(replicas)) == 1, (name, x.name)
    for i, w in enumerate(model.get_weights()):
        out[f"{name}/{i}"] = w
    out[name], out[name + "/predicted"] = optimizer.iterations.numpy(), model.predict(X, verbose=0)

CPUS = ["CPU:0", "CPU:1"]
strategy = tf.distribute.MirroredStrategy(CPUS)
run("mirrored", strategy, max_grad_norm=0.1)
tf_keras.mixed_precision.set_global_policy("mixed_float16")
run("mixed", strategy, lambda optimizer: tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=128), max_grad_norm=0.1)
tf_keras.mixed_precision.set_global_policy("float32")

# Repeated indices on both replicas, summed.
with strategy.scope():
    table, optimizer = tf.Variable(tf.ones((4, 2))), LAMB(0.1)
values = strategy.experimental_distribute_values_from_function(lambda c: tf.fill((3, 2), 1.0 + c.replica_id_in_sync_group))
slices = lambda v: optimizer.apply_gradients([(tf.IndexedSlices(v, tf.constant([1, 1, 3]), tf.constant([4, 2])), table)])
tf.function(lambda: strategy.run(lambda v: slices(v) and None, args=(values,)))()
out["sparse"] = optimizer.get_slot(table, "m").numpy()

# Variables on two devices without a strategy: one call for each; the norm of both is refused, before anything changes.
pair = []
for name in CPUS:
    with tf.device(name):
        pair.append(tf.Variable([1.0, 2.0], name="on" + name[-1]))
gradients = [tf.constant([0.5, 0.25])] * 2
try:
    LAMB(0.1, max_grad_norm=1.0).apply_gradients(zip(gradients, pair))
except ValueError as error:
    assert "one device" in str(error) and "CPU:1" in str(error)
    assert all((v.numpy() == [1.0, 2.0]).all() for v in pair)
    out["refused"] = True
optimizer = LAMB(0.1)
tf.function(lambda: optimizer.apply_gradients(zip(gradients, pair)) and None)()
out["pair"] = np.stack([v.numpy() for v in pair])
np.savez(sys.argv[2], **out)
"""
)


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("strategies")
    np.savez(directory / "in.npz", x=X, y=Y, options=np.array(OPTIONS, object))
    helpers.python(STRATEGIES, directory / "in.npz", directory / "out.npz", TF_CPP_MIN_LOG_LEVEL=3)
    return np.load(directory / "out.npz")


def test_strategy(strategies, fitted):
    """As without one, and the same bits on every replica (asserted where they are). Clipped by the norm of the sum over replicas."""
    clipped = fit(make_model(), LAMB(**OPTIONS, max_grad_norm=0.1)).get_weights()
    assert strategies["mirrored"] == 8
    helpers.assert_near([strategies[f"mirrored/{i}"] for i in range(len(fitted))], clipped, 1e-5)
    assert max(helpers.error(c, f) for c, f in zip(clipped, fitted)) > 1e-4  # it did clip
    assert 1e-6 < helpers.error(strategies["mixed/predicted"], strategies["mirrored/predicted"]) < 0.03


def test_strategy_sums_slices(strategies):
    np.testing.assert_allclose(strategies["sparse"], [[0, 0], [0.6, 0.6], [0, 0], [0.3, 0.3]], rtol=1e-6)


def test_two_devices(strategies):
    expected = helpers.run_model([[1.0, 2.0]] * 2, [[np.float64([0.5, 0.25])] * 2], RULES, 0.1)
    helpers.assert_near(list(strategies["pair"]), expected.p, 1e-6)
    assert strategies["refused"]


# Refused input -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, kind, match",
    [
        (dict(beta_1=1.0), ValueError, "beta_1.*1.0"),
        (dict(beta_2=-0.5), ValueError, "beta_2.*-0.5"),
        (dict(epsilon=-1.0), ValueError, "epsilon.*-1.0"),
        (dict(weight_decay=float("nan")), ValueError, "weight_decay.*NaN"),
        (dict(learning_rate=float("inf")), ValueError, "learning_rate.*inf"),
        (dict(max_grad_norm=0), ValueError, "max_grad_norm.*0"),
        (dict(nonfinite="ignore"), ValueError, "nonfinite.*ignore"),
        (dict(implementation="fastest"), ValueError, "implementation.*fastest"),
        (dict(variant="lars"), ValueError, "variant.*lars"),
        (dict(exclude_from_weight_decay="bias"), TypeError, "exclude_from_weight_decay.*'bias'"),
        (dict(exclude_from_layer_adaptation=["("]), ValueError, r"exclude_from_layer_adaptation.*'\('"),
        (dict(weight_decays=0.1), TypeError, "weight_decays"),
        (dict(clipnorm=1.0, global_clipnorm=1.0), ValueError, "clipnorm"),
    ],
    ids=str,
)
def test_bad_options(options, kind, match):
    with pytest.raises(kind, match=match):
        LAMB(**options)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "gradients, kind, match",
    [
        (lambda v, w: [(None, v), (None, w)], ValueError, "No gradients"),
        (lambda v, w: [(tf.ones(3), v), (tf.ones(3), w)], ValueError, "gradient of the_second.*3"),
        (lambda v, w: [(tf.ones(3), v), (tf.ones(2, tf.int32), w)], TypeError, "the_second.*int32"),
        (lambda v, w: [(tf.ones(3), v), (tf.ones(2), w), (tf.ones(3), v)], ValueError, "the_first.*twice"),
        (lambda v, w: [(tf.IndexedSlices(tf.ones((1, 2)), [0], [3]), v), (tf.ones(2), w)], ValueError, "gradient of the_first"),
    ],
    ids=["none", "shape", "type", "twice", "slices"],
)
def test_bad_gradients(gradients, kind, match, runner):
    v, w = tf.Variable([1.0, 2.0, 3.0], name="the_first"), tf.Variable([1.0, 2.0], name="the_second")
    optimizer = LAMB(0.1)
    with pytest.raises(kind, match=match):
        RUNNERS[runner](lambda: optimizer.apply_gradients(gradients(v, w)) and None)()
    assert v.numpy().tolist() == [1, 2, 3] and w.numpy().tolist() == [1, 2] and int(optimizer.iterations) == 0


def test_bad_variables():
    for v in (tf.Variable([1, 2], name="counts"), tf.Variable([1j], name="counts")):
        with pytest.raises((TypeError, ValueError), match="counts"):
            LAMB(0.1).apply_gradients([(tf.ones_like(v), v)])


def test_a_checkpoint_of_another_model(tmp_path):
    """TensorFlow finds what does not fit; nothing of it is passed over in silence."""
    their_checkpoint(tmp_path / "checkpoint", tf.float32)
    path = str(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"shape.*\(3,\)"):
        tf.train.Checkpoint(v=tf.Variable([1.0, 2.0, 3.0]), optimizer=LAMB(0.1)).read(path)
    status = tf.train.Checkpoint(w=tf.Variable([1.0, 2.0], name="unheard_of"), optimizer=LAMB(0.1)).read(path)
    with pytest.raises(AssertionError, match="unheard_of"):
        status.assert_consumed()
    status.expect_partial()


def test_without_tf_keras(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf_keras", None)  # as if it were not there
    with pytest.raises(ImportError, match="needs the package tf_keras.*pip install"):
        runpy.run_path(sys.modules["xla_lamb.tf_keras"].__file__)
