"""The CUDA kernel, executed: under emulation it takes the CPU kernel's place, and the CPU kernel's own tests run on it.

//cuda:kernel_test proves more of the kernel, and under sanitizers; here the whole way from JAX to it is the one that a GPU has.
"""

import re
import subprocess
import sys

import pytest

import helpers

# Without what is about the CPU or the reference alone, and what takes minutes at a microsecond for each element.
ELSEWHERE = "not reference and not sparse and not instruction_set and not ten_million and not more_elements and not norms_of_many"


@pytest.mark.parametrize("file, least", [("test_kernel.py", 40), ("test_traps.py", 20)])
def test_on_the_emulated_kernel(file, least):
    code = f"""
import sys, pytest
from xla_lamb import library
status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", {ELSEWHERE!r}, {str(helpers.TESTS / file)!r}])
assert library.load().instruction_set == "emulated CUDA"
sys.exit(status)
"""
    run = helpers.python(code, XLA_LAMB_TESTED_LIBRARY=helpers.emulated_library(), timeout=1500, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= least
