"""Benchmarks of the optimizer step.

    step.py      the command: `python -m benchmarks.step`
    sets.py      the sets of tensors that are stepped
    workers.py   the contenders, one process for each framework
    floor.py     the least time that memory allows, measured by the kernels in floor.c
    process.py   memory of this process, and a quiet standard error
"""
