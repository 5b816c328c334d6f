"""The primitives below the optimizers: the two halves of a step, which shards use, and the norm of all gradients."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import helpers
import model64
import xla_lamb
from xla_lamb import reference
from xla_lamb import step as steps

BOTH = pytest.mark.parametrize("implementation", ["fused", "reference"])
SHAPES = [(4, 6), (10,), (), (0,), (2, 5000)]
N = len(SHAPES)
BF16 = np.dtype(ml_dtypes.bfloat16)


def spec_of(**changes):
    return reference.Spec(**{"decays": (True, False, True, True, True), "adapts": (1,) * N, "layer_axes": (1, 0, 0, 0, 1), **changes})


def scalars(skip=False, **changes):
    values = dict(
        count=3, learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-6, eps_root=0.0, weight_decay=0.02, grad_scale=0.5, skip=skip,
        decay="in_ratio", bias_correction="update",
    )  # fmt: skip
    return reference.pack(reference.scalars(**{**values, **changes}), jnp.float32)


def operands(p_type=np.float32, g_type=np.float32):
    p, g, m = (helpers.tree(SHAPES, seed=s) for s in range(3))
    v = [np.square(x) for x in helpers.tree(SHAPES, seed=3)]
    return [[x.astype(t) for x in xs] for xs, t in ((p, p_type), (g, g_type), (m, np.float32), (v, np.float32))]


def bind(part, vector, *lists, implementation, spec, dtype=None):
    flat = [x for xs in lists for x in xs]
    options = steps.Options(implementation)
    return jax.jit(functools.partial(steps.lamb_p.bind, part=part, spec=spec, dtype=dtype, options=options, trust=True))(vector, *flat)


def halves(vector, p, g, m, v, between=lambda sums: sums, dtype=np.float32, **options):
    n = len(p)
    *moments, sums = bind("moments", vector, p, g, m, v, **options)
    applied = bind("apply", vector, p, moments[:n], moments[n:], [between(sums)], dtype=dtype, **options)
    return [*applied[:n], *moments, *applied[n:]]


@BOTH
@pytest.mark.parametrize(
    "decay, emit_updates, p_type, g_type",
    [
        ("in_ratio", False, np.float32, np.float32),
        ("in_ratio", True, BF16, np.float32),
        ("decoupled", True, np.float32, np.float32),
        ("decoupled", False, BF16, np.float32),
        ("l2", False, np.float32, BF16),
    ],
    ids=str,
)
def test_halves_are_the_whole(implementation, decay, emit_updates, p_type, g_type):
    options = dict(implementation=implementation, spec=spec_of(decay=decay, emit_updates=emit_updates))
    whole = bind("step", scalars(), *operands(p_type, g_type), **options)
    dtype = whole[0].dtype
    parts = halves(scalars(), *operands(p_type, g_type), dtype=dtype, **options)
    tolerance = 1e-6 if dtype == np.float32 else 2.0**-7
    for a, b in zip(parts, whole, strict=True):
        assert a.dtype == b.dtype
        helpers.assert_near(a, b, tolerance)
    assert helpers.bits(parts[N : 3 * N]) == helpers.bits(whole[N : 3 * N])


@BOTH
def test_halves_skip(implementation):
    lists = operands()
    parts = halves(scalars(skip=True), *lists, implementation=implementation, spec=spec_of())
    assert helpers.bits(parts[: 3 * N]) == helpers.bits([*lists[0], *lists[2], *lists[3]])


@BOTH
def test_shards_with_summed_squares_are_the_whole_tensor(implementation):
    """Trap 8: a shard's own norms are not the tensor's. The sums of all shards, added between the halves, are."""
    p, g, m, v = ([x[4]] for x in operands())
    options = dict(implementation=implementation, spec=reference.Spec(decays=(True,), adapts=(1,), layer_axes=(1,)))
    whole = bind("step", scalars(), p, g, m, v, **options)
    shards = [[[x[0][:, i::2]] for x in (p, g, m, v)] for i in range(2)]
    total = sum(np.asarray(bind("moments", scalars(), *shard, **options)[-1]) for shard in shards)
    for i, shard in enumerate(shards):
        right = halves(scalars(), *shard, between=lambda sums: jnp.asarray(total), **options)
        wrong = halves(scalars(), *shard, **options)
        for a, b in zip(right[:3], whole[:3]):
            helpers.assert_near(a, b[:, i::2], 1e-6)
        helpers.assert_near(right[3], whole[3], 1e-6)
        assert helpers.error(wrong[0], whole[0][:, i::2]) > 1e-4


@BOTH
@pytest.mark.parametrize("part", ["moments", "apply"])
def test_vmap_of_a_half(implementation, part):
    options = dict(implementation=implementation, spec=spec_of())
    members = [operands(), [[x * np.float32(1.5) for x in xs] for xs in operands()]]
    vectors = [scalars(), scalars(weight_decay=0.3, b1=0.5)]
    sums = [bind("moments", vec, *lists, **options)[-1] for vec, lists in zip(vectors, members)]

    def run(vector, table, p, g, m, v):
        flat = [*p, *m, *v, table] if part == "apply" else [*p, *g, *m, *v]
        return steps.lamb_p.bind(
            vector, *flat, part=part, spec=spec_of(), dtype=np.float32, options=steps.Options(implementation), trust=True
        )

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[(vec, table, *lists) for vec, table, lists in zip(vectors, sums, members)])
    together = jax.jit(jax.vmap(run))(*stacked)
    for i in range(2):
        alone = jax.jit(run)(vectors[i], sums[i], *members[i])
        helpers.assert_near([x[i] for x in together], alone, 5e-7)


@pytest.mark.parametrize("part, per_tensor", [("step", 4), ("moments", 4), ("apply", 3)])
def test_groups(part, per_tensor):
    n = 150
    spec = reference.Spec(decays=(True,) * n, adapts=(1,) * n, layer_axes=(0,) * n)
    lists = [[np.ones(3, np.float32)] * n] * per_tensor
    sums = [np.ones((n, 2), np.float32)] if part == "apply" else []
    run = functools.partial(steps.lamb_p.bind, part=part, spec=spec, dtype=np.float32, options=steps.Options("fused"), trust=True)
    text = jax.jit(run).lower(scalars(), *[x for xs in lists for x in xs], *sums).as_text()
    assert text.count(f"@xla_lamb_{part}(") == 3


# The norm of all gradients ------------------------------------------------------------------------------------------------


def norm(grads, implementation):
    value, finite = jax.jit(lambda g: steps.grad_norm(g, steps.Options(implementation)))(grads)
    return float(value), bool(finite)


@BOTH
def test_norm_over_types_and_groups(implementation):
    types = [np.float32, BF16, np.float16, np.float32] * 20
    grads = [x.astype(t) for x, t in zip(helpers.tree([(i % 7, 3) for i in range(80)]), types)]
    assert norm(grads, implementation) == (pytest.approx(model64.grad_norm(grads), rel=1e-6), True)


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64], ids=lambda t: np.dtype(t).name)
def test_norm_sees_what_is_not_finite(implementation, value, dtype, x64):
    grads = [x.astype(dtype) for x in helpers.tree([(5,), (4097,), (3,)])]
    assert norm(grads, implementation)[1]
    for tensor, at in ((0, 4), (1, 0), (1, 4096), (2, 1)):
        broken = [x.copy() for x in grads]
        broken[tensor][at] = value
        found, finite = norm(broken, implementation)
        assert not finite and not np.isfinite(found)


@BOTH
def test_norm_of_nothing_and_of_zeros(implementation):
    assert norm([], implementation) == (0.0, True)
    assert norm([np.zeros((0, 3), np.float32)], implementation) == (0.0, True)
    assert norm([np.zeros(5, np.float32), np.zeros((0,), np.float32)], implementation) == (0.0, True)


@BOTH
def test_norm_of_float16_does_not_overflow(implementation):
    assert norm([np.full(1000, 60000, np.float16)], implementation) == (pytest.approx(60000 * np.sqrt(1000), rel=1e-3), True)


@BOTH
def test_clip_of_huge_finite_gradients(implementation):
    """Their squares overflow float32: max_grad_norm over an infinite norm would silently make zeros of them."""
    params, grads = helpers.tree([(7,), (3, 2)]), helpers.gradients(1, [(7,), (3, 2)], scale=1e25)
    p, s = helpers.run_steps(xla_lamb.lamb(0.1, max_grad_norm=1.0, implementation=implementation), params, grads)
    expected = helpers.run_model(params, grads, model64.Rules(max_grad_norm=1.0), 0.1)
    for a, e in zip([*p, *helpers.moments(s)[1]], [*expected.p, *expected.m]):
        assert np.all(np.isnan(a)) or helpers.error(a, e) <= 1e-5  # clipped as asked, or seen by everyone


# Derivatives --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["optax", "nvlamb"])
def test_derivatives_are_those_of_the_reference(variant):
    """Learning a learning rate through a step, as meta-learning does."""
    params, grads = helpers.tree([(4, 3), (5,)]), helpers.gradients(1, [(4, 3), (5,)])[0]

    def loss(implementation, rate, decay, g):
        opt = xla_lamb.lamb(rate, weight_decay=decay, variant=variant, implementation=implementation)
        p, _ = opt.step(g, opt.init(params), params)
        return sum(jnp.sum(jnp.sin(x)) for x in p)

    slopes = [jax.grad(functools.partial(loss, i), argnums=(0, 1, 2))(0.1, 0.01, grads) for i in ("fused", "reference")]
    helpers.assert_near(slopes[0], slopes[1], 1e-5)
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(slopes[0]))
