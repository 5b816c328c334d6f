"""The benchmark's report: contenders in turns, figures that belong together, nothing but JSON on standard output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sets

ROOT = Path(__file__).absolute().parent.parent


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks.step", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_report():
    result = run("--set", "many-small", "--against", "dispatch,memcpy", "--repeats", "2", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["tensors"], report["parameters"]) == (2000, 2_000_000)
    found = report["results"]
    assert set(found) == {"xla_lamb", "dispatch alone", "floor-28", "floor-40"}
    ours = found["xla_lamb"]
    assert ours["path"] == "fused" and ours["times_ours"] == 1 and len(ours["seconds"]) == 2
    assert ours["bytes"] == 28 * 2_000_000 and found["floor-40"]["bytes"] == 40 * 2_000_000
    assert ours["gb_per_s"] == pytest.approx(ours["bytes"] / ours["median_s"] / 1e9)
    assert found["floor-28"]["times_floor_28"] == 1


def test_sets_are_the_models():
    """Of BERT's published sizes, with its heads for pretraining."""
    large = sets.shapes("bert-large")
    assert len(large) == 391 and sets.elements(large) == 335_141_888
    assert sets.elements(sets.shapes("one-big")) == 64 * 2**20


def test_unknown_peer():
    result = run("--against", "adam")
    assert result.returncode == 2 and "adam" in result.stderr
