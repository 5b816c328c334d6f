"""A real run: the demo's BERT, tiny, learns for 200 steps with a peer's LAMB and with ours from one start, on the same batches. And a training that was
killed goes on with the other optimizer."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import helpers
import xla_lamb.keras
from examples import bert_keras, report, settings, text

STEPS = 200
settings.SIZES["tiny"] = settings.Size(layers=1, width=32, heads=2)
UNITS = {"mixed_bfloat16": 2.0**-9, "mixed_float16": 2.0**-11}  # half the distance of neighbours near 1
RUN = settings.Settings("tiny", STEPS, batch=8, length=16, text="", learning_rate=0.02, weight_decay=0.1)


def batches(steps=STEPS):
    corpus = np.frombuffer(text.read(helpers.ROOT / "examples" / "text.py"), np.uint8)
    return [text.batch(corpus, RUN, step) for step in range(steps)]


def ours(*args, **options):
    return xla_lamb.keras.Lamb(*args, **{"variant": "keras", **options})


def compiled(make, policy="float32", **options):
    """The model of the demo at its start, ready for Model.fit."""
    with dtype_policy(policy):
        bert = bert_keras.Bert(RUN)
        inputs = [keras.Input((n,), dtype="int32") for n in (RUN.length, RUN.masked)]
        model = keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(bert(*inputs)))
    named = bert.named()
    for name, value in settings.start(RUN).items():
        named[name].assign(value.reshape(named[name].shape))
    optimizer = make(bert_keras.Schedule(RUN), **{"weight_decay": RUN.weight_decay, **options})
    optimizer.exclude_from_weight_decay(var_list=[v for name, v in named.items() if not settings.decays(name)])
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=50)
    optimizer.build(model.trainable_variables)  # or load_weights would leave it out
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


@contextlib.contextmanager
def dtype_policy(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    yield
    keras.config.set_dtype_policy(before)


def fit(model, batches, after=None):
    """The loss of every batch, in the order given."""
    losses = []

    def begin(batch, logs=None):
        model.reset_metrics()  # or the logs would hold the mean of all losses so far

    def end(batch, logs=None):
        losses.append(logs["loss"])
        if after:
            after(len(losses))

    inputs, places, targets = (np.concatenate(part) for part in zip(*batches))
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)
    model.fit([inputs, places], targets, batch_size=RUN.batch, shuffle=False, verbose=0, callbacks=[watch])
    assert len(losses) == len(batches)
    return np.array(losses, np.float64)


def learns(losses):
    return np.mean(losses[-20:]) < 0.7 * np.mean(losses[:5])


def verdict(a, b):
    curve = lambda losses: {"framework": "", "optimizer": "", "losses": losses}
    return report.verdict(curve(a), curve(b))


@pytest.fixture(scope="module")
def keras_curve():
    return fit(compiled(keras.optimizers.Lamb), batches())


def test_keras(keras_curve):
    """No loss differs by more than one unit in the last place for each step."""
    losses = fit(compiled(ours), batches())
    assert learns(losses) and learns(keras_curve)
    assert verdict(losses, keras_curve)["within"] == "rounding"


def test_control_another_formula_is_another_curve(keras_curve):
    peer = keras_curve[: STEPS // 4]
    losses = fit(compiled(ours, variant="optax"), batches(len(peer)))
    assert np.max(np.abs(losses - peer)) > 100 * verdict(losses, peer)["rounding"]
    assert distance(losses, peer) > UNITS["mixed_bfloat16"]


def distance(losses, peer):
    """Root of the mean squared difference, relative to the largest loss."""
    return np.sqrt(np.mean(np.square(losses - peer))) / np.max(peer)


class Nudged(bert_keras.Schedule):
    """The learning rate, two units in the last place of float32 higher."""

    def __call__(self, step):
        return super().__call__(step) * (1 + 2**-22)


def nudged(schedule, **options):
    return keras.optimizers.Lamb(Nudged(RUN), **options)


@pytest.mark.parametrize("policy, steps", [("mixed_bfloat16", STEPS), ("mixed_float16", STEPS // 4)])
def test_keras_in_mixed_precision(policy, steps):
    """Here the last bit of a float32 weight may decide how its 16 bits are rounded, and so a loss has the error of the 16-bit type: one unit roundoff.
    Some texts drive such runs further apart: then no further than the peer from itself with the last bits of its learning rate changed."""
    train = lambda make: fit(compiled(make, policy), batches(steps))
    curves = [train(make) for make in (ours, keras.optimizers.Lamb)]
    assert steps < STEPS or all(map(learns, curves))
    assert distance(*curves) < UNITS[policy] or distance(*curves) < 2 * distance(train(nudged), curves[1])


# Killed, and gone on with the other ---------------------------------------------------------------------------------------

SAVE_EVERY, KILLED_AFTER, LAST = 3, 10, 24
MAKERS = {"ours": ours, "peer": keras.optimizers.Lamb}


def save(model, path):
    """The weights, the optimizer's among them; whole or not at all."""
    partial = path.with_name("partial.weights.h5")
    model.save_weights(partial)
    os.replace(partial, path)


def train_forever(who, path):
    """In a process of its own, which ends when it is killed."""
    model = compiled(MAKERS[who])

    def after(step):
        if step % SAVE_EVERY == 0 and step <= KILLED_AFTER:
            save(model, Path(path))
        if step == KILLED_AFTER:
            print("ready", flush=True)
            time.sleep(600)

    fit(model, batches(LAST), after)


def start(who, path):
    code = "import conftest, sys; sys.path.append('tests/peers'); import test_real_run; test_real_run.train_forever(*sys.argv[1:])"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(helpers.ROOT), str(helpers.TESTS), *filter(None, sys.path)]))
    return subprocess.Popen([sys.executable, "-c", code, who, str(path)], env=env, cwd=helpers.ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What two trainings left that were killed in the middle: {who: file}."""
    folder = tmp_path_factory.mktemp("killed")
    paths = {who: folder / who / "model.weights.h5" for who in MAKERS}
    for path in paths.values():
        path.parent.mkdir()
    children = [start(who, path) for who, path in paths.items()]
    try:
        assert all(any("ready" in line for line in child.stdout) for child in children)
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
    return paths


@pytest.mark.parametrize("first, second", [("peer", "ours"), ("ours", "peer")])
def test_killed_and_gone_on_with_the_other(killed, keras_curve, first, second):
    model = compiled(MAKERS[second])
    model.load_weights(killed[first])
    done = int(model.optimizer.iterations.numpy())
    assert done == KILLED_AFTER // SAVE_EVERY * SAVE_EVERY
    rest, expected = batches(LAST)[done:], keras_curve[done:LAST]
    assert np.max(np.abs(fit(model, rest) - expected)) <= LAST * 2.0**-23 * np.max(expected)

    # The control: the weights alone are not enough.
    model.load_weights(killed[first])
    for moment in model.optimizer._momentums + model.optimizer._velocities:
        moment.assign(np.zeros(moment.shape))
    assert np.max(np.abs(fit(model, rest) - expected)) > 1e-3
