"""Keras 3 optimizers, in memory, as .keras files and as .weights.h5 files.

A file of weights knows the optimizer's variables by number alone: the iteration, the learning rate unless it is a schedule, the moving
averages of the weights and the sums of gradients if there are any, then momentum and velocity of each trainable variable in turn. A .keras
file has the model beside them, and so their names.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from xla_lamb.checkpoints.state import Casts, Checkpoint, CheckpointError, Report, carry, counter, listed, match, normal, options_of

_NAMED = (
    "use a .keras file instead, or give one of the same model, as --source-like (source_like=) for a source, as --like (like=) for a target"
)
_VARIANTS = {"Lamb": "keras", "LAMB": "tf_addons"}


def from_keras(optimizer: Any) -> Checkpoint:
    """The checkpoint of a built keras.optimizers.Lamb, xla_lamb.keras.Lamb or LAMB, or of a LossScaleOptimizer around one.

    Names are the paths of the trainable variables, such as "encoder/dense/kernel"; the parameters are their values.

    Raises:
      CheckpointError: if the optimizer is not built, or keeps no two moments.
    """
    inner, lost = _inner(optimizer), []
    variables, first, second = _slots(inner)
    if inner is not optimizer:
        lost.append("the loss scale and its count of good steps are not carried over")
    if inner.use_ema:
        lost.append("the moving averages of the weights (use_ema) are not carried over")
    lost += _micro_steps(_numpy(inner._iterations), inner.gradient_accumulation_steps)
    paths = [normal(v.path) for v in variables]
    named = len(set(paths)) == len(paths)
    names = paths if named else [str(i) for i in range(len(paths))]
    if not named:
        lost.append("two trainable variables have the same path, so all are known by number")
    values = lambda variables: dict(zip(names, map(_numpy, variables)))
    return Checkpoint(int(_numpy(inner.iterations)), values(first), values(second), values(variables), _options(inner), named, lost)


def to_keras(checkpoint: Checkpoint, optimizer: Any, *, names: Any = None, by_position: bool = False) -> Report:
    """Fills a built optimizer, such as `from_keras` takes, and its trainable variables if the checkpoint has parameters.

    Moving averages of the weights start anew from the parameters, sums of gradients from zero.

    Args:
      names, by_position: as for `xla_lamb.checkpoints.match`.

    Raises:
      CheckpointError: if the optimizer is not built, or the tensors do not match; then nothing was changed.

    Example:
      >>> model.optimizer.build(model.trainable_variables)                                  # doctest: +SKIP
      >>> checkpoints.to_keras(checkpoints.read("run", "optax"), model.optimizer)           # doctest: +SKIP
    """
    inner, lost = _inner(optimizer), []
    variables, first, second = _slots(inner)
    paths = [normal(v.path) for v in variables]
    if len(set(paths)) < len(paths):
        raise CheckpointError(f"two trainable variables have the same path: {listed(p for p in set(paths) if paths.count(p) > 1)}")
    checkpoint, report = match(checkpoint, dict(zip(paths, (tuple(v.shape) for v in variables))), names=names, by_position=by_position)
    casts, assignments = Casts(), []

    def put(variable, value, what):
        assignments.append((variable, casts(value, _dtype(variable), what)))

    for path, v, m, s in zip(paths, variables, first, second):
        put(m, checkpoint.first[path], "moments")
        put(s, checkpoint.second[path], "moments")
        if checkpoint.params is not None:
            put(v, checkpoint.params[path], "the parameters")
    if checkpoint.params is None:
        lost.append("the source has no parameters: the target keeps its own")
    if inner.use_ema:
        for average, v in zip(inner._model_variables_moving_average, inner._trainable_variables):
            if average is not None:
                value = checkpoint.params[normal(v.path)] if checkpoint.params is not None else _numpy(v)
                put(average, value, "averages")
        lost.append("the target's moving averages of the weights (use_ema) start anew from the parameters")
    steps = inner.gradient_accumulation_steps or 1
    for total in inner._accumulated_gradients if inner.gradient_accumulation_steps else ():
        put(total, np.zeros(tuple(total.shape), np.float32), "gradients")
    put(inner._iterations, counter(checkpoint.step * steps, _dtype(inner._iterations)), "counters")
    stored = ["learning_rate"] if _rate_is_variable(inner) else []
    changes, sentences = carry(checkpoint.options, _options(inner), stored)
    if changes:
        assignments.append((inner._learning_rate, changes["learning_rate"]))
    for variable, value in assignments:
        variable.assign(value)
    report.lost += lost + sentences + casts.sentences()
    return report


def read(path: Path, like: Path | None = None) -> Checkpoint:
    """With `like`, a .keras file of the same model, a .weights.h5 file gets names and parameters; alone it has positions only."""
    if _is_model(path):
        return _checkpoint(_load(path))
    if like is None:
        return _Vars(path).checkpoint()
    if not _is_model(like):
        raise CheckpointError(f"{like} must be a .keras file: a .weights.h5 file has no names to give")
    import h5py

    model = _load(like, target=True)
    optimizer, model.optimizer = model.optimizer, None
    model.load_weights(path)
    model.optimizer = optimizer
    with h5py.File(path, "r") as file:
        _restore(model, _saved(file), path)
    return _checkpoint(model)


def write(checkpoint: Checkpoint, path: Path, like: Path | None, names, by_position: bool) -> Report:
    if like is None:
        raise CheckpointError(
            "a Keras checkpoint needs --like (like=), a .keras or .weights.h5 file of the model, compiled with its optimizer"
        )
    if not (_is_model(path) or path.name.endswith(".weights.h5")):
        raise CheckpointError(f"the name of a Keras checkpoint ends in .keras or .weights.h5, and {path.name} does not")
    if _is_model(like):
        model = _load(like, target=True)
        report = to_keras(checkpoint, model.optimizer, names=names, by_position=by_position)
        model.save(path) if _is_model(path) else model.save_weights(path)
        return report
    if _is_model(path):
        raise CheckpointError(f"{path.name} would need the model itself, which --like {like} has not: give a .keras file")
    shutil.copyfile(like, path)
    return _Vars(path).fill(checkpoint, names, by_position)


# Optimizers in memory --------------------------------------------------------------------------------------------------------


def _inner(optimizer) -> Any:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is None:
        raise CheckpointError("the model is not compiled with an optimizer")
    if not inner.built:
        raise CheckpointError(f"the optimizer {inner.name} is not built: call optimizer.build(model.trainable_variables) first")
    if not (hasattr(inner, "_momentums") and hasattr(inner, "_velocities")):
        raise CheckpointError(f"the optimizer {inner.name}, a {type(inner).__name__}, keeps no moments such as LAMB's")
    return inner


def _slots(inner) -> tuple[list, list, list]:
    """(variables, first moments, second moments) of the variables that are stepped."""
    kept = [slots for slots in zip(inner._trainable_variables, inner._momentums, inner._velocities) if slots[1] is not None]
    return tuple(map(list, zip(*kept))) if kept else ([], [], [])


def _options(inner) -> dict[str, Any]:
    return options_of(inner.get_config(), _VARIANTS.get(type(inner).__name__, type(inner).__name__))


def _rate_is_variable(inner) -> bool:
    import keras

    return isinstance(inner._learning_rate, keras.Variable)


def _micro_steps(iterations, steps) -> list[str]:
    rest = int(iterations) % steps if steps else 0
    return [f"the gradients of {rest} batches that were summed up for the next step are not carried over"] if rest else []


def _numpy(variable) -> np.ndarray:
    from keras import ops

    return np.asarray(ops.convert_to_numpy(variable))


def _dtype(variable) -> np.dtype:
    if variable.dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(variable.dtype)


# .keras ----------------------------------------------------------------------------------------------------------------------


def _is_model(path: Path) -> bool:
    return path.name.endswith(".keras")


def _load(path: Path, target: bool = False):
    """The model with its optimizer. A target may have been saved before it had moments; a source needs no losses and metrics."""
    import h5py
    import keras

    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json")).get("compile_config") or {}
        with h5py.File(io.BytesIO(archive.read("model.weights.h5")), "r") as file:
            saved = _saved(file)
    if not config.get("optimizer"):
        raise CheckpointError(f"the model in {path} was not compiled with an optimizer")
    if "xla_lamb" in json.dumps(config["optimizer"]):
        importlib.import_module("xla_lamb.keras")  # registers its classes
    try:
        # Keras itself goes on without the optimizer's variables where this process has not the dtype policy of the one that saved them.
        model = keras.saving.load_model(path, compile=False)
        model.compile_from_config(config if target else {"optimizer": config["optimizer"]})
    except (TypeError, ValueError) as error:
        reason = (re.search("Could not locate [^.]+", str(error)) or re.search(".+", str(error))).group()
        raise CheckpointError(
            f"cannot load the model in {path}: {reason}; in a program that imports its classes use xla_lamb.checkpoints.from_keras and "
            "to_keras"
        ) from error
    _restore(model, saved, path, target)
    return model


def _restore(model, saved: list[list[np.ndarray]], path: Path, fresh: bool = False) -> None:
    """Gives the model's optimizer the variables in a file, and the wrapper for the loss scale that it had there."""
    import keras

    if not model.optimizer.built:
        raise CheckpointError(f"the model in {path} is not built: its optimizer has no variables")
    inner = _inner(model.optimizer)
    if len(saved) > 1 and inner is model.optimizer:
        model.optimizer = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
        model.optimizer.build(model.trainable_variables)
    elif len(saved) == 1:
        model.optimizer = inner
    values = saved[0] if saved else []
    if [x.shape for x in values] == [tuple(v.shape) for v in inner.variables]:
        for variable, value in zip(inner.variables, values):
            variable.assign(value)
        for variable, value in zip(model.optimizer.variables, saved[-1][: len(saved[-1]) - len(values)]):
            variable.assign(value)
    elif not fresh:
        raise CheckpointError(
            f"{path} holds no LAMB state of this model: its optimizer has saved {len(values)} variables, and has {len(inner.variables)} once "
            "it has taken a step"
        )


def _checkpoint(model) -> Checkpoint:
    checkpoint = from_keras(model.optimizer)
    # Seeds of dropout are anew in every program.
    if others := [normal(v.path) for v in model.non_trainable_variables if "seed_generator" not in v.path]:
        checkpoint.lost.append(f"variables that no optimizer steps are not carried over: {listed(others)}")
    return checkpoint


# .weights.h5 -----------------------------------------------------------------------------------------------------------------


def _groups(file) -> list:
    """The groups that hold the optimizer's variables; LossScaleOptimizer writes those of the inner one a second time, behind its own."""
    return [file[name] for name in ("optimizer/inner_optimizer/vars", "optimizer/vars") if name in file]


def _saved(file) -> list[list[np.ndarray]]:
    return [[_value(group[str(i)]) for i in range(len(group))] for group in _groups(file)]


class _Vars:
    """The optimizer's variables in a .weights.h5 file, by position."""

    def __init__(self, path: Path):
        import h5py

        self.path = path
        with h5py.File(path, "r") as file:
            saved = _saved(file)
        if not saved:
            raise CheckpointError(
                f"{path} holds no optimizer: it is saved with the weights of a model that was compiled and has taken a step"
            )
        self.loss_scale = len(saved) > 1
        self.values = saved[0]
        layouts = [(rate, extra) for rate in (True, False) for extra in (0, 1, 2) if self._fits(rate, extra)]
        if not layouts:
            raise CheckpointError(f"{path} holds no LAMB state: the variables of its optimizer are not pairs of moments")
        if len(layouts) > 1:
            raise CheckpointError(f"the variables of the optimizer in {path} can be read in {len(layouts)} ways: {_NAMED}")
        ((self.rate, self.extra),) = layouts
        if self.extra:
            raise CheckpointError(
                f"{path} has moving averages of the weights, or sums of gradients, and does not say how many batches make a step: {_NAMED}"
            )

    def _fits(self, rate: bool, extra: int) -> bool:
        """Whether the variables can be: iteration, learning rate?, `extra` blocks of all variables, pairs of moments."""
        start = 1 + rate
        count, rest = divmod(len(self.values) - start, 2 + extra)
        if rest or count < 1 or self.values[0].shape or not np.issubdtype(self.values[0].dtype, np.integer):
            return False
        if rate and self.values[1].shape:
            return False
        blocks, pairs = self.values[start : start + extra * count], self.values[start + extra * count :]
        shapes = [x.shape for x in pairs[::2]]
        return shapes == [x.shape for x in pairs[1::2]] and [x.shape for x in blocks] == shapes * extra

    @property
    def _start(self) -> int:
        return 1 + self.rate

    def _options(self) -> dict[str, Any]:
        return {"learning_rate": float(self.values[1]) if self.rate else "a schedule"}

    def checkpoint(self) -> Checkpoint:
        pairs = self.values[self._start :]
        moments = [{str(i): x for i, x in enumerate(pairs[k::2])} for k in (0, 1)]
        lost = [f"the parameters stay behind: a .weights.h5 file does not say which they are; {_NAMED}"]
        if self.loss_scale:
            lost.append("the loss scale and its count of good steps are not carried over")
        return Checkpoint(int(self.values[0]), *moments, None, self._options(), named=False, lost=lost)

    def fill(self, checkpoint: Checkpoint, names, by_position) -> Report:
        import h5py

        pairs = self.values[self._start :]
        shapes = {str(i): x.shape for i, x in enumerate(pairs[::2])}
        checkpoint, report = match(checkpoint, shapes, named=False, names=names, by_position=by_position)
        changes, sentences = carry(checkpoint.options, self._options(), ["learning_rate"] if self.rate else [])
        casts = Casts()
        values = [counter(checkpoint.step, self.values[0].dtype)]
        if self.rate:
            values.append(np.asarray(changes.get("learning_rate", self.values[1]), self.values[1].dtype))
        for name in checkpoint.names:
            for old, moment in zip(pairs[2 * int(name) :], (checkpoint.first[name], checkpoint.second[name])):
                values.append(casts(moment, old.dtype, "moments"))
        with h5py.File(self.path, "r+") as file:
            for group in _groups(file):
                offset = len(group) - len(values)
                for i, value in enumerate(values):
                    dataset = group[str(offset + i)]
                    dataset[...] = value if value.dtype.name != "bfloat16" else value.view(dataset.dtype)
        if checkpoint.params is not None:
            sentences.append(
                "the parameters are not written: a .weights.h5 file does not say which they are; give a .keras file as --like (like=)"
            )
        report.lost += sentences + casts.sentences()
        return report


def _value(dataset) -> np.ndarray:
    value = dataset[()]
    if dataset.attrs.get("dtype") == "bfloat16":
        import ml_dtypes

        value = np.asarray(value).view(ml_dtypes.bfloat16)
    return np.asarray(value)
