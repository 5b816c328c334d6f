"""What XLA makes of Model.fit's train step under loss scaling and global-norm clipping: the grouped calls of the step and of the gradient norm, and nothing else that
reads or writes gradients."""

import re
from collections import Counter

import pytest

import helpers

LAYERS = 34  # 68 variables: 2 groups of 64 on the CPU
GROUPS = 2
MATRIX = 40 * 40  # elements of the smallest kernel; activations are 4 * 42 at most
NEST = "LossScaling(ClipByGlobalNorm(lamb(), 1.0))"
AVERAGED = "LossScaling(ClipByGlobalNorm(MovingAverage(lamb()), 1.0))"
TRIPLED = "LossScaling(OptimizerWrapper(ClipByGlobalNorm(lamb(), 1.0), transform_gradients=lambda pairs: [(3 * g, v) for g, v in pairs]))"
FEW = 10  # layers under AVERAGED and TRIPLED


class Program:
    """The instructions of an optimized HLO text that do the work: name -> (type, opcode, operands, line)."""

    def __init__(self, hlo):
        self.hlo = hlo
        self.entry = self._instructions(hlo[hlo.index("\nENTRY ") :])

    @staticmethod
    def _instructions(text):
        found = re.findall(r"^\s*((?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,.*)?)$", text, re.M)
        return {name: (kind, op, re.findall(r"%([\w.\-]+)", operands), line) for line, name, kind, op, operands in found}

    def calls(self, target):
        """The operands of each custom call of a target."""
        return [operands for _, _, operands, line in self.entry.values() if f'custom_call_target="{target}"' in line]

    def elements(self, name):
        kind = self.entry[name][0]
        if kind.startswith("("):
            return 0
        total = 1
        for n in re.findall(r"\d+", kind[kind.index("[") : kind.index("]")]):
            total *= int(n)
        return total

    def gradients(self):
        """The operands of the calls of the gradient norm."""
        return [name for operands in self.calls("xla_lamb_grad_norm") for name in operands]

    def readers(self, name):
        """Who reads all of a value: its users, without those that take one element of it."""
        for user, (_, op, operands, line) in self.entry.items():
            for place in [i for i, operand in enumerate(operands) if operand == name]:
                if op != "fusion" or not self._takes_one_element(re.search(r"calls=%([\w.\-]+)", line)[1], place):
                    target = re.search(r'custom_call_target="(\w+)"', line)
                    yield target[1] if target else op

    def _takes_one_element(self, computation, place):
        start = self.hlo.index(f"\n%{computation} (")
        body = self._instructions(self.hlo[start : self.hlo.index("\n}", start)])
        seen = [name for name, (_, op, _, line) in body.items() if op == "parameter" and f"parameter({place})" in line]
        while seen:
            name = seen.pop()
            for user, (kind, op, operands, _) in body.items():
                if name not in operands:
                    continue
                if op == "bitcast":
                    seen.append(user)
                elif op != "slice" or not re.match(r"\w+\[[1,]*\]", kind):
                    return False
        return True

    def passes(self):
        """Instructions besides the backward pass's products and our calls that write as many elements as a kernel has."""
        free = ("dot", "parameter", "get-tuple-element", "bitcast", "custom-call", "tuple")
        return [name for name, (_, op, _, _) in self.entry.items() if op not in free and self.elements(name) >= MATRIX]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """{(backend, optimizer): Program}"""
    found = {}
    for backend, other in (("tensorflow", AVERAGED), ("jax", TRIPLED)):
        texts = helpers.train_steps(tmp_path_factory.mktemp(backend), backend, [(LAYERS, NEST), (FEW, other)])
        found[backend, NEST], found[backend, other] = map(Program, texts)
    return found


def assert_only_the_calls_touch_gradients(program, layers=LAYERS, groups=GROUPS):
    calls = Counter(helpers.lamb_calls(program.hlo))
    assert calls == {"xla_lamb_step": groups, "xla_lamb_grad_norm": groups}
    gradients = program.gradients()
    assert len(set(gradients)) == len(gradients) == 2 * layers
    kernels = [g for g in gradients if program.elements(g) >= MATRIX]
    assert len(kernels) == layers
    # They are the backward pass's products themselves, and the step reads the very same ones.
    assert {program.entry[g][1] for g in kernels} == {"dot"}
    assert set(gradients) <= {name for operands in program.calls("xla_lamb_step") for name in operands}
    for g in gradients:
        assert sorted(program.readers(g)) == ["xla_lamb_grad_norm", "xla_lamb_step"], g
    assert helpers.copies(program.hlo, MATRIX) == []


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_loss_scaling_and_clipping_add_one_pass_that_reads(programs, backend):
    program = programs[backend, NEST]
    assert_only_the_calls_touch_gradients(program)
    assert program.passes() == []
    assert helpers.aliases(program.hlo) >= 3 * 2 * LAYERS  # weights and both moments in place


def test_a_moving_average_adds_one_pass_over_weights_and_averages(programs):
    program = programs["tensorflow", AVERAGED]
    assert_only_the_calls_touch_gradients(program, layers=FEW, groups=1)
    passes = program.passes()
    assert len(passes) == FEW
    for name in passes:
        matrices = [x for x in program.entry[name][2] if program.elements(x) >= MATRIX]
        assert Counter(program.entry[x][1] for x in matrices) == {"get-tuple-element": 1, "parameter": 1}, name  # the new weight, the old average
    assert helpers.aliases(program.hlo) >= 4 * 2 * FEW


def test_control_a_function_of_the_gradients_adds_passes(programs):
    """They are multiplied in memory, and measured anew."""
    program = programs["jax", TRIPLED]
    assert len(program.passes()) == FEW
    assert len(program.calls("xla_lamb_grad_norm")) == 2
    assert any("fusion" in program.readers(g) for g in program.gradients())
    with pytest.raises(AssertionError):
        assert_only_the_calls_touch_gradients(program, layers=FEW, groups=1)
