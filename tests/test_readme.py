"""The examples of the README and of the docstrings run as they stand."""

import doctest
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).absolute().parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("number", range(4))
def test_example(number):
    # A warning would mean that the example ran the reference.
    run = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", BLOCKS[number]], cwd=README.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_docstrings():
    import xla_lamb.keras.optimizer
    import xla_lamb.optax
    from xla_lamb.minimize import loss_scaling, model, pipeline, weight_decay

    for module in (xla_lamb.optax, xla_lamb.keras.optimizer, loss_scaling, model, pipeline, weight_decay):
        failed, tried = doctest.testmod(module)
        assert tried > 0 and failed == 0
