"""How LAMB is computed: the variants in use, their hyper-parameters, and the checks of what a user passes.

Pure Python: neither JAX nor TensorFlow is imported here.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from typing import Any, Callable, Iterable

INFINITY = float("inf")
IMPLEMENTATIONS = ("auto", "fused", "reference")
IMPLEMENTATION_VARIABLE = "XLA_LAMB_IMPLEMENTATION"
NONFINITE = ("propagate", "skip")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One definition of LAMB. With ``g`` the gradient, ``t`` the step counted from 1::

        m = b1 m + (1 - b1) g                       first moment
        v = b2 v + (1 - b2) g^2                     second moment
        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)  [+ weight_decay p]
        ratio = clamp(phi(|p|) / |u|)               1 where phi(|p|) or |u| is 0
        p = p - learning_rate ratio u

    Attributes:
      name: how the variant is called in messages.
      decay: where weight decay enters. ``"in_ratio"``: added to u, inside the trust ratio, as in the paper. ``"decoupled"``:
        ``p -= learning_rate weight_decay p`` before the step and its norms. ``"l2"``: added to the gradient, before the moments.
      bias_correction: ``"update"``: as above. ``"learning_rate"``: u is not corrected, and ``sqrt(1 - b2^t) / (1 - b1^t)`` multiplies
        the learning rate after the ratio, which therefore does not cancel it. ``"none"``.
      adapt: the tensors that get a trust ratio, where the caller names none: ``"all"``, ``"decay_mask"`` (those that the decay mask
        selects) or ``"decayed"`` (those that really decay: selected, and weight_decay is not 0).
      ratio_bounds: the least and the largest trust ratio.
      norm_bounds: the least and the largest |p| in the ratio: the paper's phi.
      eps, weight_decay, max_grad_norm: this variant's own defaults. max_grad_norm is the global norm above which all gradients are
        scaled down to it, or None.
    """

    name: str
    decay: str = "in_ratio"
    bias_correction: str = "update"
    adapt: str = "all"
    ratio_bounds: tuple[float, float] = (0.0, INFINITY)
    norm_bounds: tuple[float, float] = (0.0, INFINITY)
    eps: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self):
        _one_of("decay", self.decay, ("in_ratio", "decoupled", "l2"))
        _one_of("bias_correction", self.bias_correction, ("update", "learning_rate", "none"))
        _one_of("adapt", self.adapt, ("all", "decay_mask", "decayed"))
        object.__setattr__(self, "ratio_bounds", _bounds("ratio_bounds", self.ratio_bounds))
        object.__setattr__(self, "norm_bounds", _bounds("norm_bounds", self.norm_bounds))
        check_hyperparameters(eps=self.eps, weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm)


def variant(which: str | Variant = "optax", **changes: Any) -> Variant:
    """The variant of that name, or ``which`` itself, with the ``changes`` that are not None.

    Raises:
      ValueError: for an unknown name or a value that a variant cannot have.
    """
    if not isinstance(which, Variant):
        if which not in VARIANTS:
            raise ValueError(f"unknown variant {which!r}; there are {', '.join(VARIANTS)}, or pass an xla_lamb.Variant")
        which = VARIANTS[which]
    return dataclasses.replace(which, **{name: value for name, value in changes.items() if value is not None})


def implementation(asked: str | None) -> str:
    """``asked``, or what the environment variable XLA_LAMB_IMPLEMENTATION says, or "auto"; checked."""
    if asked is not None:
        _one_of("implementation", asked, IMPLEMENTATIONS)
        return asked
    value = os.environ.get(IMPLEMENTATION_VARIABLE) or "auto"
    _one_of(f"the environment variable {IMPLEMENTATION_VARIABLE}", value, IMPLEMENTATIONS)
    return value


def check_hyperparameters(**values: Any) -> None:
    """Checks those hyper-parameters that are plain numbers; traced values, schedules and None pass.

    Raises:
      ValueError: with the name, the value and what would be right.
    """
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            continue
        number = float(value)
        if math.isnan(number):
            raise ValueError(f"{name} is NaN")
        if name in ("b1", "b2", "beta_1", "beta_2"):
            if not 0.0 <= number < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {value!r}")
        elif name == "max_grad_norm":
            if number <= 0.0:
                raise ValueError(f"max_grad_norm must be positive, not {value!r}; None is the variant's own, and dataclasses.replace(variant, max_grad_norm=None) turns that off")
        elif name == "learning_rate":
            if math.isinf(number):
                raise ValueError(f"learning_rate must be finite, not {value!r}")
        elif number < 0.0 or math.isinf(number):
            raise ValueError(f"{name} must be a finite number that is not negative, not {value!r}")


def check_nonfinite(value: str) -> str:
    _one_of("nonfinite", value, NONFINITE)
    return value


def excludes(argument: str, patterns: Iterable[str] | None) -> Callable[[str], bool] | None:
    """Whether a tensor's name matches one of the `patterns`, regular expressions that may match any part of it; None for None.

    Args:
      argument: the name of the caller's argument, for messages.

    Raises:
      TypeError, ValueError: if the patterns are no regular expressions.
    """
    if patterns is None:
        return None
    if isinstance(patterns, str):
        raise TypeError(f"{argument} must be a list of regular expressions, not the string {patterns!r}: write [{patterns!r}]")
    compiled = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must hold regular expressions, not {pattern!r}")
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from None
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _bounds(name: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (float(x) for x in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be two numbers (least, largest), not {value!r}") from None
    if not 0.0 <= low <= high or high == 0.0:  # also False for NaN
        raise ValueError(f"{name} must be two numbers with 0 <= least <= largest and largest > 0, not {value!r}")
    return low, high


VARIANTS = {
    v.name: v
    for v in (
        Variant("optax"),
        # TensorFlow Addons and the TensorFlow Models garden.
        Variant("tf_addons", adapt="decay_mask"),
        Variant("keras", decay="decoupled", eps=1e-7),
        Variant("apex", adapt="decayed", weight_decay=0.01, max_grad_norm=1.0),
        # NVIDIA's BERT: the decay mask leaves out biases and LayerNorm, the ratio does not.
        Variant("nvlamb", weight_decay=0.01, max_grad_norm=1.0),
        Variant("timm", adapt="decayed", weight_decay=0.01, max_grad_norm=1.0),
        # Algorithm 2 of You et al. 2020, arXiv:1904.00962.
        Variant("paper", weight_decay=0.01),
        Variant("deepspeed", bias_correction="learning_rate", eps=1e-8, ratio_bounds=(0.01, 10.0)),
    )
}
