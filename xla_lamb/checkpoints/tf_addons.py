"""LAMB of TensorFlow Addons and of the TensorFlow Models garden: slots m and v, in memory, in TensorFlow checkpoints and in .h5 files.

Both are optimizers of Keras 2 (tf_keras.optimizers.legacy.Optimizer). A TensorFlow checkpoint is a prefix: its files are PREFIX.index and
PREFIX.data-*.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from xla_lamb.checkpoints.state import (
    Casts,
    Checkpoint,
    CheckpointError,
    Report,
    carry,
    counter,
    is_number,
    listed,
    match,
    normal,
    option,
    options_of,
)

_H5 = (".h5", ".hdf5")


def from_tf_addons(optimizer: Any, variables: Sequence[Any]) -> Checkpoint:
    """The checkpoint of a LAMB of TensorFlow Addons or TF Models, or of any optimizer of Keras 2 with slots m and v.

    Args:
      optimizer: after its first step.
      variables: the model's trainable variables; their names, without ":0", are the tensors' names.

    Raises:
      CheckpointError: if a variable has no slots m and v.
    """
    first, second = ([_slot(optimizer, v, slot) for v in variables] for slot in ("m", "v"))
    names = _unique([normal(v.name) for v in variables])
    values = lambda variables: {name: np.asarray(v.numpy()) for name, v in zip(names, variables)}
    return Checkpoint(
        int(optimizer.iterations.numpy()),
        values(first),
        values(second),
        values(variables),
        options_of(optimizer.get_config(), _variant(type(optimizer).__name__)),
    )


def to_tf_addons(
    checkpoint: Checkpoint, optimizer: Any, variables: Sequence[Any], *, names: Any = None, by_position: bool = False
) -> Report:
    """Fills a LAMB of TensorFlow Addons or TF Models, creating its slots, and `variables` if the checkpoint has parameters.

    Args:
      optimizer, variables: as for `from_tf_addons`; the optimizer may be fresh.
      names, by_position: as for `xla_lamb.checkpoints.match`.

    Raises:
      CheckpointError: if the tensors do not match; then nothing was changed.
    """
    keys = _unique([normal(v.name) for v in variables])
    checkpoint, report = match(checkpoint, dict(zip(keys, (tuple(v.shape) for v in variables))), names=names, by_position=by_position)
    optimizer._create_all_weights(variables)
    options = options_of(optimizer.get_config(), _variant(type(optimizer).__name__))
    stored = {option(name): name for name in optimizer._hyper if is_number(options.get(option(name)))}
    changes, sentences = carry(checkpoint.options, options, stored)
    casts = Casts()
    for name, v in zip(keys, variables):
        for slot, moments in (("m", checkpoint.first), ("v", checkpoint.second)):
            slot = _slot(optimizer, v, slot)
            slot.assign(casts(moments[name], slot.dtype.as_numpy_dtype, "moments"))
        if checkpoint.params is not None:
            v.assign(casts(checkpoint.params[name], v.dtype.as_numpy_dtype, "the parameters"))
    optimizer.iterations.assign(counter(checkpoint.step, optimizer.iterations.dtype.as_numpy_dtype))
    for name, value in changes.items():
        optimizer._set_hyper(stored[name], value)
    if checkpoint.params is None:
        sentences.append("the source has no parameters: the target keeps its own")
    report.lost += sentences + casts.sentences()
    return report


def is_prefix(path: Path) -> bool:
    return path.suffix not in _H5


def read(path: Path) -> Checkpoint:
    store = (_Prefix if is_prefix(path) else _H5File)(path)
    return store.checkpoint()


def write(checkpoint: Checkpoint, path: Path, like: Path | None, names, by_position: bool) -> Report:
    if like is None:
        raise CheckpointError(
            "a checkpoint of TensorFlow Addons needs --like (like=), one of the target: a TensorFlow checkpoint's prefix, or an .h5 file, saved "
            "after its first step"
        )
    if is_prefix(path) != is_prefix(like):
        raise CheckpointError(f"{path.name} and --like {like} must both be prefixes of TensorFlow checkpoints, or both .h5 files")
    store = (_Prefix if is_prefix(like) else _H5File)(like)
    checkpoint, report = match(
        checkpoint, {name: store.get(key).shape for name, key in store.first.items()}, names=names, by_position=by_position
    )
    options = store.options()
    changes, sentences = carry(checkpoint.options, options, [name for name in store.hyper if name in options])
    casts, values = Casts(), {}

    def put(key, value, what):
        values[key] = casts(value, store.get(key).dtype, what)

    for name in checkpoint.names:
        put(store.first[name], checkpoint.first[name], "moments")
        put(store.second[name], checkpoint.second[name], "moments")
        if checkpoint.params is not None and name in store.params:
            put(store.params[name], checkpoint.params[name], "the parameters")
    values[store.step] = counter(checkpoint.step, store.get(store.step).dtype)
    for name, value in changes.items():
        values[store.hyper[name]] = np.asarray(value, store.get(store.hyper[name]).dtype)
    if checkpoint.params is None:
        sentences.append("the source has no parameters: the target keeps its own")
    store.save(path, values)
    report.lost += sentences + casts.sentences()
    return report


class _Store:
    """What both kinds of file have in common: arrays by key, and which key is what.

    Attributes:
      first, second, params: keys by the name of the tensor.
      step: the key of the step counter.
      hyper: keys of hyper-parameters that are stored as values, under our names.
      others: names of what is no part of LAMB.
      lost: sentences.
    """

    first: dict[str, str]
    second: dict[str, str]
    params: dict[str, str]
    step: str
    hyper: dict[str, str]
    others: list[str]

    def get(self, key: str) -> np.ndarray:
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        raise NotImplementedError

    def checkpoint(self) -> Checkpoint:
        arrays = lambda keys: {name: self.get(keys[name]) for name in self.first}
        complete = self.params.keys() >= self.first.keys()
        lost = [] if complete else ["it does not hold the parameters of all moments, and they stay behind"]
        if self.others:
            lost.append(f"what is no part of LAMB is not carried over: {listed(self.others)}")
        return Checkpoint(
            int(self.get(self.step)),
            arrays(self.first),
            arrays(self.second),
            arrays(self.params) if complete else None,
            self.options(),
            lost=lost,
        )


# TensorFlow checkpoints ------------------------------------------------------------------------------------------------------

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class _Node(NamedTuple):
    name: str  # the variable's own, such as "dense/kernel"
    key: str


class _Prefix(_Store):
    """An object-based checkpoint: its graph of objects says which optimizer has which slots for which variable."""

    def __init__(self, path: Path):
        import tensorflow as tf
        from tensorflow.core.protobuf import trackable_object_graph_pb2

        prefix = str(path).removesuffix(".index")
        if not Path(prefix + ".index").exists():
            raise CheckpointError(f"{path} is no prefix of a TensorFlow checkpoint: there is no {prefix}.index" + _hint(path))
        self._reader = tf.train.load_checkpoint(prefix)
        if not self._reader.has_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"):
            raise CheckpointError(f"{path} is not an object-based checkpoint, as tf.train.Checkpoint and Keras write them")
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(self._reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
        nodes = graph.nodes
        owners = [node for node in nodes if {"m", "v"} <= {slot.slot_name for slot in node.slot_variables}]
        if len(owners) != 1:
            raise CheckpointError(
                f"{path} holds {'no LAMB state: no optimizer' if not owners else f'{len(owners)} optimizers'} with slots m and v"
            )
        owner = owners[0]
        slots: dict[int, dict[str, int]] = {}
        for slot in owner.slot_variables:
            slots.setdefault(slot.original_variable_node_id, {})[slot.slot_name] = slot.slot_variable_node_id
        variables = [_node(nodes[i], nodes[moments["m"]]) for i, moments in slots.items()]
        names = [variable.name for variable in variables]
        if "" in names or len(set(names)) < len(names):
            names = [variable.key.removesuffix(_VALUE) for variable in variables]
        keys = {slot: {name: _key(nodes[moments[slot]]) for name, moments in zip(names, slots.values())} for slot in ("m", "v")}
        self.first, self.second = keys["m"], keys["v"]
        saved = self._reader.get_variable_to_shape_map()
        self.params = {name: variable.key for name, variable in zip(names, variables) if variable.key in saved}
        children = {child.local_name: _key(nodes[child.node_id]) for child in owner.children if nodes[child.node_id].attributes}
        counters = [children[name] for name in ("iter", "iterations", "_iterations") if name in children]
        if not counters:
            raise CheckpointError(f"{path} holds no step counter beside the slots m and v")
        self.step = counters[0]
        # "decay" is that of the learning rate, of Keras 1.
        self.hyper = {option(name): key for name, key in children.items() if key != self.step}
        known = {*self.first.values(), *self.second.values(), *self.params.values(), self.step, *self.hyper.values()}
        self.others = sorted(key.removesuffix(_VALUE) for key in saved if key not in known and key != "_CHECKPOINTABLE_OBJECT_GRAPH")

    def get(self, key):
        return np.asarray(self._reader.get_tensor(key))

    def options(self):
        values = {name: float(self.get(key)) for name, key in self.hyper.items() if self.get(key).shape == ()}
        return {
            "learning_rate": "a schedule",
            **{name: value for name, value in values.items() if name != "decay" or value},
            "variant": "tf_addons",
        }

    def save(self, path, values):
        import tensorflow as tf

        keys = sorted(self._reader.get_variable_to_shape_map())
        tensors = [tf.constant(values[key] if key in values else self._reader.get_tensor(key)) for key in keys]
        tf.raw_ops.SaveV2(prefix=str(path), tensor_names=keys, shape_and_slices=[""] * len(keys), tensors=tensors)


def _node(variable, slot) -> _Node:
    """A variable that was left out of the checkpoint is known by its slot's key."""
    attributes = [a for a in variable.attributes if a.name == "VARIABLE_VALUE"]
    if attributes:
        return _Node(normal(attributes[0].full_name), attributes[0].checkpoint_key)
    return _Node("", _key(slot).split("/.OPTIMIZER_SLOT/")[0] + _VALUE)


def _key(node) -> str:
    return node.attributes[0].checkpoint_key if node.attributes else ""


def _hint(path: Path) -> str:
    if not path.is_dir():
        return ""
    inside = sorted({str(p)[: -len(".index")] for p in path.rglob("*.index")})
    return f"; inside it there are {listed(inside)}" if inside else ""


# .h5 -------------------------------------------------------------------------------------------------------------------------


_CONFIG = "configuration of the optimizer/"  # keys of what is no array


class _H5File(_Store):
    """A model of Keras 2 with its optimizer, saved as HDF5."""

    def __init__(self, path: Path):
        import h5py

        self.path = path
        with h5py.File(path, "r") as file:
            if "optimizer_weights" not in file:
                raise CheckpointError(
                    f"{path} holds no LAMB state: no optimizer_weights; save the model after its first step, with include_optimizer=True"
                )
            saved = [_text(name) for name in file["optimizer_weights"].attrs.get("weight_names", [])]
            counters = [name for name in saved if name.split("/")[-1] in ("iter:0", "iteration:0", "iterations:0")]
            if len(counters) != 1:
                raise CheckpointError(f"{path} holds no LAMB state: its optimizer has {len(counters)} step counters")
            prefix = counters[0].rpartition("/")[0]
            prefix += "/" if prefix else ""
            slots = {
                slot: {
                    name[len(prefix) : -len(end)]: f"optimizer_weights/{name}"
                    for name in saved
                    if name.startswith(prefix) and name.endswith(end)
                }
                for slot, end in (("m", "/m:0"), ("v", "/v:0"))
            }
            if not slots["m"] or slots["m"].keys() != slots["v"].keys():
                raise CheckpointError(f"{path} holds no LAMB state: its optimizer has {listed(saved)}, and not m and v of each variable")
            self.first, self.second = slots["m"], slots["v"]
            self.step = f"optimizer_weights/{counters[0]}"
            weights = {}
            group = file.get("model_weights", {})
            for layer in group.attrs.get("layer_names", []) if group else []:
                for name in group[_text(layer)].attrs.get("weight_names", []):
                    weights[normal(_text(name))] = f"model_weights/{_text(layer)}/{_text(name)}"
            self.params = {name: weights[name] for name in self.first if name in weights}
            self.others = [name for name in weights if name not in self.params]
            self.others += [
                name for name in saved if f"optimizer_weights/{name}" not in {*self.first.values(), *self.second.values(), self.step}
            ]
            self._training = json.loads(_text(file.attrs.get("training_config", "{}")))
            config = self._config()
            self.hyper = {option(name): _CONFIG + name for name, value in config.items() if is_number(value)}
            self._arrays = {_CONFIG + name: value for name, value in config.items() if is_number(value)}
            self._arrays |= {key: file[key][()] for key in (*self.first.values(), *self.second.values(), *self.params.values(), self.step)}

    def get(self, key):
        return np.asarray(self._arrays[key])

    def options(self):
        return options_of(self._config(), _variant(self._training.get("optimizer_config", {}).get("class_name", "LAMB")))

    def save(self, path, values):
        import h5py

        shutil.copyfile(self.path, path)
        with h5py.File(path, "r+") as file:
            for key, value in values.items():
                if key.startswith(_CONFIG):
                    self._config()[key[len(_CONFIG) :]] = float(value)
                else:
                    file[key][...] = value
            if "training_config" in file.attrs:
                file.attrs["training_config"] = json.dumps(self._training)

    def _config(self) -> dict[str, Any]:
        return self._training.get("optimizer_config", {}).get("config", {})


def _text(x) -> str:
    return x.decode() if isinstance(x, bytes) else str(x)


# In memory -------------------------------------------------------------------------------------------------------------------


def _variant(class_name: str) -> str:
    name = class_name.split(">")[-1]
    return "tf_addons" if name.upper() == "LAMB" else name


def _slot(optimizer, variable, slot):
    try:
        return optimizer.get_slot(variable, slot)
    except (KeyError, AttributeError, ValueError):
        raise CheckpointError(f"{variable.name} has no slot {slot} in {type(optimizer).__name__}: take its first step before") from None


def _unique(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise CheckpointError(f"two variables have the same name: {listed(n for n in dict.fromkeys(names) if names.count(n) > 1)}")
    return names
