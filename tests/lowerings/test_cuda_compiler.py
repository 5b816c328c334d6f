"""What XLA's compiler for NVIDIA GPUs makes of a step over BERT-large, on a machine without one: in place, in a call or two."""

import importlib.util

import pytest

import compilers
from benchmarks import hlo, sets

LARGE = sets.shapes("bert-large")
N = len(LARGE)
FEW = LARGE[:100]  # the embeddings and the first layers: one call too, and compiled in a quarter of the time
SMALL = [tuple(min(d, 4) for d in shape) for shape in LARGE]  # as many tensors, next to no elements
GPUS = list(compilers.GPUS)
NVLAMB = dict(variant="nvlamb", nonfinite="skip")

FOR_ALL = {"step": dict(shapes=LARGE)}
FOR_H200 = {
    "small": dict(shapes=SMALL),
    "nvlamb": dict(shapes=LARGE, **NVLAMB),
    "update": dict(shapes=LARGE, method="update"),
    "small nvlamb": dict(shapes=SMALL, **NVLAMB),
    "not donated": dict(shapes=LARGE, donate=False),
    "eight": dict(shapes=FEW, mesh={"data": 8}),
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


@pytest.mark.parametrize("gpu,case", [(gpu, "step") for gpu in GPUS] + [("H200", "eight"), ("H200", "update")])
def test_one_or_two_calls_in_place(compiled, gpu, case):
    figures = compiled(gpu, case)
    assert figures["calls"] in (["xla_lamb_step"], ["xla_lamb_step"] * 2)
    assert in_place(figures, len(FEW) if case == "eight" else N)
    assert figures["kernels"] <= 4  # what makes the scalars
    assert figures["collectives"] == []
    # Of the operands and results; the kernel's own traffic is counted in its tests. A copy in whatever shape would add 8.
    assert bytes_each(figures) == pytest.approx(28, abs=0.1)


def test_gradient_norm_adds_a_call_or_two(compiled):
    figures = compiled("H200", "nvlamb")
    calls = figures["calls"]
    assert calls.count("xla_lamb_step") in (1, 2) and calls.count("xla_lamb_grad_norm") in (1, 2)
    assert len(calls) == calls.count("xla_lamb_step") + calls.count("xla_lamb_grad_norm")
    assert in_place(figures)
    assert figures["kernels"] <= len(calls) + 3
    assert bytes_each(figures) == pytest.approx(32, abs=0.1)


def test_temporary_memory_is_constant(compiled):
    assert compiled("H200", "step")["temporary"] == compiled("H200", "small")["temporary"] < 8 << 20


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


# Meshes -------------------------------------------------------------------------------------------------------------------

WIDTH = 64


def bert(layers, **sizes):
    """A job: a small BERT on an H200 for each device of a mesh, whose matrices fsdp and tensor split, and the inner biases tensor."""
    shapes = sets.bert(layers=layers, width=WIDTH, vocabulary=1024)
    spec = lambda s: ["tensor" if s[0] > WIDTH else None] if len(s) == 1 else [None, "fsdp"] if s[0] == 2 else ["fsdp", "tensor"]
    return dict(target="H200", shapes=shapes, mesh=sizes, specs=[spec(s) for s in shapes])


def rows(layers):
    """How many tensors the sets of axes of `bert` split: both, fsdp, tensor. The other vectors are whole."""
    return 3 + 6 * layers, 1, layers


MESHES = {
    "8": bert(2, fsdp=4, tensor=2),
    "8 explicit": bert(2, fsdp=4, tensor=2) | dict(explicit=True),
    "8 clipped": bert(2, fsdp=4, tensor=2) | dict(max_grad_norm=1.0),
    "8 update": bert(2, fsdp=4, tensor=2) | dict(method="update"),
    "8 deep": bert(9, fsdp=4, tensor=2),
    "64": bert(2, fsdp=8, tensor=8),
    "256": bert(2, fsdp=32, tensor=8),
    "bare": bert(2, fsdp=4, tensor=2) | dict(partitioned=False),
    # One layer: the compiler takes long for the reference.
    "reference": bert(1, fsdp=4, tensor=2) | dict(implementation="reference"),
}


@pytest.fixture(scope="module")
def on_meshes():
    jobs = [{"implementation": "fused", **job} for job in MESHES.values()]
    return dict(zip(MESHES, compilers.compile_steps(jobs)))


def sent(figures):
    """The bytes of each collective, which are all-reduces."""
    assert {op for op, _ in figures["collectives"]} == {"all-reduce"}, figures["collectives"]
    return sorted(size for _, size in figures["collectives"])


@pytest.mark.parametrize("case,layers", [("8", 2), ("8 explicit", 2), ("64", 2), ("256", 2), ("8 deep", 9), ("8 update", 2)])
def test_shards_stay_where_they_are(on_meshes, case, layers):
    """Two sums of squares for each tensor are all that travels, in one collective for each set of axes."""
    figures = on_meshes[case]
    assert sorted(figures["calls"]) == ["xla_lamb_apply", "xla_lamb_moments", "xla_lamb_step"]
    assert sent(figures) == sorted(8 * n for n in rows(layers))
    tensors = len(MESHES[case]["shapes"])
    assert figures["copies"] == [] and figures["aliases"] in (3 * tensors, 3 * tensors + 1)
    if case != "8 update":  # the update of a split tensor is a result of its own for the kernel, which XLA gives a buffer that was donated
        assert figures["call_aliases"] == 3 * tensors


def test_clipping_adds_the_norm_of_each_set_of_axes(on_meshes):
    figures = on_meshes["8 clipped"]
    calls = figures["calls"]
    assert calls.count("xla_lamb_grad_norm") == 4  # and that of the tensors that are whole
    assert sorted(calls)[:1] + sorted(calls)[-2:] == ["xla_lamb_apply", "xla_lamb_moments", "xla_lamb_step"] and len(calls) == 7
    assert sent(figures) == sorted([8 * n for n in rows(2)] + [8] * 3)
    tensors = len(MESHES["8"]["shapes"])
    assert figures["copies"] == [] and figures["call_aliases"] == 3 * tensors


@pytest.mark.parametrize("devices", ["64", "256"])
def test_the_program_does_not_grow_with_the_devices(on_meshes, devices):
    few, many = on_meshes["8"], on_meshes[devices]
    assert many["instructions"] == pytest.approx(few["instructions"], rel=0.03) and many["kernels"] == pytest.approx(few["kernels"], abs=2)


def test_kernels_do_not_grow_with_the_tensors(on_meshes):
    """Of 39 tensors and of 151."""
    assert on_meshes["8 deep"]["kernels"] == pytest.approx(on_meshes["8"]["kernels"], abs=2)


def test_the_reference_sends_the_same(on_meshes):
    """What ROCm takes, and CUDA without the library: XLA's partitioner reduces its sums, and what it then fuses goes over the same axes."""
    figures = on_meshes["reference"]
    tensors = len(MESHES["reference"]["shapes"])
    assert figures["calls"] == [] and figures["copies"] == [] and figures["aliases"] in (3 * tensors, 3 * tensors + 1)
    assert sent(figures) == sorted(8 * n for n in rows(1))


def test_the_reference_clips():
    """The norm takes one more collective for each set of axes, of two sums a tensor at most: of squares, and of what is not finite."""
    (figures,) = compilers.compile_steps([bert(1, fsdp=4, tensor=2) | dict(implementation="reference", max_grad_norm=1.0)])
    assert len(sent(figures)) == 6 and sum(sent(figures)) <= 2 * sum(8 * n for n in rows(1))


def test_control_calls_that_xla_cannot_partition_gather(on_meshes):
    """As other kernels' do: every shard, to every device."""
    figures = on_meshes["bare"]
    gathered = sum(size for op, size in figures["collectives"] if op == "all-gather")
    assert figures["calls"] == ["xla_lamb_step"] and gathered > 4 * 4 * 0.9 * figures["parameters"]


# Controls -----------------------------------------------------------------------------------------------------------------


def test_control_without_donation_the_copies_appear(compiled):
    figures = compiled("H200", "not donated")
    assert figures["aliases"] == 0 and len(figures["copies"]) == 3 * N
    assert figures["kernels"] > 3 * N and bytes_each(figures) == pytest.approx(28 + 24, abs=0.1)


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
