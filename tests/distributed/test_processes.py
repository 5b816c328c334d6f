"""jax.distributed: four processes on the loopback take the steps of one, and end when one is killed; the launch script and the example with two."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import helpers
import model64

HERE = Path(__file__).absolute().parent
for path in (HERE, helpers.ROOT):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import quadratic  # noqa: E402

from examples import launch  # noqa: E402

PROCESSES, DEVICES = 4, 2  # devices of each process
RATE, CLIP, DECAY, STEPS = 0.1, 0.5, 0.01, 4
NEAR = 2e-6  # float32 against float64, of each tensor's largest value
RULES = model64.PRESETS["optax"].replace(weight_decay=DECAY, max_grad_norm=CLIP)
# On a mesh of "data", which goes from process to process, and "model", within each of them.
SPECS = {"matrix": ("data", "model"), "stacked": ("data",), "wide": (None, ("data", "model")), "odd": (), "scale": ()}
HEARTBEAT = 10
PATIENCE = 240  # seconds for what takes ten on a quiet machine
BIND_ERROR = "Failed to add port"  # another process took the port before the coordinator could


def end_with_the_test():
    """The test holds the other end of this pipe, however it ends."""
    sys.stdin.read()
    os._exit(3)


# In each of four processes --------------------------------------------------------------------------------------------------


def main(path):
    threading.Thread(target=end_with_the_test, daemon=True).start()
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import xla_lamb
    from xla_lamb import zero

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    number, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], count, number, initialization_timeout=PATIENCE, heartbeat_timeout_seconds=HEARTBEAT,
        cluster_detection_method="deactivate",
    )
    mesh = Mesh(np.array(jax.devices()).reshape(count, DEVICES), ("data", "model"))

    def place(x, spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: x[index])

    def batch(step):
        """Of the examples this process makes its own alone."""
        return {name: place(x, ("data",)) for name, x in quadratic.points(step).items()}

    def compiled(function, *arguments, **options):
        return jax.jit(function, **options).lower(*arguments).compile()

    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, max_grad_norm=CLIP, implementation="fused")
    params = {name: place(x, SPECS[name]) for name, x in quadratic.start().items()}
    state = jax.jit(opt.init, out_shardings=zero.state_shardings(opt, params, ()))(params)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    gradients = compiled(jax.grad(quadratic.loss), params, batch(0), out_shardings=shardings)
    step = compiled(lambda p, s, g: opt.step(g, s, p), params, state, gradients(params, batch(0)), donate_argnums=(0, 1))

    for i in range(STEPS):
        params, state = step(params, state, gradients(params, batch(i)))
    parts = lambda tree: [[(s.index, np.asarray(s.data)) for s in x.addressable_shards] for x in jax.tree.leaves(tree)]
    found = {"params": parts(params), "mu": parts(state[0].mu), "nu": parts(state[0].nu), "count": int(np.asarray(state[0].count))}
    found |= {"step": step.as_text(), "gradients": gradients.as_text(), "same": [x.sharding for x in jax.tree.leaves(params)] == jax.tree.leaves(shardings)}
    Path(path + ".part").write_bytes(pickle.dumps(found))
    os.replace(path + ".part", path)
    while True:  # until somebody dies
        params, state = jax.block_until_ready(step(params, state, gradients(params, batch(0))))


# Here -----------------------------------------------------------------------------------------------------------------------


def start(folder):
    port = launch.free_port()
    code = "import sys; sys.path[:0] = sys.argv[2:]; import test_processes; test_processes.main(sys.argv[1])"
    processes = []
    for i in range(PROCESSES):
        env = dict(os.environ, JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_COORDINATOR_BIND_ADDRESS=f"127.0.0.1:{port}")
        env |= {"JAX_NUM_PROCESSES": str(PROCESSES), "JAX_PROCESS_ID": str(i), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env.pop("XLA_FLAGS")
        command = [sys.executable, "-c", code, str(folder / f"found{i}"), str(HERE), str(helpers.TESTS), str(helpers.ROOT)]
        with open(folder / f"log{i}", "w") as log:
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log))
    return processes


def logs(folder):
    return [(folder / f"log{i}").read_text(errors="replace") for i in range(PROCESSES)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each process brings back, and how the others ended after the last one was killed: [(exit status, seconds, log)]."""
    for _ in range(3):
        folder = tmp_path_factory.mktemp("processes")
        processes = start(folder)
        try:
            end = time.monotonic() + PATIENCE
            while not all((folder / f"found{i}").exists() for i in range(PROCESSES)) and all(p.poll() is None for p in processes):
                assert time.monotonic() < end, logs(folder)
                time.sleep(0.1)
            if BIND_ERROR in logs(folder)[0]:
                continue
            assert all(p.poll() is None for p in processes), logs(folder)  # in the midst of training
            found = [pickle.loads((folder / f"found{i}").read_bytes()) for i in range(PROCESSES)]
            time.sleep(1)
            processes[-1].kill()
            killed, seconds = time.monotonic(), []
            for p in processes[:-1]:
                p.wait(PATIENCE)
                seconds.append(time.monotonic() - killed)
            return found, list(zip([p.returncode for p in processes], seconds, logs(folder)))
        finally:
            for p in processes:
                p.kill()
                p.wait()
                p.stdin.close()
    raise AssertionError("no free port")


def whole(found, what):
    """{name: array}, from the parts that all processes hold; where several hold the same part, they hold the same bits."""
    arrays, held = {}, dict.fromkeys(quadratic.NAMES, 0)
    for position, name in enumerate(quadratic.NAMES):
        arrays[name] = np.full(quadratic.SHAPES[name], np.nan, np.float32)
        parts = {}
        for process in found:
            for index, data in process[what][position]:
                held[name] += data.size
                assert parts.setdefault(str(index), data.tobytes()) == data.tobytes(), (what, name, index)
                arrays[name][index] = data
    return arrays, held


def model(**changes):
    return quadratic.model(STEPS, RULES.replace(**changes), RATE)


def test_four_processes_take_the_steps_of_the_float64_model(trained):
    found, _ = trained
    params, state = model()
    for what, expected in (("params", params), ("mu", state.m), ("nu", state.v)):
        arrays, held = whole(found, what)
        helpers.assert_near(arrays, expected, NEAR)
        copies = {name: held[name] // max(1, arrays[name].size) for name in held}
        assert copies == {"matrix": 1, "wide": 1, "stacked": DEVICES, "odd": PROCESSES * DEVICES, "scale": PROCESSES * DEVICES}
    assert [process["count"] for process in found] == [STEPS] * PROCESSES


def test_control_what_one_process_would_have_done_alone_shows(trained):
    """With the norm of its own gradients to clip by, and with the mean of its own examples."""
    params, _ = model()
    unclipped, _ = model(max_grad_norm=None)
    own = lambda step: {name: x[: quadratic.EXAMPLES // PROCESSES] for name, x in quadratic.points(step).items()}
    alone, _ = quadratic.model(STEPS, RULES, RATE, seen=own)
    for other in (unclipped, alone):
        assert max(helpers.error(other[name], params[name]) for name in params) > 1e3 * NEAR
    found, _ = trained
    odd = quadratic.NAMES.index("odd")
    changed = [{"params": list(process["params"])} for process in found]
    changed[2]["params"][odd] = [(index, np.nextafter(data, np.float32(0))) for index, data in changed[2]["params"][odd]]
    with pytest.raises(AssertionError, match="'odd'"):
        whole(changed, "params")


def test_the_step_gathers_nothing_and_sums_of_squares_travel_together(trained):
    found, _ = trained
    assert all(process["same"] for process in found)
    for process in found:
        moved = helpers.collectives(process["step"])
        assert {op for _, op in moved} == {"all-reduce"}
        # For the norm and for the trust ratios one over "data" and one over both axes.
        assert len(moved) <= 4 and all(np.prod([int(d) for d in re.findall(r"\d+", kind.split("[")[1].split("]")[0])]) <= 4 for kind, _ in moved)
        assert {"xla_lamb_grad_norm", "xla_lamb_moments", "xla_lamb_apply", "xla_lamb_step"} == set(helpers.lamb_calls(process["step"]))
        assert helpers.aliases(process["step"]) == 3 * len(quadratic.NAMES) + 1
        assert "all-gather" in {op for _, op in helpers.collectives(process["gradients"])}  # the control: a loss that needs whole parameters


def test_when_one_is_killed_the_others_end_with_an_error(trained):
    _, ended = trained
    print([seconds for _, seconds, _ in ended])
    for status, seconds, printed in ended:
        assert status not in (0, 3) and seconds < HEARTBEAT + 20, (status, seconds, printed)
        assert "Gloo" in printed or "task" in printed, printed


# The launch script and the example ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(*command, processes=2, grace=None):
    """What any of the processes still held open, the pipes, would keep `communicate` from returning."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    env.pop("XLA_FLAGS")
    hasty = f"import sys; from examples import launch; launch.GRACE = {grace}; sys.exit(launch.main())"
    script = ["-m", "examples.launch"] if grace is None else ["-c", hasty]
    arguments = [sys.executable, *script, "--processes", str(processes), "--", *command]
    run = subprocess.Popen(arguments, cwd=helpers.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield run
    finally:
        run.terminate()  # the script ends what it has started
        run.communicate()


def losses_of(lines):
    return [float(line.split()[-1]) for line in lines if line.startswith("step ")]


def test_the_example_with_two_processes_and_killed():
    """The losses of one process; and without its first process, which the others find each other by, all end."""
    from examples import multi_process

    seen = []
    with launched(sys.executable, "-m", "examples.multi_process", "--devices", "2", "--steps", "1000000") as run:
        for line in run.stdout:
            seen.append(line)
            if line.startswith("step 5:"):
                break
        assert losses_of(seen), seen + [run.stderr.read()]
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGKILL)
        killed = time.monotonic()
        _, errors = run.communicate(timeout=PATIENCE)
        assert run.returncode == 128 + signal.SIGKILL and "process 0 ended with signal 9" in errors
        assert time.monotonic() - killed < launch.GRACE + 20
        for child in children:
            assert not Path(f"/proc/{child}").exists()
    assert "2 processes, 4 devices\n" in seen
    alone = list(multi_process.train(6, 64))
    np.testing.assert_allclose(losses_of(seen), alone, atol=2e-6)
    assert alone[-1] < 0.9 * alone[0]


def shell(script, stop=False, **options):
    """(exit status, output, errors) of three processes that run a script; `stop`: the launch script is told to end when all have said something."""
    with launched("sh", "-c", script, processes=3, **options) as run:
        said = [run.stdout.readline() for _ in range(3)] if stop else []
        if stop:
            run.terminate()
        out, errors = run.communicate(timeout=60)
        return run.returncode, "".join(said) + out, errors


def test_the_launch_script_tells_each_process_who_it_is():
    status, out, errors = shell("echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS")
    assert status == 0 and not errors
    numbers, addresses = zip(*(line.split(" at ") for line in sorted(out.splitlines())))
    assert numbers == ("0 of 3", "1 of 3", "2 of 3") and len(set(addresses)) == 1 and re.fullmatch(r"127\.0\.0\.1:\d+", addresses[0])


def test_the_launch_script_ends_all_and_what_they_started_when_one_fails():
    assert shell("test $JAX_PROCESS_ID = 1 && exit 7; sleep 300; true", grace=0.5) == (7, "", "process 1 ended with status 7\n")
    assert shell("test $JAX_PROCESS_ID = 1 && kill -9 $$; sleep 1; echo seen") == (137, "seen\nseen\n", "process 1 ended with signal 9\n")


def test_the_launch_script_ends_all_when_it_is_told_to_end():
    assert shell("echo here; sleep 300; true", stop=True) == (128 + signal.SIGTERM, "here\n" * 3, "")


def test_the_launch_script_on_several_machines_and_in_error(capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this is the test's own process
    show = ["--", "sh", "-c", "echo $JAX_PROCESS_ID $JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS ${JAX_COORDINATOR_BIND_ADDRESS-all}"]
    assert launch.main(["--processes", "2", "--machines", "3", "--machine", "1", "--coordinator", "first:123", *show]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["2 6 first:123 all", "3 6 first:123 all"]
    for arguments, match in (
        (["--processes", "2", "--machines", "2", *show], "each has to be told its number"),
        (["--processes", "2", "--machines", "2", "--machine", "2", "--coordinator", "first:123", *show], "from 0 to 1, not 2"),
        (["--processes", "0", *show], "at least 1"),
        (["--processes", "2"], "no command"),
        (["--processes", "2", "--", "there-is-no-such-program"], None),
    ):
        with pytest.raises(SystemExit) as error:
            launch.main(arguments)
        assert match in capfd.readouterr().err if match else "there-is-no-such-program cannot be started" in error.value.code
