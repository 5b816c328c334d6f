"""What TensorFlow's XLA makes of a step on variables: CPU takes the custom call, in place; GPU the reference until its kernel comes."""

import pytest
import tensorflow as tf

import helpers
import xla_lamb.tensorflow as ours

SMALL = [(3, 5), (17,), ()]
MANY = [(8 + i % 5, 3) if i % 2 else (16 + i % 7,) for i in range(391)]


def ir(shapes, stage, platform="CPU", read_first=False, **options):
    """The HLO of one step on variables; read_first also returns what the variables were, which only a copy can give."""
    variables = [tf.Variable(x) for x in helpers.tree(shapes)]
    grads = [tf.constant(x) for x in helpers.gradients(1, shapes)[0]]
    state = ours.init_state(variables)

    @tf.function(jit_compile=True, autograph=False)
    def step(grads):
        old = [tf.identity(v) for v in variables] if read_first else []
        ours.lamb_step(variables, grads, state, 1e-2, weight_decay=0.01, **options)
        return old

    return step.experimental_get_compiler_ir(grads)(stage=stage, platform_name=platform)


def test_cpu_takes_the_custom_call():
    hlo = ir(SMALL, "hlo", variant="nvlamb")
    assert sorted(set(helpers.lamb_calls(hlo))) == ["xla_lamb_grad_norm", "xla_lamb_step"]
    assert "API_VERSION_TYPED_FFI" in hlo


def test_gpu_takes_the_reference():
    """On a machine without a GPU as on one with it."""
    hlo = ir(SMALL, "hlo", platform="GPU", variant="nvlamb")
    assert helpers.lamb_calls(hlo) == []
    assert "sqrt(" in hlo and "reduce(" in hlo


def test_reference_on_request():
    hlo = ir(SMALL, "hlo", implementation="reference")
    assert helpers.lamb_calls(hlo) == [] and "reduce(" in hlo


def test_391_variables_in_place():
    hlo = ir(MANY, "optimized_hlo")
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"] * 7
    assert helpers.aliases(hlo) in (3 * 391, 3 * 391 + 1)  # the counter may be one more
    assert helpers.copies(hlo) == []


def test_in_place_with_clip_and_skip():
    hlo = ir(MANY[:70], "optimized_hlo", variant="nvlamb", nonfinite="skip")
    assert helpers.lamb_calls(hlo).count("xla_lamb_step") == 2
    assert helpers.aliases(hlo) in (3 * 70, 3 * 70 + 1)
    assert helpers.copies(hlo) == []


def test_control_a_result_that_needs_a_copy_has_one():
    """The old values are returned as well: now XLA must copy each variable, and the count must see it."""
    assert len(helpers.copies(ir([(30, 5), (17,)], "optimized_hlo", read_first=True))) >= 2


@pytest.mark.parametrize("n, calls", [(64, 1), (65, 2)])
def test_group_size(n, calls):
    assert len(helpers.lamb_calls(ir([(3,)] * n, "hlo"))) == calls
