"""One step for the gradients of several batches."""

from __future__ import annotations

import warnings

import keras
from keras import ops

from xla_lamb.minimize.gradients import GradsAndVars, either, path, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper, on_each_replica


@keras.saving.register_keras_serializable(package="xla_lamb")
class GradientAccumulation(OptimizerWrapper):
    """Takes a step with the mean gradient of every `steps` batches; the batches between change nothing, `iterations` included.

    The sum is kept in float32 (float64 for float64 variables), of the gradients of all replicas. A batch whose gradients are not finite, inside a `LossScaling`, is
    left out and another takes its place. A step is for the variables that its last batch has gradients of, so all its batches should have those of the same.

    Args:
      inner: the optimizer that takes the step with the mean.
      steps: number of batches for a step.
      kwargs: as in `OptimizerWrapper`. Their transform_gradients see the mean of what has been summed up.
    """

    once = True

    def __init__(self, inner, steps: int, *, name: str | None = None, **kwargs):
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a number of batches, 1 or more, not {steps!r}")
        super().__init__(inner, name=name, **kwargs)
        self.steps = steps
        object.__setattr__(self, "_accumulated", None)  # the variables of the last batch, untracked

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._sums = [self.add_slot(v, "gradient_sum") for v in variables]
        self._batches = self.add_variable((), "zeros", "int", aggregation="only_first_replica", name="batches")

    def transform_gradients(self, grads_and_vars):
        self._note(grads_and_vars.variables)
        sums = [self._sums[self._get_variable_index(v)] for v in grads_and_vars.variables]
        skip = grads_and_vars.skip

        def add(sums, grads, scale, skip):
            for total, g in zip(sums, grads):
                g = ops.cast(g, total.dtype)
                g = g if scale is None else g * ops.cast(scale, g.dtype)
                total.assign(value_of(total) + (g if skip is None else ops.where(skip, ops.zeros_like(g), g)))

        on_each_replica(add, sums, grads_and_vars.raw, grads_and_vars.scale, skip)
        self._batches.assign_add(1 if skip is None else ops.cast(ops.logical_not(skip), self._batches.dtype))
        batches = ops.maximum(value_of(self._batches), 1)
        dtype = "float64" if any(total.dtype == "float64" for total in sums) else "float32"
        mean = GradsAndVars(zip(map(value_of, sums), grads_and_vars.variables), 1 / ops.cast(batches, dtype))
        return super().transform_gradients(mean.skipped(self._waits()))

    def _note(self, variables):
        now, before = {self._var_key(v): path(v) for v in variables}, self._accumulated
        if before and before.keys() != now.keys():
            different = sorted({**before, **now}[key] for key in before.keys() ^ now.keys())
            warnings.warn(f"of batches that {self.name!r} adds up only some have gradients of {different}, and a step is for those of its last batch", stacklevel=2)
        object.__setattr__(self, "_accumulated", now)

    def check_origin(self, done, aggregate):
        if not aggregate and self._accumulated is None:
            raise ValueError(
                "apply_gradients(..., aggregate=False) leaves out transform_gradients, which is what accumulates: call it with aggregate=True, or with what "
                "compute_gradients(..., aggregate=True) gave"
            )
        super().check_origin(done, aggregate)

    def _waits(self):
        return ops.less(value_of(self._batches), self.steps)

    def skip_updates(self, grads_and_vars):
        return either(self._waits(), super().skip_updates(grads_and_vars))

    def apply_updates(self, grads_and_vars):
        super().apply_updates(grads_and_vars)
        full = ops.logical_not(self._waits())

        def empty(sums, full):
            for total in sums:
                value = value_of(total)
                total.assign(ops.where(full, ops.zeros_like(value), value))

        on_each_replica(empty, self._sums, full)
        self._batches.assign(ops.where(full, 0, value_of(self._batches)))

    def get_config(self):
        return {**super().get_config(), "steps": self.steps}
