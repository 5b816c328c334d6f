"""What the tests beside this file train: each example pulls the parameters to a point of its own; the gradient is their distance from the mean point."""

import numpy as np

import helpers
import model64

EXAMPLES = 8
# A matrix, layers that a scan would stack, a matrix whose second axis alone can be split, and what 8 devices cannot split.
SHAPES = {"matrix": (16, 6), "odd": (5,), "scale": (), "stacked": (8, 3, 2), "wide": (3, 16)}
NAMES = sorted(SHAPES)  # the order of jax.tree.leaves


def start():
    return dict(zip(NAMES, helpers.tree([SHAPES[name] for name in NAMES], seed=5)))


def points(step):
    """{name: [example, ...]}"""
    leaves = helpers.tree([(EXAMPLES, *SHAPES[name]) for name in NAMES], seed=100 + step, scale=1 + step % 3)
    return dict(zip(NAMES, leaves))


def loss(params, points):
    import jax.numpy as jnp

    return sum(jnp.sum(jnp.square(params[name] - points[name])) for name in params) / (2 * EXAMPLES)


def model(steps, rules, learning_rate, every=1, seen=points, **options):
    """LAMB in float64: the parameters after so many steps, of which each takes the mean gradient of `every` batches."""
    state = model64.init([start()[name] for name in NAMES])
    for step in range(0, steps, every):
        means = [[seen(i)[name].astype(np.float64).mean(0) for name in NAMES] for i in range(step, step + every)]
        grads = [p - sum(mean) / every for p, mean in zip(state.p, zip(*means))]
        state, _ = model64.step(state, grads, rules, learning_rate, **options)
    return dict(zip(NAMES, state.p)), state
