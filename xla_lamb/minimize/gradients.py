"""What goes from step to step: gradients with their variables, times a scalar that nobody has multiplied them by yet."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import keras
from keras import ops


class GradsAndVars(Sequence):
    """(gradient, variable) pairs, and a scalar that the gradients are to be multiplied by.

    To its readers it is a sequence of pairs, and the gradients are multiplied when they are looked at (those of 16 bits become float32 then). The fused step,
    norms and other scalars do without: a step that scales, clips by the global norm and looks for infinities reads the gradients once before the update.

    Attributes:
      raw: the gradients as they are in memory.
      variables: their variables, in the same order.
      scale: scalar tensor, or None for 1.
      skip: boolean scalar: where it is True, this step is to change nothing. None: it was not said yet, or never. Steps that return a list of pairs keep it.
    """

    def __init__(self, pairs, scale=None):
        pairs = list(pairs)
        self.raw = [g for g, _ in pairs]
        self.variables = [v for _, v in pairs]
        self.scale = scale
        self.skip = None
        self._mark = None
        self._measured = {}  # shared by all that have the same raw gradients
        self._pairs = None

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        if self._pairs is None:
            grads = self.raw if self.scale is None else [_times(g, self.scale) for g in self.raw]
            self._pairs = list(zip(grads, self.variables))
            if self._mark:
                self.mark(*self._mark)
        return self._pairs[i]

    def __repr__(self):
        return f"GradsAndVars({[path(v) for v in self.variables]}, scale={self.scale})"

    def _with(self, scale, skip):
        other = GradsAndVars(zip(self.raw, self.variables), scale)
        other.skip, other._measured = skip, self._measured
        return other

    def scaled(self, scale) -> GradsAndVars:
        """The same gradients times a scalar, which costs no pass over them."""
        return self._with(scale if self.scale is None else ops.multiply(self.scale, scale), self.skip)

    def clipped(self, max_norm) -> GradsAndVars:
        """The same gradients with a norm, that of all together, of at most `max_norm`. If it is infinite or NaN, so are they all: finite gradients whose
        norm overflows must not become zeros."""
        norm = self.global_norm
        limit = ops.cast(max_norm, norm.dtype)
        factor = ops.where(norm > limit, limit / norm, ops.ones_like(norm))
        return self.scaled(ops.where(ops.logical_and(self.finite, ops.isfinite(norm)), factor, ops.full_like(norm, float("nan"))))

    def skipped(self, skip) -> GradsAndVars:
        """The same gradients, for a step that changes nothing where `skip` is True, besides where it would not anyhow."""
        return self._with(self.scale, either(self.skip, skip))

    @property
    def finite(self):
        """Boolean scalar: whether all gradients are finite."""
        finite = self._measure()[1]
        return finite if self.scale is None else ops.logical_and(finite, ops.isfinite(self.scale))

    @property
    def global_norm(self):
        """The norm of all gradients together: a float32 scalar, float64 if one of them is."""
        norm = self._measure()[0]
        return norm if self.scale is None else ops.multiply(norm, ops.abs(ops.cast(self.scale, norm.dtype)))

    def _measure(self):
        # What was computed inside the graph of a branch is of no use outside.
        place = _graph()
        if place not in self._measured:
            self._measured[place] = _norm_and_finite(self.raw)
        return self._measured[place]

    def mark(self, optimizer, done: int) -> None:
        """Notes how many steps of an optimizer are behind the gradients: on them, so that lists which are made of them are known too."""
        self._mark = optimizer, done
        for g in [g for g, _ in self._pairs] if self._pairs else self.raw if self.scale is None else ():
            set_steps_done(g, optimizer, done)

    def done(self, optimizer) -> int:
        """How many steps of an optimizer are known to be behind all of the gradients."""
        if self._mark and self._mark[0] is optimizer:
            return self._mark[1]
        if self.scale is not None:
            return 0
        return min((steps_done(g, optimizer) for g in self.raw), default=0)


def either(a, b):
    """`a` or `b`, boolean scalars or None."""
    return b if a is None else a if b is None else ops.logical_or(a, b)


_MARK = "_xla_lamb_steps_done"


def set_steps_done(tensor, optimizer, done: int) -> None:
    """Notes on a loss or a gradient how many steps of an optimizer are behind it."""
    if hasattr(tensor, "__dict__"):
        setattr(tensor, _MARK, (weakref.ref(optimizer), done))


def steps_done(tensor, optimizer) -> int:
    """What `set_steps_done` noted, or 0."""
    of, done = getattr(tensor, _MARK, (lambda: None, 0))
    return done if of() is optimizer else 0


def path(variable) -> str:
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def value_of(variable):
    """A tensor: the value of a variable now, whatever is assigned to it later. (In TensorFlow a variable itself is taken for a tensor, and read when it is used.)"""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return value.read_value() if hasattr(value, "read_value") else ops.convert_to_tensor(value)


def _times(gradient, scale):
    dtype = keras.backend.standardize_dtype(gradient.dtype)
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    return ops.multiply(ops.cast(gradient, wide), ops.cast(scale, wide))


def _graph():
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()  # not its id, which the next one may get


def _norm_and_finite(gradients):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from xla_lamb import tensorflow as on_tensorflow

        if all(g.shape.is_fully_defined() for g in gradients):
            return on_tensorflow.gradient_norm(gradients)
        # Those of each example of a batch of unknown size, for instance: the fused pass needs shapes.
        wide = [tf.cast(g, tf.float64 if any(g.dtype == tf.float64 for g in gradients) else tf.float32) for g in gradients]
        return tf.linalg.global_norm(wide), tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in wide])
    from xla_lamb import config
    from xla_lamb import step as fused

    return fused.grad_norm([ops.convert_to_tensor(g) for g in gradients], fused.Options(config.implementation(None)))


def without_missing(pairs) -> list:
    """The pairs that have a gradient, with a warning that names the variables of the others."""
    there = [(g, v) for g, v in pairs if g is not None]
    missing = [path(v) for g, v in pairs if g is None]
    if not there:
        raise ValueError(
            f"no variable has a gradient: {missing}. Was the loss computed from them, under the tape, and without steps that have no derivative?"
        )
    if missing:
        warnings.warn(f"these variables have no gradient, and are left alone: {missing}", stacklevel=4)
    return there


def dense(pairs, scale=None) -> GradsAndVars:
    """With tf.IndexedSlices, arrays and numbers as tensors."""
    if keras.backend.backend() != "tensorflow":
        return GradsAndVars([(ops.convert_to_tensor(g), v) for g, v in pairs], scale)
    import tensorflow as tf

    from xla_lamb.tensorflow import dense_gradient

    of = lambda g, v: dense_gradient(g, v) if isinstance(g, tf.IndexedSlices) else g if tf.is_tensor(g) else tf.convert_to_tensor(g)
    return GradsAndVars([(of(g, v), v) for g, v in pairs], scale)


def _shaped(gradient, variable):
    """A gradient with the shape of its variable, or None if it has another. In a tf.function, after a tf.py_function for instance, it may not be known."""
    shape, wanted = gradient.shape, tuple(variable.shape)
    if getattr(shape, "rank", 0) is not None:
        shape = tuple(shape)
        if shape == wanted:
            return gradient
        if len(shape) != len(wanted) or any(n is not None and n != m for n, m in zip(shape, wanted)):
            return None
    import tensorflow as tf

    return tf.ensure_shape(gradient, wanted)


def checked(who, step, result, given) -> GradsAndVars | list:
    """What a step returned, if it fits what it was given; else an error that says what `who` did wrong.

    Args:
      who: the function or the optimizer that did the step.
      step: its name.
      result: what it returned.
      given: the pairs that it was given.
    """
    if result is given and step != "apply_updates":
        return result
    name = f"{getattr(who, '__name__', None) or type(who).__name__}, as {step},"
    wanted = [v for _, v in given] if not isinstance(given, GradsAndVars) else given.variables
    must = f"it must return {len(wanted)} (gradient, variable) pairs, for the variables that it was given, in their order"
    if result is None:
        raise ValueError(f"{name} returned None: {must}")
    if not isinstance(result, GradsAndVars):
        try:
            result = [(g, v) for g, v in result]
        except (TypeError, ValueError):
            raise TypeError(f"{name} returned {type(result).__name__}, which are no pairs: {must}") from None
    variables = result.variables if isinstance(result, GradsAndVars) else [v for _, v in result]
    if len(variables) != len(wanted):
        raise ValueError(f"{name} returned {len(variables)} pairs: {must}")
    for i, (v, w) in enumerate(zip(variables, wanted)):
        if v is not w:
            raise ValueError(f"{name} returned a gradient of {path(v)} at place {i}, where that of {path(w)} was: {must}")
    if step == "get_gradients":
        return result
    for g, v in zip(result.raw, variables) if isinstance(result, GradsAndVars) else result:
        if g is None:
            raise ValueError(f"{name} returned None as the gradient of {path(v)}: return zeros to leave it where it is")
    if not isinstance(result, GradsAndVars):
        result = dense(result).skipped(given.skip if isinstance(given, GradsAndVars) else None)
    for i, (g, v) in enumerate(zip(result.raw, variables)):
        result.raw[i] = _shaped(g, v)
        if result.raw[i] is None:
            result.raw[i] = g
            raise ValueError(f"{name} returned a gradient of {path(v)} of shape {tuple(g.shape)}, and the variable has {tuple(v.shape)}")
    return result
