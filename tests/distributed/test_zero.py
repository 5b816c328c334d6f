"""ZeRO-1: state that zero.state_shardings splits takes the steps of a whole one, and is gathered never; Orbax brings it to other meshes."""

import doctest
import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import helpers
import model64
import xla_lamb
from xla_lamb import zero

HERE = Path(__file__).absolute().parent
for path in (HERE, helpers.ROOT):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import quadratic  # noqa: E402

from examples import regression  # noqa: E402

RATE, CLIP, DECAY, STEPS = 0.1, 0.5, 0.01, 4
NEAR = 2e-6  # float32 against float64, of each tensor's largest value
SPLIT = {"matrix": P("data", None), "stacked": P("data", None, None), "wide": P(None, "data")}
RULES = model64.PRESETS["optax"].replace(weight_decay=DECAY)


def mesh(kind=AxisType.Auto, **axes):
    """Of the first devices."""
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def place(tree, on, specs=None):
    specs = specs or {}
    return {name: jax.device_put(x, NamedSharding(on, specs.get(name, P()))) for name, x in tree.items()}


def specs_of(tree):
    return jax.tree.map(lambda x: x.spec, tree)


# What is split, and how -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec", "axis", "expected"),
    [
        ((8, 3), P(), "data", P("data", None)),
        ((8, 400), P(), "data", P("data", None)),  # the first, though another is larger
        ((6, 400), P(), "data", P(None, "data")),
        ((6, 2), P(), "data", P()),  # none fits
        ((), P(), "data", P()),
        ((0, 4), P(), "data", P(None, "data")),
        ((8, 8), P(None, "model"), "data", P("data", "model")),
        ((3, 8), P(None, "model"), "data", P(None, ("model", "data"))),
        ((3, 4), P(None, "model"), "data", P(None, "model")),  # 4 is a multiple of 4, but not of 2 x 4
        ((4, 6), P("model"), "data", P("model")),
        ((8, 8), P("data"), "data", P("data")),
        ((8, 8), P(None, ("model", "data")), "data", P(None, ("model", "data"))),
        ((8, 2), P(), ("data", "model"), P(("data", "model"), None)),
        ((4, 2), P(), ("data", "model"), P("data", "model")),
        ((4, 3), P(), ("data", "model"), P("data", None)),
        ((8, 8), P("data"), ("data", "model"), P(("data", "model"), None)),
        ((8, 8), P("model"), ["data"], P(("model", "data"), None)),
        ((8, 8), P(), (), P()),
        ((8, 8), P(), ("data", "data"), P("data", None)),
    ],
)
def test_the_first_dimension_with_equal_parts_is_split(shape, spec, axis, expected):
    on = mesh(data=4, model=2)
    param = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, spec))
    adam, *_ = zero.state_shardings(xla_lamb.lamb(RATE), {"a": param}, axis)
    for moment in (adam.mu, adam.nu):
        assert moment["a"].spec == expected and moment["a"].mesh == on
    assert adam.count == NamedSharding(on, P())


def masked(params):
    return {name: name != "matrix" for name in params}


def halves(params):
    return {name: "lamb" if name in ("matrix", "odd") else "other" for name in params}


@pytest.mark.parametrize(
    ("make", "trees"),
    [
        (lambda lamb: lamb, 2),
        (lambda lamb: optax.chain(optax.clip_by_global_norm(1.0), lamb), 2),
        (lambda lamb: optax.MultiSteps(lamb, 2), 3),  # and the accumulated gradients
        (lambda lamb: optax.chain(lamb, optax.ema(0.9)), 3),
        (lambda lamb: optax.masked(lamb, masked), 2),
        (lambda lamb: optax.multi_transform({"lamb": lamb, "other": optax.adam(1.0)}, halves), 2),
        (lambda lamb: optax.inject_hyperparams(optax.lamb)(RATE), 2),
        (lambda lamb: optax.chain(optax.add_noise(0.1, 0.1, 0), optax.trace(0.9)), 1),
    ],
    ids=["lamb", "chain", "MultiSteps", "ema", "masked", "multi_transform", "inject_hyperparams", "add_noise"],
)
def test_all_that_belongs_to_parameters_is_split_and_nothing_else(make, trees):
    opt, params = make(xla_lamb.lamb(RATE)), place(quadratic.start(), mesh(data=8))
    shardings = zero.state_shardings(opt, params)
    state = jax.eval_shape(opt.init, params)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    counted = dict.fromkeys(params, 0)
    for (path, sharding), x in zip(jax.tree_util.tree_leaves_with_path(shardings), jax.tree.leaves(state)):
        name = getattr(path[-1], "key", None)
        if name in params:
            counted[name] += 1
            assert x.shape == params[name].shape and sharding.spec == SPLIT.get(name, P())
        else:
            assert sharding.spec == P(), path
    whole = {name: trees for name in params}
    assert counted == (whole | {"matrix": 0} if isinstance(state, optax.MaskedState) else whole)


def test_names_and_shapes_tell_what_belongs_to_which_parameter():
    on = mesh(data=2, model=4)
    split = place({"a": jnp.ones((4, 8)), "b": jnp.ones((8, 4))}, on, {"a": P(None, "model"), "b": P("model")})
    params = {"a": split["a"], "under": {"a": split["b"]}, "list": [split["b"], split["a"]]}
    mu = zero.state_shardings(xla_lamb.lamb(RATE), params)[0].mu
    a, b = P("data", "model"), P(("model", "data"), None)
    assert specs_of(mu) == {"a": a, "under": {"a": b}, "list": [b, a]}
    # Rows and columns of Adafactor have the names, and other shapes.
    factored = zero.state_shardings(optax.adafactor(RATE, min_dim_size_to_factor=2), params)[0]
    assert set(jax.tree.leaves(specs_of((factored.v_row, factored.v_col)))) == {P()}
    assert zero.state_shardings(xla_lamb.lamb(RATE), split["a"])[0].nu.spec == a  # the only one has no name


def test_parameters_without_a_sharding_count_as_replicated():
    on, opt = mesh(data=8), xla_lamb.lamb(RATE)
    shapes = jax.eval_shape(quadratic.start)
    expected = zero.state_shardings(opt, place(quadratic.start(), on))
    for params in (quadratic.start(), shapes, jax.tree.map(jnp.asarray, quadratic.start())):
        assert zero.state_shardings(opt, params, mesh=on) == expected
    some = {**shapes, "odd": place(quadratic.start(), on)["odd"]}
    assert zero.state_shardings(opt, some) == expected
    explicit = mesh(AxisType.Explicit, data=8)
    with jax.set_mesh(explicit):  # where shapes know a mesh without devices
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, quadratic.start()))
    given = zero.state_shardings(opt, shapes, mesh=explicit)
    assert {x.mesh for x in jax.tree.leaves(given)} == {explicit} and given[0].mu["matrix"].spec == P("data", None)


def test_memory_kind_stays():
    param = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh(data=8), P(), memory_kind="pinned_host"))
    mu = zero.state_shardings(xla_lamb.lamb(RATE), {"a": param})[0].mu["a"]
    assert mu.spec == P("data", None) and mu.memory_kind == "pinned_host"


def test_what_cannot_be_meant():
    opt, on = xla_lamb.lamb(RATE), mesh(data=4, model=2)
    params = place(quadratic.start(), on)
    mixed = {**params, "odd": jax.device_put(params["odd"], NamedSharding(mesh(data=8), P()))}
    for error, match, *arguments in (
        (ValueError, "axis has 'dta', but the axes of the mesh are 'data', 'model'", opt, params, "dta"),
        (ValueError, "axis has 'fsdp'", opt, params, ("data", "fsdp")),
        (TypeError, "name of a mesh axis, or a tuple of names, not None", opt, params, None),
        (TypeError, "name of a mesh axis, or a tuple of names, not P", opt, params, P("data")),
        (ValueError, "the mesh is not known: give mesh", opt, quadratic.start()),
        (ValueError, "odd is on another mesh, .*'data': 8.* than that of matrix, .*'model': 2", opt, mixed),
        (ValueError, "matrix is on another mesh, .* than the one in mesh", opt, params, "data", mesh(data=8)),
        (TypeError, "mesh must be a jax.sharding.Mesh, not", opt, params, "data", jax.devices()),
        (TypeError, "opt must be an optimizer with a function init", opt.update, params),
        (TypeError, "parameter matrix must be an array or a jax.ShapeDtypeStruct, not 1.0", opt, {**params, "matrix": 1.0}),
    ):
        with pytest.raises(error, match=match):
            zero.state_shardings(*arguments)
    with pytest.raises(TypeError, match="call it before, with the arrays"):
        jax.jit(lambda p: zero.state_shardings(opt, p))(params)


# The numbers, and what travels ----------------------------------------------------------------------------------------------


def lamb(implementation="fused", **options):
    return xla_lamb.lamb(RATE, weight_decay=DECAY, implementation=implementation, **options)


CASES = {
    "step": (lambda: lamb(max_grad_norm=CLIP), dict(rules=RULES.replace(max_grad_norm=CLIP))),
    "layers": (lambda: lamb(layer_axes={**dict.fromkeys(quadratic.NAMES, 0), "stacked": 1}), dict(rules=RULES, layer_axes=[0, 0, 0, 1, 0])),
    "chain": (lambda: optax.chain(optax.clip_by_global_norm(CLIP), lamb()), dict(rules=RULES.replace(max_grad_norm=CLIP))),
    "MultiSteps": (lambda: optax.MultiSteps(lamb(), 2), dict(rules=RULES, every=2)),
    "reference": (lambda: lamb("reference"), dict(rules=RULES)),
}


@functools.lru_cache(maxsize=None)
def compiled(case, axes=(("data", 8),), specs=(), whole=False):
    """(the compiled train step, placed parameters and state, a function that places a batch); `whole`: each device has all of the state."""
    on, opt = mesh(**dict(axes)), CASES[case][0]()
    params = place(quadratic.start(), on, dict(specs))
    shardings = zero.state_shardings(opt, params, () if whole else "data")
    state = jax.jit(opt.init, out_shardings=shardings)(params)

    def train_step(params, state, points):
        grads = jax.grad(quadratic.loss)(params, points)
        if hasattr(opt, "step"):
            return opt.step(grads, state, params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    points = lambda step: place(quadratic.points(step), on, dict.fromkeys(quadratic.NAMES, P("data")))
    # Of the reference XLA would leave the parameters split.
    pinned = (jax.tree.map(lambda x: x.sharding, params), shardings) if case == "reference" else None
    return jax.jit(train_step, out_shardings=pinned).lower(params, state, points(0)).compile(), params, state, points


def train(step, params, state, points, first=0, last=STEPS):
    for i in range(first, last):
        params, state = step(params, state, points(i))
    return params, state


def expected(case, **changes):
    return quadratic.model(STEPS, learning_rate=RATE, **{**CASES[case][1], **changes})


def moments(state):
    return jax.tree.map(np.asarray, helpers.moments(state))


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_float64_model_and_of_a_whole_state(case):
    step, *start = compiled(case)
    params, state = train(step, *start)
    model, inner = expected(case)
    helpers.assert_near(params, model, NEAR)
    count, mu, nu = moments(state)
    assert count == inner.t == STEPS // CASES[case][1].get("every", 1)
    helpers.assert_near((mu, nu), (dict(zip(quadratic.NAMES, inner.m)), dict(zip(quadratic.NAMES, inner.v))), NEAR)
    if case == "step":
        step, *start = compiled(case, whole=True)
        helpers.assert_near((params, state), train(step, *start), NEAR)


def test_control_norms_of_parts_would_show():
    """A device that took the norm of its own part: as if the first axis, here split in 8, had layers."""
    parts = expected("step", layer_axes=[1, 0, 0, 1, 0])[0]
    distance = {name: helpers.error(x, parts[name]) for name, x in expected("step")[0].items()}
    assert distance["matrix"] > 1e3 * NEAR and distance["stacked"] > 1e3 * NEAR


def gathered(hlo):
    """The shapes of all results of all-gathers, sorted."""
    kinds = [kind for kind, op in helpers.collectives(hlo) if op == "all-gather"]
    return sorted(tuple(map(int, dims.split(","))) for kind in kinds for dims in re.findall(r"\w+\[([\d,]+)\]", kind))


@pytest.mark.parametrize("case", CASES)
def test_each_split_parameter_is_gathered_once_and_no_moment(case):
    step, params, state, _ = compiled(case)
    assert gathered(step.as_text()) == sorted(quadratic.SHAPES[name] for name in SPLIT)
    # Parameters come back as they were, and so does the state: the next step needs no other program.
    before, after = jax.tree.map(lambda x: x.sharding, (params, state)), step.output_shardings
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), before, after, (params, state))))
    assert not {op for _, op in helpers.collectives(step.as_text())} - {"all-gather", "all-reduce", "reduce-scatter"}


def test_control_a_whole_state_gathers_nothing_and_a_moment_that_is_read_would_show():
    assert gathered(compiled("step", whole=True)[0].as_text()) == []
    _, _, state, _ = compiled("step")
    read = jax.jit(lambda s: s[0].mu["matrix"], out_shardings=state[0].count.sharding).lower(state).compile()
    assert gathered(read.as_text()) == [quadratic.SHAPES["matrix"]]


def test_the_example_says_what_a_device_holds():
    size = sum(x.nbytes for x in jax.tree.leaves(regression.start()))
    out = helpers.python("from examples import zero1; zero1.main(['--devices', '8', '--steps', '3'])").stdout
    (whole, first, last), (part, *losses) = re.findall(r"([\d,]+) bytes of state on each of 8 devices; loss (\S+) -> (\S+)", out)
    assert int(whole.replace(",", "")) == 2 * size + 4  # and the count
    assert int(part.replace(",", "")) == 2 * size // 8 + 4
    assert losses == [first, last] and float(last) < float(first)


def test_docstring():
    failed, tried = doctest.testmod(zero)
    assert tried > 0 and failed == 0


def bytes_on_first(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("case", "trees"), [("step", 2), ("MultiSteps", 3)])
def test_each_of_eight_devices_holds_an_eighth_of_what_can_be_split(case, trees):
    step, *start = compiled(case)
    _, state = train(step, *start, last=1)
    size = {name: 4 * int(np.prod(shape)) for name, shape in quadratic.SHAPES.items()}
    part = sum(size[name] // 8 if name in SPLIT else size[name] for name in size)
    arrays = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    assert bytes_on_first(arrays) == trees * part
    for shards in zip(*(x.addressable_shards for x in arrays)):  # on the other devices too
        assert sum(s.data.nbytes for s in shards) == trees * part
    _, _, whole, _ = compiled("step", whole=True)  # control
    assert bytes_on_first(whole[0].mu) == sum(size.values())


TENSOR = (("matrix", P(None, "model")), ("odd", P()), ("stacked", P(None, None, "model")), ("wide", P(None, "model")))


def test_tensor_parallel_parameters():
    """On a 4 x 2 mesh each device gathers the rest of its own half of a parameter, and no more."""
    step, params, state, points = compiled("step", (("data", 4), ("model", 2)), TENSOR)
    hlo = step.as_text()
    assert gathered(hlo) == [(3, 8), (8, 3, 1), (16, 3)]  # half of each
    specs = {name: state[0].nu[name].sharding.spec for name in SPLIT}
    assert specs == {"matrix": P("data", "model"), "stacked": P("data", None, "model"), "wide": P(None, ("model", "data"))}
    after = train(step, params, state, points)
    helpers.assert_near(after[0], expected("step")[0], NEAR)
    assert {name: x.sharding.spec for name, x in after[0].items() if name in SPLIT} == {name: spec for name, spec in TENSOR if name in SPLIT}


def test_explicit_axes():
    on, opt = mesh(AxisType.Explicit, data=8), lamb()
    with jax.set_mesh(on):
        params = place(quadratic.start(), on)
        state = jax.jit(opt.init, out_shardings=zero.state_shardings(opt, params))(params)
        for i in range(2):
            grads = {name: params[name] - quadratic.points(i)[name].mean(0) for name in params}
            params, state = jax.jit(opt.step)(grads, state, params)
    helpers.assert_near(params, quadratic.model(2, RULES, RATE)[0], NEAR)
    assert state[0].mu["matrix"].sharding.spec == P("data", None) and not any(params["matrix"].sharding.spec)


# Orbax ----------------------------------------------------------------------------------------------------------------------


def targets(opt, on, specs=None, axis="data"):
    """What Orbax needs to know: shapes and shardings on that mesh."""
    shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = {name: shape(x, NamedSharding(on, (specs or {}).get(name, P()))) for name, x in quadratic.start().items()}
    state = jax.tree.map(shape, jax.eval_shape(opt.init, params), zero.state_shardings(opt, params, axis))
    return {"params": params, "state": state}


def load(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, target)
    kept = jax.tree.map(lambda x, t: x.sharding.is_equivalent_to(t.sharding, x.ndim), restored, target)
    assert all(jax.tree.leaves(kept))
    return restored["params"], restored["state"]


def goes_on(path, devices):
    """In a fresh process with that many devices: the bits that were saved, and the numbers of the run that went on where they were saved."""
    assert jax.device_count() == devices
    params, state = load(path / "checkpoint", targets(CASES["step"][0](), mesh(data=devices)))
    assert len(state[0].mu["matrix"].addressable_shards) == devices
    assert state[0].mu["matrix"].addressable_shards[0].data.shape == (16 // devices, 6)
    with np.load(path / "arrays.npz") as saved:
        arrays = [saved[f"arr_{i}"] for i in range(len(saved.files))]
        middle, end = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    assert helpers.bits((params, state)) == helpers.bits(middle)
    step, _, _, points = compiled("step", (("data", devices),))
    after = train(step, params, state, points, first=2)
    helpers.assert_near(after, end, NEAR)
    helpers.assert_near(after[0], expected("step")[0], NEAR)
    print("went on")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of 8 devices, after half of the steps; and in a file of NumPy the arrays then and at the end."""
    path = tmp_path_factory.mktemp("zero")
    step, params, state, points = compiled("step")
    middle = train(step, params, state, points, last=2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", dict(zip(("params", "state"), middle)))
    end = train(step, *middle, points, first=2)
    np.savez(path / "arrays.npz", *map(np.asarray, jax.tree.leaves((middle, end))))
    return path, middle


@pytest.mark.parametrize("devices", [2, 1])
def test_a_checkpoint_of_eight_devices_goes_on_with(checkpoint, devices):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, test_zero; test_zero.goes_on(pathlib.Path(sys.argv[2]), int(sys.argv[3]))"
    flags = f"--xla_force_host_platform_device_count={devices}"
    assert "went on" in helpers.python(code, HERE, checkpoint[0], devices, XLA_FLAGS=flags).stdout


@pytest.mark.parametrize("axis", ["data", ("data", "model"), ()], ids=str)
def test_a_checkpoint_goes_on_with_other_shardings(checkpoint, axis):
    path, middle = checkpoint
    on = mesh(data=4, model=2)
    params, state = load(path / "checkpoint", targets(CASES["step"][0](), on, dict(TENSOR), axis))
    assert helpers.bits((params, state)) == helpers.bits(middle)
    if axis == "data":
        step, _, _, points = compiled("step", (("data", 4), ("model", 2)), TENSOR)
        helpers.assert_near(train(step, params, state, points, first=2)[0], expected("step")[0], NEAR)
