"""Each format against its own framework: what was saved there is read here, what is written here is loaded there, and the run goes on."""

import functools
import json
import sys
import types
import zipfile
from pathlib import Path

import h5py
import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorflow as tf
import tf_keras
from flax import nnx
from flax.training.train_state import TrainState

import helpers
import model64
import xla_lamb
import xla_lamb.keras
import xla_lamb.tf_keras
from helpers import assert_near, bits
from xla_lamb import checkpoints
from xla_lamb.checkpoints import Checkpoint, CheckpointError, match
from xla_lamb.checkpoints.state import carry

RECORDED = helpers.TESTS / "data" / "tf_addons"
SHAPES = {"dense/kernel": (3, 4), "dense/bias": (4,), "norm/gamma": (4,), "norm/beta": (4,), "head/kernel": (4, 2)}
RATE = 0.02
# Two implementations in float32 that differ in the order of operations, over six steps.
TOLERANCE = 2e-5


def named_arrays(seed=0, scale=1.0):
    return dict(zip(SHAPES, helpers.tree(SHAPES.values(), seed, scale)))


GRADIENTS = [dict(zip(SHAPES, g)) for g in helpers.gradients(6, SHAPES.values())]
START = named_arrays()


def nested(arrays):
    tree = {}
    for name, x in arrays.items():
        layer, last = name.split("/")
        tree.setdefault(layer, {})[last] = jnp.asarray(x)
    return tree


def flat(tree):
    return {f"{layer}/{last}": np.asarray(tree[layer][last]) for layer, last in (name.split("/") for name in SHAPES)}


def some_checkpoint(step=7, **changes):
    second = {name: np.square(x) for name, x in named_arrays(2).items()}
    return Checkpoint(**dict(dict(step=step, first=named_arrays(1), second=second, params=named_arrays(3)), **changes))


def assert_same(a, b, params=True):
    """Every bit of two checkpoints."""
    assert (a.step, a.names) == (b.step, b.names)
    for ours, theirs in ((a.first, b.first), (a.second, b.second), (a.params, b.params))[: 3 if params else 2]:
        assert {n: bits(x) for n, x in ours.items()} == {n: bits(x) for n, x in theirs.items()}


@functools.lru_cache(maxsize=None)
def optax_step(update):
    def step(gradients, state, params):
        updates, state = update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster


def optax_steps(opt, params, state, gradients):
    for g in gradients:
        params, state = optax_step(opt.update)(nested(g), state, params)
    return params, state


def keras_model(optimizer=None, prefix=""):
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name=prefix + "dense"),
            keras.layers.LayerNormalization(name=prefix + "norm"),
            keras.layers.Dense(2, use_bias=False, name=prefix + "head"),
        ]
    )
    model.compile(optimizer or keras.optimizers.Lamb(RATE, epsilon=1e-6), loss="mse")
    for v, x in zip(model.trainable_variables, START.values()):
        v.assign(x)
    return model


def keras_steps(model, gradients):
    for g in gradients:
        model.optimizer.apply([tf.constant(x) for x in g.values()], model.trainable_variables)
    return model


def keras_values(model):
    return {name: np.asarray(v.numpy()) for name, v in zip(SHAPES, model.trainable_variables)}


def old_model(optimizer):
    """Of Keras 2, with slots."""
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Dense(4, name="dense", input_shape=(3,)),
            tf_keras.layers.LayerNormalization(name="norm"),
            tf_keras.layers.Dense(2, use_bias=False, name="head"),
        ]
    )
    model.compile(optimizer, loss="mse")
    for v, x in zip(model.trainable_variables, START.values()):
        v.assign(x)
    return model


def old_steps(model, gradients):
    for g in gradients:
        model.optimizer.apply_gradients(zip(map(tf.constant, g.values()), model.trainable_variables))
    return model


def save_orbax(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def load_orbax(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def model64_end(gradients=GRADIENTS, **options):
    """The float64 model's parameters by name."""
    state = helpers.run_model(list(START.values()), [list(g.values()) for g in gradients], model64.PRESETS["optax"], RATE, **options)
    return dict(zip(SHAPES, state.p))


# The state apart from any framework -------------------------------------------------------------------------------------------


def test_importing_starts_no_framework():
    code = (
        "import sys, xla_lamb.checkpoints; print([m for m in ('jax', 'tensorflow', 'keras', 'torch', 'orbax', 'h5py') if m in sys.modules])"
    )
    assert helpers.python(code).stdout.strip() == "[]"


def test_a_checkpoint_holds_what_fits_together():
    x = some_checkpoint()
    assert x.names == list(SHAPES) and x.first["norm/beta"].dtype == np.float32
    sixteen = {name: v.astype(ml_dtypes.bfloat16) for name, v in x.first.items()}
    wide = some_checkpoint(first=sixteen)
    assert all(v.dtype == np.float32 and np.array_equal(v, sixteen[n].astype(np.float32)) for n, v in wide.first.items())
    with pytest.raises(CheckpointError, match=r"number of steps taken is -1"):
        some_checkpoint(step=-1)
    with pytest.raises(CheckpointError, match=r"only the first moments have norm/beta"):
        some_checkpoint(second={n: v for n, v in x.second.items() if n != "norm/beta"})
    with pytest.raises(CheckpointError, match=r"dense/bias: the first moment has shape \(4,\), its place in the parameters \(5,\)"):
        some_checkpoint(params={**x.params, "dense/bias": np.zeros(5)})


def test_matched_by_name_whatever_the_order_and_the_model_is_called():
    x = some_checkpoint()
    turned = dict(reversed(SHAPES.items()))
    y, report = match(x, turned)
    assert (
        y.names == list(turned)
        and report.matched == "by name"
        and all(y.first[n] is not None and np.array_equal(y.first[n], x.first[n]) for n in SHAPES)
    )
    y, report = match(x, {f"bert/encoder/{n}": s for n, s in turned.items()})
    assert ("bert/encoder/norm/beta", "norm/beta") in report.pairs and "but for a first part" in report.matched
    assert np.array_equal(y.second["bert/encoder/norm/beta"], x.second["norm/beta"])


def test_names_given_with_transposes():
    x = some_checkpoint()
    target = {"a": (4, 3), "dense/bias": (4,), "norm/gamma": (4,), "norm/beta": (4,), "b": (2, 4)}
    y, report = match(
        x, target, names={"a": {"from": "dense/kernel:0", "transpose": True}, "b:0": {"from": "head/kernel", "transpose": [1, 0]}}
    )
    assert np.array_equal(y.first["a"], x.first["dense/kernel"].T) and np.array_equal(y.params["b"], x.params["head/kernel"].T)
    assert report.matched == "by names given" and y.first["a"].flags.c_contiguous


def test_by_position_only_on_the_callers_word():
    x = some_checkpoint()
    other = {f"w{i}": s for i, s in enumerate(SHAPES.values())}
    with pytest.raises(
        CheckpointError,
        match=r"the source has no w0, w1, w2, w3, w4 .*no place for the source's dense/kernel, .*--names FILE.*--by-position",
    ):
        match(x, other)
    y, report = match(x, other, by_position=True)
    assert report.pairs[2] == ("w2", "norm/gamma") and np.array_equal(y.first["w2"], x.first["norm/gamma"])
    assert "w2 <- norm/gamma" in report.text()
    for named, source in ((False, x), (True, some_checkpoint(named=False))):
        with pytest.raises(CheckpointError, match="have no names, only positions"):
            match(source, SHAPES, named=named)


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({"dense/bias": (5,)}, {}, r"dense/bias has shape \(5,\) in the target, but dense/bias has \(4,\) in the source"),
        ({"dense/bias": (5,)}, {"by_position": True}, r"dense/bias has shape \(5,\)"),
        ({"more": (1,)}, {"by_position": True}, r"the source has 5 tensors, the target 6"),
        ({}, {"by_position": True, "names": {}}, "choose one"),
        ({}, {"names": {"nowhere": "dense/bias"}}, "for tensors that the target has not: nowhere"),
        ({}, {"names": {"norm/beta": "nothing"}}, "the source has no nothing for the target's norm/beta; .*norm/beta"),
        ({}, {"names": {"norm/beta": "norm/gamma"}}, "no place for the source's norm/beta"),
        ({"more": (4,)}, {"names": {"more": "norm/beta"}}, "norm/beta cannot be the source of two"),
        ({}, {"names": {"norm/beta": 3}}, "norm/beta must be given the name of a tensor, not 3"),
        ({}, {"names": {"norm/beta": {"from": "norm/beta", "transposed": True}}}, "norm/beta must be given a name, or"),
        ({}, {"names": {"norm/beta": {"from": "norm/beta", "transpose": [1, 0]}}}, r"cannot be transposed by \[1, 0\]"),
        ({}, {"names": ["norm/beta"]}, "names must be an object"),
    ],
)
def test_what_does_not_match_is_said(change, options, message):
    with pytest.raises(CheckpointError, match=message):
        match(some_checkpoint(), {**SHAPES, **change}, **options)


def test_options_are_carried_or_named():
    source = dict(learning_rate=0.1, b1=0.9, eps=1e-7, weight_decay=0.01, trust_clip=True, variant="keras")
    target = dict(learning_rate=0.5, b1=float(np.float32(0.9)), eps=1e-6, weight_decay=0.0, max_grad_norm=1.0, variant="apex")
    changes, sentences = carry(source, target, ["learning_rate", "weight_decay", "max_grad_norm"])
    assert changes == {"learning_rate": 0.1}  # Keras decays elsewhere
    text = "\n".join(sentences)
    assert (
        "go on with variant='keras'" in text
        and "eps is 1e-07 in the source" in text
        and "weight_decay is 0.01" in text
        and "trust_clip=True" in text
    )
    assert "the source tells no max_grad_norm" in text and "b1" not in text
    assert carry({"variant": "tf_addons"}, {}, ())[1] == ["the source's formula is 'tf_addons': go on with variant='tf_addons'"]
    assert "'Adam', which is none of xla_lamb's variants" in carry({"variant": "Adam"}, target, ())[1][0]
    assert carry(dict(source, variant="timm"), target, ["learning_rate", "weight_decay"])[0] == {"learning_rate": 0.1, "weight_decay": 0.01}


# optax ------------------------------------------------------------------------------------------------------------------------

SCHEDULE = optax.linear_schedule(0.05, 0.01, 8)


@pytest.mark.parametrize("make", [optax.lamb, xla_lamb.lamb], ids=["optax", "xla_lamb"])
@pytest.mark.parametrize("rate", [RATE, SCHEDULE], ids=["number", "schedule"])
def test_an_orbax_checkpoint_is_restored_into_the_state_and_the_run_goes_on(tmp_path, make, rate):
    opt = make(rate, weight_decay=0.01)
    middle = optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS[:3])
    end = optax_steps(opt, *middle, GRADIENTS[3:])
    # Through another format and back.
    checkpoint = checkpoints.from_optax(middle[1], middle[0])
    checkpoints.write(checkpoint, tmp_path / "x.safetensors", "apex", by_position=True)
    like = save_orbax(tmp_path / "fresh", {"params": nested(START), "opt_state": opt.init(nested(START))}) if callable(rate) else None
    checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "run", "apex", "optax", like=like)
    params = jax.tree.map(jnp.zeros_like, nested(START))
    restored = load_orbax(tmp_path / "run", {"params": params, "opt_state": opt.init(params)})
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(middle[1])
    assert bits(restored) == bits({"params": middle[0], "opt_state": middle[1]})
    assert bits(optax_steps(opt, restored["params"], restored["opt_state"], GRADIENTS[3:])) == bits(end)
    # And the comparison notices a counter that was left behind.
    if callable(rate):
        late = restored["opt_state"][:-1] + (restored["opt_state"][-1]._replace(count=jnp.int32(0)),)
        assert bits(optax_steps(opt, restored["params"], late, GRADIENTS[3:])) != bits(end)


TRANSFORMATIONS = {
    "chain": optax.chain(optax.clip(10.0), optax.lamb(SCHEDULE, weight_decay=0.1)),
    "multi_steps": optax.MultiSteps(xla_lamb.lamb(RATE), 2),
    "inject": optax.inject_hyperparams(optax.lamb)(RATE, b1=0.8),
    "partition": optax.partition(
        {"a": optax.lamb(RATE, weight_decay=0.1), "b": xla_lamb.lamb(RATE)},
        {"dense": {"kernel": "a", "bias": "b"}, "norm": {"gamma": "b", "beta": "b"}, "head": {"kernel": "a"}},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_lamb_inside_other_transformations(tmp_path, name):
    opt = TRANSFORMATIONS[name]
    params, state = optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS[:4])
    checkpoint = checkpoints.from_optax(state, params)
    assert checkpoint.step == (2 if name == "multi_steps" else 4) and sorted(checkpoint.names) == sorted(SHAPES)
    fresh = nested(named_arrays(9))
    filled, new_params, report = checkpoints.to_optax(checkpoint, opt.init(fresh), fresh)
    if name == "multi_steps":
        state = state._replace(acc_grads=filled.acc_grads)  # zeros on both sides, some of them with a sign
    assert bits(new_params) == bits(params) and bits(filled) == bits(state)
    assert jax.tree.structure(filled) == jax.tree.structure(state) and bits(opt.init(fresh)) != bits(state)
    # As a file, TrainState and all; a fresh one says what the target is.
    train = TrainState.create(apply_fn=None, params=params, tx=opt).replace(opt_state=state, step=4)
    like = save_orbax(tmp_path / "like", TrainState.create(apply_fn=None, params=fresh, tx=opt))
    checkpoints.convert(save_orbax(tmp_path / "run", train), tmp_path / "new", "optax", "optax", like=like)
    loaded = load_orbax(tmp_path / "new", TrainState.create(apply_fn=None, params=fresh, tx=opt))
    assert bits((loaded.params, loaded.opt_state)) == bits((params, state)) and loaded.step == checkpoint.step
    if name == "inject":
        assert checkpoint.options["b1"] == pytest.approx(0.8)


def test_what_multi_steps_has_summed_up_is_named():
    opt = TRANSFORMATIONS["multi_steps"]
    params, state = optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS[:5])
    checkpoint = checkpoints.from_optax(state, params)
    assert checkpoint.step == 2 and "MultiSteps" in checkpoint.lost[0]
    filled, *_ = checkpoints.to_optax(checkpoint, state, params)
    assert int(filled.mini_step) == 0 and not any(np.any(x) for x in jax.tree.leaves(filled.acc_grads)) and int(state.mini_step) == 1


def test_flax_nnx_saves_variables_that_are_read(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.kernel, self.bias = nnx.Param(jnp.ones((3, 2))), nnx.Param(jnp.ones(2))

    model = Model()
    opt = nnx.Optimizer(model, optax.lamb(RATE), wrt=nnx.Param)
    state = jax.tree.map(lambda x: x + 1, nnx.state(opt))
    checkpoint = checkpoints.read(save_orbax(tmp_path / "run", state), "optax")
    assert checkpoint.step == 1 and sorted(checkpoint.names) == ["bias", "kernel"] and checkpoint.lost == []
    assert np.array_equal(checkpoint.first["kernel"], np.ones((3, 2)))
    like = save_orbax(tmp_path / "like", nnx.state(opt))
    checkpoints.convert(tmp_path / "run", tmp_path / "new", "optax", "optax", like=like)
    assert bits(load_orbax(tmp_path / "new", nnx.state(opt))) == bits(state)


def test_types_and_places_of_the_target_stay(x64):
    place = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones((2, 2), jnp.bfloat16), place), "d": jnp.ones(3, jnp.float64)}
    checkpoint = Checkpoint(3, {"w": np.full((2, 2), 1 / 3), "d": np.full(3, 1 / 3)}, {"w": np.ones((2, 2)), "d": np.ones(3)})
    state, same, report = checkpoints.to_optax(checkpoint, optax.lamb(RATE).init(params), params)
    assert (
        state[0].mu["w"].dtype == jnp.bfloat16
        and state[0].mu["w"].sharding == place
        and state[0].mu["d"].dtype == jnp.float64
        and float(state[0].mu["d"][0]) == 1 / 3
    )
    assert "the target stores moments of 1 tensors in bfloat16: they were rounded" in report.lost and same is not None
    assert "the source has no parameters: the target keeps its own" in report.lost


@pytest.mark.parametrize(
    "tree, message",
    [
        (
            {"params": {"w": np.ones(2)}, "opt_state": [{"count": np.int32(1), "mu": {"w": np.ones(2)}}]},
            "no LAMB state: no node with count, mu and nu",
        ),
        (
            [{"count": np.int32(1), "mu": {"w": np.ones(2)}, "nu": {"w": np.ones(3)}}],
            r"w: the first moment has shape \(2,\), its place in the second",
        ),
        ([{"count": np.int32(k), "mu": {str(k): np.ones(2)}, "nu": {str(k): np.ones(2)}} for k in (1, 2)], "different numbers of steps"),
        ([{"count": np.int32(1), "mu": {"w": np.ones(2)}, "nu": {"w": np.ones(2)}}] * 2, "two LAMB states with a tensor w"),
    ],
)
def test_orbax_checkpoints_without_one_lamb(tmp_path, tree, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read(save_orbax(tmp_path / "run", tree), "optax")


def test_a_directory_that_is_no_checkpoint_hints_at_those_inside(tmp_path):
    opt = optax.lamb(RATE)
    with ocp.CheckpointManager(tmp_path / "all") as manager:
        manager.save(7, args=ocp.args.StandardSave({"opt_state": opt.init({"w": jnp.ones(2)})}))
    with pytest.raises(CheckpointError, match=r"no Orbax checkpoint of a tree; inside it there are .*7"):
        checkpoints.read(tmp_path / "all", "optax")
    assert checkpoints.read(tmp_path / "all" / "7", "optax").names == ["w"]


# Keras ------------------------------------------------------------------------------------------------------------------------


def test_from_keras_to_optax_and_back_in_the_middle_of_a_run(tmp_path):
    whole = keras_values(keras_steps(keras_model(), GRADIENTS))
    opt = optax.lamb(RATE)
    whole_optax = flat(optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS)[0])
    assert_near(whole, whole_optax, TOLERANCE)  # one formula
    assert_near(whole, model64_end(), TOLERANCE)

    half = keras_steps(keras_model(), GRADIENTS[:3])
    half.save(tmp_path / "half.keras")
    checkpoints.convert(tmp_path / "half.keras", tmp_path / "run", "keras", "optax")
    params = nested(START)
    restored = load_orbax(tmp_path / "run", {"params": params, "opt_state": opt.init(params)})
    assert_near(flat(optax_steps(opt, restored["params"], restored["opt_state"], GRADIENTS[3:])[0]), whole_optax, TOLERANCE)

    middle = optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS[:3])
    save_orbax(tmp_path / "middle", {"params": middle[0], "opt_state": middle[1]})
    keras_model().save(tmp_path / "fresh.keras")
    report = checkpoints.convert(tmp_path / "middle", tmp_path / "new.keras", "optax", "keras", like=tmp_path / "fresh.keras")
    loaded = keras.saving.load_model(tmp_path / "new.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.Lamb) and int(loaded.optimizer.iterations) == 3
    assert bits([np.asarray(m.numpy()) for m in loaded.optimizer._momentums]) == bits(list(flat(middle[1][0].mu).values()))
    assert_near(keras_values(keras_steps(loaded, GRADIENTS[3:])), whole, TOLERANCE)
    assert report.lost == ["the source tells no learning_rate; the target has learning_rate=0.02"]
    # The comparison sees a lost moment. (The number of steps scales the whole update, and the trust ratio undoes that.)
    model = keras.saving.load_model(tmp_path / "new.keras")
    model.optimizer._momentums[0].assign(model.optimizer._momentums[0] * 0)
    with pytest.raises(AssertionError):
        assert_near(keras_values(keras_steps(model, GRADIENTS[3:])), whole, TOLERANCE)


@pytest.mark.parametrize("make", [xla_lamb.keras.Lamb, keras.optimizers.Lamb], ids=["xla_lamb", "keras"])
def test_in_memory_and_with_a_schedule(make):
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 3, 0.5)
    model = keras_steps(keras_model(make(schedule, weight_decay=0.01, epsilon=1e-6)), GRADIENTS[:3])
    checkpoint = checkpoints.from_keras(model.optimizer)
    assert (
        checkpoint.step == 3 and "ExponentialDecay(" in checkpoint.options["learning_rate"] and checkpoint.options["weight_decay"] == 0.01
    )
    other = keras_model(make(schedule, weight_decay=0.01, epsilon=1e-6), prefix="other_")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(CheckpointError, match="other_dense/kernel"):
        checkpoints.to_keras(checkpoint, other.optimizer)
    report = checkpoints.to_keras(checkpoint, other.optimizer, by_position=True)
    assert report.lost == []
    assert bits(keras_values(keras_steps(other, GRADIENTS[3:6]))) == bits(keras_values(keras_steps(model, GRADIENTS[3:6])))


def test_averages_and_sums_of_gradients(tmp_path):
    settings = dict(use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2)
    model = keras_steps(keras_model(keras.optimizers.Lamb(RATE, **settings)), GRADIENTS[:5])
    model.save(tmp_path / "run.keras")
    checkpoint = checkpoints.read(tmp_path / "run.keras", "keras")
    assert checkpoint.step == 2
    text = "\n".join(checkpoint.lost)
    assert "moving averages" in text and "gradients of 1 batches" in text
    report = checkpoints.write(some_checkpoint(), tmp_path / "new.keras", "keras", like=tmp_path / "run.keras")
    loaded = keras.saving.load_model(tmp_path / "new.keras").optimizer
    assert int(loaded._iterations) == 14 and int(loaded.iterations) == 7
    assert bits([v.numpy() for v in loaded._model_variables_moving_average]) == bits(list(some_checkpoint().params.values()))
    assert not any(np.any(v.numpy()) for v in loaded._accumulated_gradients)
    assert any("start anew" in sentence for sentence in report.lost)
    model.save_weights(tmp_path / "run.weights.h5")
    with pytest.raises(CheckpointError, match="does not say how many batches make a step.*--source-like"):
        checkpoints.read(tmp_path / "run.weights.h5", "keras")
    assert_same(checkpoints.read(tmp_path / "run.weights.h5", "keras", like=tmp_path / "run.keras"), checkpoint)


def test_weights_alone_have_positions(tmp_path):
    model = keras_steps(keras_model(), GRADIENTS[:3])
    model.save_weights(tmp_path / "run.weights.h5")
    keras_model().save(tmp_path / "fresh.keras")
    bare = checkpoints.read(tmp_path / "run.weights.h5", "keras")
    assert not bare.named and bare.names == list("01234") and bare.step == 3 and bare.params is None
    assert bits(list(bare.second.values())) == bits([v.numpy() for v in model.optimizer._velocities])
    full = checkpoints.read(tmp_path / "run.weights.h5", "keras", like=tmp_path / "fresh.keras")
    assert bits(list(full.params.values())) == bits(list(keras_values(model).values()))
    assert [n[-len(s) :] for n, s in zip(full.names, SHAPES)] == list(SHAPES)
    # As target: only its numbers are replaced, and Keras loads it.
    with pytest.raises(CheckpointError, match="only positions"):
        checkpoints.write(some_checkpoint(), tmp_path / "new.weights.h5", "keras", like=tmp_path / "run.weights.h5")
    report = checkpoints.write(some_checkpoint(), tmp_path / "new.weights.h5", "keras", like=tmp_path / "run.weights.h5", by_position=True)
    assert any("parameters are not written" in sentence for sentence in report.lost)
    loaded = keras_model()
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "new.weights.h5")
    assert int(loaded.optimizer.iterations) == 7 and bits(keras_values(loaded)) == bits(keras_values(model))
    assert bits([v.numpy() for v in loaded.optimizer._momentums]) == bits(list(some_checkpoint().first.values()))


def test_weights_that_can_be_read_in_two_ways_are_refused(tmp_path):
    with h5py.File(tmp_path / "x.weights.h5", "w") as file:  # pairs of six tensors, or pairs of four with averages
        group = file.create_group("optimizer/vars")
        group["0"], group["1"] = np.int64(3), np.float32(0.1)
        for i in range(2, 14):
            group[str(i)] = np.ones(5, np.float32)
    with pytest.raises(CheckpointError, match="can be read in 3 ways"):
        checkpoints.read(tmp_path / "x.weights.h5", "keras")


def test_mixed_float16_with_a_loss_scale_keeps_its_state_in_another_process(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras_model()
        model.save(tmp_path / "fresh.keras")
        model.optimizer.build(model.trainable_variables)
        checkpoints.to_keras(some_checkpoint(), model.optimizer)
        model.optimizer.dynamic_scale.assign(8.0)
        model.save(tmp_path / "run.keras")
        model.save_weights(tmp_path / "run.weights.h5")
    finally:
        keras.config.set_dtype_policy("float32")
    # Under this policy Keras itself leaves the state behind, with a warning.
    for checkpoint in (
        checkpoints.read(tmp_path / "run.keras", "keras"),
        checkpoints.read(tmp_path / "run.weights.h5", "keras", like=tmp_path / "fresh.keras"),
    ):
        assert_same(match(checkpoint, SHAPES)[0], some_checkpoint())
        assert any("loss scale" in sentence for sentence in checkpoint.lost)
    for like in ("fresh", "run"):
        checkpoints.write(some_checkpoint(step=9), tmp_path / f"{like}-new.keras", "keras", like=tmp_path / f"{like}.keras")
        keras.config.set_dtype_policy("mixed_float16")
        try:
            optimizer = keras.saving.load_model(tmp_path / f"{like}-new.keras").optimizer
        finally:
            keras.config.set_dtype_policy("float32")
        assert int(optimizer.inner_optimizer.iterations) == 9 and float(optimizer.dynamic_scale) == (8.0 if like == "run" else 2.0**15)
        assert bits([v.numpy() for v in optimizer.inner_optimizer._velocities]) == bits(list(some_checkpoint().second.values()))
    # The other way round: a model without a loss scale, in a process that would give it one.
    keras_model().save(tmp_path / "plain.keras")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        checkpoints.write(some_checkpoint(step=9), tmp_path / "plain-new.keras", "keras", like=tmp_path / "plain.keras")
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = keras.saving.load_model(tmp_path / "plain-new.keras").optimizer
    assert int(optimizer.iterations) == 9 and bits(optimizer._momentums[1].numpy()) == bits(some_checkpoint().first["dense/bias"])
    # By position the copies of both optimizers are replaced.
    checkpoints.write(some_checkpoint(step=9), tmp_path / "new.weights.h5", "keras", like=tmp_path / "run.weights.h5", by_position=True)
    with h5py.File(tmp_path / "new.weights.h5") as file:
        inner, outer = file["optimizer/inner_optimizer/vars"], file["optimizer/vars"]
        assert int(inner["0"][()]) == int(outer["4"][()]) == 9 and float(outer["3"][()]) == 8.0
        for i in range(len(inner)):
            assert bits(inner[str(i)][()]) == bits(outer[str(i + 4)][()])


def test_sixteen_bit_moments_are_wide_in_between(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, dtype="bfloat16", name="dense")])
    model.compile(keras.optimizers.Lamb(RATE))
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "like.keras")
    model.save_weights(tmp_path / "like.weights.h5")
    x = some_checkpoint()
    part = Checkpoint(7, *({n: moments[n] for n in ("dense/kernel", "dense/bias")} for moments in (x.first, x.second)))
    for like, by_position in (("like.keras", False), ("like.weights.h5", True)):
        name = "new-" + like
        report = checkpoints.write(part, tmp_path / name, "keras", like=tmp_path / like, by_position=by_position)
        assert any("in bfloat16: they were rounded" in sentence for sentence in report.lost)
        back = checkpoints.read(tmp_path / name, "keras")
        for ours, expected in zip(back.first.values(), part.first.values()):
            assert ours.dtype == np.float32 and np.array_equal(ours, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


@keras.saving.register_keras_serializable(package="test_checkpoints")
class Doubled(keras.layers.Layer):
    def call(self, x):
        return x * 2.0


def test_keras_files_that_cannot_serve(tmp_path):
    model = keras_model()
    model.save(tmp_path / "fresh.keras")
    with pytest.raises(CheckpointError, match="no LAMB state of this model: its optimizer has saved 2 variables, and has 12"):
        checkpoints.read(tmp_path / "fresh.keras", "keras")
    keras_steps(keras_model(keras.optimizers.SGD(0.1)), GRADIENTS[:1]).save(tmp_path / "sgd.keras")
    with pytest.raises(CheckpointError, match="a SGD, keeps no moments"):
        checkpoints.read(tmp_path / "sgd.keras", "keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(tmp_path / "bare.keras")
    with pytest.raises(CheckpointError, match="was not compiled with an optimizer"):
        checkpoints.read(tmp_path / "bare.keras", "keras")
    with pytest.raises(CheckpointError, match=r"not built: call optimizer.build"):
        checkpoints.from_keras(keras.optimizers.Lamb())
    custom = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(1)])
    custom.compile(keras.optimizers.Lamb())
    custom.optimizer.build(custom.trainable_variables)
    custom.save(tmp_path / "custom.keras")
    assert checkpoints.read(tmp_path / "custom.keras", "keras").step == 0
    registered = keras.saving.get_custom_objects()
    kept = registered.pop("test_checkpoints>Doubled")
    try:
        with pytest.raises(CheckpointError, match="Could not locate class 'Doubled'.*use xla_lamb.checkpoints.from_keras"):
            checkpoints.read(tmp_path / "custom.keras", "keras")
    finally:
        registered["test_checkpoints>Doubled"] = kept
    model.save_weights(tmp_path / "fresh.weights.h5")
    with pytest.raises(CheckpointError, match="no LAMB state"):
        checkpoints.read(tmp_path / "fresh.weights.h5", "keras")
    with pytest.raises(CheckpointError, match="needs --like"):
        checkpoints.write(some_checkpoint(), tmp_path / "new.keras", "keras")
    with pytest.raises(CheckpointError, match="ends in .keras or .weights.h5, and new.h5 does not"):
        checkpoints.write(some_checkpoint(), tmp_path / "new.h5", "keras", like=tmp_path / "fresh.keras")
    assert not list(tmp_path.glob("*new*"))


def test_variables_that_no_optimizer_steps_are_named(tmp_path):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization(name="batch"), keras.layers.Dropout(0.5)]
    )
    model.compile(keras.optimizers.Lamb(RATE), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "run.keras")
    lost = checkpoints.read(tmp_path / "run.keras", "keras").lost
    assert len(lost) == 1 and "batch/moving_mean" in lost[0] and "seed" not in lost[0]


# TensorFlow Addons and TF Models -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED / "run.npz") as file:
        return {name: file[name] for name in file.files}


def tiny_model(optimizer):
    """The recorded model in Keras 3."""
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(12, 4, name="embedding"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(5, activation="tanh", name="dense"),
            keras.layers.Dense(2, name="head"),
        ],
        name="tiny",
    )
    model.compile(optimizer, loss="mse")
    return model


@pytest.mark.parametrize("file", ["run.ckpt", "run.h5"])
def test_recorded_checkpoints_are_read_bit_for_bit(recorded, file):
    checkpoint = checkpoints.read(RECORDED / file, "tf_addons")
    names = [n.removeprefix("middle/p/").removesuffix(":0") for n in recorded if n.startswith("middle/p/")]
    assert checkpoint.names == names and checkpoint.step == 5 and checkpoint.lost == []
    for slot, arrays in (("p", checkpoint.params), ("m", checkpoint.first), ("v", checkpoint.second)):
        assert all(bits(arrays[n]) == bits(recorded[f"middle/{slot}/{n}:0"]) for n in names), slot
    options = checkpoint.options
    assert (
        options["learning_rate"] == pytest.approx(RATE)
        and options["weight_decay"] == pytest.approx(0.1)
        and options["variant"] == "tf_addons"
    )
    assert options.get("exclude_from_weight_decay") == (None if file == "run.ckpt" else ["norm", "bias"])


def test_a_run_of_tensorflow_addons_goes_on_in_keras_3(tmp_path, recorded):
    optimizer = xla_lamb.keras.LAMB(
        0.5, weight_decay=0.1, exclude_from_weight_decay=["norm", "bias"], exclude_from_layer_adaptation=["bias"]
    )
    tiny_model(optimizer).save(tmp_path / "fresh.keras")
    report = checkpoints.convert(RECORDED / "run.ckpt", tmp_path / "run.keras", "tf_addons", "keras", like=tmp_path / "fresh.keras")
    model = keras.saving.load_model(tmp_path / "run.keras")
    assert float(model.optimizer.learning_rate) == np.float32(RATE)  # carried: it is a variable on both sides
    assert not any("learning_rate" in sentence for sentence in report.lost)
    for x, y in zip(recorded["x"][5:], recorded["y"][5:]):
        model.train_on_batch(x, y)
    names = [n.removeprefix("end/p/") for n in recorded if n.startswith("end/p/")]
    ours = [v.numpy() for v in model.trainable_variables]
    assert_near(ours, [recorded["end/p/" + n] for n in names], TOLERANCE)
    assert_near([v.numpy() for v in model.optimizer._velocities], [recorded["end/v/" + n] for n in names], TOLERANCE)
    with pytest.raises(AssertionError):
        assert_near(ours, [recorded["middle/p/" + n] for n in names], TOLERANCE)


def test_from_optax_into_slots_and_the_run_goes_on(tmp_path):
    opt = optax.lamb(RATE)
    params, state = optax_steps(opt, nested(START), opt.init(nested(START)), GRADIENTS[:3])
    save_orbax(tmp_path / "half", {"params": params, "opt_state": state})
    like = old_steps(old_model(xla_lamb.tf_keras.LAMB(RATE)), GRADIENTS[:1])
    tf.train.Checkpoint(model=like, optimizer=like.optimizer, epoch=tf.Variable(3)).write(str(tmp_path / "like"))
    like.save(tmp_path / "like.h5")

    checkpoints.convert(tmp_path / "half", tmp_path / "run", "optax", "tf_addons", like=tmp_path / "like")
    model = old_model(xla_lamb.tf_keras.LAMB(RATE))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(tmp_path / "run")).expect_partial()
    expected = model64_end()
    assert_near([v.numpy() for v in old_steps(model, GRADIENTS[3:]).trainable_variables], list(expected.values()), TOLERANCE)

    checkpoints.convert(tmp_path / "half", tmp_path / "run.h5", "optax", "tf_addons", like=tmp_path / "like.h5")
    model = tf_keras.models.load_model(tmp_path / "run.h5")
    assert int(model.optimizer.iterations) == 3
    assert_near([v.numpy() for v in old_steps(model, GRADIENTS[3:]).trainable_variables], list(expected.values()), TOLERANCE)

    model = old_model(xla_lamb.tf_keras.LAMB(0.5))  # in memory, and with the learning rate of the source
    checkpoint = checkpoints.from_optax(state, params)
    checkpoint.options["learning_rate"] = RATE
    checkpoints.to_tf_addons(checkpoint, model.optimizer, model.trainable_variables)
    assert_same(checkpoints.from_tf_addons(model.optimizer, model.trainable_variables), match(checkpoint, SHAPES)[0])
    assert_near([v.numpy() for v in old_steps(model, GRADIENTS[3:]).trainable_variables], list(expected.values()), TOLERANCE)
    # Without the moments it is another run.
    wrong = old_model(xla_lamb.tf_keras.LAMB(RATE))
    for v, x in zip(wrong.trainable_variables, flat(params).values()):
        v.assign(x)
    with pytest.raises(AssertionError):
        assert_near([v.numpy() for v in old_steps(wrong, GRADIENTS[3:]).trainable_variables], list(expected.values()), TOLERANCE)


def test_hyper_parameters_of_a_tensorflow_checkpoint(tmp_path):
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(RATE, 3, 0.5)
    for name, rate in (("number", RATE), ("schedule", schedule)):
        model = old_steps(old_model(xla_lamb.tf_keras.LAMB(rate, weight_decay=0.1)), GRADIENTS[:1])
        tf.train.Checkpoint(model=model, optimizer=model.optimizer, extra=tf.Variable(1.0)).write(str(tmp_path / name))
    checkpoint = checkpoints.read(tmp_path / "schedule", "tf_addons")
    assert checkpoint.options["learning_rate"] == "a schedule" and "extra" in checkpoint.lost[0]
    report = checkpoints.write(
        some_checkpoint(options={"learning_rate": 0.25, "b1": 0.5}), tmp_path / "new", "tf_addons", like=tmp_path / "number"
    )
    back = checkpoints.read(tmp_path / "new", "tf_addons")
    assert back.options["learning_rate"] == 0.25 and back.options["b1"] == 0.5 and back.options["weight_decay"] == pytest.approx(0.1)
    assert any("the source tells no b2, weight_decay" in s or "the source tells no weight_decay, b2" in s for s in report.lost)
    report = checkpoints.write(
        some_checkpoint(options={"learning_rate": 0.25}), tmp_path / "other", "tf_addons", like=tmp_path / "schedule"
    )
    assert any("learning_rate is 0.25 in the source; the target keeps a schedule" in sentence for sentence in report.lost)


def test_a_loss_scale_around_the_slots(tmp_path):
    model = old_model(tf_keras.mixed_precision.LossScaleOptimizer(xla_lamb.tf_keras.LAMB(RATE)))
    model.train_on_batch(np.ones((2, 3), np.float32), np.ones((2, 2), np.float32))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "run"))
    checkpoint = checkpoints.read(tmp_path / "run", "tf_addons")
    assert checkpoint.names == list(SHAPES) and checkpoint.step == 1 and any("loss_scale" in sentence for sentence in checkpoint.lost)


def test_tensorflow_checkpoints_that_cannot_serve(tmp_path):
    model = old_model(tf_keras.optimizers.legacy.SGD(0.1))
    old_steps(model, GRADIENTS[:1])
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "d"))
    model.save(tmp_path / "d.h5")
    for name in ("d", "d.h5"):
        with pytest.raises(CheckpointError, match="no LAMB state"):
            checkpoints.read(tmp_path / name, "tf_addons")
    with pytest.raises(CheckpointError, match=r"no prefix of a TensorFlow checkpoint.*inside it there are .*d"):
        checkpoints.read(tmp_path, "tf_addons")
    with pytest.raises(CheckpointError, match="needs --like"):
        checkpoints.write(some_checkpoint(), tmp_path / "new", "tf_addons")
    with pytest.raises(CheckpointError, match="must both be prefixes"):
        checkpoints.write(some_checkpoint(), tmp_path / "new", "tf_addons", like=RECORDED / "run.h5")
    with pytest.raises(CheckpointError, match=r"do not match by name: the source has no embedding/embeddings"):
        checkpoints.write(some_checkpoint(), tmp_path / "new", "tf_addons", like=RECORDED / "run.ckpt")
    with pytest.raises(CheckpointError, match="has no slot m"):
        checkpoints.from_tf_addons(model.optimizer, model.trainable_variables)
    assert not list(tmp_path.glob("*new*"))


# PyTorch -----------------------------------------------------------------------------------------------------------------------

GROUP = dict(lr=RATE, bias_correction=True, betas=[0.9, 0.999], eps=1e-6, weight_decay=0.0, grad_averaging=True, max_grad_norm=1.0, step=5)


def torch_state(step_in_group=True, groups=None, names=True):
    """The .safetensors file of the docstring, written without this package: tensors and metadata."""
    x = some_checkpoint(5)
    tensors = {}
    for i, name in enumerate(x.names):
        tensors[f"state.{i}.exp_avg"], tensors[f"state.{i}.exp_avg_sq"] = x.first[name], x.second[name]
        tensors[f"param.{i}"] = x.params[name]
        if not step_in_group:
            tensors[f"state.{i}.step"] = np.asarray(5, np.float32)
    groups = groups or [dict(GROUP, params=[0, 1, 2, 3, 4])]
    if not step_in_group:
        groups = [{k: v for k, v in g.items() if k != "step"} for g in groups]
    metadata = {"param_groups": json.dumps(groups)}
    if names:
        metadata["names"] = json.dumps(x.names)
    return tensors, metadata


@pytest.mark.parametrize("step_in_group", [True, False], ids=["apex and timm", "other"])
def test_safetensors_of_pytorch(tmp_path, step_in_group):
    tensors, metadata = torch_state(step_in_group)
    safetensors.numpy.save_file(tensors, tmp_path / "run.safetensors", metadata)
    checkpoint = checkpoints.read(tmp_path / "run.safetensors", "apex")
    assert_same(checkpoint, some_checkpoint(5))
    assert (
        checkpoint.options["learning_rate"] == RATE
        and checkpoint.options["max_grad_norm"] == 1.0
        and checkpoint.options["variant"] == "apex"
    )
    # Into a target with two groups: its groups stay, and learning rates are the source's.
    groups = [dict(GROUP, lr=0.5, weight_decay=0.1, params=[0, 4]), dict(GROUP, lr=0.5, params=[1, 2, 3])]
    tensors, metadata = torch_state(step_in_group, groups, names=False)
    order = [0, 4, 1, 2, 3]
    metadata["names"] = json.dumps([checkpoint.names[i] for i in order])  # in the order of the groups; the tensors keep their numbers
    safetensors.numpy.save_file(tensors, tmp_path / "like.safetensors", metadata)
    report = checkpoints.write(
        some_checkpoint(11, options={"learning_rate": 0.25}), tmp_path / "new.safetensors", "apex", like=tmp_path / "like.safetensors"
    )
    raw = safetensors.numpy.load_file(tmp_path / "new.safetensors")
    for i, name in zip(order, (checkpoint.names[i] for i in order)):
        assert bits(raw[f"state.{i}.exp_avg_sq"]) == bits(some_checkpoint().second[name]) and bits(raw[f"param.{i}"]) == bits(
            some_checkpoint().params[name]
        )
        assert ("step" in "".join(raw)) != step_in_group and (step_in_group or raw[f"state.{i}.step"] == 11)
    with safetensors.safe_open(tmp_path / "new.safetensors", "np") as file:
        new = json.loads(file.metadata()["param_groups"])
    assert [(g["lr"], g["weight_decay"], g["params"]) for g in new] == [(0.25, 0.1, [0, 4]), (0.25, 0.0, [1, 2, 3])]
    assert [g.get("step") for g in new] == ([11, 11] if step_in_group else [None, None])
    assert any("the source tells no" in s and "max_grad_norm" in s for s in report.lost)


def test_groups_that_differ_and_settings_are_named(tmp_path):
    groups = [
        dict(GROUP, params=[0, 1], bias_correction=False, trust_clip=True, always_adapt=False),
        dict(GROUP, params=[2, 3, 4], weight_decay=0.01),
    ]
    tensors, metadata = torch_state(groups=groups)
    safetensors.numpy.save_file(tensors, tmp_path / "run.safetensors", metadata)
    checkpoint = checkpoints.read(tmp_path / "run.safetensors", "apex")
    assert checkpoint.options["weight_decay"] == "0 or 0.01, by parameter group" and checkpoint.options["variant"] == "timm"
    report = checkpoints.convert(tmp_path / "run.safetensors", tmp_path / "run", "apex", "optax")
    told = "\n".join(report.lost)
    for option in ("learning_rate=0.02", "weight_decay=0 or 0.01", "bias_correction=False or True", "trust_clip=True", "max_grad_norm=1"):
        assert option in told, told


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, m: m.pop("param_groups"), "its metadata has no param_groups"),
        (
            lambda t, m: m.update(param_groups=json.dumps([dict(GROUP, params=[0, 1]), dict(GROUP, step=6, params=[2, 3, 4])])),
            "different numbers of steps: 5, 6",
        ),
        (lambda t, m: m.update(param_groups=json.dumps([dict(GROUP, step=None, params=[0, 1, 2, 3, 4])])), "does not say how many steps"),
        (lambda t, m: [t.pop(k) for k in list(t) if k.startswith("state")], "no LAMB state: the optimizer has taken no step"),
        (lambda t, m: t.update({"state.2.momentum_buffer": t.pop("state.2.exp_avg")}), "parameter norm/gamma has .*momentum_buffer"),
        (lambda t, m: m.update(names=json.dumps(["a"])), "1 names for 5 parameters"),
        (lambda t, m: m.update(names=json.dumps(["a"] * 5)), "two parameters have the same name"),
        (lambda t, m: m.update(param_groups="{"), "cannot read .* as apex"),
    ],
)
def test_safetensors_that_cannot_serve(tmp_path, change, message):
    tensors, metadata = torch_state()
    change(tensors, metadata)
    safetensors.numpy.save_file(tensors or {"x": np.ones(1)}, tmp_path / "run.safetensors", metadata)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read(tmp_path / "run.safetensors", "apex")


def test_bfloat16_of_pytorch_and_parameters_without_a_gradient(tmp_path):
    tensors, metadata = torch_state()
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items() if not k.startswith("state.3.")}
    safetensors.numpy.save_file(tensors, tmp_path / "run.safetensors", metadata)
    checkpoint = checkpoints.read(tmp_path / "run.safetensors", "apex")
    assert checkpoint.names == [n for n in SHAPES if n != "norm/beta"] and "norm/beta" in checkpoint.lost[0]
    assert checkpoint.first["dense/bias"].dtype == np.float32 and checkpoint.params["dense/bias"].dtype.name == "bfloat16"
    assert np.array_equal(checkpoint.first["dense/bias"], tensors["state.1.exp_avg"].astype(np.float32))
    report = checkpoints.convert(
        tmp_path / "run.safetensors", tmp_path / "new.safetensors", "apex", "apex", like=tmp_path / "run.safetensors"
    )
    assert safetensors.numpy.load_file(tmp_path / "new.safetensors")["state.1.exp_avg"].dtype.name == "bfloat16"
    assert not any("rounded" in sentence for sentence in report.lost)


class Tensor:
    """What the converter uses of a torch.Tensor."""

    def __init__(self, array):
        self.array = np.asarray(array)

    dtype = property(lambda self: f"torch.{self.array.dtype.name}")
    detach = cpu = lambda self: self
    float = lambda self: Tensor(self.array.astype(np.float32))
    numpy = lambda self: self.array

    def to(self, dtype):
        return Tensor(self.array.astype(dtype))

    def copy_(self, other):
        self.array = other.array.astype(self.array.dtype)


@pytest.fixture
def torch(monkeypatch):
    """A stand-in: the tests' environment has no PyTorch. It shows which calls are made and what they are given, not that PyTorch is happy
    with it; that was seen by hand, with torch 2.13, timm 1.0.31's Lamb and torch.optim.Adam."""
    files = {}
    module = types.ModuleType("torch")
    module.bfloat16 = ml_dtypes.bfloat16
    module.from_numpy = Tensor

    def save(value, path):
        Path(path).write_text("torch")
        files[Path(path).name] = value

    def load(path, map_location, weights_only):
        assert (map_location, weights_only) == ("cpu", True)
        return files[Path(path).name]

    module.save, module.load = save, load
    module.no_grad = __import__("contextlib").nullcontext
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


class Optimizer:
    """Keeps its state as torch.optim.Optimizer does."""

    def __init__(self, params, **settings):
        self.state, self.param_groups = {}, [dict(GROUP, **settings, params=params)]
        self.param_groups[0].pop("step")

    def state_dict(self):
        group = dict(self.param_groups[0], params=list(range(len(self.param_groups[0]["params"]))))
        return {"state": dict(enumerate(self.state.values())), "param_groups": [group]}

    def load_state_dict(self, state):
        params = self.param_groups[0]["params"]
        self.state = {id(p): state["state"][i] for i, p in enumerate(params)}
        self.param_groups = [dict(state["param_groups"][0], params=params)]


def test_pt_files_with_torch(tmp_path, torch):
    x = some_checkpoint()
    torch_slots = {i: {"exp_avg": Tensor(x.first[n]), "exp_avg_sq": Tensor(x.second[n])} for i, n in enumerate(x.names)}
    state = {
        "state": torch_slots,
        "param_groups": [dict(GROUP, step=Tensor(np.int32(7)), lr=Tensor(np.float32(0.5)), params=list(range(5)))],
    }
    torch.save(state, tmp_path / "run.pt")
    bare = checkpoints.read(tmp_path / "run.pt", "apex")
    assert not bare.named and bare.params is None and bare.step == 7 and bare.options["learning_rate"] == 0.5
    assert bits(list(bare.first.values())) == bits(list(x.first.values()))
    # Beside a model's weights, with the names that newer optimizers keep.
    state["param_groups"][0]["param_names"] = x.names
    torch.save({"model": {n: Tensor(v) for n, v in x.params.items()}, "optimizer": state, "epoch": 3}, tmp_path / "all.pth")
    assert_same(checkpoints.read(tmp_path / "all.pth", "apex"), x)
    report = checkpoints.convert(tmp_path / "all.pth", tmp_path / "new.pt", "apex", "apex", like=tmp_path / "run.pt", by_position=True)
    assert any("the optimizer's state_dict alone" in sentence for sentence in report.lost)
    written = torch.load(tmp_path / "new.pt", map_location="cpu", weights_only=True)
    assert set(written) == {"state", "param_groups"} and written["param_groups"][0]["step"] == 7
    assert bits(written["state"][4]["exp_avg_sq"].array) == bits(x.second["head/kernel"])
    torch.save({"a": state, "b": dict(state)}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match="holds 2 states of optimizers"):
        checkpoints.read(tmp_path / "two.pt", "apex")


def test_an_optimizer_of_pytorch_in_memory(torch):
    x = some_checkpoint(options={"learning_rate": 0.25})
    params = [Tensor(v * 0) for v in x.params.values()]
    optimizer = Optimizer(params, lr=0.5)
    with pytest.raises(CheckpointError, match="taken no step"):
        checkpoints.from_apex(optimizer)
    with pytest.raises(CheckpointError, match="only positions"):
        checkpoints.to_apex(x, optimizer)
    checkpoints.to_apex(x, optimizer, zip(x.names, params))
    assert (
        optimizer.param_groups[0]["step"] == 7 and optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["params"] is params
    )
    assert_same(checkpoints.from_apex(optimizer, zip(x.names, params)), x)
    with pytest.raises(CheckpointError, match="parameters 0, 1, 2, 3, 4 of the optimizer are not among the named"):
        checkpoints.from_apex(optimizer, [])
    # torch.optim counts beside the moments.
    other = Optimizer(params)
    del other.param_groups[0]["bias_correction"]
    checkpoints.to_apex(x, other, by_position=True)
    assert "step" not in other.param_groups[0] and {float(slots["step"].numpy()) for slots in other.state.values()} == {7.0}
    fresh = Optimizer([Tensor(np.zeros(9)) for _ in params])
    with pytest.raises(CheckpointError, match=r"0 has shape \(9,\) in the target"):
        checkpoints.to_apex(x, fresh, by_position=True)
    assert fresh.state == {}


def test_a_pt_file_without_torch_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "run.pt").write_bytes(b"x")
    with pytest.raises(ImportError, match="needs PyTorch, which is not installed here: install it, or write a .safetensors file"):
        checkpoints.read(tmp_path / "run.pt", "apex")
    with pytest.raises(ImportError, match="needs PyTorch"):
        checkpoints.write(some_checkpoint(), tmp_path / "new.pt", "apex", by_position=True)
    with pytest.raises(CheckpointError, match="is a .safetensors, .pt or .pth file, and new.npz is none"):
        checkpoints.write(some_checkpoint(), tmp_path / "new.npz", "apex", by_position=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(
        ImportError, match="cannot write .*x.safetensors as apex: it takes the package safetensors.numpy, which is not installed here"
    ):
        checkpoints.write(some_checkpoint(), tmp_path / "x.safetensors", "apex", by_position=True)
    code = "import sys; sys.modules['jax'] = None; from xla_lamb.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = helpers.python(code, *"convert --from optax --to apex a b.pt".split(), check=False)
    assert (
        done.returncode == 2
        and done.stderr == "xla_lamb convert: cannot use format optax: it takes the package jax, which is not installed here\n"
    )
    with pytest.raises(CheckpointError, match="unknown format 'torch'; there are optax, keras, tf_addons, apex"):
        checkpoints.read(tmp_path, "torch")


def test_pairs_of_parameters_whose_kernels_are_turned(tmp_path):
    """As between torch.nn.Linear, [out, in], and Keras, [in, out]."""
    x = some_checkpoint()
    turn = lambda arrays: {n: np.ascontiguousarray(v.T) for n, v in arrays.items()}
    turned = Checkpoint(7, turn(x.first), turn(x.second), turn(x.params))
    checkpoints.write(turned, tmp_path / "x.safetensors", "apex", by_position=True)
    keras_model().save(tmp_path / "like.keras")
    names = {n: {"from": n, "transpose": True} for n in SHAPES}
    paths = checkpoints.from_keras(keras.saving.load_model(tmp_path / "like.keras").optimizer).names
    names = {path: names[n] for path, n in zip(paths, SHAPES)}
    checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "new.keras", "apex", "keras", like=tmp_path / "like.keras", names=names)
    assert_same(match(checkpoints.read(tmp_path / "new.keras", "keras"), SHAPES)[0], x)


def test_a_zip_that_is_no_model(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        archive.writestr("hello", "")
    with pytest.raises(CheckpointError, match="cannot read .*x.keras as keras"):
        checkpoints.read(tmp_path / "x.keras", "keras")
