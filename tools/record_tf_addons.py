"""Records what tensorflow_addons.optimizers.LAMB computes, for the tests of what promises its numbers.

TensorFlow Addons needs Keras 2, so it cannot be installed beside the TensorFlow and the Keras 3 of the other tests. It gets an environment of
its own, with Python 3.9 to 3.11:

    python3.11 -m venv tfa
    tfa/bin/pip install tensorflow==2.15.1 tensorflow-addons==0.23.0 'numpy<2'
    tfa/bin/python tools/record_tf_addons.py

writes everything in tests/data/tf_addons but the README, which says what each file is; `--out DIRECTORY` writes elsewhere, to compare.
On one machine the same arrays come out every time; from machine to machine their last bits may differ.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_addons as tfa  # noqa: E402

OUT = Path(__file__).absolute().parent.parent / "tests" / "data" / "tf_addons"
SEED = 20
STEPS = 50
SNAPSHOTS = (1, 2, 10, 50)

# Names and shapes as in a small BERT. The last two are traps: a tensor of zeros that has gradients, and one that has none to speak of.
VARIABLES = {
    "word_embeddings/embeddings": (11, 4),
    "attention/query/kernel": (4, 2, 3),
    "output/dense/kernel": (6, 5),
    "output/dense/bias": (5,),
    "output/LayerNorm/gamma": (5,),
    "scale": (),
    "zeros/kernel": (3, 3),
    "frozen/kernel": (2, 3),
}

RATE = 0.02
SCHEDULE = {
    "class_name": "PolynomialDecay",
    "config": {"initial_learning_rate": RATE, "decay_steps": 40, "end_learning_rate": 0.001, "power": 1.0, "cycle": False, "name": None},
}
NORMS = ["LayerNorm", "bias"]
CASES = {
    "no_decay": {},
    "decay": {"weight_decay": 0.1},
    "weight_decay_rate": {"weight_decay_rate": 0.1},
    "exclude_from_weight_decay": {"weight_decay": 0.1, "exclude_from_weight_decay": NORMS},
    "both_lists": {"weight_decay": 0.1, "exclude_from_weight_decay": NORMS, "exclude_from_layer_adaptation": ["^output/dense/", "gamma"]},
    "empty_list": {"weight_decay": 0.1, "exclude_from_weight_decay": NORMS, "exclude_from_layer_adaptation": []},
    "only_adaptation": {"weight_decay": 0.1, "exclude_from_layer_adaptation": ["bias"]},
    "end_of_name": {"weight_decay": 0.1, "exclude_from_weight_decay": ["bias:0$", "gamma$"]},
    "schedule": {"learning_rate": SCHEDULE, "weight_decay": 0.1},
    "time_decay": {"decay": 0.5},
    "betas": {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3},
    "clipnorm": {"clipnorm": 0.3, "weight_decay": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.5, "weight_decay": 0.1},
    "clipvalue": {"clipvalue": 0.1, "weight_decay": 0.1},
}


def start_and_gradients():
    """Normal entries; the sizes of gradients change from step to step, so that a wrong moment shows."""
    rng = np.random.default_rng(SEED)
    start = [rng.normal(size=shape).astype(np.float32) for shape in VARIABLES.values()]
    gradients = [
        np.stack([np.asarray(rng.normal(size=shape) * 0.1 * (1 + step % 3)) for step in range(STEPS)]).astype(np.float32)
        for shape in VARIABLES.values()
    ]
    names = list(VARIABLES)
    start[names.index("zeros/kernel")][...] = 0
    gradients[names.index("frozen/kernel")][...] = 0
    return start, gradients


def variables_of(start, dtype=tf.float32):
    return [tf.Variable(tf.cast(x, dtype), name=name) for name, x in zip(VARIABLES, start)]


def optimizer_of(options):
    options = dict({"learning_rate": RATE}, **options)
    if isinstance(options["learning_rate"], dict):
        options["learning_rate"] = tf.keras.optimizers.schedules.deserialize(options["learning_rate"])
    return tfa.optimizers.LAMB(**options)


def flat(arrays):
    return np.concatenate([np.ravel(x) for x in arrays])


def run(options, variables, gradients_of_step, snapshots=SNAPSHOTS):
    """{"p", "m", "v"}: arrays [snapshots, entries of all variables]."""
    optimizer = optimizer_of(options)

    @tf.function
    def step(gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    taken = {"p": [], "m": [], "v": []}
    for t in range(max(snapshots)):
        step(gradients_of_step(t))
        if t + 1 in snapshots:
            taken["p"].append(flat(v.numpy() for v in variables))
            for slot in ("m", "v"):
                taken[slot].append(flat(optimizer.get_slot(v, slot).numpy() for v in variables))
    return {name: np.stack(rows) for name, rows in taken.items()}


def record_steps():
    start, gradients = start_and_gradients()
    arrays = {"start": flat(start), "gradients": np.stack([flat(g[t] for g in gradients) for t in range(STEPS)])}
    for case, options in CASES.items():
        result = run(options, variables_of(start), lambda t: [tf.constant(g[t]) for g in gradients])
        arrays.update({f"{case}/{name}": value for name, value in result.items()})
    meta = {"names": list(VARIABLES), "shapes": list(VARIABLES.values()), "snapshots": SNAPSHOTS, "learning_rate": RATE, "cases": CASES}
    return arrays, meta


def record_sparse():
    """The embedding gets tf.IndexedSlices with repeated indices: row 3 in every step twice, row 10 never."""
    start, gradients = start_and_gradients()
    rng = np.random.default_rng(SEED + 1)
    indices = rng.integers(0, 10, size=(STEPS, 7)).astype(np.int32)
    indices[:, :2] = 3
    values = (rng.normal(size=(STEPS, 7, 4)) * 0.1).astype(np.float32)

    def gradients_of_step(t):
        sparse = tf.IndexedSlices(tf.constant(values[t]), tf.constant(indices[t]), tf.constant([11, 4]))
        return [sparse, *(tf.constant(g[t]) for g in gradients[1:])]

    options = {"weight_decay": 0.1, "exclude_from_weight_decay": NORMS}
    return {"indices": indices, "values": values, **run(options, variables_of(start), gradients_of_step)}, {"options": options}


def record_sixteen_bits():
    """16-bit variables get 16-bit slots and 16-bit arithmetic, in which 0.999 is 1 in bfloat16. Kept as float32, which holds both types."""
    start, gradients = start_and_gradients()
    arrays = {}
    for dtype in (tf.float16, tf.bfloat16):
        result = run({}, variables_of(start, dtype), lambda t: [tf.cast(g[t], dtype) for g in gradients], (1, 2, 10))
        arrays.update({f"{dtype.name}/{name}": value.astype(np.float32) for name, value in result.items()})
    return arrays, {"snapshots": (1, 2, 10)}


def tiny_model():
    """Every kind of variable that a checkpoint of BERT has: a table, kernels, biases, LayerNorm's gain and offset."""
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(12, 4, input_length=3, name="embedding"),
            tf.keras.layers.Flatten(name="flatten"),
            tf.keras.layers.LayerNormalization(name="norm"),
            tf.keras.layers.Dense(5, activation="tanh", name="dense"),
            tf.keras.layers.Dense(2, name="head"),
        ],
        name="tiny",
    )


RUN_OPTIONS = {
    "learning_rate": RATE,
    "weight_decay": 0.1,
    "exclude_from_weight_decay": ["norm", "bias"],
    "exclude_from_layer_adaptation": ["bias"],
}


def record_run(out):
    """Five steps, a checkpoint and an .h5 file; five more steps that whoever loads one of them must be able to repeat."""
    tf.keras.utils.set_random_seed(SEED)
    rng = np.random.default_rng(SEED + 2)
    x = rng.integers(0, 12, size=(10, 6, 3)).astype(np.int32)
    y = rng.normal(size=(10, 6, 2)).astype(np.float32)
    model = tiny_model()
    optimizer = tfa.optimizers.LAMB(**RUN_OPTIONS)
    model.compile(optimizer, loss="mse")
    arrays = {"x": x, "y": y}

    def note(moment):
        for v in model.trainable_variables:
            arrays[f"{moment}/p/{v.name}"] = v.numpy()
            if moment != "start":
                arrays[f"{moment}/m/{v.name}"] = optimizer.get_slot(v, "m").numpy()
                arrays[f"{moment}/v/{v.name}"] = optimizer.get_slot(v, "v").numpy()

    note("start")
    for t in range(10):
        model.train_on_batch(x[t], y[t])
        if t == 4:
            note("middle")
            # Saved elsewhere first: the state file `checkpoint` would hold a path of this machine.
            with tempfile.TemporaryDirectory() as directory:
                prefix = tf.train.Checkpoint(model=model, optimizer=optimizer).write(os.path.join(directory, "run.ckpt"))
                for path in Path(directory).glob(Path(prefix).name + ".*"):
                    (out / path.name).write_bytes(path.read_bytes())
            model.save(out / "run.h5", save_format="h5", include_optimizer=True)
    note("end")
    return arrays, {"options": RUN_OPTIONS, "names": [v.name for v in model.trainable_variables]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=OUT, help="directory (default: tests/data/tf_addons)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    provenance = {
        "recorded by": "tools/record_tf_addons.py",
        "seed": SEED,
        "tensorflow": tf.__version__,
        "tensorflow_addons": tfa.__version__,
        "keras": __import__("keras").__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    recorded = {"steps": record_steps(), "sparse": record_sparse(), "sixteen_bits": record_sixteen_bits(), "run": record_run(out)}
    for name, (arrays, meta) in recorded.items():
        np.savez_compressed(out / f"{name}.npz", meta=json.dumps(dict(meta, provenance=provenance)), **arrays)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:8,d} {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
