"""What TensorFlow Addons' LAMB computed, recorded (data/tf_addons), beside variant="tf_addons" in JAX and TensorFlow and tf_keras.LAMB."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf
import tf_keras

import helpers
import model64
import xla_lamb
import xla_lamb.tensorflow as ours
from xla_lamb.tf_keras import LAMB

DATA = helpers.TESTS / "data" / "tf_addons"
TOLERANCE = 1e-6  # of each tensor's largest value, after up to 50 steps


@functools.cache
def recorded(name):
    with np.load(DATA / f"{name}.npz") as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("meta"))), arrays


STEPS, ARRAYS = recorded("steps")
NAMES, SHAPES, CASES, SNAPSHOTS = STEPS["names"], [tuple(s) for s in STEPS["shapes"]], STEPS["cases"], STEPS["snapshots"]


def split(entries):
    """The arrays of the variables from all their entries in one."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    return [part.reshape(shape) for part, shape in zip(np.split(entries, np.cumsum(sizes)[:-1]), SHAPES)]


START, GRADIENTS = split(ARRAYS["start"]), [split(g) for g in ARRAYS["gradients"]]


def assert_golden(found, case, arrays=ARRAYS, tolerance=TOLERANCE):
    """`found`: for each snapshot (p, m, v), three lists."""
    for k, moments in enumerate(found):
        for slot, tensors in zip("pmv", moments):
            helpers.assert_near(tensors, split(arrays[f"{case}{slot}"][k]), tolerance)


def compiled(step):
    """`step` for graph mode, like the one that recorded; XLA compiles only our step, once for all cases with the same masks."""
    return tf.function(step, autograph=False)


# Our three front ends ------------------------------------------------------------------------------------------------------


def by_tf_keras(options, gradients_of_step=lambda t: GRADIENTS[t]):
    options = dict({"learning_rate": STEPS["learning_rate"]}, **options)
    if isinstance(options["learning_rate"], dict):
        options["learning_rate"] = tf_keras.optimizers.schedules.deserialize(options["learning_rate"])
    optimizer = LAMB(**options)
    variables = [tf.Variable(x, name=name) for name, x in zip(NAMES, START)]
    step = compiled(lambda gradients: optimizer.apply_gradients(zip(gradients, variables)) and None)
    for t in range(SNAPSHOTS[-1]):
        step([tf.convert_to_tensor(g) if isinstance(g, np.ndarray) else g for g in gradients_of_step(t)])
        if t + 1 in SNAPSHOTS:
            yield [[x.numpy() for x in xs] for xs in (variables, *([optimizer.get_slot(v, s) for v in variables] for s in "mv"))]


def meant(options):
    """(learning rate, function of the gradients before the step, arguments of lamb and lamb_step) that mean `options`."""
    options = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6, "learning_rate": STEPS["learning_rate"], **options}
    arguments = {"eps": options.pop("epsilon"), "weight_decay": options.pop("weight_decay", None) or options.pop("weight_decay_rate", 0.0)}
    # Keras keeps them in float32, and 1 - beta_2 is another number then, by 1e-5 of it.
    arguments.update(b1=float(np.float32(options.pop("beta_1"))), b2=float(np.float32(options.pop("beta_2"))))
    for name, mask in (("exclude_from_weight_decay", "decay_mask"), ("exclude_from_layer_adaptation", "adapt_mask")):
        patterns = options.pop(name, None)
        arguments[mask] = [not any(re.search(p, n + ":0") for p in patterns) for n in NAMES] if patterns else None
    if "global_clipnorm" in options:
        arguments["max_grad_norm"] = options.pop("global_clipnorm")
    clip = lambda g: g
    if "clipvalue" in options:
        clip = functools.partial(np.clip, a_min=-options["clipvalue"], a_max=options.pop("clipvalue"))
    if "clipnorm" in options:
        norm = options.pop("clipnorm")
        clip = lambda g: (g * min(1.0, norm / max(np.linalg.norm(g), 1e-30))).astype(np.float32)
    rate, decay = options.pop("learning_rate"), options.pop("decay", 0.0)
    assert not options
    return rate, decay, clip, arguments


def by_lamb_step(options):
    rate, _, clip, arguments = meant(options)
    if isinstance(rate, dict):
        rate = tf_keras.optimizers.schedules.deserialize(rate)
    variables = [tf.Variable(x) for x in START]
    state = ours.init_state(variables)
    step = compiled(lambda gradients: ours.lamb_step(variables, gradients, state, rate, variant="tf_addons", **arguments) and None)
    for t in range(SNAPSHOTS[-1]):
        step([tf.constant(clip(g)) for g in GRADIENTS[t]])
        if t + 1 in SNAPSHOTS:
            yield [[x.numpy() for x in xs] for xs in (variables, state.first_moments, state.second_moments)]


def by_jax(options, variant="tf_addons"):
    rate, _, clip, arguments = meant(options)
    if isinstance(rate, dict):
        schedule = rate["config"]
        rate = optax.polynomial_schedule(schedule["initial_learning_rate"], schedule["end_learning_rate"], 1.0, schedule["decay_steps"])
    opt = xla_lamb.lamb(rate, mask=arguments.pop("decay_mask"), variant=variant, **arguments)
    params = [jnp.asarray(x) for x in START]
    state = opt.init(params)
    step = jax.jit(opt.step)
    for t in range(SNAPSHOTS[-1]):
        params, state = step([clip(g) for g in GRADIENTS[t]], state, params)
        if t + 1 in SNAPSHOTS:
            yield params, *helpers.moments(state)[1:]


def by_model(options):
    """The float64 model, with the adaptation list's fall-back written out once more."""
    rate, decay, clip, a = meant(options)
    rules = model64.PRESETS["tf_addons"].replace(**{name: value for name, value in a.items() if not name.endswith("_mask")})
    state = model64.init(START)
    for t, g in enumerate(GRADIENTS):
        now = rate
        if isinstance(rate, dict):
            c = rate["config"]
            first, last = c["initial_learning_rate"], c["end_learning_rate"]
            now = last + (first - last) * (1 - min(t / c["decay_steps"], 1.0))
        adapts = a["adapt_mask"] or a["decay_mask"]
        state, _ = model64.step(state, [clip(x) for x in g], rules, now / (1 + decay * t), a["decay_mask"], adapts)
        if t + 1 in SNAPSHOTS:
            yield state.p, state.m, state.v


# The recorded cases ---------------------------------------------------------------------------------------------------------

# TF Models would not see its first pattern, TensorFlow Addons does not see its second; ours sees both, and says so.
SAME = [case for case in CASES if case != "end_of_name"]


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_their_formula(case):
    assert_golden(by_model(CASES[case]), f"{case}/", tolerance=2e-6)


@pytest.mark.parametrize("case", SAME)
def test_tf_keras(case):
    assert_golden(by_tf_keras(CASES[case]), f"{case}/")


@pytest.mark.parametrize("case", ["decay", "exclude_from_weight_decay", "both_lists", "schedule", "betas", "global_clipnorm"])
@pytest.mark.parametrize("ours", [by_lamb_step, by_jax])
def test_variant(ours, case):
    assert_golden(ours(CASES[case]), f"{case}/")


def test_end_of_name():
    with pytest.warns(UserWarning, match="excludes 'output/LayerNorm/gamma'.*only 'output/LayerNorm/gamma'.*Addons 0.23"):
        found = list(by_tf_keras(CASES["end_of_name"]))
    expected = list(by_model(dict(CASES["end_of_name"], exclude_from_weight_decay=["bias", "gamma"])))
    for a, e in zip(found, expected):
        helpers.assert_near(a, e, TOLERANCE)
    others = [i for i, name in enumerate(NAMES) if "gamma" not in name]
    golden = split(ARRAYS["end_of_name/p"][-1])
    helpers.assert_near([found[-1][0][i] for i in others], [golden[i] for i in others], TOLERANCE)


def test_the_cases_differ():
    """Every option shows in the recorded values, or a test of it would prove nothing."""
    ends = {case: ARRAYS[f"{case}/p"][-1].tobytes() for case in CASES}
    twins = [("decay", "weight_decay_rate"), ("exclude_from_weight_decay", "empty_list")]
    assert all(ends[a] == ends[b] for a, b in twins)
    assert len(set(ends.values())) == len(CASES) - len(twins)


def test_control_optax_adapts_what_is_excluded():
    """Another variant is another formula where there is a list: just for the variables on it."""
    case = "exclude_from_weight_decay"
    found = list(by_jax(CASES[case], variant="optax"))[-1][0]
    for name, a, e in zip(NAMES, found, split(ARRAYS[f"{case}/p"][-1])):
        listed = any(re.search(pattern, name) for pattern in CASES[case][case])
        assert helpers.error(a, e) > 1e-2 if listed else helpers.error(a, e) <= TOLERANCE, name


def test_sparse():
    meta, arrays = recorded("sparse")
    indices, values = arrays["indices"], arrays["values"]
    assert (indices[:, 0] == indices[:, 1]).all()

    def slices(t):
        return [tf.IndexedSlices(tf.constant(values[t]), tf.constant(indices[t]), tf.constant(SHAPES[0])), *GRADIENTS[t][1:]]

    assert_golden(by_tf_keras(meta["options"], slices), "", arrays)


def test_sixteen_bits():
    """Theirs is NaN in bfloat16, and further from the truth in float16; ours is exact to the last bits of the type."""
    meta, arrays = recorded("sixteen_bits")
    assert np.isnan(arrays["bfloat16/p"]).all()
    rules = model64.PRESETS["tf_addons"]
    for dtype in (tf.float16, tf.bfloat16):
        numpy = dtype.as_numpy_dtype
        start, gradients = [x.astype(numpy) for x in START], [[x.astype(numpy) for x in g] for g in GRADIENTS[:10]]
        optimizer = LAMB(STEPS["learning_rate"])
        variables = [tf.Variable(x, name=name) for name, x in zip(NAMES, start)]
        step = compiled(lambda g: optimizer.apply_gradients(zip(g, variables)) and None)
        for g in gradients:
            step([tf.constant(x) for x in g])
        expected = helpers.run_model(start, gradients, rules, STEPS["learning_rate"], store_p=numpy).p
        assert max(helpers.ulps(v.numpy(), e, numpy) for v, e in zip(variables, expected)) <= 2
        assert {w.dtype for w in optimizer.weights[1:]} == {tf.float32}
        if dtype == tf.float16:
            assert max(helpers.ulps(p, e, numpy) for p, e in zip(split(arrays["float16/p"][-1]), expected)) > 2


# A run that goes on --------------------------------------------------------------------------------------------------------

RUN, BATCHES = recorded("run")


def tiny_model():
    """The model that was saved, with another start."""
    tf_keras.utils.set_random_seed(1)
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [
            layers.Embedding(12, 4, input_length=3, name="embedding"),
            layers.Flatten(name="flatten"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(5, activation="tanh", name="dense"),
            layers.Dense(2, name="head"),
        ]
    )


def assert_at(model, moment, tolerance):
    optimizer = model.optimizer
    assert [v.name for v in model.trainable_variables] == RUN["names"]
    assert int(optimizer.iterations) == {"middle": 5, "end": 10}[moment]
    for v in model.trainable_variables:
        for slot, found in (("p", v), *((s, optimizer.get_slot(v, s)) for s in "mv")):
            assert helpers.error(found.numpy(), BATCHES[f"{moment}/{slot}/{v.name}"]) <= tolerance, (slot, v.name)


def go_on(model):
    for t in range(5, 10):
        model.train_on_batch(BATCHES["x"][t], BATCHES["y"][t])


@pytest.mark.parametrize("jit, began", [(False, False), (True, True)], ids=["graph, fresh", "jit, began"])
def test_a_checkpoint_loads_and_the_run_goes_on(jit, began):
    """The numbers come from the checkpoint, the lists from the caller, as with TensorFlow Addons itself."""
    model = tiny_model()
    lists = {name: RUN["options"][name] for name in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")}
    model.compile(LAMB(0.7, weight_decay=0.7, **lists), loss="mse", jit_compile=jit)
    if began:
        model.train_on_batch(BATCHES["x"][0], BATCHES["y"][0])
    status = tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(DATA / "run.ckpt"))
    if began:
        assert_at(model, "middle", 0.0)
    go_on(model)
    status.assert_consumed()
    assert float(model.optimizer.weight_decay) == np.float32(RUN["options"]["weight_decay"])
    assert_at(model, "end", TOLERANCE)


def test_an_h5_file_loads_and_the_run_goes_on():
    """With the optimizer, found under the name that TensorFlow Addons registered."""
    model = tf_keras.models.load_model(DATA / "run.h5")
    assert type(model.optimizer) is LAMB
    for name, value in RUN["options"].items():
        assert model.optimizer.get_config()[name] == (value if isinstance(value, list) else np.float32(value))
    assert_at(model, "middle", 0.0)
    go_on(model)
    assert_at(model, "end", TOLERANCE)


def test_control_without_the_moments_the_run_ends_elsewhere():
    model = tiny_model()
    model.compile(LAMB(**RUN["options"]), loss="mse")
    model.set_weights([BATCHES[f"middle/p/{name}"] for name in RUN["names"]])
    go_on(model)
    assert max(helpers.error(v.numpy(), BATCHES[f"end/p/{v.name}"]) for v in model.trainable_variables) > 1e-3
