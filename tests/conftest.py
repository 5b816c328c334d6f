"""What every test needs before it imports a framework: eight CPU devices, the tree's own package, and no setting of the caller's."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).absolute().parent
for path in (str(TESTS.parent), str(TESTS)):
    if path not in sys.path:
        sys.path.insert(0, path)

os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
os.environ["KERAS_BACKEND"] = os.environ.get("XLA_LAMB_TESTED_KERAS_BACKEND", "tensorflow")  # another one in test_keras_jax.py
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # for meshes; JAX puts all else on the first of them
tested = os.environ.get("XLA_LAMB_TESTED_LIBRARY")  # another library than the tree's own
for name in ("XLA_LAMB_IMPLEMENTATION", "XLA_LAMB_LIBRARY", "JAX_ENABLE_X64", "NPROC", "KERAS_HOME"):
    os.environ.pop(name, None)
if tested:
    os.environ["XLA_LAMB_LIBRARY"] = tested

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# The same examples in every run: a failure must not come and go with the seed.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture
def x64():
    """64-bit types in JAX for one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def no_leftovers():
    """In one process for all files, what earlier ones compiled slows down Python's garbage collector for the later ones."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
