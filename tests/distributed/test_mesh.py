"""Under jax.jit over a mesh: however tensors are sharded, the numbers are those of one device, and no tensor is gathered."""

import collections
import contextlib
import functools
import math
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import compilers
import helpers
import model64
import xla_lamb
from xla_lamb import library, sharding

BF16 = np.dtype(ml_dtypes.bfloat16)
COUNT = 3  # steps taken before the one that is looked at
RATE, DECAY = 0.05, 0.02
FAST = {"xla_backend_optimization_level": 0}  # LLVM's, half of the time to compile; where numbers are looked at


def mesh_of(explicit=False, **axes):
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * len(axes))


def mesh42(explicit=False):
    return mesh_of(explicit, data=4, model=2)


def put(tree, mesh, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(tree, specs, strict=True)]


def random_step(shapes, seed=0, p_types=None, g_types=None):
    """NumPy p, g, m, v of a step amid a training."""
    p, g, m, v = (helpers.tree(shapes, seed + k) for k in range(4))
    cast = lambda tree, types: [x.astype(t) for x, t in zip(tree, types or [np.float32] * len(tree))]
    return cast(p, p_types), cast(g, g_types), m, [np.square(x) for x in v]


def state_of(opt, p, m, v):
    state = opt.init(p)
    return (state[0]._replace(count=jnp.int32(COUNT), mu=list(m), nu=list(v)), *state[1:])


def one_step(opt, p, g, m, v, method="step"):
    """(HLO, new p or updates, state, stats or None) of one step, compiled; parameters and gradients as they are placed."""
    function = {"step": lambda p, s, g: opt.step(g, s, p, stats=True), "update": lambda p, s, g: (*opt.update(g, s, p), None)}[method]
    args = (p, state_of(opt, p, m, v), g)
    compiled = jax.jit(function).lower(*args).compile(FAST)
    return compiled.as_text(), *compiled(*args)


def model_step(p, g, m, v, rules, **options):
    state = model64.State([np.asarray(x, np.float64) for x in p], m, v, COUNT)
    return model64.step(state, g, rules, RATE, **options)


def check(result, before, rules=model64.PRESETS["optax"].replace(weight_decay=DECAY), **options):
    """Asserts that p (or p plus updates), moments, trust ratios and the norm are those of the float64 model of one device."""
    _, out, state, told = result
    p = before[0]
    want, stats = model_step(*before, rules, **options)
    for x, start, end in zip(out, p, want.p):
        end = end if told else end - np.asarray(start, np.float64)
        # What float32 rounds in the ratio and the update, or half an ulp of bfloat16.
        assert helpers.error(x, end) <= (2**-8 if x.dtype == BF16 else 1e-3 if x.dtype == np.float16 else 3e-6)
    assert int(state[0].count) == want.t
    if stats.skipped:
        assert helpers.bits((state[0].mu, state[0].nu)) == helpers.bits(before[2:])
        assert helpers.bits(out) == helpers.bits(p) if told else not any(np.any(x) for x in out)
    helpers.assert_near(state[0].mu, want.m, 1e-6)
    helpers.assert_near(state[0].nu, want.v, 1e-6)
    if told:
        assert bool(told.skipped) == stats.skipped
        for x, y in zip(told.trust, stats.trust or [np.zeros(x.shape) for x in told.trust], strict=True):
            np.testing.assert_allclose(x, y, rtol=3e-6)
        if told.grad_norm is not None:
            np.testing.assert_allclose(told.grad_norm, stats.grad_norm, rtol=1e-6)


# Numbers ------------------------------------------------------------------------------------------------------------------

MESHES = [dict(data=8), dict(data=4, model=2), dict(stage=2, data=2, model=2), dict(data=4, one=1, model=2), dict(one=1)]


@st.composite
def tensors(draw, axes):
    """(shape, spec, layer_axes): every mesh axis splits one of the dimensions or none."""
    rank = draw(st.integers(0, 3))
    parts = [[] for _ in range(rank)]
    for name in draw(st.permutations(sorted(axes))):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            parts[where].append(name)
    sizes = [draw(st.sampled_from([1, 2, 3, 1, 2, 0])) for _ in range(rank)]
    shape = tuple(size * math.prod(axes[name] for name in names) for size, names in zip(sizes, parts))
    return shape, P(*(tuple(names) or None for names in parts)), draw(st.integers(0, rank))


@st.composite
def cases(draw):
    axes = draw(st.sampled_from(MESHES))
    kinds = draw(st.lists(tensors(axes), min_size=3, max_size=5))
    types = lambda: [draw(st.sampled_from([np.dtype(np.float32), BF16])) for _ in kinds]
    return dict(
        axes=axes,
        explicit=draw(st.booleans()),
        kinds=kinds,
        p_types=types(),
        g_types=types(),
        decays=[draw(st.booleans()) for _ in kinds],
        variant=draw(st.sampled_from(sorted(model64.PRESETS))),
        max_grad_norm=draw(st.sampled_from([None, 0.5])),
        skip=draw(st.booleans()),
        nan=draw(st.booleans()),
        method=draw(st.sampled_from(["step", "step", "update"])),
        grads_whole=draw(st.booleans()),
    )


@hypothesis.settings(max_examples=16)
@hypothesis.given(case=cases())
def test_numbers_do_not_depend_on_the_mesh(case):
    mesh = mesh_of(case["explicit"], **case["axes"])
    shapes, specs, layers = map(list, zip(*case["kinds"]))
    p, g, m, v = random_step(shapes, 0, case["p_types"], case["g_types"])
    if case["nan"] and case["skip"]:
        g[-1].reshape(-1)[-1:] = np.nan  # in the last shard
    nonfinite = "skip" if case["skip"] else "propagate"
    opt = xla_lamb.lamb(
        RATE, weight_decay=DECAY, mask=case["decays"], variant=case["variant"], layer_axes=layers, max_grad_norm=case["max_grad_norm"],
        nonfinite=nonfinite,
    )  # fmt: skip
    rules = model64.PRESETS[case["variant"]].replace(weight_decay=DECAY)
    if case["max_grad_norm"]:
        rules = rules.replace(max_grad_norm=case["max_grad_norm"])
    placed = [put(tree, mesh, specs) for tree in (p, g, m, v)]
    if case["grads_whole"]:
        placed[1] = put(g, mesh, [P()] * len(g))
    check(
        one_step(opt, *placed, method=case["method"]), (p, g, m, v), rules, decay_mask=case["decays"], layer_axes=layers, nonfinite=nonfinite
    )


def test_shards_that_do_not_add_up_their_sums_are_seen(monkeypatch):
    """The control of the numbers: as if each shard were a tensor of its own."""
    monkeypatch.setattr(sharding, "reduce_over", lambda values, axes: list(values))
    before = random_step([(8, 6)])
    result = one_step(xla_lamb.lamb(RATE, weight_decay=DECAY), *(put(x, mesh42(), [P("data")]) for x in before))
    with pytest.raises(AssertionError):
        check(result, before)
    assert helpers.error(result[3].trust[0], model_step(*before, model64.Rules(weight_decay=DECAY))[1].trust[0]) > 0.1


# The program --------------------------------------------------------------------------------------------------------------

# (spec, layer_axes, what splits a tensor within its layers, its layers on each device), for tensors of one shape.
SHAPE = (8, 16)
KINDS = [
    (P("data"), 0, "data", 1),
    (P("model"), 0, "model", 1),
    (P("data", "model"), 0, "data model", 1),
    (P(None, ("model", "data")), 0, "data model", 1),
    (P(None, "model"), 0, "model", 1),
    (P("data", "model"), 1, "model", 2),
    (P("data"), 1, "", 2),  # each layer is whole
    (P(), 0, "", 1),
]


def program(n, method="step", explicit=False, set_mesh=False, state=None, stats=False, **options):
    """The HLO of a donating step over n tensors of KINDS in turn. `state`: of (opt, params, shardings); default: the shardings alone."""
    mesh = mesh42(explicit)
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, layer_axes=[layers for _, layers, _, _ in kinds], **options)
    at = [NamedSharding(mesh, spec) for spec, *_ in kinds]
    like = lambda tree: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, at if isinstance(tree, list) else shardings(tree, at, mesh)
    )
    if state is None:
        params = like([jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * n)
        state = like(jax.eval_shape(opt.init, params))
    else:
        params = [jax.device_put(np.ones(SHAPE, np.float32), s) for s in at]
        state = state(opt, params, shardings(jax.eval_shape(opt.init, params), at, mesh))

    def step(params, state, grads):
        new = opt.step(grads, state, params, stats=stats)
        assert [jax.typeof(x) for x in new[0]] == [jax.typeof(x) for x in params]  # shardings are part of the type of explicit axes
        return new

    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        return jax.jit(step if method == "step" else opt.update, donate_argnums=(0, 1)).lower(params, state, params).compile().as_text()


def shardings(state, at, mesh):
    """Those of a state: moments like parameters, which lie at `at`."""
    return (state[0]._replace(count=NamedSharding(mesh, P()), mu=at, nu=at), *state[1:])


def check_program(hlo, n, clips=False):
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    sums, norms = collections.Counter(), {}
    for spec, _, axes, layers in kinds:
        if axes:
            sums[axes] += 8 * layers  # two float32, of p and u
        norms[frozenset(jax.tree.leaves(tuple(spec)))] = 8
    split = sum(bool(axes) for _, _, axes, _ in kinds)
    calls = collections.Counter(helpers.lamb_calls(hlo))
    groups = {"xla_lamb_moments": math.ceil(split / 64), "xla_lamb_apply": math.ceil(split / 64), "xla_lamb_step": math.ceil((n - split) / 64)}
    assert {name: calls[name] for name in groups} == groups
    travels = [*sums.values(), *(size for axes, size in norms.items() if axes and clips)]
    assert sorted((op, compilers.size_of(kind)) for kind, op in helpers.collectives(hlo)) == sorted(("all-reduce", size) for size in travels)
    assert helpers.aliases(hlo) == 3 * n + 1
    assert helpers.copies(hlo) == []


EAGERLY = lambda opt, params, at: opt.init(params)
IN_JIT = lambda opt, params, at: jax.jit(opt.init, out_shardings=at)(params)


@pytest.mark.parametrize(
    "n, options",
    [
        (8, {}),
        (130, {}),  # two groups
        (8, dict(method="update")),
        (8, dict(max_grad_norm=1.0, stats=True)),
        (8, dict(explicit=True, state=EAGERLY)),
        (8, dict(explicit=True, set_mesh=True, nonfinite="skip", state=IN_JIT)),
    ],
)
def test_only_sums_of_squares_travel_all_together_and_in_place(n, options):
    check_program(program(n, **options), n, clips="max_grad_norm" in options or "nonfinite" in options)


def test_a_bare_custom_call_gathers_every_tensor(monkeypatch):
    """The control of the programs: the same kernel, which XLA's partitioner knows nothing about."""
    monkeypatch.setattr(sharding, "is_partitioned", lambda module: False)
    found = collections.Counter(op for _, op in helpers.collectives(program(8)))
    assert found["all-gather"] >= 4 * 7  # p, g, m and v of each tensor that lies in parts
    with pytest.raises(AssertionError):
        check_program(program(8), 8)


def test_replicated_parameters_take_one_call_and_nothing_travels():
    before = random_step([SHAPE, (5,), ()])
    result = one_step(xla_lamb.lamb(RATE, weight_decay=DECAY), *(put(x, mesh42(), [P()] * 3) for x in before))
    assert helpers.lamb_calls(result[0]) == ["xla_lamb_step"] and helpers.collectives(result[0]) == []
    check(result, before)


# Shardings that do not fit --------------------------------------------------------------------------------------------------


CLIPPED = model64.Rules(weight_decay=DECAY, max_grad_norm=0.5)


def uneven_step(kinds):
    """One step over tensors of (spec, shape, type, layer_axes) whose shards are padded, with NaN: its result, and what it started from."""
    specs, shapes, types, layers = map(list, zip(*kinds))
    before = random_step(shapes, 0, types, types)
    before = *before[:2], *([x.astype(np.promote_types(t, np.float32)) for x, t in zip(tree, types)] for tree in before[2:])
    mesh = mesh42()
    shard = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, layer_axes=layers, max_grad_norm=0.5, nonfinite="skip")

    def step(p, g, m, v, ones):
        # XLA pads with zeros, and divides them by zeros.
        p, g, m, v = ([shard(x, spec) / shard(one.astype(x.dtype), spec) for x, one, spec in zip(tree, ones, specs)] for tree in (p, g, m, v))
        return opt.step(g, state_of(opt, p, m, v), p, stats=True)

    args = (*before, [np.ones(shape, np.float32) for shape in shapes])
    compiled = jax.jit(step).lower(*args).compile(FAST)
    return (compiled.as_text(), *compiled(*args)), before


@pytest.mark.parametrize(
    "kinds",
    [
        [
            (P("data"), (5, 6), np.dtype(np.float32), 0),
            (P(("data", "model")), (11,), np.dtype(np.float32), 0),
            (P("model", "data"), (3, 9), BF16, 0),  # the last row of devices has one row less, the last column nothing but padding
            (P("data", "model"), (5, 7), np.dtype(np.float16), 1),  # uneven layers, of uneven width
        ],
        [(P("data", None, "model"), (5, 2, 3), np.dtype(np.float64), 1)],
    ],
    ids=["32 bits and less", "float64"],
)
def test_padding_does_not_count(kinds, x64):
    result, before = uneven_step(kinds)
    assert "xla_lamb_moments" in helpers.lamb_calls(result[0]) and not bool(result[3].skipped)
    check(result, before, CLIPPED, layer_axes=[layers for *_, layers in kinds])


def test_padding_that_counts_is_seen(monkeypatch):
    """The control: the padding is NaN, and would make all NaN, and skip the step."""
    monkeypatch.setattr(sharding, "filled", lambda shard, labels, splits, value: shard)
    (*_, told), _ = uneven_step([(P("data"), (5, 6), np.dtype(np.float32), 0)])
    assert bool(told.skipped)


@pytest.mark.parametrize("place", ["as they come", "out_shardings"])
def test_moments_alone_in_parts(place):
    """ZeRO-1: parameters are replicated, and come back so; each is gathered once, in its new value, and no moment is."""
    mesh, whole = mesh42(), NamedSharding(mesh42(), P())
    shapes = [(8, 6), (16,), (4, 8), (3,)]
    parts = [NamedSharding(mesh, spec) for spec in (P("data"), P(("data", "model")), P(None, "model"), P())]
    before = random_step(shapes)
    p, g = ([jax.device_put(x, whole) for x in tree] for tree in before[:2])
    m, v = (list(map(jax.device_put, tree, parts)) for tree in before[2:])
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, max_grad_norm=0.5)
    state = state_of(opt, p, m, v)
    out = ([whole] * 4, shardings(state, parts, mesh)) if place == "out_shardings" else None
    step = jax.jit(lambda p, s, g: opt.step(g, s, p), donate_argnums=(0, 1), out_shardings=out).lower(p, state, g).compile()
    others = [op for _, op in helpers.collectives(step.as_text()) if op != "all-reduce"]
    assert others == ["all-gather"] * 3  # the last parameter is in one part
    p, state = step(p, state, g)
    for x, at in zip([*p, *state[0].mu, *state[0].nu], [whole] * 4 + parts * 2, strict=True):
        assert x.sharding.is_equivalent_to(at, x.ndim), (x.sharding, at)
    want, _ = model_step(*before, CLIPPED)
    helpers.assert_near((p, state[0].mu, state[0].nu), (want.p, want.m, want.v), 3e-6)


def test_parameters_and_state_sharded_in_other_ways():
    shapes = [(8, 8)] * 5
    p_specs = [P("data"), P("data"), P("data"), P("data", "model"), P(None, "data")]
    g_specs = [P(), P(), P("data"), P("model", "data"), P("model")]
    m_specs = [P(), P(None, "data"), P("data", "model"), P("model", "data"), P("model")]
    before, mesh = random_step(shapes), mesh42()
    placed = [put(x, mesh, specs) for x, specs in zip(before, (p_specs, g_specs, m_specs, m_specs))]
    result = one_step(xla_lamb.lamb(RATE, weight_decay=DECAY), *placed)
    check(result, before)
    for x, spec in zip([*result[1], *result[2][0].mu, *result[2][0].nu], p_specs + m_specs * 2, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)
    assert helpers.lamb_calls(result[0]) == ["xla_lamb_moments", "xla_lamb_apply"]


def test_a_state_made_on_one_device():
    """jax.jit(opt.init) without out_shardings, as people write it: zeros of no device in particular."""
    before, mesh = random_step([(8, 6), (6,)]), mesh42()
    before = *before[:2], *([np.zeros_like(x) for x in tree] for tree in before[2:])
    p, g = (put(x, mesh, [P("data", "model"), P("model")]) for x in before[:2])
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY)
    state = jax.jit(opt.init)(p)
    for _ in range(2):  # the second one with a state that has a sharding
        p, state = jax.jit(opt.step)(g, state, p)
    want = model64.init(before[0])
    for _ in range(2):
        want, _ = model64.step(want, before[1], model64.Rules(weight_decay=DECAY), RATE)
    helpers.assert_near((p, state[0].mu, state[0].nu), (want.p, want.m, want.v), 3e-6)


def test_vmap_over_an_axis_that_is_split():
    """Four models at once, two on each row of devices, each with its own clipping; their tensors are split over the columns."""
    mesh, shapes = mesh42(), [(4, 6, 8), (4, 5)]
    before = random_step(shapes)
    p, g, m, v = (put(x, mesh, [P("data", None, "model"), P("data")]) for x in before)
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, max_grad_norm=0.5)

    def step(p, g, m, v):
        return jax.vmap(lambda p, g, m, v: opt.step(g, state_of(opt, p, m, v), p, stats=True))(p, g, m, v)

    compiled = jax.jit(step).lower(p, g, m, v).compile(FAST)
    hlo, (p, state, told) = compiled.as_text(), compiled(p, g, m, v)
    assert "xla_lamb_moments" in helpers.lamb_calls(hlo) and {op for _, op in helpers.collectives(hlo)} == {"all-reduce"}
    for k in range(4):
        pick = lambda tree: jax.tree.map(lambda x: x[k], tree)
        check((hlo, *map(pick, (p, state, told))), list(map(pick, before)), CLIPPED)


def test_what_xla_cannot_partition_takes_the_reference(monkeypatch):
    """jax.shard_map over some of the axes, and jax.export over several devices: the reference's numbers and one warning, or an error."""
    monkeypatch.setattr(library, "_warned", set())
    mesh = mesh42()
    before = random_step([(8, 6)])
    p, g, m, v = (put(x, mesh, [P("data", "model")]) for x in before)

    def partly(opt):
        state = jax.tree.map(lambda x: P("data") if jnp.ndim(x) else P(), state_of(opt, p, m, v))
        out = (P("data"), state, xla_lamb.StepStats(P(), P(), P()))
        return jax.shard_map(
            lambda p, s, g: opt.step(g, s, p, stats=True), mesh=mesh, axis_names={"data"}, in_specs=(P("data"), state, P("data")), out_specs=out
        )

    def exported(opt):
        args = p, jax.tree.map(lambda x: x if jnp.ndim(x) else jax.device_put(x, NamedSharding(mesh, P())), state_of(opt, p, m, v)), g
        return jax.export.export(jax.jit(lambda p, s, g: opt.step(g, s, p, stats=True)))(*args).call

    for way, axis_name, why in ((partly, "data", "shard_map has taken 'data'"), (exported, None, "jax.export cannot hold")):
        opt = xla_lamb.lamb(RATE, weight_decay=DECAY, axis_name=axis_name)
        with pytest.warns(RuntimeWarning, match=why):
            result = jax.jit(way(opt))(p, state_of(opt, p, m, v), g)
        check((None, *result), before)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            jax.jit(way(opt)).lower(p, state_of(opt, p, m, v), g)
        fused = xla_lamb.lamb(RATE, axis_name=axis_name, implementation="fused")
        with pytest.raises(NotImplementedError, match=why):
            jax.jit(way(fused)).lower(p, state_of(fused, p, m, v), g)


CACHE = """
import sys
import jax, numpy as np, xla_lamb
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rsplit("/")[-1]))
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
params = jax.device_put([np.ones((8, 6), np.float32)], NamedSharding(mesh, P("data")))


def step(p, axis_name=None):
    opt = xla_lamb.lamb(0.01, axis_name=axis_name)
    return opt.step(p, opt.init(p), p)[0]


def found(function):
    jax.clear_caches()
    seen.clear()
    jax.jit(function).lower(params).compile()
    return "cache_hits" in seen


named = jax.shard_map(lambda p: step(p, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
print([found(step) for _ in range(3)][1:], [found(named) for _ in range(3)][1:])
"""


def test_known_limit_jax_finds_no_partitioned_program_in_its_persistent_cache(tmp_path):
    """Inside jax.shard_map, where XLA partitions nothing, it does. When this fails the README has a limit less."""
    run = helpers.python(CACHE, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert run.stdout == "[False, False] [True, True]\n"


def test_known_limit_a_mesh_without_devices():
    spec = NamedSharding(jax.sharding.AbstractMesh((8,), ("data",)), P("data"))
    params = [jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=spec)]
    opt = xla_lamb.lamb(RATE)
    step = jax.jit(lambda p: opt.step(p, opt.init(p), p)).trace(params)
    with pytest.raises(ValueError, match="AbstractMesh cannot be used"):
        step.lower(lowering_platforms=("cpu",))


def test_the_same_bits_in_every_run_and_all_of_them_where_a_step_is_skipped():
    mesh, shapes, specs = mesh42(), [(512, 24), (400, 16), (7,)], [P("data", "model"), P(("model", "data")), P()]
    before = random_step(shapes)
    p, g, m, v = (put(x, mesh, specs) for x in before)
    opt = xla_lamb.lamb(RATE, weight_decay=DECAY, max_grad_norm=0.5, nonfinite="skip")
    step = jax.jit(lambda p, s, g: opt.step(g, s, p))
    state = state_of(opt, p, m, v)
    runs = [helpers.bits(step(p, state, g)) for _ in range(20)]
    assert all(run == runs[0] for run in runs) and runs[0] != helpers.bits((p, state))
    bad = before[1][1].copy()
    bad[-1, 3] = np.inf  # on one device
    assert helpers.bits(step(p, state, [g[0], *put([bad], mesh, specs[1:2]), g[2]])) == helpers.bits((p, state))


# Models -------------------------------------------------------------------------------------------------------------------

WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 16, 2, 16, 8, 8
# Names, shapes and shardings: FSDP over "data", tensor parallelism over "model". Two layers, stacked for jax.lax.scan.
TRANSFORMER = dict(
    embedding=((VOCABULARY, WIDTH), P("model", "data")),
    scales=((2, 2, WIDTH), P()),
    qkv=((2, WIDTH, 3, HEADS, WIDTH // HEADS), P(None, "data", None, "model")),
    out=((2, HEADS, WIDTH // HEADS, WIDTH), P(None, "model", None, "data")),
    up=((2, WIDTH, 32), P(None, "data", "model")),
    down=((2, 32, WIDTH), P(None, "model", "data")),
    logits=((WIDTH, VOCABULARY), P("data", "model")),
)
STACKED = {name: int(name not in ("embedding", "logits")) for name in TRANSFORMER}


def transformer_loss(params, tokens):
    """Cross-entropy of the next token."""
    normal = lambda x, scale=1.0: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))

    def layer(x, w):
        q, k, v = jnp.moveaxis(jnp.einsum("bld,dchw->blchw", normal(x, w["scales"][0]), w["qkv"]), 2, 0)
        weights = jax.nn.softmax(jnp.where(causal, jnp.einsum("blhw,bmhw->bhlm", q, k) / np.sqrt(WIDTH // HEADS), -1e9))
        x = x + jnp.einsum("bhlm,bmhw,hwd->bld", weights, v, w["out"])
        return x + jax.nn.gelu(normal(x, w["scales"][1]) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], {name: params[name] for name in params if STACKED[name]})
    scores = jax.nn.log_softmax(normal(x) @ params["logits"])
    return -jnp.mean(jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1))


def curve(train_step, params, state, steps=100):
    """The losses of a training."""
    rng, losses = np.random.default_rng(1), []
    for _ in range(steps):
        start, by = rng.integers(VOCABULARY, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
        tokens = (start + by * np.arange(LENGTH)) % VOCABULARY  # it takes two of them to tell what comes next
        params, state, loss = train_step(params, state, tokens.astype(np.int32))
        losses.append(float(loss))
    return np.array(losses)


def test_a_transformer_learns_as_on_one_device(monkeypatch):
    """FSDP and tensor parallelism, 100 steps, against gradients of one device and steps of the float64 model."""
    mesh, rng = mesh42(), np.random.default_rng(0)
    at = {name: NamedSharding(mesh, spec) for name, (_, spec) in TRANSFORMER.items()}
    start = {name: (rng.normal(size=shape) / 4).astype(np.float32) for name, (shape, _) in TRANSFORMER.items()}
    start["scales"][:] = 1
    gradient = jax.value_and_grad(transformer_loss)
    one_device = jax.jit(gradient, compiler_options=FAST)
    rate, rules = 0.01, model64.Rules(weight_decay=DECAY)

    def model_train_step(params, state, tokens):
        loss, grads = one_device({name: x.astype(np.float32) for name, x in params.items()}, tokens)
        state, _ = model64.step(state, [grads[name] for name in TRANSFORMER], rules, rate, layer_axes=[STACKED[name] for name in TRANSFORMER])
        return dict(zip(TRANSFORMER, state.p)), state, loss

    opt = xla_lamb.lamb(rate, weight_decay=DECAY, layer_axes=STACKED)

    def train_step(params, state, tokens):
        loss, grads = gradient(params, jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, P("data"))))
        return *opt.step(grads, state, params), loss

    def sharded(step, steps=100):
        params = jax.tree.map(jax.device_put, start, at)
        return curve(step, params, opt.init(params), steps)

    expected = curve(model_train_step, start, model64.init(start[name] for name in TRANSFORMER))
    assert expected[-1] < 0.5 * expected[0]
    distance = lambda losses: np.max(np.abs(losses / expected[: len(losses)] - 1))
    # Measured: 2.5e-6; training doubles what float32 rounds every few steps.
    assert distance(sharded(jax.jit(train_step, donate_argnums=(0, 1), compiler_options=FAST))) < 1e-4
    # The control: as if each shard were a tensor of its own.
    monkeypatch.setattr(sharding, "reduce_over", lambda values, axes: list(values))
    step = jax.jit(opt.step, compiler_options=FAST)

    def wrong_train_step(params, state, tokens):
        loss, grads = one_device(jax.device_get(params), tokens)
        return *step(jax.tree.map(jax.device_put, grads, at), state, params), loss

    assert distance(sharded(wrong_train_step, 10)) > 1e-3


KERAS = """
import jax, keras, numpy as np, helpers, xla_lamb.keras

rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(16, 4)).astype(np.float32)
cpus = [f"cpu:{i}" for i in range(8)]
layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((4, 2), ("data", "model"), cpus))
layout.update({".*a/kernel": (None, "model"), ".*a/bias": ("model",), ".*b/kernel": ("model", None)})
ways = keras.distribution.DataParallel(devices=cpus), keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")


def train(optimizer, distribution=None):
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu", name="a"), keras.layers.Dense(4, name="b")])
    model.compile(optimizer(), "mse")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


one_device = train(lambda: keras.optimizers.Lamb(0.05, weight_decay=0.01)).get_weights()
for way, calls, travels in (
    (ways[0], ["xla_lamb_step"], []),
    (ways[1], ["xla_lamb_apply", "xla_lamb_moments", "xla_lamb_step"], ["all-reduce"]),
):
    model = train(lambda: xla_lamb.keras.Lamb(0.05, weight_decay=0.01, variant="keras"), way)
    helpers.assert_near(model.get_weights(), one_device, 2e-5)  # Keras's 1 - 0.999 in float32 is off by 1.3e-5 of itself
    values = [[v.value for v in variables] for variables in (model.optimizer.variables, *[model.trainable_variables] * 2)]
    hlo = jax.jit(model.optimizer.stateless_apply).lower(*values).compile().as_text()
    assert sorted(helpers.lamb_calls(hlo)) == calls, hlo
    assert [op for _, op in helpers.collectives(hlo)] == travels, hlo
print("done")
"""


def test_keras_distribution():
    """Keras's DataParallel and ModelParallel, against its own Lamb on one device."""
    run = helpers.python(KERAS, KERAS_BACKEND="jax", XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert run.stdout.endswith("done\n")
