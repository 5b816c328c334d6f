"""Loss scaling, for gradients that float16 could not hold."""

from __future__ import annotations

import keras
from keras import ops

from xla_lamb.minimize.gradients import GradsAndVars, either, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper

# Powers of two whose inverse float32 holds too.
_LEAST, _LARGEST = 2.0**-126, 2.0**126


@keras.saving.register_keras_serializable(package="xla_lamb")
class LossScaling(OptimizerWrapper, keras.optimizers.LossScaleOptimizer):  # so that compile, for a mixed_float16 model, adds no second one
    """Multiplies the loss, and divides the gradients; a step whose gradients are not finite on some replica changes nothing on any.

    A dynamic scale is that of `keras.optimizers.LossScaleOptimizer`: halved after such a step, doubled after `dynamic_growth_steps` steps without one (from 2**-126 to
    2**126). Gradients whose norm is infinite, as it is in float32 if one is beyond 1e19, count as not finite. The steps of the optimizer inside see gradients without the
    scale, and replicas sum up gradients with it, in the type that they have. With `xla_lamb.keras.Lamb` inside, division and skipping are part of the fused step, and
    looking for infinities is one fused pass that reads the gradients; it is also the pass that global-norm clipping needs.

    Args:
      inner: the optimizer whose gradients are scaled. What looks at gradients has to be inside.
      initial_scale: the scale at first, or for ever if not `dynamic`. A power of two rounds nothing.
      dynamic_growth_steps: finite steps before the scale grows.
      dynamic: whether the scale changes.
      kwargs: as in `OptimizerWrapper`.

    Example:
      >>> import xla_lamb.keras, xla_lamb.minimize
      >>> optimizer = xla_lamb.minimize.LossScaling(xla_lamb.keras.Lamb(1e-3), initial_scale=2.0**15)
    """

    once = True

    def __init__(self, inner, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000, *, dynamic: bool = True, name: str | None = None, **kwargs):
        if isinstance(initial_scale, bool) or not isinstance(initial_scale, (int, float)) or not _LEAST <= initial_scale <= _LARGEST:
            raise ValueError(f"initial_scale must be a positive number, such as 2.0**15, not {initial_scale!r}")
        if isinstance(dynamic_growth_steps, bool) or not isinstance(dynamic_growth_steps, int) or dynamic_growth_steps < 1:
            raise ValueError(f"dynamic_growth_steps must be a number of steps, 1 or more, not {dynamic_growth_steps!r}")
        super().__init__(inner, name=name, **kwargs)
        self.initial_scale = float(initial_scale)
        self.dynamic_growth_steps = dynamic_growth_steps
        self.dynamic = bool(dynamic)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        if self.dynamic:
            scalar = lambda name, dtype, value: self.add_variable(
                (), keras.initializers.Constant(value), dtype, aggregation="only_first_replica", name=name
            )
            self.step_counter = scalar("step_counter", "int", 0)
            self.dynamic_scale = scalar("dynamic_scale", "float32", self.initial_scale)

    @property
    def loss_scale(self):
        """float32 scalar: what the loss is multiplied by now."""
        return value_of(self.dynamic_scale) if self.dynamic and self.built else ops.convert_to_tensor(self.initial_scale, "float32")

    def transform_loss(self, loss):
        loss = ops.convert_to_tensor(super().transform_loss(loss))
        if keras.backend.standardize_dtype(loss.dtype) in ("float16", "bfloat16"):
            loss = ops.cast(loss, "float32")
        return loss * ops.cast(self.loss_scale, loss.dtype)

    def transform_unaggregated_gradients(self, grads_and_vars):
        step = "transform_unaggregated_gradients"
        if not self._functions[step] and not any(w.customises(step) for w in self.chain()[1:-1]):
            return grads_and_vars  # nobody looks at them
        scale = self.loss_scale
        transformed = super().transform_unaggregated_gradients(self._unscaled(grads_and_vars, scale))
        # NaN if they were not finite, whatever became of them since: the other replicas have to see it in the sum.
        back = ops.where(_finite(grads_and_vars), scale, float("nan"))
        dtypes = [g.dtype for g in grads_and_vars.raw]
        return GradsAndVars((ops.cast(g, dtype), v) for dtype, (g, v) in zip(dtypes, transformed.scaled(back)))

    def transform_gradients(self, grads_and_vars):
        unscaled = self._unscaled(grads_and_vars, self.loss_scale)
        if self.dynamic:
            self._adapt(_finite(grads_and_vars))
        return super().transform_gradients(unscaled)

    def _unscaled(self, grads_and_vars, scale):
        # What is not finite becomes NaN altogether, so that no clipping can hide it.
        finite = _finite(grads_and_vars)
        return grads_and_vars.scaled(ops.where(finite, 1 / scale, float("nan"))).skipped(ops.logical_not(finite))

    def _adapt(self, finite):
        counter, scale = value_of(self.step_counter), self.loss_scale
        grows = ops.logical_and(finite, ops.equal(counter, self.dynamic_growth_steps - 1))
        restarts = ops.logical_or(grows, ops.logical_not(finite))
        self.step_counter.assign(ops.where(restarts, ops.zeros_like(counter), counter + 1))
        changed = ops.where(grows, scale * 2, ops.where(finite, scale, scale * 0.5))
        self.dynamic_scale.assign(ops.clip(changed, _LEAST, _LARGEST))

    def skip_updates(self, grads_and_vars):
        # Where transform_gradients has not said it already.
        infinite = ops.logical_not(_finite(grads_and_vars)) if grads_and_vars.skip is None else None
        return either(infinite, super().skip_updates(grads_and_vars))

    def objects_to(self, outer):
        looks = [step for step in ("transform_unaggregated_gradients", "transform_gradients") if outer.customises(step)]
        if looks:
            return f"its {looks[0]} would see gradients that are multiplied by the loss scale. Put LossScaling around it instead"
        return None

    def check_origin(self, done, aggregate):
        if 0 < done < 5 and not aggregate:
            raise ValueError(
                "these gradients are multiplied by the loss scale, since only transform_gradients divides them: apply_gradients needs aggregate=True here; "
                "to aggregate by other means, give the optimizer aggregate_gradients="
            )
        super().check_origin(done, aggregate)

    def get_config(self):
        return {**super().get_config(), "initial_scale": self.initial_scale, "dynamic_growth_steps": self.dynamic_growth_steps, "dynamic": self.dynamic}


def _finite(grads_and_vars):
    # The squares of finite gradients overflow too: a scale for which their norm is infinite is too large.
    return ops.logical_and(grads_and_vars.finite, ops.isfinite(grads_and_vars.global_norm))
