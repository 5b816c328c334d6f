"""LAMB for Keras 3, on the TensorFlow and the JAX backends.

    optimizer.py   Lamb, with the arguments of keras.optimizers.Lamb, and LAMB, with those of TensorFlow Addons
    callbacks.py   TrustRatioLogger: the trust ratios in Keras's logs, and as a picture
"""

from xla_lamb.keras.callbacks import TrustRatioLogger
from xla_lamb.keras.optimizer import LAMB, Lamb

__all__ = ["LAMB", "Lamb", "TrustRatioLogger"]
