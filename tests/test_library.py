"""The shared library missing, refused or asked for in vain: the step works through the reference, says so once, and JAX lives."""

import shutil

import pytest

import helpers

# Two optimizers and two steps each, after the reference has been told to be quiet about nothing.
STEPS = """
import sys, warnings
caught = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jax, jax.numpy as jnp, numpy as np
    import xla_lamb
    {before}
    params = [np.arange(5, dtype=np.float32), np.ones((2, 3), np.float32)]
    for _ in range(2):
        opt = xla_lamb.lamb(0.1, weight_decay=0.01)
        state, p = opt.init(params), params
        step = jax.jit(opt.step)
        for _ in range(2):
            p, state = step([x * 0.1 + 1 for x in params], state, p)
    print("zeros", jnp.zeros(2).tolist())
    print("value", float(p[0][4]))
    print("text", "xla_lamb_step" in step.lower(params, state, params).as_text())
ours = [str(w.message) for w in caught if "xla_lamb" in str(w.message) or "xla_lamb" in str(w.filename)]
for text in ours:
    print("warning", text.replace("\\n", " "))
print("warnings", len(ours))
"""


@pytest.fixture
def bare(tmp_path):
    """A copy of the package without a library anywhere near it."""
    shutil.copytree(helpers.ROOT / "xla_lamb", tmp_path / "xla_lamb", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def steps(path=helpers.ROOT, before="", **env):
    out = helpers.python(STEPS.format(before=before), path=path, **env).stdout
    fields = {}
    for line in out.splitlines():
        key, _, rest = line.partition(" ")
        fields.setdefault(key, []).append(rest)
    assert fields["zeros"] == ["[0.0, 0.0]"], out
    return fields


@pytest.fixture(scope="module")
def value():
    """What the steps give with the kernel; and that they use it, in silence."""
    fields = steps()
    assert fields["text"] == ["True"] and fields["warnings"] == ["0"], fields
    return float(fields["value"][0])


def reference_with_one_warning(fields, value, *said):
    assert fields["text"] == ["False"]
    assert float(fields["value"][0]) == pytest.approx(value, rel=1e-6)
    assert fields["warnings"] == ["1"], fields.get("warning")
    for part in said:
        assert part in fields["warning"][0]


def test_no_library(bare, value):
    reference_with_one_warning(steps(bare), value)


def test_library_path_that_does_not_exist(value, tmp_path):
    reference_with_one_warning(steps(XLA_LAMB_LIBRARY=tmp_path / "nowhere.so"), value, "nowhere.so")


def test_garbage_library(value, tmp_path):
    (tmp_path / "garbage.so").write_bytes(b"no ELF at all" * 100)
    reference_with_one_warning(steps(XLA_LAMB_LIBRARY=tmp_path / "garbage.so"), value, "garbage.so")


def test_a_library_of_something_else(value):
    """A proper shared object without our entry point."""
    import _ctypes

    reference_with_one_warning(steps(XLA_LAMB_LIBRARY=_ctypes.__file__), value, _ctypes.__file__)


def test_half_a_library(value, tmp_path):
    """A download or a copy that broke off."""
    whole = find_library().read_bytes()
    (tmp_path / "half.so").write_bytes(whole[: len(whole) // 2])
    reference_with_one_warning(steps(XLA_LAMB_LIBRARY=tmp_path / "half.so"), value, "half.so")


def find_library():
    for path in (helpers.ROOT / "xla_lamb/libxla_lamb.so", helpers.ROOT / "bazel-bin/xla_lamb/libxla_lamb.so"):
        if path.exists():
            return path
    raise AssertionError("no libxla_lamb.so: build //xla_lamb:libxla_lamb.so first")


def test_library_from_the_environment(bare, value):
    """The package alone, and the library where the variable says."""
    fields = steps(bare, XLA_LAMB_LIBRARY=find_library())
    assert fields["text"] == ["True"] and fields["warnings"] == ["0"]
    assert float(fields["value"][0]) == value


def test_library_beside_the_package(bare, value):
    shutil.copy(find_library(), bare / "xla_lamb/libxla_lamb.so")
    fields = steps(bare)
    assert fields["text"] == ["True"] and fields["warnings"] == ["0"]


FUSED = """
import warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
import xla_lamb
params = [np.ones(5, np.float32)]
try:
    opt = xla_lamb.lamb(0.1{argument})
    jax.jit(opt.step)(params, opt.init(params), params)
except Exception as error:
    print("error", error)
print("zeros", jnp.zeros(2).tolist())
"""


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("library", ["missing", "garbage"])
def test_fused_is_an_error_that_says_why(bare, tmp_path, how, library):
    env = {}
    if library == "garbage":
        (tmp_path / "garbage.so").write_bytes(b"no ELF at all" * 100)
        env["XLA_LAMB_LIBRARY"] = tmp_path / "garbage.so"
    if how == "environment":
        env["XLA_LAMB_IMPLEMENTATION"] = "fused"
    code = FUSED.format(argument=', implementation="fused"' if how == "argument" else "")
    out = helpers.python(code, path=bare, **env).stdout
    assert "zeros [0.0, 0.0]" in out
    (line,) = [line for line in out.splitlines() if line.startswith("error ")]
    assert "fused" in line and ("garbage.so" if library == "garbage" else "libxla_lamb.so") in line


def test_reference_by_the_environment_is_silent(bare, value):
    """Who asks for the reference needs no library and gets no warning."""
    fields = steps(bare, XLA_LAMB_IMPLEMENTATION="reference")
    assert fields["text"] == ["False"] and fields["warnings"] == ["0"]
    assert steps(XLA_LAMB_IMPLEMENTATION="reference")["text"] == ["False"]


def test_unknown_implementation_in_the_environment():
    done = helpers.python(FUSED.format(argument=""), XLA_LAMB_IMPLEMENTATION="fastest")
    assert "fastest" in done.stdout


def test_a_second_copy_does_not_register_again(value, tmp_path):
    """A vendored package beside an installed one: the same name at a second address would take JAX's backend down."""
    shutil.copy(find_library(), tmp_path / "second.so")
    first = f"""
    opt = xla_lamb.lamb(0.1)
    jax.jit(opt.step)([jnp.ones(3)], opt.init([jnp.ones(3)]), [jnp.ones(3)])
    for name in [m for m in sys.modules if m.split(".")[0] == "xla_lamb"]:
        del sys.modules[name]
    import os
    os.environ["XLA_LAMB_LIBRARY"] = {str(tmp_path / "second.so")!r}
    import xla_lamb"""
    reference_with_one_warning(steps(before=first.strip()), value, "another copy")


def test_reloading_is_no_second_copy(value):
    fields = steps(before="import importlib; sys.modules.pop('xla_lamb.library', None); importlib.reload(xla_lamb)")
    assert fields["text"] == ["True"] and fields["warnings"] == ["0"]


def test_without_the_library_tensorflow_works_too(bare):
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tensorflow as tf, xla_lamb.tensorflow as ours
    x = tf.Variable([1.0, 2.0])
    state = ours.init_state([x])
    for _ in range(2):
        ours.lamb_step([x], [tf.constant([0.1, 0.2])], state, 0.1)
print("count", sum("xla_lamb" in str(w.message) for w in caught), int(state.iterations), x.numpy().tolist() != [1.0, 2.0])
"""
    assert "count 1 2 True" in helpers.python(code, path=bare).stdout


def test_import_starts_no_framework():
    """Importing the package loads neither; config needs neither."""
    code = """
import sys
import xla_lamb, xla_lamb.config
print("loaded", [m for m in ("jax", "jaxlib", "tensorflow", "keras", "optax") if m in sys.modules])
xla_lamb.lamb
print("then", "jax" in sys.modules, "tensorflow" in sys.modules)
"""
    out = helpers.python(code).stdout
    assert "loaded []" in out and "then True False" in out


def test_import_starts_no_backend():
    """A backend that starts at import takes the devices before the program can choose."""
    code = """
import jax, xla_lamb
opt = xla_lamb.lamb(1e-3)
from jax._src import xla_bridge
print("backends", len(xla_bridge._backends))
"""
    assert "backends 0" in helpers.python(code).stdout
