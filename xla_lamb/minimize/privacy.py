"""Differentially private gradients."""

from __future__ import annotations

import os

import keras

from xla_lamb.minimize.gradients import GradsAndVars, path, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper


@keras.saving.register_keras_serializable(package="xla_lamb")
class DifferentialPrivacy(OptimizerWrapper):
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133) for any optimizer: clips the gradient of each example, sums them up, adds noise, and divides by the number of examples.

    ``(sum_i g_i * min(1, l2_norm_clip / |g_i|) + N(0, (noise_multiplier * l2_norm_clip)^2)) / batch_size``, where |g_i| is the norm over all variables, as in TensorFlow
    Privacy and `optax.contrib`. Of R replicas each adds noise of the R-th part of that variance. The privacy that it gives depends on how batches are drawn and on the number of
    steps: compute it with the library dp-accounting. Steps of micro-batches in a GradientAccumulation inside count each by itself. The noise is a float32 pseudo-random one.

    The loss has to be a vector, of each example's own loss: a Keras loss with ``reduction=None``. Because only its own `get_gradients` knows the examples apart, the
    optimizer refuses gradients of other origin; models that are trained by `fit` are an `xla_lamb.minimize.Model`, others call `minimize`. TensorFlow only; memory is that of
    a batch of gradients.

    Args:
      inner: the optimizer that takes the step with the noisy mean.
      l2_norm_clip: limit of the norm of an example's gradient.
      noise_multiplier: standard deviation of the noise in units of `l2_norm_clip`.
      batch_size: what the sum is divided by: the examples in a batch of all replicas together, for instance its expectation under Poisson sampling. None: those of this replica's
        loss times the number of replicas.
      microbatch_size: number of consecutive examples whose mean gradient is clipped as one, which takes less memory; it has to divide the batch.
      seed: int, for tests. None: one from the operating system for each optimizer.
      kwargs: as in `OptimizerWrapper`.

    Raises:
      ValueError: in `minimize`, for a loss that is no vector, or one that microbatch_size does not divide.
    """

    once = True
    per_example_loss = True

    def __init__(
        self,
        inner,
        l2_norm_clip: float,
        noise_multiplier: float,
        *,
        batch_size: int | None = None,
        microbatch_size: int = 1,
        seed: int | None = None,
        name: str | None = None,
        **kwargs,
    ):
        if keras.backend.backend() != "tensorflow":
            raise NotImplementedError(
                f"DifferentialPrivacy needs a tape, and this is Keras's {keras.backend.backend()!r} backend; in JAX use optax.contrib.differentially_private_aggregate with xla_lamb.lamb"
            )
        number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
        if not number(l2_norm_clip) or not 0 < l2_norm_clip < float("inf"):
            raise ValueError(f"l2_norm_clip must be a positive number, not {l2_norm_clip!r}")
        if not number(noise_multiplier) or not 0 <= noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be a number, 0 or more, not {noise_multiplier!r}")
        for argument, value in (("batch_size", 1 if batch_size is None else batch_size), ("microbatch_size", microbatch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{argument} must be a number of examples, 1 or more, not {value!r}")
        super().__init__(inner, name=name, **kwargs)
        for w in self.chain()[1:-1]:
            if w.customises("get_gradients"):
                raise ValueError(f"DifferentialPrivacy computes gradients itself, and the get_gradients of the {type(w).__name__} inside would never be asked")
        self.l2_norm_clip, self.noise_multiplier = float(l2_norm_clip), float(noise_multiplier)
        self.batch_size, self.microbatch_size, self.seed = batch_size, microbatch_size, seed
        self._key = int.from_bytes(os.urandom(4), "little", signed=True) if seed is None else seed

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        # In checkpoints, so that a run that goes on does not repeat its noise.
        self._draws = self.add_variable((), "zeros", "int", aggregation="only_first_replica", name="noise_draws")

    def get_gradients(self, loss, variables, tape):
        import tensorflow as tf

        if loss.shape.rank != 1:
            raise ValueError(f"differential privacy needs the loss of each example, a vector, and this loss has shape {loss.shape}: use a Keras loss with reduction=None")
        size = self.microbatch_size
        if size > 1:
            if loss.shape[0] is not None and loss.shape[0] % size:
                raise ValueError(f"microbatch_size={size} does not divide the {loss.shape[0]} examples of the batch")
            with tape:
                loss = tf.reduce_mean(tf.reshape(loss, [-1, size]), axis=1)
        return list(zip(tape.jacobian(loss, [getattr(v, "value", v) if isinstance(v, keras.Variable) else v for v in variables]), variables))

    def transform_unaggregated_gradients(self, grads_and_vars):
        import tensorflow as tf

        for g, v in zip(grads_and_vars.raw, grads_and_vars.variables):
            if g.shape.rank != len(v.shape) + 1:
                raise ValueError(
                    f"the gradient of {path(v)} has shape {g.shape}, which is not that of each example, and would not be private: call the optimizer's minimize, or in Model.fit make the model "
                    "an xla_lamb.minimize.Model"
                )
        wide = [tf.cast(g, tf.float64 if g.dtype == tf.float64 else tf.float32) for g in grads_and_vars.raw]
        scale = 1.0 if grads_and_vars.scale is None else grads_and_vars.scale
        squares = [tf.cast(tf.reduce_sum(tf.square(g), axis=list(range(1, len(g.shape)))), tf.float32) for g in wide]
        norms = tf.sqrt(tf.add_n(squares)) * scale
        factors = scale / tf.maximum(norms / self.l2_norm_clip, 1.0)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        count = tf.cast(self.batch_size or tf.size(norms) * (self.microbatch_size * replicas), tf.float32)
        # Micro-batches are means, and count as many times as they have examples.
        factors = factors * (self.microbatch_size / count)
        deviation = self.noise_multiplier * self.l2_norm_clip * self.microbatch_size / count / replicas**0.5
        results = []
        for i, (g, v) in enumerate(zip(wide, grads_and_vars.variables)):
            total = tf.tensordot(tf.cast(factors, g.dtype), g, 1)
            results.append((total + tf.cast(deviation, g.dtype) * self._noise(i, v.shape, g.dtype), v))
        self._draws.assign_add(1)
        return super().transform_unaggregated_gradients(GradsAndVars(results))

    def _noise(self, index, shape, dtype):
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context is not None else 0
        seed = tf.stack([tf.constant(self._key, tf.int32), tf.cast(value_of(self._draws), tf.int32)])
        for fold in (replica, index):
            seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(fold, tf.int32))
        return tf.random.stateless_normal(shape, seed, dtype=dtype)

    def check_origin(self, done, aggregate):
        if done == 0:
            raise ValueError(
                "these gradients are not known to be private: call minimize, or hand over what compute_gradients gave, as it is; changes belong into transform_gradients"
            )
        super().check_origin(done, aggregate)

    def objects_to(self, outer):
        if outer.customises("get_gradients"):
            return "it computes the gradients of each example itself, and would not be asked to"
        if type(outer).__name__ == "GradientAccumulation":
            return "the noise would be added to the mean of several batches, with the size that one batch needs. Put the GradientAccumulation inside"
        return None

    def get_config(self):
        names = ("l2_norm_clip", "noise_multiplier", "batch_size", "microbatch_size", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
