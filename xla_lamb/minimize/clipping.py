"""Clipping of the aggregated gradients."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from xla_lamb.minimize.pipeline import OptimizerWrapper


class _Clipping(OptimizerWrapper):
    def __init__(self, inner, limit: Any, *, name: str | None = None, **kwargs):
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
            raise ValueError(f"{self._argument} must be a positive number, not {limit!r}")
        super().__init__(inner, name=name, **kwargs)
        setattr(self, self._argument, float(limit))

    def get_config(self):
        return {**super().get_config(), self._argument: getattr(self, self._argument)}


class _ClippingNorms(_Clipping):
    _argument = "max_norm"

    def __init__(self, inner, max_norm: float, *, name: str | None = None, **kwargs):
        super().__init__(inner, max_norm, name=name, **kwargs)


@keras.saving.register_keras_serializable(package="xla_lamb")
class ClipByGlobalNorm(_ClippingNorms):
    """Scales all gradients together so that the norm of all of them is at most `max_norm`: that of the gradients of all replicas together.

    ``g * min(1, max_norm / norm)`` (Pascanu et al. 2013, arXiv:1211.5063), as `tf.clip_by_global_norm`. With `xla_lamb.keras.Lamb` inside the scaling is part of the
    fused step, and the norm is one fused pass that reads the gradients. If the norm is infinite or NaN, so become the gradients.

    Args:
      inner: the optimizer that gets the clipped gradients.
      max_norm: the limit.
      kwargs: as in `OptimizerWrapper`.
    """

    def transform_gradients(self, grads_and_vars):
        return super().transform_gradients(grads_and_vars.clipped(self.max_norm))


@keras.saving.register_keras_serializable(package="xla_lamb")
class ClipByNorm(_ClippingNorms):
    """Scales each gradient so that its own norm is at most `max_norm`, as `tf.clip_by_norm`; the gradients of all replicas are summed before. If a norm is
    infinite or NaN, so becomes the gradient.

    Args:
      inner: the optimizer that gets the clipped gradients.
      max_norm: the limit.
      kwargs: as in `OptimizerWrapper`.
    """

    def transform_gradients(self, grads_and_vars):
        return super().transform_gradients([(self._clip(g), v) for g, v in grads_and_vars])

    def _clip(self, gradient):
        dtype = keras.backend.standardize_dtype(gradient.dtype)
        wide = ops.cast(gradient, "float32" if dtype in ("float16", "bfloat16") else dtype)
        norm = ops.sqrt(ops.sum(ops.square(wide)))
        factor = self.max_norm / ops.maximum(norm, self.max_norm)
        factor = ops.where(ops.isfinite(norm), factor, ops.full_like(norm, float("nan")))  # a norm that overflows must not make zeros
        return ops.cast(wide * factor, dtype)


@keras.saving.register_keras_serializable(package="xla_lamb")
class ClipByValue(_Clipping):
    """Clips each element of the gradients to [-max_value, max_value]; the gradients of all replicas are summed before.

    Args:
      inner: the optimizer that gets the clipped gradients.
      max_value: the limit.
      kwargs: as in `OptimizerWrapper`.
    """

    _argument = "max_value"

    def __init__(self, inner, max_value: float, *, name: str | None = None, **kwargs):
        super().__init__(inner, max_value, name=name, **kwargs)

    def transform_gradients(self, grads_and_vars):
        return super().transform_gradients([(ops.clip(g, -self.max_value, self.max_value), v) for g, v in grads_and_vars])
