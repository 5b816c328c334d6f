"""Pretrains a small BERT on masked bytes, in JAX and in Keras, each with xla_lamb and with the framework's own LAMB.

    python -m examples.pretrain
    python -m examples.pretrain --text ~/books --steps 2000
    python -m examples.pretrain --model bert-large --batch 8 --length 128 --framework jax

All trainings have the same start and see the same batches. A run that was killed goes on where it stopped when
the same command is given again; one that had come to its end starts afresh.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

from examples import checkpoint, report, text
from examples.settings import SIZES, Settings
from examples.train import NAMES


def arguments(given=None):
    parser = argparse.ArgumentParser(prog="python -m examples.pretrain", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)

    def positive(kind):
        def convert(given):
            value = kind(given)
            if not value > 0:
                raise argparse.ArgumentTypeError(f"must be more than 0, not {given}")
            return value
        convert.__name__ = kind.__name__
        return convert

    parser.add_argument("--model", choices=SIZES, default="small", help="size of the model (%(default)s)")
    parser.add_argument("--text", metavar="PATH", help="file or folder to train on (Python's standard library)")
    parser.add_argument("--framework", choices=("jax", "keras", "both"), default="both", help="(%(default)s)")
    parser.add_argument("--steps", type=positive(int), default=200, help="steps of each training (%(default)s)")
    parser.add_argument("--batch", type=positive(int), default=16, help="sequences in a batch (%(default)s)")
    parser.add_argument("--length", type=positive(int), default=32, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--learning-rate", type=positive(float), default=0.01, help="highest rate (%(default)s)")
    parser.add_argument("--checkpoint-every", type=positive(int), default=50, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo_output"), metavar="FOLDER",
                        help="where results and checkpoints go (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="discard what an unfinished run has left")
    return parser.parse_args(given)


@contextlib.contextmanager
def locked(folder):
    """Keeps a second run out of the folder; the system lets go of it however this one ends."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run is at work in {folder}; wait for it or choose another --out")
        yield


def open_run(options, corpus):
    """Takes up the unfinished run in the folder, or begins a new one. Returns its description."""
    folder, described = options.out, options.out / "run.json"
    settings = Settings(options.model, options.steps, options.batch, options.length, hashlib.sha256(corpus).hexdigest(),
                        options.learning_rate)
    try:
        found = json.loads(described.read_text())
    except (OSError, ValueError):
        found = None
    wanted = {"settings": vars(settings), "framework": options.framework}
    if found and not found["finished"] and not options.fresh:
        if {key: found[key] for key in wanted} == wanted:
            print(f"Going on with the unfinished run in {folder}.")
            return found
        different = [key for key in wanted["settings"] if found["settings"].get(key) != wanted["settings"][key]]
        different += ["framework"] * (found["framework"] != wanted["framework"])
        sys.exit(f"{folder} holds an unfinished run of other settings ({', '.join(different)}). "
                 "Discard it with --fresh, or choose another --out.")
    for name in NAMES:
        for suffix in (".npz", ".json", ".npz.partial", ".json.partial"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    run = {**wanted, "checkpoint_every": options.checkpoint_every, "finished": False}
    checkpoint.save_json(described, run)
    return run


def train(folder, name):
    """One training in a process of its own. Returns its results; those of an earlier process where it had finished."""
    results = folder / f"{name}.json"
    if not results.exists():
        # Whatever ends this process closes the pipe, and that ends the child.
        child = subprocess.Popen([sys.executable, "-m", "examples.train", str(folder.resolve()), name],
                                 stdin=subprocess.PIPE, cwd=pathlib.Path(__file__).parent.parent)
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
            print("\nStopped. The same command goes on from the last checkpoint.", file=sys.stderr)
            sys.exit(130)
        if status:
            why = f"signal {-status}" if status < 0 else f"status {status}"
            sys.exit(f"The training {name} ended with {why}. The same command goes on from its last checkpoint.")
    return json.loads(results.read_text())


def main(given=None):
    options = arguments(given)
    began = time.monotonic()
    try:
        corpus = text.read(options.text, least=options.batch * options.length, skip=options.out)
    except text.TextError as error:
        sys.exit(f"--text: {error}" if options.text else str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    with locked(options.out):
        run = open_run(options, corpus)
        (options.out / "corpus.bin").write_bytes(corpus)  # what every training reads
        size = SIZES[options.model]
        print(f"BERT of {size.layers} layers of {size.width}, {options.steps} steps of {options.batch} x {options.length} "
              f"bytes, from {len(corpus):,} bytes of text.", flush=True)
        results = [train(options.out, name) for name in NAMES if options.framework in ("both", name.split("-")[0])]
        summary = report.summary(run["settings"], results)
        picture = options.out / "pretrain.png"
        report.draw(summary, picture)
        checkpoint.save_json(options.out / "pretrain.json", summary)
        checkpoint.save_json(options.out / "run.json", {**run, "finished": True})
    print(f"\n{report.table(summary)}\n")
    for verdict in summary["verdicts"]:
        print(verdict["sentence"])
    print(f"\nPicture: {os.path.relpath(picture)}   figures: {os.path.relpath(options.out / 'pretrain.json')}   "
          f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
