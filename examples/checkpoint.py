"""Checkpoints that a kill cannot spoil: each is written beside its place and then renamed into it."""

import json
import os

import numpy as np


def _replace(path, write):
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())  # or the rename could reach the disk before the data
    os.replace(temporary, path)


def save(path, arrays, progress):
    """Writes {name: array} and `progress`, whatever JSON can hold, as one file."""
    _replace(path, lambda file: np.savez(file, **arrays, __progress__=np.array(json.dumps(progress))))


def load(path):
    """What `save` wrote: (arrays, progress); None if there is no checkpoint."""
    if not path.exists():
        return None
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("__progress__")))


def save_json(path, value):
    """Writes JSON, whole or not at all."""
    _replace(path, lambda file: file.write(json.dumps(value, indent=1).encode()))
