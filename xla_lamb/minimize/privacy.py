"""Differentially private gradients."""

from __future__ import annotations

import contextlib
import os

import keras

from xla_lamb.minimize.accumulation import GradientAccumulation
from xla_lamb.minimize.gradients import GradsAndVars, path, value_of
from xla_lamb.minimize.pipeline import OptimizerWrapper


@keras.saving.register_keras_serializable(package="xla_lamb")
class DifferentialPrivacy(OptimizerWrapper):
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133) for any optimizer: clips the gradient of each example, sums them up, adds noise, and divides by the number of examples.

    ``(sum_i g_i * min(1, l2_norm_clip / |g_i|) + N(0, (noise_multiplier * l2_norm_clip)^2)) / batch_size``, where |g_i| is the norm over all variables, as in TensorFlow
    Privacy and `optax.contrib`. Of R replicas each adds noise of the R-th part of that variance.

    The loss has to be a vector, of each example's own loss: a Keras loss with ``reduction=None``. Because only its own `get_gradients` knows the examples apart, the
    optimizer refuses gradients of other origin; models that are trained by `fit` are an `xla_lamb.minimize.Model`, others call `minimize`. TensorFlow only; memory is that of
    a batch of gradients.

    How private the variables become depends on noise_multiplier, on the number of steps and on how batches are drawn: the library dp-accounting computes it. Batches of a
    GradientAccumulation inside count each. Its bounds are mostly those of Poisson sampling, where each example is drawn by itself: then give `batch_size`, since the number
    of examples that were drawn is private too. Batches of a shuffled data set are drawn otherwise. Not private is

    - what depends on several examples before it is clipped: batch normalization, data-dependent losses of add_loss (`Model` refuses both), a loss that compares examples;
    - what is told besides the variables: the loss and the metrics that `fit` shows;
    - a gradient that is not finite: it becomes that of the batch, or, with a `LossScaling` around, shows in the skipped step and in the scale;
    - anything, to somebody who knows `seed`, which is saved with a model, or can predict the noise: that is float32, of the generator Philox with a key of 64 bits, which is
      none for cryptography. Going back to a checkpoint with the same optimizer object repeats it.

    Args:
      inner: the optimizer that takes the step with the noisy mean.
      l2_norm_clip: limit of the norm of an example's gradient.
      noise_multiplier: standard deviation of the noise in units of `l2_norm_clip`.
      batch_size: what the sum is divided by: the examples in a batch of all replicas together, for instance its expectation under Poisson sampling. None: those of this replica's
        loss times the number of replicas.
      microbatch_size: number of consecutive examples whose mean gradient is clipped as one, which takes less memory; it has to divide the batch. As in TensorFlow Privacy the noise
        stays that for one gradient of the norm `l2_norm_clip`, but an example can turn the mean of its micro-batch around: if this is more than 1, ask dp-accounting about half
        the noise_multiplier.
      seed: int, for tests; XLA makes other noise of it. None: one from the operating system for each optimizer.
      kwargs: as in `OptimizerWrapper`.

    Raises:
      ValueError: in `minimize`, for a loss that is no vector, or one that microbatch_size does not divide.
    """

    once = True

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
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be an int or None, not {seed!r}")
        super().__init__(inner, name=name, **kwargs)
        for w in self.chain()[1:-1]:
            if w.customises("get_gradients"):
                raise ValueError(f"DifferentialPrivacy computes gradients itself, and the get_gradients of the {type(w).__name__} inside would never be asked")
        self.l2_norm_clip, self.noise_multiplier = float(l2_norm_clip), float(noise_multiplier)
        self.batch_size, self.microbatch_size, self.seed = batch_size, microbatch_size, seed
        self._key = int.from_bytes(os.urandom(8), "little") if seed is None else seed % 2**64

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        # In checkpoints, so that a run that goes on does not repeat its noise.
        self._draws = self.add_variable((), "zeros", "int", aggregation="only_first_replica", name="noise_draws")

    def get_gradients(self, loss, variables, tape):
        import tensorflow as tf

        if not tf.is_tensor(loss) or loss.shape.rank != 1:
            given = f"has shape {loss.shape}" if tf.is_tensor(loss) else f"is a {type(loss).__name__}"
            raise ValueError(f"differential privacy needs the loss of each example, a vector, and this loss {given}: use a Keras loss with reduction=None")
        size = self.microbatch_size
        if size > 1:
            if loss.shape[0] is not None and loss.shape[0] % size:
                raise ValueError(f"microbatch_size={size} does not divide the {loss.shape[0]} examples of the batch")
            with contextlib.nullcontext() if tape._recording else tape:
                loss = tf.reduce_mean(tf.reshape(loss, [-1, size]), axis=1)
        if loss.shape[0] == 0:  # which TensorFlow cannot do with every operation
            return [(tf.zeros((0, *v.shape), v.dtype), v) for v in variables]
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
        dtype = tf.float64 if any(g.dtype == tf.float64 for g in wide) else tf.float32
        scale = tf.cast(1.0 if grads_and_vars.scale is None else grads_and_vars.scale, dtype)
        squares = [tf.cast(tf.reduce_sum(tf.square(g), axis=list(range(1, len(g.shape)))), dtype) for g in wide]
        norms = tf.sqrt(tf.add_n(squares)) * scale
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # Micro-batches are means, and count as many times as they have examples.
        share = self.microbatch_size / tf.cast(self.batch_size or self._batch_size(norms), dtype)
        factors = share * scale / tf.maximum(norms / self.l2_norm_clip, 1.0)
        deviation = share * (self.noise_multiplier * self.l2_norm_clip / replicas**0.5)
        results = []
        for i, (g, v) in enumerate(zip(wide, grads_and_vars.variables)):
            # No matrix product, which a GPU may round to ten bits: then a clipped gradient could be longer than its limit.
            total = tf.reduce_sum(g * tf.cast(tf.reshape(factors, [-1] + [1] * len(v.shape)), g.dtype), axis=0)
            results.append((total + tf.cast(deviation, g.dtype) * self._noise(i, v.shape, g.dtype), v))
        self._draws.assign_add(1)
        return super().transform_unaggregated_gradients(GradsAndVars(results))

    def _batch_size(self, norms):
        """The number of examples on all replicas, which need not have the same. 1 if there is none: the step is then one of noise alone."""
        import tensorflow as tf

        size = tf.cast(tf.size(norms) * self.microbatch_size, tf.float32)
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            size = context.all_reduce(tf.distribute.ReduceOp.SUM, size)
        return tf.maximum(size, 1.0)

    def _noise(self, index, shape, dtype):
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context is not None else 0
        # Steps, replicas and variables count in bits of their own, so that no two of them ever have the same noise. (Seeds that are hashed to 32 bits would soon meet again.)
        step = tf.cast(value_of(self._draws), tf.int64) * 2**32 + tf.cast(replica, tf.int64)
        counter = tf.cast(tf.stack([tf.constant(index * 2**40, tf.int64), step]), tf.uint64)
        philox = 1
        return tf.raw_ops.StatelessRandomNormalV2(shape=tuple(shape), key=tf.constant([self._key], tf.uint64), counter=counter, alg=philox, dtype=dtype)

    def check_model(self, model: keras.Model) -> None:
        """Raises ValueError if a model that was called just now makes the loss of an example depend on others."""
        mixing = [layer.name for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
        if mixing:
            raise ValueError(
                f"batch normalization makes an example's output depend on the other examples, and its averages are not private: replace {mixing} by LayerNormalization or "
                "GroupNormalization, or freeze them with trainable=False"
            )
        if len(model.losses) > sum(v.regularizer is not None for v in model.trainable_weights):
            raise ValueError("the losses of add_loss and of activity regularizers are those of a whole batch, and cannot be private: add them to the loss of each example")
        reduced = [x for x in keras.tree.flatten(model.loss) if x is not None and getattr(x, "reduction", "sum_over_batch_size") not in (None, "none")]
        if reduced:
            raise ValueError(f"differential privacy needs the loss of each example, and of these there is one for the batch: {reduced}: use Keras losses with reduction=None")

    def check_origin(self, done, aggregate):
        if done == 0:
            raise ValueError(
                "these gradients are not known to be private: call minimize, or hand over what compute_gradients gave, as it is; changes belong into transform_gradients"
            )
        if done < 3 and not aggregate:
            raise ValueError("these gradients have no noise yet, which transform_unaggregated_gradients adds: apply_gradients needs aggregate=True for them")
        super().check_origin(done, aggregate)

    def objects_to(self, outer):
        if outer.customises("get_gradients"):
            return "it computes the gradients of each example itself, and would not be asked to"
        if isinstance(outer, GradientAccumulation):
            return "the noise would be added to the mean of several batches, with the size that one batch needs. Put the GradientAccumulation inside"
        return None

    def get_config(self):
        names = ("l2_norm_clip", "noise_multiplier", "batch_size", "microbatch_size", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
