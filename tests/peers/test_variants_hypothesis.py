"""Every preset against the float64 model on random trees: shapes, empty and scalar ones too, masks, layer axes, clamps, scales."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import helpers
import model64
import xla_lamb

STEPS = 3

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.sampled_from([31, 64, 257]))


@st.composite
def tensors(draw):
    """One tensor: shape, how many leading axes are layers, whether it decays and adapts, its scale, and whether it is all zeros."""
    shape = draw(shapes)
    return (
        shape,
        draw(st.integers(0, len(shape))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1e-3, 1.0, 30.0])),
        draw(st.sampled_from([None, None, None, "params", "grads", "both"])),
    )


bounds = st.sampled_from([None, (0.0, 1.0), (0.5, 2.0), (1.0, 1.0)])
options = st.fixed_dictionaries(
    dict(
        b1=st.sampled_from([0.0, 0.5, 0.9]),
        b2=st.sampled_from([0.5, 0.99, 0.999]),
        eps=st.sampled_from([None, 1e-8, 1e-3]),
        eps_root=st.sampled_from([0.0, 1e-6]),
        weight_decay=st.sampled_from([None, 0.0, 0.05]),
        max_grad_norm=st.sampled_from([None, 0.1, 100.0]),
        ratio_bounds=bounds,
        norm_bounds=st.sampled_from([None, (0.0, 1.0), (0.5, 2.0)]),
        bias_correction=st.sampled_from([None, "update", "learning_rate", "none"]),
    )
)


def check(variant, implementation, tree, options, use_masks, grad_scale, seed):
    shapes, axes, decays, adapts, scales, zeros = map(list, zip(*tree)) if tree else ([],) * 6
    rng = np.random.default_rng(seed)

    def draw(scale_of, off):
        return [
            np.asarray(rng.normal(size=s) * scale_of(c) * (z not in (off, "both"))).astype(np.float32)
            for s, c, z in zip(shapes, scales, zeros)
        ]

    params = draw(lambda c: c, "params")
    grads = [draw(lambda c: 0.1 / c, "grads") for _ in range(STEPS)]
    masks = dict(mask=decays, adapt_mask=adapts) if use_masks == 2 else dict(mask=decays) if use_masks else {}
    opt = xla_lamb.lamb(0.01, variant=variant, layer_axes=axes, implementation=implementation, **masks, **options)
    p, s = helpers.run_steps(opt, params, grads, jit=False, grad_scale=grad_scale)

    names = {"bias_correction": "correction"}
    rules = model64.PRESETS[variant].replace(**{names.get(k, k): v for k, v in options.items() if v is not None})
    lists = dict(layer_axes=axes, decay_mask=masks.get("mask"), adapt_mask=masks.get("adapt_mask"), grad_scale=grad_scale)
    expected = helpers.run_model(params, grads, rules, 0.01, **lists)
    helpers.assert_near(p, expected.p, 2e-6)
    _, mu, nu = helpers.moments(s)
    helpers.assert_near(mu, expected.m, 2e-6)
    helpers.assert_near(nu, expected.v, 2e-6)


EXAMPLE = [((3, 4), 1, True, True, 1.0, None), ((), 0, True, False, 1.0, None), ((0,), 0, False, True, 1.0, None), ((5,), 0, False, True, 1.0, None)]
NOTHING = dict(b1=0.9, b2=0.999, eps=None, eps_root=0.0, weight_decay=None, max_grad_norm=None, ratio_bounds=None, norm_bounds=None, bias_correction=None)


@pytest.mark.parametrize("implementation", ["fused", "reference"])
@pytest.mark.parametrize("variant", model64.PRESETS)
def test_preset_on_random_trees(variant, implementation):
    @settings(max_examples=25 if implementation == "fused" else 4)
    @example(EXAMPLE, NOTHING, 0, 1.0, 0)
    @example(EXAMPLE, NOTHING, 1, 1.0, 0)
    @example(EXAMPLE, {**NOTHING, "weight_decay": 0.05}, 2, 0.25, 0)
    @example([], NOTHING, 0, 1.0, 0)
    @given(st.lists(tensors(), max_size=5), options, st.integers(0, 2), st.sampled_from([1.0, 0.125]), st.integers(0, 2**16))
    def run(tree, options, use_masks, grad_scale, seed):
        check(variant, implementation, tree, options, use_masks, grad_scale, seed)

    run()


def test_control_the_check_can_fail():
    """Each preset's check refuses each other preset that has another formula."""
    params, grads = helpers.tree([(3, 4), (5,)]), helpers.gradients(STEPS, [(3, 4), (5,)], scale=2.0)
    results = {
        name: helpers.run_model(params, grads, rules.replace(weight_decay=0.05), 0.01, decay_mask=[True, False])
        for name, rules in model64.PRESETS.items()
    }
    same = {frozenset(("optax", "paper")), frozenset(("apex", "timm"))}
    for a in results:
        for b in results:
            if a < b and frozenset((a, b)) not in same:
                assert max(helpers.error(x, y) for x, y in zip(results[a].p, results[b].p)) > 1e-5, (a, b)
