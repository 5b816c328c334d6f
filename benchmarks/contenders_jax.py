"""JAX's contenders: xla_lamb, optax.lamb, the jnp reference, what a call alone costs, and the memory floor.

All of them step the same tensors: each takes the parameters and the state that the one before it left, so
that one set of them is all the memory there is.
"""

import time

import jax
import jax.numpy as jnp
import optax

import xla_lamb
from benchmarks import floor
from benchmarks.worker import LEARNING_RATE, WEIGHT_DECAY, Contender, values


class Tensors:
    """The tensors that go round."""

    def __init__(self, shapes, init):
        pairs = [(jnp.array(p, copy=True), jnp.array(g, copy=True)) for p, g in values(shapes)]
        self.params, self.grads = map(list, zip(*pairs))
        self.state = init(self.params)
        jax.block_until_ready(self.state)

    def lie(self):
        """Where they lie now. NumPy views would do too, but would keep the next step from being in place."""
        moments = [leaf for leaf in jax.tree.leaves(self.state) if leaf.ndim]
        first, second = moments[:len(self.params)], moments[len(self.params):]
        addresses = [[array.unsafe_buffer_pointer() for array in arrays]
                     for arrays in (self.params, self.grads, first, second)]
        return floor.Tensors(addresses, [array.size for array in self.params])


class Step(Contender):
    """A jitted step with donated parameters and state, as a training loop runs it."""

    def __init__(self, tensors, function, steps=1, ours=False):
        self.tensors, self.steps, self.ours = tensors, steps, ours

        def loop(params, state, grads):
            return jax.lax.fori_loop(0, steps, lambda _, carry: function(*carry, grads), (params, state))

        self.function = jax.jit(function if steps == 1 else loop, donate_argnums=(0, 1))

    def prepare(self):
        begin = time.perf_counter()
        lowered = self.function.lower(self.tensors.params, self.tensors.state, self.tensors.grads)
        middle = time.perf_counter()
        compiled = lowered.compile()  # which the calls of the jitted function find again
        end = time.perf_counter()
        analysis = compiled.memory_analysis()
        self.temporary = analysis.temp_size_in_bytes if analysis else None
        if self.ours:
            self.path = "fused" if "@xla_lamb_" in lowered.as_text() else "reference"
        return middle - begin, end - middle

    def step(self):
        t = self.tensors
        t.params, t.state = jax.block_until_ready(self.function(t.params, t.state, t.grads))


class Floor(Contender):
    """Moves the bytes of a step over the very tensors."""

    def __init__(self, tensors, streams, name):
        self.tensors, self.streams, self.name = tensors, streams, name

    def prepare(self):
        self.streams.tune(self.name, self.tensors.lie())
        return None, None

    def ready(self):
        self.place = self.tensors.lie()

    def step(self):
        self.streams.run(self.name, self.place)


def contenders(shapes, names, steps):
    """The contenders of these names, and a function that tells about the run."""
    theirs = optax.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    ours = xla_lamb.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    plain = xla_lamb.lamb(LEARNING_RATE, weight_decay=WEIGHT_DECAY, implementation="reference")
    tensors, streams = Tensors(shapes, theirs.init), floor.Floor()

    def peer(params, state, grads):
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def fused(params, state, grads):
        return ours.step(grads, state, params)

    def reference(params, state, grads):
        return plain.step(grads, state, params)

    def count(params, state, grads):  # takes and returns the same arrays and computes next to nothing
        return params, (state[0]._replace(count=state[0].count + 1), *state[1:])

    found = {"xla_lamb": Step(tensors, fused, steps, ours=True)}
    if "optax" in names:
        found["optax.lamb"] = Step(tensors, peer, steps)
    if "reference" in names:
        found["xla_lamb reference"] = Step(tensors, reference, steps)
    if "dispatch" in names:
        found["dispatch alone"] = Step(tensors, count, steps)
    if "memcpy" in names and jax.default_backend() == "cpu":
        found |= {name: Floor(tensors, streams, name) for name in floor.BYTES}
    return found, lambda: {"device": jax.devices()[0].device_kind, "floor": streams.kind}
