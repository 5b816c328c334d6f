"""ClipByGlobalNorm, ClipByNorm and ClipByValue: against float64 NumPy, and against Keras's arguments of the same optimizer."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import helpers
import model64
from xla_lamb.keras import Lamb
from xla_lamb.minimize import ClipByGlobalNorm, ClipByNorm, ClipByValue

BACKEND = keras.backend.backend()
RATE = 0.05
SHAPES = [(3, 5), (7,), (2, 3, 4)]
CLIPPERS = [ClipByGlobalNorm, ClipByNorm, ClipByValue]
KERAS = {ClipByGlobalNorm: "global_clipnorm", ClipByNorm: "clipnorm", ClipByValue: "clipvalue"}
LIMITS = {ClipByGlobalNorm: 1.0, ClipByNorm: 0.6, ClipByValue: 0.15}  # some of the gradients are above, some below


def clipped(clipper, grads, limit):
    """In float64."""
    grads = [np.asarray(g, np.float64) for g in grads]
    norm = lambda xs: np.sqrt(sum(np.sum(x * x) for x in xs))
    if clipper is ClipByGlobalNorm:
        return [g * min(1.0, limit / norm(grads)) for g in grads]
    if clipper is ClipByNorm:
        return [g * min(1.0, limit / norm([g])) for g in grads]
    return [np.minimum(np.maximum(g, -limit), limit) for g in grads]


def train(optimizer, gradients, dtype="float32", start=None):
    """The variables after a step with each of the gradients."""
    start = helpers.tree(SHAPES) if start is None else start
    variables = [keras.Variable(x, dtype=dtype, name=f"v{i}") for i, x in enumerate(start)]
    optimizer.build(variables)
    for grads in gradients:
        optimizer.apply([ops.convert_to_tensor(g) for g in grads], variables)
    return [ops.convert_to_numpy(v) for v in variables]


def gradients(steps=6, dtype=np.float32):
    return helpers.gradients(steps, SHAPES, scale=0.1, dtype=dtype)


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_against_float64(clipper):
    limit = LIMITS[clipper]
    exact = [clipped(clipper, grads, limit) for grads in gradients()]
    changed = [not np.array_equal(a, b) for grads, new in zip(gradients(), exact) for a, b in zip(grads, new)]
    assert 0.1 < np.mean(changed) < 0.9  # the limit is within
    # LAMB, which sees the factor of one step against those of others.
    model = helpers.run_model(helpers.tree(SHAPES), exact, model64.PRESETS["optax"], RATE)
    helpers.assert_near(train(clipper(Lamb(RATE, implementation="fused"), limit), gradients()), model.p, 1e-6)
    # A guest that takes gradients as they are.
    start = [x.astype(np.float64) for x in helpers.tree(SHAPES)]
    plain = lambda steps: [p - sum(g[i] for g in steps) for i, p in enumerate(start)]
    helpers.assert_near(train(clipper(keras.optimizers.SGD(1.0), limit), gradients()), plain(exact), 1e-6)
    # Control: without clipping, or with another limit, the comparison fails.
    for wrong in (gradients(), [clipped(clipper, grads, limit * 1.01) for grads in gradients()]):
        assert max(map(helpers.error, plain(wrong), plain(exact))) > 1e-4
        assert max(map(helpers.error, helpers.run_model(start, wrong, model64.PRESETS["optax"], RATE).p, model.p)) > 1e-5


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_like_the_arguments_of_keras(clipper):
    argument = {KERAS[clipper]: LIMITS[clipper]}
    for inner, peer in (
        (Lamb(RATE, variant="keras"), keras.optimizers.Lamb(RATE, **argument)),
        (keras.optimizers.Adam(RATE), keras.optimizers.Adam(RATE, **argument)),
        # Given to the optimizer inside it comes last.
        (keras.optimizers.Adam(RATE, **argument), keras.optimizers.Adam(RATE, **argument)),
        (Lamb(RATE, variant="keras", **argument), keras.optimizers.Lamb(RATE, **argument)),
    ):
        limit = 1e6 if getattr(inner, KERAS[clipper]) else LIMITS[clipper]
        helpers.assert_near(train(clipper(inner, limit), gradients()), train(peer, gradients()), 5e-6)


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_tensorflow_functions_of_the_same_name(clipper):
    import tensorflow as tf

    (grads,) = gradients(1)
    grads = [g * 5 for g in grads]
    expected = {
        ClipByGlobalNorm: lambda: tf.clip_by_global_norm(grads, 0.5)[0],
        ClipByNorm: lambda: [tf.clip_by_norm(g, 0.5) for g in grads],
        ClipByValue: lambda: [tf.clip_by_value(g, -0.5, 0.5) for g in grads],
    }[clipper]()
    # From zero with a rate of 1 the weights become the negative gradients.
    got = train(clipper(keras.optimizers.SGD(1.0), 0.5), [grads], start=[np.zeros(s, np.float32) for s in SHAPES])
    helpers.assert_near([-x for x in got], [x.numpy() for x in expected], 3e-7)
    assert max(map(helpers.error, [-x for x in got], grads)) > 0.1


def test_gradients_below_the_limit_are_left_as_they_are():
    zeros = [np.zeros(s, np.float32) for s in SHAPES]
    for clipper in CLIPPERS:
        got = train(clipper(keras.optimizers.SGD(1.0), 1e3), gradients(1), start=zeros)
        assert helpers.bits([-x for x in got]) == helpers.bits(gradients(1)[0])


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_zero_gradients(clipper):
    zeros = [np.zeros(s, np.float32) for s in SHAPES]
    for inner in (Lamb(RATE), keras.optimizers.SGD(1.0)):
        assert helpers.bits(train(clipper(inner, 1e-30), [zeros])) == helpers.bits(helpers.tree(SHAPES))
    some = [gradients(1)[0][0], *zeros[1:]]
    got = train(clipper(keras.optimizers.SGD(1.0), 0.1), [some])
    assert all(np.all(np.isfinite(x)) for x in got) and helpers.bits(got[1:]) == helpers.bits(helpers.tree(SHAPES)[1:])


def test_what_is_not_finite_is_not_hidden():
    (grads,) = gradients(1)
    for value in (np.inf, -np.inf, np.nan):
        bad = [g.copy() for g in grads]
        bad[1][3] = value
        for make in (lambda: keras.optimizers.SGD(1.0), lambda: Lamb(RATE)):
            # The norm of all: no element is finite any more.
            assert all(np.all(np.isnan(x)) for x in train(ClipByGlobalNorm(make(), 1.0), [bad]))
        # The norm of each: of this gradient; the others are as they would be.
        got, alone = (train(ClipByNorm(keras.optimizers.SGD(1.0), 0.1), [x]) for x in (bad, grads))
        assert np.all(np.isnan(got[1])) and helpers.bits([got[0], got[2]]) == helpers.bits([alone[0], alone[2]])
        # By value an infinity is the limit, as in tf.clip_by_value; NaN stays.
        got = train(ClipByValue(keras.optimizers.SGD(1.0), 0.1), [bad])
        expected = clipped(ClipByValue, bad, 0.1)
        for x, start, g in zip(got, helpers.tree(SHAPES), expected):
            np.testing.assert_allclose(x, start - g, rtol=1e-6, atol=1e-7)
        assert np.isnan(got[1][3]) == np.isnan(value)


@pytest.mark.parametrize("clipper", [ClipByGlobalNorm, ClipByNorm])
def test_a_norm_that_overflows_does_not_make_zeros(clipper):
    """The squares of 1e20 are infinite in float32: limit / norm is 0."""
    (grads,) = gradients(1)
    grads[0] = grads[0] * np.float32(1e21)
    got = train(clipper(keras.optimizers.SGD(1.0), 1.0), [grads])
    assert np.all(np.isnan(got[0]))


def test_a_lamb_that_skips_what_is_not_finite_does_so_inside_too():
    for limit in (None, 0.5):
        optimizer = ClipByGlobalNorm(Lamb(RATE, nonfinite="skip", global_clipnorm=limit), 1.0)
        (grads,) = gradients(1)
        grads[2][0, 0, 0] = np.nan
        assert helpers.bits(train(optimizer, [grads])) == helpers.bits(helpers.tree(SHAPES))
        assert int(optimizer.iterations) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_gradients(dtype):
    """Float16 holds no square of 300, and no sum of thousands of them."""
    kind = getattr(ml_dtypes, dtype, None) or np.float16
    grads = [np.full(s, 300 + 50 * i).astype(kind) for i, s in enumerate(SHAPES)]
    zeros = [np.zeros(s, np.float32) for s in SHAPES]
    # The clipped gradient of one variable keeps its type; by the global norm it does not go through memory.
    for clipper, tolerance in ((ClipByGlobalNorm, 1e-6), (ClipByNorm, float(ml_dtypes.finfo(kind).eps)), (ClipByValue, 0)):
        got = train(clipper(keras.optimizers.SGD(1.0), 4.0), [grads], start=zeros)
        helpers.assert_near([-x for x in got], clipped(clipper, grads, 4.0), tolerance)
    # And with variables of the type, whose moments are float32.
    for clipper in CLIPPERS:
        optimizer = clipper(Lamb(RATE), 4.0)
        train(optimizer, [grads], dtype)
        helpers.assert_near(
            [ops.convert_to_numpy(m) for m in optimizer.inner._momentums], [0.1 * g for g in clipped(clipper, grads, 4.0)], float(ml_dtypes.finfo(kind).eps)
        )


def test_two_clippers_the_outer_one_first():
    sgd = lambda: keras.optimizers.SGD(1.0)
    start = helpers.tree(SHAPES)
    for i, outer in enumerate(CLIPPERS):
        for inner in CLIPPERS[:i] + CLIPPERS[i + 1 :]:
            (grads,) = gradients(1)
            grads = [g * 5 for g in grads]
            limits = {ClipByGlobalNorm: 2.0, ClipByNorm: 1.3, ClipByValue: 0.4}
            both = lambda a, b: [p - g for p, g in zip(start, clipped(b, clipped(a, grads, limits[a]), limits[b]))]
            got = train(outer(inner(sgd(), limits[inner]), limits[outer]), [grads])
            helpers.assert_near(got, both(outer, inner), 1e-6)
            assert max(map(helpers.error, both(inner, outer), both(outer, inner))) > 1e-5  # the order is seen
    (grads,) = gradients(1)
    expected = [p - g for p, g in zip(start, clipped(ClipByGlobalNorm, grads, 0.2))]
    for a, b in ((0.2, 0.5), (0.5, 0.2)):
        helpers.assert_near(train(ClipByGlobalNorm(ClipByGlobalNorm(sgd(), a), b), [grads]), expected, 1e-6)
    # Around a Lamb that clips by itself, which sees it in the next step.
    steps = [clipped(ClipByGlobalNorm, grads, 0.2) for grads in gradients(2)]
    model = helpers.run_model(start, steps, model64.PRESETS["optax"], RATE)
    helpers.assert_near(train(ClipByGlobalNorm(Lamb(RATE, global_clipnorm=0.2), 0.5), gradients(2)), model.p, 1e-6)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), True, "1", None, [1.0]], ids=str)
def test_bad_limits(limit):
    for clipper in CLIPPERS:
        with pytest.raises(ValueError, match="must be a positive number, not"):
            clipper(Lamb(), limit)
