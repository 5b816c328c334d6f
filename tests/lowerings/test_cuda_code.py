"""The machine code of the CUDA kernels in the library: nothing spilled, few enough registers for the blocks that policy.h counts on, and
accesses of 16 bytes. Read with NVIDIA's cuobjdump, which needs no GPU."""

import collections
import functools
import os
import re
import subprocess

import pytest

import compilers
from xla_lamb import library

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
PARTS, KINDS = ["step", "moments", "apply"], ["float32", "mixed", "halves", "float64"]
SIZES = [400, 48]  # tensors of a launch, and of one that a CUDA graph records
STEPS = [f"{part} {kind} {size}" for part in PARTS for kind in KINDS for size in SIZES]
NORMS = [f"norm {kind} {size}" for kind in ("halves", "float32", "float64") for size in SIZES]


def cuobjdump(*arguments):
    folder = compilers.COMPILERS / "nvidia" / "cu13" / "bin"
    assert (folder / "cuobjdump").exists(), f"there is no cuobjdump in {folder}: run `make venv`"
    environment = dict(os.environ, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")  # it calls nvdisasm
    run = subprocess.run([folder / "cuobjdump", *arguments, library.load().path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def kernel(mangled):
    """"step float32 400" or "norm halves 48" of a kernel's name in the object code."""
    found = re.search(r"StepKernelILNS_4PartE(\d)ELNS0_4KindE(\d)ELi(\d+)E", mangled)
    if found:
        return f"{PARTS[int(found[1])]} {KINDS[int(found[2])]} {found[3]}"
    found = re.search(r"NormKernelI[fd]Li(\d)ELi(\d+)E", mangled)
    return f"norm {({'8': 'halves', '4': 'float32', '2': 'float64'})[found[1]]} {found[2]}"


@functools.cache
def resources():
    """{architecture: {kernel: {"REG": registers of a thread, "STACK": bytes, "LOCAL": bytes}}}"""
    found = collections.defaultdict(dict)
    for line in cuobjdump("-res-usage").splitlines():
        if line.startswith("arch ="):
            architecture = line.split()[-1]
        elif line.startswith(" Function "):
            name = kernel(line)
        elif " REG:" in line and "Common" not in line:
            found[architecture][name] = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}
    return found


@functools.cache
def accesses(architecture):
    """{kernel: how often each instruction that reads or writes memory occurs, with its suffixes}"""
    found = collections.defaultdict(collections.Counter)
    for line in cuobjdump("-sass", "-arch", architecture).splitlines():
        if "Function :" in line:
            name = kernel(line)
        for instruction in re.findall(r"\b((?:LDG|STG|LDS|STS|LDL|STL|RED|ATOMG?)\b[.\w]*)", line.split("/*0x")[0]):
            found[name][instruction] += 1
    return found


def test_every_kernel_for_every_architecture():
    assert sorted(resources()) == sorted(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert sorted(resources()[architecture]) == sorted(STEPS + NORMS)


def test_ptx_for_newer_ones():
    assert set(re.findall(r"target sm_(\d+)", cuobjdump("-ptx"))) == {"90", "120"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spilled(architecture):
    for name, usage in resources()[architecture].items():
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), name


def blocks_of_an_sm(architecture, kind):
    """As BlocksPerMultiprocessor in cuda/policy.h."""
    major = int(architecture[3:-1])
    if major not in (9, 10):
        return 2
    return {"float32": 3 if major == 9 else 4, "float64": 3, "mixed": 2, "halves": 3 if major == 9 else 2}[kind]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_allow_the_blocks(architecture):
    """65,536 registers of an SM, handed out by 8 to each of the 256 threads of a block: occupancy is what policy.h says."""
    for name in STEPS:
        registers = -(-resources()[architecture][name]["REG"] // 8) * 8
        assert 65536 // (256 * registers) >= blocks_of_an_sm(architecture, name.split()[1]), (name, registers)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_accesses_of_16_bytes(architecture):
    """The hot loop of the float32 step: p, g, m and v in, m and v out, u to shared memory; then u and p in, p out; or p, m and v once more."""
    code = accesses(architecture)
    for name in STEPS:
        wide = collections.Counter()
        for instruction, count in code[name].items():
            if ".128" in instruction:
                wide[instruction.split(".")[0]] += count
        part = name.split()[0]
        assert wide["LDG"] >= {"step": 8, "moments": 4, "apply": 3}[part], (name, code[name])
        assert wide["STG"] >= {"step": 4, "moments": 2, "apply": 1}[part], (name, code[name])
        if part == "step":
            assert wide["STS"] >= 1 and wide["LDS"] >= 1, (name, code[name])
        assert not any(i.startswith(("LDL", "STL")) for i in code[name]), (name, code[name])
    for name in NORMS:
        assert sum(n for i, n in code[name].items() if i.startswith("LDG") and ".128" in i) >= 4, (name, code[name])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_no_atomics_on_floats(architecture):
    """The only atomic operations are additions of integers: to take work and to count arrivals."""
    for name, found in accesses(architecture).items():
        for instruction in found:
            if instruction.startswith(("RED", "ATOM")):
                assert not re.search(r"\.(F16|F32|F64|BF16|MIN|MAX)", instruction), (name, instruction)


def test_bytes_of_the_float32_step():
    """Counted from the code: accesses of 16 bytes for each vector of 4 parameters."""
    found = accesses("sm_90")["step float32 400"]
    loads = sum(n for i, n in found.items() if i.startswith("LDG") and ".128" in i)
    stores = sum(n for i, n in found.items() if i.startswith("STG") and ".128" in i)
    first = dict(loads=4, stores=2)  # p, g, m, v; m, v
    waited = dict(loads=1, stores=1)  # p, from the L2 cache; p
    again = dict(loads=3, stores=1)  # p, m, v; p
    skipped = dict(loads=3, stores=3)
    hints = 2  # the moments are stored with one of two cache hints
    assert loads == sum(x["loads"] for x in (first, waited, again, skipped))
    assert stores == hints * first["stores"] + sum(x["stores"] for x in (waited, again, skipped))
    assert 16 * (first["loads"] + first["stores"] + waited["stores"]) / 4 == 28
    assert 16 * (first["loads"] + first["stores"] + again["loads"] + again["stores"]) / 4 == 40
