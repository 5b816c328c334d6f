"""xla_lamb.lamb as an optax transformation: a drop-in for optax.lamb inside optax's own wrappers and JAX's own transformations."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import helpers
import xla_lamb

SHAPES = [(3, 5), (17,), ()]  # few, since XLA compiles optax's step for each; test_hundred_steps_like_optax has all of the helpers'
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 2e-2, 10, 60)
MASK = [True, False, True]
ODD = functools.partial(jax.tree.map, lambda x: np.ndim(x) != 1)

# Every form in which optax.lamb takes its arguments.
FORMS = {
    "plain": ((1e-2,), {}),
    "schedule": ((SCHEDULE,), {}),
    "array": ((jnp.float32(1e-2),), {}),
    "decay": ((1e-2,), dict(weight_decay=0.01)),
    "mask": ((1e-2,), dict(weight_decay=0.01, mask=MASK)),
    "mask function": ((SCHEDULE,), dict(weight_decay=0.01, mask=ODD)),
    "mask, no decay": ((1e-2,), dict(mask=MASK)),
    "scheduled decay": ((SCHEDULE,), dict(weight_decay=optax.linear_schedule(0.1, 0.0, 3))),
    "scheduled decay, mask": ((1e-2,), dict(weight_decay=optax.linear_schedule(0.1, 0.0, 3), mask=ODD)),
    "positions": ((1e-2, 0.8, 0.95, 1e-4, 1e-5, 0.02, MASK), {}),
}


def assert_same_tree(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(b), np.asarray(b).dtype)


@pytest.mark.parametrize("form", FORMS)
def test_state_and_steps_like_optax(form):
    """And the step in place is the update."""
    args, kwargs = FORMS[form]
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    ours, theirs = xla_lamb.lamb(*args, **kwargs), optax.lamb(*args, **kwargs)
    assert_same_tree(ours.init(params), theirs.init(params))
    (p, s), (q, r) = helpers.run_updates(ours, params, grads), helpers.run_updates(theirs, params, grads)
    assert_same_tree(s, r)
    helpers.assert_near(p, q, 1e-6)
    helpers.assert_near(s, r, 2e-5)  # optax rounds 1 - b2 from b2 in float32 in one place and in float64 in another

    stepped, t = helpers.run_steps(ours, params, grads)
    assert_same_tree(t, s)
    assert helpers.bits(helpers.moments(t)) == helpers.bits(helpers.moments(s))
    helpers.assert_near(stepped, p, 2.4e-7)  # p + update rounds once more than the step in place


def test_hundred_steps_like_optax():
    params, grads = helpers.tree(), helpers.gradients(100)
    arguments = dict(learning_rate=SCHEDULE, weight_decay=0.01, mask=2 * MASK)
    p, s = helpers.run_updates(xla_lamb.lamb(**arguments), params, grads)
    q, r = helpers.run_updates(optax.lamb(**arguments), params, grads)
    helpers.assert_near(p, q, 1e-6)
    assert int(helpers.moments(s)[0]) == 100


def test_optax_state_goes_on_with_us_and_back():
    params, grads = helpers.tree(SHAPES), helpers.gradients(9, SHAPES)
    ours, theirs = xla_lamb.lamb(SCHEDULE, weight_decay=0.01), optax.lamb(SCHEDULE, weight_decay=0.01)
    p, s = [jnp.asarray(x) for x in params], theirs.init(params)
    for i, g in enumerate(grads):
        updates, s = (ours if i % 3 == 1 else theirs).update(g, s, p)
        p = optax.apply_updates(p, updates)
    q, _ = helpers.run_updates(theirs, params, grads)
    helpers.assert_near(p, q, 1e-6)


@pytest.mark.parametrize("again", [copy.deepcopy, functools.partial(jax.tree.map, lambda x: x)], ids=["copied", "rebuilt as a tree"])
def test_step_survives(again):
    """nnx takes a transformation apart and puts it together again."""
    params, opt = helpers.tree(SHAPES), xla_lamb.lamb(1e-2)
    assert isinstance(again(opt), xla_lamb.Lamb)
    (p, s), (q, r) = (o.step(helpers.gradients(1, SHAPES)[0], o.init(params), params) for o in (opt, again(opt)))
    assert helpers.bits((p, s)) == helpers.bits((q, r))


@pytest.mark.parametrize("tree", ["list", "dict", "tuple", "leaf", "none"])
def test_any_container(tree):
    a, b = helpers.tree([(3, 2), (5,)])
    params = {"list": [a, [b]], "dict": {"b": a, "a": {"c": b}}, "tuple": (a, (), (b,)), "leaf": a, "none": {"a": a, "b": None}}[tree]
    grads = jax.tree.map(lambda x: x * 0.1, params)
    p, _ = helpers.run_steps(xla_lamb.lamb(1e-2), params, [grads])
    q, _ = helpers.run_updates(optax.lamb(1e-2), params, [grads])
    assert jax.tree.structure(p) == jax.tree.structure(params)
    helpers.assert_near(p, q, 1e-6)


# optax's wrappers ---------------------------------------------------------------------------------------------------------


def wrapped(wrap, steps=6, grads=None, params=None):
    """The same wrapper around ours and around optax.lamb, over the same gradients."""
    params = helpers.tree(SHAPES) if params is None else params
    grads = helpers.gradients(steps, SHAPES) if grads is None else grads
    runs = []
    for make in (xla_lamb.lamb, optax.lamb):
        runs.append(helpers.run_updates(wrap(make), params, grads))
    (p, s), (q, r) = runs
    assert jax.tree.structure(s) == jax.tree.structure(r)
    helpers.assert_near(p, q, 1e-6)
    assert helpers.bits(p) != helpers.bits(params), "nothing moved"
    return p, s


def test_chain():
    wrapped(lambda lamb: optax.chain(optax.clip_by_global_norm(0.5), lamb(1e-2, weight_decay=0.01), optax.scale(0.5)))


def test_max_grad_norm_is_a_clip_in_front():
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    p, _ = helpers.run_steps(xla_lamb.lamb(1e-2, max_grad_norm=0.5), params, grads)
    q, _ = helpers.run_updates(optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(1e-2)), params, grads)
    helpers.assert_near(p, q, 1e-6)
    unclipped, _ = helpers.run_steps(xla_lamb.lamb(1e-2), params, grads)
    assert helpers.error(unclipped[0], q[0]) > 1e-5


def test_masked():
    p, _ = wrapped(lambda lamb: optax.chain(optax.masked(lamb(1e-2), MASK), optax.masked(optax.set_to_zero(), [not m for m in MASK])))
    params = helpers.tree(SHAPES)
    for after, before, moves in zip(p, params, MASK):
        assert np.array_equal(after, before) == (not moves or before.size == 0)


def test_multi_transform():
    labels = ["lamb" if m else "sgd" for m in MASK]
    wrapped(lambda lamb: optax.multi_transform({"lamb": lamb(1e-2, weight_decay=0.01), "sgd": optax.sgd(1e-2)}, labels))


def test_two_lambs_in_multi_transform():
    labels = ["a" if m else "b" for m in MASK]
    wrapped(lambda lamb: optax.multi_transform({"a": lamb(1e-2, weight_decay=0.01), "b": lamb(SCHEDULE)}, labels))


def test_partition_with_frozen_tensors():
    labels = lambda params: [("slow", "frozen", "fast")[i % 3] for i in range(len(params))]
    groups = lambda lamb: {"fast": lamb(SCHEDULE, weight_decay=0.01), "slow": lamb(1e-3, b1=0.5, mask=ODD), "frozen": optax.set_to_zero()}
    p, _ = wrapped(lambda lamb: optax.partition(groups(lamb), labels))
    for i, (after, before) in enumerate(zip(p, helpers.tree(SHAPES))):
        assert np.array_equal(after, before) == (i % 3 == 1 or before.size == 0)


def test_lookahead():
    params = optax.LookaheadParams.init_synced([jnp.asarray(x) for x in helpers.tree(SHAPES)])
    wrap = lambda lamb: optax.lookahead(lamb(1e-2, weight_decay=0.01), sync_period=2, slow_step_size=0.5)
    p, _ = wrapped(wrap, steps=5, params=params)
    assert any(not np.array_equal(fast, slow) for fast, slow in zip(*p))


def test_ema_of_updates():
    wrapped(lambda lamb: optax.chain(lamb(1e-2, weight_decay=0.01), optax.ema(0.9)))


def test_ema_of_parameters():
    """Beside a step in place, which must leave the average its own numbers."""
    grads = helpers.gradients(4, SHAPES)
    averages = []
    for lamb in (xla_lamb.lamb, optax.lamb):
        tx = lamb(5e-2)

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params, state, average, g):
            if hasattr(tx, "step"):
                params, state = tx.step(g, state, params)
            else:
                updates, state = tx.update(g, state, params)
                params = optax.apply_updates(params, updates)
            return params, state, optax.incremental_update(params, average, 0.1)

        p = [jnp.array(x) for x in helpers.tree(SHAPES)]
        carry = p, tx.init(p), [jnp.array(x) for x in p]
        for g in grads:
            carry = step(*carry, g)
        averages.append(carry[2])
        assert helpers.error(carry[0][0], carry[2][0]) > 1e-3
    helpers.assert_near(*averages, 1e-6)


def test_inject_hyperparams():
    p, s = wrapped(lambda lamb: optax.inject_hyperparams(lamb)(learning_rate=SCHEDULE, weight_decay=0.01, eps=1e-6))
    assert {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"} <= set(s.hyperparams)


def test_inject_hyperparams_takes_our_static_arguments():
    shapes = [(4, 3), (4,)]
    params, grads = helpers.tree(shapes), helpers.gradients(3, shapes)
    options = dict(learning_rate=1e-2, variant="nvlamb", layer_axes=[1, 0], mask=[True, False])
    injected = optax.inject_hyperparams(xla_lamb.lamb, static_args=("layer_axes", "variant", "max_grad_norm", "mask"))
    p, _ = helpers.run_updates(injected(**options), params, grads)
    q, _ = helpers.run_updates(xla_lamb.lamb(**options), params, grads)
    helpers.assert_near(p, q, 2.4e-7)


def test_injected_value_is_used():
    params, grads = helpers.tree(SHAPES), helpers.gradients(1, SHAPES)[0]
    tx = optax.inject_hyperparams(xla_lamb.lamb)(learning_rate=1e-2)
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(3e-2)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    expected, _ = optax.lamb(3e-2).update(grads, optax.lamb(3e-2).init(params), params)
    helpers.assert_near(optax.apply_updates(params, updates), optax.apply_updates(params, expected), 1e-6)


def test_multi_steps():
    def wrap(lamb):
        tx = optax.MultiSteps(lamb(1e-2, weight_decay=0.01), every_k_schedule=3)
        return optax.GradientTransformation(tx.init, tx.update)

    _, s = wrapped(wrap)
    assert int(helpers.moments(s)[0]) == 2


def test_apply_if_finite():
    grads = helpers.gradients(4, SHAPES)
    grads[1][0][0, 0] = np.nan
    _, s = wrapped(lambda lamb: optax.apply_if_finite(lamb(1e-2), 3), grads=grads)
    assert int(helpers.moments(s)[0]) == 3


# JAX's transformations ----------------------------------------------------------------------------------------------------


def test_without_jit():
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    opt = xla_lamb.lamb(SCHEDULE, weight_decay=0.01)
    (p, s), (q, r) = helpers.run_steps(opt, params, grads, jit=False), helpers.run_steps(opt, params, grads)
    helpers.assert_near(p, q, 2.4e-7)
    helpers.assert_near(s, r, 2.4e-7)


def test_donation():
    params, grads = helpers.tree(SHAPES), helpers.gradients(3, SHAPES)
    opt = xla_lamb.lamb(1e-2, weight_decay=0.01)
    expected, _ = helpers.run_steps(opt, params, grads)
    step = jax.jit(opt.step, donate_argnums=(1, 2))
    p = [jnp.array(x) for x in params]
    s = opt.init(p)
    for g in grads:
        old = p, s
        p, s = step(g, s, p)
        assert old[0][0].is_deleted() and helpers.moments(old[1])[1][0].is_deleted()
    assert helpers.bits(p) == helpers.bits(expected)


def test_no_argument_is_changed_without_donation():
    params, grads = helpers.tree(SHAPES), helpers.gradients(1, SHAPES)[0]
    opt = xla_lamb.lamb(1e-2)
    arguments = [jnp.array(g) for g in grads], opt.init(params), [jnp.array(p) for p in params]
    before = helpers.bits(arguments)
    for call in (opt.step, jax.jit(opt.step), opt.update, jax.jit(opt.update)):
        jax.block_until_ready(call(*arguments))
        assert helpers.bits(arguments) == before


def test_scan():
    params, grads = helpers.tree(SHAPES), helpers.gradients(7, SHAPES)
    opt = xla_lamb.lamb(SCHEDULE, weight_decay=0.01)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)

    @jax.jit
    def train(p, s):
        return jax.lax.scan(lambda c, g: (opt.step(g, c[1], c[0]), None), (p, s), stacked)[0]

    p, s = train([jnp.asarray(x) for x in params], opt.init(params))
    q, r = helpers.run_steps(opt, params, grads)
    helpers.assert_near(p, q, 2.4e-7)
    assert int(helpers.moments(s)[0]) == int(helpers.moments(r)[0]) == 7


def test_gradient_accumulation():
    w = helpers.tree([(6, 3), (3,)])
    x, y = (np.random.default_rng(5).normal(size=(4, 8, d)).astype(np.float32) for d in (6, 3))
    opt = xla_lamb.lamb(1e-2)

    def loss(w, x, y):
        return jnp.mean(jnp.square(jnp.tanh(x @ w[0] + w[1]) - y))

    @jax.jit
    def accumulated(w, s):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, *batch)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), (x, y))
        return opt.step(total, s, w, grad_scale=1 / 4)

    @jax.jit
    def whole(w, s):
        return opt.step(jax.grad(loss)(w, x.reshape(-1, 6), y.reshape(-1, 3)), s, w)

    w = [jnp.asarray(a) for a in w]
    helpers.assert_near(accumulated(w, opt.init(w))[0], whole(w, opt.init(w))[0], 2e-6)


# vmap ---------------------------------------------------------------------------------------------------------------------

N = 3
POPULATION = [np.stack(x) for x in zip(*(helpers.tree([(3, 5), (17,), (), (0,)], seed=i) for i in range(N)))]
POPULATION_GRADS = [np.stack(x) for x in zip(*(helpers.tree([(3, 5), (17,), (), (0,)], seed=50 + i, scale=0.1) for i in range(N)))]


def member(tree, i):
    return [x[i] for x in tree]


def call(method, rate, g, s, p):
    opt = xla_lamb.lamb(rate, weight_decay=0.01)
    if method == "step":
        return opt.step(g, s, p)
    updates, s = opt.update(g, s, p)
    return optax.apply_updates(p, updates), s


@pytest.mark.parametrize("method", ["step", "update"])
def test_vmap_over_all(method):
    """A population: each member with its own parameters, state and learning rate."""
    rates = jnp.array([1e-3, 1e-2, 1e-1])
    state = jax.vmap(xla_lamb.lamb(1.0).init)(POPULATION)
    step = jax.jit(jax.vmap(functools.partial(call, method)))
    p, s = step(rates, POPULATION_GRADS, state, POPULATION)
    p, s = step(rates, POPULATION_GRADS, s, p)
    for i in range(N):
        q, r = member(POPULATION, i), xla_lamb.lamb(1.0).init(member(POPULATION, i))
        for _ in range(2):
            q, r = call(method, float(rates[i]), member(POPULATION_GRADS, i), r, q)
        helpers.assert_near([x[i] for x in p], q, 5e-7)
        helpers.assert_near(jax.tree.map(lambda x: x[i], s), r, 5e-7)


@pytest.mark.parametrize("method", ["step", "update"])
def test_vmap_over_the_rate_alone(method):
    """What is not batched goes in once, and comes out once for each member where it depends on one."""
    rates = jnp.array([1e-3, 1e-2, 1e-1])
    g, q = member(POPULATION_GRADS, 0), member(POPULATION, 0)
    state = xla_lamb.lamb(1.0).init(q)
    p, s = jax.jit(jax.vmap(functools.partial(call, method), in_axes=(0, None, None, None)))(rates, g, state, q)
    for i in range(N):
        expected, _ = call(method, float(rates[i]), g, state, q)
        helpers.assert_near([x[i] for x in p], expected, 5e-7)


@pytest.mark.parametrize("method", ["step", "update"])
def test_vmap_with_batched_gradients_and_a_shared_state(method):
    q = member(POPULATION, 0)
    state = xla_lamb.lamb(1.0).init(q)
    p, s = jax.vmap(functools.partial(call, method, 1e-2), in_axes=(0, None, None))(POPULATION_GRADS, state, q)
    for i in range(N):
        expected, r = call(method, 1e-2, member(POPULATION_GRADS, i), state, q)
        helpers.assert_near([x[i] for x in p], expected, 5e-7)
        helpers.assert_near(helpers.moments(jax.tree.map(lambda x: x[i] if x.ndim else x, s))[1], helpers.moments(r)[1], 5e-7)


def test_nested_vmap_and_other_axes():
    rates = jnp.array([1e-3, 1e-2])
    last = [jnp.moveaxis(x, 0, -1) for x in POPULATION]
    state = jax.vmap(xla_lamb.lamb(1.0).init)(POPULATION)
    inner = jax.vmap(functools.partial(call, "step"), in_axes=(None, 0, 0, -1))
    p, _ = jax.jit(jax.vmap(inner, in_axes=(0, None, None, None)))(rates, POPULATION_GRADS, state, last)
    for i in range(2):
        for j in range(N):
            q = member(POPULATION, j)
            expected, _ = call("step", float(rates[i]), member(POPULATION_GRADS, j), xla_lamb.lamb(1.0).init(q), q)
            helpers.assert_near([x[i, j] for x in p], expected, 5e-7)


def test_vmap_of_layer_axes_clip_and_skip():
    shapes = [(4, 3, 2), (4,)]
    params = [np.stack(x) for x in zip(*(helpers.tree(shapes, seed=i) for i in range(N)))]
    grads = [np.stack(x) for x in zip(*(helpers.tree(shapes, seed=9 + i, scale=10.0**i) for i in range(N)))]
    grads[0][1, 0, 0, 0] = np.nan
    opt = xla_lamb.lamb(1e-2, variant="nvlamb", layer_axes=[2, 0], nonfinite="skip")
    p, s, stats = jax.jit(jax.vmap(lambda g, s, p: opt.step(g, s, p, stats=True)))(grads, jax.vmap(opt.init)(params), params)
    assert stats.skipped.tolist() == [False, True, False]
    assert stats.trust[0].shape == (N, 4, 3, 3)
    for i in range(N):
        q, r = opt.step(member(grads, i), opt.init(member(params, i)), member(params, i))
        helpers.assert_near([x[i] for x in p], q, 5e-7)
    assert helpers.moments(s)[0].tolist() == [1, 0, 1]


def test_vmap_inside_scan():
    """An ensemble's training loop."""
    opt = xla_lamb.lamb(1e-2)
    state = jax.vmap(opt.init)(POPULATION)

    @jax.jit
    def train(p, s):
        return jax.lax.scan(lambda c, _: (jax.vmap(opt.step)(POPULATION_GRADS, c[1], c[0]), None), (p, s), length=3)[0]

    p, _ = train(POPULATION, state)
    for i in range(N):
        q, _ = helpers.run_steps(opt, member(POPULATION, i), [member(POPULATION_GRADS, i)] * 3)
        helpers.assert_near([x[i] for x in p], q, 5e-7)


# Compilations -------------------------------------------------------------------------------------------------------------


class Compilations:
    """Counts XLA compilations through JAX's own events, whoever causes them."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event, duration, **kwargs):
        self.count += event == self.EVENT

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


def test_one_compilation_in_a_thousand_steps():
    shapes = [(3, 5), (17,)]
    g = [jnp.asarray(x) for x in helpers.tree(shapes, seed=1)]
    p = [jnp.asarray(x) for x in helpers.tree(shapes)]
    decays = jnp.linspace(0.0, 0.1, 10)
    decays = [decays[i] for i in range(10)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p, s, decay, scale):
        return xla_lamb.lamb(SCHEDULE, weight_decay=decay).step(g, s, p, grad_scale=scale)

    s = xla_lamb.lamb(SCHEDULE, weight_decay=0.1).init(p)
    scales = [jnp.float32(2.0**-i) for i in range(7)]
    with Compilations() as compilations:
        p, s = step(p, s, decays[0], scales[0])
        jax.block_until_ready(p)
        first = compilations.count
        for i in range(1, 1000):
            p, s = step(p, s, decays[i % 10], scales[i % 7])
        jax.block_until_ready(p)
    assert first >= 1, "the counter counts nothing"
    assert compilations.count == first
    assert step._cache_size() == 1
    assert int(helpers.moments(s)[0]) == 1000
    assert all(np.all(np.isfinite(x)) for x in p)
