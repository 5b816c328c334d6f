"""`python -m benchmarks.gpu_checks check|bits|sanitize`: is the kernel right? Part of `python -m benchmarks.gpu`, in a process of its own.

Results are compared with the float64 model of the tests, within the tests' tolerances. Everything is asked for as "fused", so nothing can
pass by the reference. Each line on standard output is JSON: what begins, or what came of it.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from benchmarks import bare_optax  # noqa: E402

bare_optax.install()  # before xla_lamb and the tests' helpers ask for it

import helpers  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import model64  # noqa: E402
import numpy as np  # noqa: E402
import xla_lamb  # noqa: E402
from xla_lamb import reference  # noqa: E402
from xla_lamb import step as steps  # noqa: E402

F32, F64, F16, BF16 = np.dtype("float32"), np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
TYPES = (F32, BF16, F16, F64)

# Around vectors, tiles (4,096 elements) and more of them; the last three have layers, which begin at any element.
SIZES = [(0,), (1,), (7,), (8,), (9,), (1023,), (4095,), (4097,), (100_003,), (), (33, 129), (13, 7), (5, 3, 11), (4, 4097)]
LAYER_AXES = [0] * 11 + [1, 2, 1]
MASK = [i % 3 != 1 for i in range(len(SIZES))]

RATE = float(np.float32(0.02))
MODEL_RATE = RATE  # its test sees that a wrong one does not pass
RULES = model64.PRESETS["optax"].replace(weight_decay=0.01)


def lamb(rate=RATE, **options):
    return xla_lamb.lamb(rate, **{"weight_decay": 0.01, **options}, implementation="fused")


def on_device(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)  # a copy, so that it can be donated


def jitted(opt, donate=True, **options):
    """params, state, grads -> params, state, stats; in place as a training loop has it."""
    return jax.jit(lambda p, s, g: opt.step(g, s, p, stats=True, **options), donate_argnums=(0, 1) if donate else ())


def x64(on=True):
    return jax.enable_x64(on) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(on)


def require(condition, text):
    if not condition:
        raise AssertionError(text)


def near(actual, expected, tolerance, what):
    """Leaf by leaf, relative to each tensor's largest value."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = helpers.error(a, e)
        require(error <= tolerance, f"{what} {i} of shape {np.shape(e)} is off by {error:.3g} of its largest value, not {tolerance:.3g}")


def within(actual, expected, ulps, dtype, what, at=None):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        require(a.dtype == dtype, f"{what} {i} is {a.dtype}, not {dtype}")
        error = helpers.ulps(a, e, dtype, at=None if at is None else at[i])
        require(error <= ulps, f"{what} {i} of shape {np.shape(e)} is off by {error:.3g} ulps, not {ulps}")


def trust_near(stats, told, tolerance):
    for i, (a, e) in enumerate(zip(stats.trust, told.trust, strict=True)):
        a = np.asarray(a, np.float64)
        require(np.allclose(a, e, rtol=tolerance, atol=0), f"|p|, |u|, ratio of tensor {i} are {a.tolist()}, not {e.tolist()}")


def same_bits(a, b, what):
    require(helpers.bits(a) == helpers.bits(b), what)


# The checks ---------------------------------------------------------------------------------------------------------------


def types(p_type, g_type, m_type):
    """Three steps in place, compared after each."""
    with x64():
        opt = lamb(mask=MASK, layer_axes=LAYER_AXES, **({"moment_dtype": "bfloat16"} if m_type == BF16 else {}))
        params, grads = helpers.tree(SIZES, dtype=p_type), helpers.gradients(3, SIZES, dtype=g_type)
        options = dict(decay_mask=MASK, layer_axes=LAYER_AXES, store_p=p_type, store_m=BF16 if m_type == BF16 else None)
        model = model64.init(params)
        terms = model64.init(params)  # what the moments would be if no term of theirs were negative
        p, s, step = on_device(params), opt.init(on_device(params)), jitted(opt)
        for g in grads:
            model, told = model64.step(model, g, RULES, MODEL_RATE, **options)
            terms, _ = model64.step(terms, [np.abs(x.astype(np.float64)) for x in g], RULES, 0.0)
            p, s, stats = step(p, s, on_device(g))
            _, m, v = helpers.moments(s)
            if m_type == BF16:
                # A moment at the middle between two bfloat16 may fall on either side; its element of p then moves otherwise by 2^-9.
                near(p, model.p, 1e-3 if p_type == F32 else 2 * float(ml_dtypes.finfo(p_type).eps), "parameter")
                within(m, model.m, 2, BF16, "first moment")
                within(v, model.v, 2, BF16, "second moment", at=model.v)
            else:
                within(p, model.p, 3 if p_type.itemsize == 2 else 8, p_type, "parameter")
                # A hundred thousand elements meet roundings that the tests' few do not, where 4 are enough.
                within(m, model.m, 5, m_type, "first moment", at=terms.m)
                within(v, model.v, 5, m_type, "second moment", at=model.v)
                if p_type.itemsize > 2:  # else the model's parameters may have been rounded otherwise
                    trust_near(stats, told, 1e-6)
        require(helpers.error(p[8], params[8]) > 0.01, "the parameters have not moved")


def variants(name):
    params, grads = helpers.tree(SIZES), helpers.gradients(3, SIZES)
    rules = model64.PRESETS[name]
    # Their own defaults of weight decay and clipping.
    opt = xla_lamb.lamb(RATE, variant=name, mask=MASK, layer_axes=LAYER_AXES, implementation="fused")
    model, p, s, step = model64.init(params), on_device(params), opt.init(on_device(params)), jitted(opt)
    for g in grads:
        model, told = model64.step(model, g, rules, MODEL_RATE, decay_mask=MASK, layer_axes=LAYER_AXES)
        p, s, stats = step(p, s, on_device(g))
        near(p, model.p, 1e-6, "parameter")
        trust_near(stats, told, 2e-6)
        if rules.max_grad_norm is not None:
            require(np.isclose(float(stats.grad_norm), told.grad_norm, rtol=1e-6), f"the norm is {stats.grad_norm}, not {told.grad_norm}")


def updates(name, g_type):
    """opt.update and apply_updates. In place an update takes its gradient's buffer, if they have one type."""
    params, grads = helpers.tree(SIZES), helpers.gradients(2, SIZES, dtype=g_type)
    opt = lamb(variant=name, mask=MASK, layer_axes=LAYER_AXES)
    expected = helpers.run_model(
        params, grads, model64.PRESETS[name].replace(weight_decay=0.01), MODEL_RATE, decay_mask=MASK, layer_axes=LAYER_AXES
    )
    p, s = helpers.run_updates(opt, params, grads)
    near(p, expected.p, 2e-6, "parameter")
    q, r, update = on_device(params), opt.init(on_device(params)), jax.jit(opt.update, donate_argnums=(0, 1))
    for g in grads:
        u, r = update(on_device(g), r, q)
        q = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), q, u)
    near(q, expected.p, 2e-6, "parameter, in place")
    same_bits(r, s, "the state after updates in place has other bits")


def norms(g_type):
    with x64():
        grads = helpers.tree(SIZES, dtype=g_type)
        norm = jax.jit(functools.partial(steps.grad_norm, options=steps.Options("fused")))
        expected = model64.grad_norm(grads)
        got, finite = norm(grads)
        require(np.isclose(float(got), expected, rtol=1e-13 if g_type == F64 else 1e-6), f"the norm is {float(got)}, not {expected}")
        require(bool(finite), "finite gradients pass for broken ones")
        for at, value in itertools.product((0, 4096, 100_002), (np.nan, np.inf, -np.inf)):
            broken = [x.copy() for x in grads]
            broken[8][at] = value
            require(not bool(norm(broken)[1]), f"{value} at {at} is not seen")


def halves(decay):
    """The calls xla_lamb_moments and xla_lamb_apply do together what xla_lamb_step does."""
    n = len(SIZES)
    p, g, m = (helpers.tree(SIZES, seed=seed) for seed in range(3))
    v = [np.square(x) for x in helpers.tree(SIZES, seed=3)]
    spec = reference.Spec(decays=tuple(MASK), adapts=(reference.ALWAYS,) * n, layer_axes=tuple(LAYER_AXES), decay=decay)
    values = dict(count=3, learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-6, eps_root=0.0, weight_decay=0.02, grad_scale=0.5, skip=False)
    vector = reference.pack(reference.scalars(**values, decay=decay, bias_correction="update"), jnp.float32)

    def bind(part, *operands, dtype=None):
        options = dict(part=part, spec=spec, dtype=dtype, options=steps.Options("fused"), trust=True)
        return jax.jit(functools.partial(steps.lamb_p.bind, **options))(vector, *operands)

    whole = bind("step", *p, *g, *m, *v)
    moments = bind("moments", *p, *g, *m, *v)
    applied = bind("apply", *p, *moments, dtype=F32)
    same_bits(moments[:-1], whole[n : 3 * n], "the moments have other bits")
    near(applied, [*whole[:n], *whole[3 * n :]], 1e-6, "result")


def skipped(p_type, m_type):
    """A skipped step changes no bit; an update is zero then."""
    with x64():
        opt = lamb(mask=MASK, layer_axes=LAYER_AXES, **({"moment_dtype": "bfloat16"} if m_type == BF16 else {}))
        params, grads = helpers.tree(SIZES, dtype=p_type), helpers.tree(SIZES, seed=1, dtype=p_type)
        p, s, _ = jitted(opt)(on_device(params), opt.init(on_device(params)), on_device(grads))
        before = helpers.bits((p, s))
        for donate in (False, True):
            q, r, stats = jitted(opt, donate, skip=True)(on_device(p), on_device(s), on_device(grads))
            require(helpers.bits((q, r)) == before, "a skipped step has changed bits" + (", in place" if donate else ""))
            require(bool(stats.skipped) and not any(np.any(np.asarray(t)) for t in stats.trust), "the stats of a skipped step are not 0")
        u, r = jax.jit(functools.partial(opt.update, skip=True))(on_device(grads), s, p)
        require(not any(np.any(np.asarray(x)) for x in u), "the updates of a skipped step are not 0")
        same_bits(r, s, "a skipped update has changed the state")


def broken_is_skipped(value):
    """nonfinite="skip" decides on the device."""
    opt = lamb(nonfinite="skip", max_grad_norm=1.0)
    params, grads = helpers.tree(SIZES), helpers.tree(SIZES, seed=1)
    step = jitted(opt)
    p, s, _ = step(on_device(params), opt.init(on_device(params)), on_device(grads))
    before = helpers.bits((p, s))
    bad = [x.copy() for x in grads]
    bad[7][-1] = value
    p, s, stats = step(p, s, on_device(bad))
    require(bool(stats.skipped), f"{value} is not skipped")
    require(helpers.bits((p, s)) == before, "the skipped step has changed bits")
    p, s, stats = step(p, s, on_device(grads))
    require(not bool(stats.skipped) and int(helpers.moments(s)[0]) == 2, "the step after it was skipped too")


def broken_breaks_its_layer_alone(value):
    shapes, axes = [(8191,), (3, 100_003), (8191,)], [0, 1, 0]
    opt = lamb(layer_axes=axes)
    params, grads = helpers.tree(shapes), helpers.tree(shapes, seed=1)
    step, init = jitted(opt, donate=False), opt.init(on_device(params))
    clean = step(params, init, grads)[0]
    require(all(np.isfinite(x).all() for x in clean), "finite gradients give parameters that are not finite")
    for tensor, at in ((0, (4096,)), (1, (1, 100_002))):
        bad = [x.copy() for x in grads]
        bad[tensor][at] = value
        p, s, stats = step(params, init, bad)
        layer = at[: axes[tensor]]
        require(np.isnan(p[tensor][layer]).all(), f"{value} at {at} of tensor {tensor} does not show in all of its layer")
        require(not np.isfinite(stats.trust[tensor][layer + (1,)]), f"{value} at {at} of tensor {tensor} does not show in |u|")
        healthy = lambda tree: [x if i != tensor else np.delete(x, at[0], 0) if axes[i] else 0 for i, x in enumerate(map(np.asarray, tree))]
        same_bits(healthy(p), healthy(clean), f"{value} at {at} of tensor {tensor} shows in other layers")
        where = ~np.isfinite(np.asarray(helpers.moments(s)[2][tensor]))
        require(np.argwhere(where).tolist() == [list(at)], f"{value} at {at} of tensor {tensor} shows elsewhere in the second moment")


def zeros():
    """Where |p| or |u| is 0 the ratio is 1, and what has no gradient stays."""
    shapes = [(9,), (9,), (9,), (5000,), (5000,)]
    params, grads = helpers.tree(shapes), helpers.tree(shapes, seed=1)
    for x in (params[0], params[1], params[3], grads[1], grads[2], grads[4]):
        x[:] = 0
    opt = lamb(weight_decay=0.0)
    p, _, stats = jitted(opt, donate=False)(params, opt.init(on_device(params)), grads)
    model, told = model64.step(model64.init(params), grads, model64.PRESETS["optax"], MODEL_RATE)
    near(p, model.p, 1e-6, "parameter")
    trust_near(stats, told, 1e-6)
    same_bits([p[i] for i in (1, 2, 4)], [params[i] for i in (1, 2, 4)], "a parameter without gradient has moved")


def batched():
    """vmap: each member has its own rate, gradients and layers."""
    members = [helpers.tree(SIZES, seed=i) for i in range(3)], [helpers.tree(SIZES, seed=10 + i) for i in range(3)]
    params, grads = ([np.stack(x) for x in zip(*m)] for m in members)
    factors = [1.0, 2.0, 0.5]

    def one(rate, p, g):
        opt = lamb(rate, mask=MASK, layer_axes=LAYER_AXES, max_grad_norm=1.0)
        return opt.step(g, opt.init(p), p)

    p, s = jax.jit(jax.vmap(one))(RATE * jnp.array(factors), params, grads)
    rules = RULES.replace(max_grad_norm=1.0)
    for i, factor in enumerate(factors):
        model, _ = model64.step(
            model64.init(members[0][i]), members[1][i], rules, factor * MODEL_RATE, decay_mask=MASK, layer_axes=LAYER_AXES
        )
        near([x[i] for x in p], model.p, 1e-6, f"member {i}: parameter")
        near([x[i] for x in helpers.moments(s)[2]], model.v, 1e-6, f"member {i}: second moment")


def many(count):
    """More tensors than one call takes, with the norm that ties them."""
    shapes = [(i % 7,) if i % 100 else (5000,) for i in range(count)]
    params, grads = helpers.tree(shapes), helpers.gradients(2, shapes)
    opt = xla_lamb.lamb(RATE, variant="nvlamb", implementation="fused")
    p, _ = helpers.run_steps(opt, params, grads)
    near(p, helpers.run_model(params, grads, model64.PRESETS["nvlamb"], MODEL_RATE).p, 1e-6, "parameter")


def large(size):
    """Tensors whose u does not fit the chip, beside one that does: the second pass computes u again. Two steps; the model in pieces."""
    shapes = [(size + 3,), (1000,), (size // 8 + 1,)]
    rng = np.random.default_rng(0)
    normal = lambda scale: [scale * rng.standard_normal(shape, np.float32) for shape in shapes]
    params, grads = normal(0.05), [normal(1e-3), normal(2e-3)]
    opt = lamb()
    p, s, step = on_device(params), opt.init(on_device(params)), jitted(opt)
    for g in grads:
        p, s, stats = step(p, s, on_device(g))
    for tensor, shape in enumerate(shapes):
        flat = lambda x: np.asarray(x).reshape(-1)
        pieces = [slice(i, i + (1 << 19)) for i in range(0, int(np.prod(shape)), 1 << 19)]
        states = [model64.init([flat(params[tensor])[piece]]) for piece in pieces]
        for g in grads:
            # Each piece with ratio 1 first: the whole tensor's norms, and then its ratio, come from all of them.
            unscaled = [
                model64.step(state, [flat(g[tensor])[piece]], RULES, MODEL_RATE, adapt_mask=[False]) for state, piece in zip(states, pieces)
            ]
            norms = np.sqrt(np.sum([np.square(told.trust[0][:2]) for _, told in unscaled], axis=0))
            ratio = norms[0] / norms[1]
            for state, (after, _) in zip(states, unscaled):
                after.p[0] = state.p[0] - ratio * (state.p[0] - after.p[0])
            states = [after for after, _ in unscaled]
        got = np.asarray(stats.trust[tensor], np.float64)
        require(np.allclose(got, [*norms, ratio], rtol=1e-6, atol=0), f"|p|, |u|, ratio of {shape} are {got}, not {[*norms, ratio]}")
        _, m, v = helpers.moments(s)
        for name, actual in (("p", p), ("m", m), ("v", v)):
            for state, piece in zip(states, pieces):
                near([flat(actual[tensor])[piece]], getattr(state, name), 2e-6, f"{name} of {shape} from element {piece.start} on:")


def huge(size):
    """A tensor of so many tiles that they are worked off in larger chunks; beside the reference, on the device."""
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 62)
    if room < 60 * size:
        return f"skipped: the GPU gives JAX {room / 1e9:.0f} GB, and this takes {60 * size / 1e9:.0f}"
    plain = xla_lamb.lamb(RATE, weight_decay=0.01, implementation="reference")

    @jax.jit
    def difference(key):
        p, g = (jax.random.normal(k, (size,)) for k in jax.random.split(key))
        (q, s, told), (r, t, expected) = (o.step(1e-3 * g, o.init(p), p, stats=True) for o in (lamb(), plain))
        pairs = zip([q, *helpers.moments(s)[1:]], [r, *helpers.moments(t)[1:]])
        return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in pairs], told.trust, expected.trust

    differences, trust, expected = difference(jax.random.key(0))
    require(np.allclose(trust, expected, rtol=1e-5, atol=0), f"|p|, |u|, ratio are {trust}, not {expected}")
    for name, x in zip(("p", "m", "v"), differences):
        require(float(x) <= 2e-6, f"{name} differs from the reference's by {float(x):.3g} of its largest value")


def all_checks(small):
    """{name: function}. `small`: as little as runs every line, for a machine without a GPU."""
    few = (F32, BF16)
    checks = {}

    def add(function, *cases):
        for case in cases or [()]:
            checks[" ".join([function.__name__.replace("_", " "), *map(str, case)])] = functools.partial(function, *case)

    def moments(p_type):
        return (F64,) if p_type == F64 else (F32, BF16)

    add(types, *((p, g, m) for p in TYPES for g in TYPES for m in moments(p) if not small or p == g or m == BF16 and p in few))
    add(variants, *((name,) for name in sorted(set(xla_lamb.VARIANTS) | set(model64.PRESETS))))
    add(updates, *itertools.product(("optax", "keras"), few))
    add(norms, *((g,) for g in TYPES))
    add(halves, *((decay,) for decay in reference.DECAYS))
    add(skipped, (F32, F32), (F32, BF16), (BF16, BF16), (F64, F64))
    add(broken_is_skipped, *((value,) for value in (np.nan, np.inf)))
    add(broken_breaks_its_layer_alone, *((value,) for value in (np.nan, -np.inf)))
    add(zeros)
    add(batched)
    add(many, (250 if small else 1000,))
    add(large, (300_000 if small else 64 << 20,))
    add(huge, (300_000 if small else 560_000_000,))
    return checks


def say(line):
    print(json.dumps(line), flush=True)


def run(platform="cuda", small=False, say=say, share=0, shares=1, only=""):
    """Runs one of several shares of the checks on a platform, those whose name begins with `only`; returns whether all of them passed."""
    passed = True
    with jax.default_device(jax.devices(platform)[0]):
        for name, function in list(all_checks(small).items())[share::shares]:
            if not name.startswith(only):
                continue
            say({"begins": name})
            begin, note, problem = time.perf_counter(), None, None
            try:
                note = function()
            except Exception as error:  # the others still tell something
                problem = f"{type(error).__name__}: {error}"[:1000]
                passed = False
            say({"check": name, "problem": problem, "note": note, "seconds": round(time.perf_counter() - begin, 2)})
    return passed


# The same bits ------------------------------------------------------------------------------------------------------------


def digest(tree):
    found = hashlib.sha256()
    for leaf in map(np.asarray, jax.tree.leaves(tree)):
        found.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return found.hexdigest()


def bits(platform="cuda", small=False, say=say, repeats=10):
    """Three steps from the same start, again and again: each in a call of its own, and all in a loop. Says the digests that it saw."""
    shapes = [(1024, 1024), (3000, 1000), (4097,), (12, 70_001), ()] + [(257,)] * 50
    if small:
        shapes = [(100, 100), (12, 701), (257,)]
    axes = [int(shape[:1] == (12,)) for shape in shapes]
    params, grads = helpers.tree(shapes), helpers.tree(shapes, seed=1)
    opt = lamb(variant="nvlamb", layer_axes=axes)
    with jax.default_device(jax.devices(platform)[0]):
        step = jitted(opt)
        g = on_device(grads)

        def alone():
            p, s = on_device(params), opt.init(on_device(params))
            for _ in range(3):
                p, s, stats = step(p, s, g)
            return p, s, stats.trust

        start = jax.eval_shape(alone)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def loop(p, s, g):
            def body(_, carry):
                p, s, stats = opt.step(g, carry[1], carry[0], stats=True)
                return p, s, stats.trust

            return jax.lax.fori_loop(0, 3, body, (p, s, [jnp.zeros(t.shape, t.dtype) for t in start[2]]))

        forms = {"call": alone, "loop": lambda: loop(on_device(params), opt.init(on_device(params)), g)}
        for form, function in forms.items():
            say({"begins": f"bits {form}"})
            results = [function() for _ in range(repeats)]  # all enqueued before the first is looked at
            require(all(np.isfinite(x).all() for x in results[0][0]), "the parameters are not finite")
            say({"form": form, "digests": [digest(result) for result in results]})


# Under compute-sanitizer --------------------------------------------------------------------------------------------------


def small_case(platform="cuda", small=True, say=say):
    """A little of every kernel, for tools that make it a hundred times slower."""
    shapes, axes = [(9,), (8193,), (30_000,), (3, 4097), ()], [0, 0, 0, 1, 0]
    for p_type, options in ((F32, {}), (BF16, {"moment_dtype": "bfloat16"}), (F64, {})):
        say({"begins": f"small case {p_type}"})
        with x64(p_type == F64), jax.default_device(jax.devices(platform)[0]):
            opt = lamb(variant="nvlamb", layer_axes=axes, **options)  # with the norm, which has kernels of its own
            params, grads = helpers.tree(shapes, dtype=p_type), helpers.tree(shapes, seed=1, dtype=p_type)
            p, _, _ = jitted(opt)(on_device(params), opt.init(on_device(params)), on_device(grads))
            require(all(np.isfinite(np.asarray(x, np.float64)).all() for x in p), "the parameters are not finite")
    say({"begins": "small case, halves"})
    halves("in_ratio")
    say({"form": "small case", "digests": []})


def main():
    job = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    function = {"check": run, "bits": bits, "sanitize": small_case}[sys.argv[1]]
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the lines below
        function(**job, say=lambda line: print(json.dumps(line), file=sys.__stdout__, flush=True))


if __name__ == "__main__":
    main()
