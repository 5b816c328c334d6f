"""ZeRO-1: every device has the parameters, and a part of the optimizer's state.

    python -m examples.zero1 --devices 8

Trains twice, first with a whole state on each device. The losses are the same, and so is the training loop: only where the state lies differs.
"""

import argparse

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_lamb
from examples import regression
from xla_lamb import zero


def bytes_on_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(mesh, split, steps, size):
    """Returns the bytes of the state on one device, and the losses."""
    opt = xla_lamb.lamb(0.02, weight_decay=0.01)
    replicated, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(regression.loss)(params, batch)
        return *opt.step(grads, state, params), loss

    params = jax.device_put(regression.start(), replicated)
    shardings = zero.state_shardings(opt, params) if split else replicated
    state = jax.jit(opt.init, out_shardings=shardings)(params)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(replicated, shardings, replicated))
    losses = []
    for number in range(steps):
        params, state, loss = step(params, state, jax.device_put(regression.batch(number, size), by_example))
        losses.append(float(loss))
    return bytes_on_one_device(state), losses


def main(given=None):
    parser = argparse.ArgumentParser(prog="python -m examples.zero1", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="on a machine without accelerators: CPU devices to make (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="examples in a batch, for all devices together (%(default)s)")
    options = parser.parse_args(given)
    jax.config.update("jax_num_cpu_devices", options.devices)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    if options.batch % mesh.size:
        parser.error(f"--batch {options.batch} cannot be divided among {mesh.size} devices")
    for name, split in (("replicated", False), ("ZeRO-1", True)):
        held, losses = train(mesh, split, options.steps, options.batch)
        print(f"{name:10}  {held:9,} bytes of state on each of {mesh.size} devices; loss {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
