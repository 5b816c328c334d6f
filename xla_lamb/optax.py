"""LAMB for JAX: an optax transformation that can also take the whole step in place."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from xla_lamb import config, reference, sharding
from xla_lamb import step as fused
from xla_lamb.config import Variant

_INT32_MAX = np.iinfo(np.int32).max


class StepStats(NamedTuple):
    """What a step can tell.

    Attributes:
      trust: a tree like the parameters; for each tensor [*layer_shape, 3], float32 (float64 for float64 parameters): |p|, |u| and the
        trust ratio that the step used; 0 where it was skipped.
      grad_norm: the global norm of the scaled gradients before clipping, or None if nothing asked for it.
      skipped: boolean scalar.
    """

    trust: Any
    grad_norm: Any
    skipped: Any


class Lamb(optax.GradientTransformationExtraArgs):
    """What `lamb` returns: an optax transformation, the pair (init, update), that has `step` too.

    Attributes:
      init: ``init(params) -> state``; the state has the tree of ``optax.lamb(...).init(params)``.
      update: ``update(grads, state, params, *, grad_scale=None, skip=None) -> (updates, state)``, to add to the parameters, as in optax.
      step: ``step(grads, state, params, *, grad_scale=None, skip=None, stats=False) -> (params, state)`` or, with ``stats=True``,
        ``(params, state, StepStats)``. grad_scale: scalar that multiplies the gradients, for instance 1 / loss scale. skip: boolean
        scalar; where it is True nothing changes, the count included.
      donated_step: ``step``, compiled, and in place: it takes the buffers of ``state`` and ``params``, which cannot be used again.

    To take a step in place inside a jitted function of your own, donate parameters and state and return them in that order, for
    instance ``jax.jit(train_step, donate_argnums=(0, 1))`` of ``train_step(params, state, batch) -> (params, state, loss)``. JAX gives
    each donated buffer to the first result of its shape: donated as (state, params), the order of ``step``'s arguments, moments and
    parameters would trade places, and XLA would have to copy every one of them.
    """

    # A tree of (init, update) to JAX and to nnx, who build it anew from the two: so the others hang on update.
    @property
    def step(self) -> Callable:
        return self.update.step

    @property
    def donated_step(self) -> Callable:
        return self.update.donated_step


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = None,
    eps_root: Any = 0.0,
    weight_decay: Any = None,
    mask: Any = None,
    *,
    variant: str | Variant = "optax",
    adapt_mask: Any = None,
    exclude_from_weight_decay: Sequence[str] | None = None,
    exclude_from_layer_adaptation: Sequence[str] | None = None,
    layer_axes: Any = None,
    max_grad_norm: Any = None,
    nonfinite: str = "propagate",
    bias_correction: str | None = None,
    ratio_bounds: tuple[float, float] | None = None,
    norm_bounds: tuple[float, float] | None = None,
    moment_dtype: Any = None,
    axis_name: Any = None,
    implementation: str | None = None,
) -> Lamb:
    """LAMB (You et al. 2020, arXiv:1904.00962). The formula is in `xla_lamb.Variant`; the default is that of `optax.lamb`.

    Parameters may be float32, bfloat16, float16 or float64, gradients of any of these types. Arithmetic is in float32 at least.

    Under jax.jit parameters, gradients and state may be sharded in any way over any mesh, and every norm is that of the whole tensor.

    Args:
      learning_rate: number, traced scalar, or schedule: a function of the number of steps taken.
      b1, b2: decay rates of the first and the second moment, in [0, 1).
      eps: added to the root of the second moment. None: the variant's own (1e-6 for "optax").
      eps_root: added to the second moment inside the root.
      weight_decay: number, traced scalar or schedule. None: the variant's own (0 for "optax").
      mask: the tensors that decay: a tree of bools like the parameters, a prefix of it, or a function of the parameters that
        returns one. None: all.
      variant: the definition of LAMB: a name in `xla_lamb.VARIANTS` or a `xla_lamb.Variant`.
      adapt_mask: like `mask`, the tensors that a trust ratio scales. None: as the variant says.
      exclude_from_weight_decay: instead of `mask`: regular expressions; a tensor does not decay if one of them matches a part of its
        name, as `parameter_names` has it: ``["bias", "LayerNorm"]``. The state is that of a mask.
      exclude_from_layer_adaptation: instead of `adapt_mask`, likewise: a tensor gets a trust ratio unless one of them matches. None: as the
        variant says. For "tf_addons" an empty list is as None, as there: those that do not decay get none.
      layer_axes: how many leading axes of a tensor index independent layers, each with a trust ratio of its own (layers stacked for
        `lax.scan`, experts): an int, a tree of ints, a prefix of it, or a function of the parameters. None: 0.
      max_grad_norm: global norm of all gradients above which they are scaled down to it. None: the variant's own (none for "optax").
      nonfinite: what an infinite or NaN gradient does: "propagate" into its tensor, or "skip" the whole step.
      bias_correction, ratio_bounds, norm_bounds: instead of the variant's.
      moment_dtype: storage type of the moments, "bfloat16" or "float32". None: float32, or float64 with float64 parameters.
      axis_name: inside jax.shard_map and jax.pmap, the mesh axes over which tensors are sharded: a name, a tuple of names, or a PartitionSpec; for
        all tensors (a tuple of names always is), or as a tree like the parameters, a prefix of it, or a function of the parameters. Norms are taken
        over all shards; gradients are not averaged, which is jax.lax.pmean's work before. Names alone mean axes that split a tensor within its
        layers: where one splits the layers themselves, give PartitionSpecs. (): each device has whole tensors of its own. None: the tensors are
        whole; and where jax.shard_map keeps account of what varies, an error if they are not.
      implementation: "auto" takes the fused kernel where there is one, "fused" insists on it, "reference" never uses it. None: what
        the environment variable XLA_LAMB_IMPLEMENTATION says, else "auto".

    Returns:
      A `Lamb`.

    Raises:
      ValueError, TypeError: for a value that cannot be meant; with the value.

    Example:
      >>> import jax, jax.numpy as jnp, xla_lamb
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> opt = xla_lamb.lamb(1e-3, weight_decay=0.01, mask={"w": True, "b": False})
      >>> state = opt.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> params, state = opt.donated_step(grads, state, params)
    """
    variant = config.variant(variant, bias_correction=bias_correction, ratio_bounds=ratio_bounds, norm_bounds=norm_bounds)
    eps = variant.eps if eps is None else eps
    weight_decay = variant.weight_decay if weight_decay is None else weight_decay
    max_grad_norm = variant.max_grad_norm if max_grad_norm is None else max_grad_norm
    config.check_hyperparameters(
        learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )
    config.check_nonfinite(nonfinite)
    options = fused.Options(config.implementation(implementation))
    moment_dtype = _check_moment_dtype(moment_dtype)
    mask = _excluding("exclude_from_weight_decay", exclude_from_weight_decay, "mask", mask)
    if variant.adapt == "decay_mask":
        exclude_from_layer_adaptation = exclude_from_layer_adaptation or None
    adapt_mask = _excluding("exclude_from_layer_adaptation", exclude_from_layer_adaptation, "adapt_mask", adapt_mask)
    # Only for its state, whose tree ours has to have in every version of optax.
    peer = optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, mask)

    def init(params):
        _check_float("parameter", params)
        per_tensor(params)
        _per_tensor("axis_name", axis_name, params, None, tuple)
        state = peer.init(params)
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_moment_dtype(p.dtype, moment_dtype)), params)
        return (state[0]._replace(mu=zeros(), nu=zeros()), *state[1:])

    def per_tensor(params):
        """(decays, adapts, layer_axes) as tuples over the tensors; checked."""
        return (
            _per_tensor("mask", mask, params, True, bool),
            _per_tensor("adapt_mask", adapt_mask, params, None, bool),
            _check_layer_axes(params, _per_tensor("layer_axes", layer_axes, params, 0, int)),
        )

    def shard_axes(params, layer_axes):
        """For each tensor the names of the axes that split it within a layer, and of all that split it."""
        leaves = jax.tree.leaves(params)
        varying = [sharding.varying(x) for x in leaves]
        entries = _per_tensor("axis_name", axis_name, params, None, tuple)
        for i, (entry, leaf, over) in enumerate(zip(entries, leaves, varying)):
            if entry is None and over:
                raise ValueError(
                    f"{_name(params, i)} varies over {_quoted(over)}: if that splits it, give lamb those names or PartitionSpecs in axis_name, "
                    "so that norms are taken over all shards; if each device has a whole tensor of its own, give axis_name=()"
                )
            if isinstance(entry, PartitionSpec) and len(entry) > np.ndim(leaf):
                raise ValueError(f"axis_name of {_name(params, i)} is {entry}, but its shape is {np.shape(leaf)}")
        splits = [sharding.axes_of(entry, axes) for entry, axes in zip(entries, layer_axes)]
        unbound, tracked = sharding.bound_axes(sorted({name for _, every in splits for name in every}))
        if unbound:
            raise ValueError(
                f"axis_name has {_quoted(unbound)}, which no jax.shard_map or jax.pmap binds here: call the step inside one that does (see its axis_names), "
                "or leave axis_name out, since under jax.jit alone shardings are found without it"
            )
        if tracked:  # a tensor that is the same all along an axis is not split by it
            splits = [tuple(tuple(n for n in names if n in over) for names in pair) for pair, over in zip(splits, varying)]
        return tuple(zip(*splits)) or ((), ())

    def transform(grads, state, params, emit_updates, grad_scale, skip, stats=False):
        if params is None:
            raise ValueError("LAMB needs the parameters: call update(grads, state, params)")
        adam = _adam_state(state)
        _check_float("parameter", params)
        _check_alike(params, grads, "gradient")
        _check_alike(params, adam.mu, "first moment in the state")
        _check_alike(params, adam.nu, "second moment in the state")
        _check_float("gradient", grads)
        _check_moments(params, adam, moment_dtype)
        leaves, tree = jax.tree.flatten(params)
        gradients = tree.flatten_up_to(grads)
        first, second = tree.flatten_up_to(adam.mu), tree.flatten_up_to(adam.nu)

        spec = fused.spec_of(variant, *per_tensor(params), emit_updates)
        decay_count, rate_count = (_schedule_count(s, adam.count) for s in (state[1], state[-1]))
        hyperparameters = dict(
            learning_rate=learning_rate(rate_count) if callable(learning_rate) else learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            eps_root=eps_root,
            weight_decay=weight_decay(decay_count) if callable(weight_decay) else weight_decay,
            grad_scale=grad_scale,
            max_grad_norm=max_grad_norm,
        )
        taken = fused.take(
            hyperparameters, _increment(adam.count, False), leaves, gradients, first, second, spec, variant, skip=skip, nonfinite=nonfinite,
            options=options, trust=stats, axes=shard_axes(params, spec.layer_axes),
        )  # fmt: skip
        count = _increment(adam.count, taken.skipped)
        adam = adam._replace(count=count, mu=tree.unflatten(taken.first), nu=tree.unflatten(taken.second))
        state = (adam, *(_advance(s, taken.skipped) for s in state[1:]))
        told = StepStats(tree.unflatten(taken.trust), taken.grad_norm, taken.skipped) if stats else None
        return tree.unflatten(taken.outputs), state, told

    def update(updates, state, params=None, *, grad_scale=None, skip=None, **extra_args):
        del extra_args  # meant for other transformations of a chain
        updates, state, _ = transform(updates, state, params, True, grad_scale, skip)
        return updates, state

    def step(grads, state, params, *, grad_scale=None, skip=None, stats=False):
        params, state, told = transform(grads, state, params, False, grad_scale, skip, stats)
        return (params, state, told) if stats else (params, state)

    ordered = jax.jit(
        lambda params, state, grads, extra, stats: step(grads, state, params, stats=stats, **extra), donate_argnums=(0, 1), static_argnums=4
    )
    update.step = step
    update.donated_step = lambda grads, state, params, *, stats=False, **extra: ordered(params, state, grads, extra, stats)
    return Lamb(init, update)


def _increment(count, skipped):
    # Saturates: a wrapped count would make the bias corrections negative.
    return jnp.where(jnp.asarray(skipped, bool) | (count == _INT32_MAX), count, count + 1)


def _quoted(names) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _has(state, field: str) -> bool:
    return field in getattr(state, "_fields", ())  # hasattr would find tuple.count


def _schedule_count(state, default):
    """The count of a schedule of optax, which a mask may wrap; `default` where there is no schedule."""
    state = state.inner_state if _has(state, "inner_state") else state
    return state.count if _has(state, "count") else default


def _advance(state, skipped):
    """The state of a schedule of optax, one step on."""
    if _has(state, "inner_state"):
        return state._replace(inner_state=_advance(state.inner_state, skipped))
    if _has(state, "count"):
        return state._replace(count=_increment(state.count, skipped))
    return state


def _adam_state(state) -> optax.ScaleByAdamState:
    if isinstance(state, tuple) and state and isinstance(state[0], optax.ScaleByAdamState):
        return state[0]
    raise ValueError(
        f"this is not the state of LAMB: expected what init(params) returns, a tuple that begins with ScaleByAdamState, not {type(state).__name__}"
        + (f" of {type(state[0]).__name__}" if isinstance(state, (tuple, list)) and state else "")
        + "; a checkpoint becomes one if it is restored with init(params) as its target"
    )


def _moment_dtype(param_dtype, asked):
    return asked or reference.arithmetic_dtype(param_dtype)


def _check_moment_dtype(dtype):
    if dtype is None:
        return None
    dtype = np.dtype(dtype if not isinstance(dtype, str) or dtype != "bfloat16" else jnp.bfloat16)
    if dtype not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"moment_dtype must be 'bfloat16' or 'float32', not {dtype.name!r}")
    return dtype


def _check_moments(params, adam, asked) -> None:
    """Raises if the moments have a type that `init` does not give for these parameters; bfloat16 or float32 with those below float64
    is a matter of memory, and taken as it comes from a checkpoint."""
    for i, (p, m, v) in enumerate(zip(*map(jax.tree.leaves, (params, adam.mu, adam.nu)))):
        good = ("float64",) if p.dtype == np.float64 and asked is None else ("float32", "bfloat16")
        names = {np.dtype(x.dtype).name for x in (m, v)}
        if len(names) > 1 or not names.issubset(good):
            raise TypeError(
                f"the moments in the state of {_name(params, i)}, a {np.dtype(p.dtype).name} parameter, must both be {' or '.join(good)}, not "
                f"{' and '.join(sorted(names))}: cast them to what init(params) gives, or restore the checkpoint with init(params) as its target"
            )


def _check_float(what: str, tree) -> None:
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        dtype = getattr(leaf, "dtype", None)
        name = np.dtype(dtype).name if dtype is not None else type(leaf).__name__
        if name not in fused.FLOATS:
            raise TypeError(f"{what} {_name(tree, i)} must be an array of {', '.join(fused.FLOATS)}, not {name}")


def _check_alike(params, other, what: str) -> None:
    """Raises if `other` has not the parameters' tree and shapes."""
    ours, theirs = jax.tree.flatten(params), jax.tree.flatten(other)
    if ours[1] != theirs[1]:
        known, given = set(parameter_names(params)), set(parameter_names(other))
        missing, unknown = sorted(known - given), sorted(given - known)
        details = [f"{len(names)} {text}: {', '.join(names[:5])}" for names, text in ((missing, "missing"), (unknown, "unknown")) if names]
        raise ValueError(
            f"the tree of the {what}s is not that of the parameters" + (f" ({'; '.join(details)})" if details else f": {theirs[1]} against {ours[1]}")
        )
    for i, (p, x) in enumerate(zip(ours[0], theirs[0])):
        if np.shape(p) != np.shape(x):
            raise ValueError(f"the {what} of {_name(params, i)} has shape {np.shape(x)}, the parameter {np.shape(p)}")


def _per_tensor(name: str, value, params, default, kind) -> tuple:
    """One bool or int, or for `tuple` what sharding.is_axes takes, for each tensor, from a tree, a prefix, a function of the parameters, or None."""
    if callable(value):
        value = value(params)
    if value is None:
        value = default
        if value is None:
            return (None,) * len(jax.tree.leaves(params))
    leaves: list = []
    try:
        is_leaf = sharding.is_axes if kind is tuple else None
        jax.tree.map(lambda leaf, part: leaves.extend([leaf] * len(jax.tree.leaves(part))), value, params, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(f"{name} must have the parameters' tree, or be a prefix of it: {error}") from None
    if kind is tuple:
        for leaf in leaves:
            if not sharding.is_axes(leaf):
                raise TypeError(f"{name} must hold names of mesh axes, tuples of them or PartitionSpecs, not {leaf!r}")
        return tuple(leaves)
    good = (bool, np.bool_) if kind is bool else (int, np.integer)
    for leaf in leaves:
        if not isinstance(leaf, good) or (kind is int and isinstance(leaf, bool)):
            raise TypeError(f"{name} must hold {kind.__name__}s that are known when the program is traced, not {leaf!r}")
    return tuple(kind(leaf) for leaf in leaves)


def _excluding(argument: str, patterns, instead: str, mask):
    """The caller's mask, or one without the tensors whose name a pattern matches."""
    excluded = config.excludes(argument, patterns)
    if excluded is None:
        return mask
    if mask is not None:
        raise ValueError(f"{argument} and {instead} say the same in two ways: give {instead} or {argument}={patterns!r}, not both")
    return lambda params: jax.tree.unflatten(jax.tree.structure(params), [not excluded(name) for name in parameter_names(params)])


def _check_layer_axes(params, axes: tuple[int, ...]) -> tuple[int, ...]:
    for i, (leaf, count) in enumerate(zip(jax.tree.leaves(params), axes)):
        if not 0 <= count <= np.ndim(leaf):
            raise ValueError(f"layer_axes of {_name(params, i)} is {count}, but its shape is {np.shape(leaf)}")
    return axes


def parameter_names(params) -> list[str]:
    """The name of each leaf of `params`, in the order of `jax.tree.leaves`: its path, joined with "/".

    A path has dictionaries' keys, attributes' and fields' names and positions in sequences, as in "encoder/layer_0/LayerNorm/scale". The wrappers
    that Flax puts around arrays (nnx.Param and other nnx.Variables, linen's Partitioned) have no part in it, nor have optax's
    MaskedNodes, which are no leaves. The name of a lone array is "".
    """
    names = []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_wrapper):
        inner = [path for path, _ in jax.tree_util.tree_leaves_with_path(node)]
        names += ["/".join(map(_key, (*path, *(rest[1:] if _is_wrapper(node) else rest)))) for rest in inner]
    return names


def _key(entry) -> str:
    # A DictKey and a FlattenedIndexKey have a key, a SequenceKey an idx, a GetAttrKey a name.
    return str(next((getattr(entry, field) for field in ("key", "idx", "name") if hasattr(entry, field)), entry))


def _is_wrapper(node) -> bool:
    # By name, so that Flax need not be there. VariableState is what nnx had before its Variables were pytrees.
    return any(t.__module__.startswith("flax.") and t.__name__ in ("Variable", "VariableState", "AxisMetadata") for t in type(node).__mro__)


def _name(tree, index: int) -> str:
    return parameter_names(tree)[index] or "(the only one)"
