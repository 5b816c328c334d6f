"""What XLA's compiler for NVIDIA GPUs makes of a step over BERT-large, on a machine without one: in place, in a call or two."""

import importlib.util

import pytest

import compilers
from benchmarks import hlo, sets

LARGE = sets.shapes("bert-large")
N = len(LARGE)
FEW = LARGE[:100]  # the embeddings and the first layers: one call too, and compiled in a quarter of the time
SMALL = [tuple(min(d, 4) for d in shape) for shape in LARGE]  # as many tensors, next to no elements
SPLIT = [(64, 32), (64,), (128, 16)]  # what eight devices can share
GPUS = list(compilers.GPUS)
NVLAMB = dict(variant="nvlamb", nonfinite="skip")

FOR_ALL = {
    "step": dict(shapes=LARGE),
    "small": dict(shapes=SMALL),
    "nvlamb": dict(shapes=LARGE, **NVLAMB),
    "eight": dict(shapes=FEW, devices=8),
}
FOR_H200 = {
    "update": dict(shapes=LARGE, method="update"),
    "small nvlamb": dict(shapes=SMALL, **NVLAMB),
    "not donated": dict(shapes=LARGE, donate=False),
    "sharded": dict(shapes=SPLIT, devices=8, sharded=True),
}


@pytest.fixture(scope="module")
def compiled():
    """compiled(gpu, case): the figures. All are "fused": the reference must not pass for the kernel."""
    jobs = {(gpu, name): dict(case, target=gpu, implementation="fused") for gpu in GPUS for name, case in FOR_ALL.items()}
    jobs |= {("H200", name): dict(case, target="H200", implementation="fused") for name, case in FOR_H200.items()}
    results = dict(zip(jobs, compilers.compile_steps(list(jobs.values()))))

    def figures(gpu, case):
        assert "error" not in results[gpu, case], results[gpu, case]["error"]
        return results[gpu, case]

    return figures


@pytest.fixture(scope="module")
def optax():
    """optax.lamb for an H200: all 391 tensors would compile for a minute."""
    (result,) = compilers.compile_steps([dict(target="H200", shapes=FEW, step="optax")])
    return result


def in_place(figures, tensors=N):
    """No tensor is copied. All parameters and moments keep their buffers; the counter, being computed, may be one more."""
    return figures["copies"] == [] and figures["aliases"] in (3 * tensors, 3 * tensors + 1) and figures["call_aliases"] == 3 * tensors


def bytes_each(figures):
    return figures["bytes"] / figures["parameters"]


@pytest.mark.parametrize("gpu,case", [(gpu, case) for case in ("step", "eight") for gpu in GPUS] + [("H200", "update")])
def test_one_or_two_calls_in_place(compiled, gpu, case):
    figures = compiled(gpu, case)
    assert figures["calls"] in (["xla_lamb_step"], ["xla_lamb_step"] * 2)
    assert in_place(figures, len(FEW) if case == "eight" else N)
    assert figures["kernels"] <= 4  # what makes the scalars
    assert figures["collectives"] == []
    # Of the operands and results; the kernel's own traffic is counted in its tests. A copy in whatever shape would add 8.
    assert bytes_each(figures) == pytest.approx(28, abs=0.1)


@pytest.mark.parametrize("gpu", GPUS)
def test_gradient_norm_adds_a_call_or_two(compiled, gpu):
    figures = compiled(gpu, "nvlamb")
    calls = figures["calls"]
    assert calls.count("xla_lamb_step") in (1, 2) and calls.count("xla_lamb_grad_norm") in (1, 2)
    assert len(calls) == calls.count("xla_lamb_step") + calls.count("xla_lamb_grad_norm")
    assert in_place(figures)
    assert figures["kernels"] <= len(calls) + 3
    assert bytes_each(figures) == pytest.approx(32, abs=0.1)


@pytest.mark.parametrize("gpu", GPUS)
def test_temporary_memory_is_constant(compiled, gpu):
    assert compiled(gpu, "step")["temporary"] == compiled(gpu, "small")["temporary"] < 8 << 20


def test_temporary_memory_of_the_gradient_norm_is_constant(compiled):
    assert compiled("H200", "nvlamb")["temporary"] == compiled("H200", "small nvlamb")["temporary"] < 8 << 20


def test_optax_for_comparison(compiled, optax):
    """What shows that the counts count: by hand, 1,962 fusions of 391 tensors. With the update alone 44.0 bytes a parameter, applying it
    adds 4."""
    ours = compiled("H200", "step")
    for name, figures in (("optax.lamb", optax), ("xla_lamb", ours)):
        print(f"{name}: {figures['kernels']:,} kernels, {bytes_each(figures):.2f} bytes a parameter, {figures['temporary']:,} temporary")
    assert optax["kernels"] > 3 * len(FEW) and bytes_each(optax) > 40 and optax["temporary"] > 100e6
    assert optax["calls"] == [] and optax["call_aliases"] == 0


# Controls -----------------------------------------------------------------------------------------------------------------


def test_control_without_donation_the_copies_appear(compiled):
    figures = compiled("H200", "not donated")
    assert figures["aliases"] == 0 and len(figures["copies"]) == 3 * N
    assert figures["kernels"] > 3 * N and bytes_each(figures) == pytest.approx(28 + 24, abs=0.1)


def test_control_sharded_tensors_are_gathered(compiled):
    assert "all-gather" in " ".join(compiled("H200", "sharded")["collectives"])


@pytest.fixture(scope="module")
def without_library():
    shapes = sets.bert(layers=2, width=64)
    jobs = [dict(target="H200", shapes=shapes), dict(target="H200", shapes=shapes, implementation="fused")]
    return len(shapes), compilers.compile_steps(jobs, XLA_LAMB_LIBRARY="/nonexistent")


def test_control_without_the_library_the_reference_is_taken(without_library):
    tensors, (figures, _) = without_library
    assert figures["calls"] == [] and figures["call_aliases"] == 0
    assert figures["kernels"] > 2 * tensors and bytes_each(figures) >= 40


def test_control_without_the_library_fused_is_an_error(without_library):
    _, (_, refused) = without_library
    assert "fused" in refused["error"] and "/nonexistent" in refused["error"]


# The harness --------------------------------------------------------------------------------------------------------------


def test_the_compilers_are_found_by_the_children_alone():
    """A plugin that JAX discovers slows down every process, and crashes beside TensorFlow."""
    assert importlib.util.find_spec("jax_plugins") is None and importlib.util.find_spec("libtpu") is None


def test_missing_compilers_are_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "COMPILERS", tmp_path / "none")
    with pytest.raises(AssertionError, match="make venv"):
        compilers.compile_steps([])


HLO = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner (a: bf16[8], b: pred[]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  %b = pred[] parameter(1)
  %copy.1 = bf16[8]{0} copy(%a)
  ROOT %call.1 = bf16[8]{0} custom-call(%copy.1, %b), custom_call_target="f"
}

ENTRY %main (p: f32[8,4], q: bf16[8], /*index=2*/r: pred[]) -> (f32[8,4], bf16[8]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[8]{0} parameter(1)
  %r = pred[] parameter(2)
  %fusion = (f32[], /*index=1*/f32[8,4]{1,0}) fusion(%p, %r), kind=kInput, calls=%fused, metadata={op_name="a(b)"}
  %get = f32[8,4]{1,0} get-tuple-element(%fusion), index=1
  %flat = f32[32]{0} bitcast(%get)
  %call = bf16[8]{0} call(%q, %r), to_apply=%inner
  ROOT %result = (f32[8,4]{1,0}, bf16[8]{0}) tuple(%get, %call)
}
"""


def test_counting():
    fusion, copy, call = (128 + 1) + (4 + 128), 16 + 16, (16 + 1) + 16
    assert compilers.executed(HLO) == [("fusion", fusion), ("copy", copy), ("custom-call", call)]
    assert compilers.kernels(HLO) == 3 and compilers.bytes_moved(HLO) == fusion + copy + call


def test_control_a_loop_is_not_counted_as_one_run():
    with pytest.raises(ValueError, match="while"):
        compilers.executed(HLO.replace("call(%q, %r), to_apply=%inner", "while(%q), condition=%add, body=%inner"))


def test_table():
    """`python -m benchmarks.hlo`."""
    report = hlo.run("one-big", ["H200"])
    text = hlo.table(report)
    rows = {row["step"]: row for row in report["results"]}
    assert list(rows) == list(hlo.STEPS)
    assert rows["xla_lamb"]["bytes_each"] == pytest.approx(28, abs=0.1)
    assert rows["xla_lamb reference"]["bytes_each"] == pytest.approx(40, abs=0.1)
    assert rows["optax.lamb"]["bytes_each"] > 40 and rows["optax.lamb"]["calls"] == []
    lines = [line for line in text.splitlines() if line.startswith("H200")]
    assert len(lines) == 3 and "one-big" in text
    assert all(f"{row['bytes_each']:.1f}" in line and f"{row['kernels']:,}" in line for row, line in zip(rows.values(), lines))
