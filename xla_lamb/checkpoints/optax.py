"""Optax states, in memory and as Orbax checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from xla_lamb.checkpoints.state import Casts, Checkpoint, CheckpointError, Report, carry, counter, listed, match

_MOMENTS = ("mu", "nu")
# The nodes, by their fields, whose `count` is the number of steps taken: LAMB's own, a schedule's, inject_hyperparams'.
_COUNTERS = (
    {"count", *_MOMENTS},
    {"count"},
    {"count", "hyperparams", "hyperparams_states", "inner_state"},
    {"count", "hyperparams", "inner_state"},
)


def from_optax(state: Any, params: Any = None) -> Checkpoint:
    """The checkpoint of an optax state.

    Args:
      state: what ``init`` of optax.lamb or xla_lamb.lamb returned, or any state that holds it: of optax.chain, optax.partition, ...
      params: the parameters' tree, or None. Names are paths joined by "/", such as "encoder/dense/kernel".

    Raises:
      CheckpointError: if there is no LAMB state in it, or the parameters do not fit.
    """
    return _checkpoint({"opt_state": state} if params is None else {"opt_state": state, "params": params})


def to_optax(
    checkpoint: Checkpoint, state: Any, params: Any = None, *, names: Any = None, by_position: bool = False
) -> tuple[Any, Any, Report]:
    """Fills a state, and the parameters if both are there.

    Args:
      checkpoint: of any framework.
      state: what ``opt.init(params)`` returned, `opt` being optax.lamb or xla_lamb.lamb, alone or inside other transformations. Moments keep
        the types and the shardings that they have there. Every counter of steps and schedules is set to the checkpoint's.
      params: the parameters' tree, or None.
      names, by_position: as for `xla_lamb.checkpoints.match`.

    Returns:
      (state, params, Report): new trees; params is what was passed if the checkpoint has no parameters.

    Raises:
      CheckpointError: if the tensors do not match.

    Example:
      >>> import jax.numpy as jnp, xla_lamb
      >>> from xla_lamb import checkpoints
      >>> params = {"w": jnp.ones((3, 2))}
      >>> opt = xla_lamb.lamb(1e-3)
      >>> checkpoint = checkpoints.from_optax(opt.init(params), params)
      >>> state, params, report = checkpoints.to_optax(checkpoint, opt.init(params), params)
    """
    tree, report = _fill(checkpoint, {"opt_state": state, "params": params}, names, by_position)
    return tree["opt_state"], tree["params"], report


def read(path: Path) -> Checkpoint:
    return _checkpoint(_restore(path))


def write(checkpoint: Checkpoint, path: Path, like: Path | None, names, by_position: bool) -> Report:
    """Without `like`: {"params", "opt_state"}, opt_state with the tree of ``optax.lamb(0.1).init(params)``: restore it into such a tree."""
    import orbax.checkpoint as ocp

    if like is None:
        tree, report = _new_tree(checkpoint, names, by_position)
        report.lost += [
            "the state is that of a learning rate that is a number; for a schedule, or other transformations around LAMB, give --like (like=), "
            "an Orbax checkpoint of the target's own state"
        ]
    else:
        tree, report = _fill(checkpoint, _restore(like), names, by_position)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tree)
    return report


class _Leaf(NamedTuple):
    index: int  # among the leaves of the tree
    value: Any


class _Tree:
    """Any tree that holds states of LAMB: its leaves by path, be the nodes named tuples, dataclasses, or what Orbax makes of them."""

    def __init__(self, tree):
        flat, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.leaves: dict[tuple[str, ...], _Leaf] = {_path(path): _Leaf(i, value) for i, (path, value) in enumerate(flat)}
        if len(self.leaves) < len(flat):
            raise CheckpointError("two leaves of the tree have the same path")
        self.fields: dict[tuple[str, ...], set[str]] = {}
        for path in self.leaves:
            for i, key in enumerate(path):
                self.fields.setdefault(path[:i], set()).add(key)
        self.states = [node for node, fields in self.fields.items() if {"count", *_MOMENTS} <= fields and (*node, "count") in self.leaves]
        if not self.states:
            raise CheckpointError("it holds no LAMB state: no node with count, mu and nu")

    def moments(self, field: str) -> dict[str, tuple[str, ...]]:
        """The paths of the first or second moments by name, of all states: optax.partition has one for each group."""
        paths = {}
        for node in self.states:
            start = (*node, field)
            for path in self.leaves:
                if path[: len(start)] == start:
                    name = "/".join(path[len(start) :]) or "(the only one)"
                    if name in paths:
                        raise CheckpointError(
                            f"it holds two LAMB states with a tensor {name}, at {'/'.join(paths[name])} and {'/'.join(path)}"
                        )
                    paths[name] = path
        return paths

    def params(self) -> dict[str, tuple[str, ...]]:
        """The paths of the parameters by name: those that the moments have, anywhere in "params"."""
        return {"/".join(path[1:]) or "(the only one)": path for path in self.leaves if path[0] == "params"}

    def counters(self) -> list[tuple[str, ...]]:
        """All that count steps: LAMB, schedules, MultiSteps, TrainState."""
        return [
            path
            for path, leaf in self.leaves.items()
            if _is_count(leaf.value)
            and (
                (path[-1] == "count" and self.fields[path[:-1]] in _COUNTERS)
                or (path[-1] == "gradient_step" and "mini_step" in self.fields[path[:-1]])
                or (path[-1] == "step" and "opt_state" in self.fields[path[:-1]])
            )
        ]

    def accumulated(self) -> list[tuple[str, ...]]:
        """Gradients that MultiSteps has summed up, and their number."""
        nodes = [node for node, fields in self.fields.items() if "mini_step" in fields]
        return [
            p
            for p in self.leaves
            for node in nodes
            if p[: len(node)] == node and len(p) > len(node) and p[len(node)] in ("mini_step", "acc_grads")
        ]

    def hyperparameters(self) -> dict[str, tuple[str, ...]]:
        """Of optax.inject_hyperparams."""
        return {
            path[-1]: path for path in self.leaves if len(path) > 1 and path[-2] == "hyperparams" and np.ndim(self.leaves[path].value) == 0
        }

    def options(self) -> dict[str, Any]:
        return {name: float(np.asarray(self.leaves[path].value)) for name, path in self.hyperparameters().items()}


def _is_count(value) -> bool:
    return np.ndim(value) == 0 and np.issubdtype(getattr(value, "dtype", np.asarray(value).dtype), np.integer)


def _path(path) -> tuple[str, ...]:
    parts = tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
    # flax.nnx saves a variable as an object with one value.
    return parts[:-1] if len(parts) > 1 and parts[-1] == "value" else parts


def _checkpoint(tree) -> Checkpoint:
    tree = _Tree(tree)
    first, second, params = tree.moments("mu"), tree.moments("nu"), tree.params()
    steps = {"/".join(node): int(np.asarray(tree.leaves[(*node, "count")].value)) for node in tree.states}
    if len(set(steps.values())) > 1:
        raise CheckpointError(f"its LAMB states have taken different numbers of steps: {steps}")
    values = lambda paths: {name: np.asarray(tree.leaves[path].value) for name, path in paths.items()}
    lost = []
    if not params.keys() >= first.keys():
        if params:
            lost.append(
                f"the parameters are not those of the moments, which have {listed(n for n in first if n not in params)}, and stay behind"
            )
        params = {}
    params = {name: params[name] for name in first} if params else None
    second = {name: second[name] for name in first if name in second} | second
    options = tree.options()
    known = {*first.values(), *second.values(), *(params or {}).values(), *tree.counters(), *tree.hyperparameters().values()}
    accumulated = tree.accumulated()
    if any(path[-1] == "mini_step" and np.any(np.asarray(tree.leaves[path].value)) for path in accumulated):
        lost.append("gradients that optax.MultiSteps had summed up for the next step are not carried over")
    if others := ["/".join(path) for path in tree.leaves if path not in known and path not in accumulated]:
        lost.append(f"what is no part of LAMB is not carried over: {listed(others)}")
    step = next(iter(steps.values()))
    return Checkpoint(step, values(first), values(second), params and values(params), options, lost=lost)


def _fill(checkpoint: Checkpoint, tree, names, by_position) -> tuple[Any, Report]:
    """A copy of the tree with the checkpoint's values."""
    target = _Tree(tree)
    first, second, params = target.moments("mu"), target.moments("nu"), target.params()
    checkpoint, report = match(
        checkpoint, {name: np.shape(target.leaves[path].value) for name, path in first.items()}, names=names, by_position=by_position
    )
    options = target.options()
    changes, sentences = carry(checkpoint.options, options, target.hyperparameters())
    leaves = [leaf.value for leaf in target.leaves.values()]
    casts = Casts()

    def put(path, value, what=None):
        leaf = target.leaves[path]
        dtype = getattr(leaf.value, "dtype", value.dtype)
        value = casts(value, dtype, what) if what else value.astype(dtype)
        if isinstance(leaf.value, jax.Array):
            value = jax.device_put(value, leaf.value.sharding)
        elif not hasattr(leaf.value, "dtype"):
            value = value.item()  # TrainState counts its steps with a Python number
        leaves[leaf.index] = value

    for name in checkpoint.names:
        put(first[name], checkpoint.first[name], "moments")
        put(second[name], checkpoint.second[name], "moments")
    if checkpoint.params is not None and params.keys() >= first.keys():
        for name in checkpoint.names:
            put(params[name], checkpoint.params[name], "the parameters")
    elif checkpoint.params is not None:
        sentences.append('the target has no parameters under "params" with the names of the moments: the source\'s stay behind')
    elif params:
        sentences.append("the source has no parameters: the target keeps its own")
    for path in target.counters():
        dtype = getattr(target.leaves[path].value, "dtype", np.dtype(np.int64))
        put(path, counter(checkpoint.step, dtype))
    for path in target.accumulated():
        put(path, np.zeros(np.shape(target.leaves[path].value), np.float32))
    for name, value in changes.items():
        put(target.hyperparameters()[name], np.asarray(value))
    report.lost += sentences + casts.sentences()
    return jax.tree_util.tree_unflatten(target.structure, leaves), report


def _new_tree(checkpoint: Checkpoint, names, by_position) -> tuple[Any, Report]:
    checkpoint, report = match(checkpoint, None, named=True, names=names, by_position=by_position)
    if not checkpoint.named:
        raise CheckpointError(
            "the tensors have no names to make a tree of: give --names FILE (names=), or --like (like=), an Orbax checkpoint of the target"
        )
    moments = {"count": counter(checkpoint.step, np.int32), "mu": _nested(checkpoint.first), "nu": _nested(checkpoint.second)}
    tree = {"opt_state": [moments, None, None, None]}  # what optax.lamb's empty states are in a file
    if checkpoint.params is not None:
        tree["params"] = _nested(checkpoint.params)
    else:
        report.lost.append("the source has no parameters: the checkpoint holds opt_state alone")
    report.lost += carry(checkpoint.options, {}, ())[1]
    return tree, report


def _nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        node = tree
        *parents, last = name.split("/")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"cannot make a tree of these names: {name} is below a tensor")
        if last in node:
            raise CheckpointError(f"cannot make a tree of these names: {name} is a tensor, and others are below it")
        node[last] = x
    return tree


def _restore(path: Path) -> Any:
    """The tree of an Orbax checkpoint in NumPy, whatever devices it was saved from."""
    import orbax.checkpoint as ocp

    place = next((p for p in (path, path / "default") if (p / "_METADATA").exists()), None)
    if place is None:
        inside = sorted(str(p.parent) for p in path.glob("*/_METADATA")) + sorted(str(p.parent) for p in path.glob("*/*/_METADATA"))
        raise CheckpointError(f"{path} is no Orbax checkpoint of a tree" + (f"; inside it there are {listed(inside)}" if inside else ""))
    checkpointer = ocp.PyTreeCheckpointer()
    metadata = checkpointer.metadata(place.absolute())
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return checkpointer.restore(place.absolute(), restore_args=arguments)
