"""The text, and batches of masked bytes."""

import pathlib
import sysconfig

import numpy as np

from examples.settings import MASK

LIMIT = 256 * 2**20  # bytes of text that are read at most


class TextError(Exception):
    """There is no text to train on; the message says why."""


def _standard_library():
    """The sources of Python's standard library and the license texts that come with it and with the system."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    sources = [path for path in sorted(library.rglob("*.py")) if not skipped & set(path.relative_to(library).parts)]
    return sources + sorted(library.glob("LICENSE*")) + sorted(pathlib.Path("/usr/share/common-licenses").glob("*"))


def _files(path):
    if path is None:
        return _standard_library()
    path = pathlib.Path(path)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    if not path.exists():
        raise TextError(f"there is no file or folder {str(path)!r}")
    return [path]


def read(path=None, least=1, skip=None):
    """All text of a file or a folder (None: the standard library) as bytes; at least `least` of them.

    In a folder, hidden files, binary files, files that cannot be read and the folder `skip` are passed over.
    """
    pieces, size = [], 0
    for file in _files(path):
        if skip is not None and file.resolve().is_relative_to(skip.resolve()):
            continue  # what earlier runs wrote is no text
        try:
            with open(file, "rb") as opened:
                piece = opened.read(LIMIT - size) if file.is_file() else b""
        except OSError as error:
            if path is not None and pathlib.Path(path) == file:
                raise TextError(f"cannot read {str(path)!r}: {error.strerror}") from error
            continue
        if b"\0" in piece[:4096]:  # binary
            continue
        pieces.append(piece)
        size += len(piece)
        if size >= LIMIT:
            break
    where = "the standard library" if path is None else repr(str(path))
    if size == 0:
        raise TextError(f"{where} holds no text")
    if size < least:
        raise TextError(f"{where} holds {size:,} bytes of text, too little: one batch alone takes {least:,}")
    return b"".join(pieces)


def batch(text, settings, step):
    """The batch of a step: (bytes with masks, places of the masked bytes, the bytes that were there), int32.

    It follows from seed and step alone, so that a resumed training draws the very batches it would have drawn.
    As in BERT, of the bytes to guess 80 % are masked, 10 % are replaced by another and 10 % stay.
    """
    random = np.random.default_rng((settings.seed, step))
    begins = random.integers(0, len(text) - settings.length, settings.batch, endpoint=True)
    inputs = np.stack([text[begin:begin + settings.length] for begin in begins]).astype(np.int32)
    places = np.argsort(random.random(inputs.shape), axis=1)[:, :settings.masked].astype(np.int32)
    targets = np.take_along_axis(inputs, places, axis=1)
    fate = random.random(places.shape)
    shown = np.where(fate < 0.8, MASK, np.where(fate < 0.9, random.integers(0, 256, places.shape), targets))
    np.put_along_axis(inputs, places, shown.astype(np.int32), axis=1)
    return inputs, places, targets
