"""The steps of `minimize`, and the optimizer around an optimizer in which each of them can be replaced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from xla_lamb.keras.optimizer import BACKENDS, add_variable_beside
from xla_lamb.minimize.gradients import GradsAndVars, checked, dense, path, set_steps_done, steps_done, value_of, without_missing

CONTRACTS = {
    "transform_loss": "it gets the loss of its replica, under the tape, and returns the loss to differentiate",
    "get_gradients": "it gets the transformed loss, the variables and the tape, and returns (gradient, variable) pairs",
    "transform_unaggregated_gradients": "it gets the (gradient, variable) pairs of its replica alone, and returns as many for the same variables",
    "aggregate_gradients": "it gets the (gradient, variable) pairs of its replica, and returns those of all replicas together, the same on each",
    "transform_gradients": "it gets the aggregated (gradient, variable) pairs, the same on all replicas, and returns as many for the same variables",
}
# The number of steps that are behind a loss and the gradients of each kind.
_SCALED, _COMPUTED, _TRANSFORMED, _AGGREGATED = 1, 2, 3, 5


class _Local(threading.local):  # replicas are threads
    def __init__(self):
        # The optimizers whose `scale_loss` was called, and which get the gradients of that loss next.
        self.owed = weakref.WeakSet()
        # What the steps that are running were given.
        self.given = []
        # Whether a guest gets gradients that are summed up already.
        self.aggregated = False
        # What AutoGraph was doing when the outermost call came; None between calls.
        self.autograph = None


_local = _Local()


def _without_autograph(method):
    """In a tf.function AutoGraph would take ten seconds to translate all that is called here; of use is the translation of the user's functions alone."""
    if keras.backend.backend() != "tensorflow":
        return method
    import tensorflow as tf

    untranslated = tf.autograph.experimental.do_not_convert(method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if _local.autograph is not None:
            return method(self, *args, **kwargs)
        _local.autograph = tf.__internal__.autograph.control_status_ctx()
        try:
            return untranslated(self, *args, **kwargs)
        finally:
            _local.autograph = None

    call.autograph_info__ = {}  # how AutoGraph marks what it has done with
    return call


def translated(function):
    """A user's function, as AutoGraph would have called it."""
    if _local.autograph is None or _local.autograph.status.name != "ENABLED":
        return function
    import tensorflow as tf

    return tf.__internal__.autograph.tf_convert(function, _local.autograph)


@keras.saving.register_keras_serializable(package="xla_lamb")
class OptimizerWrapper(keras.optimizers.Optimizer):
    """`inner`, whose `minimize` goes in steps that can each be replaced: by a subclass that overrides a method, or by a function given here.

    ======================================  ====================================================================================================
    step                                    contract
    ======================================  ====================================================================================================
    1. transform_loss(loss)                 the replica's loss, under the tape -> the loss to differentiate
    2. get_gradients(loss, variables, tape) -> (gradient, variable) pairs; the gradients may be of another shape if step 3 gives them their variables'
    3. transform_unaggregated_gradients     pairs of this replica -> as many, for the same variables
    4. aggregate_gradients                  pairs of this replica -> pairs of all replicas together, the same on each; by default their sum
    5. transform_gradients                  aggregated pairs -> as many, for the same variables
    6. apply_updates                        changes the variables, and nothing else looks at the gradients any more
    ======================================  ====================================================================================================

    All are called in replica context, once for each replica. Steps 3 to 6 take one argument, `grads_and_vars`, a `GradsAndVars`: a sequence of pairs that
    may have been multiplied by a scalar, which the fused step then does on the way. Iterating over it shows the multiplied gradients, and whoever returns it
    as it came, or a list of pairs, is right in both cases. Pairs without a gradient are left out after step 2, with a warning, and tf.IndexedSlices are made dense.

    Each method of this class hands over to `inner`, if that is an OptimizerWrapper too, and else does what Keras does. On the way to the gradients the outer wrapper is
    first (the loss takes the opposite way), so an override changes what it was given and then calls the method of `super()`.

    Before step 6 `skip_updates` says whether the step is to change nothing.

    In a tf.function AutoGraph translates the loss function and the functions given here, so that these may say ``if tensor:``; an overridden method uses tf.cond.

    Args:
      inner: `xla_lamb.keras.Lamb`, an OptimizerWrapper, or any other Keras 3 optimizer. Its clipnorm, clipvalue and global_clipnorm are those of
        the aggregated gradients.
      transform_loss, transform_unaggregated_gradients, transform_gradients: a function of one argument, or several in the order in which they are to be
        applied, before those of `inner`.
      aggregate_gradients: "sum", "mean", or a function of one argument.
      name: of the optimizer.

    Raises:
      TypeError, ValueError: for functions that cannot be called so, and for wrappers in an order that makes no sense; with what to do.

    Example:
      >>> import tensorflow as tf, xla_lamb.keras, xla_lamb.minimize
      >>> def halved(grads_and_vars):
      ...     return [(g / 2, v) for g, v in grads_and_vars]
      >>> optimizer = xla_lamb.minimize.OptimizerWrapper(xla_lamb.keras.Lamb(0.1), transform_gradients=halved)
      >>> w = tf.Variable([1.0, 2.0])
      >>> iterations = optimizer.minimize(lambda: tf.reduce_sum(w**2), [w])
    """

    # Wrappers that may be only once around an optimizer.
    once = False

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        *,
        transform_loss: Callable | Iterable[Callable] | None = None,
        transform_unaggregated_gradients: Callable | Iterable[Callable] | None = None,
        aggregate_gradients: str | Callable | None = None,
        transform_gradients: Callable | Iterable[Callable] | None = None,
        name: str | None = None,
    ):
        if keras.backend.backend() not in BACKENDS:
            raise NotImplementedError(f"xla_lamb.minimize runs on Keras's {' and '.join(BACKENDS)} backends, and this is {keras.backend.backend()!r}")
        _check_inner(inner)
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        del self._iterations, self._learning_rate  # those of `inner` are used
        object.__setattr__(self, "_iterations", inner._iterations)  # without tracking it a second time
        self.inner = inner
        if aggregate_gradients is not None and (not isinstance(aggregate_gradients, str) or aggregate_gradients not in ("sum", "mean")):
            aggregate_gradients = _function("aggregate_gradients", aggregate_gradients)
        self._functions = {
            "transform_loss": _functions("transform_loss", transform_loss),
            "transform_unaggregated_gradients": _functions("transform_unaggregated_gradients", transform_unaggregated_gradients),
            "aggregate_gradients": aggregate_gradients,
            "transform_gradients": _functions("transform_gradients", transform_gradients),
        }
        self._check_order()
        if not isinstance(inner, OptimizerWrapper):
            _tell_of_aggregation(inner)

    # The steps.

    def transform_loss(self, loss):
        """Step 1: the replica's loss -> the loss to differentiate."""
        if isinstance(self.inner, OptimizerWrapper):
            loss = self.inner.transform_loss(loss)
        for function in self._functions["transform_loss"]:
            loss = _checked_loss(function, translated(function)(loss))
        return loss

    def get_gradients(self, loss, variables, tape):
        """Step 2: the loss, the variables and the tape that recorded it -> (gradient, variable) pairs."""
        if isinstance(self.inner, OptimizerWrapper):
            return self.inner.get_gradients(loss, variables, tape)
        return list(zip(tape.gradient(loss, variables), variables))

    def transform_unaggregated_gradients(self, grads_and_vars):
        """Step 3: the pairs of this replica -> as many."""
        return self._transform("transform_unaggregated_gradients", grads_and_vars)

    def aggregate_gradients(self, grads_and_vars):
        """Step 4: the pairs of this replica -> those of all replicas together."""
        grads_and_vars = self._as_given("aggregate_gradients", grads_and_vars)
        how = self._functions["aggregate_gradients"]
        if callable(how):
            return checked(how, "aggregate_gradients", translated(how)(grads_and_vars), grads_and_vars)
        if how is None and isinstance(self.inner, OptimizerWrapper):
            return self.inner._run(grads_and_vars, "aggregate_gradients")
        return _reduced(grads_and_vars, how or "sum")

    def transform_gradients(self, grads_and_vars):
        """Step 5: aggregated pairs -> as many."""
        return self._transform("transform_gradients", grads_and_vars)

    def skip_updates(self, grads_and_vars):
        """Before step 6: a boolean scalar, whether the step is to change nothing, or None if that never happens. An override joins its own answer with that of
        `super()` by `keras.ops.logical_or`."""
        if isinstance(self.inner, OptimizerWrapper):
            return self.inner.skip_updates(grads_and_vars)
        if getattr(self.inner, "nonfinite", None) == "skip":
            return ops.logical_not(ops.logical_and(grads_and_vars.finite, ops.isfinite(grads_and_vars.global_norm)))
        return None

    def apply_updates(self, grads_and_vars):
        """Step 6: changes the variables. `grads_and_vars.skip` is what `skip_updates` said: where it is True nothing may change."""
        grads_and_vars = self._as_given("apply_updates", grads_and_vars)
        if isinstance(self.inner, OptimizerWrapper):
            with _giving(grads_and_vars):
                self.inner.apply_updates(grads_and_vars)
        elif hasattr(self.inner, "apply_aggregated"):
            if self.inner.max_norm is not None:
                grads_and_vars = grads_and_vars.clipped(self.inner.max_norm)
            self.inner.apply_aggregated(grads_and_vars.raw, grads_and_vars.variables, grads_and_vars.scale, grads_and_vars.skip)
        else:
            self._apply_guest(grads_and_vars)

    def _transform(self, step, grads_and_vars):
        grads_and_vars = self._as_given(step, grads_and_vars)
        for function in self._functions[step]:
            grads_and_vars = checked(function, step, translated(function)(grads_and_vars), grads_and_vars)
        return self.inner._run(grads_and_vars, step) if isinstance(self.inner, OptimizerWrapper) else grads_and_vars

    def _as_given(self, step, grads_and_vars) -> GradsAndVars:
        """What an override hands to the method of super(), which may be a list of pairs; that, as what a step returns, is for the same variables and keeps `skip`."""
        if isinstance(grads_and_vars, GradsAndVars):
            return grads_and_vars
        pairs = _pairs(grads_and_vars)
        return checked(self, step, pairs, _local.given[-1] if _local.given else GradsAndVars(pairs))

    def _apply_guest(self, grads_and_vars):
        grads, variables = [g for g, _ in grads_and_vars], grads_and_vars.variables
        skip = grads_and_vars.skip
        state = [*variables, *self.inner.variables]
        before = None if skip is None else [value_of(v) for v in state]
        _local.aggregated = True
        try:
            self.inner.apply(grads, variables)
        finally:
            _local.aggregated = False
        if skip is not None:

            def restore(state, before, skip):
                for v, value in zip(state, before):
                    v.assign(ops.where(skip, value, value_of(v)))

            on_each_replica(restore, state, before, skip)

    # The ways through them.

    @_without_autograph
    def minimize(self, loss, variables, tape=None):
        """All steps: differentiates the loss and updates the variables.

        Args:
          loss: a function without arguments, or, with `tape`, a tensor that the tape recorded. A loss that is no scalar counts with its sum, as it does with
            tf.GradientTape.
          variables: list of tf.Variables or Keras variables.
          tape: tf.GradientTape, still recording or not; a persistent one stays usable.

        Returns:
          `iterations`.

        Raises:
          NotImplementedError: on another backend than TensorFlow: there use Model.fit, or `stateless_apply` with gradients of `scale_loss(loss)`.
          TypeError, ValueError: for a loss, tape or variables that cannot be differentiated, before anything was changed.
        """
        return self.apply_gradients(self.compute_gradients(loss, variables, tape))

    @_without_autograph
    def compute_gradients(self, loss, variables, tape=None, aggregate=False):
        """Steps 1 to 3, and with `aggregate` 4 and 5: what `apply_gradients` takes. Arguments and errors as in `minimize`.

        Returns:
          GradsAndVars. It knows which steps are behind it, and so do its gradients; changed ones do not, so hand gradients that were aggregated here and then changed to
          ``apply_gradients(..., aggregate=False)``.
        """
        if keras.backend.backend() != "tensorflow":
            raise NotImplementedError(
                f"a tape is TensorFlow's, and this is Keras's {keras.backend.backend()!r} backend: use Model.fit, or stateless_apply with the gradients of scale_loss(loss)"
            )
        variables = _variables(variables)
        self._build(variables)
        _local.owed.discard(self)
        tape, loss = self._recorded(loss, tape)
        pairs = checked(self, "get_gradients", self.get_gradients(loss, variables, tape), [(None, v) for v in variables])
        grads_and_vars = dense(without_missing(pairs))
        grads_and_vars = self._run(grads_and_vars, "transform_unaggregated_gradients")
        grads_and_vars.mark(self, _TRANSFORMED)
        if aggregate:
            grads_and_vars = self._run(grads_and_vars, "aggregate_gradients", "transform_gradients")
            grads_and_vars.mark(self, _AGGREGATED)
        return grads_and_vars

    @_without_autograph
    def apply_gradients(self, grads_and_vars, aggregate=True):
        """Steps 4 to 6, or, without `aggregate`, 6 alone. Of what `compute_gradients` gave only the steps that are not behind it. After Keras's
        `scale_loss`, which is step 1, whoever differentiates the loss hands over what step 2 gives: then also step 3.

        Args:
          grads_and_vars: from `compute_gradients`, or (gradient, variable) pairs.
          aggregate: False for gradients that are already the same on all replicas, and transformed.

        Returns:
          `iterations`.

        Raises:
          ValueError: without `aggregate`, if the gradients are known not to have been through steps 4 and 5, and a wrapper needs these.
        """
        owed = self in _local.owed
        _local.owed.discard(self)
        if not isinstance(grads_and_vars, GradsAndVars):
            grads_and_vars = GradsAndVars(_pairs(grads_and_vars))
        self._build(_variables(grads_and_vars.variables))
        done = grads_and_vars.done(self)
        if not done:
            scale, skip = grads_and_vars.scale, grads_and_vars.skip
            grads_and_vars = dense(without_missing(list(zip(grads_and_vars.raw, grads_and_vars.variables))), scale).skipped(skip)
        if not done and owed:
            done = _COMPUTED
        self.check_origin(done, aggregate)
        if not aggregate:
            done = _AGGREGATED
        elif not done:
            done = _TRANSFORMED
        if done < _TRANSFORMED:
            grads_and_vars = self._run(grads_and_vars, "transform_unaggregated_gradients")
        if done < _AGGREGATED:
            grads_and_vars = self._run(grads_and_vars, "aggregate_gradients", "transform_gradients")
        grads_and_vars = checked(self, "apply_updates", grads_and_vars, grads_and_vars)  # shapes, before anything is changed
        grads_and_vars = grads_and_vars.skipped(self.skip_updates(grads_and_vars))
        with _giving(grads_and_vars):
            self.apply_updates(grads_and_vars)
        return self.iterations

    def _run(self, grads_and_vars, *steps):
        for step in steps:
            with _giving(grads_and_vars):
                grads_and_vars = checked(self, step, getattr(self, step)(grads_and_vars), grads_and_vars)
        return grads_and_vars

    def _recorded(self, loss, tape):
        """(tape, transformed loss)"""
        import tensorflow as tf

        if tape is None and not callable(loss):
            raise ValueError(
                "a loss that is a tensor cannot be differentiated without the tape that recorded it: pass tape=, or a function without arguments that computes the loss"
            )
        if tape is not None:
            if not isinstance(tape, tf.GradientTape):
                raise TypeError(f"tape must be a tf.GradientTape, not {tape!r}")
            if tape._tape is None and not callable(loss):
                raise ValueError(
                    "the tape recorded nothing, or was used already: compute the loss inside `with tf.GradientTape() as tape:`, and use a tape once, or make it persistent"
                )
        tape = tape or tf.GradientTape()
        with contextlib.nullcontext() if tape._recording else tape:
            loss = _checked_loss("the loss function", translated(loss)()) if callable(loss) else loss
            if not any(tf.is_tensor(part) or isinstance(part, keras.Variable) for part in tf.nest.flatten(loss)):
                raise TypeError(f"the loss must be a tensor that was computed from the variables, not {loss!r}")
            if steps_done(loss, self):  # by scale_loss
                return tape, loss
            return tape, _checked_loss(self, self.transform_loss(loss))

    # What an order of wrappers has to keep.

    def chain(self) -> list:
        """The optimizers from this one to the innermost."""
        return [self, *(self.inner.chain() if isinstance(self.inner, OptimizerWrapper) else [self.inner])]

    def customises(self, step: str) -> bool:
        """Whether this wrapper itself, not `inner`, does anything in a step."""
        return getattr(type(self), step) is not getattr(OptimizerWrapper, step) or bool(self._functions.get(step))

    def _check_order(self):
        inside = [w for w in self.chain()[1:] if isinstance(w, OptimizerWrapper)]
        me = type(self).__name__
        if self.once and any(isinstance(w, type(self)) for w in inside):
            raise ValueError(f"there is a {me} inside this {me} already: one is enough")
        if self.customises("aggregate_gradients"):
            for w in inside:
                if w.customises("aggregate_gradients"):
                    raise ValueError(f"this {me} aggregates gradients, and so does the {type(w).__name__} inside: give one of them the way to do it")
        for w in inside:
            why = w.objects_to(self)
            if why:
                raise ValueError(f"a {me} cannot be around a {type(w).__name__}: {why}")

    def objects_to(self, outer: OptimizerWrapper) -> str | None:
        """Why `outer` must not be around this wrapper, or None if it may."""
        return None

    def check_origin(self, done: int, aggregate: bool) -> None:
        """Raises ValueError if `apply_gradients` cannot take gradients of this origin.

        Args:
          done: number of steps known to be behind them: 0 if nothing is known, 2 for those of a loss of `scale_loss`, 3 or 5 for those of `compute_gradients`.
          aggregate: that of `apply_gradients`.
        """
        if isinstance(self.inner, OptimizerWrapper):
            self.inner.check_origin(done, aggregate)

    # What Keras asks of an optimizer.

    def build(self, variables):
        """Builds `inner` and the wrapper's own variables."""
        if self.built:
            return
        for v in variables:
            if getattr(v, "overwrite_with_gradient", False):
                raise NotImplementedError(f"{path(v)} takes its gradient as its value, as float8 training does, which xla_lamb.minimize cannot do")
        if not self.inner.built:
            self.inner.build(variables)
        keras.optimizers.Optimizer.build(self, variables)

    def add_slot(self, variable, name: str, copied: bool = False):
        """A variable of the shape of `variable` beside it, of float32 at least: zeros, or with `copied` its value."""
        dtype = "float64" if keras.backend.standardize_dtype(variable.dtype) == "float64" else "float32"
        return add_variable_beside(self, variable, name, dtype, _value_of(variable) if copied else "zeros")

    def _build(self, variables):
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._check_variables_are_known(variables)

    @property
    def own_variables(self) -> list:
        """Those of this wrapper alone."""
        # Keras's iterations and learning rate are the first two. To take them out of the list is no way: tf.train.Checkpoint then refuses to save it.
        return list(self._variables)[2:]

    @property
    def variables(self):
        return [*self.own_variables, *self.inner.variables]

    # On JAX: `apply` on the values of variables. Not that of other base classes.
    stateless_apply = keras.optimizers.Optimizer.stateless_apply

    @_without_autograph
    def scale_loss(self, loss):
        """Keras's name of step 1, for those who differentiate the loss themselves and hand the gradients to `apply_gradients`, as Model.fit does."""
        loss = _checked_loss(self, self.transform_loss(loss))
        if keras.backend.backend() == "tensorflow":
            set_steps_done(loss, self, _SCALED)  # for those who hand it to minimize
        _local.owed.add(self)
        return loss

    @_without_autograph
    def apply(self, grads, trainable_variables=None):
        """Keras's `apply_gradients` with two lists."""
        if trainable_variables is None:
            if not self.built:
                raise ValueError("apply needs trainable_variables, or an optimizer that was built: call optimizer.build(variables) first")
            trainable_variables = self._trainable_variables
        grads, trainable_variables = list(grads), list(trainable_variables)
        if len(grads) != len(trainable_variables):
            raise ValueError(f"there are {len(trainable_variables)} variables, but {len(grads)} gradients")
        if grads:
            self.apply_gradients(zip(grads, trainable_variables))

    @property
    def iterations(self):
        return self.inner.iterations

    @property
    def learning_rate(self):
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner.learning_rate = learning_rate

    def finalize_variable_values(self, var_list):
        self.inner.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self.inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    @property
    def loss_scale_factor(self):
        return 1.0  # None would keep TensorFlow's tracking of attributes from calling the setter

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor):
        if hasattr(self, "inner"):  # Keras's LossScaleOptimizer sets it
            raise ValueError(
                "a keras.optimizers.LossScaleOptimizer, which Model.compile puts around other optimizers of a mixed_float16 model, goes past transform_loss and other steps: "
                "put an xla_lamb.minimize.LossScaling around all other wrappers in its place, or compile with auto_scale_loss=False"
            )

    def set_weights(self, weights):
        """Sets `variables`, those of `inner` included. Nothing is changed if they do not fit."""
        weights = list(weights)
        shapes, wanted = [tuple(x.shape) for x in weights], [tuple(v.shape) for v in self.variables]
        if shapes != wanted:
            raise ValueError(f"weights of {self.name!r} must have the shapes {wanted} of its variables, not {shapes}")
        for v, value in zip(self.variables, weights):
            v.assign(value)

    # `inner` is saved beside the wrapper, as Keras saves what an object holds.

    def _nest(self) -> list[str]:
        """What the saved state has to fit: the wrappers from this one to the innermost, and the shapes that the optimizer has. Scalars aside, which come and go with a schedule."""
        *wrappers, optimizer = self.chain()
        return [*(type(w).__name__ for w in wrappers), str([tuple(v.shape) for v in optimizer.variables if len(v.shape)])]

    def save_own_variables(self, store):
        store["nest"] = np.frombuffer("\n".join(self._nest()).encode(), np.uint8)
        for i, v in enumerate(self.own_variables):
            store[str(i)] = v.numpy()

    def load_own_variables(self, store):
        """Raises ValueError if the variables are those of other wrappers or of another model. Nothing is changed then. As with other optimizers, a file without any state
        and an optimizer that is not built give a warning only."""
        keys = set(store.keys())
        if not keys or not self.built:
            why = "the file has none" if self.built else "it was not built: call optimizer.build(model.trainable_variables) before"
            warnings.warn(f"the state of the optimizer {self.name!r} is not loaded, since {why}", stacklevel=2)
            return
        nest = bytes(np.asarray(store["nest"])).decode().split("\n") if "nest" in keys else ["an optimizer without wrappers"]
        saved = [store[key] for key in sorted(keys - {"nest"}, key=int)]
        shapes = [tuple(x.shape) for x in saved]
        wanted = [tuple(v.shape) for v in self.own_variables]
        if nest != self._nest() or shapes != wanted:
            raise ValueError(
                f"the saved state of {self.name!r} is that of other wrappers or of another model: {nest} with variables of the shapes {shapes}; "
                f"and here they are {self._nest()} with {wanted}"
            )
        for v, value in zip(self.own_variables, saved):
            v.assign(value)

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        functions = {step: how if how is None or isinstance(how, str) else serialize(how) for step, how in self._functions.items() if how}
        return {"inner": serialize(self.inner), "name": self.name, **functions}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        load = lambda value: keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
        nested = ("inner", *CONTRACTS)
        return cls(**{name: load(value) if name in nested and value not in ("sum", "mean") else value for name, value in config.items()})


def on_each_replica(run, variables, *operands):
    """``run(variables, *operands)``; under tf.distribute once for each replica, with tf.Variables of its own. For updates of lists of variables."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from xla_lamb import tensorflow as on_tensorflow

        if tf.distribute.has_strategy():
            unwrap = lambda x: x.value if isinstance(x, keras.Variable) else x
            return on_tensorflow.on_each_replica(run, *tf.nest.map_structure(unwrap, [list(variables), *operands]))
    return run(variables, *operands)


def _value_of(variable):
    """An initializer with the value that a variable has now, also where a function is being traced that builds the optimizer."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():
            value = ops.convert_to_numpy(variable)
    else:
        value = ops.convert_to_numpy(variable)
    return lambda shape, dtype: ops.convert_to_tensor(value, dtype)


def _tell_of_aggregation(optimizer):
    """A Keras optimizer sums the gradients over the replicas in its apply: inside ours they are already."""
    original = getattr(optimizer, "_all_reduce_sum_gradients", None)
    if original is None:  # not on TensorFlow
        return
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs if _local.aggregated else original(pairs)


@contextlib.contextmanager
def _giving(grads_and_vars):
    _local.given.append(grads_and_vars)
    try:
        yield
    finally:
        _local.given.pop()


def _reduced(grads_and_vars, how):
    if keras.backend.backend() != "tensorflow":  # there the gradients of a jitted step are those of the whole batch
        return grads_and_vars
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return grads_and_vars
    op = tf.distribute.ReduceOp.SUM if how == "sum" else tf.distribute.ReduceOp.MEAN
    return GradsAndVars(list(zip(context.all_reduce(op, [g for g, _ in grads_and_vars]), grads_and_vars.variables)))


def _function(step, function):
    contract = f"{step} takes functions of one argument: {CONTRACTS[step]}"
    if not callable(function):
        allowed = ' It also takes "sum" and "mean".' if step == "aggregate_gradients" else ""
        raise TypeError(f"{contract}; {function!r} is no function.{allowed}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TypeError(f"{contract}; {function!r} cannot be called with one: {error}") from None
    except ValueError:  # a function that does not tell its signature
        pass
    return function


def _functions(step, given):
    if given is None:
        return []
    given = [given] if callable(given) or not isinstance(given, Iterable) or isinstance(given, str) else list(given)
    return [_function(step, function) for function in given]


def _checked_loss(who, loss):
    if loss is None:
        name = who if isinstance(who, str) else getattr(who, "__name__", type(who).__name__)
        raise ValueError(f"{name} returned no loss: transform_loss has to return one, and so has a function that is given as the loss")
    return loss


def _pairs(given) -> list:
    try:
        return [(g, v) for g, v in given]
    except (TypeError, ValueError):
        raise TypeError(f"apply_gradients takes (gradient, variable) pairs, such as zip(gradients, variables), not {given!r}") from None


def _variables(variables) -> list:
    is_variable = lambda v: isinstance(v, keras.Variable) or hasattr(v, "assign")
    variables = [variables] if is_variable(variables) or not isinstance(variables, Iterable) else list(variables)
    if not variables:
        raise ValueError("there are no variables to minimize the loss over: pass a list of at least one")
    for v in variables:
        if not is_variable(v):
            raise TypeError(f"variables must be tf.Variables or Keras variables, and {v!r} is none")
    twice = [path(v) for i, v in enumerate(variables) if any(v is w for w in variables[:i])]
    if twice:
        raise ValueError(f"these variables are in the list more than once: {twice}")
    return variables


def _check_inner(inner):
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(f"inner must be a Keras 3 optimizer, such as xla_lamb.keras.Lamb(1e-3), not {inner!r}")
    if isinstance(inner, OptimizerWrapper):
        return
    instead = {
        "loss_scale_factor": "LossScaling(..., initial_scale=..., dynamic=False)",
        "gradient_accumulation_steps": "GradientAccumulation(..., steps=...)",
        "use_ema": "MovingAverage(..., momentum=...)",
    }
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError("a keras.optimizers.LossScaleOptimizer looks at gradients behind the steps of minimize: use xla_lamb.minimize.LossScaling in its place")
    for argument, better in instead.items():
        if getattr(inner, argument, None):
            raise ValueError(
                f"{inner.name} has {argument}={getattr(inner, argument)!r}, which it would do behind the steps of minimize: leave it out, and use xla_lamb.minimize.{better}"
            )
