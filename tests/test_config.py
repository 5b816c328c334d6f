"""Variants and the checks of what a user passes: a bad value is an error that names it, before anything is traced."""

import dataclasses
import re

import pytest

import helpers
import model64
import xla_lamb
from xla_lamb import config

BAD = [
    (dict(eps=-1e-6), "-1e-06"),
    (dict(eps=float("nan")), "eps"),
    (dict(eps=float("inf")), "inf"),
    (dict(eps_root=-0.25), "-0.25"),
    (dict(b1=1.0), "1.0"),
    (dict(b1=-0.1), "-0.1"),
    (dict(b1=float("nan")), "b1"),
    (dict(b2=1.5), "1.5"),
    (dict(b2=1), "1"),
    (dict(b2=-1e-9), "-1e-09"),
    (dict(weight_decay=-0.01), "-0.01"),
    (dict(learning_rate=float("nan")), "learning_rate"),
    (dict(learning_rate=float("inf")), "inf"),
    (dict(max_grad_norm=0), "0"),
    (dict(max_grad_norm=0.0), "0.0"),
    (dict(max_grad_norm=-2.5), "-2.5"),
    (dict(max_grad_norm=float("nan")), "max_grad_norm"),
    (dict(variant="lars"), "'lars'"),
    (dict(variant="apex", max_grad_norm=0), "0"),
    (dict(ratio_bounds=(2.0, 1.0)), "(2.0, 1.0)"),
    (dict(ratio_bounds=(-1.0, 1.0)), "(-1.0, 1.0)"),
    (dict(ratio_bounds=(0.0, float("nan"))), "nan"),
    (dict(ratio_bounds=(0.0,)), "(0.0,)"),
    (dict(ratio_bounds=0.5), "0.5"),
    (dict(ratio_bounds=("low", "high")), "'low'"),
    (dict(norm_bounds=(3.0, 2.0)), "(3.0, 2.0)"),
    (dict(norm_bounds=(0.0, 0.0)), "(0.0, 0.0)"),
    (dict(bias_correction="sometimes"), "'sometimes'"),
    (dict(nonfinite="ignore"), "'ignore'"),
    (dict(implementation="fastest"), "'fastest'"),
]


@pytest.mark.parametrize("arguments, shown", BAD, ids=str)
def test_bad_value(arguments, shown):
    """The message has the argument's name and the value as it was given."""
    with pytest.raises(ValueError, match=re.escape(shown)) as caught:
        xla_lamb.lamb(**{"learning_rate": 1e-3, **arguments})
    assert list(arguments)[-1] in str(caught.value) or "variant" in arguments


@pytest.mark.parametrize("value", ["int8", "float16", "float", 3, "nonsense"])
def test_bad_moment_dtype(value):
    with pytest.raises((ValueError, TypeError), match=re.escape(str(value))):
        xla_lamb.lamb(1e-3, moment_dtype=value)


def test_good_values_at_the_edges():
    xla_lamb.lamb(0.0, b1=0.0, b2=0.0, eps=0.0, eps_root=0.0, weight_decay=0.0, ratio_bounds=(0, float("inf")), norm_bounds=(1, 1))
    xla_lamb.lamb(-1e-3)  # ascent


@pytest.mark.parametrize("name", model64.PRESETS)
def test_presets_as_in_the_table_of_peers(name):
    ours, rules = config.VARIANTS[name], model64.PRESETS[name]
    fields = ("decay", "adapt", "ratio_bounds", "norm_bounds", "eps", "weight_decay", "max_grad_norm")
    assert {f: getattr(ours, f) for f in fields} == {f: getattr(rules, f) for f in fields}
    assert ours.bias_correction == rules.correction
    assert ours.name == name


def test_every_preset_is_in_the_model():
    assert set(config.VARIANTS) == set(model64.PRESETS)


def test_variant_of_a_variant():
    base = config.variant("nvlamb", eps=1e-8, max_grad_norm=None)
    assert base.eps == 1e-8 and base.max_grad_norm == 1.0 and base.weight_decay == 0.01
    assert config.variant(base, decay="l2").decay == "l2"
    assert config.variant(base) == base and hash(config.variant(base)) == hash(base)
    assert config.VARIANTS["nvlamb"].eps == 1e-6
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.eps = 1
    with pytest.raises(TypeError, match="epsilon"):
        config.variant("optax", epsilon=1e-8)


@pytest.mark.parametrize("changes", [dict(decay="none"), dict(adapt="some"), dict(eps=-1), dict(max_grad_norm=0)], ids=str)
def test_bad_variant(changes):
    (field, value), = changes.items()
    with pytest.raises(ValueError, match=re.escape(str(value))):
        config.variant("optax", **changes)
    with pytest.raises(ValueError, match=field):
        config.Variant("mine", **changes)


def test_own_variant_is_used():
    """A Variant passed whole is the one that runs, its own defaults included."""
    mine = config.Variant("mine", decay="l2", eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, ratio_bounds=(0.0, 2.0))
    rules = model64.Rules(decay="l2", eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, ratio_bounds=(0.0, 2.0))
    params, grads = helpers.tree(), helpers.gradients(3)
    p, _ = helpers.run_steps(xla_lamb.lamb(0.1, variant=mine), params, grads)
    helpers.assert_near(p, helpers.run_model(params, grads, rules, 0.1).p, 1e-6)


def test_environment_sets_the_default_implementation(monkeypatch):
    monkeypatch.setenv("XLA_LAMB_IMPLEMENTATION", "reference")
    assert config.implementation(None) == "reference"
    assert config.implementation("fused") == "fused"
    monkeypatch.setenv("XLA_LAMB_IMPLEMENTATION", "fastest")
    with pytest.raises(ValueError, match="XLA_LAMB_IMPLEMENTATION.*'fastest'"):
        config.implementation(None)
    monkeypatch.delenv("XLA_LAMB_IMPLEMENTATION")
    assert config.implementation(None) == "auto"
