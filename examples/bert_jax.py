"""BERT for masked bytes in plain jax.numpy, and its training with xla_lamb or with optax.lamb."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xla_lamb
from examples import settings as common

PEER = "optax.lamb"


def _dense(params, name, x):
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _norm(params, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * params[f"{name}/scale"] + params[f"{name}/shift"]


def _gelu(x):
    return jax.nn.gelu(x, approximate=False)


def _attention(params, name, x, heads):
    split = lambda x: x.reshape(*x.shape[:2], heads, -1)
    query, key, value = (split(_dense(params, f"{name}/{part}", x)) for part in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return _dense(params, f"{name}/output", mixed.reshape(x.shape))


def logits(params, size, inputs, places):
    """For each of the places in each sequence, a score for every byte that may have been there."""
    x = params["bytes/embedding"][inputs] + params["positions/embedding"]
    x = _norm(params, "embeddings/norm", x)
    for number in range(size.layers):
        layer = f"layer{number:02}"
        x = _norm(params, f"{layer}/attention/norm", x + _attention(params, f"{layer}/attention", x, size.heads))
        inner = _gelu(_dense(params, f"{layer}/feed_forward/inner", x))
        x = _norm(params, f"{layer}/feed_forward/norm", x + _dense(params, f"{layer}/feed_forward/outer", inner))
    x = jnp.take_along_axis(x, places[..., None], axis=1)
    x = _norm(params, "head/norm", _gelu(_dense(params, "head/dense", x)))
    return x @ params["bytes/embedding"].T + params["head/bytes/bias"]


class Training:
    """The model, its optimizer and the compiled step; `fused` takes xla_lamb, else optax.lamb steps."""

    def __init__(self, settings, fused):
        schedule = lambda count: common.learning_rate(settings, count, jnp.minimum)
        mask = {name: common.decays(name) for name in common.shapes(settings)}
        lamb = (xla_lamb.lamb if fused else optax.lamb)(schedule, weight_decay=settings.weight_decay, mask=mask)

        def loss(params, batch):
            inputs, places, targets = batch
            scores = logits(params, settings.size, inputs, places)
            return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

        def optimize(params, state, grads):
            if fused:
                return lamb.step(grads, state, params)
            updates, state = lamb.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            return *optimize(params, state, grads), value

        # Parameters and state are given away and come back: so the step changes them in place.
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._optimize = jax.jit(optimize, donate_argnums=(0, 1))
        self._gradients = jax.jit(jax.value_and_grad(loss))
        self._fused = fused
        self._params = jax.tree.map(jnp.array, common.start(settings))
        self._state = lamb.init(self._params)

    def step(self, batch):
        """Trains on a batch; returns the loss before it."""
        self._params, self._state, loss = self._step(self._params, self._state, batch)
        return float(loss)

    def arrays(self):
        """All that a checkpoint has to hold, {name: array}."""
        leaves = {f"state/{number}": leaf for number, leaf in enumerate(jax.tree.leaves(self._state))}
        return jax.tree.map(np.asarray, {f"params/{name}": array for name, array in self._params.items()} | leaves)

    def restore(self, arrays):
        """Takes back what `arrays` gave."""
        self._params = {name: jnp.array(arrays[f"params/{name}"]) for name in self._params}
        leaves, tree = jax.tree.flatten(self._state)
        self._state = tree.unflatten(jnp.array(arrays[f"state/{number}"]) for number in range(len(leaves)))

    def parts(self, batch):
        """The whole step, the step without its optimizer, and the optimizer alone, as functions to be timed."""
        _, grads = self._gradients(self._params, batch)

        def optimize():
            self._params, self._state = jax.block_until_ready(self._optimize(self._params, self._state, grads))

        return {"whole": lambda: self.step(batch),
                "without": lambda: jax.block_until_ready(self._gradients(self._params, batch)),
                "optimizer": optimize}

    def path(self, batch):
        """What xla_lamb was compiled to: its fused kernel, or the reference where there is no kernel."""
        text = self._step.lower(self._params, self._state, batch).as_text() if self._fused else ""
        return ("fused" if "@xla_lamb_step" in text else "reference") if self._fused else None
