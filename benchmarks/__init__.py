"""Benchmarks of the optimizer step.

Commands:
    step.py    the step against its peers and the floor of memory: `python -m benchmarks.step`
    hlo.py     what XLA's compilers for GPUs make of a step, without a GPU: `python -m benchmarks.hlo`
    gpu.py     correctness and speed on a bare machine with a GPU: `python -m benchmarks.gpu`

Parts of them:
    sets.py             the sets of tensors that are stepped
    worker.py           one process for each framework, which measures contenders_jax.py or contenders_tensorflow.py
    floor.py            the least time that memory allows, measured by the kernels in floor.c
    process.py          memory of this process, and a quiet standard error
    build_bare.py       builds the library with nvcc and g++ where there is no Bazel
    gpu_checks.py       what gpu.py checks; gpu_speed.py: what it measures
    bare_optax.py       what xla_lamb needs of optax, where there is none
"""
