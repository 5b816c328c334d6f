"""Starts the processes of one training, and ends them together.

    python -m examples.launch --processes 4 -- python -m examples.multi_process

On two machines, of which the first has the address 10.0.0.1, with the same free port on both:

    python -m examples.launch --processes 4 --machines 2 --machine 0 --coordinator 10.0.0.1:12345 -- python -m examples.multi_process
    python -m examples.launch --processes 4 --machines 2 --machine 1 --coordinator 10.0.0.1:12345 -- python -m examples.multi_process

Each process finds in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID what jax.distributed.initialize wants to know. When one fails, the
others have some seconds to report what they saw of it; then they are ended.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time

GRACE = 30  # seconds between the first failure and the end of all


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def arguments(given=None):
    parser = argparse.ArgumentParser(prog="python -m examples.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="on each machine")
    parser.add_argument("--machines", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--machine", type=int, help="the number of this one, from 0")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of machine 0, as the others reach it (a free port of this one)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args(given)
    options.command = options.command[options.command[:1] == ["--"] :]
    if options.processes < 1 or options.machines < 1:
        parser.error("--processes and --machines must be at least 1")
    if not options.command:
        parser.error("there is no command after --")
    if options.machines > 1 and (options.machine is None or options.coordinator is None):
        parser.error("with several machines, each has to be told its number, --machine, and the --coordinator")
    options.machine = options.machine or 0
    if not 0 <= options.machine < options.machines:
        parser.error(f"--machine must be from 0 to {options.machines - 1}, not {options.machine}")
    return options


def main(given=None):
    options = arguments(given)
    env = dict(os.environ, JAX_NUM_PROCESSES=str(options.processes * options.machines))
    if options.coordinator is None:  # nobody outside has to reach it
        env["JAX_COORDINATOR_BIND_ADDRESS"] = options.coordinator = f"127.0.0.1:{free_port()}"
    env["JAX_COORDINATOR_ADDRESS"] = options.coordinator
    first = options.processes * options.machine
    for number in (signal.SIGTERM, signal.SIGHUP):  # by which Python would end without the `finally` below
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    processes, status, deadline = [], 0, math.inf
    try:
        for number in range(first, first + options.processes):
            # In a group of its own, which ends with all that the command may have started.
            processes.append(subprocess.Popen(options.command, env=dict(env, JAX_PROCESS_ID=str(number)), start_new_session=True))
        running = True
        while running and time.monotonic() < deadline:
            time.sleep(0.1)
            for number, p in enumerate(processes, first):
                if p.poll() and not status:
                    status, deadline = p.returncode, time.monotonic() + GRACE
                    print(f"process {number} ended with {f'signal {-status}' if status < 0 else f'status {status}'}", file=sys.stderr, flush=True)
            running = any(p.returncode is None for p in processes)
        return status if status >= 0 else 128 - status
    except OSError as error:
        sys.exit(f"{options.command[0]} cannot be started: {error.strerror}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()


if __name__ == "__main__":
    sys.exit(main())
