"""What a step refuses, in JAX: with a clear error, and before anything was changed."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import helpers
import xla_lamb

SHAPES = {"kernel": (3, 5), "bias": (5,)}


def make(dtype=np.float32, **shapes):
    return {k: jnp.asarray(helpers.tree([s], seed=len(k))[0].astype(dtype)) for k, s in {**SHAPES, **shapes}.items()}


def refused(opt, grads, state, params, match, kinds=(ValueError, TypeError)):
    """The error, and every bit of the arguments as it was, also where they were to be donated."""
    for method in (opt.step, opt.update):
        for run in (method, jax.jit(method, donate_argnums=(0, 1, 2))):
            arguments = jax.tree.map(lambda x: jnp.array(x) if hasattr(x, "dtype") else x, (grads, state, params))
            before = helpers.bits(arguments)
            with pytest.raises(kinds, match=match):
                run(*arguments)
            assert helpers.bits(arguments) == before


@pytest.fixture
def opt():
    return xla_lamb.lamb(0.1, weight_decay=0.01)


@pytest.fixture
def refuse(opt):
    def run(grads, state=None, params=None, match=None, kinds=(ValueError, TypeError)):
        params = make() if params is None else params
        refused(opt, grads, opt.init(make()) if state is None else state, params, match, kinds)

    return run


def test_good_input_is_taken(opt):
    """The control: what the others spoil works."""
    params = make()
    new, _ = opt.step(make(), opt.init(params), params)
    assert helpers.error(new["bias"], params["bias"]) > 1e-3


def test_gradients_of_another_tree(refuse):
    refuse([make()["kernel"], make()["bias"]], kinds=ValueError)
    refuse({**make(), "extra": jnp.ones(3)}, match="extra", kinds=ValueError)
    refuse({"kernel": make()["kernel"], "offset": make()["bias"]}, match="offset|bias", kinds=ValueError)


def test_missing_gradient(refuse):
    refuse({"kernel": make()["kernel"]}, match="bias", kinds=ValueError)
    refuse({**make(), "bias": None}, match="bias", kinds=ValueError)


def test_gradient_of_another_shape(refuse):
    refuse(make(bias=(6,)), match=r"bias.*", kinds=ValueError)
    refuse(make(kernel=(5, 3)), match=r"kernel.*", kinds=ValueError)
    refuse(make(bias=(1,)), match=r"bias", kinds=ValueError)  # would broadcast
    refuse(make(kernel=(15,)), match=r"kernel", kinds=ValueError)  # as many elements


def test_gradient_of_another_kind(refuse):
    for dtype in (np.int32, np.complex64, np.bool_, ml_dtypes.float8_e4m3fn):
        grads = make()
        grads["bias"] = jnp.ones(5, dtype)
        refuse(grads, match=f"bias.*{np.dtype(dtype).name}|{np.dtype(dtype).name}.*bias", kinds=TypeError)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_, np.uint8, ml_dtypes.float8_e4m3fn])
def test_parameters_of_another_kind(dtype):
    params = {"kernel": jnp.ones((3, 5)), "index": jnp.ones(4, dtype)}
    for opt in (xla_lamb.lamb(0.1), xla_lamb.lamb(0.1, implementation="reference")):
        with pytest.raises(TypeError, match=f"index.*{np.dtype(dtype).name}|{np.dtype(dtype).name}.*index"):
            opt.init(params)


def test_parameters_that_are_no_arrays():
    with pytest.raises(TypeError, match="name"):
        xla_lamb.lamb(0.1).init({"kernel": jnp.ones(3), "name": "dense"})


def test_no_parameters(opt):
    with pytest.raises(ValueError, match="params"):
        opt.update(make(), opt.init(make()), None)
    with pytest.raises(ValueError, match="params"):
        opt.update(make(), opt.init(make()))


def test_state_of_another_tree(refuse, opt):
    refuse(make(), state=opt.init({**make(), "more": jnp.ones(3)}), match="more|init")
    refuse(make(), state=opt.init({"kernel": jnp.ones((3, 5))}), match="bias|init")
    refuse(make(), state=(), match="state|init")


def test_state_of_another_shape(refuse, opt):
    refuse(make(), state=opt.init(make(bias=(7,))), match="bias")


def test_parameters_of_another_shape_than_at_init(refuse, opt):
    refuse(make(bias=(7,)), state=opt.init(make()), params=make(bias=(7,)), match="bias")


def test_state_of_another_type(refuse, opt):
    """Moments in integers, or in a type that init would not give."""
    state = opt.init(make())
    broken = jax.tree.map(lambda x: x.astype(jnp.int32), state)
    refuse(make(), state=broken, match="int32")


def test_parameters_of_another_type_than_at_init(refuse, opt, x64):
    """float32 moments cannot serve float64 parameters: the step would lose what they are for."""
    state = opt.init(make())
    refuse(make(np.float64), state=state, params=make(np.float64), match="float64|float32")


@pytest.mark.parametrize("option", ["mask", "adapt_mask"])
@pytest.mark.parametrize(
    "mask", [[True, False], {"kernel": True}, {"kernel": True, "bias": True, "more": True}, {"kernel": 0.5, "bias": True}], ids=str
)
def test_mask_of_another_structure(option, mask):
    for value in (mask, lambda params: mask):
        opt = xla_lamb.lamb(0.1, weight_decay=0.1, **{option: value})
        with pytest.raises((ValueError, TypeError), match="mask"):
            opt.step(make(), opt.init(make()), make())


@pytest.mark.parametrize("axes", [{"kernel": 3, "bias": 0}, {"kernel": 1, "bias": 2}, {"kernel": -1, "bias": 0}, 2, [1, 0], {"kernel": 1.5, "bias": 0}], ids=str)
def test_layer_axes_that_do_not_fit(axes):
    opt = xla_lamb.lamb(0.1, layer_axes=axes)
    with pytest.raises((ValueError, TypeError), match="layer_axes|layer axes"):
        opt.step(make(), opt.init(make()), make())


def test_scalars_that_are_no_scalars(opt):
    state, params = opt.init(make()), make()
    for name in ("grad_scale", "skip"):
        with pytest.raises((ValueError, TypeError), match=name):
            opt.step(make(), state, params, **{name: jnp.ones(3)})
    with pytest.raises((ValueError, TypeError), match="learning_rate"):
        bad = xla_lamb.lamb(jnp.ones(3))
        bad.step(make(), bad.init(params), params)
    with pytest.raises((ValueError, TypeError), match="learning_rate"):
        bad = xla_lamb.lamb(lambda count: jnp.ones(3))
        bad.step(make(), bad.init(params), params)


def test_fused_for_a_platform_without_a_kernel():
    """Said when it is lowered for that platform, with the platform's name; "auto" lowers."""
    params = make()
    for implementation, ok in (("fused", False), ("auto", True), ("reference", True)):
        opt = xla_lamb.lamb(0.1, implementation=implementation)
        traced = jax.jit(opt.step).trace(make(), opt.init(params), params)
        if ok:
            traced.lower(lowering_platforms=("tpu",))
        else:
            with pytest.raises(Exception, match="(?s)fused.*tpu|tpu.*fused"):
                traced.lower(lowering_platforms=("tpu",))
