"""The eighteen traps of other implementations (lamb_variants.md in the project's notes), by number. 8 and 9 concern shards and replicas.

Every test runs for the kernel and for the reference.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import helpers
import model64
import xla_lamb

BF16 = ml_dtypes.bfloat16
OPTAX = model64.PRESETS["optax"]
FEW = [(3, 5), (17,), (), (0,)]
TWO = [(3, 5), (4097,)]  # XLA takes its time for each tensor of the reference


@pytest.fixture(params=["fused", "reference"])
def lamb(request):
    """xla_lamb.lamb by one implementation."""
    return lambda *args, **kwargs: xla_lamb.lamb(*args, implementation=request.param, **kwargs)


def test_trap_1_sixteen_bit_arithmetic(lamb):
    """In bfloat16 0.999 is 1: parameters turn NaN or stay. Ours move as the float64 model's, but for their storage."""
    params, grads = helpers.tree(TWO, dtype=BF16), helpers.gradients(20, TWO, dtype=BF16)
    p, s = helpers.run_steps(lamb(0.05), params, grads)
    assert all(x.dtype == BF16 for x in p)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(helpers.moments(s)[1:]))
    expected = helpers.run_model(params, grads, OPTAX, 0.05, store_p=BF16)
    for a, e, before in zip(p, expected.p, params):
        assert helpers.ulps(a, e, BF16) <= 2
        assert not a.size or helpers.error(a, before) > 0.05


def test_trap_2_norms_that_overflow_float16(lamb):
    params = [np.full(4096, 200.0, np.float16)]
    opt = lamb(1e-3)
    _, _, stats = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))([np.full(4096, 300.0, np.float16)], opt.init(params), params)
    assert float(stats.trust[0][0]) == pytest.approx(200 * 64, rel=1e-6)
    assert float(stats.trust[0][2]) == pytest.approx(200, rel=1e-5)


def test_trap_2_norms_of_many_elements(lamb):
    """A running sum in float32 is off by percents after 10^7 squares."""
    params = [np.full(10_000_019, 0.1, np.float32)]
    opt = lamb(1e-3, max_grad_norm=1.0)
    _, _, stats = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))(params, opt.init(params), params)
    norm = float(np.float32(0.1)) * np.sqrt(10_000_019)
    assert float(stats.trust[0][0]) == pytest.approx(norm, rel=1e-6)
    assert float(stats.grad_norm) == pytest.approx(norm, rel=1e-6)
    # Each element of u is g / (g + eps), with g clipped to 1 / sqrt(n).
    assert float(stats.trust[0][1]) == pytest.approx(np.sqrt(10_000_019) / (1 + 1e-6 * np.sqrt(10_000_019)), rel=1e-5)


def test_trap_3_update_in_the_gradients_type(lamb):
    """u kept in a bfloat16 gradient's buffer would be off by 4e-3."""
    params, grads = helpers.tree(TWO), helpers.gradients(3, TWO, dtype=BF16)
    p, _ = helpers.run_steps(lamb(0.3), params, grads)
    helpers.assert_near(p, helpers.run_model(params, grads, OPTAX, 0.3).p, 2e-6)


def test_trap_4_zero_and_frozen_tensors(lamb):
    params = [np.zeros((4, 3), np.float32), np.full(5, 2.0, np.float32), np.zeros(3, np.float32)]
    grads = [np.ones((4, 3), np.float32), np.zeros(5, np.float32), np.zeros(3, np.float32)]
    opt = lamb(0.5)
    p, _, stats = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))(grads, opt.init(params), params)
    np.testing.assert_allclose(p[0], -0.5, rtol=1e-5)  # ratio 1, u = 1
    assert helpers.bits(p[1:]) == helpers.bits(params[1:])
    assert [float(t[2]) for t in stats.trust] == [1, 1, 1]


BROKEN = [np.nan, np.inf, -np.inf]


# Each of these compiles its step once for all of BROKEN.


@pytest.mark.parametrize("clip", [None, 1.0])
def test_trap_5_skip_is_whole(lamb, clip):
    params, grads = helpers.tree(FEW), helpers.gradients(3, FEW)
    opt = lamb(1e-2, weight_decay=0.01, nonfinite="skip", max_grad_norm=clip)
    step = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True))
    p, s = params, opt.init(params)
    for g in grads:
        p, s, _ = step(g, s, p)
    for value in BROKEN:
        bad = [np.array(g) for g in grads[0]]
        bad[1][-1] = value
        q, r, stats = step(bad, s, p)
        assert bool(stats.skipped), value
        assert helpers.bits((q, r)) == helpers.bits((p, s)), value
    q, r, stats = step(grads[0], s, p)
    assert not bool(stats.skipped)
    assert int(helpers.moments(r)[0]) == 4


def test_trap_5_propagation_shows(lamb):
    """What is broken must be seen in its tensor; a tensor of its own goes on, since no norm ties them."""
    params, grads = helpers.tree(FEW), helpers.gradients(1, FEW)[0]
    opt = lamb(1e-2)
    step = jax.jit(opt.step)
    expected, _ = step(grads, opt.init(params), params)
    for value in BROKEN:
        grads[0] = np.full((3, 5), value, np.float32)
        p, s = step(grads, opt.init(params), params)
        assert np.all(np.isnan(p[0])), value
        assert helpers.bits(p[1:]) == helpers.bits(expected[1:]), value
        assert int(helpers.moments(s)[0]) == 1


def test_trap_5_propagation_through_the_global_norm(lamb):
    """The global norm ties all tensors: half a step would leave the others looking healthy."""
    params, grads = helpers.tree(FEW), helpers.gradients(1, FEW)[0]
    opt = lamb(1e-2, max_grad_norm=1.0)
    step = jax.jit(opt.step)
    for value in BROKEN:
        grads[0] = np.full((3, 5), value, np.float32)
        p, _ = step(grads, opt.init(params), params)
        broken = [bool(np.any(np.isnan(x))) for x in p if x.size]
        assert broken[0], value
        assert all(broken) or not any(broken[1:]), (value, broken)


def test_trap_6_max_grad_norm_zero():
    with pytest.raises(ValueError, match="max_grad_norm"):
        xla_lamb.lamb(1e-2, max_grad_norm=0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        xla_lamb.lamb(1e-2, variant="apex", max_grad_norm=0.0)


def test_trap_7_one_norm_for_stacked_layers(lamb):
    layers = [helpers.tree([(3, 5), (5,)], seed=i, scale=10.0**i) for i in range(2)]
    grads = [helpers.tree([(3, 5), (5,)], seed=10 + i) for i in range(2)]
    stacked, stacked_grads = ([np.stack(x) for x in zip(*t)] for t in (layers, grads))
    p, _ = helpers.run_steps(lamb(0.1, weight_decay=0.01, layer_axes=1), stacked, [stacked_grads])
    one, _ = helpers.run_steps(lamb(0.1, weight_decay=0.01), stacked, [stacked_grads])
    opt = lamb(0.1, weight_decay=0.01)
    step = jax.jit(opt.step)
    for i in range(2):
        alone, _ = step(grads[i], opt.init(layers[i]), layers[i])
        for a, b, c in zip(p, alone, one):
            assert helpers.error(a[i], b) <= 2.4e-7
            assert helpers.error(c[i], b) > 1e-4


def test_trap_7_two_leading_axes(lamb):
    """Layers of experts."""
    params, grads = helpers.tree([(2, 3, 4, 5)]), helpers.gradients(3, [(2, 3, 4, 5)])
    p, _ = helpers.run_steps(lamb(0.1, weight_decay=0.01, layer_axes=2), params, grads)
    rules = OPTAX.replace(weight_decay=0.01)
    helpers.assert_near(p, helpers.run_model(params, grads, rules, 0.1, layer_axes=[2]).p, 1e-6)


def test_trap_10_counter_is_int32_for_16_bit_trees(lamb):
    params = helpers.tree(TWO, dtype=BF16)
    opt = lamb(1e-3)
    count, _, _ = helpers.moments(opt.init(params))
    assert count.dtype == jnp.int32

    state = _with_count(opt.init(params), 256)
    _, state = jax.jit(opt.step)(helpers.gradients(1, TWO, dtype=BF16)[0], state, params)
    assert int(helpers.moments(state)[0]) == 257  # bfloat16 has no 257


def _with_count(state, count):
    return jax.tree.map(lambda x: jnp.asarray(count, x.dtype) if x.dtype == jnp.int32 else x, state)


def test_trap_10_counter_saturates(lamb):
    params, grads = helpers.tree(TWO), helpers.gradients(1, TWO)[0]
    opt = lamb(lambda count: jnp.where(count > 1000, 1e-2, jnp.nan), weight_decay=0.01)
    state = _with_count(opt.init(params), 2**31 - 1)
    for method in (opt.step, opt.update):
        p, s = jax.jit(method)(grads, state, params)
        counts = [int(x) for x in jax.tree.leaves(s) if x.dtype == jnp.int32]
        assert counts and set(counts) == {2**31 - 1}
        assert all(np.all(np.isfinite(x)) for x in p)


def test_trap_11_exclusion_is_not_sticky(lamb):
    """The first excluded tensor must not switch decay off for those after it, nor adaptation."""
    shapes = [(5,)] * 3
    params, grads = helpers.tree(shapes), helpers.gradients(1, shapes)
    mask = [True, False, True]
    decayed, _ = helpers.run_steps(lamb(0.1, weight_decay=0.5), params, grads)
    plain, _ = helpers.run_steps(lamb(0.1), params, grads)
    p, _ = helpers.run_steps(lamb(0.1, weight_decay=0.5, mask=mask), params, grads)
    assert helpers.bits(p) == helpers.bits([(d if m else n) for m, d, n in zip(mask, decayed, plain)])
    assert all(helpers.error(d, n) > 1e-3 for d, n in zip(decayed, plain))

    unscaled, _ = helpers.run_steps(lamb(0.1, weight_decay=0.5, adapt_mask=[False] * 3), params, grads)
    p, _ = helpers.run_steps(lamb(0.1, weight_decay=0.5, adapt_mask=mask), params, grads)
    assert helpers.bits(p) == helpers.bits([(d if m else n) for m, d, n in zip(mask, decayed, unscaled)])
    assert all(helpers.error(d, n) > 1e-3 for d, n in zip(decayed, unscaled))


OPTIONS = {
    "learning_rate": dict(learning_rate=0.2),
    "b1": dict(b1=0.5),
    "b2": dict(b2=0.5),
    "eps": dict(eps=0.1),
    "eps_root": dict(eps_root=0.1),
    "weight_decay": dict(weight_decay=0.1),
    "mask": dict(mask=lambda p: [False] * len(p)),
    "adapt_mask": dict(adapt_mask=lambda p: [False] * len(p)),
    "layer_axes": dict(layer_axes=lambda p: [min(1, x.ndim) for x in p]),
    "max_grad_norm": dict(max_grad_norm=0.1),
    "ratio_bounds": dict(ratio_bounds=(0.0, 0.5)),
    "norm_bounds": dict(norm_bounds=(0.0, 0.5)),
    "bias_correction": dict(bias_correction="none"),
    "decoupled": dict(variant="keras", eps=1e-6),
}


BASE = dict(learning_rate=0.1, weight_decay=0.02)
ONE = helpers.tree([(3, 5)]), helpers.gradients(3, [(3, 5)])


@functools.cache
def without_an_option():
    return helpers.run_steps(xla_lamb.lamb(**BASE), *ONE)[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_trap_12_no_option_is_ignored(lamb, option):
    """Each option changes the result, by step as by update, both in one program."""
    params, grads = ONE
    opt = lamb(**{**BASE, **OPTIONS[option]})

    @jax.jit
    def both(g, s, p, r, q):
        u, r = opt.update(g, r, q)
        return *opt.step(g, s, p)[::-1], r, optax.apply_updates(q, u)

    s, p, r, q = opt.init(params), params, opt.init(params), params
    for g in grads:
        s, p, r, q = both(g, s, p, r, q)
    for changed in (p, q):
        assert helpers.error(changed[0], without_an_option()[0]) > 1e-5


def test_trap_12_grad_scale_and_skip_are_used(lamb):
    params, grads = helpers.tree(TWO), helpers.gradients(1, TWO)
    opt = lamb(0.1, eps=0.1)
    scaled, _ = helpers.run_steps(opt, params, grads, grad_scale=0.25)
    expected, _ = helpers.run_steps(opt, params, [[g * np.float32(0.25) for g in grads[0]]])
    assert helpers.bits(scaled) == helpers.bits(expected)
    skipped, state = helpers.run_steps(opt, params, grads, skip=True)
    assert helpers.bits((skipped, state)) == helpers.bits((params, opt.init(params)))


def test_trap_12_state_survives_saving(lamb):
    params, grads = helpers.tree(TWO), helpers.gradients(6, TWO)
    make = lambda: lamb(0.1, variant="nvlamb", mask=[x.ndim != 1 for x in params], moment_dtype="bfloat16")  # noqa: E731
    step, again = jax.jit(make().step), jax.jit(make().step)
    p, s = params, make().init(params)
    for i, g in enumerate(grads):
        p, s = step(g, s, p)
        if i == 2:
            q, r = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, (p, s))))
    for g in grads[3:]:
        q, r = again(g, r, q)
    assert helpers.bits((q, r)) == helpers.bits((p, s))


def test_trap_13_same_bits_twice(lamb):
    """More in test_determinism.py: numbers of threads and fresh processes."""
    shapes = [(300, 1000), (4097,), (33,)]
    params, grads = helpers.tree(shapes), helpers.gradients(2, shapes)
    first, second = (helpers.run_steps(lamb(1e-2, variant="nvlamb"), params, grads) for _ in range(2))
    assert helpers.bits(first) == helpers.bits(second)


def test_trap_14_more_elements_than_int32_counts(lamb):
    """Shapes, attributes and lowering of a tensor of 2^31 + 8 elements; the memory for a run is more than a test may take."""
    params = [jax.ShapeDtypeStruct((2**20 + 1, 2048), BF16), jax.ShapeDtypeStruct((3,), BF16)]
    assert np.prod(params[0].shape) > 2**31
    opt = lamb(1e-2, variant="nvlamb", layer_axes=[1, 0])
    state = jax.eval_shape(opt.init, params)
    lowered = jax.jit(lambda g, s, p: opt.step(g, s, p, stats=True)).lower(params, state, params)
    p, s, stats = lowered.out_info
    assert p[0].shape == params[0].shape and stats.trust[0].shape == (2**20 + 1, 3)
    assert "1048577x2048xbf16" in lowered.as_text()


def test_trap_15_repeated_indices_of_sparse_gradients():
    import tensorflow as tf
    import xla_lamb.tensorflow as ours

    dense = np.zeros((6, 3), np.float32)
    values, indices = helpers.tree([(4, 3)])[0], [1, 4, 1, 1]
    np.add.at(dense, indices, values)
    runs = []
    for gradient in (tf.IndexedSlices(values, indices, dense_shape=(6, 3)), tf.constant(dense)):
        variable = tf.Variable(helpers.tree([(6, 3)], seed=3)[0])
        state = ours.init_state([variable])
        ours.lamb_step([variable], [gradient], state, 0.1)
        runs.append(variable.numpy())
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-6)


def test_trap_16_nothing_waits_for_a_value(lamb):
    """Every number of a step may be traced: no Python branch on a norm, a rate, a flag or a count, so nothing to wait for."""
    params, grads = helpers.tree(TWO), helpers.gradients(1, TWO)[0]
    numbers = dict(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-6, eps_root=1e-8, weight_decay=0.01)

    def step(numbers, scale, skip, g, s, p):
        return lamb(**numbers, max_grad_norm=1.0, nonfinite="skip").step(g, s, p, grad_scale=scale, skip=skip)

    state = lamb(**numbers).init(params)
    traced = jax.jit(step)
    p, _ = traced(jax.tree.map(jnp.float32, numbers), jnp.float32(1), jnp.array(False), grads, state, params)
    expected, _ = helpers.run_steps(lamb(**numbers, max_grad_norm=1.0), params, [grads])
    helpers.assert_near(p, expected, 1e-6)
    for i in range(3):
        changed = {k: jnp.float32(v * (1 - i / 10)) for k, v in numbers.items()}
        traced(changed, jnp.float32(i), jnp.array(i == 1), grads, state, params)
    assert traced._cache_size() == 1


def test_trap_17_eps_and_the_bias_correction(lamb):
    """eps belongs outside the corrected root; beside the raw root it weighs 31.6 times more at the first step."""
    params, grads = helpers.tree(TWO), helpers.gradients(1, TWO)
    rules = OPTAX.replace(eps=0.05)
    p, _ = helpers.run_steps(lamb(0.1, eps=0.05, adapt_mask=[False] * len(params)), params, grads)
    helpers.assert_near(p, helpers.run_model(params, grads, rules, 0.1, adapt_mask=[False] * len(params)).p, 1e-6)
    wrong = rules.replace(eps=0.05 / np.sqrt(0.001))
    q = helpers.run_model(params, grads, wrong, 0.1, adapt_mask=[False] * len(params)).p
    assert helpers.error(p[0], q[0]) > 1e-2


def test_trap_18_missing_gradients(lamb):
    a, b = helpers.tree([(3,), (3,)])
    opt = lamb(0.1)
    state = opt.init({"a": a, "b": b})
    for grads in ({"a": a}, {"a": a, "b": None}, {"a": a, "c": b}):
        with pytest.raises(ValueError):
            opt.step(grads, state, {"a": a, "b": b})


def test_trap_18_order_of_a_dict(lamb):
    """Names, not positions, tie a gradient to its parameter."""
    a, b = helpers.tree([(3,), (3,)])
    opt = lamb(0.1, mask={"b": False, "a": True}, weight_decay=0.1)
    p, _ = opt.step({"b": b, "a": a * 2}, opt.init({"a": a, "b": b}), {"b": b, "a": a})
    q, _ = opt.step({"a": a * 2, "b": b}, opt.init({"b": b, "a": a}), {"a": a, "b": b})
    assert helpers.bits(p) == helpers.bits(q)
    assert helpers.error(p["a"], a) > 0 and helpers.error(p["b"], b) > 0
