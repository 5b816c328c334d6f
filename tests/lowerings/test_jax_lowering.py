"""What JAX makes of a step: which platform takes the custom call, and that the donated step on CPU is in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import helpers
import xla_lamb
from xla_lamb import library

SMALL = [(3, 5), (17,), ()]
MANY = [(8 + i % 5, 3) if i % 2 else (16 + i % 7,) for i in range(391)]  # as many tensors as BERT-large


def abstract(shapes, opt, dtype=jnp.float32):
    params = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return params, jax.eval_shape(opt.init, params), params


def lowered(platform, implementation=None, method="step", shapes=SMALL, **options):
    opt = xla_lamb.lamb(1e-2, implementation=implementation, **options)
    return jax.jit(getattr(opt, method)).trace(*abstract(shapes, opt)).lower(lowering_platforms=(platform,)).as_text()


def train_step(opt):
    """As programs have it: what comes in and is donated goes out in the same order. JAX pairs the buffers by that order."""
    return lambda p, s, g: opt.step(g, s, p)


def compiled(shapes, donate=True, implementation="fused", dtype=jnp.float32, **options):
    opt = xla_lamb.lamb(1e-2, implementation=implementation, **options)
    step = jax.jit(train_step(opt), donate_argnums=(0, 1) if donate else ())
    grads, state, params = abstract(shapes, opt, dtype)
    return step.trace(params, state, grads).lower(lowering_platforms=("cpu",)).compile()


# Which platform takes what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize("options", [{}, dict(variant="nvlamb")], ids=["optax", "nvlamb"])
def test_cpu_takes_the_custom_call(method, options):
    text = lowered("cpu", method=method, **options)
    assert text.count("@xla_lamb_step") == 1
    assert text.count("@xla_lamb_grad_norm") == (1 if options else 0)


@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize("options", [{}, dict(variant="nvlamb")], ids=["optax", "nvlamb"])
def test_cuda_takes_the_custom_call(method, options):
    """With one more result than on the CPU, scratch memory of one size; test_cuda_compiler.py compiles it."""
    text = lowered("cuda", method=method, **options)
    assert text.count("@xla_lamb_step") == 1
    assert text.count("@xla_lamb_grad_norm") == (1 if options else 0)
    assert set(re.findall(r"tensor<(\d+)xui8>", text)) == {str(library.load().cuda.scratch_bytes)}


def test_cuda_takes_the_reference_when_nothing_is_registered():
    code = """
import jax, helpers, xla_lamb
opt, params = xla_lamb.lamb(1e-2), helpers.tree([(3, 5)])
text = jax.jit(opt.step).trace(params, opt.init(params), params).lower(lowering_platforms=("cuda",)).as_text()
assert "xla_lamb_" not in text and "stablehlo.sqrt" in text
"""
    helpers.python(code, XLA_LAMB_LIBRARY=helpers.emulated_library())


@pytest.mark.parametrize("n, calls", [(400, 1), (401, 2)])
def test_tensors_of_a_call_on_cuda(n, calls):
    assert lowered("cuda", shapes=[(3,)] * n).count("@xla_lamb_step") == calls


def test_elements_of_a_call_on_cuda():
    """A call with more would work in larger chunks; a tensor that is larger has a call of its own."""
    assert lowered("cuda", shapes=[(200_000_000,)] * 4 + [(600_000_000,), (3,)]).count("@xla_lamb_step") == 4


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("method", ["step", "update"])
def test_other_platforms_take_the_reference(platform, method):
    text = lowered(platform, method=method, variant="nvlamb")
    assert "xla_lamb_" not in text
    assert "stablehlo.sqrt" in text and "stablehlo.reduce" in text


def test_reference_on_request():
    text = lowered("cpu", implementation="reference", variant="nvlamb")
    assert "xla_lamb_" not in text and "stablehlo.reduce" in text


def test_one_export_for_all_platforms():
    """Decided when lowered for each platform, so one module serves them all, and still runs on CPU."""
    opt = xla_lamb.lamb(1e-2, variant="nvlamb")
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"xla_lamb_{n}") for n in ("step", "moments", "apply", "grad_norm")]
    export = jax.export.export(jax.jit(opt.step), platforms=("cpu", "cuda", "tpu"), disabled_checks=checks)
    exported = export(*abstract(SMALL, opt))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    text = exported.mlir_module()
    assert "@xla_lamb_step" in text and "stablehlo.case" in text
    params, grads = helpers.tree(SMALL), helpers.gradients(1, SMALL)[0]
    arguments = [jax.tree.map(jnp.asarray, x) for x in (grads, opt.init(params), params)]
    assert helpers.bits(exported.call(*arguments)) == helpers.bits(jax.jit(opt.step)(*arguments))


def test_numbers_are_operands():
    """Another rate, decay, beta, eps or scale gives the very same text, so nothing of them can recompile."""

    def text(rate, b1, b2, eps, decay, scale):
        def step(numbers, scale, g, s, p):
            rate, b1, b2, eps, decay = numbers
            return xla_lamb.lamb(rate, b1, b2, eps, weight_decay=decay).step(g, s, p, grad_scale=scale)

        opt = xla_lamb.lamb(1.0)
        return jax.jit(step).lower(tuple(map(jnp.float32, (rate, b1, b2, eps, decay))), jnp.float32(scale), *abstract(SMALL, opt)).as_text()

    assert text(1e-2, 0.9, 0.999, 1e-6, 0.01, 1.0) == text(1e-3, 0.8, 0.99, 1e-8, 0.0, 0.5)


# In place on CPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    return compiled(MANY)


def test_calls_and_aliases_of_391_tensors(many):
    hlo = many.as_text()
    assert hlo.count("api_version=API_VERSION_TYPED_FFI") == 7
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"] * 7
    # All parameters and both moments; the counter, being computed, may be one more.
    assert helpers.aliases(hlo) in (3 * 391, 3 * 391 + 1)
    assert helpers.copies(hlo) == []


def test_each_call_aliases_its_operands(many):
    calls = [line for line in many.as_text().splitlines() if 'custom_call_target="xla_lamb_step"' in line]
    pairs = [line.split("output_to_operand_aliasing=")[1].count("}: (") for line in calls]
    assert sum(pairs) == 3 * 391


def addresses(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim]


def test_donated_step_is_in_place():
    """The compiled step that comes with the optimizer: every buffer stays where it was, and the old arrays are gone."""
    opt = xla_lamb.lamb(1e-2, implementation="fused")
    params = [jnp.ones(shape) for shape in [(3, 5), (3, 5), (70,), (3, 5)]]
    state = opt.init(params)
    before = addresses((params, state))
    new_params, new_state = opt.donated_step([jnp.ones_like(p) for p in params], state, params)
    assert addresses((new_params, new_state)) == before
    assert all(x.is_deleted() for x in params)
    # The control: donated in the order of its arguments, moments and parameters trade places, and everything is copied.
    swapped = jax.jit(opt.step, donate_argnums=(1, 2)).lower(*abstract(MANY, opt)).compile().as_text()
    assert len(helpers.copies(swapped)) >= 391


def test_grad_norm_joins_without_copies():
    hlo = compiled(MANY, variant="nvlamb", nonfinite="skip").as_text()
    calls = helpers.lamb_calls(hlo)
    assert calls.count("xla_lamb_step") == 7 and 1 <= calls.count("xla_lamb_grad_norm") <= 7
    assert helpers.aliases(hlo) in (3 * 391, 3 * 391 + 1)
    assert helpers.copies(hlo) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_in_place_in_16_bits(dtype):
    hlo = compiled(SMALL, dtype=dtype).as_text()
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"]
    assert helpers.aliases(hlo) >= 3 * len(SMALL) and helpers.copies(hlo) == []
    assert not [kind for kind, op in helpers.opcodes(hlo) if op == "convert" and "[3,5]" in kind]


def test_control_without_donation_the_copies_appear():
    hlo = compiled(MANY, donate=False).as_text()
    assert helpers.aliases(hlo) == 0
    assert len(helpers.copies(hlo)) == 3 * 391
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"] * 7


def test_control_the_reference_has_no_call():
    assert helpers.lamb_calls(compiled(SMALL, implementation="reference").as_text()) == []


def temporary(shapes, implementation="fused", donate=True, **options):
    return compiled(shapes, donate, implementation, **options).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, dict(variant="nvlamb", nonfinite="skip"), dict(layer_axes=[1, 0])], ids=str)
def test_temporary_memory_does_not_grow(options):
    """With the elements of the parameters; layers have norms of their own, so their number stays."""
    small, large = (temporary([(4, 8 * n), (n,)], **options) for n in (16, 16384))
    assert large == small
    assert large < 16 * 1024


def test_control_temporary_memory_of_the_reference_grows():
    small, large = (temporary([(4, 8 * n), (n,)], "reference") for n in (16, 16384))
    assert large > small + 4 * 16384


def test_control_temporary_memory_without_donation_is_counted():
    small, large = (compiled([(4, 8 * n), (n,)], donate=False).memory_analysis() for n in (16, 16384))
    assert large.output_size_in_bytes - large.alias_size_in_bytes > small.output_size_in_bytes + 4 * 16384


def test_in_place_inside_scan():
    """A training loop inside jit: the loop's own buffers are the tensors."""
    opt = xla_lamb.lamb(1e-2, implementation="fused")

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def train(g, s, p):
        return jax.lax.fori_loop(0, 5, lambda _, c: opt.step(g, c[1], c[0]), (p, s))[::-1]

    compiled = train.lower(*abstract([(64, 64), (4096,)], opt)).compile()
    hlo = compiled.as_text()
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"]
    assert helpers.copies(hlo) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096


def test_update_turns_gradients_into_updates_in_place():
    """The optax way: gradients donated, their buffers become the updates."""
    opt = xla_lamb.lamb(1e-2, implementation="fused")
    hlo = jax.jit(opt.update, donate_argnums=(0, 1)).lower(*abstract(MANY, opt)).compile().as_text()
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"] * 7
    assert helpers.aliases(hlo) in (3 * 391, 3 * 391 + 1)
    assert helpers.copies(hlo) == []


def test_vmap_stays_fused():
    """A population is one more leading axis for the same calls."""
    opt = xla_lamb.lamb(1e-2, variant="nvlamb", implementation="fused")
    params = [jax.ShapeDtypeStruct((6, *s), jnp.float32) for s in SMALL]
    step = jax.jit(jax.vmap(train_step(opt)), donate_argnums=(0, 1))
    hlo = step.lower(params, jax.eval_shape(jax.vmap(opt.init), params), params).compile().as_text()
    assert helpers.lamb_calls(hlo).count("xla_lamb_step") == 1
    assert helpers.copies(hlo) == []


# Growth with the number of tensors ----------------------------------------------------------------------------------------


def lower_donated(n):
    opt = xla_lamb.lamb(1e-2, variant="nvlamb", implementation="fused")
    grads, state, params = abstract([(8,)] * n, opt)
    return jax.jit(train_step(opt), donate_argnums=(0, 1)).lower(params, state, grads)


def test_lowering_is_linear_up_to_4000_tensors():
    """XLA's CPU compiler takes the cube of one call's operands: so the calls stay as wide as they are and only their number grows.

    Counted, not timed: other work on the machine must not decide.
    """

    def counted(n):
        text = lower_donated(n).as_text()
        calls = re.findall(r"stablehlo.custom_call @xla_lamb_\w+\(([^)]*)\)", text)
        return len(re.findall(r"= \"?stablehlo\.\w+", text)), len(calls), max(call.count("%") for call in calls)

    (operations_1, calls_1, widest_1), (operations_4, calls_4, widest_4) = counted(1000), counted(4000)
    assert operations_4 <= 4.4 * operations_1
    assert calls_4 <= 4 * calls_1
    assert widest_1 == widest_4 == 4 * 64 + 1
    assert operations_4 <= 4000  # less than one operation for each tensor: nothing but calls, and what joins their small results


def test_compilation_is_linear():
    """The optimized module has a little for each tensor (its parameters, its results), and grows no faster than the tensors."""
    small, large = (len(helpers.opcodes(lower_donated(n).compile().as_text())) for n in (200, 800))
    assert large <= 4.4 * small
    assert large <= 16 * 800


def test_control_optax_has_many_operations_for_each_tensor():
    tx = optax.lamb(1e-2, weight_decay=0.01)
    params = [jax.ShapeDtypeStruct((8,), jnp.float32)] * 20
    text = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()
    assert len(re.findall(r"= \"?stablehlo\.\w+", text)) > 16 * 20
    assert len(helpers.opcodes(jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile().as_text())) > 16 * 20
