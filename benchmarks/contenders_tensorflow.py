"""TensorFlow's contenders under tf.function(jit_compile=True): xla_lamb.tensorflow and keras.optimizers.Lamb, alone and with loss scaling and clipping."""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.process import quiet

with quiet():
    import keras
    import tensorflow as tf

    import xla_lamb.keras
    import xla_lamb.tensorflow
    from xla_lamb import minimize

from benchmarks.worker import LEARNING_RATE, WEIGHT_DECAY, Contender, values


class Step(Contender):
    """A compiled function of the gradients that changes variables in place."""

    def __init__(self, function, grads, ours=False):
        self.function, self.grads, self.ours = tf.function(function, jit_compile=True), grads, ours

    def prepare(self):
        begin = time.perf_counter()
        self.function.get_concrete_function(self.grads)
        middle = time.perf_counter()
        self.step()  # TensorFlow compiles on the first call
        end = time.perf_counter()
        self.step()
        step = time.perf_counter() - end
        if self.ours:
            hlo = self.function.experimental_get_compiler_ir(self.grads)(stage="hlo")
            self.path = "fused" if "xla_lamb_step" in hlo else "reference"
        return middle - begin, end - middle - step

    def step(self):
        self.function(self.grads).numpy()


def contenders(shapes, names, steps):
    """The contenders, and a function that tells about the run. There is no loop of several steps here."""
    variables, grads = [], []
    for param, grad in values(shapes):
        variables.append(keras.Variable(param))
        grads.append(tf.constant(grad))
    keras_lamb = keras.optimizers.Lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    keras_lamb.build(variables)
    # Both step the same variables and the same moments, so that one set of them is all the memory there is.
    state = xla_lamb.tensorflow.init_state([])
    state.first_moments = [v.value for v in keras_lamb.variables if v.path.endswith("momentum")]
    state.second_moments = [v.value for v in keras_lamb.variables if v.path.endswith("velocity")]

    def ours(grads):
        xla_lamb.tensorflow.lamb_step(variables, grads, state, LEARNING_RATE, weight_decay=WEIGHT_DECAY,
                                      variant="keras")
        return state.iterations.read_value()

    def peer(grads):
        keras_lamb.apply(grads, variables)
        return keras_lamb.iterations.value.read_value()

    found = {}
    if "keras" in names:
        found |= {"xla_lamb.tensorflow": Step(ours, grads, ours=True), "keras.optimizers.Lamb": Step(peer, grads)}
    if "minimize" in names:
        settings = dict(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        nests = {
            "xla_lamb.minimize": minimize.LossScaling(
                minimize.ClipByGlobalNorm(xla_lamb.keras.Lamb(**settings, variant="keras"), 1.0)),
            "keras.optimizers.LossScaleOptimizer": keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Lamb(**settings, global_clipnorm=1.0)),
        }
        for name, optimizer in nests.items():
            optimizer.build(variables)
            found[name] = Step(_applying(optimizer, variables), grads, ours=name.startswith("xla_lamb"))
    return found, lambda: {"device": tf.config.list_logical_devices()[-1].name}


def _applying(optimizer, variables):
    def apply(grads):
        optimizer.apply(grads, variables)
        return optimizer.iterations.value.read_value()

    return apply
