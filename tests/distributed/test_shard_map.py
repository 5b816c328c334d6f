"""Inside jax.shard_map and jax.pmap, with axis_name: every shard takes the step of the whole tensor, as the float64 model has it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import compilers
import helpers
import model64
import xla_lamb
from xla_lamb.optax import StepStats

NEAR = 1e-6  # as on one device
FAR = 1e-3  # what the controls are off by at least: a thousand times as much
RATE = 1e-2
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SPECS = {"both": P("data", "model"), "joint": P(None, ("data", "model")), "one": P("model"), "scalar": P(), "whole": P()}
SHAPES = {"both": (8, 6), "joint": (3, 16), "one": (12,), "scalar": (), "whole": (5,)}
CHECKS = pytest.mark.parametrize("check", [True, False], ids=["check_vma", "unchecked"])


def make(shapes=SHAPES, seed=0, scale=1.0):
    # Sizes that differ from row to row, or the norm of one shard, scaled up, would be near that of the whole.
    grown = lambda x: x * scale * (1 + np.arange(x.size, dtype=np.float32).reshape(x.shape))
    return dict(zip(shapes, map(grown, helpers.tree(list(shapes.values()), seed))))


def gradients(steps=3, shapes=SHAPES):
    return [make(shapes, seed=1 + i, scale=0.1 * (1 + i % 3)) for i in range(steps)]


PARAMS, GRADS = make(), gradients()


def model(params, grads, rules=model64.Rules(), **options):
    """(State, Stats) after the last of the steps of the float64 model."""
    state = model64.init(jax.tree.leaves(params))
    for g in grads:
        state, stats = model64.step(state, jax.tree.leaves(g), rules, RATE, **options)
    return state, stats


def lamb(**options):
    return xla_lamb.lamb(RATE, **{"implementation": "fused", **options})  # "fused": the reference must not pass for the kernel


def place(tree, specs, mesh=MESH):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def state_specs(opt, params, specs):
    state = jax.eval_shape(opt.init, params)
    return (state[0]._replace(count=P(), mu=specs, nu=specs), *jax.tree.map(lambda _: P(), state[1:]))


def steps_of(opt, method="step"):
    """train(params, grads) -> (params, state, stats of the last step): init and all steps, in lax.scan over the stacked gradients."""

    def body(carry, g):
        p, s = carry
        if method == "step":
            p, s, told = opt.step(g, s, p, stats=True)
            return (p, s), told
        updates, s = opt.update(g, s, p)
        return (optax.apply_updates(p, updates), s), None

    def train(p, grads):
        (p, s), told = jax.lax.scan(body, (p, opt.init(p)), grads)
        return p, s, jax.tree.map(lambda x: x[-1], told)

    return train


def stacked(grads):
    return jax.tree.map(lambda *xs: np.stack(xs), *grads)


def run(opt, params=PARAMS, grads=GRADS, specs=SPECS, mesh=MESH, check=True, method="step", trust=P()):
    """What `steps_of` does, inside jax.shard_map under jax.jit. Devices that hold the same part must hold the same bits of it."""
    over_steps = jax.tree.map(lambda spec: P(None, *spec), specs)
    step = jax.shard_map(
        steps_of(opt, method), mesh=mesh, in_specs=(specs, over_steps),
        out_specs=(specs, state_specs(opt, params, specs), StepStats(trust, P(), P()) if method == "step" else P()), check_vma=check,
    )  # fmt: skip
    results = jax.jit(step)(place(params, specs, mesh), place(stacked(grads), over_steps, mesh))
    for x in jax.tree.leaves(results):
        parts = {}
        for shard in x.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(bits) == 1 for bits in parts.values()), "devices differ"
    return results


def assert_model(results, state, stats=None):
    params, (adam, *_), told = results
    helpers.assert_near(params, state.p, NEAR)
    helpers.assert_near([adam.mu, adam.nu], [*state.m, *state.v], NEAR)
    assert adam.count == state.t
    if stats is not None:
        helpers.assert_near(told.trust, stats.trust, NEAR)
        if told.grad_norm is not None:
            assert told.grad_norm == pytest.approx(stats.grad_norm, rel=NEAR)


# shard_map against the model ----------------------------------------------------------------------------------------------

CASES = {
    "clip": (dict(weight_decay=0.01, max_grad_norm=1.0), dict()),
    "bounds": (dict(variant="deepspeed", norm_bounds=(0.0, 20.0)), dict(correction="learning_rate", ratio_bounds=(0.01, 10.0), eps=1e-8)),
}


def rules_of(options, rules):
    known = {k: v for k, v in options.items() if k in ("weight_decay", "max_grad_norm", "norm_bounds")}
    return model64.Rules(**rules, **known)


@pytest.mark.parametrize(
    "case,implementation,check",
    [("clip", "fused", True), ("clip", "fused", False), ("bounds", "fused", True), ("clip", "reference", False)],
)
def test_step_and_stats(case, implementation, check):
    options, rules = CASES[case]
    opt = lamb(axis_name=SPECS, implementation=implementation, **options)
    assert_model(run(opt, check=check), *model(PARAMS, GRADS, rules_of(options, rules)))


@CHECKS
def test_update_with_the_norm_over_all_shards(check):
    opt = lamb(axis_name=SPECS, max_grad_norm=0.5, weight_decay=0.01)
    state, _ = model(PARAMS, GRADS, model64.Rules(max_grad_norm=0.5, weight_decay=0.01))
    assert_model(run(opt, check=check, method="update"), state)


FORMS = {
    "name": "x",
    "tuple": ("x",),
    "spec": P("x"),
    "tree": {"head": "x", "block": {"bias": P("x"), "kernel": ("x",)}},
    "prefix": {"head": P("x", None), "block": "x"},
    "function": lambda params: jax.tree.map(lambda p: P("x", *[None] * (p.ndim - 1)), params),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_axis_name(form):
    mesh = jax.make_mesh((8,), ("x",))  # with explicit axes, which is what users get
    flat = {"bias": (16,), "head": (8, 3), "kernel": (8, 2, 3)}
    nest = lambda flat: {"head": flat["head"], "block": {"bias": flat["bias"], "kernel": flat["kernel"]}}
    params, grads = nest(make(flat)), [nest(g) for g in gradients(1, flat)]
    opt = lamb(axis_name=FORMS[form], max_grad_norm=1.0)
    # Unchecked, where nothing but axis_name tells what splits a tensor.
    results = run(opt, params, grads, jax.tree.map(lambda _: P("x"), params), mesh, check=False)
    assert_model(results, *model(params, grads, model64.Rules(max_grad_norm=1.0)))


def spoiled(grads, name, index, value):
    bad = {k: np.array(x) for k, x in grads.items()}
    bad[name][index] = value
    return bad


BAD = spoiled(GRADS[1], "joint", (2, 13), np.nan)  # on one of the devices


@CHECKS
def test_nan_in_one_shard_skips_the_step_on_all_devices(check):
    opt = lamb(axis_name=SPECS, nonfinite="skip", weight_decay=0.01)
    kept, state, told = run(opt, grads=[BAD], check=check)
    assert told.skipped and helpers.bits(kept) == helpers.bits(PARAMS)
    assert state[0].count == 0 and not any(np.any(x) for x in jax.tree.leaves(state[0]))


def test_a_skipped_step_leaves_the_next_ones_alone():
    results = run(lamb(axis_name=SPECS, nonfinite="skip", weight_decay=0.01), grads=[GRADS[0], BAD, GRADS[2]])
    assert not results[2].skipped
    assert_model(results, *model(PARAMS, GRADS[::2], model64.Rules(weight_decay=0.01)))


def test_control_devices_that_know_nothing_of_each_other_skip_alone():
    with pytest.raises(AssertionError, match="devices differ"):
        run(lamb(axis_name=(), nonfinite="skip"), grads=[BAD], check=False)


STAGES = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "model"))
LAYERS = {"bias": (8, 6), "head": (6, 4), "kernel": (8, 4, 6), "norm": (8, 5)}
LAYER_AXES = {"bias": 1, "head": 0, "kernel": 1, "norm": 1}
LAYER_SPECS = {"bias": P("stage", "model"), "head": P("model"), "kernel": P("stage", None, "model"), "norm": P("stage")}
TRUST = {"bias": P("stage"), "head": P(), "kernel": P("stage"), "norm": P("stage")}


@CHECKS
def test_layers_over_stages(check):
    """A ratio for each layer, from the stage that has it; the global norm over all stages."""
    params, grads = make(LAYERS), gradients(2, LAYERS)
    opt = lamb(axis_name=LAYER_SPECS, layer_axes=LAYER_AXES, max_grad_norm=1.0)
    results = run(opt, params, grads, LAYER_SPECS, STAGES, check, trust=TRUST)
    state, stats = model(params, grads, model64.Rules(max_grad_norm=1.0), layer_axes=LAYER_AXES.values())
    assert_model(results, state, stats)


def test_layers_over_stages_are_reduced_over_no_stage():
    hlo = compiled(lamb(axis_name=LAYER_SPECS, layer_axes=LAYER_AXES), make(LAYERS), LAYER_SPECS, STAGES, check=False)
    # |p|² and |u|² of two layers of bias and of kernel, and of head, between two devices. Those of norm stay where they are.
    assert reduced(hlo) == [8 * (2 + 2 + 1)]
    assert re.findall(r"replica_groups=(\S+),", hlo) == ["{{0,1},{2,3},{4,5},{6,7}}"]
    assert sorted(helpers.lamb_calls(hlo)) == ["xla_lamb_apply", "xla_lamb_moments", "xla_lamb_step"]


def test_control_a_name_for_the_axis_of_layers_mixes_them():
    """Why PartitionSpecs are asked for there."""
    params, grads = make(LAYERS), gradients(1, LAYERS)
    opt = lamb(axis_name=("stage", "model"), layer_axes=LAYER_AXES)
    trust = run(opt, params, grads, LAYER_SPECS, STAGES, trust=dict.fromkeys(LAYERS, P()), check=False)[2].trust
    _, stats = model(params, grads, layer_axes=LAYER_AXES.values())
    assert helpers.error(np.asarray(trust["kernel"])[:, 0], stats.trust[2][:2, 0]) > FAR


def test_tensors_that_are_replicated_over_a_named_axis():
    """Where JAX keeps account, names may be those of all axes; else they have to be a tensor's own."""
    rules = model64.Rules(max_grad_norm=1.0)
    expected = model(PARAMS, GRADS, rules)
    every = lamb(axis_name=("data", "model"), max_grad_norm=1.0)
    assert_model(run(every), *expected)
    own = {"both": ("data", "model"), "joint": ("model", "data"), "one": "model", "scalar": None, "whole": ()}
    assert_model(run(lamb(axis_name=own, max_grad_norm=1.0), check=False), *expected)
    with pytest.raises(AssertionError):  # the control: a replica would count as a shard
        assert_model(run(every, check=False), *expected)


def test_mixed_types(x64):
    shapes = {"bf16": (8, 6), "f16": (12,), "f32": (4, 4), "f64": (8,), "whole": (5,)}
    specs = {"bf16": P("data", "model"), "f16": P("model"), "f32": P("data"), "f64": P(("data", "model")), "whole": P()}
    types = {"bf16": (jnp.bfloat16, np.float32), "f16": (np.float16, np.float16), "f32": (np.float32, jnp.bfloat16), "f64": (np.float64,) * 2}
    cast = lambda tree, which: {k: x.astype(types.get(k, (np.float32,) * 2)[which]) for k, x in tree.items()}
    params, grads = cast(make(shapes), 0), [cast(g, 1) for g in gradients(1, shapes)]
    state, stats = model(params, grads, model64.Rules(max_grad_norm=1.0))
    for check in (True, False):
        new, (adam, *_), told = run(lamb(axis_name=specs, max_grad_norm=1.0), params, grads, specs, check=check)
        helpers.assert_near([adam.mu, adam.nu, told.trust], [*state.m, *state.v, *stats.trust], NEAR)
        assert told.grad_norm == pytest.approx(stats.grad_norm, rel=NEAR)
        for k, expected in zip(sorted(new), state.p):
            assert new[k].dtype == params[k].dtype
            if k in ("bf16", "f16"):
                assert helpers.ulps(new[k], expected, new[k].dtype) < 0.51, k  # rounded once
            else:
                helpers.assert_near(new[k], expected, NEAR)


# What users put around it -------------------------------------------------------------------------------------------------


@CHECKS
def test_chain(check):
    def train(p, g):
        tx = optax.chain(optax.scale(0.5), lamb(axis_name=SPECS, max_grad_norm=1.0))
        updates, _ = tx.update(g, tx.init(p), p)
        return optax.apply_updates(p, updates)

    step = jax.jit(jax.shard_map(train, mesh=MESH, in_specs=(SPECS, SPECS), out_specs=SPECS, check_vma=check))
    state, _ = model(PARAMS, GRADS[:1], model64.Rules(max_grad_norm=1.0), grad_scale=0.5)
    helpers.assert_near(step(place(PARAMS, SPECS), place(GRADS[0], SPECS)), state.p, NEAR)


@CHECKS
def test_multi_steps(check):
    """Collectives inside the branch that takes the step, which all devices take together."""

    def train(p, first, second):
        tx = optax.MultiSteps(lamb(axis_name=SPECS, max_grad_norm=1.0), 2)
        s = tx.init(p)
        for g in (first, second):
            updates, s = tx.update(g, s, p)
            p = optax.apply_updates(p, updates)
        return p

    step = jax.jit(jax.shard_map(train, mesh=MESH, in_specs=(SPECS,) * 3, out_specs=SPECS, check_vma=check))
    mean = jax.tree.map(lambda x, y: (np.float64(x) + y) / 2, *GRADS[:2])
    state, _ = model(PARAMS, [mean], model64.Rules(max_grad_norm=1.0))
    helpers.assert_near(step(*(place(x, SPECS) for x in (PARAMS, *GRADS[:2]))), state.p, NEAR)


def test_masked_and_a_part_of_the_tree():
    """optax.multi_transform leaves MaskedNodes in the trees; axis_name may have the whole tree of specs all the same."""
    labels = {k: "sgd" if k in ("joint", "whole") else "lamb" for k in SPECS}

    def train(p, g):
        tx = optax.multi_transform({"lamb": lamb(axis_name=SPECS), "sgd": optax.sgd(0.1)}, labels)
        updates, _ = tx.update(g, tx.init(p), p)
        return optax.apply_updates(p, updates)

    new = jax.jit(jax.shard_map(train, mesh=MESH, in_specs=(SPECS, SPECS), out_specs=SPECS))(place(PARAMS, SPECS), place(GRADS[0], SPECS))
    ours = [k for k in sorted(SPECS) if labels[k] == "lamb"]
    state, _ = model({k: PARAMS[k] for k in ours}, [{k: GRADS[0][k] for k in ours}])
    helpers.assert_near([new[k] for k in ours], state.p, NEAR)
    helpers.assert_near(new["joint"], PARAMS["joint"] - 0.1 * GRADS[0]["joint"], NEAR)


@CHECKS
def test_fully_sharded_data_parallel_training_by_hand(check):
    """Weights are gathered for the loss and their gradients scattered; the bias is replicated. Linear regression, whose gradients NumPy has too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)
    start = {"b": np.ones(3, np.float32), "w": rng.normal(size=(8, 3)).astype(np.float32)}
    specs = {"b": P(), "w": P("data")}
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    opt = lamb(axis_name=specs, max_grad_norm=0.5, weight_decay=0.01)

    def loss(p, x, y):
        w = jax.lax.all_gather(p["w"], "data", tiled=True)
        return jnp.sum((x @ w + p["b"] - y) ** 2) / 32

    def train(p, s, x, y):
        g = jax.grad(loss)(p, x, y)
        if not check:  # else the gradient of what is the same everywhere is a sum already
            g["b"] = jax.lax.psum(g["b"], "data")
        return opt.step(g, s, p)

    states = state_specs(opt, start, specs)
    step = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, states, P("data"), P("data")), out_specs=(specs, states), check_vma=check),
        donate_argnums=(0, 1),
    )
    params = place(start, specs, mesh)
    state = opt.init(params)
    expected = model64.init([start["b"], start["w"]])
    for _ in range(3):
        params, state = step(params, state, x, y)
        difference = x.astype(np.float64) @ expected.p[1] + expected.p[0] - y
        grads = [difference.sum(0) / 16, x.T.astype(np.float64) @ difference / 16]
        expected, _ = model64.step(expected, grads, model64.Rules(max_grad_norm=0.5, weight_decay=0.01), RATE)
    helpers.assert_near(params, expected.p, NEAR)


# pmap ---------------------------------------------------------------------------------------------------------------------

SPLIT = {"kernel": (8, 6), "vector": (24,)}  # over eight devices by their first axis; "whole" has none
BY_DEVICE = {**SPLIT, "whole": (5,)}


def pmapped(opt, grads, method="step"):
    """(params, state, stats) of jax.pmap over eight devices, with an axis of devices in front of each array."""
    scatter = lambda tree: {k: np.reshape(x, (8, -1)) if k in SPLIT else np.stack([x] * 8) for k, x in tree.items()}
    params, scattered = scatter(make(BY_DEVICE)), [scatter(g) for g in grads]
    return jax.pmap(steps_of(opt, method), axis_name="x", in_axes=(0, 1))(params, stacked(scattered))


def gathered(results):
    """Of devices that have the same bits of what is replicated: the whole arrays."""
    (params, (adam, *rest), told) = results
    same = [params["whole"], adam.mu["whole"], adam.nu["whole"], adam.count, *jax.tree.leaves(told)]
    assert all(np.array_equal(x, np.broadcast_to(x[0], x.shape), equal_nan=True) for x in map(np.asarray, same)), "devices differ"
    whole = lambda tree: {k: np.reshape(x, BY_DEVICE[k]) if k in SPLIT else np.asarray(x[0]) for k, x in tree.items()}
    adam = adam._replace(count=adam.count[0], mu=whole(adam.mu), nu=whole(adam.nu))
    return whole(params), (adam, *rest), jax.tree.map(lambda x: np.asarray(x[0]), told)


OWN = {"kernel": P("x"), "vector": "x", "whole": None}


def test_pmap():
    grads = gradients(3, BY_DEVICE)
    opt = lamb(axis_name=OWN, max_grad_norm=1.0, weight_decay=0.01)
    state, stats = model(make(BY_DEVICE), grads, model64.Rules(max_grad_norm=1.0, weight_decay=0.01))
    assert_model(gathered(pmapped(opt, grads)), state, stats)


def test_pmap_update():
    grads = gradients(2, BY_DEVICE)
    state, _ = model(make(BY_DEVICE), grads, model64.Rules(max_grad_norm=1.0))
    assert_model(gathered(pmapped(lamb(axis_name=OWN, max_grad_norm=1.0), grads, "update")), state)


def test_pmap_infinity_in_one_shard():
    good, bad = gradients(2, BY_DEVICE)
    results = gathered(pmapped(lamb(axis_name=OWN, nonfinite="skip"), [good, spoiled(bad, "vector", 22, np.inf)]))
    assert results[2].skipped
    assert_model(results, model(make(BY_DEVICE), [good])[0])


# What is compiled ---------------------------------------------------------------------------------------------------------


def compiled(opt, params, specs, mesh=MESH, check=True, donate=True, method="step"):
    """The HLO text of one step under jax.jit."""
    states = state_specs(opt, params, specs)
    step = (lambda p, s, g: opt.step(g, s, p)) if method == "step" else opt.update
    order = specs, states, specs  # parameters and gradients are alike
    arguments = (place(x, spec, mesh) for x, spec in zip((params, opt.init(params), params), order))
    step = jax.shard_map(step, mesh=mesh, in_specs=order, out_specs=order[:2], check_vma=check)
    return jax.jit(step, donate_argnums=(0, 1) if donate else ()).lower(*arguments).compile().as_text()


def many(times):
    """`times` tensors of each kind of SPECS but the scalar."""
    kinds = [k for k in SPECS if k != "scalar"]
    repeated = lambda values: {f"{k}{i}": values[k] for k in kinds for i in range(times)}
    return repeated(PARAMS), repeated(SPECS)


@pytest.mark.parametrize("method,check", [("step", True), ("step", False), ("update", False)])
def test_in_place_with_one_collective_for_each_set_of_axes(method, check):
    params, specs = many(2)
    hlo = compiled(lamb(axis_name=specs), params, specs, check=check, method=method)
    # Where JAX keeps account, tensors that vary over different axes share no call.
    assert sorted(helpers.lamb_calls(hlo)) == sorted(["xla_lamb_apply", "xla_lamb_moments"] * (2 if check else 1) + ["xla_lamb_step"])
    # XLA may give the updates donated buffers, too.
    assert helpers.aliases(hlo) in (3 * len(params), 3 * len(params) + 1) and helpers.copies(hlo) == []
    # |p|² and |u|² of 2 tensors over "model", and of 4 over both axes.
    assert reduced(hlo) == [8 * 2, 8 * 4]


def reduced(hlo):
    """The bytes of each array that goes into an all-reduce, and nothing else is sent. Of several arrays XLA's CPU compiler makes one operation."""
    found = helpers.collectives(hlo)
    assert all(op == "all-reduce" for _, op in found), found
    return sorted(compilers.size_of(array) for kind, _ in found for array in re.findall(r"\w+\[[\d,]*\]", kind))


@pytest.mark.parametrize("options,expected", [(dict(), 2), (dict(max_grad_norm=1.0, nonfinite="skip"), 4)], ids=["plain", "norm"])
def test_collectives_do_not_grow_with_the_number_of_tensors(monkeypatch, options, expected):
    """With several calls too."""
    monkeypatch.setitem(xla_lamb.step.GROUP_SIZE, "cpu", 8)
    for times, calls in ((1, 1), (4, 2)):
        params, specs = many(times)
        hlo = compiled(lamb(axis_name=specs, **options), params, specs, check=False)
        assert len(reduced(hlo)) == expected and helpers.copies(hlo) == []
        assert helpers.lamb_calls(hlo).count("xla_lamb_apply") == calls


def test_control_a_collective_for_each_tensor_shows():
    """As with an optimizer for each tensor."""
    params, specs = many(2)
    opts = {k: lamb(axis_name=spec) for k, spec in specs.items()}
    step = lambda p, g: {k: opt.step(g[k], opt.init(p[k]), p[k])[0] for k, opt in opts.items()}
    mapped = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(specs, specs), out_specs=specs, check_vma=False))
    assert reduced(mapped.lower(params, params).compile().as_text()) == [8] * 6


def test_control_without_donation_the_copies_appear():
    params, specs = many(1)
    hlo = compiled(lamb(axis_name=specs), params, specs, donate=False)
    assert helpers.aliases(hlo) == 0 and len(helpers.copies(hlo)) >= 3 * len(params)


# Controls: what a forgotten axis_name does --------------------------------------------------------------------------------


def far(new, state):
    return max(map(helpers.error, jax.tree.leaves(new), state.p))


def test_control_without_axis_name_shards_are_taken_for_tensors():
    state, _ = model(PARAMS, GRADS)
    assert far(run(lamb(), check=False, method="update")[0], state) > FAR


def test_control_pmap_without_axis_name():
    grads = gradients(2, BY_DEVICE)
    state, _ = model(make(BY_DEVICE), grads)
    new = gathered(pmapped(lamb(), grads, "update"))[0]
    assert far([new[k] for k in SPLIT], state) > FAR


@pytest.mark.parametrize("method", ["step", "update"])
def test_forgotten_axis_name_is_an_error_where_jax_keeps_account(method):
    """What it says silences it: each device has a tensor of its own, and its own norms."""
    with pytest.raises(ValueError, match=r"(?s)both varies over 'data', 'model'.*PartitionSpecs in axis_name.*give axis_name=\(\)"):
        run(lamb(), method=method)


def test_no_axes_mean_a_tensor_for_each_device():
    new = run(lamb(axis_name=()), method="update")[0]
    part = np.s_[4:6, 3:]
    state, _ = model({"both": PARAMS["both"][part]}, [{"both": g["both"][part]} for g in GRADS])
    helpers.assert_near(new["both"][part], state.p[0], NEAR)
    assert far([new["both"]], model(PARAMS, GRADS)[0]) > FAR


# Bad input ----------------------------------------------------------------------------------------------------------------

BOUND = r"call the step inside one|under jax.jit alone shardings are found without it"


@pytest.mark.parametrize("axis_name", ["data", ("data", "model"), P("data"), {k: "data" for k in SPECS}, lambda params: "data"], ids=str)
def test_axis_name_that_is_not_bound(axis_name):
    opt = lamb(axis_name=axis_name if not isinstance(axis_name, P) else {**SPECS, "both": axis_name})
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = opt.init(params)
    for call in (opt.step, jax.jit(opt.step), opt.update, jax.jit(opt.update), opt.donated_step):
        with pytest.raises(ValueError, match=f"'data'.*({BOUND})"):
            call(params, state, params)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_alone_binds_nothing(kind):
    opt = lamb(axis_name=SPECS)
    params = jax.tree.map(jnp.asarray, PARAMS)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)):
        with pytest.raises(ValueError, match=f"'data', 'model'.*({BOUND})"):
            jax.jit(opt.step)(params, opt.init(params), params)


def test_axis_that_shard_map_or_pmap_does_not_have():
    for axis_name, unknown in (("stage", "'stage'"), ({**SPECS, "one": P(("model", "batch"))}, "'batch'"), (("data", "modle"), "'modle'")):
        with pytest.raises(ValueError, match=f"axis_name has {unknown}, which no.*{BOUND}"):
            run(lamb(axis_name=axis_name))
    with pytest.raises(ValueError, match="axis_name has 'y', which no"):
        pmapped(lamb(axis_name="y"), gradients(1, BY_DEVICE))


class Name:
    def __repr__(self):
        return "Name('data')"


@pytest.mark.parametrize(
    "axis_name,value",
    [(3, "3"), (True, "True"), (b"data", "b'data'"), ({"data"}, "{'data'}"), (Name(), r"Name\('data'\)"), (NamedSharding(MESH, P("data")), "NamedSharding"),
     ({**SPECS, "one": 0}, "0"), (lambda params: 1.5, "1.5"), ({**SPECS, "one": Name()}, r"Name\('data'\)")],
    ids=str,
)  # fmt: skip
def test_wrong_types(axis_name, value):
    with pytest.raises(TypeError, match=f"axis_name must hold names of mesh axes, tuples of them or PartitionSpecs, not {value}"):
        run(lamb(axis_name=axis_name))


def test_partition_spec_that_is_longer_than_the_shape():
    long = {**SPECS, "one": P("model", None)}
    with pytest.raises(ValueError, match=r"axis_name of one is PartitionSpec\('model', None\), but its shape is \(6,\)|axis_name of one is P\('model', None\)"):
        run(lamb(axis_name=long))
    with pytest.raises(ValueError, match="axis_name of scalar is P.*data.*but its shape is"):
        run(lamb(axis_name=P("data")))


@pytest.mark.parametrize(
    "axis_name,detail",
    [({k: v for k, v in SPECS.items() if k != "one"}, "one"), ({**SPECS, "three": P()}, "three"), (["data"], "list"), ([*SPECS.values()], "list"),
     ({**SPECS, "both": ["data", "model"]}, "both"), ({**SPECS, "both": {"kernel": "data"}}, "both"), (lambda params: ["data"], "list")],
    ids=str,
)  # fmt: skip
def test_trees_that_do_not_fit(axis_name, detail):
    with pytest.raises(ValueError, match=f"(?s)axis_name must have the parameters' tree, or be a prefix of it.*{detail}"):
        run(lamb(axis_name=axis_name))
