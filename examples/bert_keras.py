"""The same BERT from Keras layers on TensorFlow, and its training with xla_lamb or with keras.optimizers.Lamb."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.process import quiet

with quiet():
    import keras
    import tensorflow as tf

    import xla_lamb.keras

from examples import settings as common

PEER = "keras.optimizers.Lamb"


def _norm():
    return keras.layers.LayerNormalization(epsilon=1e-6)


class Layer(keras.layers.Layer):
    """One layer of the encoder: attention, then two dense layers, each with what came in added and normalized."""

    def __init__(self, size):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(size.heads, size.width // size.heads)
        self.attention_norm = _norm()
        self.inner = keras.layers.Dense(4 * size.width, activation="gelu")
        self.outer = keras.layers.Dense(size.width)
        self.outer_norm = _norm()

    def call(self, x):
        x = self.attention_norm(x + self.attention(x, x))
        return self.outer_norm(x + self.outer(self.inner(x)))

    def named(self):
        """Its layers that hold variables, by the names in settings.py."""
        a = self.attention
        return {"attention/query": a.query_dense, "attention/key": a.key_dense, "attention/value": a.value_dense,
                "attention/output": a.output_dense, "attention/norm": self.attention_norm,
                "feed_forward/inner": self.inner, "feed_forward/outer": self.outer,
                "feed_forward/norm": self.outer_norm}


class Bert(keras.Model):
    """BERT for masked bytes: scores for every byte that may have been in each of the places."""

    def __init__(self, settings):
        super().__init__()
        size = settings.size
        self.bytes = keras.layers.Embedding(common.VOCABULARY, size.width)
        self.positions = keras.layers.Embedding(settings.length, size.width)
        self.embeddings_norm = _norm()
        self.encoder = [Layer(size) for _ in range(size.layers)]
        self.head_dense = keras.layers.Dense(size.width, activation="gelu")
        self.head_norm = _norm()
        self.head_bias = self.add_weight(shape=(common.VOCABULARY,), initializer="zeros")

    def call(self, inputs, places):
        x = self.embeddings_norm(self.bytes(inputs) + self.positions(keras.ops.arange(inputs.shape[1])))
        for layer in self.encoder:
            x = layer(x)
        x = keras.ops.take_along_axis(x, places[..., None], axis=1)
        x = self.head_norm(self.head_dense(x))
        return keras.ops.matmul(x, keras.ops.transpose(self.bytes.embeddings)) + self.head_bias

    def named(self):
        """All variables by the names in settings.py."""
        layers = {"embeddings/norm": self.embeddings_norm, "head/dense": self.head_dense, "head/norm": self.head_norm}
        for number, layer in enumerate(self.encoder):
            layers |= {f"layer{number:02}/{name}": part for name, part in layer.named().items()}
        found = {"bytes/embedding": self.bytes.embeddings, "positions/embedding": self.positions.embeddings,
                 "head/bytes/bias": self.head_bias}
        for name, layer in layers.items():
            if isinstance(layer, keras.layers.LayerNormalization):
                found |= {f"{name}/scale": layer.gamma, f"{name}/shift": layer.beta}
            else:
                found |= {f"{name}/kernel": layer.kernel, f"{name}/bias": layer.bias}
        return found


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of settings.py."""

    def __init__(self, settings):
        self.settings = settings

    def __call__(self, step):
        return common.learning_rate(self.settings, keras.ops.cast(step, "float32"), keras.ops.minimum)


class Training:
    """The model, its optimizer and the compiled step; `fused` takes xla_lamb, else keras.optimizers.Lamb steps."""

    def __init__(self, settings, fused):
        model = Bert(settings)
        model(tf.zeros((1, settings.length), tf.int32), tf.zeros((1, settings.masked), tf.int32))  # builds
        named = model.named()
        for name, value in common.start(settings).items():
            named[name].assign(value.reshape(named[name].shape))  # Keras keeps the heads apart: another shape
        self._variables = list(named.values())
        raw = [variable.value for variable in self._variables]  # the tf.Variables
        schedule = Schedule(settings)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        if fused:  # the one line to change; Keras decays outside the trust ratio, and so do we, to be compared with it
            lamb = xla_lamb.keras.Lamb(schedule, weight_decay=settings.weight_decay, variant="keras")
        else:
            lamb = keras.optimizers.Lamb(schedule, weight_decay=settings.weight_decay)
        lamb.exclude_from_weight_decay(var_list=[v for name, v in named.items() if not common.decays(name)])
        lamb.build(self._variables)
        self._state = [variable.value for variable in lamb.variables]

        def gradients(batch):
            inputs, places, targets = batch
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(inputs, places))
            return loss, [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, raw)]

        def step(batch):
            loss, grads = gradients(batch)
            lamb.apply(grads, self._variables)
            return loss

        def optimizer_alone(grads):
            lamb.apply(grads, self._variables)
            return self._state[0].read_value()  # something to wait for

        # Variables that a compiled function reads and assigns are changed in place.
        self._step, self._gradients, self._optimize = (
            tf.function(function, jit_compile=True) for function in (step, gradients, optimizer_alone))
        self._fused = fused

    def step(self, batch):
        """Trains on a batch; returns the loss before it."""
        return float(self._step(self._tensors(batch)))

    def arrays(self):
        """All that a checkpoint has to hold, {name: array}."""
        return {f"{number}": variable.numpy() for number, variable in enumerate([*self._variables, *self._state])}

    def restore(self, arrays):
        """Takes back what `arrays` gave."""
        for number, variable in enumerate([*self._variables, *self._state]):
            variable.assign(arrays[f"{number}"])

    def parts(self, batch):
        """The whole step, the step without its optimizer, and the optimizer alone, as functions to be timed."""
        batch = self._tensors(batch)
        _, grads = self._gradients(batch)
        return {"whole": lambda: self._step(batch).numpy(),
                "without": lambda: self._gradients(batch)[0].numpy(),
                "optimizer": lambda: self._optimize(grads).numpy()}

    def path(self, batch):
        """What xla_lamb was compiled to: its fused kernel, or the reference where there is no kernel."""
        if not self._fused:
            return None
        text = self._step.experimental_get_compiler_ir(self._tensors(batch))(stage="hlo")
        return "fused" if "xla_lamb_step" in text else "reference"

    @staticmethod
    def _tensors(batch):
        return tuple(map(tf.constant, batch))
