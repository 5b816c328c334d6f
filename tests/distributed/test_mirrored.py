"""xla_lamb.minimize under tf.distribute.MirroredStrategy with two and with four replicas: all take the step of one replica that saw the whole batch.

TensorFlow has to be told of its CPUs before it starts, so one fresh process does all the training, and the tests look at what it brings back.
"""

import contextlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import helpers
import model64

HERE = Path(__file__).absolute().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import replicas  # noqa: E402
from replicas import CLIP, EPSILON, EXAMPLES, MOMENTUM, NAN, NEAR, NOT_FINITE, RATE, SCALE, STEPS, clipped, expected  # noqa: E402

NOISE, NOISY = 1.5, (200, 100)
GUESTS = ("SGD", "Adam", "AdamW")
CASES = ("lamb", "clip", "accumulation", "average", "mean", "function", "private", *NOT_FINITE, *GUESTS)
ON_FOUR = ("clip", "average", "mean", "function", "private", "everything", *GUESTS)  # for the seconds' sake not all; "everything" holds the others
IN_A_FUNCTION = ("clip", "accumulation", "everything", "everything, Adam")  # and the others eagerly
TRAINED = [(case, n) for case in CASES for n in ((1, 2, 4) if case in ON_FOUR else (1, 2))]
MODELLED = ("lamb", "clip", "scaling", "clip and scaling", "accumulation", "mean", "function", "private", "SGD")  # in float64
WAYS = ("two_calls", "aggregated_before", "by_scale_loss", "compiled_gradients")
REPLICAS = (2, 4)


# In the fresh process -----------------------------------------------------------------------------------------------------


def alone(make):
    """A Keras optimizer by itself, with the gradients of the whole batch: its variables after all steps."""
    import keras
    import tensorflow as tf

    variables = [keras.Variable(p) for p in replicas.start()]
    optimizer = make()
    optimizer.build(variables)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = replicas.loss_of(variables, *replicas.batch(step))
        # Of slices that repeat a row Keras's Adam squares each by itself.
        optimizer.apply([tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)], variables)
    return [np.asarray(v) for v in variables]


def private(optimizer, variables, loss):
    """minimize with the loss of each example."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss(each=True)
    optimizer.minimize(value, variables, tape)


def recorded(strategy):
    """What the steps of a wrapper inside LossScaling saw in one eager step: [(step, replica, arrays)]."""
    import tensorflow as tf

    from xla_lamb import minimize
    from xla_lamb.keras import Lamb

    log = []

    def note(step, values):
        context = tf.distribute.get_replica_context()
        replica = -1 if context is None else int(context.replica_id_in_sync_group)
        log.append((step, replica, [np.asarray(x) for x in values]))

    class Recorder(minimize.OptimizerWrapper):
        def transform_loss(self, loss):
            note("transform_loss", [loss])
            return super().transform_loss(loss)

        def get_gradients(self, loss, variables, tape):
            note("get_gradients", [loss])
            return super().get_gradients(loss, variables, tape)

        def transform_unaggregated_gradients(self, grads_and_vars):
            note("transform_unaggregated_gradients", [g for g, _ in grads_and_vars])
            return super().transform_unaggregated_gradients(grads_and_vars)

        def aggregate_gradients(self, grads_and_vars):
            note("aggregate_gradients", [g for g, _ in grads_and_vars])
            return super().aggregate_gradients(grads_and_vars)

        def transform_gradients(self, grads_and_vars):
            note("transform_gradients", [g for g, _ in grads_and_vars])
            return super().transform_gradients(grads_and_vars)

        def apply_updates(self, grads_and_vars):
            note("apply_updates", [g for g, _ in grads_and_vars])
            super().apply_updates(grads_and_vars)

    def make():
        return minimize.LossScaling(Recorder(minimize.ClipByGlobalNorm(Lamb(RATE), CLIP)), 4.0)

    replicas.train(strategy, make, steps=1, eager=True)
    return log


def noise(strategy):
    """[step][replica] the noise in the update of one large variable, whose gradients are zero, and each replica's own share before aggregation."""
    import keras
    import tensorflow as tf

    from xla_lamb import minimize

    with strategy.scope():
        v = keras.Variable(np.zeros(NOISY, np.float32))
        optimizer = minimize.DifferentialPrivacy(keras.optimizers.SGD(1.0), CLIP, NOISE, seed=3)
        optimizer.build([v])

    def replica(zeros):
        with tf.GradientTape() as tape:
            loss = zeros * tf.reduce_sum(v)
        grads_and_vars = optimizer.compute_gradients(loss, [v], tape)
        optimizer.apply_gradients(grads_and_vars)
        return grads_and_vars[0][0]

    step = tf.function(lambda zeros: strategy.run(replica, args=(zeros,)), autograph=False)
    found = []
    for _ in range(2):
        before = replicas.local(strategy, [v])
        zeros = strategy.experimental_distribute_values_from_function(lambda c: tf.zeros(EXAMPLES // c.num_replicas_in_sync))
        shares = [np.asarray(x) for x in strategy.experimental_local_results(step(zeros))]
        found.append((shares, [a[0] - b[0] for a, b in zip(before, replicas.local(strategy, [v]))]))
    return found


def swapped(strategy, optimizer):
    """The variables on each replica: before, while the averages are in them, and after; in the strategy's scope and outside; and the averages."""
    values = lambda: replicas.local(strategy, optimizer._trainable_variables)
    found = {}
    for where in ("in the scope", "outside"):
        with strategy.scope() if where == "in the scope" else contextlib.nullcontext():
            before = values()
            with optimizer.averaged_weights():
                during = values()
            found[where] = before, during, values()
    return found, replicas.local(strategy, optimizer.averages)


def main(path):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    one = tf.distribute.get_strategy()
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    # In one process TensorFlow takes the collectives of two strategies for each other's, so that this one goes without.
    four = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)], cross_device_ops=tf.distribute.ReductionToOneDevice())
    strategies = {1: one, 2: two, 4: four}
    assert [s.num_replicas_in_sync for s in strategies.values()] == list(strategies)
    makers, guests = replicas.optimizers()
    found = {("alone", name): alone(make) for name, make in guests.items()}
    for case, n in TRAINED:
        options = dict(nan=NAN, after=lambda optimizer: float(optimizer.loss_scale)) if case in NOT_FINITE else {}
        if case == "private":
            options["how"] = private
        eager = case != "private" and (n != 2 or case not in IN_A_FUNCTION)
        found[case, n], optimizer = replicas.train(strategies[n], makers[case], eager=eager, **options)
        if case == "average":
            found["swapped", n] = swapped(strategies[n], optimizer)
    for case in ("twice", "clip here"):
        found[case, 2] = replicas.train(two, makers[case], eager=True)[0]
    for how in WAYS:
        eager = how in ("two_calls", "aggregated_before")
        found[how, 2] = replicas.train(two, makers["clip and scaling"], getattr(replicas, how), NAN, eager=eager)[0]
    for n in (2, 4):
        found["recorded", n] = recorded(strategies[n])
    found["noise", 4] = noise(four)
    found["fit", 1] = replicas.fit(one, makers["clip and scaling"])
    found["fit", 2] = replicas.fit(two, makers["clip and scaling"])
    found["fit", 4] = replicas.fit(four, makers["clip and scaling"], own=True)
    # Under some strategies, for instance on TPUs, no replica may wait for the others in a merge call: each goes on by itself.
    two.extended._use_merge_call = lambda: False
    for case in ("everything", "everything, Adam"):
        found["no merge call", case] = replicas.train(two, makers[case], nan=NAN)[0]
    with open(path, "wb") as file:
        pickle.dump(found, file)


# Here ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("mirrored") / "found"
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import conftest, test_mirrored; test_mirrored.main(sys.argv[1])"
    helpers.python(code, path, timeout=600)
    with open(path, "rb") as file:
        return pickle.load(file)


def test_the_batch_is_one_that_shows_something():
    with np.errstate(invalid="ignore"):
        nan = [np.isnan(replicas.part(replicas.batch(NAN[0], True), k, 4)[0]).any() for k in range(4)]
    assert nan == [False, False, False, True]
    start = replicas.start()
    assert model64.grad_norm(replicas.gradients(start, replicas.batch(0))) > CLIP  # so that it does clip
    one = replicas.part(replicas.batch(0), 0, EXAMPLES)
    assert model64.grad_norm(replicas.gradients(start, one)) * EXAMPLES > CLIP


@pytest.mark.parametrize("case, n", [(case, n) for case, n in TRAINED if n > 1 and case != "mean"])
def test_tensorflow_replicas_have_the_variables_and_the_state_of_one_replica_with_the_whole_batch(found, case, n):
    many, one = found[case, n], found[case, 1]
    assert len(many["values"]) == n
    for what in ("values", "state"):
        assert all(helpers.bits(copy) == helpers.bits(many[what][0]) for copy in many[what])
        helpers.assert_near(many[what][0], one[what][0], NEAR)
    assert many["iterations"] == one["iterations"]
    assert many["after"] == one["after"]
    assert max(map(helpers.error, many["values"][0], replicas.start())) > 0.01  # they were trained


@pytest.mark.parametrize("case, n", [(case, n) for case, n in TRAINED if case in MODELLED])
def test_tensorflow_replicas_take_the_steps_of_the_float64_model(found, case, n):
    helpers.assert_near(found[case, n]["values"][0], expected(case, n), NEAR)


@pytest.mark.parametrize("case", ["clip here", "twice"])
def test_tensorflow_control_what_is_not_so(found, case):
    """Clipping on each replica is another step, and so are gradients that a guest sums up once more."""
    right = {"clip here": "clip", "twice": "SGD"}[case]
    helpers.assert_near(found[case, 2]["values"][0], expected(case, 2), NEAR)
    assert max(map(helpers.error, found[right, 2]["values"][0], expected(case, 2))) > 1e-3
    assert max(map(helpers.error, found["mean", 2]["values"][0], expected("mean", 4))) > 1e-3


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("guest", GUESTS)
def test_tensorflow_guests_take_the_steps_that_they_take_alone(found, guest, n):
    helpers.assert_near(found[guest, n]["values"][0], found["alone", guest], NEAR)


@pytest.mark.parametrize("case, n", [(case, n) for case, n in TRAINED if case in NOT_FINITE])
def test_tensorflow_a_nan_on_one_replica_skips_the_step_on_all_and_halves_the_scale_once(found, case, n):
    many = found[case, n]
    assert many["after"] == [SCALE] * NAN[0] + [SCALE / 2] * (STEPS - NAN[0])
    assert many["iterations"] == (STEPS - 1) // (1 if "scaling" in case else 2)
    assert all(np.isfinite(x).all() for copy in many["values"] + many["state"] for x in copy)


@pytest.mark.parametrize("n", REPLICAS)
def test_tensorflow_the_average_is_that_of_the_weights(found, n):
    kept = found["swapped", n][1]
    state, average = model64.init(replicas.start()), None
    rules = model64.PRESETS["optax"].replace(eps=EPSILON)
    for step in range(STEPS):
        state = model64.step(state, replicas.gradients(state.p, replicas.batch(step)), rules, RATE)[0]
        average = state.p if average is None else [MOMENTUM * a + (1 - MOMENTUM) * p for a, p in zip(average, state.p)]
    for copy in kept:
        helpers.assert_near(copy, average, NEAR)


@pytest.mark.parametrize("where", ["in the scope", "outside"])
@pytest.mark.parametrize("n", REPLICAS)
def test_tensorflow_averages_are_swapped_in_and_out_on_every_replica(found, n, where):
    swaps, averages = found["swapped", n]
    before, during, after = swaps[where]
    assert len(during) == n
    assert helpers.bits(during) == helpers.bits(averages) != helpers.bits(before) == helpers.bits(after)


@pytest.mark.parametrize("how", WAYS)
def test_tensorflow_every_way_through_the_steps_is_that_of_minimize(found, how):
    by, minimized = found[how, 2], found["clip and scaling", 2]
    for what in ("values", "state"):
        assert all(helpers.bits(copy) == helpers.bits(by[what][0]) for copy in by[what])
        helpers.assert_near(by[what][0], minimized[what][0], NEAR)
    assert by["iterations"] == minimized["iterations"]


@pytest.mark.parametrize("case", ["everything", "everything, Adam"])
def test_tensorflow_without_merge_calls(found, case):
    without, with_them = found["no merge call", case], found[case, 2]
    for what in ("values", "state"):
        assert all(helpers.bits(copy) == helpers.bits(without[what][0]) for copy in without[what])
        helpers.assert_near(without[what][0], with_them[what][0], NEAR)
    assert without["iterations"] == with_them["iterations"]


@pytest.mark.parametrize("n", REPLICAS)
def test_tensorflow_each_step_is_called_once_on_each_replica_and_sees_what_its_contract_says(found, n):
    order = ["transform_loss", "get_gradients", "transform_unaggregated_gradients", "aggregate_gradients", "transform_gradients", "apply_updates"]
    seen = [[entry for entry in found["recorded", n] if entry[1] == k] for k in range(n)]
    assert sum(map(len, seen)) == len(found["recorded", n])  # all in replica context
    start, batch = replicas.start(), replicas.batch(0)
    whole = replicas.gradients(start, batch)
    for k, entries in enumerate(seen):
        assert [step for step, _, _ in entries] == order
        x, rows, y = own = replicas.part(batch, k, n)
        w, b, e = (p.astype(np.float64) for p in start)
        loss = np.sum((x @ w + b + e[rows] - y) ** 2) / EXAMPLES
        mine = replicas.gradients(start, own)
        scaled = [4 * g for g in mine]
        contract = [[loss], [4 * loss], mine, scaled, whole, clipped(whole, CLIP)]
        for (step, _, values), wanted in zip(entries, contract):
            helpers.assert_near(values, wanted, NEAR)
        assert helpers.bits(entries[4][2]) == helpers.bits(seen[0][4][2])
        # What the replicas have in common is not what each of them had.
        assert all(helpers.error(values, wanted) > 1e-2 for values, wanted in zip(entries[3][2], whole))


def test_tensorflow_the_noise_of_the_replicas_adds_up_to_that_of_one(found):
    n = 4
    deviation = NOISE * CLIP / EXAMPLES
    size = np.prod(NOISY)
    shares = []
    for own, totals in found["noise", n]:
        assert len(own) == n and all(helpers.bits(total) == helpers.bits(totals[0]) for total in totals)
        helpers.assert_near(totals[0], np.sum(own, axis=0, dtype=np.float64), NEAR)
        # Four standard errors of a standard deviation; that of n whole shares would be off by the root of n.
        assert np.std(totals[0]) == pytest.approx(deviation, rel=4 / np.sqrt(2 * size))
        assert [np.std(share) for share in own] == pytest.approx([deviation / n**0.5] * n, rel=4 / np.sqrt(2 * size))
        shares += own
    correlation = np.corrcoef([share.ravel() for share in shares])
    assert np.max(np.abs(correlation - np.eye(len(shares)))) < 4.5 / np.sqrt(size)  # of replicas, and of steps


@pytest.mark.parametrize("n", REPLICAS)
def test_tensorflow_fit(found, n):
    """On two replicas that of keras.Model, on four that of xla_lamb.minimize.Model."""
    values, state, losses = found["fit", n]
    one, state_of_one, losses_of_one = found["fit", 1]
    assert len(values) == n
    for copies, wanted in ((values, one[0]), (state, state_of_one[0])):
        assert all(helpers.bits(copy) == helpers.bits(copies[0]) for copy in copies)
        helpers.assert_near(copies[0], wanted, 10 * NEAR)  # biases begin at 0, so that their rounding is large beside them
    assert losses == pytest.approx(losses_of_one, rel=NEAR) and losses[-1] < losses[0]
