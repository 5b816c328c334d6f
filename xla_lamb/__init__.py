"""LAMB, the layer-wise adaptive optimizer for large-batch training, as one fused XLA custom call.

    config.py      variants of LAMB and their hyper-parameters
    reference.py   the step in jnp: the specification
    step.py        the step as used: custom call or reference, by platform
    sharding.py    tensors that a mesh splits
    library.py     finds the shared library and registers its handlers
    optax.py       xla_lamb.lamb, for JAX
    zero.py        ZeRO-1: shardings that split an optimizer's state over devices that share the parameters
    tensorflow.py  lamb_step on tf.Variables
    keras/         Lamb and LAMB for Keras 3, and the callback that logs trust ratios
    minimize/      optimizers whose minimize goes in steps that can each be replaced: loss scaling, clipping, aggregation, averages, privacy
    tf_keras.py    LAMB for tf_keras, in the place of TensorFlow Addons' and TF Models'
    trust.py       trust ratios as a table and as a picture
    checkpoints/   LAMB's state in the files of optax, Keras, TensorFlow Addons and apex; python -m xla_lamb convert
    doctor.py      python -m xla_lamb doctor

Importing this package starts neither JAX nor TensorFlow: what needs them is loaded when it is first used.
"""

import importlib

from xla_lamb.config import VARIANTS, Variant, variant

__version__ = "0.1.0"
__all__ = ["Lamb", "StepStats", "VARIANTS", "Variant", "lamb", "variant"]

_LAZY = {"lamb": "xla_lamb.optax", "Lamb": "xla_lamb.optax", "StepStats": "xla_lamb.optax"}


def __getattr__(name):
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name in ("checkpoints", "keras", "minimize", "optax", "tensorflow", "tf_keras", "trust", "zero"):
        return importlib.import_module(f"xla_lamb.{name}")
    raise AttributeError(f"module 'xla_lamb' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_LAZY])
