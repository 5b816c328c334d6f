"""The demo: a killed run goes on from its checkpoint to the same losses, the curves agree, and bad input is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
STEPS = 6


def command(out, *arguments):
    small = ["--batch", "2", "--length", "16", "--steps", str(STEPS), "--checkpoint-every", "2", "--framework", "jax"]
    return [sys.executable, "-m", "examples.pretrain", "--out", str(out), *small, *arguments]


def finish(out, *arguments):
    run = subprocess.run(command(out, *arguments), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((out / "pretrain.json").read_text())


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    # Half of a run's time is compilation, of the same programs in all three.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    said, whole = finish(tmp_path / "whole")
    assert "Going on" not in said
    assert (tmp_path / "whole" / "pretrain.png").stat().st_size > 10_000
    ours, peer = whole["results"]
    assert ours["path"] == "fused" and len(ours["losses"]) == len(peer["losses"]) == STEPS
    (verdict,) = whole["verdicts"]
    assert verdict["agree"] and verdict["within"] == "rounding"

    out = tmp_path / "killed"
    run = subprocess.Popen(command(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (out / "jax-xla_lamb.npz").exists():  # its first checkpoint
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not (out / "pretrain.json").exists()
    said, resumed = finish(out)
    assert "Going on with the unfinished run" in said
    assert [r["losses"] for r in resumed["results"]] == [r["losses"] for r in whole["results"]]


def test_text_that_cannot_be_had(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    for text, match in ((tmp_path / "nothing", "there is no file or folder"), (tmp_path / "short.txt", "too little")):
        run = subprocess.run(command(tmp_path / "out", "--text", str(text)), cwd=ROOT, capture_output=True, text=True)
        assert run.returncode != 0 and match in run.stderr and str(text) in run.stderr
        assert "Traceback" not in run.stderr
