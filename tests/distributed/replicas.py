"""One small problem and the ways to train it on the replicas of a tf.distribute strategy, for the tests beside this file.

A linear model with an embedding and the mean square error. A replica's loss is the sum over its own examples by the number of all, so that gradients have to be summed.
"""

import numpy as np

import helpers
import model64

STEPS, EXAMPLES, ROWS = 5, 8, 6
SHAPES = [(4, 3), (3,), (ROWS, 3)]
# An epsilon so large that elements whose gradients nearly cancel out do not magnify rounding, and that the scale of a gradient shows.
EPSILON, RATE = 1e-1, 1e-1
CLIP, DECAY, MOMENTUM = 0.5, 0.1, 0.75
SCALE, NAN = 2.0**10, (1,)  # the initial loss scale; the steps in which one replica has a NaN
NOT_FINITE = ("scaling", "clip and scaling", "everything", "everything, Adam")
NEAR = 2e-6  # sums over the examples in another order, of float32, for a few steps


def start():
    return helpers.tree(SHAPES, seed=1, scale=0.5)


def batch(step, nan=False):
    """(features, rows of the embedding, targets); with `nan` there is one in the last example."""
    rng = np.random.default_rng(10 + step)
    x, y = (rng.normal(size=(EXAMPLES, n)).astype(np.float32) for n in (4, 3))
    if nan:
        x[-1, 0] = np.nan
    return x, rng.integers(0, ROWS, EXAMPLES).astype(np.int32), y


def part(arrays, replica, replicas):
    """The replica's examples."""
    size = EXAMPLES // replicas
    return tuple(a[replica * size : (replica + 1) * size] for a in arrays)


def gradients(params, batch):
    """In float64, of the examples in the batch alone."""
    w, b, e = (np.asarray(p, np.float64) for p in params)
    x, rows, y = batch
    error = 2 / EXAMPLES * (x.astype(np.float64) @ w + b + e[rows] - y)
    table = np.zeros(SHAPES[2])
    np.add.at(table, rows, error)
    return [x.T.astype(np.float64) @ error, error.sum(0), table]


def loss_of(variables, x, rows, y, each=False):
    """The replica's part of the loss, or `each` example's."""
    import tensorflow as tf

    w, b, e = variables
    squares = (tf.matmul(x, w) + b + tf.gather(e, rows) - y) ** 2
    return tf.reduce_sum(squares, axis=1) if each else tf.reduce_sum(squares) / EXAMPLES


# The ways to take a step in replica context: (optimizer, variables, loss as a function of nothing).


def minimize(optimizer, variables, loss):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss()
    optimizer.minimize(value, variables, tape)


def two_calls(optimizer, variables, loss):
    optimizer.apply_gradients(optimizer.compute_gradients(loss, variables))


def aggregated_before(optimizer, variables, loss):
    pairs = list(optimizer.compute_gradients(loss, variables, aggregate=True))
    optimizer.apply_gradients(pairs, aggregate=False)


def by_scale_loss(optimizer, variables, loss):
    """As Model.fit does."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = optimizer.scale_loss(loss())
    optimizer.apply(tape.gradient(value, variables), variables)


def compiled_gradients(optimizer, variables, loss):
    """Steps 1 to 3 compiled by XLA in the replica. Steps that talk to the others cannot be, says TensorFlow."""
    import tensorflow as tf

    grads = tf.function(lambda: [g for g, _ in optimizer.compute_gradients(loss, variables)], jit_compile=True)()
    optimizer.apply_gradients(zip(grads, variables))


def distributed(strategy, arrays):
    import tensorflow as tf

    parts = lambda c: [tf.constant(a) for a in part(arrays, c.replica_id_in_sync_group, c.num_replicas_in_sync)]
    n = len(arrays)
    return [strategy.experimental_distribute_values_from_function(lambda c, i=i: parts(c)[i]) for i in range(n)]


def local(strategy, variables):
    """[replica][variable] arrays."""
    import keras

    values = [strategy.experimental_local_results(v.value if isinstance(v, keras.Variable) else v) for v in variables]
    return [[np.asarray(v[k if len(v) > 1 else 0]) for v in values] for k in range(max(map(len, values)))]


def train(strategy, make, how=minimize, nan=(), steps=STEPS, eager=False, after=None):
    """Trains, with a NaN in the steps `nan`: (what each replica has then, and what `after(optimizer)` gave after each step; the optimizer)."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        variables = [keras.Variable(p, name=n) for p, n in zip(start(), "wbe")]
        optimizer = make()
        optimizer.build(variables)

    def replica(*arrays):
        how(optimizer, variables, lambda **kwargs: loss_of(variables, *arrays, **kwargs))

    step = lambda *arrays: strategy.run(replica, args=arrays)
    step = step if eager else tf.function(step, autograph=False)
    seen = []
    for i in range(steps):
        step(*distributed(strategy, batch(i, i in nan)))
        seen.append(after(optimizer) if after else None)
    found = dict(values=local(strategy, variables), state=local(strategy, optimizer.variables), iterations=int(optimizer.iterations.numpy()), after=seen)
    return found, optimizer


def fit(strategy, make, own=False):
    """(variables of each replica, optimizer's variables of each replica, losses) of Model.fit."""
    import keras

    from xla_lamb import minimize

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)).astype(np.float32), rng.normal(size=(32, 3)).astype(np.float32)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
        model = (minimize.Model if own else keras.Model)(inputs, keras.layers.Dense(3)(hidden))
        # TensorFlow cannot compile a function that a strategy runs; the fused step inside is compiled all the same.
        model.compile(make(), "mse", jit_compile=False)
    losses = model.fit(x, y, batch_size=EXAMPLES, epochs=2, shuffle=False, verbose=0).history["loss"]
    return local(strategy, model.trainable_variables), local(strategy, model.optimizer.variables), losses


def optimizers():
    """{name: function that makes it}"""
    import keras
    import tensorflow as tf

    from xla_lamb import minimize
    from xla_lamb.keras import Lamb

    def lamb():
        return Lamb(RATE, epsilon=EPSILON)

    def sgd():
        return keras.optimizers.SGD(RATE)

    def all_reduce(grads_and_vars):
        total = tf.distribute.get_replica_context().all_reduce("SUM", [g for g, _ in grads_and_vars])
        return list(zip(total, grads_and_vars.variables))

    def clip_here(grads_and_vars):
        grads, _ = tf.clip_by_global_norm([g for g, _ in grads_and_vars], CLIP)
        return list(zip(grads, grads_and_vars.variables))

    def twice():
        optimizer = minimize.OptimizerWrapper(sgd())
        del optimizer.inner._all_reduce_sum_gradients  # by which it knows that they are summed up
        return optimizer

    def everything(inner):
        averaged = minimize.MovingAverage(minimize.StochasticWeightAveraging(minimize.Lookahead(inner, 2), 1, 1), MOMENTUM)
        decayed = minimize.DecoupledWeightDecay(averaged, DECAY, ["w"])
        return minimize.LossScaling(minimize.GradientAccumulation(minimize.ClipByGlobalNorm(decayed, CLIP), 2), SCALE)

    guests = {
        "SGD": sgd,
        "Adam": lambda: keras.optimizers.Adam(RATE, epsilon=EPSILON),
        "AdamW": lambda: keras.optimizers.AdamW(RATE, DECAY, epsilon=EPSILON),
    }
    made = {
        "lamb": lambda: minimize.OptimizerWrapper(lamb()),
        "clip": lambda: minimize.ClipByGlobalNorm(lamb(), CLIP),
        "clip here": lambda: minimize.OptimizerWrapper(lamb(), transform_unaggregated_gradients=clip_here),
        "scaling": lambda: minimize.LossScaling(lamb(), SCALE),
        "clip and scaling": lambda: minimize.LossScaling(minimize.ClipByGlobalNorm(lamb(), CLIP), SCALE),
        "accumulation": lambda: minimize.GradientAccumulation(lamb(), 2),
        "decay": lambda: minimize.DecoupledWeightDecay(lamb(), DECAY, ["w"]),
        "average": lambda: minimize.MovingAverage(lamb(), MOMENTUM),
        "swa": lambda: minimize.StochasticWeightAveraging(lamb(), 1, 2),
        "lookahead": lambda: minimize.Lookahead(lamb(), 2),
        "everything": lambda: everything(lamb()),
        "everything, Adam": lambda: everything(guests["Adam"]()),
        "mean": lambda: minimize.OptimizerWrapper(sgd(), aggregate_gradients="mean"),
        "function": lambda: minimize.OptimizerWrapper(sgd(), aggregate_gradients=all_reduce),
        "twice": twice,
        "private": lambda: minimize.DifferentialPrivacy(sgd(), CLIP, 0.0),
    }
    return {**made, **{name: lambda make=make: minimize.OptimizerWrapper(make()) for name, make in guests.items()}}, guests


def expected(case, n=1):
    """The variables after all steps in float64."""
    rules = model64.PRESETS["optax"].replace(eps=EPSILON, max_grad_norm=CLIP if case in ("clip", "clip and scaling") else None)
    state = model64.init(start())
    waiting = []
    for step in range(STEPS):
        examples = batch(step, case in NOT_FINITE and step in NAN)
        grads = gradients(state.p, examples)
        if case == "clip here":
            parts = [gradients(state.p, part(examples, k, n)) for k in range(n)]
            grads = [sum(g) for g in zip(*(clipped(part, CLIP) for part in parts))]
        if case == "private":
            parts = [gradients(state.p, part(examples, k, EXAMPLES)) for k in range(EXAMPLES)]
            grads = [sum(g) for g in zip(*(clipped(part, CLIP / EXAMPLES) for part in parts))]
        if case in ("mean", "function", "private", "twice", "SGD"):
            factor = {"mean": 1 / n, "twice": n}.get(case, 1)
            state.p = [p - RATE * factor * g for p, g in zip(state.p, grads)]
            continue
        waiting.append(grads)
        if case == "accumulation" and len(waiting) < 2:
            continue
        mean = [sum(g) / len(waiting) for g in zip(*waiting)]
        state, waiting = model64.step(state, mean, rules, RATE, nonfinite="skip")[0], []
    return state.p


def clipped(grads, limit):
    return [g * min(1.0, limit / model64.grad_norm(grads)) for g in grads]
