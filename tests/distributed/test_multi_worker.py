"""xla_lamb.minimize under tf.distribute.MultiWorkerMirroredStrategy, in two processes that talk over the loopback; then one of them is killed.

Custom loops only: in Keras 3.15 Model.fit fails under this strategy with Keras's own optimizers too.
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import helpers

HERE = Path(__file__).absolute().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import replicas  # noqa: E402
from replicas import NAN, NEAR, NOT_FINITE, SCALE, STEPS, expected  # noqa: E402

WORKERS = 2
CASES = ("clip and scaling", "function", "everything, Adam")
PATIENCE = 240  # seconds for what takes ten on a quiet machine


# In each worker -----------------------------------------------------------------------------------------------------------


def main(path):
    threading.Thread(target=end_with_the_test, daemon=True).start()
    import tensorflow as tf

    # Without a timeout a collective waits for ever for a worker that lives and does not come.
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    assert strategy.num_replicas_in_sync == WORKERS
    makers, _ = replicas.optimizers()
    found = {}
    for case in CASES:
        kwargs = dict(nan=NAN, after=lambda optimizer: float(optimizer.loss_scale)) if case in NOT_FINITE else {}
        found[case] = replicas.train(strategy, makers[case], **kwargs)[0]
    with open(path + ".part", "wb") as file:
        pickle.dump(found, file)
    os.replace(path + ".part", path)
    replicas.train(strategy, makers["clip and scaling"], steps=10**6)  # until somebody dies


def end_with_the_test():
    """The test holds the other end of this pipe, however it ends."""
    sys.stdin.read()
    os._exit(3)


# Here ---------------------------------------------------------------------------------------------------------------------


def free_ports():
    """Different from each other, since all are open at once."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(WORKERS)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def start(folder):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports()]}
    code = "import sys; sys.path[:0] = sys.argv[2:]; import conftest, test_multi_worker; test_multi_worker.main(sys.argv[1])"
    workers = []
    for i in range(WORKERS):
        env = dict(os.environ, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}))
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, "-c", code, str(folder / f"found{i}"), str(HERE), str(helpers.TESTS), str(helpers.ROOT)]
        with open(folder / f"log{i}", "w") as log:
            workers.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log))
    return workers


def log(folder, i):
    return (folder / f"log{i}").read_text(errors="replace")


def wait_until_trained(folder, workers):
    """False if another process took a port before the worker could."""
    end = time.monotonic() + PATIENCE
    while not all((folder / f"found{i}").exists() for i in range(WORKERS)):
        if any(w.poll() is not None for w in workers):
            logs = "".join(log(folder, i) for i in range(WORKERS))
            if "Could not start gRPC server" in logs:
                return False
            raise AssertionError(logs)
        assert time.monotonic() < end, [log(folder, i)[-3000:] for i in range(WORKERS)]
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each worker brings back, and how the first one ended after the second was killed: (exit status, seconds, log)."""
    for _ in range(3):
        folder = tmp_path_factory.mktemp("workers")
        workers = start(folder)
        try:
            if not wait_until_trained(folder, workers):
                continue
            results = [pickle.loads((folder / f"found{i}").read_bytes()) for i in range(WORKERS)]
            time.sleep(2)
            assert [w.poll() for w in workers] == [None, None]  # in the midst of training
            workers[1].kill()
            killed = time.monotonic()
            status = workers[0].wait(PATIENCE)
            return results, (status, time.monotonic() - killed, log(folder, 0))
        finally:
            for w in workers:
                w.kill()
                w.wait()
                w.stdin.close()
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def one():
    """One process and one replica, with the whole batch."""
    import tensorflow as tf

    makers, _ = replicas.optimizers()
    strategy = tf.distribute.get_strategy()
    return {case: replicas.train(strategy, makers[case], nan=NAN if case in NOT_FINITE else (), eager=True)[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_tensorflow_workers_have_the_variables_and_the_state_of_one_process_with_the_whole_batch(found, one, case):
    first, second = (worker[case] for worker in found[0])
    assert first["iterations"] == second["iterations"] == one[case]["iterations"]
    for what in ("values", "state"):
        assert helpers.bits(first[what]) == helpers.bits(second[what])
        helpers.assert_near(first[what][0], one[case][what][0], NEAR)


@pytest.mark.parametrize("case", ["clip and scaling", "function"])
def test_tensorflow_workers_take_the_steps_of_the_float64_model(found, case):
    helpers.assert_near(found[0][0][case]["values"][0], expected(case), NEAR)
    half = [replicas.gradients(replicas.start(), replicas.part(replicas.batch(0), k, 2)) for k in range(2)]
    assert helpers.error(half[0][0], half[1][0]) > 0.1  # and not those of their own examples


@pytest.mark.parametrize("case", [c for c in CASES if c in NOT_FINITE])
def test_tensorflow_a_nan_in_one_worker_skips_the_step_in_both(found, case):
    for worker in found[0]:
        assert worker[case]["after"] == [SCALE] * NAN[0] + [SCALE / 2] * (STEPS - NAN[0])
        assert all(np.isfinite(x).all() for x in worker[case]["state"][0])


def test_tensorflow_when_a_worker_dies_the_other_ends_with_an_error(found):
    status, seconds, printed = found[1]
    assert status not in (0, 3), printed
    assert "UnavailableError" in printed and "Collective ops is aborted" in printed, printed
    assert seconds < 60
