"""As much of optax as xla_lamb and its checks need, for a machine without it: the tree of optax.lamb's state, and apply_updates."""

import sys
import types
from typing import Any, NamedTuple


class GradientTransformationExtraArgs(NamedTuple):
    init: Any
    update: Any


class ScaleByAdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class EmptyState(NamedTuple):
    pass


def lamb(*arguments):
    """Its `init` alone; without schedules, which would have a state of their own."""
    import jax
    import jax.numpy as jnp

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return (ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(), zeros()), EmptyState(), EmptyState(), EmptyState())

    return GradientTransformationExtraArgs(init, None)


def apply_updates(params, updates):
    import jax

    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def install():
    """Takes optax's place if there is none. Returns the version of the real one, or None."""
    try:
        import optax

        return getattr(optax, "__version__", None)
    except ImportError:
        stand_in = types.ModuleType("optax", __doc__)
        for part in (GradientTransformationExtraArgs, ScaleByAdamState, EmptyState, lamb, apply_updates):
            setattr(stand_in, part.__name__, part)
        sys.modules["optax"] = stand_in
        return None
