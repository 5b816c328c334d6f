"""Keras optimizers whose whole step is a few fused calls, in place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Iterable

import keras
import numpy as np
from keras import ops

from xla_lamb import config
from xla_lamb.config import Variant

if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):  # before, Keras counted its steps elsewhere
    raise ImportError(f"xla_lamb.keras needs Keras 3.10 or newer, and this is {keras.__version__}")

BACKENDS = ("tensorflow", "jax")
FLOATS = ("float32", "bfloat16", "float16", "float64")
MOMENTS = ("momentum", "velocity")  # as keras.optimizers.Lamb names them


@keras.saving.register_keras_serializable(package="xla_lamb")
class Lamb(keras.optimizers.Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962) for Keras 3, on the TensorFlow and the JAX backends.

    Takes the arguments of `keras.optimizers.Lamb`, in their order, and has its variables, names and checkpoints. All variables of a model are updated
    by a few custom calls, in place. Variables may be float32, bfloat16, float16 or float64; the arithmetic is float32 at least, and so are the
    moments and the gradient accumulators.

    **What differs from keras.optimizers.Lamb**: Keras decays weights beside the step, ``p *= 1 - learning_rate * weight_decay``, so that the
    trust ratio does not see the decay, and has epsilon = 1e-7. Here the decay is part of the update whose norm the ratio takes, and epsilon is 1e-6,
    as published and as in optax, TensorFlow Addons and NVIDIA's BERT. ``variant="keras"`` computes what keras.optimizers.Lamb computes.

    Args:
      learning_rate: float, `keras.optimizers.schedules.LearningRateSchedule`, or a callable without arguments.
      beta_1, beta_2: decay rates of the first and the second moment, in [0, 1).
      epsilon: added to the root of the second moment. None: the variant's own.
      weight_decay: float. None: the variant's own (none for "optax" and "keras").
      clipnorm, clipvalue: limit of each gradient's norm, or of its values, as in Keras: under tf.distribute on each replica, before the gradients
        are summed.
      global_clipnorm: limit of the norm of all gradients together. It costs no pass that writes gradients, and under tf.distribute
        it is the norm of the aggregated gradients.
      use_ema, ema_momentum, ema_overwrite_frequency: moving average of the weights, as in Keras.
      loss_scale_factor: the loss is multiplied by it and the gradients divided, as in Keras.
      gradient_accumulation_steps: number of batches whose gradients are averaged for one step, as in Keras. The moments and the variables are still
        updated in place, on both backends, and batches between two steps leave them alone. What cannot be in place is the sum of the gradients: the step
        reads it after this batch's gradient was added, and then it becomes zero, so XLA keeps one more buffer of the gradients' size. With
        `clipnorm` or `clipvalue` there is one more for the clipped mean.
      name: of the optimizer.
      variant: the definition of LAMB: a name in `xla_lamb.VARIANTS` or a `xla_lamb.Variant`.
      exclude_from_weight_decay: regular expressions; a variable whose path ("encoder/dense/kernel") matches one in any part does not decay. The method of the
        same name is Keras's.
      exclude_from_layer_adaptation: the same for the trust ratio. None or empty: as the variant says.
      layer_axes: how many leading axes of a variable index independent layers, each with a ratio of its own: a dict from regular expressions to ints.
      eps_root: added to the second moment inside the root.
      nonfinite: what an infinite or NaN gradient does: "propagate" into its variable, or "skip" the whole step, `iterations` included.
      bias_correction, ratio_bounds, norm_bounds: instead of the variant's.
      moment_dtype: type of the moments, "bfloat16" or "float32". None: float32, or float64 for float64 variables.
      implementation: as in `xla_lamb.lamb`.

    Raises:
      NotImplementedError: on another backend.
      ValueError: for a value that cannot be meant; with the value.

    Example:
      >>> import keras, xla_lamb.keras
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> model.compile(xla_lamb.keras.Lamb(1e-3, weight_decay=0.01, exclude_from_weight_decay=["bias", "norm"]), loss="mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = None,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        *,
        variant: str | Variant = "optax",
        exclude_from_weight_decay: Iterable[str] | None = None,
        exclude_from_layer_adaptation: Iterable[str] | None = None,
        layer_axes: dict[str, int] | None = None,
        eps_root: float = 0.0,
        nonfinite: str = "propagate",
        bias_correction: str | None = None,
        ratio_bounds: tuple[float, float] | None = None,
        norm_bounds: tuple[float, float] | None = None,
        moment_dtype: str | None = None,
        implementation: str | None = None,
        **kwargs,
    ):
        if keras.backend.backend() not in BACKENDS:
            raise NotImplementedError(
                f"xla_lamb.keras runs on Keras's {' and '.join(BACKENDS)} backends, and this is {keras.backend.backend()!r}: set the environment variable "
                "KERAS_BACKEND before Keras is imported, or use keras.optimizers.Lamb"
            )
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
            **kwargs,
        )
        self._variant = config.variant(
            Variant(**variant) if isinstance(variant, dict) else variant,
            bias_correction=bias_correction,
            ratio_bounds=ratio_bounds,
            norm_bounds=norm_bounds,
        )
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = self._variant.eps if epsilon is None else epsilon
        self.eps_root = eps_root
        if not callable(learning_rate):
            config.check_hyperparameters(learning_rate=learning_rate)
        config.check_hyperparameters(
            beta_1=beta_1, beta_2=beta_2, epsilon=self.epsilon, eps_root=eps_root, weight_decay=weight_decay
        )
        self.nonfinite = config.check_nonfinite(nonfinite)
        if moment_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"moment_dtype must be 'bfloat16' or 'float32', not {moment_dtype!r}")
        self.moment_dtype = moment_dtype
        self.implementation = implementation
        config.implementation(implementation)
        self._no_decay = _Patterns("exclude_from_weight_decay", exclude_from_weight_decay)
        self._no_adapt = _Patterns("exclude_from_layer_adaptation", exclude_from_layer_adaptation)
        self._layer_axes = tuple((_Patterns("layer_axes", [pattern]), count) for pattern, count in (layer_axes or {}).items())
        # What the method exclude_from_weight_decay was given: patterns, and the paths of variables, which Keras knows by identity.
        self._excluded_names: tuple[str, ...] = ()
        self._excluded_paths: tuple[str, ...] = ()
        # What a configuration says of such variables: their positions, since a loaded model's paths may have lost the model's own name; their
        # paths, if it was taken before there were positions.
        self._restored: tuple[str | int, ...] = ()
        self._recorder = None

    def build(self, variables):
        """Creates the moments of `variables`, named and ordered as those of keras.optimizers.Lamb."""
        if self.built:
            return
        for v in variables:
            if keras.backend.standardize_dtype(v.dtype) not in FLOATS:
                raise TypeError(f"variable {_path(v)} must be {', '.join(FLOATS)}, not {keras.backend.standardize_dtype(v.dtype)}")
            self._layer_axes_of(v)
        super().build(variables)
        self._momentums, self._velocities = [], []
        for v in variables:
            # Keras assigns the gradients of some variables as they are (the scales of float8).
            moments = [None, None] if getattr(v, "overwrite_with_gradient", False) else [self.add_variable_from_reference(v, n) for n in MOMENTS]
            self._momentums.append(moments[0])
            self._velocities.append(moments[1])
        if self._recorder:
            self._recorder.build(self)

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        dtype = keras.backend.standardize_dtype(reference_variable.dtype)
        if name in MOMENTS:
            wanted = self.moment_dtype or ("float64" if dtype == "float64" else "float32")
        elif name == "gradient_accumulator":  # a sum of many in 16 bits would lose the small ones
            wanted = "float64" if dtype == "float64" else "float32"
        else:
            wanted = dtype
        if wanted == dtype:
            return super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        return add_variable_beside(self, reference_variable, name, wanted, initializer)

    # Which variables decay and adapt.

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """As in Keras: leaves out the variables in `var_list`, and those whose name matches a pattern in `var_names`; the name is "kernel" on the JAX backend
        and "encoder/dense/kernel" on TensorFlow. A second call replaces the first. The constructor's argument of this name matches paths on both. Both are kept in
        `get_config`."""
        super().exclude_from_weight_decay(var_list=var_list, var_names=var_names)
        self._excluded_names = tuple(var_names or ())
        self._excluded_paths = tuple(_path(v) for v in var_list or ())
        self._restored = ()

    def _use_weight_decay(self, variable):
        path = _path(variable)
        if self._no_decay.match(path) or path in self._restored:
            return False
        if self.built and self._get_variable_index(variable) in self._restored:
            return False
        # On TensorFlow, Keras hands over its tf.Variable.
        return super()._use_weight_decay(variable.value if _on_tensorflow() and isinstance(variable, keras.Variable) else variable)

    def _adapts(self, variable) -> bool | None:
        """False where the trust ratio is excluded, True where a list was given that excludes others, None where nothing was said."""
        return not self._no_adapt.match(_path(variable)) if self._no_adapt.patterns else None

    def _layer_axes_of(self, variable) -> int:
        for patterns, count in self._layer_axes:
            if patterns.match(_path(variable)):
                if not 0 <= count <= len(variable.shape):
                    raise ValueError(f"layer_axes of {_path(variable)} is {count}, but its shape is {tuple(variable.shape)}")
                return count
        return 0

    # The step.

    def apply(self, grads, trainable_variables=None):
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if _on_tensorflow():
            from xla_lamb.tensorflow import dense_gradient, tf

            grads = list(grads)
            for i, v in zip(range(len(grads)), trainable_variables or self._trainable_variables):
                if isinstance(grads[i], tf.IndexedSlices):  # which Keras cannot clip, divide and accumulate everywhere
                    grads[i] = dense_gradient(grads[i], v)
        super().apply(grads, trainable_variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        _check_shapes(grads, trainable_variables)  # before anything is changed
        # What Keras does here for each variable, for all at once: sum up, clip, step, average.
        steps = self.gradient_accumulation_steps
        update, scale = None, None
        if steps:
            update = ops.equal((self._iterations + 1) % steps, 0)
            scale = 1.0 / steps
            accumulators = [self._accumulated_gradients[self._get_variable_index(v)] for v in trainable_variables]
            for total, g in zip(accumulators, grads):
                total.assign_add(ops.cast(g, total.dtype))
            grads = sums = [_tensor(total) for total in accumulators]
        if self.clipnorm or self.clipvalue:
            if scale:
                grads, scale = [g * scale for g in grads], None
            grads = self._clip_gradients(grads)

        skipped = self._step(grads, trainable_variables, self.learning_rate, scale, None if update is None else ops.logical_not(update))

        if self.nonfinite == "skip":
            # Keras counts every call; a step that did not happen does not count, nor do the batches that were summed up for it.
            missed = skipped if update is None else ops.logical_and(skipped, update)
            self._iterations.assign_sub(ops.cast(missed, self._iterations.dtype) * (steps or 1))
        if steps:
            for total, value in zip(accumulators, sums):
                total.assign(ops.where(update, ops.zeros_like(value), value))
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                overwrite = ops.equal((self.iterations + 1) % self.ema_overwrite_frequency, 0)
                for v, average in zip(self._trainable_variables, self._model_variables_moving_average):
                    if average is not None:
                        v.assign(ops.where(overwrite, _tensor(average), _tensor(v)))

    def update_step(self, gradient, variable, learning_rate):
        self._step([gradient], [variable], learning_rate)

    def apply_aggregated(self, gradients, variables, grad_scale=None, skip=None) -> None:
        """The step alone, for those who have aggregated the gradients themselves, and know already whether and by how much they are clipped, such as
        `xla_lamb.minimize.OptimizerWrapper`: `max_norm` and `nonfinite` are theirs to look at, and of Keras's arguments loss_scale_factor,
        gradient_accumulation_steps and use_ema are not used.

        Args:
          gradients: tensors of the shapes of `variables`, the same on all replicas.
          variables: some of those that the optimizer was built with.
          grad_scale: scalar that the gradients are multiplied by inside the step. None: 1.
          skip: boolean scalar; True leaves every variable as it was, `iterations` included.
        """
        self._check_variables_are_known(variables)
        _check_shapes(gradients, variables)
        if self.clipnorm or self.clipvalue:
            if grad_scale is not None:
                gradients, grad_scale = [g * ops.cast(grad_scale, g.dtype) for g in gradients], None
            gradients = self._clip_gradients(gradients)
        self._step(gradients, variables, self.learning_rate, grad_scale, skip, aggregated=True)
        for v in variables:
            if v.constraint is not None:
                allowed = v.constraint(v)
                v.assign(allowed if skip is None else ops.where(skip, _tensor(v), allowed))
        self._iterations.assign_add(1 if skip is None else ops.cast(ops.logical_not(skip), self._iterations.dtype))

    @property
    def max_norm(self):
        """The limit of the norm of all gradients together, or None."""
        if self.global_clipnorm is self.clipnorm is self.clipvalue is None:
            return self._variant.max_grad_norm
        return self.global_clipnorm if (self.global_clipnorm or 0) > 0 else None  # as in Keras 0 means off

    def _step(self, grads, variables, learning_rate, grad_scale=None, skip=None, aggregated=False):
        """The grouped step of some of the variables; returns whether it was skipped. `aggregated`: as in `apply_aggregated`."""
        indices = [self._get_variable_index(v) for v in variables]
        first, second = ([moments[i] for i in indices] for moments in (self._momentums, self._velocities))
        call = dict(
            variant=dataclasses.replace(self._variant, max_grad_norm=None),
            decays=tuple(bool(self._use_weight_decay(v)) for v in variables),
            adapts=tuple(self._adapts(v) for v in variables),
            layer_axes=tuple(self._layer_axes_of(v) for v in variables),
            nonfinite="propagate" if aggregated else self.nonfinite,
            implementation=self.implementation,
        )
        hyperparameters = dict(
            learning_rate=learning_rate,
            b1=self.beta_1,
            b2=self.beta_2,
            eps=self.epsilon,
            eps_root=self.eps_root,
            weight_decay=self._variant.weight_decay if self.weight_decay is None else self.weight_decay,
            grad_scale=grad_scale,
            max_grad_norm=None if aggregated else self.max_norm,
        )
        step = _tensorflow_step if _on_tensorflow() else _jax_step
        trust, skipped = step(self, grads, variables, first, second, hyperparameters, call, skip, self._recorder is not None, aggregated)
        if self._recorder:
            self._recorder.record(indices, trust, skip)
        return skipped

    # Trust ratios.

    def record_trust_ratios(self) -> bool:
        """From now on keeps |p|, |u| and the trust ratio of every variable's last step, for `trust_ratios`.

        Returns:
          Whether this is new. Then functions that were compiled before have to be compiled again: `model.make_train_function(force=True)`.

        On the JAX backend the table is one more optimizer variable, behind all others, since only such leave a compiled function. It is not saved.
        """
        if self._recorder:
            return False
        self._recorder = _Recorder()
        if self.built:
            self._recorder.build(self)
        return True

    def trust_ratios(self):
        """The table of the last step, an `xla_lamb.trust.TrustRatios`, by the variables' paths.

        Raises:
          RuntimeError: if `record_trust_ratios` was not called before.
        """
        if not self._recorder or self._recorder.variable is None:
            raise RuntimeError("no trust ratios were recorded: call optimizer.record_trust_ratios() before the step")
        return self._recorder.table(self)

    # Saving and loading.

    def _saved_variables(self) -> list:
        table = self._recorder and self._recorder.variable
        return [v for v in self.variables if v is not table]

    def save_own_variables(self, store):
        for i, v in enumerate(self._saved_variables()):
            store[str(i)] = v.numpy()

    def load_own_variables(self, store):
        """Takes the variables of this class or of keras.optimizers.Lamb, whose learning rate may have been a schedule where this one's is not, and the
        other way round.

        Raises:
          ValueError: if they are another model's. Nothing is changed then.
        """
        variables = self._saved_variables()
        sources = sorted(store.keys(), key=int)
        if not self.built or len(sources) <= 2:  # one of both has not begun: Keras says so, and leaves all as it is
            super().load_own_variables(store)
            return
        rates = [i for i, v in enumerate(variables) if v is self._learning_rate]
        if rates and len(sources) == len(variables) - 1:
            del variables[rates[0]]
        elif not rates and len(sources) == len(variables) + 1 and tuple(store["1"].shape) == ():
            sources.remove("1")
        if len(sources) != len(variables):
            raise ValueError(
                f"the saved optimizer has {len(sources)} variables, and {self.name!r} has {len(variables)}: it was saved from another model, or with other settings "
                "of use_ema or gradient_accumulation_steps"
            )
        for v, source in zip(variables, sources):
            if tuple(v.shape) != tuple(store[source].shape):
                raise ValueError(
                    f"the saved optimizer is another model's: variable {source} has shape {tuple(store[source].shape)}, and {v.path} has {tuple(v.shape)}"
                )
        for v, source in zip(variables, sources):
            v.assign(store[source])

    def _excluded_variables(self) -> list[str | int]:
        if not self.built:
            return [*self._excluded_paths, *self._restored]
        keys = getattr(self, "_exclude_from_weight_decay", ())
        return [*(i for i, v in enumerate(self._trainable_variables) if self._var_key(v) in keys), *self._restored]

    def get_config(self):
        variant = self._variant
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "variant": variant.name if config.VARIANTS.get(variant.name) == variant else dataclasses.asdict(variant),
            "exclude_from_weight_decay": self._no_decay.as_list(),
            "exclude_from_layer_adaptation": self._no_adapt.as_list(),
            "layer_axes": {pattern: count for patterns, count in self._layer_axes for pattern in patterns.patterns},
            "eps_root": self.eps_root,
            "nonfinite": self.nonfinite,
            "moment_dtype": self.moment_dtype,
            "implementation": self.implementation,
            "excluded_names": list(self._excluded_names),
            "excluded_variables": self._excluded_variables(),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        names, variables = config.pop("excluded_names", ()), config.pop("excluded_variables", ())
        optimizer = super().from_config(config, custom_objects)
        if names:
            optimizer.exclude_from_weight_decay(var_names=list(names))
        optimizer._restored = tuple(variables)
        return optimizer

    @classmethod
    def from_keras(cls, optimizer: keras.optimizers.Lamb, **changes) -> Lamb:
        """This optimizer in the place of a keras.optimizers.Lamb: its settings and formula, and, if it is built, its variables and their values.

        Args:
          changes: arguments of this class to use instead, for instance variant="optax".

        Example:
          >>> model = keras.saving.load_model("bert.keras")  # doctest: +SKIP
          >>> model.compile(xla_lamb.keras.Lamb.from_keras(model.optimizer), loss=model.loss)  # doctest: +SKIP
        """
        if not isinstance(optimizer, keras.optimizers.Lamb):
            raise TypeError(f"from_keras takes a keras.optimizers.Lamb, not a {type(optimizer).__name__}")
        ours = cls.from_config({**optimizer.get_config(), "variant": "keras", **changes})
        known = optimizer._trainable_variables if optimizer.built else []
        keys = getattr(optimizer, "_exclude_from_weight_decay", ())
        pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        found = [v for v in known if optimizer._var_key(v) in keys]
        if len(found) < len(keys):
            raise ValueError("the optimizer excludes variables that it was not built with: call optimizer.build(model.trainable_variables) first")
        if keys or pattern:
            ours.exclude_from_weight_decay(var_list=found, var_names=[pattern.pattern] if pattern else None)
        if optimizer.built:
            ours.build(known)
            for target, source in zip(ours._saved_variables(), optimizer.variables, strict=True):
                target.assign(source)
        return ours

    def to_keras(self) -> keras.optimizers.Lamb:
        """A keras.optimizers.Lamb that goes on where this one is.

        Raises:
          ValueError: if this one computes what keras.optimizers.Lamb cannot, or excludes by path and is not built yet.
        """
        mine = self.get_config()
        own = {name: mine.pop(name) for name in set(mine) - set(keras.optimizers.Lamb().get_config())}
        neutral = Lamb(variant="keras").get_config()
        carried = ("exclude_from_weight_decay", "excluded_names", "excluded_variables", "moment_dtype", "implementation")
        lost = {name: value for name, value in own.items() if value != neutral[name] and name not in carried}
        if lost:
            raise ValueError("keras.optimizers.Lamb cannot do what this optimizer does: " + ", ".join(f"{k}={v!r}" for k, v in sorted(lost.items())))
        peer = keras.optimizers.Lamb.from_config(mine)
        if self.built:
            peer.exclude_from_weight_decay(var_list=[v for v in self._trainable_variables if not self._use_weight_decay(v)])
            peer.build(self._trainable_variables)
            for target, source in zip(peer.variables, self._saved_variables(), strict=True):
                target.assign(source)
        elif self._no_decay.patterns or self._excluded_variables():
            raise ValueError("exclude_from_weight_decay names variables: call optimizer.build(model.trainable_variables) first")
        elif self._excluded_names:
            peer.exclude_from_weight_decay(var_names=list(self._excluded_names))
        return peer


@keras.saving.register_keras_serializable(package="xla_lamb")
class LAMB(Lamb):
    """`Lamb` with the arguments, the defaults and the numbers of LAMB in TensorFlow Addons and in the TensorFlow Models garden, for Keras 3.

    There, layers are adapted unless a list excludes them, and where `exclude_from_layer_adaptation` is None or empty the list `exclude_from_weight_decay` is
    taken for it. For tf_keras see `xla_lamb.tf_keras.LAMB`.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in `Lamb`.
      weight_decay: inside the trust ratio. TF Models and older TensorFlow Addons call it weight_decay_rate.
      exclude_from_weight_decay, exclude_from_layer_adaptation: as in `Lamb`: regular expressions that are searched in the variable's path.
      name: of the optimizer.
      weight_decay_rate: another name of weight_decay.
      kwargs: more arguments of `Lamb`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-6,
        weight_decay: float | None = None,
        exclude_from_weight_decay: Iterable[str] | None = None,
        exclude_from_layer_adaptation: Iterable[str] | None = None,
        name: str = "LAMB",
        *,
        weight_decay_rate: float | None = None,
        variant: str | Variant = "tf_addons",
        **kwargs,
    ):
        if weight_decay_rate is not None:
            if weight_decay not in (None, weight_decay_rate):
                raise ValueError(f"weight_decay={weight_decay!r} and weight_decay_rate={weight_decay_rate!r} are one setting: give one of them")
            weight_decay = weight_decay_rate
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            name=name,
            variant=variant,
            exclude_from_weight_decay=exclude_from_weight_decay,
            exclude_from_layer_adaptation=exclude_from_layer_adaptation,
            **kwargs,
        )


class _Patterns:
    """Regular expressions as the user gave them, and whether one of them matches a path."""

    def __init__(self, argument: str, patterns: Iterable[str] | None):
        self._given = patterns is not None
        self.match = config.excludes(argument, patterns if self._given else ())
        self.patterns = tuple(patterns or ())

    def as_list(self) -> list[str] | None:
        return list(self.patterns) if self._given else None


class _Recorder:
    """Where the trust ratios of the last step are kept. Apart from the optimizer, since Keras and TensorFlow track what an optimizer holds."""

    def __init__(self):
        self.variable = None
        self._rows = ()

    def build(self, optimizer):
        self._rows = tuple(math.prod(v.shape[: optimizer._layer_axes_of(v)]) for v in optimizer._trainable_variables)
        shape = (sum(self._rows), 3)
        if _on_tensorflow():
            self.variable = keras.Variable(np.zeros(shape, np.float32), trainable=False, name="trust_ratios")
            return
        tracker = optimizer._tracker
        locked = tracker.locked
        tracker.unlock()
        self.variable = optimizer.add_variable(shape, dtype="float32", name="trust_ratios")
        if locked:
            tracker.lock()

    def record(self, indices, trust, skip):
        parts = dict(zip(indices, trust))
        rows = [ops.reshape(ops.cast(parts[i], "float32"), (-1, 3)) if i in parts else ops.zeros((n, 3)) for i, n in enumerate(self._rows)]
        table = ops.concatenate(rows)
        self.variable.assign(table if skip is None else ops.where(skip, _tensor(self.variable), table))

    def table(self, optimizer):
        from xla_lamb.trust import TrustRatios

        variables = optimizer._trainable_variables
        parts = np.split(self.variable.numpy(), np.cumsum(self._rows)[:-1])
        layers = [v.shape[: optimizer._layer_axes_of(v)] for v in variables]
        return TrustRatios.of([_path(v) for v in variables], [rows.reshape(*shape, 3) for rows, shape in zip(parts, layers)])


def _tensorflow_step(optimizer, grads, variables, first, second, hyperparameters, call, skip, stats, aggregated):
    import tensorflow as tf

    from xla_lamb import tensorflow as on_tensorflow

    def run(values, grads, first, second, count, hyperparameters, skip):
        _, told = on_tensorflow.update(values, grads, first, second, count, hyperparameters, skip=skip, stats=stats, **call)
        return told.trust, told.skipped

    unwrap = lambda variables: [v if isinstance(v, tf.Variable) else v.value for v in variables]
    values, grads, first, second = unwrap(variables), list(grads), unwrap(first), unwrap(second)
    hyperparameters = {name: _tensor(value) for name, value in hyperparameters.items()}
    if tf.distribute.has_strategy() and not aggregated:  # gradients are summed over the replicas; then each takes the same step on its own copy
        grads = [g for g, _ in optimizer._all_reduce_sum_gradients(list(zip(grads, values)))]
    return on_tensorflow.on_each_replica(run, values, grads, first, second, _tensor(optimizer.iterations), hyperparameters, skip)


def _jax_step(optimizer, grads, variables, first, second, hyperparameters, call, skip, stats, aggregated):
    from xla_lamb import step as fused

    options = fused.Options(config.implementation(call["implementation"]))
    spec = fused.spec_of(call["variant"], call["decays"], call["adapts"], call["layer_axes"])
    hyper = {name: _tensor(value) for name, value in hyperparameters.items()}
    count = _tensor(optimizer.iterations) + 1
    lists = [[_tensor(x) for x in values] for values in (variables, grads, first, second)]
    taken = fused.take(hyper, count, *lists, spec, call["variant"], skip=skip, nonfinite=call["nonfinite"], options=options, trust=stats)
    for targets, outputs in zip((variables, first, second), taken):
        for target, output in zip(targets, outputs):
            target.assign(output)
    return taken.trust, taken.skipped


def add_variable_beside(optimizer, reference, name: str, dtype: str, initializer="zeros"):
    """An optimizer's variable of the shape and on the devices of another variable, of a type of its own."""
    if _on_tensorflow():
        beside = optimizer._distribution_strategy.extended.colocate_vars_with(reference.value if isinstance(reference, keras.Variable) else reference)
    else:
        beside = contextlib.nullcontext()
    layout = getattr(reference, "_layout", None)
    with beside:
        return optimizer.add_variable(
            shape=reference.shape,
            initializer=initializer,
            dtype=dtype,
            name=f"{_path(reference).replace('/', '_')}_{name}",
            **({} if layout is None else {"layout": layout}),
        )


def _on_tensorflow() -> bool:
    return keras.backend.backend() == "tensorflow"


def _tensor(value):
    """A Python number or None as it is, which keeps its digits; else a tensor."""
    return value if value is None or isinstance(value, (int, float)) else ops.convert_to_tensor(value)


def _path(variable) -> str:
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def _check_shapes(grads, variables) -> None:
    for g, v in zip(grads, variables):
        if tuple(g.shape) != tuple(v.shape):
            raise ValueError(f"the gradient of {_path(v)} has shape {tuple(g.shape)}, the variable {tuple(v.shape)}")
