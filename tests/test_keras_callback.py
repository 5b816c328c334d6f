"""TrustRatioLogger in Model.fit: its numbers, what Keras's own callbacks write of them, and its picture; on both backends.

A process has one backend: this one has TensorFlow, and JAX's observations come from a process of their own, which calls `main`.
"""

import csv
import os
import pickle
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

import helpers

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras  # noqa: E402

import xla_lamb.keras  # noqa: E402
from xla_lamb.keras import TrustRatioLogger  # noqa: E402
from xla_lamb.trust import TrustRatios  # noqa: E402

RATE = 0.05
BATCHES, BATCH = 5, 8
NAMES = ["net/hidden/kernel[0]", "net/hidden/kernel[1]", "net/hidden/kernel[2]", "net/hidden/bias", "net/head/kernel", "net/head/bias"]


def model_of(optimizer=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(4, "tanh", name="hidden"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers, name="net")
    model.compile(optimizer or lamb(), loss="mse", **options)
    return model


def lamb(**options):
    return xla_lamb.keras.Lamb(RATE, layer_axes={"hidden/kernel": 1}, exclude_from_layer_adaptation=["head/kernel"], **options)


def fit(model, callbacks=(), epochs=1, **options):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(BATCHES * BATCH, 3)).astype("float32"), rng.normal(size=(BATCHES * BATCH, 2)).astype("float32")
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


class Weights(keras.callbacks.Callback):
    """The weights before and after every batch, flat in rows as in a table."""

    def on_train_begin(self, logs=None):
        self.seen = [self.rows()]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.rows())

    def rows(self):
        kernel, *rest = (np.asarray(w, np.float64) for w in self.model.get_weights())
        return [*kernel, *rest]


# What both backends do ----------------------------------------------------------------------------------------------------


def numbers(table):
    return np.stack([table.param_norm, table.update_norm, table.ratio], axis=1)


def observe(folder):
    """One process's observations, as plain data."""
    seen = {"backend": keras.backend.backend()}

    # After a fit without it, whose train function is compiled already; every=2 of 5 batches, twice.
    model = model_of()
    fit(model)
    weights, logger = Weights(), TrustRatioLogger(every=2, plot=folder / "trust.png", per_variable=True)
    board, table = keras.callbacks.TensorBoard(folder / "board", write_graph=False), keras.callbacks.CSVLogger(folder / "log.csv")
    history = fit(model, [weights, logger, board, table], epochs=2)
    seen.update(
        names=[t.names for t in logger.history],
        numbers=[numbers(t) for t in logger.history],
        summary=[t.summary() for t in logger.history],
        steps=logger.steps,
        weights=weights.seen,
        logs=history.history,
        variables=len(model.optimizer.variables),
    )
    fit(model, [logger])
    seen.update(refit=(logger.steps, len(model.optimizer.variables)))

    # From the first batch on, before the optimizer is built; the last of three batches at a time.
    model, logger = model_of(steps_per_execution=3), TrustRatioLogger(every=2)
    fit(model, [logger])
    seen.update(unbuilt=(logger.steps, [numbers(t) for t in logger.history]))

    # Without a table after batches, in a LossScaleOptimizer.
    model, logger = model_of(keras.optimizers.LossScaleOptimizer(lamb(), initial_scale=8.0)), TrustRatioLogger()
    weights = Weights()
    fit(model, [weights, logger], epochs=2)
    seen.update(scaled=(logger.steps, [numbers(t) for t in logger.history], weights.seen, logger.async_safe))

    # A step that is skipped.
    model, logger = model_of(lamb(nonfinite="skip")), TrustRatioLogger(every=1)
    x, y = np.ones((3, 3), "float32"), np.ones((3, 2), "float32")
    y[1] = np.inf
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[logger])
    seen.update(skips=(logger.steps, [t.skipped for t in logger.history]))
    history = model.fit(x[:2], y[:2], batch_size=1, shuffle=False, verbose=0, callbacks=[logger])
    seen.update(skipped_last=history.history["trust_ratio_max"])
    return seen


def main(folder):
    with open(Path(folder) / "seen.pickle", "wb") as f:
        pickle.dump(observe(Path(folder)), f)


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tensorflow":
        main(folder)
    else:
        code = "import sys, test_keras_callback; test_keras_callback.main(sys.argv[1])"
        helpers.python(code, folder, KERAS_BACKEND=request.param, PYTHONDONTWRITEBYTECODE=1)
    result = pickle.loads((folder / "seen.pickle").read_bytes())
    assert result["backend"] == request.param
    return {**result, "folder": folder}


# Numbers ------------------------------------------------------------------------------------------------------------------


def assert_step(table, before, after):
    """|p| is the norm of the weights before the step; the ratio is |p| / |u|, or 1 where it is excluded; and the weights moved by the
    learning rate times the ratio times |u|."""
    for name, (param_norm, update_norm, ratio), p, q in zip(NAMES, table, before, after, strict=True):
        np.testing.assert_allclose(param_norm, np.linalg.norm(p), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(ratio, 1 if name == "net/head/kernel" or not p.any() else param_norm / update_norm, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(RATE * ratio * update_norm, np.linalg.norm(q - p), rtol=1e-5, err_msg=name)


# Batches 2 and 4 of the first epoch, its end; batches 1, 3 and 5 of the second (6, 8 and 10 in all).
TABLES_AT = [2, 4, 5, 6, 8, 10]


def test_the_history(seen):
    assert seen["names"] == [tuple(NAMES)] * len(TABLES_AT)
    assert seen["steps"] == [BATCHES + batch for batch in TABLES_AT]  # five were taken before
    for table, batch in zip(seen["numbers"], TABLES_AT):
        assert_step(table, seen["weights"][batch - 1], seen["weights"][batch])


def test_the_comparison_notices(seen):
    """Negative control: the weights of another step, and layers that trade places."""
    table, weights = seen["numbers"][0], seen["weights"]
    for bad in ((table, weights[2], weights[3]), (table, weights[1], weights[1]), (table[[1, 0, 2, 3, 4, 5]], weights[1], weights[2])):
        with pytest.raises(AssertionError):
            assert_step(*bad)


def test_a_second_fit_starts_anew(seen):
    steps, variables = seen["refit"]
    assert steps == [3 * BATCHES + batch for batch in (2, 4, 5)]
    assert variables == seen["variables"]


def test_steps_per_execution_and_an_optimizer_that_is_not_built(seen):
    steps, tables = seen["unbuilt"]
    assert steps == [3, 5]  # the batches after which Keras calls
    assert all((table[:, 1] > 0).all() for table in tables)


def test_in_a_loss_scale_optimizer(seen):
    steps, tables, weights, async_safe = seen["scaled"]
    assert steps == [BATCHES, 2 * BATCHES] and async_safe
    for table, step in zip(tables, steps):
        assert_step(table, weights[step - 1], weights[step])


def test_skipped_steps(seen):
    assert seen["skips"] == ([1, 1, 2], [False, True, False])
    assert np.isnan(seen["skipped_last"]).all()


# What Keras's callbacks see -----------------------------------------------------------------------------------------------


def epochs(seen):
    """The logs that each epoch should have: those of the tables at its end."""
    result = []
    for k in (2, 5):
        logs = {f"trust_ratio_{name}": value for name, value in seen["summary"][k].items()}
        logs.update({f"trust_ratio/{name}": row[2] for name, row in zip(NAMES, seen["numbers"][k])})
        result.append(logs)
    return result


def test_history_and_csv(seen):
    expected = epochs(seen)
    assert expected[0] != expected[1] and len(expected[0]) == 9
    with open(seen["folder"] / "log.csv") as f:
        rows = list(csv.DictReader(f))
    for epoch, logs in enumerate(expected):
        for name, value in logs.items():
            assert seen["logs"][name][epoch] == value
            assert float(rows[epoch][name]) == pytest.approx(value)


def test_tensorboard(seen):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(seen["folder"] / "board" / "train"))
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if "trust_ratio" in tag]
    expected = epochs(seen)
    assert sorted(tags) == sorted(f"epoch_{name}" for name in expected[0])
    for tag in tags:
        written = [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        assert written == [(epoch, pytest.approx(logs[tag.removeprefix("epoch_")])) for epoch, logs in enumerate(expected)]


def test_the_picture(seen):
    image = matplotlib.image.imread(seen["folder"] / "trust.png")
    assert image.shape[0] > 300 and len(np.unique(image[::4, ::4].reshape(-1, image.shape[2]), axis=0)) > 20
    assert sorted(path.name for path in seen["folder"].glob("*.png*")) == ["trust.png"]


# Refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every(every):
    with pytest.raises(ValueError, match=f"number of batches, 1 or more, or None, not {every!r}"):
        TrustRatioLogger(every=every)


def test_refused_when_training_begins(tmp_path):
    model = model_of(keras.optimizers.Adam())
    with pytest.raises(TypeError, match="compiled with xla_lamb.keras.Lamb, and cannot read trust ratios from .*Adam"):
        fit(model, [TrustRatioLogger()])
    model = model_of()
    before = model.get_weights()
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        fit(model, [TrustRatioLogger(plot=tmp_path / "nowhere" / "trust.png")])
    assert all((p == q).all() for p, q in zip(before, model.get_weights()))


def test_a_picture_that_cannot_be_written_does_not_end_the_training(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(sys.modules["xla_lamb.keras.callbacks"], "plot", full)
    with pytest.warns(UserWarning, match="trust ratios could not be written: no space left"):
        history = fit(model_of(), [TrustRatioLogger(plot=tmp_path / "trust.png")], epochs=2)
    assert len(history.history["trust_ratio_min"]) == 2


def test_callbacks_in_front_of_it_see_nothing(tmp_path):
    fit(model_of(), [keras.callbacks.CSVLogger(tmp_path / "log.csv"), TrustRatioLogger()])
    assert "trust_ratio" not in (tmp_path / "log.csv").read_text()


def test_tables_are_tables():
    logger = TrustRatioLogger()
    fit(model_of(), [logger])
    assert [type(table) for table in logger.history] == [TrustRatios]
    assert "net/head/kernel" in logger.history[0]
