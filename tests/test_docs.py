"""The pages in docs/: each says what maps to what, and its examples run as they stand."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).absolute().parent.parent
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TITLES = {
    "from_apex": "From apex",
    "from_keras": "From Keras",
    "from_optax": "From optax",
    "from_tf_addons": "From TensorFlow Addons",
    "minimize": "Minimize in steps",
}
GO_ON = ("minimize",)  # pages whose examples go on from each other: one process runs them all


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(code, folder):
    """Exit status and output of a fresh process, where a RuntimeWarning, that the example runs the reference, is an error."""
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=folder,
        env=dict(environment, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-5000:]


def test_the_pages():
    assert set(TITLES) <= set(PAGES)
    for name, title in TITLES.items():
        assert re.search(rf"^# {title}$", PAGES[name], re.MULTILINE), name
        assert re.search(r"^\|.*\|\n\|(?:-+\|)+\n\|", PAGES[name], re.MULTILINE), f"{name} has no table"
        assert any("assert " in block for block in blocks(PAGES[name])), f"{name} has no example that checks itself"
        assert PAGES[name].count("\n```") == 2 * len(re.findall(r"^```\w+$", PAGES[name], re.MULTILINE)), f"{name}: a block is not closed"


EXAMPLES = [
    (name, number, block)
    for name, page in PAGES.items()
    for number, block in enumerate(["\n".join(blocks(page))] if name in GO_ON else blocks(page), 1)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The examples, two at a time: they wait for imports more than they compute."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield [pool.submit(run, code, tmp_path_factory.mktemp(name)) for name, _, code in EXAMPLES]


@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=[f"{name}-{number}" for name, number, _ in EXAMPLES])
def test_example(runs, index):
    status, output = runs[index].result()
    assert status == 0, output


def test_control_a_warning_or_a_failed_assert_is_seen(tmp_path):
    status, output = run("import warnings; warnings.warn('the reference', RuntimeWarning)", tmp_path)
    assert status != 0 and "RuntimeWarning: the reference" in output
    status, output = run("assert 1 == 2", tmp_path)
    assert status != 0 and "AssertionError" in output
