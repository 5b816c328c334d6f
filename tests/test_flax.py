"""xla_lamb.lamb in Flax: linen's TrainState, nnx.Optimizer and nnx's functional form, beside optax.lamb; and what is copied there."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import helpers
import model64
import xla_lamb
from xla_lamb.optax import parameter_names

STEPS, WIDTH = 6, 24
NEAR = 2e-5  # a bias that starts at zero is all update, and optax rounds 1 - b2^t at the first steps (test_update_from_zero)
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, STEPS)
PATTERNS = ["bias", "[nN]orm"]
BATCHES = [tuple(np.random.default_rng(i).normal(size=(2, 8, WIDTH)).astype(np.float32)) for i in range(STEPS)]


def decays(params):
    """PATTERNS as the mask that people write for optax.lamb: matrices alone decay."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def ours():
    return xla_lamb.lamb(SCHEDULE, weight_decay=0.1, exclude_from_weight_decay=PATTERNS)


def peer():
    return optax.lamb(SCHEDULE, weight_decay=0.1, mask=decays)


def square(prediction, y):
    return jnp.mean(jnp.square(prediction - y))


# linen --------------------------------------------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(jnp.tanh(nn.Dense(WIDTH)(x)))
        return nn.Dense(WIDTH, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)


def train_state(tx, boxed=False):
    model = Linen()
    variables = model.init(jax.random.key(0), BATCHES[0][0])
    return TrainState.create(apply_fn=model.apply, params=(variables if boxed else nn.unbox(variables))["params"], tx=tx)


def gradients(state, batch):
    return jax.value_and_grad(lambda params: square(state.apply_fn({"params": params}, batch[0]), batch[1]))(state.params)


def apply(state, batch):
    loss, grads = gradients(state, batch)
    return state.apply_gradients(grads=grads), loss


def in_place(state, batch):
    """The form that docs/from_optax.md gives."""
    loss, grads = gradients(state, batch)
    params, opt_state = state.tx.step(grads, state.opt_state, state.params)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


def run_linen(tx, step=apply, boxed=False):
    state, losses = train_state(tx, boxed), []
    step = jax.jit(step, donate_argnums=0)
    for batch in BATCHES:
        state, loss = step(state, batch)
        losses.append(loss)
    return state, losses


@pytest.fixture(scope="module")
def linen_peer():
    return run_linen(peer())


def test_update_from_zero():
    """What NEAR allows is the peer's, not ours."""
    params, grads = [np.zeros(WIDTH, np.float32)], helpers.gradients(STEPS, [(WIDTH,)])
    model = helpers.run_model(params, grads, model64.Rules(), 1e-2).p
    helpers.assert_near(helpers.run_updates(xla_lamb.lamb(1e-2), params, grads)[0], model, 1e-6)
    helpers.assert_near(helpers.run_updates(optax.lamb(1e-2), params, grads)[0], model, NEAR)


@pytest.mark.parametrize("step", [apply, in_place])
def test_train_state(linen_peer, step):
    (state, losses), (expected, expected_losses) = run_linen(ours(), step), linen_peer
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected.opt_state)
    assert int(state.step) == int(helpers.moments(state.opt_state)[0]) == STEPS
    helpers.assert_near(losses, expected_losses, 1e-6)
    helpers.assert_near(state.params, expected.params, NEAR)
    helpers.assert_near(state.opt_state, expected.opt_state, NEAR)


def test_control_without_the_exclusion_it_differs(linen_peer):
    state, _ = run_linen(xla_lamb.lamb(SCHEDULE, weight_decay=0.1))
    assert helpers.error(state.params["LayerNorm_0"]["scale"], linen_peer[0].params["LayerNorm_0"]["scale"]) > 1e-4


def test_partitioned_parameters(linen_peer):
    """Parameters that stay in linen's boxes."""
    state, _ = run_linen(ours(), boxed=True)
    assert isinstance(state.params["Dense_1"]["kernel"], nn.Partitioned)
    assert parameter_names(state.params) == parameter_names(linen_peer[0].params)
    helpers.assert_near(state.params, linen_peer[0].params, NEAR)


# nnx ----------------------------------------------------------------------------------------------------------------------


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))  # no parameter

    def __call__(self, x):
        self.calls[...] += 1
        return self.out(self.norm(jnp.tanh(self.hidden(x))))


def nnx_gradients(model, batch):
    return nnx.value_and_grad(lambda model: square(model(batch[0]), batch[1]))(model)


def nnx_update(model, optimizer, batch):
    loss, grads = nnx_gradients(model, batch)
    optimizer.update(model, grads)
    return loss


def nnx_in_place(model, optimizer, batch):
    """The form that docs/from_optax.md gives."""
    loss, grads = nnx_gradients(model, batch)
    state = nnx.as_pure((grads, optimizer.opt_state, nnx.state(model, optimizer.wrt)))
    params, opt_state = optimizer.tx.step(*state)
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += 1
    return loss


def run_nnx(tx, step=nnx_update):
    model = Nnx()
    optimizer, losses = nnx.Optimizer(model, tx, wrt=nnx.Param), []
    step = nnx.jit(step, donate_argnums=(0, 1))
    for batch in BATCHES:
        losses.append(step(model, optimizer, batch))
    return nnx.state(model, nnx.Param), optimizer, losses


@pytest.fixture(scope="module")
def nnx_peer():
    return run_nnx(peer())


@pytest.mark.parametrize("step", [nnx_update, nnx_in_place])
def test_nnx_optimizer(nnx_peer, step):
    (params, optimizer, losses), (expected, expected_optimizer, expected_losses) = run_nnx(ours(), step), nnx_peer
    assert int(optimizer.step[...]) == STEPS
    state, expected_state = optimizer.opt_state, expected_optimizer.opt_state
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    assert parameter_names(state)[0] == "0/count" and int(jax.tree.leaves(state)[0]) == STEPS
    helpers.assert_near(losses, expected_losses, 1e-6)
    helpers.assert_near(params, expected, NEAR)
    helpers.assert_near(state, expected_state, NEAR)


def test_nnx_functional(nnx_peer):
    """nnx.split, then a jitted function of the State: LAMB's step takes it as it is."""
    graph, params, rest = nnx.split(Nnx(), nnx.Param, ...)
    opt = ours()
    state = opt.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        grads = jax.grad(lambda p: square(nnx.merge(graph, p, rest, copy=True)(batch[0]), batch[1]))(params)
        return opt.step(grads, state, params)

    for batch in BATCHES:
        params, state = step(params, state, batch)
    helpers.assert_near(params, nnx_peer[0], NEAR)


def test_nnx_groups():
    """Parameter groups by the name of each parameter, from partition."""
    label = lambda params: jax.tree.unflatten(
        jax.tree.structure(params), ["norm" if name.startswith("norm") else "rest" for name in parameter_names(params)]
    )
    runs = [run_nnx(optax.partition({"norm": lamb(1e-3), "rest": lamb(SCHEDULE, weight_decay=0.1)}, label)) for lamb in (xla_lamb.lamb, optax.lamb)]
    helpers.assert_near(runs[0][0], runs[1][0], NEAR)


# What is copied -----------------------------------------------------------------------------------------------------------


def matrices(types):
    return [t for t in types if f"[{WIDTH},{WIDTH}]" in t]


def compiled(step, donate=True):
    if step in (apply, in_place):
        return jax.jit(step, donate_argnums=0 if donate else ()).lower(train_state(ours()), BATCHES[0]).compile().as_text()
    model = Nnx()
    optimizer = nnx.Optimizer(model, ours(), wrt=nnx.Param)
    return nnx.jit(step, donate_argnums=(0, 1) if donate else ()).lower(model, optimizer, BATCHES[0]).compile().as_text()


@pytest.mark.parametrize("step", [apply, in_place, nnx_update, nnx_in_place])
def test_no_copy_of_a_matrix(step):
    """The whole training step, donated: one call, every parameter and moment in its own buffer. Vectors are left out, since XLA copies some
    for the backward pass, and copies inside a fusion, which are how it writes its result."""
    hlo = compiled(step)
    entry = hlo[hlo.index("\nENTRY") :]
    assert helpers.lamb_calls(hlo) == ["xla_lamb_step"]
    assert helpers.aliases(hlo) >= 3 * 6
    assert matrices(helpers.copies(entry)) == []
    # update writes updates, which are then added in a pass of their own; a step in place has none.
    calls = [kind for kind, op in helpers.opcodes(entry) if op == "custom-call" and kind.count(f"[{WIDTH},{WIDTH}]") == 6]
    assert len(calls) == 1
    added = [kind for kind, op in helpers.opcodes(hlo) if op == "add" and matrices([kind])]
    assert len(added) == (2 if step in (apply, nnx_update) else 0)


def test_control_without_donation_matrices_are_copied():
    hlo = compiled(in_place, donate=False)
    assert len(matrices(helpers.copies(hlo))) == 6 and helpers.aliases(hlo) == 0
