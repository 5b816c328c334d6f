"""What XLA's compiler for TPUs makes of a step, on a machine without one: the reference, which accesses no more than it must."""

import pytest

import compilers
from benchmarks import sets

SHAPES = sets.bert(layers=1, width=512)
FEW = [(128, 64), (128,), ()]
TPUS = ["v5e:2x2", "v6e:2x2"]
JOBS = {
    (tpu, name): dict(case, target=tpu)
    for tpu in TPUS
    for name, case in {
        "nvlamb": dict(shapes=FEW, variant="nvlamb", nonfinite="skip"),
        "fused": dict(shapes=FEW, implementation="fused"),
    }.items()
}
JOBS |= {
    ("v5e:2x2", "step"): dict(target="v5e:2x2", shapes=SHAPES),
    ("v5e:2x2", "textbook"): dict(target="v5e:2x2", shapes=SHAPES, step="textbook"),
    ("v5e:2x2", "optax"): dict(target="v5e:2x2", shapes=SHAPES, step="optax"),
}

# A small BERT on meshes, whose matrices fsdp and tensor split, and the inner biases tensor.
WIDTH, LAYERS = 64, 2
BERT = sets.bert(LAYERS, WIDTH, vocabulary=1024)
SPECS = [["tensor" if s[0] > WIDTH else None] if len(s) == 1 else [None, "fsdp"] if s[0] == 2 else ["fsdp", "tensor"] for s in BERT]
ROWS = [3 + 6 * LAYERS, 1, LAYERS]  # tensors that each set of axes splits: both, fsdp, tensor
MESHES = {"v5e:4x4": dict(fsdp=4, tensor=4), "v5e:16x16": dict(fsdp=32, tensor=8)}
JOBS |= {(tpu, "sharded"): dict(target=tpu, shapes=BERT, mesh=mesh, specs=SPECS) for tpu, mesh in MESHES.items()}
# Explicit axes hold results to the sharding of their operands: of whole moments and split gradients one has to be moved.
JOBS["v5e:4x4", "gathered"] = dict(JOBS["v5e:4x4", "sharded"], shapes=BERT[:1], specs=SPECS[:1], moment_specs=[[]], explicit=True)


@pytest.fixture(scope="module")
def compiled():
    """compiled[tpu, case]: the figures."""
    return dict(zip(JOBS, compilers.compile_steps(list(JOBS.values()))))


@pytest.mark.parametrize("tpu,case,shapes", [("v5e:2x2", "step", SHAPES), *((tpu, "nvlamb", FEW) for tpu in TPUS)])
def test_the_reference_is_taken(compiled, tpu, case, shapes):
    figures = compiled[tpu, case]
    assert figures["calls"] == []
    assert figures["aliases"] in (3 * len(shapes), 3 * len(shapes) + 1)


def test_it_accesses_what_a_textbook_lamb_accesses(compiled):
    """By the compiler's own account, in which moving a tensor between the memories of the chip counts too."""
    ours, textbook = (compiled["v5e:2x2", case]["accessed"] for case in ("step", "textbook"))
    print(f"{ours / textbook:.4f} of the bytes of a LAMB written by hand; those are {textbook / sets.elements(SHAPES):.1f} a parameter")
    assert textbook >= 28 * sets.elements(SHAPES)
    assert ours == pytest.approx(textbook, rel=0.1)


@pytest.mark.parametrize("tpu", MESHES)
def test_shards_stay_where_they_are(compiled, tpu):
    """Two sums of squares for each tensor are all that travels, in one collective for each set of axes, on 16 chips as on 256."""
    figures = compiled[tpu, "sharded"]
    assert figures["calls"] == [] and figures["aliases"] in (3 * len(BERT), 3 * len(BERT) + 1)
    assert sorted(figures["collectives"]) == sorted(["all-reduce", 8 * n] for n in ROWS)


def test_the_program_does_not_grow_with_the_chips(compiled):
    few, many = (compiled[tpu, "sharded"]["instructions"] for tpu in MESHES)
    assert many == pytest.approx(few, rel=0.05)


def test_control_what_is_gathered_shows(compiled):
    assert "all-gather" in [op for op, _ in compiled["v5e:4x4", "gathered"]["collectives"]]


def test_control_what_optax_accesses_besides_shows(compiled):
    """It stores u, and takes each norm twice."""
    assert compiled["v5e:2x2", "optax"]["accessed"] > 1.1 * compiled["v5e:2x2", "textbook"]["accessed"]


@pytest.mark.parametrize("tpu", TPUS)
def test_control_fused_is_an_error(compiled, tpu):
    assert compiled[tpu, "fused"]["error"] == "implementation=\"fused\" cannot be had on tpu: xla_lamb has no kernel for the platform 'tpu'"
