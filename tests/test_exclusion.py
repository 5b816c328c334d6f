"""Names of parameters, and the tensors that regular expressions leave out of weight decay and of the trust ratio."""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import helpers
import model64
import xla_lamb
from xla_lamb.optax import parameter_names


class Pair(NamedTuple):
    kernel: Any
    value: Any


@flax.struct.dataclass
class Projections:
    query: Any
    value: Any  # a name that Flax's wrappers use too


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.Linear(2, 2, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(2, rngs=rngs) for _ in range(2)])
        self.value = nnx.Param(jnp.ones(3))


X = np.ones(2, np.float32)
NAMES = {
    "dict": ({"encoder": {"layer_0": {"LayerNorm": {"scale": X, "bias": X}}}}, ["encoder/layer_0/LayerNorm/bias", "encoder/layer_0/LayerNorm/scale"]),
    "sequences": ([X, (X, [X])], ["0", "1/0", "1/1/0"]),
    "numbers as keys": ({0: X, 10: X}, ["0", "10"]),
    "NamedTuple": ({"a": Pair(X, X)}, ["a/kernel", "a/value"]),
    "dataclass": ({"a": Projections(X, X)}, ["a/query", "a/value"]),
    "Haiku": ({"mlp/~/linear_0": {"w": X}}, ["mlp/~/linear_0/w"]),
    "None": ({"a": None, "b": X}, ["b"]),
    "masked": ({"a": optax.MaskedNode(), "b": [optax.MaskedNode(), X]}, ["b/1"]),
    "alone": (X, [""]),
    "empty": ({}, []),
    "linen's boxes": ({"dense": {"kernel": nn.Partitioned(X, ("model",)), "bias": X}}, ["dense/bias", "dense/kernel"]),
    "shapes": (jax.eval_shape(lambda: {"w": jnp.ones(3)}), ["w"]),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names(kind):
    tree, expected = NAMES[kind]
    assert parameter_names(tree) == expected
    assert len(jax.tree.leaves(tree)) == len(expected)


def test_names_in_nnx():
    state = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
    expected = ["attention/bias", "attention/kernel", "norms/0/bias", "norms/0/scale", "norms/1/bias", "norms/1/scale", "value"]
    assert parameter_names(state) == parameter_names(nnx.as_pure(state)) == expected


def test_names_where_the_wrapper_holds_more_than_an_array():
    assert parameter_names({"w": nnx.Param({"a": X, "b": [X]})}) == ["w/a", "w/b/0"]


# What they do -------------------------------------------------------------------------------------------------------------

SHAPES = {"dense/kernel": (3, 5), "dense/bias": (5,), "LayerNorm_0/scale": (5,), "LayerNorm_0/bias": (5,), "out/kernel": (5, 2)}
DECAYS = {name: "bias" not in name and "LayerNorm" not in name for name in SHAPES}
NOT_BIAS = {name: "bias" not in name for name in SHAPES}
LISTS = dict(exclude_from_weight_decay=["bias", "LayerNorm"])


def nested(flat):
    tree = {}
    for name, value in flat.items():
        outer, inner = name.split("/")
        tree.setdefault(outer, {})[inner] = value
    return tree


def make(seed, scale=1.0):
    return nested(dict(zip(SHAPES, helpers.tree(SHAPES.values(), seed, scale))))


PARAMS, GRADS = make(0), [make(1, 0.1), make(2, 0.3), make(3, 0.2)]


def in_order(flat):
    """The values in the order of the tree's leaves."""
    return jax.tree.leaves(nested(flat))


def run_model(decays, adapts, variant="optax", weight_decay=0.1):
    rules = model64.PRESETS[variant].replace(weight_decay=weight_decay)
    return helpers.run_model(
        jax.tree.leaves(PARAMS),
        map(jax.tree.leaves, GRADS),
        rules,
        0.05,
        decay_mask=in_order(decays),
        adapt_mask=None if adapts is None else in_order(adapts),
    ).p


ALL = dict.fromkeys(SHAPES, True)
# (variant, arguments, who decays, who adapts; None: as the variant says). The model knows nothing of names.
CASES = {
    "decay": ("optax", LISTS, DECAYS, None),
    "nothing": ("optax", dict(exclude_from_weight_decay=[], exclude_from_layer_adaptation=[]), ALL, ALL),
    "ratio": ("optax", dict(exclude_from_layer_adaptation=["bias$"]), ALL, NOT_BIAS),
    "both": ("nvlamb", dict(LISTS, exclude_from_layer_adaptation=["^dense/b"]), DECAYS, {**ALL, "dense/bias": False}),
    "anchored": ("optax", dict(exclude_from_weight_decay=["^dense/kernel$", "^kernel"]), {**ALL, "dense/kernel": False}, None),
    "tf_addons": ("tf_addons", LISTS, DECAYS, DECAYS),
    "tf_addons, []": ("tf_addons", dict(LISTS, exclude_from_layer_adaptation=[]), DECAYS, DECAYS),
    "tf_addons, both": ("tf_addons", dict(LISTS, exclude_from_layer_adaptation=["bias"]), DECAYS, NOT_BIAS),
    "tf_addons, none": ("tf_addons", {}, ALL, ALL),
    "apex": ("apex", LISTS, DECAYS, DECAYS),
    "apex, []": ("apex", dict(LISTS, exclude_from_layer_adaptation=[]), DECAYS, ALL),
}


@pytest.mark.parametrize("case", CASES)
def test_lists_as_masks_of_the_model(case):
    variant, lists, decays, adapts = CASES[case]
    options = dict(weight_decay=0.1, variant=variant)
    p, s = helpers.run_steps(xla_lamb.lamb(0.05, **options, **lists), PARAMS, GRADS)
    helpers.assert_near(p, run_model(decays, adapts, variant), 1e-6)
    # A list is a mask, to the bit, in the state's tree too.
    masks = dict(mask=nested(decays) if "exclude_from_weight_decay" in lists else None, adapt_mask=None if adapts is None else nested(adapts))
    q, r = helpers.run_steps(xla_lamb.lamb(0.05, **options, **masks), PARAMS, GRADS)
    assert helpers.bits((p, s)) == helpers.bits((q, r)) and jax.tree.structure(s) == jax.tree.structure(r)


def test_like_optax_with_a_mask():
    mask = lambda params: nested(DECAYS)
    p, s = helpers.run_steps(xla_lamb.lamb(0.05, weight_decay=0.1, **LISTS), PARAMS, GRADS)
    q, r = helpers.run_updates(optax.lamb(0.05, weight_decay=0.1, mask=mask), PARAMS, GRADS)
    assert jax.tree.structure(s) == jax.tree.structure(r)
    helpers.assert_near(p, q, 1e-6)


def test_control_one_wrong_tensor_shows():
    p, _ = helpers.run_steps(xla_lamb.lamb(0.05, weight_decay=0.1, **LISTS), PARAMS, GRADS)
    wrong = run_model({**DECAYS, "LayerNorm_0/scale": True}, None)
    assert max(map(helpers.error, jax.tree.leaves(p), wrong)) > 1e-4


def test_under_masked_and_multi_transform():
    """Each of the wrapped optimizers sees holes in the tree, and the names as they were."""
    labels = nested({name: name.split("/")[0] for name in SHAPES})
    lamb = lambda: xla_lamb.lamb(0.05, weight_decay=0.1, variant="tf_addons", exclude_from_weight_decay=["^dense/bias", "^LayerNorm_0/", "^bias"])
    expected = run_model(DECAYS, None, "tf_addons")
    grouped = optax.multi_transform({name: lamb() for name in ("dense", "LayerNorm_0", "out")}, labels)
    frozen = jax.tree.map(lambda name: name == "dense", labels)
    masked = optax.chain(optax.masked(lamb(), jax.tree.map(lambda f: not f, frozen)), optax.masked(optax.set_to_zero(), frozen))
    p, _ = helpers.run_updates(grouped, PARAMS, GRADS)
    helpers.assert_near(p, expected, 1e-6)
    p, _ = helpers.run_updates(masked, PARAMS, GRADS)
    helpers.assert_near({**p, "dense": 0}, {**jax.tree.unflatten(jax.tree.structure(PARAMS), expected), "dense": 0}, 1e-6)
    assert helpers.bits(p["dense"]) == helpers.bits(PARAMS["dense"])


def test_inject_hyperparams_takes_lists():
    tx = optax.inject_hyperparams(xla_lamb.lamb)(learning_rate=0.05, weight_decay=0.1, **LISTS)
    p, _ = helpers.run_updates(tx, PARAMS, GRADS)
    helpers.assert_near(p, run_model(DECAYS, None), 1e-6)


# What is refused ----------------------------------------------------------------------------------------------------------

BAD = [
    (dict(exclude_from_weight_decay="bias"), "exclude_from_weight_decay must be a list of regular expressions.*'bias'"),
    (dict(exclude_from_layer_adaptation="bias", variant="tf_addons"), "exclude_from_layer_adaptation must be a list .*'bias'"),
    (dict(exclude_from_weight_decay=["bias", 3]), "exclude_from_weight_decay must hold regular expressions, not 3"),
    (dict(exclude_from_layer_adaptation=["(bias"]), r"exclude_from_layer_adaptation: '\(bias' is not a regular expression"),
    (dict(exclude_from_weight_decay=["bias"], mask=nested(ALL)), r"exclude_from_weight_decay=\['bias'\].*mask|mask.*\['bias'\]"),
    (dict(exclude_from_weight_decay=[], mask=lambda p: nested(ALL)), "exclude_from_weight_decay.*mask"),
    (dict(exclude_from_layer_adaptation=["bias"], adapt_mask=nested(ALL)), r"exclude_from_layer_adaptation.*adapt_mask"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=lambda x: "" if isinstance(x, str) else ",".join(x))
def test_bad_lists(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        xla_lamb.lamb(0.05, **arguments)


def test_one_list_beside_the_other_mask():
    """The control of the last three: only the same thing said twice is refused."""
    p, _ = helpers.run_steps(xla_lamb.lamb(0.05, weight_decay=0.1, **LISTS, adapt_mask=nested(NOT_BIAS)), PARAMS, GRADS)
    helpers.assert_near(p, run_model(DECAYS, NOT_BIAS), 1e-6)


def test_errors_have_names():
    opt = xla_lamb.lamb(0.05)
    wrong = jax.tree.map(np.copy, GRADS[0])
    wrong["LayerNorm_0"]["scale"] = np.ones(7, np.float32)
    with pytest.raises(ValueError, match=re.escape("the gradient of LayerNorm_0/scale has shape (7,), the parameter (5,)")):
        opt.step(wrong, opt.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=re.escape("the gradient of (the only one) has shape (2,)")):
        opt.step(X, opt.init(np.ones(3, np.float32)), np.ones(3, np.float32))
