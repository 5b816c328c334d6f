"""LAMB of PyTorch: apex's FusedLAMB, timm's Lamb, and any optimizer whose state has exp_avg and exp_avg_sq.

A .pt or .pth file needs torch. A .safetensors file does not; this writes one, in PyTorch::

    order, state = [p for group in optimizer.param_groups for p in group["params"]], optimizer.state_dict()
    tensors = {f"state.{i}.{key}": torch.as_tensor(x).contiguous() for i, slots in state["state"].items() for key, x in slots.items()}
    tensors.update({f"param.{i}": p.detach().contiguous() for i, p in enumerate(order)})      # optional
    names = {p: name for name, p in model.named_parameters()}                                 # optional, as is "names" in the metadata
    metadata = {"param_groups": json.dumps(state["param_groups"], default=float), "names": json.dumps([names[p] for p in order])}
    safetensors.torch.save_file(tensors, "run.safetensors", metadata)

`xla_lamb.checkpoints.to_apex` takes such a file, and those of the other frameworks, into an optimizer in PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable

import numpy as np

from xla_lamb.checkpoints.state import Casts, Checkpoint, CheckpointError, Report, carry, is_number, listed, match, normal, shown

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIONS = {"lr": "learning_rate"}
_NO_OPTIONS = (
    "params",
    "param_names",
    "step",
    "betas",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "max_lr_snapshot",
    "initial_lr",
)
# What FusedLAMB's constructor puts into a group.
_GROUP = dict(lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, grad_averaging=True, max_grad_norm=1.0)


def from_apex(optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None = None) -> Checkpoint:
    """The checkpoint of a LAMB in PyTorch, after its first step.

    Args:
      optimizer: apex.optimizers.FusedLAMB, timm.optim.Lamb, or another torch.optim.Optimizer with exp_avg and exp_avg_sq.
      named_parameters: ``model.named_parameters()``. None: tensors are known by their number.

    Raises:
      CheckpointError: if there are no such moments, or its parameters have taken different numbers of steps.
    """
    return _in_memory(optimizer, named_parameters).checkpoint()


def to_apex(
    checkpoint: Checkpoint,
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    *,
    names: Any = None,
    by_position: bool = False,
) -> Report:
    """Fills a LAMB in PyTorch, which may be fresh, and its parameters if the checkpoint has some.

    PyTorch keeps moments in the type of their parameter. The groups stay as they are; hyper-parameters that the checkpoint tells, and that
    do not differ between the groups, are replaced.

    Args:
      optimizer, named_parameters: as for `from_apex`.
      names, by_position: as for `xla_lamb.checkpoints.match`.

    Raises:
      CheckpointError: if the tensors do not match; then nothing was changed.
    """
    import torch

    target = _in_memory(optimizer, named_parameters)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    result, report = target.filled(checkpoint, names, by_position)
    optimizer.load_state_dict(_to_torch(result))
    if checkpoint.params is not None:
        with torch.no_grad():
            for i, x in result.params.items():
                tensors[i].copy_(_tensor(x))
    return report


def read(path: Path) -> Checkpoint:
    return _open(path).checkpoint()


def write(checkpoint: Checkpoint, path: Path, like: Path | None, names, by_position: bool) -> Report:
    """Without `like`: one group with the defaults of FusedLAMB where the source tells nothing."""
    _kind(path)
    target = _State([], {}) if like is None else _open(like)
    result, report = target.filled(checkpoint, names, by_position)
    if _kind(path) == "torch":
        if checkpoint.params is not None:
            report.lost.append("the parameters are not written: a .pt file gets the optimizer's state_dict alone")
        _torch().save(_to_torch(result), path)
        return report
    from safetensors.numpy import save_file

    arrays = {
        f"state.{i}.{key}": np.ascontiguousarray(x).reshape(np.shape(x)) for i, slots in result.slots.items() for key, x in slots.items()
    }
    arrays |= {f"param.{i}": x for i, x in result.params.items()}
    metadata = {"param_groups": json.dumps(result.groups)}
    if result.names:
        metadata["names"] = json.dumps(result.names)
    save_file(arrays, path, metadata)
    return report


class _State:
    """An optimizer's state_dict in NumPy.

    Attributes:
      groups: the param_groups; "params" are numbers.
      slots: the state by number: {"exp_avg", "exp_avg_sq", ...}.
      order: the numbers in the order of the groups.
      names: of the parameters in that order, or None. `name` has them by number, or the numbers themselves.
      params: parameters by number, as far as they are known.
    """

    def __init__(self, groups, slots, names=None, params=None):
        self.groups, self.slots, self.params = groups, slots, params or {}
        self.order = [int(i) for group in groups for i in group["params"]]
        self.names = names or [name for group in groups for name in group.get("param_names", ())] or None
        if self.names is not None and len(self.names) != len(self.order):
            raise CheckpointError(f"there are {len(self.names)} names for {len(self.order)} parameters")
        self.name = dict(zip(self.order, map(normal, self.names or self.order)))
        if len(set(self.name.values())) < len(self.order):
            raise CheckpointError("two parameters have the same name")

    def options(self) -> dict[str, Any]:
        """What all groups agree on; what they do not, as text."""
        options: dict[str, Any] = {}
        if any("grad_averaging" in group for group in self.groups):
            options["variant"] = "timm" if any("always_adapt" in group for group in self.groups) else "apex"
        for key in dict.fromkeys(key for group in self.groups for key in group):
            values = [group.get(key) for group in self.groups]
            if key == "betas":
                for k, name in enumerate(("b1", "b2")):
                    options[name] = _agreed([betas[k] for betas in values if betas])
            elif key in ("bias_correction", "grad_averaging"):
                if not all(values):
                    options[key] = _agreed(values)
            elif key not in _NO_OPTIONS and any(value not in (None, False) for value in values):
                options[_OPTIONS.get(key, key)] = _agreed(values)
        return options

    def step(self) -> int:
        steps = {
            int(group["step"])
            for group in self.groups
            if group.get("step") is not None and any(self.slots.get(int(i)) for i in group["params"])
        }
        steps |= {int(slots["step"]) for slots in self.slots.values() if "step" in slots}
        if len(steps) != 1:
            raise CheckpointError(
                f"its parameters have taken different numbers of steps: {listed(sorted(steps))}"
                if steps
                else "it does not say how many steps were taken"
            )
        return steps.pop()

    def checkpoint(self) -> Checkpoint:
        kept = [i for i in self.order if self.slots.get(i)]
        if not kept:
            raise CheckpointError("it holds no LAMB state: the optimizer has taken no step")
        for i in kept:
            if not set(_MOMENTS) <= self.slots[i].keys():
                raise CheckpointError(
                    f"it holds no LAMB state: parameter {self.name[i]} has {listed(self.slots[i])}, and not exp_avg and exp_avg_sq"
                )
        first, second = ({self.name[i]: self.slots[i][moment] for i in kept} for moment in _MOMENTS)
        params = {self.name[i]: self.params[i] for i in kept} if all(i in self.params for i in kept) else None
        lost = []
        if left := [self.name[i] for i in self.order if i not in kept]:
            lost.append(f"parameters that never had a gradient have no moments: {listed(left)}")
        if others := sorted({key for i in kept for key in self.slots[i]} - {*_MOMENTS, "step"}):
            lost.append(f"what is no part of LAMB is not carried over: {listed(others)} of each parameter")
        return Checkpoint(self.step(), first, second, params, self.options(), bool(self.names), lost)

    def filled(self, checkpoint: Checkpoint, names, by_position) -> tuple[_State, Report]:
        """This state, as target, with the checkpoint's values."""
        shapes = self._shapes() if self.groups else None
        checkpoint, report = match(checkpoint, shapes, named=bool(self.names), names=names, by_position=by_position)
        if shapes is None:
            new = _State([dict(_GROUP, params=list(range(len(checkpoint.names))))], {}, checkpoint.names if checkpoint.named else None)
            numbers = new.order
            report.lost.append(
                "there is one parameter group, with apex's settings where the source tells none; --like (like=) takes the target's own groups"
            )
        else:
            new = _State([dict(group) for group in self.groups], dict(self.slots), self.names, dict(self.params))
            numbers = [i for i in self.order if self.name[i] in shapes]
        casts = Casts()
        # apex and timm count in the group, torch.optim beside the moments.
        counts_by_parameter = any("step" in slots for slots in self.slots.values())
        counts_by_parameter |= not self.slots and not any("bias_correction" in group for group in new.groups)
        for i, name in zip(numbers, checkpoint.names):
            old = self.slots.get(i, {})
            new.slots[i] = dict(old)
            for moment, values in zip(_MOMENTS, (checkpoint.first, checkpoint.second)):
                new.slots[i][moment] = casts(values[name], old[moment].dtype, "moments") if moment in old else values[name]
            if counts_by_parameter:
                new.slots[i]["step"] = np.asarray(checkpoint.step, old["step"].dtype if "step" in old else np.float32)
            if checkpoint.params is not None:
                x = checkpoint.params[name]
                new.params[i] = casts(x, self.params[i].dtype, "the parameters") if i in self.params else x
        options = new.options()
        stored = [name for name in ("learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm") if is_number(options.get(name))]
        changes, sentences = carry(checkpoint.options, options, stored)
        betas = [changes.pop(name, options.get(name)) for name in ("b1", "b2")]
        for group in new.groups:
            if not counts_by_parameter:
                group["step"] = checkpoint.step
            if "betas" in group:
                group["betas"] = [new if is_number(new) else old for new, old in zip(betas, group["betas"])]
            group.update({"lr" if name == "learning_rate" else name: value for name, value in changes.items()})
        if checkpoint.params is None:
            sentences.append(f"the source has no parameters: {'the target keeps its own' if new.params else 'none were written'}")
        report.lost += sentences + casts.sentences()
        return new, report

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those parameters that have moments; of all before the first step."""
        shapes = {}
        for i in [i for i in self.order if self.slots.get(i)] or self.order:
            known = self.slots.get(i, {}).get("exp_avg", self.params.get(i))
            if known is None:
                raise CheckpointError(
                    f"the target has taken no step, so the shape of its parameter {self.name[i]} is not known: save it after a step"
                )
            shapes[self.name[i]] = np.shape(known)
        return shapes


def _agreed(values):
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    return values[0] if all(v == values[0] for v in values) else f"{' or '.join(map(shown, dict.fromkeys(values)))}, by parameter group"


# Files -----------------------------------------------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix in (".pt", ".pth", ".bin"):
        return "torch"
    raise CheckpointError(f"a PyTorch checkpoint is a .safetensors, .pt or .pth file, and {path.name} is none")


def _open(path: Path) -> _State:
    if _kind(path) == "torch":
        return _from_torch(_torch().load(path, map_location="cpu", weights_only=True), path)
    try:
        import ml_dtypes  # noqa: F401  without it NumPy has no bfloat16
    except ImportError:
        pass
    from safetensors import safe_open

    slots: dict[int, dict[str, np.ndarray]] = {}
    params = {}
    with safe_open(path, "np") as file:
        metadata = file.metadata() or {}
        if "param_groups" not in metadata:
            raise CheckpointError(
                f"{path} holds no optimizer: its metadata has no param_groups; the docstring of xla_lamb.checkpoints.apex shows how to write "
                "such a file"
            )
        for key in file.keys():
            kind, _, rest = key.partition(".")
            if kind == "state":
                i, _, slot = rest.partition(".")
                slots.setdefault(int(i), {})[slot] = file.get_tensor(key)
            elif kind == "param":
                params[int(rest)] = file.get_tensor(key)
    return _State(json.loads(metadata["param_groups"]), slots, json.loads(metadata.get("names", "null")), params)


# PyTorch ---------------------------------------------------------------------------------------------------------------------


def _torch():
    try:
        import torch
    except ImportError:
        raise ImportError(
            "a .pt or .pth file needs PyTorch, which is not installed here: install it, or write a .safetensors file where it is, as the "
            "docstring of xla_lamb.checkpoints.apex shows"
        ) from None
    return torch


def _from_torch(loaded, path: Path) -> _State:
    """The one state_dict of an optimizer in what torch.save wrote: by itself, or beside a model's weights."""
    entries = {"": loaded, **loaded} if isinstance(loaded, dict) else {}
    found = [x for x in entries.values() if isinstance(x, dict) and {"state", "param_groups"} <= x.keys()]
    if len(found) != 1:
        raise CheckpointError(
            f"{path} holds {len(found)} states of optimizers (param_groups and state), and there must be one; it has {listed(entries)}"
        )
    state = _State(*_arrays(found[0]))
    weights = [x for x in entries.values() if isinstance(x, dict) and x and all(hasattr(t, "detach") for t in x.values())]
    if state.names and len(weights) == 1 and set(state.names) <= weights[0].keys():
        state.params = {i: _numpy(weights[0][name]) for i, name in zip(state.order, state.names)}
    return state


def _arrays(state_dict) -> tuple[list, dict]:
    plain = lambda x: _numpy(x).item() if hasattr(x, "detach") else x
    groups = [{key: plain(value) for key, value in group.items()} for group in state_dict["param_groups"]]
    slots = {int(i): {key: _numpy(x) for key, x in slots.items()} for i, slots in state_dict["state"].items()}
    return groups, slots


def _in_memory(optimizer, named_parameters) -> _State:
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    names = None
    if named_parameters is not None:
        known = {id(p): name for name, p in named_parameters}
        if unknown := [i for i, p in enumerate(tensors) if id(p) not in known]:
            raise CheckpointError(f"parameters {listed(unknown)} of the optimizer are not among the named ones")
        names = [known[id(p)] for p in tensors]
    return _State(*_arrays(optimizer.state_dict()), names, dict(enumerate(map(_numpy, tensors))))


def _to_torch(state: _State) -> dict[str, Any]:
    slots = {i: {key: _tensor(x) for key, x in slots.items()} for i, slots in state.slots.items()}
    return {"state": slots, "param_groups": state.groups}


def _numpy(x) -> np.ndarray:
    if not hasattr(x, "detach"):
        return np.asarray(x)
    x = x.detach().cpu()
    if str(x.dtype) != "torch.bfloat16":
        return x.numpy()
    try:
        import ml_dtypes
    except ImportError:
        return x.float().numpy()
    return x.float().numpy().astype(ml_dtypes.bfloat16)


def _tensor(x: np.ndarray):
    torch = _torch()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(x))
