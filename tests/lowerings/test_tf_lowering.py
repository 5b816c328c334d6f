"""What TensorFlow's XLA makes of a step on variables: CPU and GPU take the custom call, in place."""

import re

import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python.xla import call_module

import helpers
import xla_lamb.tensorflow as ours
from xla_lamb import library

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


def module_of(step, *arguments):
    """The XlaCallModule of a traced step, and how to call it on tensors."""
    graph = step.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [n for f in graph.library.function for n in f.node_def if n.op == "XlaCallModule"] + [n for n in graph.node if n.op == "XlaCallModule"]
    (node,) = nodes
    attr = node.attr

    @tf.function(jit_compile=True, autograph=False)
    def call(*operands):
        return call_module(
            list(operands),
            version=attr["version"].i,
            module=attr["module"].s,
            Sout=[tf.TensorShape(s) for s in attr["Sout"].list.shape],
            Tout=[tf.as_dtype(t) for t in attr["Tout"].list.type],
            platforms=[p.decode() for p in attr["platforms"].list.s],
        )

    return call, [tf.as_dtype(t) for t in attr["Tin"].list.type]


@pytest.mark.parametrize("platform, scratch", [("CPU", False), ("GPU", True)])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_platform_decides(platform, scratch, implementation):
    """One module serves both; on a machine without a GPU it can be lowered for one as long as no argument is a variable."""
    calls = ["xla_lamb_grad_norm", "xla_lamb_step"] if implementation == "auto" else []
    shapes = [(3, 5), (17,)]
    variables = [tf.Variable(x) for x in helpers.tree(shapes)]
    state = ours.init_state(variables)
    options = dict(variant="nvlamb", implementation=implementation)
    step = tf.function(lambda g: ours.lamb_step(variables, g, state, 1e-2, **options), jit_compile=True, autograph=False)
    grads = [tf.constant(x) for x in helpers.gradients(1, shapes)[0]]
    call, types = module_of(step, grads)
    arrays = [*variables, *grads, *state.first_moments, *state.second_moments]
    scalars = [tf.zeros((), t) for t in types[: len(types) - len(arrays)]]
    operands = [*scalars, *(tf.constant(x.numpy()) for x in arrays)]
    hlo = call.experimental_get_compiler_ir(*operands)(stage="hlo", platform_name=platform)
    assert sorted(set(helpers.lamb_calls(hlo))) == calls
    assert bool(re.search(r"f32\[17\]\S* sqrt\(", hlo)) == (not calls)  # of the second moments: the reference
    assert (f"u8[{library.load().cuda.scratch_bytes}]" in hlo) == (bool(calls) and scratch)


def test_module_is_linear_in_the_variables():
    """TensorFlow's time for a module grows faster than the module: the reference in it may not be spelled once for each variable."""

    def size(n):
        variables = [tf.Variable([1.0, 2.0]) for _ in range(n)]
        state = ours.init_state(variables)
        step = tf.function(lambda g: ours.lamb_step(variables, g, state, 1e-2, variant="nvlamb"), jit_compile=True, autograph=False)
        graph = step.get_concrete_function([tf.ones(2)] * n).graph.as_graph_def()
        return sum(len(n.attr["module"].s) for f in graph.library.function for n in f.node_def)

    small, large = size(40), size(120)
    assert 0 < large - small <= 80 * 1000


def test_reference_on_request():
    hlo = ir(SMALL, "hlo", implementation="reference")
    assert helpers.lamb_calls(hlo) == []
    assert re.search(r"f32\[17\]\S* sqrt\(", hlo)


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
