"""Checkpoints of LAMB from one framework into another: parameters, both moments and the number of steps.

    state.py       Checkpoint: the state apart from any framework; how tensors are matched
    files.py       files that appear whole or not at all
    optax.py       optax: an Orbax checkpoint
    keras.py       keras: a .keras or .weights.h5 file of Keras 3
    tf_addons.py   tf_addons: TensorFlow Addons, TF Models: a TensorFlow checkpoint's prefix, or an .h5 file of Keras 2
    apex.py        apex, timm: a .safetensors, .pt or .pth file of PyTorch

Importing this package imports no framework; a format imports its own when it is used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from xla_lamb.checkpoints import files
from xla_lamb.checkpoints.state import Checkpoint, CheckpointError, Report, clearly, match

FORMATS = ("optax", "keras", "tf_addons", "apex")
_LAZY = {f"{direction}_{format}": format for direction in ("from", "to") for format in FORMATS}

__all__ = ["Checkpoint", "CheckpointError", "FORMATS", "Report", "convert", "match", "read", "write", *_LAZY]


def read(path: Any, format: str, *, like: Any = None) -> Checkpoint:
    """Reads a checkpoint.

    Args:
      path: what the table above says; an Orbax checkpoint may hold the state anywhere, in a TrainState for instance.
      format: one of `FORMATS`.
      like: only for a .weights.h5 file of Keras: a .keras file of the same model, which gives names and parameters.

    Raises:
      CheckpointError: if there is no LAMB state in it, or it cannot be read; FileNotFoundError; ImportError for a package that it takes.
    """
    module, path = _module(format), Path(path)
    if not files.standing(path) and not (format == "tf_addons" and files.standing(path, prefix=True)):
        raise FileNotFoundError(f"there is no {path}")
    if like is not None and format != "keras":
        raise CheckpointError(f"only a .weights.h5 file takes names from another file, not one of format {format!r}")
    with clearly(f"cannot read {path} as {format}"):
        return module.read(path) if like is None else module.read(path, _existing(like, format))


def write(
    checkpoint: Checkpoint, path: Any, format: str, *, like: Any = None, names: Any = None, by_position: bool = False, force: bool = False
) -> Report:
    """Writes a checkpoint, whole or not at all.

    Args:
      path: the new file, directory or prefix.
      format: one of `FORMATS`.
      like: a checkpoint of the target, of which everything is kept but the state of LAMB. keras and tf_addons need one, since they have much
        beside it. optax: without one, {"params", "opt_state"} as of ``optax.lamb(0.1).init(params)``. apex: without one, a single
        parameter group.
      names, by_position: how tensors are matched, as in `match`; without them by name.
      force: replaces what is there.

    Raises:
      CheckpointError: if the tensors do not match or the target does not fit; FileExistsError without `force`; FileNotFoundError;
        ImportError.
    """
    module, path = _module(format), Path(path)
    prefix = format == "tf_addons" and module.is_prefix(path)
    files.check(path, force, prefix)
    like = None if like is None else _existing(like, format)
    with files.replacing(path, force, prefix) as new, clearly(f"cannot write {path} as {format}"):
        report = module.write(checkpoint, new, like, names, by_position)
    report.target = f"{path} ({format})"
    return report


def convert(
    source: Any,
    target: Any,
    source_format: str,
    target_format: str,
    *,
    like: Any = None,
    source_like: Any = None,
    names: Any = None,
    by_position: bool = False,
    force: bool = False,
) -> Report:
    """Reads one checkpoint and writes another: `read` with `source_like`, `write` with `like` and the rest.

    Returns:
      Report: how tensors were matched, and a sentence for each thing that was not carried over.

    Example:
      >>> from xla_lamb import checkpoints
      >>> report = checkpoints.convert("run.keras", "run", "keras", "optax")          # doctest: +SKIP
      >>> print(report.text())                                                       # doctest: +SKIP
    """
    module = _module(target_format)
    files.check(Path(target), force, target_format == "tf_addons" and module.is_prefix(Path(target)))  # before the work
    report = write(
        read(source, source_format, like=source_like), target, target_format, like=like, names=names, by_position=by_position, force=force
    )
    report.source = f"{source} ({source_format})"
    return report


def _module(format: str):
    if format not in FORMATS:
        raise CheckpointError(f"unknown format {format!r}; there are {', '.join(FORMATS)}")
    with clearly(f"cannot use format {format}"):
        return importlib.import_module(f"xla_lamb.checkpoints.{format}")


def _existing(path: Any, format: str) -> Path:
    path = Path(path)
    if not files.standing(path) and not (format == "tf_addons" and files.standing(path, prefix=True)):
        raise FileNotFoundError(f"there is no {path}")
    return path


def __getattr__(name):
    if name in _LAZY:
        return getattr(_module(_LAZY[name]), name)
    raise AttributeError(f"module 'xla_lamb.checkpoints' has no attribute {name!r}")
