"""The reference, which is the specification: each of its switches against the float64 model, and what it must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import model64
import xla_lamb

lamb = functools.partial(xla_lamb.lamb, implementation="reference")

SHAPES = [(4, 3, 5), (17,), (), (0,), (6, 2)]
MASK = [True, False, True, True, False]
AXES = [1, 0, 0, 1, 2]

SWITCHES = {
    "plain": {},
    "decay": dict(weight_decay=0.1),
    "decoupled": dict(variant="keras", weight_decay=0.1),
    "l2": dict(variant=xla_lamb.Variant("mine", decay="l2", weight_decay=0.1)),
    "bias correction on the rate": dict(bias_correction="learning_rate", weight_decay=0.1),
    "no bias correction": dict(bias_correction="none", weight_decay=0.1),
    "eps": dict(eps=0.1, weight_decay=0.1),
    "eps_root": dict(eps_root=0.01),
    "betas": dict(b1=0.5, b2=0.9),
    "no moments": dict(b1=0.0, b2=0.0),
    "mask": dict(weight_decay=0.1, mask=MASK),
    "adapt mask": dict(weight_decay=0.1, adapt_mask=MASK),
    "both masks": dict(weight_decay=0.1, mask=MASK, adapt_mask=MASK[::-1]),
    "tf_addons with a mask": dict(variant="tf_addons", weight_decay=0.1, mask=MASK),
    "tf_addons without decay": dict(variant="tf_addons", mask=MASK),
    "apex with a mask": dict(variant="apex", mask=MASK),
    "apex without decay": dict(variant="apex", weight_decay=0.0),
    "timm with an adapt mask": dict(variant="timm", mask=MASK, adapt_mask=[True] * 5),
    "layers": dict(weight_decay=0.1, layer_axes=AXES),
    "ratio from below": dict(ratio_bounds=(2.0, 9.0)),
    "ratio from above": dict(ratio_bounds=(0.0, 0.3)),
    "norm from below": dict(norm_bounds=(5.0, 9.0)),
    "norm from above": dict(norm_bounds=(0.0, 0.3)),
    "clip": dict(max_grad_norm=0.2),
    "clip far above": dict(max_grad_norm=1e6),
}

RULE_NAMES = {"bias_correction": "correction"}


def rules_of(options):
    """The model's rules for our arguments."""
    options = dict(options)
    variant = options.pop("variant", "optax")
    rules = model64.Rules(decay="l2", weight_decay=0.1) if not isinstance(variant, str) else model64.PRESETS[variant]
    changes = {RULE_NAMES.get(k, k): v for k, v in options.items() if k not in ("mask", "adapt_mask", "layer_axes")}
    return rules.replace(**changes)


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_switch_as_in_the_model(switch, implementation):
    options = SWITCHES[switch]
    params, grads = helpers.tree(SHAPES), helpers.gradients(5, SHAPES)
    lists = dict(decay_mask=options.get("mask"), adapt_mask=options.get("adapt_mask"), layer_axes=options.get("layer_axes"))
    expected = helpers.run_model(params, grads, rules_of(options), 0.05, **lists)
    # The reference compiles slowly, and its two ways differ only in where decay enters.
    ways = [helpers.run_steps]
    if implementation == "fused" or switch in ("decay", "decoupled", "l2", "layers"):
        ways.append(helpers.run_updates)
    for run in ways:
        p, s = run(xla_lamb.lamb(0.05, **options, implementation=implementation), params, grads)
        helpers.assert_near(p, expected.p, 1e-6)
        count, mu, nu = helpers.moments(s)
        assert int(count) == expected.t
        helpers.assert_near(mu, expected.m, 1e-6)
        helpers.assert_near(nu, expected.v, 1e-6)


def test_switches_differ():
    """Each switch is more than the tolerance away from no switch, or the test above could not fail."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(5, SHAPES)
    same = ("plain", "decay", "clip far above", "tf_addons without decay", "apex without decay")
    plain = {wd: helpers.run_model(params, grads, model64.Rules(weight_decay=wd), 0.05) for wd in (0.0, 0.1)}
    for switch, options in SWITCHES.items():
        if switch in same:
            continue
        lists = dict(decay_mask=options.get("mask"), adapt_mask=options.get("adapt_mask"), layer_axes=options.get("layer_axes"))
        model = helpers.run_model(params, grads, rules_of(options), 0.05, **lists)
        base = plain[rules_of(options).weight_decay if rules_of(options).weight_decay in plain else 0.0]
        assert max(helpers.error(a, b) for a, b in zip(model.p, base.p)) > 1e-4, switch


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_scale_skip_and_stats(implementation):
    params, grads = helpers.tree(SHAPES), helpers.gradients(4, SHAPES)
    opt = xla_lamb.lamb(0.05, variant="nvlamb", layer_axes=AXES, nonfinite="skip", implementation=implementation)
    grads[2][0][0, 0, 0] = np.inf
    step = jax.jit(lambda g, s, p, scale, skip: opt.step(g, s, p, grad_scale=scale, skip=skip, stats=True))
    p, s, model = params, opt.init(params), model64.init(params)
    for i, (scale, skip) in enumerate([(0.5, False), (2.0, True), (1.0, False), (30.0, False)]):
        p, s, stats = step(grads[i], s, p, scale, skip)
        model, told = model64.step(
            model, grads[i], model64.PRESETS["nvlamb"], 0.05, layer_axes=AXES, grad_scale=scale, skip=skip, nonfinite="skip"
        )
        assert bool(stats.skipped) == told.skipped == (i in (1, 2))
        np.testing.assert_allclose(stats.grad_norm, told.grad_norm, rtol=1e-6)
        if not told.skipped:
            for a, e, shape, axes in zip(stats.trust, told.trust, SHAPES, AXES):
                assert a.shape == shape[:axes] + (3,)
                np.testing.assert_allclose(a, e, rtol=2e-6)
        helpers.assert_near(p, model.p, 1e-6)
        assert int(helpers.moments(s)[0]) == model.t


@pytest.mark.parametrize("correction", ["update", "learning_rate"])
def test_schedules_count_from_zero(correction):
    """As optax's: the first step sees schedule(0), for the rate as for the decay."""
    rate, decay = lambda count: 0.1 / (1 + count), lambda count: 0.2 * count
    params, grads = helpers.tree(SHAPES), helpers.gradients(4, SHAPES)
    expected = model64.init(params)
    for i, g in enumerate(grads):
        expected, _ = model64.step(expected, g, model64.Rules(weight_decay=0.2 * i, correction=correction), 0.1 / (1 + i))
    for implementation in ("reference", "fused"):
        for run in (helpers.run_steps, helpers.run_updates):
            opt = xla_lamb.lamb(rate, weight_decay=decay, bias_correction=correction, implementation=implementation)
            helpers.assert_near(run(opt, params, grads)[0], expected.p, 1e-6)


def test_traced_decay_of_zero_switches_adaptation_off():
    """apex adapts only what decays; a traced weight decay is known only when the step runs."""
    params, grads = helpers.tree(SHAPES), helpers.gradients(1, SHAPES)[0]
    for implementation in ("reference", "fused"):

        @jax.jit
        def step(decay, g, s, p):
            return xla_lamb.lamb(0.1, variant="apex", weight_decay=decay, implementation=implementation).step(g, s, p)

        for decay in (0.0, 0.1):
            rules = model64.PRESETS["apex"].replace(weight_decay=decay)
            expected = helpers.run_model(params, [grads], rules, 0.1)
            p, _ = step(decay, grads, xla_lamb.lamb(0.1).init(params), params)
            helpers.assert_near(p, expected.p, 1e-6)


def test_sixteen_bit_moments_are_only_stored_in_16_bits():
    params, grads = helpers.tree(SHAPES), helpers.gradients(1, SHAPES)
    _, s = helpers.run_steps(lamb(0.1, moment_dtype="bfloat16"), params, grads)
    expected = helpers.run_model(params, grads, model64.Rules(), 0.1)
    _, mu, nu = helpers.moments(s)
    for a, e in zip(mu + nu, expected.m + expected.v):
        assert a.dtype == jnp.bfloat16
        assert helpers.ulps(a, e, a.dtype, at=e) <= 1


def test_pure_jnp():
    """What runs where there is no kernel: no custom call of ours, and a gradient through the step exists."""
    params, grads = helpers.tree([(3, 2)]), helpers.gradients(1, [(3, 2)])[0]
    opt = lamb(0.1)
    state = opt.init(params)
    assert "xla_lamb_" not in jax.jit(opt.step).lower(grads, state, params).as_text()
    slope = jax.grad(lambda g: jnp.sum(opt.step(g, state, params)[0][0]))(grads)
    assert np.all(np.isfinite(slope[0]))
