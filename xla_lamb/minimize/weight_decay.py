"""Decoupled weight decay on chosen variables, for any optimizer."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from xla_lamb import config
from xla_lamb.minimize.gradients import either, path, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper, on_each_replica, translated


@keras.saving.register_keras_serializable(package="xla_lamb")
class DecoupledWeightDecay(OptimizerWrapper):
    """Shrinks chosen variables before each step: ``p *= 1 - learning_rate * weight_decay`` (Loshchilov and Hutter 2019, arXiv:1711.05101), as Keras's AdamW and
    `weight_decay` arguments do. In variables of 16 bits, as everywhere, what is less than half of their precision rounds to no decay: 0.2% a step in bfloat16.

    LAMB as published has its decay inside the trust ratio, which is the argument of `xla_lamb.keras.Lamb`: leave that out if decay is to be decoupled.

    Args:
      inner: the optimizer that takes the step.
      weight_decay: float, or a function of `iterations`, such as a `keras.optimizers.schedules.LearningRateSchedule`.
      variables: which ones, of those that get a gradient: None for all, a list of variables, regular expressions that match a part of a variable's path ("encoder/dense/kernel"), or
        a function of a variable and of `iterations` that returns whether it decays now: a bool, or a boolean scalar tensor that may differ from step to step. The attribute
        `variables_to_decay` may be set anew between steps; a function that was compiled before goes on with the old one.
      kwargs: as in `OptimizerWrapper`.

    Raises:
      TypeError, ValueError: for what is no weight decay or chooses no variables; when the optimizer is built, or `variables_to_decay` is set later, for variables that it does
        not have.

    Example:
      >>> import keras, xla_lamb.minimize
      >>> every_other = lambda variable, iterations: (iterations % 2 == 0) & (len(variable.shape) > 1)
      >>> optimizer = xla_lamb.minimize.DecoupledWeightDecay(keras.optimizers.SGD(0.1), 0.01, variables=every_other)
    """

    def __init__(self, inner, weight_decay: float | Callable, variables: Any = None, *, name: str | None = None, **kwargs):
        if callable(weight_decay):
            _check_arguments("weight_decay", weight_decay, "iterations")
        elif isinstance(weight_decay, bool) or not isinstance(weight_decay, numbers.Real):
            raise TypeError(f"weight_decay must be a number or a function of iterations, not {weight_decay!r}")
        else:
            config.check_hyperparameters(weight_decay=weight_decay)
            weight_decay = float(weight_decay)
        super().__init__(inner, name=name, **kwargs)
        own = getattr(self.chain()[-1], "weight_decay", None)
        if own and variables is None:
            raise ValueError(f"{self.chain()[-1].name} has weight_decay={own!r}, and all variables would decay twice: give it none, or choose variables here that it excludes")
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

    def __setattr__(self, name, value):
        # Keras takes the variables in what is set on an optimizer for its own.
        if name == "variables_to_decay":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def variables_to_decay(self):
        return self._chosen

    @variables_to_decay.setter
    def variables_to_decay(self, chosen):
        if chosen is None:
            decays = lambda variable, iterations: True
        elif callable(chosen):
            _check_arguments("variables", chosen, "a variable", "iterations")
            decays = lambda variable, iterations: translated(chosen)(variable, iterations)
        elif isinstance(chosen, dict):  # of get_config
            decays = lambda variable, iterations: self._get_variable_index(variable) in chosen["positions"] or path(variable) in chosen["paths"]
        elif isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise TypeError(f"variables must be None, a list of variables or of regular expressions, or a function, not {chosen!r}")
        else:
            chosen = list(chosen)
            if all(isinstance(x, keras.Variable) or hasattr(x, "assign") for x in chosen):
                keys = {self._var_key(v) for v in chosen}
                decays = lambda variable, iterations: self._var_key(variable) in keys
            else:
                match = config.excludes("variables", chosen)
                decays = lambda variable, iterations: match(path(variable))
        if self.built:
            self._check_known(chosen)
        object.__setattr__(self, "_chosen", chosen)
        object.__setattr__(self, "_decays", decays)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._check_known(self._chosen)

    def _check_known(self, chosen):
        if isinstance(chosen, dict):
            paths = [path(v) for v in self._trainable_variables]
            unknown = [x for x in chosen["paths"] if x not in paths] + [i for i in chosen["positions"] if i >= len(paths)]
            several = [x for x in chosen["paths"] if paths.count(x) > 1]
            if several:
                raise ValueError(f"the configuration was taken before the optimizer was built, and says which variables decay by name, but several are named {several}")
        elif isinstance(chosen, list) and not isinstance(next(iter(chosen), ""), str):
            unknown = [path(v) for v in chosen if self._var_key(v) not in self._trainable_variables_indices]
        else:
            unknown = []
        if unknown:
            raise ValueError(f"{unknown} are to decay, and are none of the variables that {self.name!r} is built with: {[path(v) for v in self._trainable_variables]}")

    def apply_updates(self, grads_and_vars):
        iterations = value_of(self.iterations)
        rate = translated(self.weight_decay)(iterations) if callable(self.weight_decay) else self.weight_decay
        chosen, stays = [], []
        for v in grads_and_vars.variables:
            decays = self._decays(v, iterations)
            if decays is None:
                raise TypeError(f"the function that chooses variables returned None for {path(v)}: it must return True or False, or a boolean scalar")
            constant = isinstance(decays, (bool, int, np.bool_))
            if not constant or decays:
                chosen.append(v)
                stays.append(either(grads_and_vars.skip, None if constant else ops.logical_not(decays)))

        def decay(variables, stays, learning_rate, rate):
            for v, stay in zip(variables, stays):
                value = value_of(v)
                wide = "float64" if keras.backend.standardize_dtype(value.dtype) == "float64" else "float32"
                # Not times 1 - shrink, which rounds a small decay to the precision of 1.
                shrink = ops.convert_to_tensor(learning_rate, wide) * ops.convert_to_tensor(rate, wide)
                decayed = ops.cast(value, wide)
                decayed = ops.cast(decayed - decayed * shrink, value.dtype)
                v.assign(decayed if stay is None else ops.where(stay, value, decayed))

        if chosen:
            on_each_replica(decay, chosen, stays, self.learning_rate, rate)
        super().apply_updates(grads_and_vars)


def _check_arguments(name, function, *arguments):
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} may be a function of {' and '.join(arguments)}, and {function!r} cannot be called so: {error}") from None
    except ValueError:  # a function that does not tell its signature
        pass
