"""`python -m benchmarks.gpu` on a machine without a GPU: it refuses, it builds, and it rehearses all of its stages on the CPU kernel, so
that few of its lines run for the first time on a GPU. And its checks fail where they should.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import helpers
from benchmarks import build_bare, gpu, gpu_checks, gpu_speed

ARCH = "sm_90"


def run(*arguments, **env):
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)]
    return subprocess.run(command, cwd=helpers.ROOT, capture_output=True, text=True, env={**os.environ, **env})


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The library that nvcc and g++ build without Bazel, from the command. A machine without nvcc fails here: it comes with `make venv`."""
    folder = tmp_path_factory.mktemp("bare")
    done = run("--only", "build", "--arch", ARCH, "--rebuild", "--folder", folder)
    assert done.returncode == 0, done.stderr
    return folder / ARCH / build_bare.NAME


# The build ----------------------------------------------------------------------------------------------------------------

STEP = """
import jax, json
import helpers, xla_lamb
from xla_lamb import library
found = library.load()
shapes = [(33, 129), (4097,), (7,)]
params, grads = helpers.tree(shapes), helpers.gradients(3, shapes)
p, _ = helpers.run_steps(xla_lamb.lamb(0.1, variant="nvlamb", implementation="fused"), params, grads)
helpers.assert_near(p, helpers.run_model(params, grads, helpers.model64.PRESETS["nvlamb"], 0.1).p, 1e-6)
print(json.dumps([found.path, found.cuda.runtime, [[h.name, h.platform] for h in found.handlers]]))
"""


def test_bare_build(bare):
    """It is whole: all handlers for both platforms, a kernel for the CPU that steps right, and nothing but C exported."""
    path, runtime, handlers = json.loads(helpers.python(STEP, XLA_LAMB_LIBRARY=bare).stdout)
    calls = ["xla_lamb_step", "xla_lamb_moments", "xla_lamb_apply", "xla_lamb_grad_norm"]
    assert path == str(bare) and int(runtime.split(".")[0]) >= 12
    assert handlers == [[name, platform] for platform in ("cpu", "cuda") for name in calls]
    exported = subprocess.run(["nm", "-D", "--defined-only", bare], capture_output=True, text=True, check=True).stdout.split()[2::3]
    assert exported and all(name.startswith("xla_lamb_") for name in exported)


def test_bare_build_is_not_repeated(bare):
    stamp = bare.stat().st_mtime_ns
    assert build_bare.build(ARCH, bare.parent.parent) == (bare, False)
    assert bare.stat().st_mtime_ns == stamp


def test_flags_are_bazels():
    commands = {Path(name).name: command for name, command in build_bare.commands("nvcc", ARCH, Path("/tmp")).items()}
    assert "-fmad=false" in commands["cuda_kernel.cu.o"] and "-ffp-contract=off" in commands["ffi_kernel.cc.o"]
    assert any("code=[sm_90,compute_90]" in flag for flag in commands["cuda_kernel.cu.o"])
    if os.uname().machine == "x86_64":
        assert "-mavx512f" in commands["ffi_kernel_isa.cc.avx512.o"] and "-DXLA_LAMB_ISA=avx2" in commands["ffi_kernel_isa.cc.avx2.o"]


def test_build_says_what_is_missing(monkeypatch, tmp_path):
    with pytest.raises(build_bare.Failed, match="_X86_32"):
        build_bare.constant("ffi/kernel.bzl", "_X86_32")
    with pytest.raises(build_bare.Failed, match="knows no sm_1"):
        build_bare.code_flag(build_bare.find_nvcc(), "sm_1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(build_bare.Failed, match=str(tmp_path)):
        build_bare.find_nvcc()


# The command --------------------------------------------------------------------------------------------------------------


def test_refuses_without_a_gpu(tmp_path):
    done = run("--json", tmp_path / "gpu.json", "--folder", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "there is no CUDA GPU that JAX can use: " in done.stderr
    assert done.stdout == "" and not (tmp_path / "gpu.json").exists()


def test_arguments():
    for arguments, said in ((["--only", "chek"], "chek"), (["--arch", "90"], "sm_90")):
        done = run(*arguments)
        assert done.returncode == 2 and said in done.stderr


# A compute-sanitizer that runs its command and then says: nothing wrong, something wrong, or that it cannot work here.
SANITIZER = """#!/bin/bash
tool=$2
while [[ $1 != */python* ]]; do shift; done
case $tool in
  memcheck) "$@" && echo "========= ERROR SUMMARY: 0 errors" ;;
  racecheck) echo "========= Error: Race reported between Write access at StepKernel"
             echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 99 ;;
  synccheck) echo "========= Error: Device not supported"; exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def rehearsal(bare, tmp_path_factory):
    """All stages on the CPU kernel of the bare library, with a compute-sanitizer that finds races: (process, report)."""
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "bin").mkdir()
    (folder / "bin/compute-sanitizer").write_text(SANITIZER)
    (folder / "bin/compute-sanitizer").chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("--rehearse", "--json", folder / "gpu.json", "--folder", folder, XLA_LAMB_LIBRARY=str(bare), PATH=path)
    assert (folder / "gpu.json").exists(), done.stderr
    return done, json.loads((folder / "gpu.json").read_text())


def test_rehearsal_of_checks(rehearsal, bare):
    done, report = rehearsal
    assert report["library"]["path"] == str(bare)
    names = {line["check"].split()[0] for line in report["checks"]}
    assert names >= {"types", "variants", "updates", "norms", "halves", "skipped", "broken", "zeros", "batched", "many", "large", "huge"}
    assert len(report["checks"]) >= 40 and all(line["problem"] is None for line in report["checks"])
    assert f"check: {len(report['checks'])} of {len(report['checks'])} passed" in done.stdout


def test_rehearsal_of_bits(rehearsal):
    done, report = rehearsal
    assert set(report["bits"]) == set(gpu.MODES) and all(report["flags"].values())
    digests = {d for found in report["bits"].values() for form in ("call", "loop") for d in found["digests"][form]}
    assert len(digests) in (1, 2)  # a loop may compute the scalars of a step otherwise
    assert "bits, graphs on: call: 10 runs, 1 result(s); loop: 10 runs, 1 result(s)" in done.stdout


def test_rehearsal_of_sanitizers(rehearsal):
    """What it finds is a failure of the command; that it cannot work is not, but is said."""
    done, report = rehearsal
    assert done.returncode == 1 and len(report["problems"]) == 1 and "racecheck" in report["problems"][0]
    found = report["sanitizer"]
    assert found["memcheck"] == "passed: ERROR SUMMARY: 0 errors"
    assert found["racecheck"].startswith("failed: RACECHECK SUMMARY: 2 hazards") and "StepKernel" in found["racecheck"]
    assert found["synccheck"].startswith("no answer") and "Device not supported" in found["synccheck"]
    assert "1 PROBLEMS" in done.stdout and all(f"sanitize, {tool}: {found[tool]}" in done.stdout for tool in gpu.TOOLS)


def test_rehearsal_of_speed(rehearsal):
    done, report = rehearsal
    assert [result["mode"] for result in report["speed"]] == list(gpu.MODES)
    for result in report["speed"]:
        rows = {(row["contender"], row["form"]): row for row in result["results"]}
        assert set(rows) == {(name, form) for name in gpu_speed.CONTENDERS for form in ("call", "loop")}
        assert all(len(row["seconds"]) == 2 and row["compile_s"] > 0 for row in rows.values())
        assert rows["xla_lamb", "loop"]["times_ours"] == 1 and result["missing"] == {}
    assert "optax.lamb" in done.stdout and "floor: 28 bytes" in done.stdout


def test_without_a_sanitizer(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.Bench, "find_sanitizer", staticmethod(lambda: None))
    bench = gpu.Bench(gpu.parse(["--rehearse", "--folder", str(tmp_path)]))
    assert bench.start_sanitizers("{}") == {}
    assert set(bench.report["sanitizer"].values()) == {"skipped: no compute-sanitizer"}


# Its processes ------------------------------------------------------------------------------------------------------------


def child(code, tmp_path):
    return gpu.Child("stage", ["-c", code], {}, tmp_path)


def test_a_stage_that_dies_is_told(tmp_path):
    code = 'import os, signal; print(\'{"begins": "huge"}\', flush=True); os.kill(os.getpid(), signal.SIGSEGV)'
    assert child(code, tmp_path).end(time.time() + 60).startswith("died of SIGSEGV during huge")
    assert "ValueError: so" in child("raise ValueError('so')", tmp_path).end(time.time() + 60)


def test_a_stage_that_hangs_is_stopped(tmp_path):
    hanging = child('import time; print(\'{"begins": "large"}\', flush=True); time.sleep(1000)', tmp_path)
    assert hanging.wait_for("begins", time.time() + 60) and not hanging.wait_for("ready", time.time() + 0.1)
    assert "was stopped after" in (said := hanging.end(time.time())) and said.endswith("during large")
    assert hanging.process.poll() is not None


@pytest.fixture
def bench(tmp_path):
    return gpu.Bench(gpu.parse(["--rehearse", "--folder", str(tmp_path)]))


def bits(bench, tmp_path, mode, call, loop):
    lines = [{"form": "call", "digests": call}, {"form": "loop", "digests": loop}]
    bench.end_bits(mode, child(f"print({chr(10).join(map(json.dumps, lines))!r})", tmp_path), time.time() + 60)


def test_other_bits_are_a_problem(bench, tmp_path):
    bits(bench, tmp_path, "graphs off", ["a", "a"], ["b", "b"])
    bits(bench, tmp_path, "graphs on", ["a", "a"], ["b", "b"])
    bench.compare_bits()
    assert bench.report["problems"] == []
    bits(bench, tmp_path, "graphs on", ["c", "c"], ["b", "d"])
    bench.compare_bits()
    assert len(bench.report["problems"]) == 2
    assert "loop: 2 runs gave 2 results" in bench.report["problems"][0] and "call gives other results" in bench.report["problems"][1]


def test_an_unknown_flag_is_told(monkeypatch, bench):
    """XLA ends a process that has one."""
    monkeypatch.setitem(gpu.MODES, "graphs on", ["--xla_gpu_no_such_flag=1", "--xla_gpu_nor_this=1"])
    assert bench.detect() is None
    assert bench.modes() == ["graphs off"] and "xla_gpu_no_such_flag" in bench.report["problems"][0]


# The checks can fail ------------------------------------------------------------------------------------------------------


def outcomes(**options):
    lines = []
    passed = gpu_checks.run("cpu", small=True, say=lines.append, **options)
    found = {line["check"]: line["problem"] for line in lines if "check" in line}
    assert found and passed == all(problem is None for problem in found.values())
    return found


COMPARED = ["types float32 float32 f", "types bfloat16 float16", "variants paper", "updates keras f", "zeros", "batched", "many", "large"]


@pytest.mark.parametrize("only", COMPARED)
def test_control_a_wrong_rate_does_not_pass(monkeypatch, only):
    """A hundredth off in the model: every check that compares with it must see that, also where parameters have 8 bits."""
    monkeypatch.setattr(gpu_checks, "MODEL_RATE", gpu_checks.RATE * (1.5 if "bfloat16" in only else 1.01))
    assert all(problem and "AssertionError" in problem for problem in outcomes(only=only).values())


class Broken:
    """xla_lamb's optimizer, but that skips nothing, or that adds to what it returns."""

    def __init__(self, opt, skips=True, off=0.0):
        self.opt, self.skips, self.off = opt, skips, off
        self.init = opt.init

    def step(self, g, s, p, **options):
        if not self.skips:
            options.pop("skip", None)
        p, s, stats = self.opt.step(g, s, p, **options)
        return [x * (1 + self.off) for x in p], s, stats

    def update(self, g, s, p, **options):
        return self.opt.update(g, s, p, **options)


@pytest.mark.parametrize(
    "only, options",
    [
        ("skipped float32 float32", dict(skips=False)),
        ("skipped float32 float32", dict(off=1e-6)),
        ("broken is skipped nan", dict(off=1e-6)),
        ("broken breaks its layer alone nan", dict(off=np.nan)),
    ],
)
def test_control_a_step_that_changes_bits_does_not_pass(monkeypatch, only, options):
    lamb = gpu_checks.lamb
    monkeypatch.setattr(gpu_checks, "lamb", lambda *args, **kwargs: Broken(lamb(*args, **kwargs), **options))
    assert all(outcomes(only=only).values())


def test_control_norms_and_halves(monkeypatch):
    norm, moments = gpu_checks.model64.grad_norm, gpu_checks.same_bits
    monkeypatch.setattr(gpu_checks.model64, "grad_norm", lambda grads: 1.00001 * norm(grads))
    assert all(outcomes(only="norms").values())
    monkeypatch.setattr(gpu_checks, "same_bits", lambda a, b, what: moments([x + 1 for x in a], b, what))
    assert all(outcomes(only="halves l2").values())


def test_control_huge_sees_another_result(monkeypatch):
    lamb = gpu_checks.lamb
    monkeypatch.setattr(gpu_checks, "lamb", lambda: lamb(gpu_checks.RATE * 1.01))
    assert all(outcomes(only="huge").values())


def test_a_gpu_that_is_too_small_is_told():
    assert gpu_checks.huge(1 << 62).startswith("skipped: ")


# Without optax ------------------------------------------------------------------------------------------------------------

NO_OPTAX = """
import sys
sys.modules["optax"] = None  # an import of it fails
from benchmarks import gpu_checks, gpu_speed
lines = []
for only in ("types bfloat16 f", "updates optax b", "variants nvlamb"):
    assert gpu_checks.run("cpu", small=True, say=lines.append, only=only), lines
print(gpu_speed.measure([(9,)], forms=("call",), rounds=1, least_copied=800)["missing"])
"""


def test_without_optax():
    """A stand-in gives the state its tree; the comparison is left out, and the report says so."""
    assert helpers.python(NO_OPTAX).stdout.strip() == "{'optax.lamb': 'there is no optax'}"


# Figures ------------------------------------------------------------------------------------------------------------------


def test_what_is_not_compiled_in_time_is_left_out():
    late = time.time() - 1
    result = gpu_speed.measure([(9,)], contenders=("xla_lamb", "optax.lamb"), forms=("call",), rounds=1, least_copied=800, until=late)
    assert set(result["missing"].values()) == {"was not compiled in time"} and result["results"] == []
    assert "optax.lamb call: was not compiled in time" in "\n".join(gpu.speed_table(gpu.derive({"set": "x", "mode": "y", **result})))


def test_what_cannot_be_compiled_is_told(monkeypatch):
    def broken(*arguments):
        raise ValueError("no such kernel")

    monkeypatch.setattr(gpu_speed, "steps", lambda: ({"xla_lamb": broken}, lambda p: p))
    result = gpu_speed.measure([(9,)], contenders=("xla_lamb",), forms=("call",), rounds=1, least_copied=800)
    assert result["missing"] == {"xla_lamb call": "ValueError: no such kernel"}


def test_figures():
    """By hand: 1,000 million parameters are 28 GB; the fastest copy of 8 GB takes 2 s, so 4 GB/s, and the floor is 7 s."""
    row = lambda contender, form, *seconds: dict(
        contender=contender, form=form, seconds=seconds, extra_bytes=None, temporary_bytes=0, trace_s=1.0, compile_s=2.0
    )
    result = gpu.derive(
        dict(
            set="bert-large", mode="graphs on", parameters=10**9, tensors=1, copied_bytes=8 * 10**9, missing={},
            copies=[dict(what="copy", form="call", seconds=[4.0]), dict(what="x + 1", form="call", seconds=[9.0, 2.0, 1.0])],
            results=[row("xla_lamb", "loop", 8.0), row("optax.lamb", "loop", 20.0, 30.0, 16.0)],
        )
    )  # fmt: skip
    assert result["copy_bytes_per_s"] == 4e9 and result["floor_s"] == 7
    ours, theirs = result["results"]
    assert ours["of_copy"] == 0.875 and theirs["times_ours"] == 2.5 and theirs["best_s"] == 16
    found = gpu.goals({"speed": [result]})
    assert [(g["goal"], g["value"], g["met"]) for g in found] == [("of_copy", 0.875, True), ("times_ours", 2.5, False)]
    assert gpu.goals({"speed": [{**result, "results": [ours]}]})[1]["met"] is None
    assert " 87.5 " in "\n".join(gpu.speed_table(result))
