"""TensorFlow Addons' and TF Models' LAMB for tf_keras, which is Keras 2: their arguments, numbers and checkpoints, one fused call a step."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, Sequence

import tensorflow as tf

try:
    import tf_keras
except ImportError as error:
    raise ImportError("xla_lamb.tf_keras needs the package tf_keras, of TensorFlow's version: pip install tf_keras") from error

import xla_lamb.tensorflow as fused
from xla_lamb import config
from xla_lamb.config import Variant

_Schedule = tf_keras.optimizers.schedules.LearningRateSchedule


@tf_keras.utils.register_keras_serializable(package="xla_lamb")
class LAMB(tf_keras.optimizers.legacy.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962) as `tensorflow_addons.optimizers.LAMB` and `official.modeling.optimization.lamb.LAMB` compute it.

    A Keras 2 optimizer of the legacy kind, as both of those are: for tf_keras's `Model.compile`, with and without `jit_compile`, for
    `minimize` and `apply_gradients`, inside `tf_keras.mixed_precision.LossScaleOptimizer`, and under `tf.distribute.MirroredStrategy`.
    Its slots are "m" and "v" and its hyper-parameters have their names, so that their `tf.train.Checkpoint`s and .h5 files load, and the run
    goes on. A model that was saved with its optimizer by TensorFlow Addons finds this class under the name that it asks for.

    All variables of a device are updated in place by one grouped call. Variables and gradients may be float32, bfloat16, float16 or
    float64; the arithmetic is float32 at least and the moments of 16-bit variables are float32, where TensorFlow Addons' are 16 bits wide;
    a checkpoint of those loads before the first step. tf.IndexedSlices are summed into dense gradients, in float32 at least, also for
    variables with a constraint.

    As with every legacy optimizer, tf.train.Checkpoint and .h5 files hold the state; .keras files and SavedModels hold the configuration alone.
    A TensorFlow strategy around a function with jit_compile=True fails in TensorFlow itself: leave one of them out.

    Args:
      learning_rate, beta_1, beta_2: numbers, scalar tensors, or functions without arguments; learning_rate may be a schedule.
      epsilon: number, added to the root of the second moment. None: `tf_keras.backend.epsilon()`.
      weight_decay: like learning_rate. None: 0.
      exclude_from_weight_decay: regular expressions; a variable does not decay if one of them matches any part of its name. They are tried on
        the name with ":0" at its end, as TensorFlow Addons 0.23 does, and without, as TF Models does; where only one of the two
        matches, a warning says so.
      exclude_from_layer_adaptation: likewise, the variables that no trust ratio scales. None or []: exclude_from_weight_decay.
      name: of the optimizer.
      weight_decay_rate: another name of weight_decay, TF Models'.
      variant: another definition of LAMB: a name in `xla_lamb.VARIANTS` or a `xla_lamb.Variant`; epsilon and weight_decay are those of the
        arguments above, not the variant's own. Only where its `adapt` is "decay_mask" does one exclusion list stand in for the other.
      max_grad_norm: global norm of all gradients above which they are scaled down to it, inside the fused step. None: the variant's own,
        which is none for "tf_addons".
      nonfinite: what an infinite or NaN gradient does: "propagate" into its variable, or "skip" the whole step, `iterations` included.
      implementation: "auto", "fused" or "reference", as for `xla_lamb.lamb`.
      **kwargs: clipnorm, clipvalue, global_clipnorm, decay, lr, gradient_aggregator, gradient_transformers, as in Keras 2.

    Raises:
      ValueError, TypeError: for an argument that cannot be meant; by `apply_gradients` for a variable or gradient that does not fit.

    Example:
      >>> model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(4,))])
      >>> model.compile(xla_lamb.tf_keras.LAMB(1e-3, weight_decay=0.01, exclude_from_weight_decay=["bias"]), loss="mse")
    """

    _HAS_AGGREGATE_GRAD = True

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-6,
        weight_decay: Any = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        name: str = "LAMB",
        *,
        weight_decay_rate: Any = None,
        variant: str | Variant = "tf_addons",
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        implementation: str | None = None,
        **kwargs: Any,
    ):
        if weight_decay is None:
            weight_decay = 0.0 if weight_decay_rate is None else weight_decay_rate
        elif weight_decay_rate is not None and weight_decay_rate is not weight_decay and weight_decay_rate != weight_decay:
            raise ValueError(
                f"weight_decay_rate is another name of weight_decay, but they are {weight_decay_rate!r} and {weight_decay!r}: pass one of them"
            )
        self.variant = config.variant(variant)
        learning_rate = kwargs.get("lr", learning_rate)
        epsilon = tf_keras.backend.epsilon() if epsilon is None else epsilon
        config.check_hyperparameters(
            learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        config.excludes("exclude_from_weight_decay", exclude_from_weight_decay)
        config.excludes("exclude_from_layer_adaptation", exclude_from_layer_adaptation)
        super().__init__(name, **kwargs)
        # Their checkpoints and get_config have these names.
        self._set_hyper("learning_rate", learning_rate)
        self._set_hyper("weight_decay", weight_decay)
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("beta_1", beta_1)
        self._set_hyper("beta_2", beta_2)
        self.epsilon = epsilon
        self.exclude_from_weight_decay = exclude_from_weight_decay
        falls_back = not exclude_from_layer_adaptation and self.variant.adapt == "decay_mask"
        self.exclude_from_layer_adaptation = exclude_from_weight_decay if falls_back else exclude_from_layer_adaptation or None
        self.max_grad_norm = max_grad_norm
        self.nonfinite = config.check_nonfinite(nonfinite)
        self.implementation = None if implementation is None else config.implementation(implementation)

    # The state: slots and hyper-parameters ------------------------------------------------------------------------------------

    def _create_slots(self, var_list):
        # All of "m", then all of "v": the order of the weights in an .h5 file.
        for slot in ("m", "v"):
            for variable in var_list:
                self.add_slot(variable, slot)

    def add_slot(self, var, slot_name, initializer="zeros", shape=None):
        """The slot variable of `var`, made if there is none; float32 for a 16-bit variable, whatever a checkpoint holds."""
        fused._check_float("variable", var.name, var.dtype)
        if var.dtype.base_dtype in (tf.float32, tf.float64):
            return super().add_slot(var, slot_name, initializer, shape)

        def create(next_creator, **kwargs):
            initial_value = kwargs["initial_value"]

            def wide():
                value = initial_value() if callable(initial_value) else initial_value
                if not hasattr(value, "wrapped_value"):
                    return tf.cast(value, tf.float32)
                value.wrapped_value = tf.cast(value.wrapped_value, tf.float32)  # from a checkpoint, which it also names
                return value

            return next_creator(**dict(kwargs, dtype=tf.float32, initial_value=wide))

        with tf.variable_creator_scope(create):
            return super().add_slot(var, slot_name, initializer, shape)

    def _lookup_dependency(self, name, *args, **kwargs):
        # TF Models' checkpoints call it by its other name; made now, it gets the value that waits for it.
        if name == "weight_decay_rate":
            self._create_hypers()
            name = "weight_decay"
        return super()._lookup_dependency(name, *args, **kwargs)

    def get_config(self):
        """TensorFlow Addons' configuration, and after it those options of ours that are not at their defaults."""
        listed = dict(super().get_config())
        for name in ("learning_rate", "weight_decay", "decay", "beta_1", "beta_2"):
            listed[name] = self._serialize_hyperparameter(name)
        for name in ("epsilon", "exclude_from_weight_decay", "exclude_from_layer_adaptation"):
            listed[name] = getattr(self, name)
        known = config.VARIANTS.get(self.variant.name) == self.variant
        ours = dict(
            variant=self.variant.name if known else dataclasses.asdict(self.variant),
            max_grad_norm=self.max_grad_norm,
            nonfinite=self.nonfinite,
            implementation=self.implementation,
        )
        defaults = dict(variant="tf_addons", max_grad_norm=None, nonfinite="propagate", implementation=None)
        return {**listed, **{name: value for name, value in ours.items() if value != defaults[name]}}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """An optimizer from what `get_config` returned, here, in TensorFlow Addons or in TF Models."""
        config = dict(config)
        for name in ("weight_decay", "weight_decay_rate"):
            if isinstance(config.get(name), dict):
                config[name] = tf_keras.optimizers.schedules.deserialize(config[name], custom_objects=custom_objects)
        if isinstance(config.get("variant"), dict):
            config["variant"] = Variant(**config["variant"])
        return super().from_config(config, custom_objects)

    # The step ------------------------------------------------------------------------------------------------------------------

    def _prepare(self, var_list):
        """The hyper-parameters of this step, which the base class hands on as `apply_state`."""
        dtype = tf.float64 if all(v.dtype.base_dtype == tf.float64 for v in var_list) else tf.float32  # what a schedule's step comes in
        weight_decay = self._get_hyper("weight_decay")
        if isinstance(weight_decay, _Schedule):
            weight_decay = weight_decay(tf.cast(self.iterations, dtype))
        return dict(
            learning_rate=self._decayed_lr(dtype),
            b1=self._get_hyper("beta_1", tf.float64),
            b2=self._get_hyper("beta_2", tf.float64),
            eps=self.epsilon,
            eps_root=0.0,
            weight_decay=tf.cast(weight_decay, tf.float64),
            grad_scale=None,
            max_grad_norm=self.max_grad_norm,
        )

    @tf.autograph.experimental.do_not_convert
    def _distributed_apply(self, distribution, grads_and_vars, apply_state, name):
        """One grouped call for each device that holds variables; with MirroredStrategy, for each replica."""
        groups, seen = {}, set()
        for gradient, variable in grads_and_vars:
            if id(variable) in seen:
                raise ValueError(f"{variable.name} was given twice: add its gradients up")
            seen.add(id(variable))
            devices = tuple(v.device for v in distribution.experimental_local_results(variable))
            groups.setdefault(devices, []).append((gradient, variable))
        max_grad_norm = self.variant.max_grad_norm if self.max_grad_norm is None else self.max_grad_norm
        if len(groups) > 1 and (max_grad_norm is not None or self.nonfinite == "skip"):
            raise ValueError(
                f"max_grad_norm={max_grad_norm} and nonfinite={self.nonfinite!r} need all variables on one device, but they are on "
                f"{' and '.join(', '.join(devices) for devices in groups)}"
            )
        skipped = []
        with tf.name_scope(name or self._name):
            for pairs in groups.values():
                gradients, variables = zip(*pairs)
                step = functools.partial(self._step, distribution, variables, apply_state)
                skipped += tf.nest.flatten(distribution.extended.update(variables[0], step, args=(gradients,), group=False))
            with tf.control_dependencies(skipped):
                return self.iterations.assign_add(1 - tf.cast(skipped[0], tf.int64), read_value=False)

    def _step(self, distribution, variables, hyperparameters, first, gradients):
        """Updates the variables that are on the device of `first`, one of them; tells whether it skipped the step."""

        def local(variable):
            return next(v for v in distribution.experimental_local_results(variable) if v.device == first.device)

        with tf.device(first.device):
            here = [local(v) for v in variables]
            _, told = fused.update(
                here,
                gradients,
                [local(self.get_slot(v, "m")) for v in variables],
                [local(self.get_slot(v, "v")) for v in variables],
                self.iterations,
                hyperparameters,
                variant=self.variant,
                decays=self._included("exclude_from_weight_decay", variables, True),
                adapts=self._included("exclude_from_layer_adaptation", variables, None),
                layer_axes=(0,) * len(here),
                nonfinite=self.nonfinite,
                implementation=self.implementation,
            )
            for v in here:
                if v.constraint is not None:
                    v.assign(tf.where(told.skipped, v, v.constraint(v)))
            return told.skipped

    def _included(self, argument, variables, default):
        """A bool for each variable, that it is not excluded; `default` where there is no list."""
        excluded = config.excludes(argument, getattr(self, argument))
        if excluded is None:
            return (default,) * len(variables)
        included = []
        for v in variables:
            numbered, short = v.name, v.name.split(":")[0]
            if excluded(numbered) != excluded(short):
                warnings.warn(
                    f"{argument} excludes {short!r}, though a pattern matches only {numbered if excluded(numbered) else short!r}: "
                    f"TensorFlow Addons 0.23 would look at {numbered!r}, TF Models at {short!r}",
                    stacklevel=2,
                )
            included.append(not (excluded(numbered) or excluded(short)))
        return tuple(included)


# TensorFlow Addons and TF Models register theirs so; a model that was saved with one of them asks for it by this name.
tf_keras.utils.get_custom_objects().setdefault("Addons>LAMB", LAMB)
