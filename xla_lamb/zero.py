"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054): the optimizer's state split over the devices that hold copies of the parameters.

With data parallelism every device has all parameters and all of the optimizer's state. The state need not be: where the moments of a tensor are split over
the data axis, XLA has each device update its slice of the parameter alone, and gathers the slices once. `state_shardings` says how to split.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xla_lamb.optax import parameter_names


def state_shardings(opt: Any, params: Any, axis: str | Sequence[str] = "data", mesh: Mesh | None = None) -> Any:
    """The shardings of an optimizer's state for ZeRO-1: what the state has for each element of a parameter is split over `axis` too.

    A part of the state belongs to a parameter if it has its name and its shape: moments, accumulated gradients, averages, also where a mask leaves
    some tensors out. It is split as its parameter, and each mesh axis in `axis` that does not split the parameter already splits it further, at the first
    dimension of which each device then has an equal part. Where there is none, and for all else, such as counts, nothing is split further.

    The first dimension is preferred to the largest: a device's part is then one piece of memory, and gathering the parts needs no transposition; and where
    leading axes index layers (`layer_axes` of `lamb`) each device has whole layers, whose norms need no sum over devices.

    The step is as without ZeRO. Under jax.jit each device takes it on its part of each tensor, and the new parts of a parameter are gathered once. The fused
    kernel gives parameters back as they came; where there is none, as on TPUs, XLA would leave them split: so give jax.jit their shardings and these
    in out_shardings.

    Args:
      opt: an optimizer with ``init``: `lamb`, ``optax.chain`` of it, ``optax.MultiSteps``, or any other optax transformation.
      params: the parameters: arrays or jax.ShapeDtypeStructs. Those without a NamedSharding count as replicated.
      axis: the mesh axis to split over, or a tuple of them; usually those that split the batch.
      mesh: None: that of the parameters.

    Returns:
      A tree like ``opt.init(params)`` of NamedShardings.

    Raises:
      ValueError, TypeError: for an axis that the mesh does not have, without a mesh, or with several.

    Example:
      >>> import jax, jax.numpy as jnp, xla_lamb
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from xla_lamb import zero
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((16, 2)), "b": jnp.zeros(2)}, NamedSharding(mesh, PartitionSpec()))
      >>> opt = xla_lamb.lamb(1e-3)
      >>> state = jax.jit(opt.init, out_shardings=zero.state_shardings(opt, params))(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> params, state = opt.donated_step(grads, state, params)
    """
    if not callable(getattr(opt, "init", None)):
        raise TypeError(f"opt must be an optimizer with a function init, not {opt!r}")
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis must be the name of a mesh axis, or a tuple of names, not {axis!r}")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    mesh = _mesh_of(params, mesh)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(f"axis has {name!r}, but the axes of the mesh are {', '.join(map(repr, mesh.shape))}")

    known = {path: (x.shape, _split(_sharding_of(x, mesh), x.shape, names)) for path, x in leaves}

    def place(path, x):
        # A tree of the state that is like the parameters ends its paths with theirs, whatever surrounds it. "a/b" ends with "b" too, so the longest counts.
        ends = (path[start:] for start in range(len(path) + 1))
        shape, sharding = next((known[end] for end in ends if end in known), (None, None))
        return sharding if x.shape == shape else NamedSharding(mesh, PartitionSpec())

    state = jax.eval_shape(opt.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    return jax.tree_util.tree_map_with_path(place, state)


def _mesh_of(params, mesh):
    """The mesh that the caller gives, or that of the parameters; checked."""
    if not isinstance(mesh, (Mesh, AbstractMesh, type(None))):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, not {mesh!r}")
    names = parameter_names(params)
    owner = "the one in mesh"
    for name, x in zip(names, jax.tree.leaves(params)):
        if isinstance(x, jax.core.Tracer):
            raise TypeError("state_shardings needs the parameters' shardings, which are not known inside jax.jit: call it before, with the arrays")
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"parameter {name or '(the only one)'} must be an array or a jax.ShapeDtypeStruct, not {x!r}")
        if (sharding := _named(x)) is None:
            devices = getattr(getattr(x, "sharding", None), "device_set", ())
            if len(devices) > 1:
                raise ValueError(f"{name} has a {type(x.sharding).__name__}: place it with jax.device_put and a jax.sharding.NamedSharding")
        elif mesh is None or _alike(mesh, sharding.mesh):
            mesh, owner = (mesh, owner) if isinstance(mesh, Mesh) else (sharding.mesh, f"that of {name}")
        else:
            raise ValueError(f"{name} is on another mesh, {sharding.mesh}, than {owner}, {mesh}: place all parameters on one")
    if mesh is None:
        raise ValueError("no parameter has a NamedSharding, so the mesh is not known: give mesh, or place the parameters on one with jax.device_put")
    return mesh


def _alike(a, b) -> bool:
    """Whether two meshes are the same, as far as an AbstractMesh, which has no devices, can tell."""
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return a == b
    return a.shape == b.shape


def _named(x) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _sharding_of(x, mesh) -> NamedSharding:
    """The sharding of a parameter, over that mesh."""
    found = _named(x)
    return NamedSharding(mesh, PartitionSpec()) if found is None else NamedSharding(mesh, found.spec, memory_kind=found.memory_kind)


def _split(sharding: NamedSharding, shape: tuple[int, ...], names: Sequence[str]) -> NamedSharding:
    """The sharding, with each of the mesh axes that it does not use added at the first dimension that allows equal parts."""
    sizes = sharding.mesh.shape
    spec = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    split = False
    for name in names:
        if name not in sum(spec, ()):
            fits = (k for k, size in enumerate(shape) if size and size % (sizes[name] * math.prod(sizes[used] for used in spec[k])) == 0)
            if (k := next(fits, None)) is not None:
                spec[k], split = (*spec[k], name), True
    if not split:
        return sharding
    # An entry of one name and one of a tuple with it mean the same, but are not equal.
    entries = (entry if len(entry) > 1 else entry[0] if entry else None for entry in spec)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)
