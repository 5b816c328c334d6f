"""Model.fit under every wrapper, with and without jit_compile, trains the demo's model. (Each wrapper by itself trains smaller ones in the other files.)"""

import conftest  # noqa: F401  (settings of the environment, before Keras is imported)
import keras
import numpy as np
import pytest
import tensorflow as tf

import xla_lamb.keras
from examples import bert_keras, settings
from xla_lamb import minimize

settings.SIZES["tiny"] = settings.Size(layers=1, width=16, heads=2)
TINY = settings.Settings(model="tiny", steps=8, batch=4, length=8, text="", learning_rate=0.05)
EPOCHS = 4  # of two batches


def doubled_and_halved(pairs):
    return [(2 * g / 2, v) for g, v in pairs]


# Every wrapper is in one of them. The first changes nothing: scales of powers of two round nothing, and the clip is out of reach.
NESTS = {
    "neutral": lambda inner: minimize.LossScaling(
        minimize.ClipByGlobalNorm(minimize.MovingAverage(minimize.StochasticWeightAveraging(inner)), 1e6), transform_gradients=doubled_and_halved
    ),
    "clipped": lambda inner: minimize.LossScaling(
        minimize.GradientAccumulation(
            minimize.ClipByNorm(minimize.ClipByValue(minimize.DecoupledWeightDecay(minimize.Lookahead(inner, 2, 0.8), 0.1, ["kernel"]), 0.01), 0.1), 2
        ), 256.0, dynamic=False
    ),
    "privacy": lambda inner: minimize.DifferentialPrivacy(inner, 1.0, 0.0),  # compiled by XLA the noise would be another
}


class Pretraining(minimize.Model):
    """The demo's BERT, that takes all its input at once, as fit hands it over."""

    def __init__(self):
        super().__init__()
        self.bert = bert_keras.Bert(TINY)

    def call(self, x):
        return self.bert(x["inputs"], x["places"])


class LossOfSequences(keras.losses.Loss):
    """The cross entropy of each sequence's bytes."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True), axis=-1)


def train(nest, jit):
    """The losses of the epochs, and the number of steps."""
    keras.utils.set_random_seed(0)
    text = np.random.default_rng(0).integers(0, 64, (2 * TINY.batch, TINY.length)).astype("int32")
    places = np.tile(np.arange(TINY.masked, dtype="int32"), (2 * TINY.batch, 1))
    inputs = text.copy()
    inputs[:, : TINY.masked] = settings.MASK
    model = Pretraining()
    loss = LossOfSequences(reduction=None if nest == "privacy" else "sum_over_batch_size")
    optimizer = NESTS[nest](xla_lamb.keras.Lamb(TINY.learning_rate)) if nest else xla_lamb.keras.Lamb(TINY.learning_rate)
    model.compile(optimizer, loss, jit_compile=jit)
    data = tf.data.Dataset.from_tensor_slices(({"inputs": inputs, "places": places}, text[:, : TINY.masked])).batch(TINY.batch, drop_remainder=True)
    return model.fit(data, epochs=EPOCHS, verbose=0).history["loss"], int(optimizer.iterations)


@pytest.fixture(scope="module")
def plain():
    return train(None, False)[0]


def test_every_wrapper_is_here():
    around = {type(w) for nest in NESTS.values() for w in nest(keras.optimizers.SGD(0.1)).chain()[:-1]}
    wrappers = {x for x in vars(minimize).values() if isinstance(x, type) and issubclass(x, minimize.OptimizerWrapper)}
    assert around == wrappers - {minimize.OptimizerWrapper, minimize.Averaging}


@pytest.mark.parametrize("nest", NESTS)
def test_fit_trains(nest, plain):
    compiled, steps = train(nest, True)
    np.testing.assert_allclose(train(nest, False)[0], compiled, rtol=1e-4)
    assert compiled[-1] < compiled[0] - 0.1
    assert steps == EPOCHS * 2 // (2 if nest == "clipped" else 1)
    assert np.allclose(compiled, plain, rtol=1e-4) == (nest == "neutral"), (compiled, plain)
