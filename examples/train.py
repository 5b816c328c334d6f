"""One training, in a process of its own, so that its memory and its compilations are its own.

`python -m examples.train FOLDER NAME` trains as FOLDER/run.json says; pretrain.py starts it.
"""

import json
import os
import pathlib
import statistics
import sys
import threading
import time

import numpy as np
from tqdm import tqdm

from benchmarks import process
from examples import checkpoint, text
from examples.settings import Settings

NAMES = ("jax-xla_lamb", "jax-peer", "keras-xla_lamb", "keras-peer")  # in the order in which they run


def training(name, settings):
    """The training of that name, and the name of its optimizer."""
    framework, optimizer = name.split("-")
    if framework == "jax":
        from examples import bert_jax as module
    else:
        from examples import bert_keras as module
    fused = optimizer == "xla_lamb"
    return module.Training(settings, fused), "xla_lamb" if fused else module.PEER


def medians(parts, seconds=4.0, least=5, most=25):
    """Median time of each part in seconds. They take turns, so that a slow moment meets them alike."""
    times = {name: [] for name in parts}
    for part in parts.values():
        part()  # compiles
    end = time.perf_counter() + seconds
    for number in range(most):
        if number >= least and time.perf_counter() > end:
            break
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def follow_parent():
    """Ends this process when the one that started it has gone, however it went: it holds our standard input open."""

    def wait():
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(folder, name):
    follow_parent()
    folder = pathlib.Path(folder)
    run = json.loads((folder / "run.json").read_text())
    settings = Settings(**run["settings"])
    corpus = np.memmap(folder / "corpus.bin", np.uint8, "r")
    saved_at = folder / f"{name}.npz"

    model, optimizer = training(name, settings)
    losses, peak = [], 0
    saved = checkpoint.load(saved_at)
    if saved:
        arrays, progress = saved
        model.restore(arrays)
        losses, peak = progress["losses"], progress["peak_bytes"]
        del arrays, saved

    def save():
        checkpoint.save(saved_at, model.arrays(), {"step": len(losses), "seed": settings.seed, "losses": losses,
                                                   "peak_bytes": peak, "settings": run["settings"]})

    first_step = None
    label = f"{name.split('-')[0]:5} {optimizer:20}"
    with tqdm(total=settings.steps, initial=len(losses), desc=label, unit="step", file=sys.stderr,
              mininterval=0.2 if sys.stderr.isatty() else 10) as bar:
        while len(losses) < settings.steps:
            begin = time.perf_counter()
            losses.append(model.step(text.batch(corpus, settings, len(losses))))
            first_step = first_step or time.perf_counter() - begin
            peak = max(peak, process.peak())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
            if len(losses) % run["checkpoint_every"] == 0 or len(losses) == settings.steps:
                save()

    batch = text.batch(corpus, settings, settings.steps)
    checkpoint.save_json(folder / f"{name}.json", {
        "name": name, "framework": {"jax": "JAX", "keras": "Keras"}[name.split("-")[0]], "optimizer": optimizer,
        "path": model.path(batch), "losses": losses, "seconds": medians(model.parts(batch)), "peak_bytes": peak,
        "first_step_s": first_step})


if __name__ == "__main__":
    main(*sys.argv[1:])
