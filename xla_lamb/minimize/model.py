"""A Keras model whose training goes through `minimize`."""

from __future__ import annotations

import keras
from keras import ops

from xla_lamb.minimize.pipeline import OptimizerWrapper
from xla_lamb.minimize.privacy import DifferentialPrivacy


class Model(keras.Model):
    """A keras.Model, functional or subclassed, whose `fit` calls ``optimizer.minimize``.

    Any keras.Model can be compiled with the optimizers of this module; Keras then computes the gradients itself. Those that override `get_gradients`, such as
    `DifferentialPrivacy`, need this one. Its optimizer may also be an `xla_lamb.keras.Lamb` or another Keras optimizer. TensorFlow only; on JAX it is a keras.Model.

    Example:
      >>> import keras, xla_lamb.minimize
      >>> x = keras.Input((3,))
      >>> model = xla_lamb.minimize.Model(x, keras.layers.Dense(1)(x))
    """

    # Where a class is called with inputs and outputs, Keras would make this class itself a functional one, and with it all that are derived from it.

    def __new__(cls, *args, **kwargs):
        return super().__new__(Functional if cls is Model and _is_functional(args, kwargs) else cls, *args, **kwargs)

    def __init__(self, *args, **kwargs):
        if _is_functional(args, kwargs):
            for cls in type(self).__mro__:
                if Model in cls.__bases__ and cls is not Functional:
                    cls.__bases__ = tuple(Functional if base is Model else base for base in cls.__bases__)
        super().__init__(*args, **kwargs)

    if keras.backend.backend() == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            if not isinstance(self.optimizer, OptimizerWrapper):
                return super().train_step(data)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True) if self._call_has_training_arg else self(x)
                for wrapper in self.optimizer.chain():
                    if isinstance(wrapper, DifferentialPrivacy):
                        wrapper.check_model(self)
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            if len(loss.shape) == 0:  # Keras has divided it by the number of replicas
                shown = loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)
            else:
                shown = ops.mean(loss)
            self._loss_tracker.update_state(shown, sample_weight=tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0])
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            """As Keras's, which cannot add the losses of layers, such as regularizers, to a loss of each example: here every example has them."""
            if self._compile_loss is None or not self.losses:
                return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            loss = self._compile_loss(y, y_pred, sample_weight)
            if len(loss.shape) == 0:
                return loss + sum(self._aggregate_additional_loss(part) for part in self.losses)
            return loss + sum(ops.cast(ops.sum(part), loss.dtype) for part in self.losses)


def _is_functional(args, kwargs) -> bool:
    return len(args) + ("inputs" in kwargs) + ("outputs" in kwargs) >= 2


@keras.saving.register_keras_serializable(package="xla_lamb", name="Model")
class Functional(Model, keras.src.models.Functional):
    """What `Model(inputs, outputs)` makes."""
