"""Trains over several processes: each has some of the devices, and all devices are one mesh that splits the batch, the parameters and the state (FSDP).

    python -m examples.launch --processes 4 -- python -m examples.multi_process

This is the program that each process runs. On GPUs give each process those of one machine; on CPUs processes talk through gloo.
"""

import argparse
import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_lamb
from examples import regression
from xla_lamb import zero

# In seconds. When a process dies, the others' next collective fails at once, and they have ended after the heartbeat's time at the latest, as when one hangs or
# its machine is gone (measured: 14 to 16 s; 1 s when it was process 0). If not all processes come, those that wait give up after the first of these times.
TIMEOUTS = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 20}


def connect():
    """Joins the other processes, if examples.launch started this one. Under Slurm, Open MPI or on TPUs JAX finds the arguments by itself."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "JAX_PROCESS_ID" in os.environ:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"]),
            cluster_detection_method="deactivate", **TIMEOUTS,
        )


def train(steps, size):
    """Yields the loss before each step."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_first, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    opt = xla_lamb.lamb(0.02, weight_decay=0.01, max_grad_norm=1.0)

    def loss_of(params, batch):
        # The model sees whole parameters; without this XLA would split the layers as the parameters are split, and gather the batch.
        return regression.loss(jax.lax.with_sharding_constraint(params, replicated), batch)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return *opt.step(grads, state, params), loss

    def place(x):
        """On all processes' devices; the callback is asked for the parts of this process alone."""
        sharding = by_first if x.shape[0] % mesh.size == 0 else replicated
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    params = jax.tree.map(place, regression.start())
    shardings = jax.tree.map(lambda x: x.sharding, params), zero.state_shardings(opt, params)  # the state is split as the parameters are
    state = jax.jit(opt.init, out_shardings=shardings[1])(params)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, replicated))
    for number in range(steps):
        params, state, loss = step(params, state, jax.tree.map(place, regression.batch(number, size)))
        yield float(loss)


def main(given=None):
    parser = argparse.ArgumentParser(prog="python -m examples.multi_process", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="on a machine without accelerators: CPU devices of each process (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="examples in a batch, for all devices together (%(default)s)")
    options = parser.parse_args(given)
    jax.config.update("jax_num_cpu_devices", options.devices)
    connect()
    if options.batch % jax.device_count():
        parser.error(f"--batch {options.batch} cannot be divided among {jax.device_count()} devices")
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)
    for number, loss in enumerate(train(options.steps, options.batch)):
        if jax.process_index() == 0:
            print(f"step {number}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
