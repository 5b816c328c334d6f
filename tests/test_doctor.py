"""python -m xla_lamb doctor: what it says is what happens."""

import json
import os
import subprocess
import sys

import helpers
from xla_lamb import doctor, library


def run(*arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-m", "xla_lamb", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": "", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_json():
    report = json.loads(run("--json"))
    calls = ["xla_lamb_step", "xla_lamb_moments", "xla_lamb_apply", "xla_lamb_grad_norm"]
    assert report["library"]["path"] == library.load().path
    assert report["library"]["xla_ffi"] == "0.1"
    assert [(h["name"], h["platform"]) for h in report["library"]["handlers"]] == [(c, p) for p in ("cpu", "cuda") for c in calls]
    assert report["library"]["cuda"]["runtime"] and report["library"]["cuda"]["driver"] is None
    for framework in ("jax", "tensorflow"):
        assert report[framework]["problem"] is None
        assert report[framework]["registered"] == {"cpu": calls, "cuda": calls}
        assert [d["path"] for d in report[framework]["devices"]] == ["fused kernel"]


def test_without_a_library(tmp_path):
    missing = str(tmp_path / "nothing.so")
    report = json.loads(run("--json", XLA_LAMB_LIBRARY=missing))
    assert missing in report["library"]["problem"]
    for framework in ("jax", "tensorflow"):
        assert report[framework]["registered"] == {"cpu": [], "cuda": []}
        (device,) = report[framework]["devices"]
        assert device["path"] == "reference" and missing in device["why"]


# In this process, which spares two that start both frameworks: the variable is read for each report.


def test_reference_asked_for_in_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_LAMB_IMPLEMENTATION", "reference")
    report = doctor.report()
    assert report["implementation"] == "reference"
    assert report["jax"]["devices"][0]["why"] == "the reference was asked for"


def test_bad_environment(monkeypatch):
    monkeypatch.setenv("XLA_LAMB_IMPLEMENTATION", "fast")
    report = doctor.report()
    assert "'fast'" in report["implementation"] and "XLA_LAMB_IMPLEMENTATION" in report["implementation"]
    assert "'fast'" in report["jax"]["problem"]


def test_text():
    text = doctor.text(doctor.report())
    assert "cpu:0: fused kernel" in text
    assert "registered for cpu: xla_lamb_step" in text
    assert "registered for cuda: xla_lamb_step" in text
    assert "this machine has no NVIDIA driver" in text


def test_library_of_the_cpu_alone():
    text = run(XLA_LAMB_LIBRARY=helpers.emulated_library())
    assert "CUDA: no kernels: the library was built for the CPU alone" in text
    assert "registered for cuda: nothing" in text
