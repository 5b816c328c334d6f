"""LAMB's state apart from any framework, and how the tensors of two frameworks are matched."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import numbers
from typing import Any, Iterable, Iterator, Mapping

import numpy as np

from xla_lamb import config

_SHOWN = 5  # names in a message


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, matched or written; the message says why, and what to do."""


@dataclasses.dataclass
class Checkpoint:
    """What a LAMB run needs in order to go on, in NumPy.

    Attributes:
      step: number of steps taken.
      first, second: the moments by the name of their tensor, in the order of the source; float32, or float64 where they were.
      params: the parameters, in the type they had, under the names and in the order of the moments; None where the source has none.
      options: the hyper-parameters that the source tells, under the names of `xla_lamb.lamb`'s arguments where there is one, and `variant`.
      named: False where the source numbers its tensors: the names are then "0", "1", ...
      lost: one sentence for each thing in the source that has no place here.

    Raises:
      CheckpointError: if the names or the shapes disagree, or the step is negative.
    """

    step: int
    first: dict[str, np.ndarray]
    second: dict[str, np.ndarray]
    params: dict[str, np.ndarray] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    named: bool = True
    lost: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.step = int(self.step)
        if self.step < 0:
            raise CheckpointError(f"the number of steps taken is {self.step}, and cannot be negative")
        self.first, self.second = ({name: _moment(x) for name, x in moments.items()} for moments in (self.first, self.second))
        self.params = None if self.params is None else {name: np.asarray(x) for name, x in self.params.items()}
        for what, arrays in (("second moments", self.second), ("parameters", self.params)):
            if arrays is None:
                continue
            if list(arrays) != list(self.first):
                raise CheckpointError(
                    f"the {what} are not those of the first moments: {differences(self.first, arrays, 'the first moments', f'the {what}')}"
                )
            for name, x in arrays.items():
                if x.shape != self.first[name].shape:
                    raise CheckpointError(f"{name}: the first moment has shape {self.first[name].shape}, its place in the {what} {x.shape}")

    @property
    def names(self) -> list[str]:
        return list(self.first)

    def __repr__(self):
        params = "no parameters" if self.params is None else "parameters"
        return f"<Checkpoint: step {self.step}, {len(self.first)} tensors, {params}, {self.options}>"


@dataclasses.dataclass
class Report:
    """What a conversion did.

    Attributes:
      step: the number of steps taken that was written.
      matched: how tensors were matched: "by name" (perhaps but for a first part that all share), "by names given" or "by position".
      pairs: (name in the target, name in the source) of each tensor.
      lost: one sentence for each thing that could not be carried over.
      source, target: where from and where to.
    """

    step: int
    matched: str
    pairs: list[tuple[str, str]]
    lost: list[str]
    source: str = "checkpoint"
    target: str = "target"

    def text(self) -> str:
        lines = [f"{self.source} -> {self.target}: step {self.step}, {len(self.pairs)} tensors matched {self.matched}"]
        if self.matched in ("by names given", "by position"):
            lines += [f"  {target} <- {source}" for target, source in self.pairs]
        lines += ["not carried over:", *(f"  - {sentence}" for sentence in self.lost)] if self.lost else ["everything was carried over"]
        return "\n".join(lines)


def match(
    source: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]] | None,
    *,
    named: bool = True,
    names: Mapping[str, Any] | None = None,
    by_position: bool = False,
) -> tuple[Checkpoint, Report]:
    """The source's tensors under the target's names and in the target's order.

    Args:
      shapes: the target's shapes by name, or None for a target that takes whatever tensors there are.
      named: False where the target's names are only positions.
      names: target name -> source name, or {"from": source name, "transpose": true or a list of axes}; what is not listed must have the
        same name.
      by_position: the caller's word that both list the same tensors in the same order: an optax tree by sorted keys, a TensorFlow checkpoint
        as its objects were made, the others as the program listed its variables. Equal shapes in another order would be wrong, and nothing
        could tell.

    Raises:
      CheckpointError: with the tensors that have no counterpart, or whose shapes differ.
    """
    if names is not None and by_position:
        raise CheckpointError("tensors are matched by names that are given, or by position: choose one of --names and --by-position")
    axes: dict[str, Any] = {}
    if by_position:
        targets = list(source.first if shapes is None else shapes)
        if len(targets) != len(source.first):
            raise CheckpointError(f"cannot match by position: the source has {len(source.first)} tensors, the target {len(targets)}")
        chosen = dict(zip(targets, source.first))
    else:
        given, axes = _parse(names or {})
        if names is None and not (source.named and named):
            raise CheckpointError(f"the tensors of the {'target' if source.named else 'source'} have no names, only positions: {_REMEDIES}")
        targets = list(shapes) if shapes is not None else list(given or source.first)
        same = names is None and _relative(targets, source.first)
        chosen = same or {name: given.get(name, name if source.named and named else None) for name in targets}
        if unknown := [name for name in given if name not in chosen]:
            raise CheckpointError(f"the names given are for tensors that the target has not: {listed(unknown)}; it has {listed(targets)}")
        _check_pairs(source, chosen)

    def moved(arrays, name):
        x = arrays[chosen[name]]
        try:
            x = np.transpose(x, axes.get(name)) if name in axes else x
        except ValueError:
            raise CheckpointError(f"{name}: {chosen[name]} has shape {x.shape}, and cannot be transposed by {axes[name]}") from None
        if shapes is not None and x.shape != tuple(shapes[name]):
            hint = "; its transpose would fit, see --names" if x.shape[::-1] == tuple(shapes[name]) else ""
            raise CheckpointError(
                f"{name} has shape {tuple(shapes[name])} in the target, but {chosen[name]} has {x.shape} in the source{hint}"
            )
        return np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes a scalar a vector

    result = dataclasses.replace(
        source,
        **{
            field: None if arrays is None else {name: moved(arrays, name) for name in targets}
            for field, arrays in (("first", source.first), ("second", source.second), ("params", source.params))
        },
        named=source.named or shapes is not None or names is not None,
    )
    how = "by position" if by_position else "by names given" if names is not None else "by name"
    if how == "by name" and any(target != origin for target, origin in chosen.items()):
        how = "by name, but for a first part that all share"
    return result, Report(source.step, how, list(chosen.items()), list(source.lost))


_REMEDIES = (
    "give their names, --names FILE (names={...}: target name -> source name), or, if source and target list the same tensors in the same "
    "order, say so, --by-position (by_position=True)"
)


def _relative(targets, sources) -> dict[str, str] | None:
    """The pairs of equal names, leaving out first parts that all names of a side share, such as the model's own; None if some have no pair."""

    def shortened(names):
        parts = {name: name.split("/") for name in names}
        first = next(iter(parts.values()), [])
        shared = 0
        while all(len(p) > shared + 1 and p[shared] == first[shared] for p in parts.values()) and first:
            shared += 1
        return {"/".join(p[shared:]): name for name, p in parts.items()}

    if set(targets) == set(sources):
        return {name: name for name in targets}
    ours, theirs = shortened(targets), shortened(sources)
    return {name: theirs[short] for short, name in ours.items()} if ours.keys() == theirs.keys() else None


def _parse(names):
    if not isinstance(names, Mapping):
        raise CheckpointError(f"names must be an object, target name -> source name, not {type(names).__name__}")
    given, axes = {}, {}
    for target, entry in names.items():
        target = normal(target)
        if isinstance(entry, Mapping):
            transpose = entry.get("transpose", False)
            good = isinstance(transpose, bool) or (isinstance(transpose, list) and all(type(axis) is int for axis in transpose))
            if not good or not {"from"} <= set(entry) <= {"from", "transpose"}:
                raise CheckpointError(
                    f'names: {target} must be given a name, or {{"from": name, "transpose": true or a list of axes}}, not {dict(entry)}'
                )
            if transpose is not False:
                axes[target] = None if transpose is True else transpose
            entry = entry["from"]
        if not isinstance(entry, str):
            raise CheckpointError(f"names: {target} must be given the name of a tensor, not {entry!r}")
        given[target] = normal(entry)
    return given, axes


def _check_pairs(source, chosen):
    missing = [name for name, origin in chosen.items() if origin not in source.first]
    used = collections.Counter(chosen.values())
    unused = [name for name in source.first if name not in used]
    if missing or unused:
        parts = [f"the source has no {listed([chosen[n] or n for n in missing])} for the target's {listed(missing)}"] if missing else []
        parts += [f"the target has no place for the source's {listed(unused)}"] if unused else []
        raise CheckpointError(f"the tensors do not match by name: {'; '.join(parts)}; {_REMEDIES}")
    if twice := [origin for origin, count in used.items() if count > 1]:
        raise CheckpointError(f"names: {listed(twice)} cannot be the source of two tensors")


def carry(source: Mapping[str, Any], target: Mapping[str, Any], stored: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Hyper-parameters to write into the target, and sentences on those that cannot be.

    Args:
      source: the options of the source.
      target: what the target is known to have, `variant` included.
      stored: those of them that the target keeps as values which can be replaced.
    """
    one_decays_apart = ("keras" == source.get("variant")) != ("keras" == target.get("variant"))
    changes, sentences, homeless = {}, [], []
    for name, value in source.items():
        if name == "variant":
            if value not in config.VARIANTS:
                sentences.append(f"the source was stepped by {value!r}, which is none of xla_lamb's variants: only the state goes over")
            elif name not in target:
                sentences.append(f"the source's formula is {value!r}: go on with variant={value!r}")
            elif value != target[name]:
                sentences.append(
                    f"the source's formula is {value!r}, the target's {target[name]!r}: go on with variant={value!r} to keep the numbers"
                )
        elif name in target and same(value, target[name]):
            pass
        elif name in stored and is_number(value) and is_number(target[name]) and not (name == "weight_decay" and one_decays_apart):
            changes[name] = float(value)
        elif name in target:
            sentences.append(f"{name} is {shown(value)} in the source; the target keeps {shown(target[name])}")
        else:
            homeless.append(f"{name}={shown(value)}")
    if homeless:
        sentences.append(f"the target stores no hyper-parameters such as the source's {', '.join(homeless)}: set them in your program")
    if untold := [f"{name}={shown(target[name])}" for name in stored if name not in source]:
        sentences.append(f"the source tells no {', '.join(x.split('=')[0] for x in untold)}; the target has {', '.join(untold)}")
    return changes, sentences


_OPTIONS = {
    "beta_1": "b1",
    "beta_2": "b2",
    "epsilon": "eps",
    "weight_decay_rate": "weight_decay",
    "lr": "learning_rate",
    "global_clipnorm": "max_grad_norm",
}
_NO_OPTIONS = ("name", "implementation", "ema_momentum", "ema_overwrite_frequency")
# What says nothing: "decay" is that of the learning rate in Keras 1.
_DEFAULTS = {"decay": 0.0, "eps_root": 0.0, "nonfinite": "propagate"}


def option(name: str) -> str:
    """Our name of a hyper-parameter of Keras."""
    return _OPTIONS.get(name, name)


def options_of(settings: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The options in the configuration of a Keras optimizer, of Keras 2 or 3. `variant` is what it computes if it does not say."""
    options: dict[str, Any] = {"variant": variant}
    for name, value in settings.items():
        if isinstance(value, Mapping) and "class_name" in value:  # a schedule
            value = f"{value['class_name']}({', '.join(f'{k}={v}' for k, v in value.get('config', {}).items() if k != 'name')})"
        elif isinstance(value, np.generic):
            value = value.item()
        elif name == "variant" and isinstance(value, Mapping):
            value = value["name"]
        if name not in _NO_OPTIONS and not any(value is x for x in (None, False)) and value not in ([], {}, _DEFAULTS.get(name)):
            options[option(name)] = value
    return options


def same(a, b) -> bool:
    """Whether two hyper-parameters are equal, one of them perhaps after rounding to float32."""
    if is_number(a) and is_number(b):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def shown(value) -> str:
    # A float32 as float64 has digits that nobody wrote.
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def normal(name: str) -> str:
    """A tensor's name as all formats spell it: parts joined by "/", without TensorFlow's ":0"."""
    return str(name).removesuffix(":0")


def listed(names: Iterable[str]) -> str:
    names = [str(name) for name in names]
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def differences(ours, theirs, us: str, them: str) -> str:
    parts = [
        f"only {who} have {listed(names)}"
        for who, names in ((us, [n for n in ours if n not in theirs]), (them, [n for n in theirs if n not in ours]))
        if names
    ]
    return "; ".join(parts) or "the order differs"


class Casts:
    """Casts to the types of a target, and remembers what that rounded."""

    def __init__(self):
        self._rounded: dict[tuple[str, str], int] = {}

    def __call__(self, x: np.ndarray, dtype, what: str) -> np.ndarray:
        cast = x.astype(dtype)
        if cast.dtype != x.dtype and not np.array_equal(cast.astype(np.float64), x.astype(np.float64), equal_nan=True):
            self._rounded[what, cast.dtype.name] = self._rounded.get((what, cast.dtype.name), 0) + 1
        return cast

    def sentences(self) -> list[str]:
        return [
            f"the target stores {what} of {count} tensors in {dtype}: they were rounded" for (what, dtype), count in self._rounded.items()
        ]


def counter(step: int, dtype) -> np.ndarray:
    """The step in the target's integer type."""
    if step > np.iinfo(dtype).max:
        raise CheckpointError(f"{step} steps do not fit the target's counter, which is {np.dtype(dtype).name}")
    return np.asarray(step, dtype)


def _moment(x) -> np.ndarray:
    x = np.asarray(x)
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


@contextlib.contextmanager
def clearly(doing: str) -> Iterator[None]:
    """Turns what the libraries behind the formats raise into one CheckpointError that says what was being done."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except ImportError as error:
        raise ImportError(
            f"{doing}: it takes the package {error.name}, which is not installed here" if error.name else str(error)
        ) from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CheckpointError(f"{doing}: {lines[0] if lines else type(error).__name__}") from error
