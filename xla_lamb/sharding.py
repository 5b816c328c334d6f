"""Tensors that a mesh splits: each device works on its shards, and only sums of squares travel.

Under jax.jit over a mesh nobody knows how tensors are split until XLA's partitioner has decided, and it gathers the operands of a custom call
that it knows nothing about. jax.experimental.custom_partitioning is what tells it more: a Shardy rule says which axes belong together, and a function
gets the shardings and returns the program of one device. It works for automatic and for explicit mesh axes, from jax 0.5 on (before 0.7, where Shardy
was off, through GSPMD's rule). jax.shard_map would need the shardings when the program is traced, and only explicit axes have them then.

Inside jax.shard_map and jax.pmap the axes have names that the caller gives: `reduce_over` is all that is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import custom_partitioning as partitioning
from jax.sharding import NamedSharding, PartitionSpec

try:  # JAX has no public name for it
    from jax._src.dispatch import prim_requires_devices_during_lowering as _LOWERED_WITH_DEVICES
except ImportError:
    _LOWERED_WITH_DEVICES = None

# For each axis of an array a label, or None where nothing may split it. Axes with the same label are split alike. The first item of
# a label is the tensor it belongs to, or BATCH, which all tensors share.
Labels = tuple[tuple[Hashable, int] | None, ...]
BATCH = "batch"
Arrays = Sequence[tuple[str, Sequence[Labels]]]


# Named axes.


def reduce_over(values: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
    """Each value, summed over the mesh axes named for it: one collective for each that has names."""
    return [jax.lax.psum(value, names) if names else value for value, names in zip(values, axes)]


def is_axes(x) -> bool:
    """Whether `x` says for a tensor which mesh axes split it: a name, a tuple of names, a PartitionSpec, or None for none."""
    entries = x if isinstance(x, PartitionSpec) else [x]
    return all(y is None or isinstance(y, str) or type(y) is tuple and all(isinstance(name, str) for name in y) for y in entries)


def axes_of(entry, layer_axes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the mesh axes that split a tensor within its layers, all that split it), from what `is_axes` takes."""
    if not isinstance(entry, PartitionSpec):
        names = _names(entry)
        return names, names
    by_axis = [_names(x) for x in entry]
    return sum(by_axis[layer_axes:], ()), sum(by_axis, ())


def _names(entry) -> tuple[str, ...]:
    """The names in one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def varying(x) -> frozenset:
    """The manual mesh axes over which `x` varies, as far as jax.shard_map keeps account of it (check_vma=True)."""
    aval = jax.typeof(x) if hasattr(jax, "typeof") else jax.core.get_aval(x)
    kind = getattr(aval, "manual_axis_type", None)  # its name from jax 0.10 on
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def vary_alike(*lists: Sequence[jax.Array], also: frozenset = frozenset()) -> list[list[jax.Array]]:
    """The lists, where the i-th arrays of all of them vary over the same manual mesh axes, and over those of `also`."""
    results = [list(values) for values in lists]
    for i in range(len(lists[0])):
        over = [varying(values[i]) for values in lists]
        union = also.union(*over)
        for values, had in zip(results, over):
            if union - had:
                values[i] = _vary(values[i], tuple(sorted(union - had)))
    return results


def _vary(x, names):
    return jax.lax.pcast(x, names, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, names)


def bound_axes(names: Sequence[str]) -> tuple[list[str], bool]:
    """(those of the names that no jax.shard_map or jax.pmap binds here, whether JAX keeps account of what varies over the others)."""
    unbound, tracked = [], False
    for name in names:
        try:
            tracked |= bool(varying(jax.lax.axis_index(name)))
        except NameError:
            unbound.append(name)
    return unbound, tracked


# Automatic and explicit axes.


@dataclasses.dataclass(frozen=True)
class Split:
    """How the axes with one label are split: the names of the mesh axes, in order, how many shards they make, and the whole size."""

    names: tuple[str, ...]
    shards: int
    size: int

    @property
    def padded(self) -> bool:
        return self.size % self.shards != 0


def partitioned(function: Callable, local: Callable, operands: Arrays, results: Arrays, deciding: Sequence[int]) -> Callable:
    """`function`, of arrays to a list of arrays, as one operation that XLA partitions.

    Args:
      function: of whole arrays; only its results' shapes and types are asked for.
      local: ``local(splits, *shards) -> list of shards``: what each device does; `splits` has the `Split` of each label. The names of mesh axes are
        bound in it.
      operands, results: the labels of each array, in groups with a name: where the partitioner has a choice, the axes with one label are split alike in
        groups of one name.
      deciding: the operands whose sharding decides, by position: the one with most shards does for the tensor whose labels it has, and the
        first of them where several have as many.
    """
    rule = partitioning.SdyShardingRule(_mappings("a", operands), _mappings("r", results))
    group_of, result_groups = [name for name, group in operands for _ in group], results
    operands, results = ([labels for _, group in groups for labels in group] for groups in (operands, results))

    def splits_of(mesh, args, deciding) -> dict:
        splits: dict[tuple, Split] = {}
        taken: dict[Hashable, set] = {}
        entries = {i: _entries(args[i].sharding, args[i]) for i in deciding}
        shards = {i: math.prod(mesh.shape[name] for names in entries[i] for name in names) for i in deciding}
        for i in sorted(deciding, key=shards.get, reverse=True):
            for label, size, names in zip(operands[i], args[i].shape, entries[i]):
                if label is not None and label not in splits:
                    used = taken.setdefault(BATCH, set()) | taken.setdefault(label[0], set())
                    names = tuple(name for name in names if name not in used)
                    taken[label[0]].update(names)
                    splits[label] = Split(names, math.prod(mesh.shape[name] for name in names), size)
        return splits

    def place(mesh, splits, all_labels):
        spec = lambda labels: PartitionSpec(*(splits[label].names or None if label is not None else None for label in labels))
        return [NamedSharding(mesh, spec(labels)) for labels in all_labels]

    def partition(mesh, args, outs):
        splits = splits_of(mesh, args, deciding)

        def each(*shards):
            with one_device(shards):
                return local(splits, *shards)

        return mesh, each, place(mesh, splits, results), tuple(place(mesh, splits, operands))

    def infer(mesh, args, outs):  # GSPMD's instead of the rule, before jax 0.7
        by_name = {name: splits_of(mesh, args, [i for i in deciding if group_of[i] == name]) for name in set(group_of)}
        return [sharding for name, group in result_groups for sharding in place(mesh, by_name[name], group)]

    operation = partitioning.custom_partitioning(lambda *arrays: function(*arrays))
    operation.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return operation


def filled(shard: jax.Array, labels: Labels, splits: dict, value: float) -> jax.Array:
    """The shard with `value` in the place of what is beyond the whole array's end, where an axis is not a multiple of its shards."""
    for axis, label in enumerate(labels):
        split = splits[label]
        if split.padded:
            index = jax.lax.axis_index(split.names) * shard.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shard.shape, axis)
            shard = jnp.where(index < split.size, shard, jnp.asarray(value, shard.dtype))
    return shard


def is_partitioned(module) -> bool:
    """Whether XLA's partitioner splits the program that is being lowered: it is for several devices, and not written for each of them."""
    context = module.axis_context
    if hasattr(context, "manual_axes"):
        return set(context.manual_axes) != set(context.mesh.axis_names) and context.mesh.size > 1
    return getattr(context, "num_devices", 1) > 1


def why_not(module) -> str | None:
    """Why `partitioned` cannot be had in the program that is being lowered; None if it can."""
    if hasattr(module.axis_context, "manual_axes"):
        manual, every = set(module.axis_context.manual_axes), module.axis_context.mesh.axis_names
        return (
            f"jax.shard_map has taken {_list(n for n in every if n in manual)} of the mesh axes, and XLA cannot partition the kernel over the others, "
            f"{_list(n for n in every if n not in manual)}: give jax.shard_map all axes, and lamb their names in axis_name"
        )
    if _LOWERED_WITH_DEVICES is None:
        return f"xla_lamb does not know how to have jax {jax.__version__} partition it: use jax.shard_map, with axis_name"
    if getattr(module.axis_context, "abstract_mesh", None) is None:
        return "no array of the program tells the mesh: place them with jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))"
    if module.lowering_parameters.for_export:
        return "jax.export cannot hold how XLA should partition the kernel over several devices: export the step inside jax.shard_map, with axis_name"
    return None


def _list(names) -> str:
    return ", ".join(map(repr, names))


@contextlib.contextmanager
def one_device(arrays):
    """A context in which to trace what one device does with `arrays`: without the mesh of jax.set_mesh, which with explicit axes would mark values as
    sharded, and with float64 if they have it, since XLA calls back in a thread that knows nothing of jax.enable_x64."""
    with contextlib.ExitStack() as stack:
        if hasattr(jax.sharding, "use_abstract_mesh"):
            stack.enter_context(jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())))
        if any(x.dtype == jnp.dtype("float64") for x in arrays):
            stack.enter_context((jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True))
        yield


def needs_devices(primitive) -> None:
    """Has JAX lower programs that hold the primitive with their devices, which custom_partitioning asks for."""
    if _LOWERED_WITH_DEVICES is not None:
        _LOWERED_WITH_DEVICES.add(primitive)


def _entries(sharding: NamedSharding | None, aval) -> list[tuple[str, ...]]:
    """For each axis of an array the mesh axes that split it, without those of one device; `sharding` is None where GSPMD knows none yet."""
    if sharding is None:
        return [()] * len(aval.shape)
    spec = [*sharding.spec, *[None] * (len(aval.shape) - len(sharding.spec))]
    return [tuple(name for name in _names(entry) if sharding.mesh.shape[name] > 1) for entry in spec]


def _mappings(prefix: str, arrays: Arrays) -> tuple:
    """A factor of the Shardy rule for each label in the groups of one name, and one of its own for each axis without."""
    mappings = []
    for name, group in arrays:
        for labels in group:
            own = f"{prefix}{len(mappings)}"
            factors = [f"{own}_{k}" if label is None else f"{name}_{label[0]}_{label[1]}" for k, label in enumerate(labels)]
            mappings.append(partitioning.ArrayMapping(*factors))
    return tuple(mappings)
