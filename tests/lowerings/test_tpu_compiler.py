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
        "step": dict(shapes=SHAPES),
        "textbook": dict(shapes=SHAPES, step="textbook"),
        "nvlamb": dict(shapes=FEW, variant="nvlamb", nonfinite="skip"),
        "fused": dict(shapes=FEW, implementation="fused"),
    }.items()
}
JOBS["v5e:2x2", "optax"] = dict(target="v5e:2x2", shapes=SHAPES, step="optax")


@pytest.fixture(scope="module")
def compiled():
    """compiled[tpu, case]: the figures."""
    return dict(zip(JOBS, compilers.compile_steps(list(JOBS.values()))))


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("case,shapes", [("step", SHAPES), ("nvlamb", FEW)], ids=["step", "nvlamb"])
def test_the_reference_is_taken(compiled, tpu, case, shapes):
    figures = compiled[tpu, case]
    assert figures["calls"] == []
    assert figures["aliases"] in (3 * len(shapes), 3 * len(shapes) + 1)


@pytest.mark.parametrize("tpu", TPUS)
def test_it_accesses_what_a_textbook_lamb_accesses(compiled, tpu):
    """By the compiler's own account, in which moving a tensor between the memories of the chip counts too."""
    ours, textbook = (compiled[tpu, case]["accessed"] for case in ("step", "textbook"))
    print(f"{tpu}: {ours / textbook:.4f} of the bytes of a LAMB written by hand; those are {textbook / sets.elements(SHAPES):.1f} a parameter")
    assert textbook >= 28 * sets.elements(SHAPES)
    assert ours == pytest.approx(textbook, rel=0.1)


def test_control_what_optax_accesses_besides_shows(compiled):
    """It stores u, and takes each norm twice."""
    assert compiled["v5e:2x2", "optax"]["accessed"] > 1.1 * compiled["v5e:2x2", "textbook"]["accessed"]


@pytest.mark.parametrize("tpu", TPUS)
def test_control_fused_is_an_error(compiled, tpu):
    assert compiled[tpu, "fused"]["error"] == "implementation=\"fused\" cannot be had on tpu: xla_lamb has no kernel for the platform 'tpu'"
