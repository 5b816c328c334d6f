"""What XLA makes of Model.fit's own train step on both backends: one custom call for each group, and no copy of a variable."""

import re

import pytest

import helpers

LAYERS = 34  # 68 variables: 2 groups of 64 on the CPU
GROUPS = 2

PLAIN = ("lamb(weight_decay=0.1)", 3)  # and how many trees of variables are changed in place
ACCUMULATION = ("lamb(gradient_accumulation_steps=2)", 4)
CLIP_SKIP_EMA = ("lamb(global_clipnorm=1.0, nonfinite='skip', use_ema=True)", 4)
SCALED = "keras.optimizers.LossScaleOptimizer(xla_lamb.keras.Lamb())"
FEW = 10  # layers of the control


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """{(backend, optimizer): HLO}"""
    found = {}
    for backend, layers in (("tensorflow", FEW), ("jax", LAYERS)):
        fits = [(LAYERS, optimizer) for optimizer, _ in (PLAIN, ACCUMULATION, CLIP_SKIP_EMA)] + [(layers, SCALED)]
        texts = helpers.train_steps(tmp_path_factory.mktemp(backend), backend, fits)
        found.update({(backend, optimizer): text for (_, optimizer), text in zip(fits, texts)})
    return found


def copied_matrices(hlo):
    """The output layer's bias is the only variable that XLA has reason to copy: the loss reads it, in no order with the step."""
    return [shape for shape in re.findall(r"= (\S+) copy\(", hlo) if "," in shape.split("{")[0]]


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("optimizer, trees", [PLAIN, ACCUMULATION, CLIP_SKIP_EMA], ids=["plain", "accumulation", "clip-skip-ema"])
def test_one_call_for_each_group_in_place(programs, backend, optimizer, trees):
    hlo = programs[backend, optimizer]
    calls = helpers.lamb_calls(hlo)
    assert calls.count("xla_lamb_step") == GROUPS
    assert calls.count("xla_lamb_grad_norm") == (GROUPS if "clip" in optimizer else 0)
    assert helpers.aliases(hlo) >= trees * 2 * LAYERS
    assert copied_matrices(hlo) == []


def test_control_tf_cond_makes_copies(programs):
    """Known limit: Keras's LossScaleOptimizer puts the step into a tf.cond."""
    assert len(copied_matrices(programs["tensorflow", SCALED])) >= 3 * FEW


def test_loss_scale_optimizer_on_jax_is_in_place(programs):
    hlo = programs["jax", SCALED]
    assert helpers.lamb_calls(hlo).count("xla_lamb_step") == GROUPS
    assert copied_matrices(hlo) == []
