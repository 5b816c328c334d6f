"""Wrappers in configurations and in files: a run that is stopped, saved, loaded and continued equals the one that was not, bit by bit.

Runs on both of Keras's backends; what is TensorFlow's own has tensorflow in its name."""

import warnings

import conftest  # noqa: F401  (settings of the environment, before Keras is imported)
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import helpers
import xla_lamb.keras
from xla_lamb import minimize

BACKEND = keras.backend.backend()
Lamb, SGD, Adam = xla_lamb.keras.Lamb, keras.optimizers.SGD, keras.optimizers.Adam


@keras.saving.register_keras_serializable(package="tests")
def doubled(x):
    return x * 2


@keras.saving.register_keras_serializable(package="tests")
def halved(grads_and_vars):
    return [(g / 2, v) for g, v in grads_and_vars]


@keras.saving.register_keras_serializable(package="tests")
def kernels(variable, iterations):
    return len(variable.shape) > 1


NESTS = {
    "wrapper": lambda: minimize.OptimizerWrapper(Lamb(0.1), name="named"),
    "functions": lambda: minimize.OptimizerWrapper(
        Adam(0.1), transform_loss=doubled, transform_unaggregated_gradients=[halved], aggregate_gradients="mean", transform_gradients=[halved, halved]
    ),
    "own aggregation": lambda: minimize.OptimizerWrapper(SGD(0.1), aggregate_gradients=halved),
    "loss scaling": lambda: minimize.LossScaling(Lamb(0.1), 64.0, 2),
    "static loss scaling": lambda: minimize.LossScaling(Adam(0.1), 64.0, dynamic=False),
    "global norm": lambda: minimize.ClipByGlobalNorm(Lamb(0.1), 0.5),
    "norm": lambda: minimize.ClipByNorm(Lamb(0.1), 0.5, transform_gradients=halved),
    "value": lambda: minimize.ClipByValue(Lamb(0.1), 0.5),
    "accumulation": lambda: minimize.GradientAccumulation(Lamb(0.1), 2),
    "decay": lambda: minimize.DecoupledWeightDecay(SGD(0.1), 0.01, ["kernel"]),
    "decay, functions": lambda: minimize.DecoupledWeightDecay(SGD(0.1), keras.optimizers.schedules.PolynomialDecay(0.1, 5), kernels),
    "moving average": lambda: minimize.MovingAverage(Lamb(0.1), 0.5),
    "stochastic weight averaging": lambda: minimize.StochasticWeightAveraging(Adam(0.1), 1, 2),
    "lookahead": lambda: minimize.Lookahead(Lamb(keras.optimizers.schedules.PolynomialDecay(0.1, 9)), 2, 0.5),
    "many": lambda: minimize.LossScaling(
        minimize.GradientAccumulation(
            minimize.ClipByGlobalNorm(minimize.Lookahead(minimize.MovingAverage(Lamb(0.1, exclude_from_weight_decay=["bias"], weight_decay=0.1), 0.5), 2), 0.5), 2
        ),
        64.0,
        2,
    ),
}
STATEFUL = ["loss scaling", "accumulation", "moving average", "stochastic weight averaging", "lookahead", "many"]
SHAPES = [(3, 3), (3,), (3, 2), (2,)]  # of the variables of model_of
GRADIENTS = helpers.gradients(7, SHAPES, scale=1.0)
STOP = 3  # in the middle of accumulation and of Lookahead


def model_of(optimizer, kind=keras.Model):
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    model = kind(x, keras.layers.Dense(2, name="outer")(keras.layers.Dense(3, activation="tanh", bias_initializer="ones", name="inner")(x)))
    model.compile(optimizer, loss="mse")
    return model


def train(model, start=0, stop=len(GRADIENTS)):
    """Steps with gradients that are given, which takes less time than Model.fit: the model."""
    for grads in GRADIENTS[start:stop]:
        scale = model.optimizer.scale_loss(ops.ones(()))
        model.optimizer.apply([ops.convert_to_tensor(g) * scale for g in grads], model.trainable_variables)
    return model


def state(model):
    return helpers.bits([np.array(ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]])


def classes(optimizer):
    return [(type(o), o.name) for o in optimizer.chain()]


# Configurations -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NESTS)
def test_config_round_trip(name):
    optimizer = NESTS[name]()
    config = optimizer.get_config()
    for again in (
        type(optimizer).from_config(config),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
    ):
        assert again.get_config() == config
        assert classes(again) == classes(optimizer)
        assert str(again._functions) == str(optimizer._functions)  # the same functions, not copies
    assert config == optimizer.get_config()  # from_config left it as it was


def test_tensorflow_config_of_privacy():
    optimizer = minimize.DifferentialPrivacy(Lamb(0.1), 1.0, 0.5, batch_size=8, microbatch_size=2, seed=3)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config() and again.microbatch_size == 2


def test_config_of_the_wrapper_has_no_arguments_of_keras_that_do_nothing():
    config = minimize.ClipByGlobalNorm(Lamb(0.1), 0.5).get_config()
    assert set(config) == {"inner", "name", "max_norm"}


def test_lambdas_are_saved_only_where_keras_may_load_them():
    optimizer = minimize.OptimizerWrapper(SGD(0.1), transform_gradients=lambda pairs: pairs.scaled(0.5))
    config = keras.optimizers.serialize(optimizer)
    with pytest.raises((ValueError, TypeError), match="lambda"):
        keras.saving.deserialize_keras_object(config, safe_mode=True)


# Files --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    """A model that has stopped, its state, and the state at the end of a run without a stop."""
    found = {}

    def of(name):
        if name not in found:
            model = train(model_of(NESTS[name]()), 0, STOP)
            found[name] = model, state(model), state(train(model_of(NESTS[name]())))
        return found[name]

    return of


@pytest.mark.parametrize("name", STATEFUL)
def test_stopped_saved_and_continued(name, whole, tmp_path):
    model, at_stop, at_end = whole(name)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert classes(loaded.optimizer) == classes(model.optimizer)
    assert state(loaded) == at_stop
    assert state(train(loaded, STOP)) == at_end


def test_weights_into_another_model_and_continued(whole, tmp_path):
    model, at_stop, at_end = whole("many")
    model.save_weights(tmp_path / "model.weights.h5")
    for forget in (None, *range(len(model.optimizer.own_variables)), "averages"):
        other = model_of(NESTS["many"]())
        other.optimizer.build(other.trainable_variables)
        fresh = [np.array(ops.convert_to_numpy(v)) for v in other.optimizer.variables]
        other.load_weights(tmp_path / "model.weights.h5")
        assert state(other) == at_stop
        if forget is None:
            assert state(train(other, STOP)) == at_end
            continue
        # The control: without some of the wrappers' state it would be another run.
        variables = other.optimizer.variables
        forgotten = [forget] if forget != "averages" else [i for i, v in enumerate(variables) if "average" in v.name]
        for i in forgotten:
            variables[i].assign(fresh[i])
        assert state(train(other, STOP)) != at_end


@pytest.mark.parametrize("name", STATEFUL)
def test_tensorflow_checkpoint(name, whole, tmp_path):
    model, at_stop, at_end = whole(name)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    other = model_of(NESTS[name]())
    built = name == "many"
    if built:
        other.optimizer.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    if not built:  # then its values are put in when its variables come to be
        other.optimizer.build(other.trainable_variables)
    status.assert_existing_objects_matched()
    assert state(other) == at_stop
    assert state(train(other, STOP)) == at_end


def test_tensorflow_checkpoint_of_privacy_goes_on_with_the_noise(tmp_path):
    def draw(optimizer, w):
        optimizer.minimize(lambda: tf.stack([tf.reduce_sum(w) * 0.0] * 2), [w])
        return w.numpy()

    new = lambda: (minimize.DifferentialPrivacy(SGD(1.0), 1.0, 1.0, seed=1), tf.Variable([0.0, 0.0]))
    optimizer, w = new()
    draw(optimizer, w)
    path = tf.train.Checkpoint(optimizer=optimizer, w=w).save(str(tmp_path / "checkpoint"))
    second = draw(optimizer, w)
    again, w = new()
    again.build([w])
    tf.train.Checkpoint(optimizer=again, w=w).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(draw(again, w), second)
    fresh, other = new()
    fresh.build([other])
    other.assign(w)
    assert np.any(draw(fresh, other) != draw(again, w))


# Files that do not fit ------------------------------------------------------------------------------------------------------------

OTHERS = {
    "another average": (lambda: minimize.MovingAverage(Lamb(0.1)), lambda: minimize.Lookahead(Lamb(0.1))),
    "another order": (lambda: minimize.LossScaling(minimize.MovingAverage(Lamb(0.1))), lambda: minimize.MovingAverage(minimize.LossScaling(Lamb(0.1)))),
    "another depth": (lambda: minimize.LossScaling(minimize.MovingAverage(Lamb(0.1))), lambda: minimize.LossScaling(Lamb(0.1))),
    "no wrapper in the file": (lambda: Lamb(0.1), lambda: minimize.OptimizerWrapper(Lamb(0.1))),
    "another optimizer inside": (lambda: minimize.LossScaling(Lamb(0.1)), lambda: minimize.LossScaling(SGD(0.1, momentum=0.9))),
}


@pytest.mark.parametrize("case", OTHERS)
def test_of_another_nest_is_refused_and_changes_nothing_of_the_wrappers(case, tmp_path):
    saved, here = OTHERS[case]
    model = model_of(saved())
    model.optimizer.build(model.trainable_variables)
    for v in model.optimizer.variables:
        v.assign(ops.full(v.shape, 3, v.dtype))
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of(here())
    other.optimizer.build(other.trainable_variables)
    own = [v for w in other.optimizer.chain()[:-1] for v in w.own_variables]
    before = helpers.bits([np.array(ops.convert_to_numpy(v)) for v in own])
    with pytest.raises(ValueError, match="is that of other wrappers or of another model"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert helpers.bits([np.array(ops.convert_to_numpy(v)) for v in own]) == before


def test_of_another_model_is_refused():
    """Told by the wrapper itself, before anything is changed."""
    optimizer, other = (minimize.LossScaling(minimize.MovingAverage(Lamb(0.1))) for _ in range(2))
    optimizer.build([keras.Variable(np.ones(3, "float32"))])
    other.build([keras.Variable(np.ones(4, "float32"))])
    store = {}
    optimizer.save_own_variables(store)
    other.dynamic_scale.assign(8.0)
    with pytest.raises(ValueError, match="of another model"):
        other.load_own_variables(store)
    assert float(other.loss_scale) == 8.0
    optimizer.dynamic_scale.assign(8.0)
    optimizer.load_own_variables(store)
    assert float(optimizer.loss_scale) == 2.0**15


def test_files_without_an_optimizer_and_optimizers_that_are_not_built_get_the_weights(tmp_path):
    """As with optimizers of Keras, with a warning."""
    with_state = train(model_of(NESTS["moving average"]()), 0, 2)
    with_state.save_weights(tmp_path / "with.weights.h5")
    not_built = model_of(NESTS["moving average"]())
    with pytest.warns(UserWarning, match="is not loaded, since it was not built: call optimizer.build"):
        not_built.load_weights(tmp_path / "with.weights.h5")
    assert helpers.bits([np.array(w) for w in not_built.get_weights()]) == helpers.bits([np.array(w) for w in with_state.get_weights()])

    keras.Model(with_state.inputs, with_state.outputs).save_weights(tmp_path / "without.weights.h5")
    fresh = model_of(NESTS["moving average"]())
    fresh.optimizer.build(fresh.trainable_variables)
    before = helpers.bits([np.array(ops.convert_to_numpy(v)) for v in fresh.optimizer.variables])
    with pytest.warns(UserWarning, match="is not loaded, since the file has none"):
        fresh.load_weights(tmp_path / "without.weights.h5")
    assert helpers.bits([np.array(ops.convert_to_numpy(v)) for v in fresh.optimizer.variables]) == before
    assert helpers.bits([np.array(w) for w in fresh.get_weights()]) == helpers.bits([np.array(w) for w in with_state.get_weights()])


def test_a_schedule_may_come_and_go(tmp_path):
    """The learning rate is a variable or it is none; as with Lamb alone."""
    model = train(model_of(minimize.MovingAverage(Lamb(0.1))), 0, 2)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of(minimize.MovingAverage(Lamb(keras.optimizers.schedules.PolynomialDecay(0.1, 9))))
    other.optimizer.build(other.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_weights(tmp_path / "model.weights.h5")
    assert int(other.optimizer.iterations) == 2
    for mine, theirs in zip(other.optimizer.averages, model.optimizer.averages):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


def test_model_of_this_module_is_saved_as_one(tmp_path):
    model = model_of(NESTS["loss scaling"](), minimize.Model)
    train(model, 0, 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, minimize.Model) and state(loaded) == state(model)
