"""What a measurement has to know of its own process: memory, and a quiet standard error."""

import contextlib
import os
import re
import resource
import sys


def _status(field):
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{field}:\s+(\d+) kB", file.read(), re.M)[1]) * 1024


def resident():
    """Bytes in memory now; None where the system has no /proc."""
    try:
        return _status("VmRSS")
    except OSError:
        return None


def peak():
    """The most bytes in memory since the start, or since `reset_peak`."""
    try:
        return _status("VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak():
    """Counts the peak from here on. False where the system does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


@contextlib.contextmanager
def quiet():
    """Drops what is written to standard error, also by C++: TensorFlow greets there whatever its log level."""
    sys.stderr.flush()
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
