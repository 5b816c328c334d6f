"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterator


def standing(path: Path, prefix: bool = False) -> list[Path]:
    """What is there under that name: one file or directory, or, for a prefix, the files of a TensorFlow checkpoint."""
    if not prefix:
        return [path] if os.path.lexists(path) else []
    if not path.parent.is_dir():
        return []
    # The index first: without it the rest is no checkpoint.
    return sorted((p for p in path.parent.iterdir() if _belongs(p.name, path.name)), key=lambda p: (p.suffix != ".index", p.name))


def _belongs(name: str, prefix: str) -> bool:
    return name == f"{prefix}.index" or name.startswith(f"{prefix}.data-")


def check(path: Path, force: bool, prefix: bool = False) -> None:
    """Raises if `path` cannot be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} into")
    if (there := standing(path, prefix)) and not force:
        raise FileExistsError(f"{there[0]} exists: choose another name, or --force (force=True) to replace it")


@contextlib.contextmanager
def replacing(path: Path, force: bool, prefix: bool = False) -> Iterator[Path]:
    """Yields the path to write to, in a new directory beside `path`; moves what was written into place at the end, and removes it on errors.

    One file replaces another atomically. Directories and checkpoints of several files cannot: what was there is moved aside, then the new
    one moved in. Whoever is killed in between finds what is missing in the hidden directory, `.NAME.partial-...`; under `path` there is
    never a mixture that looks like a checkpoint.

    Raises:
      FileExistsError, FileNotFoundError: as `check`.
    """
    check(path, force, prefix)
    workshop = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    new, old = workshop / "new", workshop / "old"
    new.mkdir(), old.mkdir()
    done = False
    try:
        yield new / path.name
        _sync(new)
        _swap(path, new, old, standing(path, prefix))
        done = True
    finally:
        if done or not any(old.iterdir()):  # else even moving back failed, and there is no other copy
            shutil.rmtree(workshop, ignore_errors=True)


def _swap(path: Path, new: Path, old: Path, there: list[Path]) -> None:
    made = sorted(new.iterdir(), key=lambda p: (p.suffix == ".index", p.name))
    if len(made) == 1 and made[0].is_file() and all(p.is_file() for p in there) and len(there) <= 1:
        os.replace(made[0], path)
        return
    placed = []
    try:
        for p in there:
            os.rename(p, old / p.name)
        for p in made:
            os.rename(p, path.parent / p.name)
            placed.append(p)
    except BaseException:
        for p in reversed(placed):
            os.rename(path.parent / p.name, p)
        for p in reversed(there):
            if (old / p.name).exists():
                os.rename(old / p.name, p)
        raise


def _sync(directory: Path) -> None:
    # Or the renames could reach the disk before the data.
    for parent, _, names in os.walk(directory):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
