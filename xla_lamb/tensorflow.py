"""LAMB on tf.Variables: the very lowering of the JAX step, in place, eagerly, in a tf.function and under jit_compile=True.

The step is exported from JAX once for each signature, as one StableHLO module for all platforms, and run by TensorFlow's
XlaCallModule. Importing this module registers the kernels, so that a SavedModel that holds a step can be called.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla
from tensorflow.python.eager import record

from xla_lamb import config, library
from xla_lamb.config import Variant

library.why_not("tensorflow", "cpu")
library.why_not("tensorflow", "cuda")

_FLOATS = (tf.float32, tf.bfloat16, tf.float16, tf.float64)
# As JAX and as XlaCallModule spell them.
_PLATFORMS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCM", "tpu": "TPU"}
_HYPERPARAMETERS = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "grad_scale", "max_grad_norm")


class StepStats(NamedTuple):
    """What a step can tell.

    Attributes:
      trust: for each variable a float32 (for float64 variables float64) tensor [*layer_shape, 3]: |p|, |u| and the trust ratio; 0 where
        the step was skipped. None unless it was asked for.
      grad_norm: the global norm of the scaled gradients before clipping, or None if nothing asked for it.
      skipped: boolean scalar.
    """

    trust: list[tf.Tensor] | None
    grad_norm: tf.Tensor | None
    skipped: tf.Tensor


class LambState(tf.Module):
    """Moments and the number of steps taken, for a fixed list of variables, in its order. A tf.Module: tf.train.Checkpoint saves it.

    Attributes:
      iterations: int64 scalar variable.
      first_moments, second_moments: lists of variables with the shapes of the list's variables.
    """

    def __init__(self, variables: Sequence[tf.Variable], moment_dtype: Any = None, name: str = "lamb"):
        super().__init__(name=name)
        asked = None if moment_dtype is None else tf.as_dtype(moment_dtype)
        if asked not in (None, tf.float32, tf.bfloat16):
            raise ValueError(f"moment_dtype must be 'bfloat16' or 'float32', not {asked.name!r}")

        def zeros(v, slot):
            dtype = asked or (tf.float64 if v.dtype.base_dtype == tf.float64 else tf.float32)
            return tf.Variable(tf.zeros(v.shape, dtype), trainable=False, name=f"{v.name.split(':')[0]}/{slot}")

        for v in variables:
            _check_float("variable", v.name, v.dtype)
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        self.first_moments = [zeros(v, "m") for v in variables]
        self.second_moments = [zeros(v, "v") for v in variables]


def init_state(variables: Sequence[tf.Variable], moment_dtype: Any = None) -> LambState:
    """Zero moments for `variables`: float32, float64 for float64 variables, or bfloat16 by request."""
    return LambState(_values(variables), moment_dtype)


def lamb_step(
    variables: Sequence[tf.Variable],
    gradients: Sequence[Any],
    state: LambState,
    learning_rate: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = None,
    eps_root: Any = 0.0,
    weight_decay: Any = None,
    decay_mask: Sequence[bool] | None = None,
    adapt_mask: Sequence[bool] | None = None,
    layer_axes: Sequence[int] | int | None = None,
    variant: str | Variant = "optax",
    bias_correction: str | None = None,
    ratio_bounds: tuple[float, float] | None = None,
    norm_bounds: tuple[float, float] | None = None,
    max_grad_norm: Any = None,
    nonfinite: str = "propagate",
    grad_scale: Any = None,
    skip: Any = None,
    stats: bool = False,
    implementation: str | None = None,
) -> StepStats:
    """One LAMB step: updates `variables` and `state` in place. The formula is in `xla_lamb.Variant`, the arguments mean what they mean
    for `xla_lamb.lamb`.

    Args:
      variables: N variables of float32, bfloat16, float16 or float64.
      gradients: N tensors of any of these types; tf.IndexedSlices are summed into dense ones.
      state: from `init_state(variables)`.
      learning_rate: Python number, scalar tensor, or a schedule such as Keras's: a function of `state.iterations`.
      b1, b2, eps, eps_root, weight_decay, max_grad_norm, grad_scale: Python numbers or scalar tensors. A new value of any of them never
        compiles anew.
      decay_mask, adapt_mask: N bools: which variables decay, and which a trust ratio scales.
      layer_axes: N ints, or one for all: how many leading axes index independent layers.
      skip: boolean scalar; True leaves everything as it was.
      stats: whether to return the trust ratios.

    Returns:
      StepStats.

    Raises:
      ValueError, TypeError: before anything was changed, if an argument does not fit.
    """
    variables = _values(variables)
    count, told = update(
        variables,
        gradients,
        state.first_moments,
        state.second_moments,
        state.iterations,
        dict(
            learning_rate=learning_rate(state.iterations) if callable(learning_rate) else learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            eps_root=eps_root,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            max_grad_norm=max_grad_norm,
        ),
        variant=config.variant(variant, bias_correction=bias_correction, ratio_bounds=ratio_bounds, norm_bounds=norm_bounds),
        decays=_per_variable("decay_mask", decay_mask, variables, True, bool),
        adapts=_per_variable("adapt_mask", adapt_mask, variables, None, bool),
        layer_axes=_per_variable("layer_axes", layer_axes, variables, 0, int),
        nonfinite=nonfinite,
        skip=skip,
        stats=stats,
        implementation=implementation,
    )
    state.iterations.assign(count)
    return told


def update(
    variables: Sequence[tf.Variable],
    gradients: Sequence[Any],
    first_moments: Sequence[tf.Variable],
    second_moments: Sequence[tf.Variable],
    count: tf.Tensor,
    hyperparameters: dict[str, Any],
    *,
    variant: Variant,
    decays: tuple[bool, ...],
    adapts: tuple[bool | None, ...],
    layer_axes: tuple[int, ...],
    nonfinite: str = "propagate",
    skip: Any = None,
    stats: bool = False,
    implementation: str | None = None,
) -> tuple[tf.Tensor, StepStats]:
    """`lamb_step` for those who keep the state themselves: updates variables and moments, and returns the new count with what it tells.

    Args:
      count: int64 scalar, the number of steps taken.
      hyperparameters: by the names in _HYPERPARAMETERS; None for the variant's own.
    """
    gradients = _check(variables, list(gradients), first_moments, second_moments)
    defaults = dict(eps=variant.eps, weight_decay=variant.weight_decay, grad_scale=1.0, max_grad_norm=variant.max_grad_norm)
    hyper = {name: defaults.get(name) if hyperparameters[name] is None else hyperparameters[name] for name in _HYPERPARAMETERS}
    config.check_hyperparameters(**{name: value for name, value in hyper.items() if name != "grad_scale"})
    config.check_nonfinite(nonfinite)
    for v, axes in zip(variables, layer_axes):
        if not 0 <= axes <= len(v.shape):
            raise ValueError(f"layer_axes of {v.name} is {axes}, but its shape is {tuple(v.shape)}")
    count = tf.cast(count, tf.int64)
    if not variables:
        return count, StepStats([] if stats else None, None, tf.constant(False))
    clip = hyper["max_grad_norm"] is not None
    step = _compiled_step(
        tuple((tuple(v.shape), v.dtype.base_dtype.name, g.dtype.name) for v, g in zip(variables, gradients)),
        tuple(m.dtype.name for m in (*first_moments, *second_moments)),
        decays,
        adapts,
        layer_axes,
        variant,
        clip,
        nonfinite,
        stats,
        config.implementation(implementation),
    )
    scalars = [_scalar(name, 0.0 if hyper[name] is None else hyper[name]) for name in _HYPERPARAMETERS]
    skip = _scalar("skip", False if skip is None else skip, tf.bool)
    with record.stop_recording():  # a tape asks for the gradient of whatever it sees, and XlaCallModule has none
        count, trust, norm, skipped = step([*variables, *first_moments, *second_moments], gradients, count, scalars, skip)
    return count, StepStats(trust if stats else None, norm if clip or nonfinite == "skip" else None, skipped)


def gradient_norm(gradients: Sequence[Any], implementation: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """The norm of all gradients together, and whether all of their elements are finite, in one pass of a few fused calls.

    Args:
      gradients: tensors of float32, bfloat16, float16 or float64, of known shapes.
      implementation: as in `lamb_step`.

    Returns:
      (norm, finite): a float32 scalar, float64 if there is a float64 gradient, and a boolean scalar. The squares of elements beyond 1e19 overflow float32:
      then the norm is infinite though all is finite.
    """
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    for i, g in enumerate(gradients):
        _check_float("gradient", str(i), g.dtype)
        if not g.shape.is_fully_defined():
            raise ValueError(f"gradient {i} has shape {g.shape}; shapes must be known")
    if not gradients:
        return tf.zeros(()), tf.constant(True)
    norm = _compiled_norm(tuple((tuple(g.shape), g.dtype.name) for g in gradients), config.implementation(implementation))
    with record.stop_recording():
        return norm(gradients)


def on_each_replica(run, variables: Sequence[tf.Variable], *operands):
    """Calls ``run(variables, *operands)``; under tf.distribute once for each replica, with its own copies of variables and tensors.

    Args:
      variables: at least one tf.Variable; the first one's device is where a replica's call runs.
      operands: structures of variables, tensors and what is the same on all replicas.

    Returns:
      What `run` returned, on the first replica if this is called once for all of them.
    """
    if not tf.distribute.has_strategy():
        return run(variables, *operands)

    def everywhere(distribution, *operands):
        copies = len(distribution.experimental_local_results(operands[0][0]))
        if tf.distribute.in_cross_replica_context():
            replicas = range(copies)
        else:
            replicas = [int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)) % copies]

        def local(x, replica):
            parts = distribution.experimental_local_results(x)
            return parts[replica if len(parts) > 1 else 0]

        results = []
        for replica in replicas:
            mine = tf.nest.map_structure(lambda x: local(x, replica), operands)
            with tf.device(mine[0][0].device):
                results.append(run(*mine))
        return results[0]

    return tf.__internal__.distribute.interim.maybe_merge_call(everywhere, tf.distribute.get_strategy(), list(variables), *operands)


@functools.lru_cache(maxsize=None)
def _compiled_norm(tensors, implementation):
    from xla_lamb import step as fused

    options = fused.Options(implementation, framework="tensorflow")
    module = _export_module(lambda *gradients: fused.grad_norm(gradients, options), [_struct(*t) for t in tensors], implementation)
    return tf.function(lambda gradients: tuple(module.call(gradients)), jit_compile=True, autograph=False)


@functools.lru_cache(maxsize=None)
def _compiled_step(tensors, moment_dtypes, decays, adapts, axes, variant, clip, nonfinite, stats, implementation):
    """A tf.function that XLA compiles, whatever the caller's context: only then are the variables updated in their own buffers."""
    module = _export(tensors, moment_dtypes, decays, adapts, axes, variant, clip, nonfinite, stats, implementation)

    dtypes = [tf.as_dtype(p) for _, p, _ in tensors] + [tf.as_dtype(m) for m in moment_dtypes]

    # On the variables' handles: a function that saw the variables themselves could not be called again once they are gone, with others of their shapes.
    @tf.function(jit_compile=True, autograph=False)
    def xla_lamb_step(handles, gradients, count, scalars, skip):
        values = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in zip(handles, dtypes)]
        n = len(tensors)
        count, *results = module.call([*scalars, skip, count, *values[:n], *gradients, *values[n:]])
        for handle, value in zip(handles, results):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        norm, skipped, *trust = results[len(handles) :]
        if stats:
            # Results without an element are not asked of XLA: TensorFlow crashes on some.
            there = iter(trust)
            shapes = [(*shape[:layers], 3) for (shape, _, _), layers in zip(tensors, axes)]
            types = [tf.float64 if dtype == tf.float64 else tf.float32 for dtype in dtypes]
            trust = [next(there) if all(shape) else tf.zeros(shape, dtype) for shape, dtype in zip(shapes, types)]
        return count, trust, norm, skipped

    return lambda variables, *rest: xla_lamb_step([v.handle for v in variables], *rest)


class _Module(NamedTuple):
    """An exported module and what XlaCallModule wants to know of it."""

    serialized: bytes
    version: int
    platforms: tuple[str, ...]
    results: tuple

    def call(self, operands):
        return tfxla.call_module(
            operands,
            version=self.version,
            module=self.serialized,
            Tout=[dtype for _, dtype in self.results],
            Sout=[shape for shape, _ in self.results],
            platforms=list(self.platforms),
        )


def _export(tensors, moment_dtypes, decays, adapts, axes, variant, clip, nonfinite, stats, implementation) -> _Module:
    """The step as StableHLO. Operands: the hyper-parameters (float64), skip, iterations, p, g, m, v. Results: iterations, p, m, v, the
    norm, skipped, and the trust ratios that have an element."""
    import jax.numpy as jnp

    from xla_lamb import step as fused

    options = fused.Options(implementation, framework="tensorflow")
    n = len(tensors)
    spec = fused.spec_of(variant, decays, adapts, axes)

    def run(*operands):
        hyper = dict(zip(_HYPERPARAMETERS, operands))
        skip, iterations, *arrays = operands[len(_HYPERPARAMETERS) :]
        lists = [arrays[k * n : (k + 1) * n] for k in range(4)]
        if not clip:
            hyper["max_grad_norm"] = None
        taken = fused.take(hyper, iterations + 1, *lists, spec, variant, skip=skip, nonfinite=nonfinite, options=options, trust=stats)
        norm = jnp.zeros(()) if taken.grad_norm is None else taken.grad_norm
        iterations = jnp.where(taken.skipped, iterations, iterations + 1)
        ratios = [x for x in taken.trust if stats and x.size]
        return [iterations, *taken.outputs, *taken.first, *taken.second, norm.astype(jnp.float32), taken.skipped, *ratios]

    shapes = [shape for shape, _, _ in tensors]
    operands = [
        *[_struct((), "float64")] * len(_HYPERPARAMETERS),
        _struct((), "bool"),
        _struct((), "int64"),
        *(_struct(shape, p) for shape, p, _ in tensors),
        *(_struct(shape, g) for shape, _, g in tensors),
        *(_struct(shape, dtype) for shape, dtype in zip(shapes + shapes, moment_dtypes)),
    ]
    return _export_module(run, operands, implementation)


def _struct(shape, dtype):
    import jax

    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))


def _export_module(function, operands, implementation) -> _Module:
    import jax

    from xla_lamb import step as fused

    if implementation == "fused":
        platforms = [p for p in fused.PLATFORMS if library.why_not("tensorflow", p) is None]
        if not platforms:
            raise NotImplementedError(f'implementation="fused" cannot be had: {library.why_not("tensorflow", "cpu")}')
    else:
        platforms = list(_PLATFORMS)
    calls = ("xla_lamb_step", "xla_lamb_grad_norm")
    with _x64(jax):  # the hyper-parameters come as float64, and variables may be
        exported = jax.export.export(
            jax.jit(function, keep_unused=True),
            platforms=platforms,
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in calls],
        )(*operands)
    return _Module(
        exported.mlir_module_serialized,
        exported.calling_convention_version,
        tuple(_PLATFORMS[p] for p in exported.platforms),
        tuple((aval.shape, tf.as_dtype(np.dtype(aval.dtype).name)) for aval in exported.out_avals),
    )


def _x64(jax):
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


def _scalar(name: str, value: Any, dtype=tf.float64) -> tf.Tensor:
    # tf.cast alone would round a Python number to float32 first.
    value = tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)
    if value.shape.rank != 0:
        raise ValueError(f"{name} must be a scalar, but has shape {value.shape}")
    return value


def _values(variables) -> list[tf.Variable]:
    """tf.Variables; a Keras 3 variable holds one."""
    values = [v if isinstance(v, tf.Variable) else getattr(v, "value", v) for v in variables]
    for v in values:
        if not isinstance(v, tf.Variable):
            raise TypeError(f"lamb_step updates tf.Variables in place, and cannot update a {type(v).__name__}")
    return values


def _check(variables, gradients, first, second) -> list[tf.Tensor]:
    """Raises if the lists do not fit; returns dense gradients."""
    for what, given in (("gradients", gradients), ("first moments", first), ("second moments", second)):
        if len(given) != len(variables):
            raise ValueError(f"there are {len(variables)} variables, but {len(given)} {what}")
    dense = []
    for v, g, m in zip(variables, gradients, first):
        if g is None:
            raise ValueError(f"the gradient of {v.name} is None: leave the variable out of the step and of its state, or pass zeros")
        g = dense_gradient(g, v)
        _check_float("variable", v.name, v.dtype)
        _check_float("gradient of", v.name, g.dtype)
        for what, shape in (("gradient", g.shape), ("first moment", m.shape)):
            if not shape.is_fully_defined() or shape != v.shape:
                raise ValueError(f"the {what} of {v.name} has shape {shape}, the variable {v.shape}; shapes must be known and equal")
        dense.append(g)
    return dense


def dense_gradient(gradient: Any, variable: Any) -> tf.Tensor:
    """`gradient` as a tensor. Slices of the same index are summed, in float32 at least: in 16 bits a frequent row would lose most of its sum."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.convert_to_tensor(gradient.values)
        values = values if values.dtype.size > 2 else tf.cast(values, tf.float32)
        gradient = tf.math.unsorted_segment_sum(values, gradient.indices, variable.shape[0])
    gradient = tf.convert_to_tensor(gradient)
    return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, variable.shape)


def _check_float(what: str, name: str, dtype) -> None:
    if dtype.base_dtype not in _FLOATS:
        raise TypeError(f"{what} {name} must be {', '.join(t.name for t in _FLOATS)}, not {dtype.name}")


def _per_variable(name: str, value, variables, default, kind) -> tuple:
    if value is None:
        return (default,) * len(variables)
    if kind is int and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return (int(value),) * len(variables)
    value = list(value)
    if len(value) != len(variables):
        raise ValueError(f"{name} has {len(value)} entries for {len(variables)} variables")
    good = (bool, np.bool_) if kind is bool else (int, np.integer)
    for v, x in zip(variables, value):
        if not isinstance(x, good) or (kind is int and isinstance(x, bool)):
            raise TypeError(f"{name} of {v.name} must be a {kind.__name__}, not {x!r}")
    return tuple(kind(x) for x in value)
