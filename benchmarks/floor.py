"""The floor under every step: the time in which the kernels of floor.c move its bytes.

The C file is compiled on the fly; where there is no C compiler, NumPy's copies stand in.
"""

import ctypes
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import numpy as np

BYTES = {"floor-28": 28, "floor-40": 40}  # of an element: one pass over the tensors, and two
_PASSES = {"floor-28": 1, "floor-40": 2}
_DISTANCES = (0, 128, 512)  # floats to prefetch ahead; which is best, differs between processors


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _compile():
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    source = pathlib.Path(__file__).with_name("floor.c")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "floor.so")
        command = [*compiler.split(), "-O3", "-ffast-math", "-march=native", "-shared", "-fPIC", "-pthread"]
        command += [str(source), "-o", library]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        return ctypes.CDLL(library)  # stays loaded after its file is gone


class Floor:
    """Streams over float32 tensors p, g, m, v where they lie in memory, and leaves their values alone."""

    def __init__(self):
        self._library = _compile()
        self._distance = dict.fromkeys(BYTES, 0)

    @property
    def kind(self):
        """What the floor is made of, for the report."""
        if not self._library:
            return "NumPy's copies, 1 thread"
        prefetch = ", ".join(f"{name} prefetches {4 * floats} bytes ahead" if floats else f"{name} does not prefetch"
                             for name, floats in self._distance.items())
        return f"C kernels, {cores()} threads, {prefetch}"

    def tune(self, name, tensors, repeats=5):
        """Chooses the prefetch distance that is best here: a floor has to be as fast as it can be."""
        best = dict.fromkeys(_DISTANCES, math.inf)
        for distance in repeats * _DISTANCES if self._library else ():
            self._distance[name] = distance
            begin = time.perf_counter()
            self.run(name, tensors)
            best[distance] = min(best[distance], time.perf_counter() - begin)
        self._distance[name] = min(best, key=best.get)

    def run(self, name, tensors):
        """Moves the bytes of one step, by `name`: floor-28 or floor-40."""
        if self._library:
            self._library.floor_step(*tensors.pointers, tensors.sizes, ctypes.c_size_t(len(tensors.sizes)),
                                     ctypes.c_int(cores()), ctypes.c_int(_PASSES[name]),
                                     ctypes.c_size_t(self._distance[name]), ctypes.c_float(0))
        else:
            tensors.copy(BYTES[name] / 8)


class Tensors:
    """Where the tensors lie: four lists of addresses (p, g, m, v), and their sizes in elements."""

    def __init__(self, addresses, sizes):
        self.pointers = [(ctypes.c_void_p * len(sizes))(*each) for each in addresses]
        self.sizes = (ctypes.c_size_t * len(sizes))(*sizes)

    def copy(self, times):
        """Copies each tensor onto itself so many times (8 bytes an element), in turn in its four arrays."""
        scratch = np.empty(2**16, np.float32)  # stays in the cache
        for k in range(math.ceil(times)):
            for address, size in zip(self.pointers[k % 4], self.sizes):
                array = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
                end = int(size * min(1, times - k))
                for begin in range(0, end, scratch.size):
                    block = array[begin:min(begin + scratch.size, end)]
                    np.copyto(scratch[:block.size], block)
                    np.copyto(block, scratch[:block.size])
