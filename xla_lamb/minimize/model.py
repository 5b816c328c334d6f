"""A Keras model whose training goes through `minimize`."""

from __future__ import annotations

import keras
from keras import ops

from xla_lamb.minimize.pipeline import OptimizerWrapper


class Model(keras.Model):
    """A keras.Model, functional or subclassed, whose `fit` calls ``optimizer.minimize``.

    Any keras.Model can be compiled with the optimizers of this module; Keras then computes the gradients itself. Those that override `get_gradients`, such as
    `DifferentialPrivacy`, need this one. Its optimizer may also be an `xla_lamb.keras.Lamb` or another Keras optimizer. TensorFlow only; on JAX it is a keras.Model.

    Example:
      >>> import keras, xla_lamb.minimize
      >>> x = keras.Input((3,))
      >>> model = xla_lamb.minimize.Model(x, keras.layers.Dense(1)(x))
    """

    if keras.backend.backend() == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            if not isinstance(self.optimizer, OptimizerWrapper):
                return super().train_step(data)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True) if self._call_has_training_arg else self(x)
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            if len(loss.shape) == 0:  # Keras has divided it by the number of replicas
                shown = loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)
            else:
                shown = ops.mean(loss)
            self._loss_tracker.update_state(shown, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
