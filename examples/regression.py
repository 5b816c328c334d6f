"""A small network with something to learn, for the examples with several devices."""

import jax
import jax.numpy as jnp
import numpy as np

INPUTS, WIDTH, OUTPUTS = 64, 256, 16


def start(seed=0):
    """The parameters before the first step."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape, np.float32) / shape[0] ** 0.5
    zeros = lambda size: np.zeros(size, np.float32)
    return {"hidden": {"kernel": normal(INPUTS, WIDTH), "bias": zeros(WIDTH)}, "output": {"kernel": normal(WIDTH, OUTPUTS), "bias": zeros(OUTPUTS)}}


def batch(step, size):
    """(inputs, targets) of that step."""
    inputs = np.random.default_rng(1000 + step).standard_normal((size, INPUTS), np.float32)
    return inputs, np.sin(inputs[:, :OUTPUTS] + inputs[:, OUTPUTS : 2 * OUTPUTS])


def loss(params, batch):
    """The mean square error."""
    inputs, targets = batch
    hidden = jax.nn.gelu(inputs @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean(jnp.square(hidden @ params["output"]["kernel"] + params["output"]["bias"] - targets))
