"""Decoupled weight decay on chosen variables, for any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from xla_lamb import config
from xla_lamb.minimize.gradients import path, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper, on_each_replica


@keras.saving.register_keras_serializable(package="xla_lamb")
class DecoupledWeightDecay(OptimizerWrapper):
    """Shrinks chosen variables before each step: ``p *= 1 - learning_rate * weight_decay`` (Loshchilov and Hutter 2019, arXiv:1711.05101), as Keras's AdamW and
    `weight_decay` arguments do.

    LAMB as published has its decay inside the trust ratio, which is the argument of `xla_lamb.keras.Lamb`: leave that out if decay is to be decoupled.

    Args:
      inner: the optimizer that takes the step.
      weight_decay: float, or a function of `iterations`, such as a `keras.optimizers.schedules.LearningRateSchedule`.
      variables: which ones: None for all that get a gradient, a list of variables, regular expressions that match a part of a variable's path ("encoder/dense/kernel"), or
        a function of a variable and of `iterations` that returns whether it decays now: a bool, or a boolean scalar tensor that may differ from step to step. The attribute
        `variables_to_decay` may be set anew between steps; a function that was compiled before goes on with the old one.
      kwargs: as in `OptimizerWrapper`.

    Example:
      >>> import keras, xla_lamb.minimize
      >>> every_other = lambda variable, iterations: (iterations % 2 == 0) & (len(variable.shape) > 1)
      >>> optimizer = xla_lamb.minimize.DecoupledWeightDecay(keras.optimizers.SGD(0.1), 0.01, variables=every_other)
    """

    def __init__(self, inner, weight_decay: float | Callable, variables: Any = None, *, name: str | None = None, **kwargs):
        if not callable(weight_decay):
            config.check_hyperparameters(weight_decay=weight_decay)
        super().__init__(inner, name=name, **kwargs)
        self.weight_decay = weight_decay
        self.variables_to_decay = variables

    def _given(self):
        """variables_to_decay for a configuration: of single variables, the positions, and their paths if they have none yet."""
        chosen = self._chosen
        if chosen is None or isinstance(chosen, dict):
            return chosen
        if callable(chosen):
            return keras.saving.serialize_keras_object(chosen)
        if all(isinstance(x, str) for x in chosen):
            return chosen
        if not self.built:
            return {"positions": [], "paths": [path(v) for v in chosen]}
        return {"positions": [i for i, v in enumerate(self._trainable_variables) if self._decays(v, None)], "paths": []}

    def get_config(self):
        rate = self.weight_decay
        rate = keras.saving.serialize_keras_object(rate) if callable(rate) else rate
        return {**super().get_config(), "weight_decay": rate, "variables": self._given()}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        for argument in ("weight_decay", "variables"):
            if isinstance(config[argument], dict) and "class_name" in config[argument]:
                config[argument] = keras.saving.deserialize_keras_object(config[argument], custom_objects=custom_objects)
        return super().from_config(config, custom_objects)

    @property
    def variables_to_decay(self):
        return self._chosen

    @variables_to_decay.setter
    def variables_to_decay(self, chosen):
        if chosen is None:
            decays = lambda variable, iterations: True
        elif callable(chosen):
            try:
                inspect.signature(chosen).bind(None, None)
            except TypeError as error:
                raise TypeError(f"a function that chooses variables takes a variable and iterations, and {chosen!r} cannot: {error}") from None
            decays = chosen
        elif not isinstance(chosen, str) and isinstance(chosen, Iterable) and all(not isinstance(x, str) for x in chosen):
            chosen = list(chosen)
            ids = {id(getattr(v, "value", v)) for v in chosen}
            decays = lambda variable, iterations: id(getattr(variable, "value", variable)) in ids
        elif isinstance(chosen, dict):  # of get_config
            decays = lambda variable, iterations: self._get_variable_index(variable) in chosen["positions"] or path(variable) in chosen["paths"]
        else:
            match = config.excludes("variables", chosen)
            chosen = list(chosen)
            decays = lambda variable, iterations: match(path(variable))
        object.__setattr__(self, "_chosen", chosen)
        object.__setattr__(self, "_decays", decays)

    def apply_updates(self, grads_and_vars):
        iterations = value_of(self.iterations)
        rate = self.weight_decay(iterations) if callable(self.weight_decay) else self.weight_decay
        shrink = ops.cast(self.learning_rate, "float32") * ops.cast(rate, "float32")
        if grads_and_vars.skip is not None:
            shrink = ops.where(grads_and_vars.skip, 0.0, shrink)
        chosen = [(v, self._decays(v, iterations)) for v in grads_and_vars.variables]
        chosen = [(v, decays) for v, decays in chosen if not isinstance(decays, (bool, int)) or decays]
        factors = [1 - (shrink if isinstance(decays, (bool, int)) else ops.where(decays, shrink, 0.0)) for _, decays in chosen]

        def decay(variables, factors):
            for v, factor in zip(variables, factors):
                value = value_of(v)
                wide = "float64" if keras.backend.standardize_dtype(value.dtype) == "float64" else "float32"
                v.assign(ops.cast(ops.cast(value, wide) * ops.cast(factor, wide), value.dtype))

        if chosen:
            on_each_replica(decay, [v for v, _ in chosen], factors)
        super().apply_updates(grads_and_vars)
