"""xla_lamb.keras.Lamb under tf.distribute.MirroredStrategy with two replicas: all of them take the step of one replica that saw the whole batch.

TensorFlow has to be told of two CPUs before it starts, so one fresh process does all the training, and the tests look at what it brings back.
"""

import pickle

import numpy as np
import pytest

import helpers
import model64

STEPS = 4
SHAPES = [(6, 3), (5,), (4, 2)]  # the first is an embedding in the case "sparse"
# An epsilon so large that elements whose gradients nearly cancel out do not magnify rounding.
EPSILON, RATE, CLIP, DECAY = 1e-3, 1e-2, 0.5, 0.1
NEAR = 2e-6
ROWS = np.array([[1, 3, 1], [3, 0, 3]], np.int32)  # of each replica: repeated, and shared with the other

OPTIONS = {
    "decay": dict(weight_decay=DECAY),
    "clip": dict(global_clipnorm=CLIP),
    "skip": dict(nonfinite="skip"),
    "accumulate": dict(gradient_accumulation_steps=2),
    "sparse": dict(global_clipnorm=CLIP),
}


def gradients(case):
    """[step][replica] lists of gradients; of a sparse one the rows."""
    shapes = [(3, 3), *SHAPES[1:]] if case == "sparse" else SHAPES
    grads = [[helpers.tree(shapes, seed=1 + 2 * step + replica, scale=0.1) for replica in range(2)] for step in range(STEPS)]
    if case == "clip":  # what the replicas disagree about is large, and gone from the sum
        grads = [[[a + 9, *rest], [b - 9, *others]] for (a, *rest), (b, *others) in grads]
    if case == "skip":
        grads[1][1][1][2] = np.nan  # on one replica, in one step
    return grads


def summed(case):
    """[step] lists of the gradients of the whole batch, in float64."""
    def dense(replica, grads):
        grads = [g.astype(np.float64) for g in grads]
        if case == "sparse":
            table = np.zeros(SHAPES[0])
            np.add.at(table, ROWS[replica], grads[0])
            grads[0] = table
        return grads

    whole = [[sum(parts) for parts in zip(*(dense(i, g) for i, g in enumerate(step)))] for step in gradients(case)]
    return [[(a + b) / 2 for a, b in zip(*whole[k:k + 2])] for k in range(0, STEPS, 2)] if case == "accumulate" else whole


def expected(case, grads=None):
    """The float64 model; `grads` that are clipped already instead of the case's own."""
    options = OPTIONS[case]
    clip = None if grads else options.get("global_clipnorm")
    rules = model64.PRESETS["keras"].replace(eps=EPSILON, weight_decay=options.get("weight_decay", 0.0), max_grad_norm=clip)
    return helpers.run_model(helpers.tree(SHAPES), grads or summed(case), rules, RATE, nonfinite=options.get("nonfinite", "propagate"))


# In the fresh process -----------------------------------------------------------------------------------------------------


def custom_loop(strategy, make, case):
    """Steps in strategy.run: each replica's (variables, moments, number of steps)."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        variables = [keras.Variable(x) for x in helpers.tree(SHAPES)]
        optimizer = make(RATE, epsilon=EPSILON, **OPTIONS[case])
        optimizer.build(variables)

    def replica(*grads):
        grads = list(grads)
        if case == "sparse":
            rows = tf.gather(tf.constant(ROWS), tf.distribute.get_replica_context().replica_id_in_sync_group)
            grads[0] = tf.IndexedSlices(grads[0], rows, tf.constant(SHAPES[0]))
        optimizer.apply(grads, variables)

    @tf.function
    def step(*grads):
        strategy.run(replica, args=grads)

    for grads in gradients(case):
        step(*(strategy.experimental_distribute_values_from_function(lambda c: tf.constant(parts[c.replica_id_in_sync_group])) for parts in zip(*grads)))
    copies = lambda vs: [[np.asarray(x) for x in strategy.experimental_local_results(v.value)] for v in vs]
    state = [copies(vs) for vs in (variables, optimizer._momentums, optimizer._velocities)]
    return [[[x[k] for x in part] for part in state] for k in range(2)] + [int(optimizer.iterations.numpy())]


def fit(strategy, make):
    import keras

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 4)).astype(np.float32), rng.normal(size=(48, 3)).astype(np.float32)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        # TensorFlow cannot compile a function that a strategy runs; the step inside is compiled all the same.
        model.compile(make(RATE, epsilon=EPSILON, weight_decay=DECAY), "mse", jit_compile=False)
    losses = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [np.asarray(v) for v in model.trainable_variables], losses


def main(path):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import keras

    import xla_lamb.keras

    def ours(*args, **options):
        return xla_lamb.keras.Lamb(*args, variant="keras", **options)

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    found = {("ours", case): custom_loop(strategy, ours, case) for case in OPTIONS}
    found |= {("peer", case): custom_loop(strategy, keras.optimizers.Lamb, case) for case in ("decay", "clip")}
    for who, make in (("ours", ours), ("peer", keras.optimizers.Lamb)):
        found[who, "fit"] = fit(strategy, make)
    found["one", "fit"] = fit(tf.distribute.get_strategy(), ours)
    # Under some strategies, for instance on TPUs, no replica may wait for the others in a merge call: each goes on by itself.
    strategy.extended._use_merge_call = lambda: False
    found |= {("no merge call", case): custom_loop(strategy, ours, case) for case in OPTIONS}
    with open(path, "wb") as file:
        pickle.dump(found, file)


# Here ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("replicas") / "found"
    helpers.python("import conftest, sys, test_keras_distributed; test_keras_distributed.main(sys.argv[1])", path)
    with open(path, "rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize("how", ["ours", "no merge call"])
@pytest.mark.parametrize("case", OPTIONS)
def test_replicas_take_the_step_of_the_whole_batch(found, case, how):
    first, second, iterations = found[how, case]
    assert helpers.bits(first) == helpers.bits(second)
    model = expected(case)
    for actual, wanted in zip(first, (model.p, model.m, model.v)):
        helpers.assert_near(actual, wanted, NEAR)
    assert iterations == model.t == len(summed(case)) - (case == "skip")


def test_like_keras(found):
    helpers.assert_near(found["ours", "decay"][0][0], found["peer", "decay"][0][0], NEAR)


def test_control_clipping_each_replica_is_another_step(found):
    """Which is what keras.optimizers.Lamb does."""
    clipped = []
    for step in gradients("clip"):
        scaled = [[x * min(1.0, CLIP / model64.grad_norm(g)) for x in g] for g in step]
        clipped.append([a + b for a, b in zip(*scaled)])
    wrong = expected("clip", clipped).p
    helpers.assert_near(found["peer", "clip"][0][0], wrong, NEAR)
    assert max(map(helpers.error, found["ours", "clip"][0][0], wrong)) > 1e-3
    assert any(model64.grad_norm(g) > CLIP for g in summed("clip"))  # it does clip


def test_fit(found):
    values, losses = found["ours", "fit"]
    helpers.assert_near(values, found["one", "fit"][0], NEAR)
    helpers.assert_near(values, found["peer", "fit"][0], 10 * NEAR)  # biases begin at 0, so that their rounding is large beside them
    assert losses == pytest.approx(found["one", "fit"][1], rel=NEAR) and losses[-1] < losses[0]
