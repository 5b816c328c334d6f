"""What XLA makes of Model.fit's own train step on both backends: one custom call for each group, and no copy of a variable.

XLA itself writes down each program that it compiles, in a process of its own for each backend and optimizer.
"""

import re

import pytest

import helpers

LAYERS = 34  # 68 variables: 2 groups of 64 on the CPU
GROUPS = 2

FIT = """
import keras, numpy as np, xla_lamb.keras
layers = [keras.layers.Dense(40 + i % 3, activation="relu") for i in range({layers})]
model = keras.Sequential([keras.Input((40,)), *layers])
model.compile({optimizer}, loss="mse", jit_compile=True)
model.fit(np.ones((8, 40), "float32"), np.ones((8, model.output_shape[-1]), "float32"), batch_size=4, verbose=0)
"""


def train_step(tmp_path, backend, optimizer, layers=LAYERS):
    """The optimized HLO of the module that holds the step."""
    helpers.python(
        FIT.format(layers=layers, optimizer=optimizer),
        KERAS_BACKEND=backend,
        XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step|one_step_on_data",
        JAX_PLATFORMS="cpu",
    )
    texts = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    steps = [text for text in texts if "train_step" in text.split("\n")[0] or "one_step_on_data" in text.split("\n")[0]]
    assert len(steps) == 1
    return steps[0]


def copied_matrices(hlo):
    """The output layer's bias is the only variable that XLA has reason to copy: the loss reads it, in no order with the step."""
    return [shape for shape in re.findall(r"= (\S+) copy\(", hlo) if "," in shape.split("{")[0]]


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(
    "arguments, trees",
    [("weight_decay=0.1", 3), ("gradient_accumulation_steps=2", 4), ("global_clipnorm=1.0, nonfinite='skip', use_ema=True", 4)],
    ids=["plain", "accumulation", "clip-skip-ema"],
)
def test_one_call_for_each_group_in_place(tmp_path, backend, arguments, trees):
    hlo = train_step(tmp_path, backend, f"xla_lamb.keras.Lamb(implementation='fused', {arguments})")
    calls = helpers.lamb_calls(hlo)
    assert calls.count("xla_lamb_step") == GROUPS
    assert calls.count("xla_lamb_grad_norm") == (GROUPS if "clip" in arguments else 0)
    assert helpers.aliases(hlo) >= trees * 2 * LAYERS
    assert copied_matrices(hlo) == []


def test_control_tf_cond_makes_copies(tmp_path):
    """Known limit: Keras's LossScaleOptimizer puts the step into a tf.cond."""
    hlo = train_step(tmp_path, "tensorflow", "keras.optimizers.LossScaleOptimizer(xla_lamb.keras.Lamb())", layers=10)
    assert len(copied_matrices(hlo)) >= 3 * 10


def test_loss_scale_optimizer_on_jax_is_in_place(tmp_path):
    hlo = train_step(tmp_path, "jax", "keras.optimizers.LossScaleOptimizer(xla_lamb.keras.Lamb())")
    assert helpers.lamb_calls(hlo).count("xla_lamb_step") == GROUPS
    assert copied_matrices(hlo) == []
