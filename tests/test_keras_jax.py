"""test_keras.py once more, on Keras's JAX backend: one process has one backend."""

import re

import helpers


# Without what no backend has a part in, and what runs uncompiled, operation by operation, for minutes.
ELSEWHERE = "not bad_options and not without and not eagerly"


def test_on_jax():
    code = f"""
import sys, pytest
status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", {ELSEWHERE!r}, {str(helpers.TESTS / "test_keras.py")!r}])
import keras
assert keras.backend.backend() == "jax"
sys.exit(status)
"""
    run = helpers.python(code, XLA_LAMB_TESTED_KERAS_BACKEND="jax", timeout=1200, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 50
