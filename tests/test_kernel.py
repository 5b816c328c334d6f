"""The CPU kernel against the float64 model and against the reference: every combination of types, odd sizes, hard values.

implementation="fused" is an error where the kernel cannot be had, so none of these can pass by the reference.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import helpers
import model64
import xla_lamb

F32, F64, F16, BF16 = np.dtype("float32"), np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
OPTAX = model64.PRESETS["optax"]
SIZES = [(0,), (1,), (7,), (8,), (9,), (4095,), (4097,), (), (33, 129)]
FEW = [0, 7, 8]  # of SIZES, for the reference: XLA compiles each tensor of it anew, and in 16 bits only a large one sees small errors
TYPES = [F32, F64, F16, BF16]
RULES = OPTAX.replace(weight_decay=0.01)
DECAY = dict(weight_decay=0.01)
BOTH = pytest.mark.parametrize("implementation", ["fused", "reference"])  # test_cuda_kernel.py leaves out the reference's


def few(tensors):
    return [tensors[i] for i in FEW]


def sizes_for(implementation):
    return SIZES if implementation == "fused" else few(SIZES)


def arithmetic(dtype):
    return F64 if dtype == F64 else F32


def check_moments(state, grads, expected, dtype):
    """v, a sum of squares, elementwise; m in ulps of what it would be if its terms had not cancelled."""
    _, mu, nu = helpers.moments(state)
    terms = model64.init(expected.p)
    for g in grads:
        terms, _ = model64.step(terms, [np.abs(x.astype(np.float64)) for x in g], RULES, 0.0)
    for a, e, at in zip(mu, expected.m, terms.m):
        assert helpers.ulps(a, e, dtype, at=at) <= 4
    for a, e in zip(nu, expected.v):
        assert helpers.ulps(a, e, dtype, at=e) <= 4


# Of the reference, which takes all to one type first, each type of a parameter with its own and with another type of gradients.
@pytest.mark.parametrize(
    "p_type, g_type, implementation",
    [(p, g, "fused") for p in TYPES for g in TYPES] + [(TYPES[i], TYPES[j % 4], "reference") for i in range(4) for j in (i, i + 1)],
    ids=str,
)
def test_types_and_sizes(p_type, g_type, implementation, x64):
    """Three steps from the same start: p in ulps of its largest value, m and v elementwise."""
    sizes = sizes_for(implementation)
    params, grads = helpers.tree(sizes, dtype=p_type), helpers.gradients(3, sizes, dtype=g_type)
    learning_rate = float(np.float32(0.02))
    opt = xla_lamb.lamb(learning_rate, **DECAY, implementation=implementation)
    step, model = jax.jit(opt.step), model64.init(params)
    p, s = [jnp.asarray(x) for x in params], opt.init(params)
    for i, g in enumerate(grads):
        model, _ = model64.step(model, g, RULES, learning_rate, store_p=p_type)
        p, s = step(g, s, p)
        for a, e in zip(p, model.p, strict=True):
            assert a.dtype == p_type
            # Storage decides for 16 bits: half an ulp of rounding a step that may fall on either side.
            assert helpers.ulps(a, e, p_type) <= (3 if p_type.itemsize == 2 else 8), a.shape
        check_moments(s, grads[: i + 1], model, arithmetic(p_type))
        assert all(x.dtype == arithmetic(p_type) for x in helpers.moments(s)[1])
    assert helpers.error(p[-1], params[-1]) > 0.01


@pytest.mark.parametrize("p_type, g_type", [*itertools.product([F32, BF16, F16], [F32, BF16])], ids=str)
def test_bfloat16_moments(p_type, g_type):
    params, grads = helpers.tree(SIZES, dtype=p_type), helpers.gradients(4, SIZES, dtype=g_type)
    p, s = helpers.run_steps(xla_lamb.lamb(0.02, **DECAY, moment_dtype="bfloat16", implementation="fused"), params, grads)
    reference = xla_lamb.lamb(0.02, **DECAY, moment_dtype="bfloat16", implementation="reference")
    q, r = helpers.run_steps(reference, few(params), [few(g) for g in grads])
    expected = helpers.run_model(params, grads, RULES, 0.02, store_p=p_type, store_m=BF16)
    for state, of in ((s, list), (r, few)):
        _, mu, nu = helpers.moments(state)
        assert all(x.dtype == BF16 for x in mu + nu)
        for a, e in zip(nu, of(expected.v), strict=True):
            assert helpers.ulps(a, e, BF16, at=e) <= 2
        for a, e in zip(mu, of(expected.m), strict=True):
            assert helpers.ulps(a, e, BF16) <= 2
    # A moment at the middle between two bfloat16 may fall on either side; its element of p then moves otherwise by 2^-9.
    for a, b in zip(few(helpers.moments(s)[1]), helpers.moments(r)[1], strict=True):
        assert np.sum(np.asarray(a) != np.asarray(b)) <= 0.01 * a.size
    for ours, got in ((few(p), q), (p, expected.p)):
        helpers.assert_near(ours, got, 1e-3 if p_type == F32 else 2 * float(ml_dtypes.finfo(p_type).eps))


# The kernel's own choices of chunk and thread change with size, so one tensor of many chunks for each of two types.
@pytest.mark.parametrize("p_type", [F32, BF16], ids=str)
def test_ten_million_elements(p_type):
    shapes = [(10_000_000,), (3,)]
    params, grads = helpers.tree(shapes, dtype=np.float32), helpers.tree(shapes, seed=1, scale=0.1, dtype=np.float32)
    params = [x.astype(p_type) for x in params]
    opt = xla_lamb.lamb(0.02, **DECAY, implementation="fused")
    p, s, stats = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))(grads, opt.init(params), params)
    expected, told = model64.step(model64.init(params), grads, RULES, float(np.float32(0.02)), store_p=p_type)
    for a, e in zip(p, expected.p):
        assert helpers.ulps(a, e, p_type) <= 3
    check_moments(s, [grads], expected, F32)
    for a, e in zip(stats.trust, told.trust):
        np.testing.assert_allclose(a, e, rtol=1e-6)


@BOTH
def test_long_run_stays_with_the_model(implementation):
    sizes = sizes_for(implementation)
    params, grads = helpers.tree(sizes), helpers.gradients(100, sizes)
    expected = helpers.run_model(params, grads, RULES, 1e-2)
    p, s = helpers.run_steps(xla_lamb.lamb(1e-2, **DECAY, implementation=implementation), params, grads)
    helpers.assert_near(p, expected.p, 1e-6)


@BOTH
def test_float64_is_float64(implementation, x64):
    sizes = sizes_for(implementation)
    params, grads = helpers.tree(sizes, dtype=F64), helpers.gradients(20, sizes, dtype=F64)
    expected = helpers.run_model(params, grads, RULES, 1e-2)
    p, _ = helpers.run_steps(xla_lamb.lamb(1e-2, **DECAY, implementation=implementation), params, grads)
    helpers.assert_near(p, expected.p, 1e-14)


def test_mixed_types_in_one_tree(x64):
    """Groups hold one combination of types each: the tree's order must come back."""
    shapes = [(9,), (3, 5), (), (17,), (4097,)]
    types = [F32, BF16, F64, F16, F32]
    params = [x.astype(t) for x, t in zip(helpers.tree(shapes), types)]
    grads = [[x.astype(t) for x, t in zip(g, types[1:] + types[:1])] for g in helpers.gradients(2, shapes)]
    p, s = helpers.run_steps(xla_lamb.lamb(0.1, variant="nvlamb", implementation="fused"), params, grads)
    q, r = helpers.run_steps(xla_lamb.lamb(0.1, variant="nvlamb", implementation="reference"), params, grads)
    for a, b, t in zip(p, q, types):
        assert a.dtype == b.dtype == t and a.shape == b.shape
        helpers.assert_near(a, b, 2 * float(ml_dtypes.finfo(t).eps))
    expected = helpers.run_model(params, grads, model64.PRESETS["nvlamb"], 0.1)
    helpers.assert_near([a for a, t in zip(p, types) if t == F32], [e for e, t in zip(expected.p, types) if t == F32], 1e-6)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_any_number_of_tensors(n):
    """Around the size of a group."""
    shapes = [(i % 5,) for i in range(n)]
    params, grads = helpers.tree(shapes), helpers.gradients(2, shapes)
    p, _ = helpers.run_steps(xla_lamb.lamb(0.1, variant="nvlamb", implementation="fused"), params, grads)
    helpers.assert_near(p, helpers.run_model(params, grads, model64.PRESETS["nvlamb"], 0.1).p, 1e-6)


# Hard values --------------------------------------------------------------------------------------------------------------

def one_step(params, grads, implementation, rules=OPTAX, learning_rate=0.1, **options):
    opt = xla_lamb.lamb(learning_rate, implementation=implementation, **options)
    p, s, stats = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))(grads, opt.init(params), params)
    expected, told = model64.step(model64.init(params), grads, rules, learning_rate)
    return p, s, stats, expected, told


@BOTH
def test_one_broken_gradient_breaks_its_tensor_alone(implementation):
    params, grads = helpers.tree([(8191,), (8191,)]), helpers.tree([(8191,), (8191,)], seed=1)
    opt = xla_lamb.lamb(0.1, implementation=implementation)
    step = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))  # compiled once for all values
    clean = step(grads, opt.init(params), params)[0]
    assert all(np.isfinite(x).all() for x in clean)
    for value, at in itertools.product([np.nan, np.inf, -np.inf], [0, 4096, 8190]):
        broken = [np.array(g) for g in grads]
        broken[0][at] = value
        p, s, stats = step(broken, opt.init(params), params)
        assert np.isnan(p[0]).all(), (value, at)  # the norm of u carries it to every element
        assert not np.isfinite(stats.trust[0][1]), (value, at)
        assert helpers.bits(p[1]) == helpers.bits(clean[1]), (value, at)
        bad = ~np.isfinite(np.asarray(helpers.moments(s)[2][0]))
        assert bad.nonzero()[0].tolist() == [at], value


@BOTH
def test_broken_parameter_shows(implementation):
    params, grads = helpers.tree([(100,), (5,)]), helpers.tree([(100,), (5,)], seed=1)
    params[0][7] = np.nan
    p = one_step(params, grads, implementation)[0]
    assert np.isnan(p[0]).all() and np.isfinite(p[1]).all()


@BOTH
def test_zeros(implementation):
    shapes = [(9,)] * 4
    params, grads = helpers.tree(shapes), helpers.tree(shapes, seed=1)
    params[0][:] = params[1][:] = grads[1][:] = grads[2][:] = 0
    p, s, stats, expected, told = one_step(params, grads, implementation)
    helpers.assert_near(p, expected.p, 1e-6)
    for a, e in zip(stats.trust, told.trust):
        np.testing.assert_allclose(a, e, rtol=1e-6)
    assert helpers.bits(p[1:3]) == helpers.bits(params[1:3])


@BOTH
@pytest.mark.parametrize("exponent", [-12, -8, 8, 15])
def test_large_and_small_magnitudes(implementation, exponent):
    """Squares of 1e15, 4097 of them, are within float32; those of 1e-12 times 1 - b2 are above its smallest normal."""
    scale = 10.0**exponent
    shapes = [(17,), (4097,)]
    params, grads = helpers.tree(shapes, scale=scale), helpers.tree(shapes, seed=1, scale=scale)
    p, s, stats, expected, told = one_step(params, grads, implementation, OPTAX.replace(eps=1e-20), eps=1e-20)
    helpers.assert_near(p, expected.p, 1e-6)
    helpers.assert_near(helpers.moments(s)[2], expected.v, 1e-6)
    for a, e in zip(stats.trust, told.trust):
        np.testing.assert_allclose(a, e, rtol=2e-6)


@BOTH
def test_mixed_magnitudes_in_one_tensor(implementation):
    """The norm of 1 beside 10^6 times 1e-4: a float32 running sum would drop the small ones."""
    params = [np.full(1_000_001, 1e-4, np.float32)]
    params[0][0] = 1
    grads = [np.ones(1_000_001, np.float32)]
    stats = one_step(params, grads, implementation)[2]
    assert float(stats.trust[0][0]) == pytest.approx(np.sqrt(1 + 1e6 * float(np.float32(1e-4)) ** 2), rel=1e-6)


@BOTH
def test_unaligned_buffers(implementation):
    """XLA aligns whole buffers only: layers of a tensor of odd size start anywhere."""
    shapes = [(5, 3, 11), (4, 4097)]
    params, grads = helpers.tree(shapes), helpers.gradients(2, shapes)
    p, _ = helpers.run_steps(xla_lamb.lamb(0.1, **DECAY, layer_axes=[2, 1], implementation=implementation), params, grads)
    helpers.assert_near(p, helpers.run_model(params, grads, RULES, 0.1, layer_axes=[2, 1]).p, 1e-6)


def test_unaligned_host_buffers():
    """A NumPy array that starts at an odd element may become a JAX buffer without a copy."""
    raw = np.random.default_rng(0).normal(size=4 * 1025).astype(np.float32)
    params = [raw[1:1000], raw[1003:2002]]
    grads = [raw[2005:3004], raw[3007:4006]]
    p = one_step(params, grads, "fused")[0]
    helpers.assert_near(p, one_step([x.copy() for x in params], [x.copy() for x in grads], "fused")[0], 0)


THREE_STEPS = """
import hashlib, helpers, xla_lamb
params, grads = helpers.tree([(33, 129), (4097,), (7,)]), helpers.gradients(3, [(33, 129), (4097,), (7,)])
p, s = helpers.run_steps(xla_lamb.lamb(0.1, variant="nvlamb", implementation="fused"), params, grads)
helpers.assert_near(p, helpers.run_model(params, grads, helpers.model64.PRESETS["nvlamb"], 0.1).p, 1e-6)
bits = hashlib.sha256(repr(helpers.bits((p, s))).encode()).hexdigest()
print("bits", bits)
"""


@functools.cache
def default_bits():
    """In this process, whose instruction set is the default: the widest."""
    names = {}
    exec(THREE_STEPS, names)
    return names["bits"]


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    assert helpers.python(THREE_STEPS, XLA_LAMB_CPU=isa).stdout.split("bits ")[1].strip() == default_bits()
