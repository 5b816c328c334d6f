"""xla_lamb.tensorflow on variables: eagerly, in a graph and under XLA; saved and loaded; refused input."""

import functools

import jax
import numpy as np
import pytest
import tensorflow as tf

import helpers
import model64
import xla_lamb
import xla_lamb.tensorflow as ours

RUNNERS = {
    "eager": lambda f: f,
    "graph": lambda f: tf.function(f, autograph=False),
    "jit": lambda f: tf.function(f, autograph=False, jit_compile=True),
}
RUN = pytest.mark.parametrize("runner", RUNNERS)
SHAPES = helpers.SHAPES


def variables_of(params):
    return [tf.Variable(x) for x in params]


def run_steps(params, grads, runner="jit", learning_rate=0.05, moment_dtype=None, **options):
    variables = variables_of(params)
    state = ours.init_state(variables, moment_dtype=moment_dtype)
    step = RUNNERS[runner](lambda g: ours.lamb_step(variables, g, state, learning_rate, **options))
    for g in grads:
        stats = step([tf.constant(x) for x in g])
    return [v.numpy() for v in variables], state, stats


def assert_state(state, expected, tolerance=1e-6):
    assert int(state.iterations) == expected.t
    helpers.assert_near([m.numpy() for m in state.first_moments], expected.m, tolerance)
    helpers.assert_near([v.numpy() for v in state.second_moments], expected.v, tolerance)


# Values -------------------------------------------------------------------------------------------------------------------

MASK = [True, False] * 3
OPTIONS = {
    "plain": {},
    "decay": dict(weight_decay=0.01),
    "masks": dict(weight_decay=0.1, decay_mask=MASK, adapt_mask=MASK[::-1]),
    "layers": dict(layer_axes=[1, 0, 0, 1, 2, 0]),
    "betas": dict(b1=0.5, b2=0.9, eps=0.01, eps_root=1e-4),
    "clip": dict(max_grad_norm=0.3),
    "scale": dict(grad_scale=0.25, eps=0.1),
    **{name: dict(variant=name, weight_decay=0.02) for name in model64.PRESETS},
}


@RUN
@pytest.mark.parametrize("name", OPTIONS)
def test_like_the_model(runner, name):
    options = OPTIONS[name]
    params, grads = helpers.tree(), helpers.gradients(3)
    p, state, _ = run_steps(params, grads, runner, **options)
    rules = {k: v for k, v in options.items() if k in ("b1", "b2", "eps", "eps_root", "weight_decay", "max_grad_norm")}
    lists = {k: v for k, v in options.items() if k in ("decay_mask", "adapt_mask", "layer_axes", "grad_scale")}
    expected = helpers.run_model(params, grads, model64.PRESETS[options.get("variant", "optax")].replace(**rules), 0.05, **lists)
    helpers.assert_near(p, expected.p, 1e-6)
    assert_state(state, expected)


@functools.cache
def steps_in_jax(implementation):
    """Compiled once for all runners."""
    p, s = helpers.run_steps(xla_lamb.lamb(0.05, variant="nvlamb", implementation=implementation), helpers.tree(), helpers.gradients(3))
    return p, *helpers.moments(s)[1:]


@RUN
@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_same_bits_as_in_jax(runner, implementation, x64):
    """One lowering serves both. In JAX with 64-bit types, so that the bias corrections, too, are computed in float64 as they are here."""
    params, grads = helpers.tree(), helpers.gradients(3)
    options = dict(variant="nvlamb", implementation=implementation)
    p, state, _ = run_steps(params, grads, runner, **options)
    q, mu, nu = steps_in_jax(implementation)
    if implementation == "fused":
        assert helpers.bits([p, [m.numpy() for m in state.first_moments]]) == helpers.bits([q, mu])
    helpers.assert_near(p, q, 5e-7)
    helpers.assert_near([v.numpy() for v in state.second_moments], nu, 5e-7)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16, tf.float64], ids=lambda d: d.name)
def test_types(dtype):
    params, grads = (helpers.tree(dtype=dtype.as_numpy_dtype), helpers.gradients(3, dtype=dtype.as_numpy_dtype))
    p, state, _ = run_steps(params, grads, weight_decay=0.01, implementation="fused")
    moment = tf.float64 if dtype == tf.float64 else tf.float32
    assert {m.dtype for m in state.first_moments + state.second_moments} == {moment}
    rules = model64.PRESETS["optax"].replace(weight_decay=0.01)
    expected = helpers.run_model(params, grads, rules, 0.05, store_p=dtype.as_numpy_dtype)
    for a, e in zip(p, expected.p):
        assert a.dtype == dtype.as_numpy_dtype
        # A Python float enters as it is where the arithmetic is float64.
        assert helpers.ulps(a, e, a.dtype) <= (12 if dtype in (tf.float32, tf.float64) else 3)


def test_mixed_types_and_wider_gradients():
    types = [np.float32, tf.bfloat16.as_numpy_dtype, np.float64, np.float16]
    shapes = [(9,), (3, 4), (5,), (2, 2)]
    params = [x.astype(t) for x, t in zip(helpers.tree(shapes), types)]
    grads = [[x.astype(np.float32) for x in g] for g in helpers.gradients(3, shapes)]
    p, _, _ = run_steps(params, grads)
    expected = helpers.run_model(params, grads, model64.PRESETS["optax"], 0.05)
    for a, e, t in zip(p, expected.p, types):
        assert a.dtype == t
        assert helpers.error(a, e) <= {np.float32: 1e-6, np.float64: 1e-8}.get(t, 0.02)


def test_moments_in_bfloat16_by_request():
    params, grads = helpers.tree(), helpers.gradients(2)
    _, state, _ = run_steps(params, grads, moment_dtype="bfloat16")
    assert {m.dtype for m in state.first_moments + state.second_moments} == {tf.bfloat16}
    expected = helpers.run_model(params, grads, model64.PRESETS["optax"], 0.05, store_m=tf.bfloat16.as_numpy_dtype)
    assert_state(state, expected, 0.02)


@RUN
def test_numbers_as_tensors(runner):
    """Rate, decay and the rest may be tensors, and variables that change between calls: one trace, one compilation."""
    params, grads = helpers.tree(), helpers.gradients(4)
    variables, traces = variables_of(params), []
    state = ours.init_state(variables)
    rate = tf.Variable(0.0)

    def step(g, decay, scale):
        traces.append(1)
        ours.lamb_step(variables, g, state, rate, b1=tf.constant(0.8), weight_decay=decay, grad_scale=scale)

    step = RUNNERS[runner](step)
    expected = model64.init(params)
    for i, g in enumerate(grads):
        rate.assign(0.01 * (i + 1))
        step([tf.constant(x) for x in g], tf.constant(0.1 * i), tf.constant(2.0**-i))
        rules = model64.PRESETS["optax"].replace(b1=0.8, weight_decay=0.1 * i)
        expected, _ = model64.step(expected, g, rules, 0.01 * (i + 1), grad_scale=2.0**-i)
    helpers.assert_near([v.numpy() for v in variables], expected.p, 1e-6)
    assert runner == "eager" or len(traces) == 1


@RUN
def test_skip_is_whole(runner):
    params, grads = helpers.tree(), helpers.gradients(2)
    variables = variables_of(params)
    state = ours.init_state(variables)
    step = RUNNERS[runner](
        lambda g, skip: ours.lamb_step(variables, g, state, 0.1, variant="nvlamb", nonfinite="skip", skip=skip)
    )
    step([tf.constant(x) for x in grads[0]], tf.constant(False))
    everything = lambda: helpers.bits([v.numpy() for v in variables + state.first_moments + state.second_moments])  # noqa: E731
    before = everything()
    bad = [np.array(g) for g in grads[1]]
    bad[1][3] = np.nan
    for g, skip, skipped in ((bad, False, True), (grads[1], True, True), (grads[1], False, False)):
        stats = step([tf.constant(x) for x in g], tf.constant(skip))
        assert bool(stats.skipped) == skipped
        assert (everything() == before) == skipped
        assert int(state.iterations) == (1 if skipped else 2)


def test_stats():
    params, grads = helpers.tree(), helpers.gradients(1)
    axes = [1, 0, 0, 0, 2, 0]
    _, _, stats = run_steps(params, grads, variant="nvlamb", layer_axes=axes, stats=True)
    _, told = model64.step(model64.init(params), grads[0], model64.PRESETS["nvlamb"], 0.05, layer_axes=axes)
    np.testing.assert_allclose(stats.grad_norm, told.grad_norm, rtol=1e-6)
    for a, e in zip(stats.trust, told.trust, strict=True):
        assert tuple(a.shape) == e.shape
        np.testing.assert_allclose(a, e, rtol=2e-6)


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_stats_of_empty_layers(implementation):
    """A result without an element crashed TensorFlow."""
    variables = [tf.Variable(tf.ones(17)), tf.Variable(tf.ones((0, 2)))]
    stats = ours.lamb_step(
        variables, [tf.ones(17), tf.ones((0, 2))], ours.init_state(variables), 1e-2, layer_axes=[0, 1], stats=True, implementation=implementation
    )
    assert [t.shape for t in stats.trust] == [(3,), (0, 3)]
    assert np.isclose(stats.trust[0][0], np.sqrt(17))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_frequent_row_of_a_sparse_gradient(dtype):
    """4,000 slices of 1 for one row: summed in bfloat16 they stay at 256, in float16 at 2,048."""
    table = tf.Variable(tf.ones((3, 2), dtype))
    state = ours.init_state([table])
    slices = tf.IndexedSlices(tf.ones((4000, 2), dtype), tf.ones(4000, tf.int32), tf.constant([3, 2]))
    ours.lamb_step([table], [slices], state, 1e-2)
    assert np.allclose(state.first_moments[0], [[0, 0], [400, 400], [0, 0]])


def test_models_of_the_same_shapes_after_each_other():
    """The compiled step outlives the variables that it was first called with."""
    for _ in range(2):
        variables = [tf.Variable(tf.ones(23))]
        state = ours.init_state(variables)

        @tf.function
        def step():
            ours.lamb_step(variables, [tf.ones(23)], state, 1e-2)

        step()
        assert state.iterations == 1 and variables[0][0] < 1
        del variables, state, step


def test_training_with_a_tape():
    """A whole step in one jitted function: gradients from a tape straight into ours."""
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.normal(size=(32, 4)), tf.float32), tf.constant(rng.normal(size=(32, 2)), tf.float32)
    variables = variables_of(helpers.tree([(4, 2), (2,)]))
    state = ours.init_state(variables)

    @tf.function(jit_compile=True)
    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ variables[0] + variables[1] - y))
        ours.lamb_step(variables, tape.gradient(loss, variables), state, 0.02)
        return loss

    losses = [float(train()) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.iterations) == 60


def test_two_models_do_not_share():
    """Signatures are cached; values must not be."""
    inputs = [(helpers.tree(seed=i), helpers.gradients(2, seed=30 + i)) for i in range(2)]
    for params, grads in inputs:
        p, _, _ = run_steps(params, grads, "eager", learning_rate=0.1)
        helpers.assert_near(p, helpers.run_model(params, grads, model64.PRESETS["optax"], 0.1).p, 1e-6)
    p, _, _ = run_steps(*inputs[0], "eager", learning_rate=0.3, weight_decay=0.1)
    helpers.assert_near(p, helpers.run_model(*inputs[0], model64.PRESETS["optax"].replace(weight_decay=0.1), 0.3).p, 1e-6)


def test_in_graph_loop():
    """tf.while_loop under XLA."""
    params, grads = helpers.tree([(5, 3), (3,)]), helpers.gradients(1, [(5, 3), (3,)])
    variables = variables_of(params)
    state = ours.init_state(variables)

    @tf.function(jit_compile=True)
    def train(g):
        for _ in tf.range(4):
            ours.lamb_step(variables, g, state, 0.05)

    train([tf.constant(x) for x in grads[0]])
    expected = helpers.run_model(params, grads * 4, model64.PRESETS["optax"], 0.05)
    helpers.assert_near([v.numpy() for v in variables], expected.p, 1e-6)
    assert int(state.iterations) == 4


# Saving -------------------------------------------------------------------------------------------------------------------


class Model(tf.Module):
    def __init__(self, params):
        super().__init__()
        self.weights = variables_of(params)
        self.optimizer = ours.init_state(self.weights)

    @tf.function(input_signature=[[tf.TensorSpec(s, tf.float32) for s in SHAPES]], jit_compile=True)
    def step(self, grads):
        ours.lamb_step(self.weights, grads, self.optimizer, 0.05, variant="nvlamb", decay_mask=MASK)
        return [tf.identity(w) for w in self.weights]


# Without our import nobody has registered the handlers: so the saved step really is the custom call. With it, it runs.
LOAD = """
import sys
import numpy as np, tensorflow as tf
grads = np.load(sys.argv[2])
grads = [tf.constant(grads[k]) for k in sorted(grads.files)]
model = tf.saved_model.load(sys.argv[1])
try:
    model.step(grads)
except tf.errors.OpError as error:
    print("without:", error)
import xla_lamb.tensorflow
model = tf.saved_model.load(sys.argv[1])
out = model.step(grads)
np.savez(sys.argv[3], *[x.numpy() for x in out], int(model.optimizer.iterations))
"""


def test_saved_model_in_a_fresh_process(tmp_path):
    """Three steps here, one there: as four here, options and masks included."""
    params, grads = helpers.tree(), helpers.gradients(4)
    model = Model(params)
    for g in grads[:3]:
        model.step([tf.constant(x) for x in g])
    tf.saved_model.save(model, tmp_path / "model")
    np.savez(tmp_path / "grads.npz", **{f"{i:03d}": g for i, g in enumerate(grads[3])})
    done = helpers.python(LOAD, tmp_path / "model", tmp_path / "grads.npz", tmp_path / "out.npz")
    assert "without:" in done.stdout and "xla_lamb" in done.stdout
    out = np.load(tmp_path / "out.npz")
    expected = helpers.run_model(params, grads, model64.PRESETS["nvlamb"], 0.05, decay_mask=MASK)
    helpers.assert_near([out[f"arr_{i}"] for i in range(len(SHAPES))], expected.p, 1e-6)
    assert out[f"arr_{len(SHAPES)}"] == 4


def test_checkpoint(tmp_path):
    params, grads = helpers.tree(), helpers.gradients(4)
    model = Model(params)
    for g in grads[:2]:
        model.step([tf.constant(x) for x in g])
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    other = Model([np.zeros_like(x) for x in params])
    tf.train.Checkpoint(model=other).restore(path).assert_consumed()
    for g in grads[2:]:
        model.step([tf.constant(x) for x in g]), other.step([tf.constant(x) for x in g])
    assert helpers.bits([v.numpy() for v in other.variables]) == helpers.bits([v.numpy() for v in model.variables])
    assert int(other.optimizer.iterations) == 4


def test_state_tracks_its_variables():
    variables = variables_of(helpers.tree())
    state = ours.init_state(variables)
    assert isinstance(state, tf.Module)
    assert len(state.variables) == 2 * len(variables) + 1
    assert state.iterations.dtype == tf.int64


# Refused input ------------------------------------------------------------------------------------------------------------


def refused(kinds, match, variables=None, gradients=None, state=None, learning_rate=0.1, **options):
    """An error, eagerly, in a graph and under XLA; and no bit of the variables changed."""
    default = variables_of(helpers.tree([(3, 5), (5,)]))
    variables = default if variables is None else variables
    state = ours.init_state(default) if state is None else state
    gradients = [tf.ones_like(v) for v in variables] if gradients is None else gradients
    everything = [*variables, *state.variables]
    before = helpers.bits([v.numpy() for v in everything])
    for runner in RUNNERS.values():
        with pytest.raises(kinds, match=match):
            runner(lambda: ours.lamb_step(variables, gradients, state, learning_rate, **options))()
        assert helpers.bits([v.numpy() for v in everything]) == before


ONES = [np.ones((3, 5), np.float32), np.ones(5, np.float32)]


def test_control_good_input_is_taken():
    variables = variables_of(helpers.tree([(3, 5), (5,)]))
    before = [v.numpy() for v in variables]
    ours.lamb_step(variables, [tf.constant(x) for x in ONES], ours.init_state(variables), 0.1, decay_mask=[True, False], layer_axes=[1, 0])
    assert all(helpers.error(v.numpy(), b) > 1e-3 for v, b in zip(variables, before))


@pytest.mark.parametrize("gradients", [[None, ONES[1]], [ONES[0], None], [None, None]], ids=["first", "second", "both"])
def test_none_gradient(gradients):
    refused(ValueError, "(?i)gradient.*None|None.*gradient|missing", gradients=gradients)


def test_wrong_lists():
    refused(ValueError, "1.*2|2.*1", gradients=ONES[:1])
    refused(ValueError, "3.*2|2.*3", gradients=[*ONES, ONES[0]])
    refused(ValueError, "shape", gradients=ONES[::-1])
    refused(ValueError, "decay_mask", decay_mask=[True])
    refused(ValueError, "adapt_mask", adapt_mask=[True] * 3)
    refused(ValueError, "layer_axes", layer_axes=[0])
    refused(ValueError, "layer_axes", layer_axes=[0, 2])


def test_state_of_other_variables():
    refused(ValueError, "state|moment|init", state=ours.init_state(variables_of([np.ones(5, np.float32)])))
    refused(ValueError, "state|moment|init|shape", state=ours.init_state(variables_of(ONES[::-1])))


def test_wrong_types():
    refused(TypeError, "int32", gradients=[tf.ones((3, 5), tf.int32), tf.ones(5)])
    refused(TypeError, "complex64", gradients=[tf.ones((3, 5), tf.complex64), tf.ones(5)])
    with pytest.raises(TypeError, match="int32"):
        ours.init_state([tf.Variable([1, 2])])


def test_tensors_instead_of_variables():
    """They cannot be updated in place: nothing would happen, in silence."""
    tensors = [tf.constant(x) for x in ONES]
    with pytest.raises((TypeError, ValueError), match="(?i)variable"):
        ours.lamb_step(tensors, tensors, ours.init_state(variables_of(ONES)), 0.1)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(eps=-1.0), "eps.*-1.0"),
        (dict(b1=1.0), "b1.*1.0"),
        (dict(b2=-0.5), "b2.*-0.5"),
        (dict(max_grad_norm=0), "max_grad_norm"),
        (dict(variant="lars"), "lars"),
        (dict(nonfinite="ignore"), "ignore"),
        (dict(implementation="fastest"), "fastest"),
        (dict(weight_decay=-1.0), "weight_decay.*-1.0"),
    ],
    ids=str,
)
def test_bad_values(options, match):
    refused(ValueError, match, **options)


def test_jax_stays_as_it_was():
    """TensorFlow's path goes through JAX's lowering: it may not leave settings behind."""
    before = jax.config.jax_enable_x64
    run_steps(helpers.tree(dtype=np.float64), helpers.gradients(1, dtype=np.float64))
    assert jax.config.jax_enable_x64 == before


@pytest.mark.parametrize("how", ["eagerly", "in a tf.function", "compiled"])
def test_a_tape_may_still_record(how):
    """Nobody differentiates a step, but a tape that sees it asks how that would go."""
    variable = tf.Variable([1.0, 2.0])
    state = ours.init_state([variable])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(variable**2)
            ours.lamb_step([variable], [2 * variable], state, 0.1)
            norm, _ = ours.gradient_norm([2 * variable])
        return tape.gradient(loss, variable), norm

    gradient, norm = step() if how == "eagerly" else tf.function(step, jit_compile=how == "compiled")()
    assert gradient.numpy().tolist() == [2.0, 4.0]
    assert variable[0] < 1 and float(norm) == pytest.approx(2 * float(tf.norm(variable)))
