"""The LAMB step in pure jnp: the specification that the kernels are proven against, and what every platform without a kernel runs.

All arithmetic is in float32, or in float64 where the parameters are float64, whatever the storage types. This is the only place
where Python spells the formulas; ffi/arithmetic.h is their counterpart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

# The vector of scalars, the first operand of every call; ffi/arithmetic.h has the same positions.
SCALARS = (
    "learning_rate",
    "b1",
    "one_minus_b1",  # separate from b1: 1 - 0.999 in float32 is off by 1.3e-5 of itself
    "b2",
    "one_minus_b2",
    "eps",
    "eps_root",
    "weight_decay",  # for decoupled decay already multiplied by the learning rate
    "bias_correction1",
    "bias_correction2",
    "grad_scale",
    "skip",
)
DECAYS = ("in_ratio", "decoupled", "l2")  # by position, as in ffi/arithmetic.h
NEVER, ALWAYS, WHERE_DECAYED = range(3)  # whether a tensor is scaled by its trust ratio; as in ffi/arithmetic.h


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is fixed when an optimizer is built, for N tensors. Hashable: it is a parameter of the primitives.

    Attributes:
      decays: for each tensor, whether it decays.
      adapts: for each tensor, NEVER, ALWAYS or WHERE_DECAYED.
      layer_axes: for each tensor, how many leading axes index independent layers, each with norms and a ratio of its own; the batch
        axes are among them.
      decay, norm_bounds, ratio_bounds: as in config.Variant.
      emit_updates: return the change of the parameters instead of the new parameters.
      batch_axes: how many leading axes of the scalars and of every tensor index independent steps (jax.vmap).
    """

    decays: tuple[bool, ...]
    adapts: tuple[int, ...]
    layer_axes: tuple[int, ...]
    decay: str = "in_ratio"
    norm_bounds: tuple[float, float] = (0.0, math.inf)
    ratio_bounds: tuple[float, float] = (0.0, math.inf)
    emit_updates: bool = False
    batch_axes: int = 0

    def select(self, indices: Sequence[int]) -> Spec:
        """The spec of some of the tensors."""
        pick = lambda values: tuple(values[i] for i in indices)
        return dataclasses.replace(
            self, decays=pick(self.decays), adapts=pick(self.adapts), layer_axes=pick(self.layer_axes)
        )


def arithmetic_dtype(param_dtype: Any) -> np.dtype:
    """float64 for float64 parameters, else float32."""
    return np.dtype(np.float64 if param_dtype == np.float64 else np.float32)


def output_dtype(param_dtype: Any, grad_dtype: Any, emit_updates: bool) -> np.dtype:
    """New parameters have the parameters' type; updates the wider of both, so that adding them rounds once."""
    return np.dtype(jnp.promote_types(param_dtype, grad_dtype) if emit_updates else param_dtype)


def scalars(
    *, count, learning_rate, b1, b2, eps, eps_root, weight_decay, grad_scale, skip, decay: str, bias_correction: str
) -> dict[str, Any]:
    """The scalars of one step by name. Any may be a Python number or a traced scalar; `count` is the step counted from 1."""

    def complement(beta):
        return 1.0 - beta

    def correction(beta):
        # 1 - beta^count. In this form float32 keeps full accuracy; at step 1, 1 - 0.999**1 has lost three digits.
        if isinstance(beta, (int, float)):
            log_beta = math.log(beta) if beta > 0 else -math.inf
        else:
            log_beta = jnp.log1p(-complement(jnp.asarray(beta)))
        return -jnp.expm1(jnp.asarray(count, _float_of(log_beta)) * log_beta)

    correction1, correction2 = (correction(b1), correction(b2)) if bias_correction != "none" else (1.0, 1.0)
    decay_scalar = learning_rate * weight_decay if decay == "decoupled" else weight_decay
    if bias_correction == "learning_rate":
        learning_rate = learning_rate * jnp.sqrt(correction2) / correction1
        correction1 = correction2 = 1.0
    return dict(
        learning_rate=learning_rate,
        b1=b1,
        one_minus_b1=complement(b1),
        b2=b2,
        one_minus_b2=complement(b2),
        eps=eps,
        eps_root=eps_root,
        weight_decay=decay_scalar,
        bias_correction1=correction1,
        bias_correction2=correction2,
        grad_scale=grad_scale,
        skip=skip,
    )


def _float_of(x) -> Any:
    """The float type in which to count steps: float64 if JAX has it."""
    dtype = jnp.result_type(float) if isinstance(x, float) else x.dtype
    return jnp.promote_types(dtype, jnp.float32)


def pack(values: dict[str, Any], dtype: Any) -> jax.Array:
    """The vector of scalars, [len(SCALARS)] of `dtype`.

    Raises:
      ValueError: if one has an axis.
    """
    for name, value in values.items():
        if jnp.ndim(value) != 0:
            raise ValueError(f"{name.removeprefix('one_minus_')} must be a scalar, but has shape {jnp.shape(value)}")
    return jnp.stack([jnp.asarray(values[name], dtype) for name in SCALARS])


class _Scalars:
    """The scalars by name, shaped to broadcast against a tensor with `ndim` axes."""

    def __init__(self, vector: jax.Array, ndim: int):
        self._vector = vector
        self._ndim = ndim

    def __getattr__(self, name: str) -> jax.Array:
        value = self._vector[..., SCALARS.index(name)]
        return value.reshape(value.shape + (1,) * (self._ndim - value.ndim))


def _decayed(s: _Scalars, p: jax.Array, spec: Spec, i: int) -> jax.Array:
    """The parameter that the step starts from, and whose norm enters the ratio."""
    return p - s.weight_decay * p if spec.decay == "decoupled" and spec.decays[i] else p


def _direction(s: _Scalars, p: jax.Array, m: jax.Array, v: jax.Array, spec: Spec, i: int) -> jax.Array:
    """u, from the decayed parameter and the new moments as they are stored."""
    m, v = m.astype(p.dtype), v.astype(p.dtype)
    u = (m / s.bias_correction1) / (jnp.sqrt(v / s.bias_correction2 + s.eps_root) + s.eps)
    return u + s.weight_decay * p if spec.decay == "in_ratio" and spec.decays[i] else u


def _sum_of_squares(x: jax.Array, leading: int) -> jax.Array:
    # XLA adds in a tree on every platform: 10^7 elements keep 1e-7.
    return jnp.sum(jnp.square(x), axis=tuple(range(leading, x.ndim)))


def moments_of(vector, p, g, m, v, spec: Spec, i: int):
    """The first half of a step, for tensor i: new moments, and the sums of squares of p and u: [*layer_shape, 2]."""
    s = _Scalars(vector, p.ndim)
    wide = p.astype(vector.dtype)
    g = g.astype(vector.dtype) * s.grad_scale
    if spec.decay == "l2" and spec.decays[i]:
        g = g + s.weight_decay * wide
    new_m = (s.b1 * m.astype(vector.dtype) + s.one_minus_b1 * g).astype(m.dtype)
    new_v = (s.b2 * v.astype(vector.dtype) + s.one_minus_b2 * jnp.square(g)).astype(v.dtype)
    wide = _decayed(s, wide, spec, i)
    u = _direction(s, wide, new_m, new_v, spec, i)
    layers = spec.layer_axes[i]
    sums = jnp.stack([_sum_of_squares(wide, layers), _sum_of_squares(u, layers)], axis=-1)
    skip = s.skip != 0
    layer_skip = (_Scalars(vector, sums.ndim).skip != 0)
    return jnp.where(skip, m, new_m), jnp.where(skip, v, new_v), jnp.where(layer_skip, 0, sums)


def apply_of(vector, sums, p, m, v, spec: Spec, i: int, dtype: Any):
    """The second half, for tensor i: the output of type `dtype`, and |p|, |u| and the ratio: [*layer_shape, 3]."""
    s = _Scalars(vector, p.ndim)
    norms = jnp.sqrt(sums)
    p_norm, u_norm = norms[..., 0], norms[..., 1]
    phi = jnp.clip(p_norm, *spec.norm_bounds)
    ratio = jnp.clip(phi / jnp.where(u_norm == 0, 1, u_norm), *spec.ratio_bounds)
    ratio = jnp.where((phi == 0) | (u_norm == 0), 1, ratio)
    if spec.adapts[i] == NEVER:
        ratio = jnp.ones_like(ratio)
    elif spec.adapts[i] == WHERE_DECAYED:
        ratio = jnp.where(_Scalars(vector, ratio.ndim).weight_decay != 0, ratio, 1)
    rate = s.learning_rate * ratio.reshape(ratio.shape + (1,) * (p.ndim - ratio.ndim))
    wide = p.astype(vector.dtype)
    decayed = _decayed(s, wide, spec, i)
    change = rate * _direction(s, decayed, m, v, spec, i)
    skip = s.skip != 0
    if spec.emit_updates:
        if spec.decay == "decoupled" and spec.decays[i]:
            change = change + s.weight_decay * wide
        output = jnp.where(skip, 0, -change).astype(dtype)
    else:
        output = jnp.where(skip, p, (decayed - change).astype(dtype))
    trust = jnp.stack([p_norm, u_norm, ratio], axis=-1)
    return output, jnp.where(_Scalars(vector, trust.ndim).skip != 0, 0, trust)


def grad_norm_of(g: jax.Array, batch_axes: int) -> jax.Array:
    """The sum of squares of one gradient and 1 where all of it is finite, else 0: [*batch_shape, 2]."""
    axes = tuple(range(batch_axes, g.ndim))
    wide = g.astype(arithmetic_dtype(g.dtype))
    # A sum, as of the squares, with which it travels where a mesh splits the gradient; XLA's GPU compiler fails on several reductions of bools.
    broken = jnp.sum(~jnp.isfinite(g), axis=axes, dtype=wide.dtype)
    return jnp.stack([_sum_of_squares(wide, batch_axes), (broken == 0).astype(wide.dtype)], axis=-1)
