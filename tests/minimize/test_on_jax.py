"""The other files here once more, on Keras's JAX backend: one process has one backend."""

import re

import helpers

HERE = helpers.TESTS / "minimize"
# Differential privacy takes a tape for everything, and so do the tests with `tensorflow` in their names; the demo's model is one of TensorFlow.
WITHOUT = ("test_on_jax.py", "test_privacy.py", "test_fit.py")

# And without peers whose steps Keras traces anew each time, for minutes; what they prove does not depend on the backend.
ELSEWHERE = "not tensorflow and not test_like_keras and not average_like_keras"


def test_on_jax():
    files = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.name not in WITHOUT]
    code = f"""
import sys, pytest
status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", {ELSEWHERE!r}, *{files!r}])
import keras
assert keras.backend.backend() == "jax"
sys.exit(status)
"""
    run = helpers.python(code, XLA_LAMB_TESTED_KERAS_BACKEND="jax", timeout=1200, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 150
