"""xla_lamb.trust: the numbers of the table against float64 models, the table as an object, and what its pictures show."""

import doctest
import json
import os
import sys

import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

import helpers
import model64
import xla_lamb
import xla_lamb.tensorflow
from xla_lamb import trust
from xla_lamb.trust import TrustRatios, plot, trust_ratios

SHAPES = helpers.SHAPES
NAMES = [f"layer_{i}/w" for i in range(len(SHAPES))]
LAYERS = [1, 0, 0, 1, 2, 0]
LAYERED = [f"layer_0/w[{i}]" for i in range(3)] + NAMES[1:3] + [f"layer_4/w[{i},{j}]" for i in range(7) for j in range(3)] + NAMES[5:]
MASK = [True, False] * 3


def tree_of(leaves):
    return {f"layer_{i}": {"w": x} for i, x in enumerate(leaves)}


def expected(steps, rules, **lists):
    """The rows that the float64 model has after the last of some steps: [N, 3]."""
    state = model64.init(helpers.tree())
    for g in helpers.gradients(steps):
        state, stats = model64.step(state, g, rules, 0.05, **lists)
    return np.concatenate([x.reshape(-1, 3) for x in stats.trust])


def in_jax(steps, variant="optax", lists=None, **options):
    """The table of the last of some steps in JAX."""
    lists = {{"decay_mask": "mask"}.get(name, name): tree_of(values) for name, values in (lists or {}).items()}
    opt = xla_lamb.lamb(0.05, variant=variant, **lists, **options)
    params = tree_of(map(jnp.asarray, helpers.tree()))
    state = opt.init(params)
    for g in helpers.gradients(steps):
        params, state, stats = opt.donated_step(tree_of(map(jnp.asarray, g)), state, params, stats=True)
    return trust_ratios(params, stats)


def in_tensorflow(steps, variant="optax", lists=None, **options):
    variables = [tf.Variable(x, name=name) for x, name in zip(helpers.tree(), NAMES)]
    state = xla_lamb.tensorflow.init_state(variables)
    for g in helpers.gradients(steps):
        stats = xla_lamb.tensorflow.lamb_step(variables, g, state, 0.05, variant=variant, stats=True, **(lists or {}), **options)
    return trust_ratios(variables, stats)


def numbers(table):
    return np.stack([table.param_norm, table.update_norm, table.ratio], axis=1)


def assert_numbers(table, rows):
    np.testing.assert_allclose(numbers(table), rows, rtol=2e-6, atol=0)


# Numbers ------------------------------------------------------------------------------------------------------------------

CASES = {
    "plain": dict(),
    "decay": dict(weight_decay=0.1),
    "masks": dict(weight_decay=0.1, lists=dict(decay_mask=MASK, adapt_mask=MASK[::-1])),
    "layers": dict(lists=dict(layer_axes=LAYERS)),
    "masks and layers": dict(weight_decay=0.1, lists=dict(decay_mask=MASK, adapt_mask=MASK[::-1], layer_axes=LAYERS)),
    "decoupled": dict(variant="keras", weight_decay=0.1),  # |p| is that of the decayed parameter
    "bounds": dict(variant="deepspeed", ratio_bounds=(0.5, 1.5)),
}
RUNS = {"jax": (in_jax, "fused"), "jax-reference": (in_jax, "reference"), "tensorflow": (in_tensorflow, "fused")}


@pytest.mark.parametrize("name, run", [(name, "jax") for name in CASES] + [("masks and layers", run) for run in ("jax-reference", "tensorflow")])
def test_like_the_model(name, run):
    case = dict(CASES[name])
    table = RUNS[run][0](3, implementation=RUNS[run][1], **case)
    lists, rules = case.pop("lists", {}), model64.PRESETS[case.pop("variant", "optax")].replace(**case)
    assert table.names == tuple(LAYERED if "layers" in name else NAMES)
    assert_numbers(table, expected(3, rules, **lists))
    assert not table.skipped and table.took_step.all()


def test_the_first_step_in_plain_numpy():
    """At step 1 the corrected moments are g and g^2, whatever the betas."""
    table = in_jax(1)
    for row, p, g in zip(table, helpers.tree(), helpers.gradients(1)[0], strict=True):
        p, g = np.float64(p), np.float64(g)
        p_norm, u_norm = np.linalg.norm(p), np.linalg.norm(g / (np.abs(g) + 1e-6))
        ratio = p_norm / u_norm if p.size else 1.0
        np.testing.assert_allclose(row[1:], (p_norm, u_norm, ratio), rtol=2e-6)


def test_excluded_tensors_have_ratio_1():
    table = in_jax(2, lists=dict(adapt_mask=MASK))
    for row, adapts in zip(table, MASK, strict=True):
        if row.name != "layer_3/w":  # the empty one
            assert (row.ratio == 1) != adapts and abs(row.param_norm / row.update_norm - 1) > 0.01


def test_the_comparison_notices():
    """Negative control: another eps, layers in another order, norms of the tensor instead of the layers."""
    table = in_jax(3, lists=dict(layer_axes=LAYERS))
    good = expected(3, model64.Rules(), layer_axes=LAYERS)
    assert_numbers(table, good)
    whole = expected(3, model64.Rules())
    for bad in (expected(3, model64.Rules(eps=1e-3), layer_axes=LAYERS), good[[1, 0, *range(2, len(good))]], np.vstack([[whole[0]] * 3, good[3:]])):
        with pytest.raises(AssertionError):
            assert_numbers(table, bad)


def test_a_skipped_step_is_all_zeros():
    opt = xla_lamb.lamb(0.05, nonfinite="skip")
    params = {"w": jnp.ones(3), "b": jnp.zeros(2)}
    step = jax.jit(lambda g, skip: opt.step({"w": g, "b": jnp.ones(2)}, opt.init(params), params, skip=skip, stats=True)[2])
    for g, skip, skipped in ((1, False, False), (1, True, True), (np.inf, False, True)):
        table = trust_ratios(params, step(np.float32([g, 1, 1]), skip))
        assert (table.skipped, numbers(table).any(), table.took_step.tolist()) == (skipped, not skipped, [not skipped] * 2)
        assert np.isnan(list(table.summary().values())).all() == str(table).endswith("the step was skipped") == skipped


# Names and refused input --------------------------------------------------------------------------------------------------


def test_names():
    opt = xla_lamb.lamb(0.1)
    for params, names in (
        ({"encoder": [{"kernel": jnp.ones((2, 2))}], "bias": jnp.ones(2)}, ("bias", "encoder/0/kernel")),
        (jnp.ones(3), ("(the only one)",)),
    ):
        *_, stats = opt.step(params, opt.init(params), params, stats=True)
        assert trust_ratios(params, stats).names == names
    # Eager variables have equal names unless they are given some.
    variables = [tf.Variable(tf.ones(2)) for _ in range(3)] + [tf.Variable(tf.ones(2), name="Variable_1")]
    stats = xla_lamb.tensorflow.lamb_step(variables, variables, xla_lamb.tensorflow.init_state(variables), 0.1, stats=True)
    assert trust_ratios(variables, stats).names == ("Variable", "Variable_2", "Variable_3", "Variable_1")


def test_inside_a_compiled_function():
    opt = xla_lamb.lamb(0.1)
    params = {"w": jnp.ones(2)}

    @jax.jit
    def step(params, state):
        *_, stats = opt.step(params, state, params, stats=True)
        return trust_ratios(params, stats).ratio

    with pytest.raises(TypeError, match="inside jit"):
        step(params, opt.init(params))

    variables = [tf.Variable(tf.ones(2))]
    state = xla_lamb.tensorflow.init_state(variables)

    @tf.function(autograph=False)
    def graph_step():
        return trust_ratios(variables, xla_lamb.tensorflow.lamb_step(variables, variables, state, 0.1, stats=True)).ratio

    with pytest.raises(TypeError, match="inside tf.function"):
        graph_step()


def test_refused():
    opt = xla_lamb.lamb(0.1)
    params = {"w": jnp.ones(2)}
    *_, stats = opt.step(params, opt.init(params), params, stats=True)
    with pytest.raises(ValueError, match="not the stats of these parameters"):
        trust_ratios({"v": jnp.ones(2)}, stats)
    with pytest.raises(TypeError, match="StepStats that a step with stats=True returns, not dict"):
        trust_ratios(params, {"w": np.ones(3)})
    variables = [tf.Variable(tf.ones(2))]
    state = xla_lamb.tensorflow.init_state(variables)
    with pytest.raises(ValueError, match="stats=True"):
        trust_ratios(variables, xla_lamb.tensorflow.lamb_step(variables, variables, state, 0.1))
    with pytest.raises(ValueError, match="2 tensors, but the stats of 1"):
        trust_ratios(variables * 2, xla_lamb.tensorflow.lamb_step(variables, variables, state, 0.1, stats=True))
    with pytest.raises(ValueError, match=r"update_norm must have one number for each of the 2 names, but has shape \(1,\)"):
        TrustRatios(["a", "b"], [1, 2], [1], [1, 2])
    with pytest.raises(ValueError, match=r"stats of a must have the shape \[\*layer_shape, 3\], not \(2,\)"):
        TrustRatios.of(["a"], [np.ones(2)])


# The table as an object ---------------------------------------------------------------------------------------------------


def table_of(ratio, names=None, param_norm=2.0, update_norm=4.0):
    n = len(ratio)
    return TrustRatios(names or [f"v{i}" for i in range(n)], np.full(n, param_norm), np.full(n, update_norm), ratio)


def test_the_table():
    table = TrustRatios.of(["a", "b"], [np.float32([1, 2, 0.5]), np.float32([[3, 1, 3], [0, 7, 1]])])
    assert table.names == ("a", "b[0]", "b[1]") and len(table) == 3
    assert [tuple(row) for row in table] == [("a", 1, 2, 0.5), ("b[0]", 3, 1, 3), ("b[1]", 0, 7, 1)]
    assert table["b[0]"] == trust.Row("b[0]", 3, 1, 3) and "a" in table and "b" not in table
    assert table.summary() == {"min": 0.5, "median": 1, "max": 3}
    assert json.loads(json.dumps(table.to_dict())) == {
        row.name: {"param_norm": row.param_norm, "update_norm": row.update_norm, "ratio": row.ratio} for row in table
    }
    assert str(table).split("\n") == [
        "      |p|  |u|  ratio",
        "a       1    2    0.5",
        "b[0]    3    1      3",
        "b[1]    0    7      1",
        "ratio: min 0.5, median 1, max 3",
    ]
    assert repr(table) == "<TrustRatios of 3 tensors or layers: ratio: min 0.5, median 1, max 3>"
    with pytest.raises(KeyError, match=r"no 'b'; there are b\[0\], b\[1\]"):
        table["b"]
    with pytest.raises(ValueError, match="read-only"):
        table.ratio[0] = 1
    with pytest.raises(AttributeError):
        table.names = ()


def test_summary_leaves_out_what_took_no_step():
    table = TrustRatios(["a", "b", "c"], [1, 0, 0], [1, 0, 2], [5, 0, 1])
    assert table.took_step.tolist() == [True, False, True] and not table.skipped
    assert table.summary() == {"min": 1, "median": 3, "max": 5}
    assert np.isnan(table_of([1, np.nan]).summary()["min"])
    assert all(np.isnan(x) for x in table_of([]).summary().values())


# The picture --------------------------------------------------------------------------------------------------------------


def pixels(path, color):
    """How many pixels of a PNG have just that color."""
    image = np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int)
    return int(np.all(image == [int(color[i : i + 2], 16) for i in (1, 3, 5)], axis=-1).sum())


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_one_table_shows_its_numbers():
    table = TrustRatios(list("abcd"), [1, 0, 3, np.nan], [2, 8, np.inf, 5], [0.5, 1, 0, np.nan])
    figure = trust._draw([table], [7], "T")
    left, right = figure.axes
    lines = [*left.lines, *right.lines]
    points = {line.get_color(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in lines if line.get_marker() == "o"}
    assert points == {trust._RATIO: ([0.5, 1], [0, 1]), trust._PARAM: ([1, 3], [0, 2]), trust._UPDATE: ([2, 8, 5], [0, 1, 3])}
    ends = {(line.get_color(), line.get_marker()): line.get_ydata().tolist() for line in lines if line.get_marker() in ("<", ">", "X")}
    assert ends == {
        (trust._RATIO, "<"): [2], (trust._RATIO, "X"): [3], (trust._PARAM, "<"): [1], (trust._PARAM, "X"): [3], (trust._UPDATE, ">"): [2]
    }  # fmt: skip
    assert legend(figure) == ["trust ratio", "|p|", "|u|", "0", "infinite", "NaN"]
    assert [label.get_text() for label in left.get_yticklabels()] == list("abcd")
    assert left.get_xscale() == right.get_xscale() == "log"
    assert "at step 7" in right.get_title(loc="left")


def test_a_history_is_a_heatmap(tmp_path):
    """Its colors, in the PNG: those of zero, infinite and NaN ratios and of skipped steps only where there are some."""
    plain = [table_of([0.1, 1.0, 10.0, 3.0]) for _ in range(4)]
    plot(plain, tmp_path / "plain.png", steps=[10, 20, 30, 40])
    nothing = table_of([0.0] * 4, param_norm=0.0, update_norm=0.0)
    plot([*plain, table_of([0.1, 0.0, np.inf, np.nan]), nothing], tmp_path / "odd.png")
    for color in (trust._ZERO, trust._INFINITE, trust._NAN, trust._NO_STEP):
        assert pixels(tmp_path / "plain.png", color) < 1000 < pixels(tmp_path / "odd.png", color), color
    figure = trust._draw([*plain, table_of([0.1, 0.0, np.inf, np.nan]), nothing], [1, 2, 3, 4, 5, 6], "T")
    assert legend(figure)[:4] == ["no step", "ratio 0", "ratio infinite", "ratio NaN"]
    image = figure.axes[0].images[0].get_array()
    assert image.shape[:2] == (4, 6)
    assert len({tuple(np.round(x, 3)) for x in image[:, 0]}) == 4  # four ratios, four colors
    assert "at step 5" in figure.axes[1].get_title(loc="left")  # the last that was not skipped


@pytest.mark.parametrize("rows, columns", [(1, 1), (400, 700)])
def test_any_size_is_legible(tmp_path, monkeypatch, rows, columns):
    names = [f"encoder/layer_{i}/" + "attention/" * 8 + "kernel" for i in range(rows)]
    tables = [table_of(np.geomspace(1e-3, 10, rows) * (k + 1), names) for k in range(columns)]
    figures, draw = [], trust._draw
    monkeypatch.setattr(trust, "_draw", lambda *args: figures.append(draw(*args)) or figures[0])
    plot(tables, tmp_path / "trust.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "trust.png").shape
    assert 300 < height <= 2000 and width <= 1500
    boxes = [label.get_window_extent() for label in figures[0].axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in zip(boxes, boxes[1:])), "labels overlap"
    assert len(boxes) >= min(rows, 100) and min(box.x0 for box in boxes) >= 0, boxes[0]
    assert figures[0].axes[0].get_window_extent().width > 400


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ratio, columns", [([0.0, 0.0], 1), ([np.nan, np.inf], 2), ([1.0, 1.0], 2), ([1e-45, 3e38], 1), ([1e-45, 3e38], 2)])
def test_ratios_without_a_scale(tmp_path, ratio, columns):
    plot([table_of(ratio, param_norm=0, update_norm=np.nan)] * columns, tmp_path / "trust.png")
    assert matplotlib.image.imread(tmp_path / "trust.png").size


def test_nothing_is_half_written(tmp_path, monkeypatch):
    path = tmp_path / "trust.png"
    plot(table_of([1.0]), path)
    before = path.read_bytes()

    def half(self, file, **_):
        with open(file, "wb") as f:
            f.write(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", half)
        with pytest.raises(OSError, match="no space"):
            plot(table_of([2.0]), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["trust.png"]
    plot(table_of([2.0]), path)
    assert path.read_bytes() != before and os.listdir(tmp_path) == ["trust.png"]


def test_refused_pictures(tmp_path, monkeypatch):
    table = table_of([1.0, 2.0])
    (tmp_path / "folder.png").mkdir()
    for tables, name, options, error, text in (
        (table, "none/trust.png", {}, FileNotFoundError, "there is no folder .*none"),
        (table, "trust.pdf", {}, ValueError, "must end with"),
        (table, "folder.png", {}, ValueError, "which is a folder"),
        ([], "trust.png", {}, ValueError, "tables is empty"),
        (table_of([]), "trust.png", {}, ValueError, "no rows"),
        ([table, table_of([1.0, 2.0], ["v0", "x"])], "trust.png", {}, ValueError, "table 1 has not the rows of table 0: they differ in v1, x"),
        ([table, table_of([1.0, 2.0], ["v1", "v0"])], "trust.png", {}, ValueError, "their order differs"),
        ([table] * 3, "trust.png", dict(steps=[1, 2]), ValueError, "3 tables, but 2 steps"),
    ):
        with pytest.raises(error, match=text):
            plot(tables, tmp_path / name, **options)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot(table, tmp_path / "trust.png")
    assert os.listdir(tmp_path) == ["folder.png"]


def test_imports_no_more_than_it_needs(tmp_path):
    code = """
import sys
from xla_lamb.trust import TrustRatios, plot
loaded = {"jax", "tensorflow", "keras", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
plot(TrustRatios(["a"], [1], [2], [0.5]), sys.argv[1])
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    helpers.python(code, tmp_path / "trust.png", DISPLAY=None, MPLBACKEND="TkAgg")
    assert matplotlib.image.imread(tmp_path / "trust.png").size


def test_the_docstring_example():
    result = doctest.testmod(trust)
    assert result.attempted >= 6 and result.failed == 0
