"""Averages of the weights along the way, to evaluate with: moving average, stochastic weight averaging, lookahead."""

from __future__ import annotations

import contextlib

import keras
from keras import ops

from xla_lamb.minimize.gradients import value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper, on_each_replica


class Averaging(OptimizerWrapper):
    """An optimizer that keeps an average of the weights, of float32 at least. Skipped steps do not count.

    `averaged_weights` puts the averages into the variables while a block runs, and `AveragedWeights` does so for Model.evaluate, Model.predict and the validation of
    Model.fit. In checkpoints the averages are part of the optimizer.

    Attributes:
      averages: list of variables, in the order of those that the optimizer was built with.
    """

    def __init__(self, inner, *, name: str | None = None, **kwargs):
        super().__init__(inner, name=name, **kwargs)
        object.__setattr__(self, "_own_weights", None)  # the values that averaged_weights put aside
        object.__setattr__(self, "_steps_before", 0)  # the number of steps when it did

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.averages = [self.add_slot(v, "average", copied=True) for v in variables]
        self._steps_taken = self.add_variable((), "zeros", "int", aggregation="only_first_replica", name="steps_taken")

    def apply_updates(self, grads_and_vars):
        self.check_own_weights()
        super().apply_updates(grads_and_vars)
        skip = grads_and_vars.skip
        taken = value_of(self._steps_taken)

        def update(variables, averages, taken, skip):
            for v, a in zip(variables, averages):
                value, old = value_of(v), value_of(a)
                weight, new = self.average(ops.cast(value, old.dtype), old, taken)
                a.assign(new if skip is None else ops.where(skip, old, new))
                if weight is not None:
                    weight = ops.cast(weight, value.dtype)
                    v.assign(weight if skip is None else ops.where(skip, value, weight))

        on_each_replica(update, self._trainable_variables, self.averages, taken, skip)
        self._steps_taken.assign_add(1 if skip is None else ops.cast(ops.logical_not(skip), self._steps_taken.dtype))

    def average(self, weight, average, taken):
        """What becomes of a variable after a step: (weight, average), the weight None to leave it.

        Args:
          weight: tensor, the variable after the step.
          average: tensor of the same shape and type.
          taken: integer scalar, the number of steps before this one.
        """
        raise NotImplementedError

    def use_averaged_weights(self) -> None:
        """Puts the averages into the variables, and their own values aside."""
        self._need_built()
        if self._own_weights is not None:
            raise RuntimeError(f"{self.name!r} has its averages in the variables already")
        object.__setattr__(self, "_own_weights", [ops.convert_to_numpy(v) for v in self._trainable_variables])
        object.__setattr__(self, "_steps_before", int(ops.convert_to_numpy(self._steps_taken)))
        for v, a in zip(self._trainable_variables, self.averages):
            # A copy: on JAX, Model.evaluate donates the variables' buffers.
            v.assign(ops.copy(ops.cast(value_of(a), v.dtype)))

    def use_own_weights(self) -> None:
        """Undoes `use_averaged_weights`.

        Raises:
          RuntimeError: if it was not called, or if a compiled function, which cannot look for that, took steps since.
        """
        if self._own_weights is None:
            raise RuntimeError(f"{self.name!r} has its own weights in the variables already")
        for v, value in zip(self._trainable_variables, self._own_weights):
            v.assign(value)
        object.__setattr__(self, "_own_weights", None)
        lost = int(ops.convert_to_numpy(self._steps_taken)) - self._steps_before
        if lost:
            raise RuntimeError(f"{self.name!r} took {lost} steps while its averages were in the variables: these are lost, and the averages are not right any more")

    @contextlib.contextmanager
    def averaged_weights(self):
        """``with optimizer.averaged_weights(): ...`` has the averages in the variables while the block runs."""
        self.use_averaged_weights()
        try:
            yield
        finally:
            self.use_own_weights()

    def check_own_weights(self) -> None:
        """Raises RuntimeError while the averages are in the variables."""
        if self._own_weights is not None:
            raise RuntimeError(f"{self.name!r} has its averages in the variables: call use_own_weights() before the next step")

    def _need_built(self):
        if not self.built:
            raise RuntimeError(f"{self.name!r} has no averages yet: they begin with its first step, or with build(variables)")


@keras.saving.register_keras_serializable(package="xla_lamb")
class MovingAverage(Averaging):
    """Exponential moving average: ``average = momentum * average + (1 - momentum) * p`` after each step, which begins with the p of the first step, as Keras's `use_ema`.

    Args:
      inner: the optimizer that takes the steps.
      momentum: in [0, 1).
      kwargs: as in `OptimizerWrapper`.
    """

    def __init__(self, inner, momentum: float = 0.99, *, name: str | None = None, **kwargs):
        if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum!r}")
        super().__init__(inner, name=name, **kwargs)
        self.momentum = float(momentum)

    def average(self, weight, average, taken):
        constant = lambda value: ops.convert_to_tensor(value, average.dtype)
        momentum = ops.where(taken == 0, constant(0.0), constant(self.momentum))
        return None, momentum * average + (1 - momentum) * weight

    def get_config(self):
        return {**super().get_config(), "momentum": self.momentum}


@keras.saving.register_keras_serializable(package="xla_lamb")
class StochasticWeightAveraging(Averaging):
    """The mean of the weights after every `period` steps from step `start` on (Izmailov et al. 2018, arXiv:1803.05407); before there is one it is the weights themselves.

    Args:
      inner: the optimizer that takes the steps; use a constant or a cyclic learning rate.
      start: the number of steps before the first weights that count. `start=0, period=1` is the mean of all.
      period: steps from one that counts to the next.
      kwargs: as in `OptimizerWrapper`.
    """

    def __init__(self, inner, start: int = 0, period: int = 10, *, name: str | None = None, **kwargs):
        _check_count("start", start, 0)
        _check_count("period", period, 1)
        super().__init__(inner, name=name, **kwargs)
        self.start, self.period = start, period

    def average(self, weight, average, taken):
        later = taken - self.start
        counted = ops.maximum(later, 0) // self.period  # before this step
        counts = ops.logical_and(later >= 0, later % self.period == 0)
        share = ops.cast(counted, average.dtype) / ops.cast(counted + 1, average.dtype)
        mean = average + (weight - average) * (1 - share)
        return None, ops.where(counts, mean, ops.where(later < 0, weight, average))

    def get_config(self):
        return {**super().get_config(), "start": self.start, "period": self.period}


@keras.saving.register_keras_serializable(package="xla_lamb")
class Lookahead(Averaging):
    """Every `sync_period` steps slow weights go a part of the way to the fast ones, and these begin again from there (Zhang et al. 2019, arXiv:1907.08610), as
    `optax.lookahead`. The averages are the slow weights.

    Args:
      inner: the optimizer of the fast weights. Its moments are kept at the synchronisation.
      sync_period: steps from one synchronisation to the next.
      slow_step_size: part of the way, in (0, 1].
      kwargs: as in `OptimizerWrapper`.
    """

    def __init__(self, inner, sync_period: int = 6, slow_step_size: float = 0.5, *, name: str | None = None, **kwargs):
        _check_count("sync_period", sync_period, 1)
        if isinstance(slow_step_size, bool) or not isinstance(slow_step_size, (int, float)) or not 0 < slow_step_size <= 1:
            raise ValueError(f"slow_step_size must be in (0, 1], not {slow_step_size!r}")
        super().__init__(inner, name=name, **kwargs)
        self.sync_period, self.slow_step_size = sync_period, float(slow_step_size)

    def average(self, weight, average, taken):
        sync = (taken + 1) % self.sync_period == 0
        slow = ops.where(sync, average + self.slow_step_size * (weight - average), average)
        return ops.where(sync, slow, weight), slow

    def get_config(self):
        return {**super().get_config(), "sync_period": self.sync_period, "slow_step_size": self.slow_step_size}


class AveragedWeights(keras.callbacks.Callback):
    """Evaluates and predicts with the averages of an `Averaging` optimizer in the model's variables, during Model.fit too.

    An evaluation that ends with an exception leaves them there: the next one, or the next fit with this callback, begins with putting the weights back.

    Raises:
      TypeError: at the beginning of training or of an evaluation, if the model's optimizer keeps no averages.
      RuntimeError: if somebody else has put the averages into the variables.
    """

    _swapped = None

    def on_train_begin(self, logs=None):
        self._swap_back()
        self._optimizer().check_own_weights()

    def on_test_begin(self, logs=None):
        self._swap_back()
        optimizer = self._optimizer()
        optimizer.use_averaged_weights()
        self._swapped = optimizer

    def on_test_end(self, logs=None):
        self._swap_back()

    on_predict_begin, on_predict_end = on_test_begin, on_test_end

    def _swap_back(self):
        optimizer, self._swapped = self._swapped, None
        if optimizer is not None:
            optimizer.use_own_weights()

    def _optimizer(self):
        optimizer = self.model.optimizer
        for wrapper in optimizer.chain() if isinstance(optimizer, OptimizerWrapper) else [optimizer]:
            if isinstance(wrapper, Averaging):
                return wrapper
        raise TypeError(f"the optimizer {optimizer.name!r} keeps no averages: put MovingAverage, StochasticWeightAveraging or Lookahead around it")


def _check_count(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a number of steps, {least} or more, not {value!r}")
