"""Trust ratios to look at: the table of |p|, |u| and the ratio of a step, and its picture. People tune LAMB by looking at it.

Importing this module loads NumPy alone; JAX, TensorFlow and matplotlib are loaded by who uses them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
import pathlib
import sys
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np


class Row(NamedTuple):
    """One layer of one tensor in a `TrustRatios`."""

    name: str
    param_norm: float
    update_norm: float
    ratio: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrustRatios:
    """The norms and trust ratios of one step: N rows, one for each tensor, or for each layer of a tensor that has layer_axes.

    ``table[name]`` is a `Row`, iterating gives the rows in order, ``name in table`` asks for one, ``print(table)`` prints it.

    Attributes:
      names: N names, as in "encoder/kernel"; of layers "encoder/kernel[0]", or "experts/kernel[0,3]" with two layer axes.
      param_norm: |p|, [N] float64, read-only: the norm that entered the ratio, with decoupled weight decay that of the decayed parameter.
      update_norm: |u|, [N] float64, read-only; u is defined in `xla_lamb.Variant`.
      ratio: [N] float64, read-only: what the step multiplied u by: 1 where the tensor has no trust ratio, or a norm was 0.

    A row of three zeros took no step: all do in a skipped step, and with Keras those whose gradient was None.
    """

    names: tuple[str, ...]
    param_norm: np.ndarray
    update_norm: np.ndarray
    ratio: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(self.names))
        for field in ("param_norm", "update_norm", "ratio"):
            values = np.array(getattr(self, field), np.float64)
            if values.shape != (len(self.names),):
                raise ValueError(f"{field} must have one number for each of the {len(self.names)} names, but has shape {values.shape}")
            values.flags.writeable = False
            object.__setattr__(self, field, values)

    @classmethod
    def of(cls, names: Iterable[str], trust: Iterable[Any]) -> TrustRatios:
        """The table of tensors whose names may repeat: the second "kernel" becomes "kernel_1".

        Args:
          names: one for each tensor.
          trust: for each tensor an array [*layer_shape, 3]: |p|, |u| and the ratio.
        """
        names, trust = list(names), [np.asarray(x, np.float64) for x in trust]
        if len(names) != len(trust):
            raise ValueError(f"there are {len(names)} tensors, but the stats of {len(trust)}: pass the tensors that the step updated")
        rows, numbers = [], [np.zeros((0, 3))]
        for name, array in zip(_unique(names), trust):
            if array.ndim == 0 or array.shape[-1] != 3:
                raise ValueError(f"the stats of {name} must have the shape [*layer_shape, 3], not {array.shape}")
            rows += [f"{name}[{','.join(map(str, index))}]" if index else name for index in np.ndindex(array.shape[:-1])]
            numbers.append(array.reshape(-1, 3))
        return cls(rows, *np.concatenate(numbers).T)

    @property
    def took_step(self) -> np.ndarray:
        """[N] bool: which rows took the step."""
        # In a step |p| = 0 makes the ratio 1, so none of its rows is zero.
        return (self.param_norm != 0) | (self.update_norm != 0) | (self.ratio != 0)

    @property
    def skipped(self) -> bool:
        """Whether no row took the step."""
        return not self.took_step.any()

    def summary(self) -> dict[str, float]:
        """``{"min": ..., "median": ..., "max": ...}`` of the ratio over the rows that took the step: NaN if one is NaN, or there is none."""
        ratio = self.ratio[self.took_step]
        functions = {"min": np.min, "median": np.median, "max": np.max}
        return {name: float(f(ratio)) if ratio.size else float("nan") for name, f in functions.items()}

    def to_dict(self) -> dict[str, dict[str, float]]:
        """``{name: {"param_norm": ..., "update_norm": ..., "ratio": ...}}``."""
        return {row.name: {field: getattr(row, field) for field in Row._fields[1:]} for row in self}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Row]:
        return map(Row, self.names, self.param_norm.tolist(), self.update_norm.tolist(), self.ratio.tolist())

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Row:
        if name not in self.names:
            layers = [n for n in self.names if n.startswith(f"{name}[")]
            raise KeyError(f"there is no {name!r}; there are {', '.join((layers or self.names)[:5])}{', ...' * (len(layers or self.names) > 5)}")
        i = self.names.index(name)
        return Row(name, float(self.param_norm[i]), float(self.update_norm[i]), float(self.ratio[i]))

    def __str__(self) -> str:
        rows = [("", "|p|", "|u|", "ratio"), *((row.name, *(f"{x:.4g}" for x in row[1:])) for row in self)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:]))]) for row in rows]
        return "\n".join([*lines, _caption(self)])

    def __repr__(self) -> str:
        return f"<TrustRatios of {len(self)} tensors or layers: {_caption(self)}>"


def trust_ratios(params: Any, stats: Any) -> TrustRatios:
    """The table of a step that was asked for its stats, with the names of the parameters.

    Args:
      params: the tree of parameters that the step updated (only its names are read, so it may be the tree before or after the step,
        donated or not); with TensorFlow the list of variables.
      stats: the `StepStats` that `xla_lamb.lamb(...).step(..., stats=True)` or `xla_lamb.tensorflow.lamb_step(..., stats=True)`
        returned.

    Raises:
      TypeError: for anything else, or inside jit or tf.function, where there are no numbers yet.
      ValueError: if these are not the stats of these parameters, or the step was not asked for them.

    Example:
      >>> import jax.numpy as jnp, xla_lamb
      >>> from xla_lamb.trust import trust_ratios
      >>> params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
      >>> opt = xla_lamb.lamb(1e-3)
      >>> params, state, stats = opt.step(params, opt.init(params), params, stats=True)
      >>> print(trust_ratios(params, stats))
                      |p|    |u|  ratio
      dense/bias        0      0      1
      dense/kernel  2.449  2.449      1
      ratio: min 1, median 1, max 1
    """
    # StepStats of a module that is not loaded cannot be.
    kinds = {name: getattr(sys.modules.get(f"xla_lamb.{name}"), "StepStats", ()) for name in ("optax", "tensorflow")}
    if not isinstance(stats, tuple(filter(None, kinds.values()))):
        raise TypeError(f"stats must be the StepStats that a step with stats=True returns, not {type(stats).__name__}")
    if stats.trust is None:
        raise ValueError("these StepStats hold no trust ratios: ask the step for them with stats=True")
    return (_of_tensorflow if isinstance(stats, kinds["tensorflow"]) else _of_jax)(params, stats)


def _of_jax(params, stats) -> TrustRatios:
    import jax

    from xla_lamb.optax import parameter_names

    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(stats.trust)):
        raise TypeError("trust_ratios reads numbers, and there are none inside jit: return the stats, and call it outside")
    ours, theirs = jax.tree.structure(params), jax.tree.structure(stats.trust)
    if ours != theirs:
        raise ValueError(f"these are not the stats of these parameters, whose tree is {ours}, that of the stats {theirs}")
    trust = jax.device_get(stats.trust)  # all at once
    names = [name or "(the only one)" for name in parameter_names(params)]
    return TrustRatios.of(names, jax.tree.leaves(trust))


def _of_tensorflow(variables, stats) -> TrustRatios:
    if not all(hasattr(x, "numpy") for x in stats.trust):
        raise TypeError("trust_ratios reads numbers, and there are none inside tf.function: return the stats, and call it outside")
    names = [getattr(v, "path", None) or v.name.split(":")[0] for v in variables]
    return TrustRatios.of(names, [x.numpy() for x in stats.trust])


def _unique(names: Sequence[str]) -> list[str]:
    known, result = set(names), []
    for name in names:
        if name in result:
            name = next(new for k in itertools.count(1) if (new := f"{name}_{k}") not in known)
            known.add(name)
        result.append(name)
    return result


def _caption(table: TrustRatios) -> str:
    if table.skipped:
        return "the step was skipped"
    return "ratio: " + ", ".join(f"{name} {value:.4g}" for name, value in table.summary().items())


# The picture --------------------------------------------------------------------------------------------------------------

_DPI = 110
_MOST_COLUMNS = 600  # of the heatmap: more would be narrower than a pixel
_INK, _GRID = "#333333", "#dddddd"
_RATIO, _PARAM, _UPDATE = "#1b7837", "#2166ac", "#d6604d"
_ZERO, _INFINITE, _NAN, _NO_STEP = "#000000", "#e7298a", "#ff0000", "#d9d9d9"


def plot(
    tables: TrustRatios | Sequence[TrustRatios],
    path: str | os.PathLike,
    *,
    steps: Sequence[int] | None = None,
    title: str | None = None,
) -> None:
    """Draws trust ratios into one PNG. A file of that name is replaced, and only once the new one is whole.

    Of one table it shows each row's ratio, |p| and |u|; of several, a heatmap of the ratios, rows by steps, and |p| and |u| of the
    last step that was not skipped. Axes and colors are logarithmic; ratios and norms that are 0, infinite or NaN have marks or colors
    of their own, which the legend explains. It needs matplotlib, but no display, and leaves pyplot alone.

    Args:
      tables: one table, or a history of them with the same rows.
      path: of the PNG, in a folder that exists.
      steps: the number of each table's step. None: 1, 2, ...
      title: None: "Trust ratios".

    Raises:
      ImportError: without matplotlib.
      FileNotFoundError: if the folder does not exist.
      ValueError: for a path that does not end with ".png", no tables or rows, tables with different rows, or another number of steps.
    """
    path = check_plot(path)
    tables = [tables] if isinstance(tables, TrustRatios) else list(tables)
    if not tables or not len(tables[0]):
        raise ValueError("there is nothing to plot: " + ("the table has no rows" if tables else "tables is empty"))
    for k, table in enumerate(tables):
        if table.names != tables[0].names:
            odd = sorted(set(table.names) ^ set(tables[0].names))
            how = f"they differ in {', '.join(odd[:5])}" if odd else "their order differs"
            raise ValueError(f"table {k} has not the rows of table 0: {how}")
    numbers = list(range(1, len(tables) + 1) if steps is None else steps)
    if len(numbers) != len(tables):
        raise ValueError(f"there are {len(tables)} tables, but {len(numbers)} steps")

    figure = _draw(tables, numbers if steps is not None or len(tables) > 1 else None, title or "Trust ratios")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=_DPI)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_plot(path: str | os.PathLike) -> pathlib.Path:
    """The path, if `plot` can write there; else its errors, before anything is computed."""
    path = pathlib.Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f'the picture is a PNG, and its path must end with ".png", not as in {str(path)!r}')
    if path.is_dir():
        raise ValueError(f"the picture cannot be written to {str(path)!r}, which is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for the picture {path.name!r}: make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("to plot trust ratios, install matplotlib: pip install matplotlib")
    return path


def _draw(tables, steps, title):
    from matplotlib.figure import Figure

    last = next((k for k in reversed(range(len(tables))) if not tables[k].skipped), len(tables) - 1)
    table, count = tables[last], len(tables[last])
    at = f" at step {steps[last]}" if steps is not None else ""
    height = min(max(2.4 + 0.2 * count, 3.6), 18.0)
    figure = Figure(figsize=(13, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    handles = _ratios(left, table) if len(tables) == 1 else _heatmap(figure, left, tables, steps)
    handles += _norms(right, table) + _marks([table.param_norm, table.update_norm, *([table.ratio] if len(tables) == 1 else [])])

    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.01, 1 - 0.42 / height, f"{_caption(table)}{at}", ha="left", va="center", fontsize=9, color=_INK)
    figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.995, 1 - 0.08 / height), ncols=min(len(handles), 6), frameon=False, fontsize=8.5
    )
    left.set_title("trust ratio", loc="left", fontsize=10, color=_INK)
    right.set_title(f"|p| and |u|{at}", loc="left", fontsize=10, color=_INK)

    inches = 0.12  # a label's
    places = range(0, count, math.ceil(count * inches / (height - 1.8)))
    left.set_yticks(places, [_short(table.names[k]) for k in places], fontsize=7, color=_INK)
    left.set_ylim(count - 0.5, -0.5)
    for axis in (left, right):
        axis.tick_params(axis="x", which="both", labelsize=8, colors=_INK, top=height > 9, labeltop=height > 9)
        axis.tick_params(axis="y", length=2 if axis is left else 0)
        for spine in axis.spines.values():
            spine.set_color(_GRID)
    return figure


def _short(name: str, most: int = 56) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _ratios(axis, table) -> list:
    y, good = np.arange(len(table)), _drawable(table.ratio)
    axis.hlines(y[good], 1, table.ratio[good], color=_RATIO, linewidth=1, alpha=0.5)
    axis.axvline(1, color=_INK, linewidth=0.8)
    _log_axis(axis, np.append(table.ratio, 1))
    return [_dots(axis, table.ratio, _RATIO, "trust ratio")]


def _norms(axis, table) -> list:
    y, both = np.arange(len(table)), _drawable(table.param_norm) & _drawable(table.update_norm)
    axis.hlines(y[both], table.param_norm[both], table.update_norm[both], color=_GRID, linewidth=1.5)
    _log_axis(axis, np.concatenate([table.param_norm, table.update_norm]))
    return [_dots(axis, table.param_norm, _PARAM, "|p|"), _dots(axis, table.update_norm, _UPDATE, "|u|", fill="none")]


def _heatmap(figure, axis, tables, steps) -> list:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgb
    from matplotlib.patches import Patch

    kept = _spread(len(tables), _MOST_COLUMNS)
    ratio = np.stack([tables[k].ratio for k in kept], axis=1)
    took_step = np.stack([tables[k].took_step for k in kept], axis=1)
    good = _drawable(ratio)
    low, high = (ratio[good].min(), ratio[good].max()) if good.any() else (0.1, 10.0)
    if high < 1.1 * low:  # one color for what is all but equal
        low, high = low / 2, high * 2
    colors = ScalarMappable(LogNorm(low, high), "viridis")
    image = colors.to_rgba(np.where(good, ratio, low))[..., :3]
    kinds = (
        ("no step", _NO_STEP, ~took_step),
        ("ratio 0", _ZERO, (ratio == 0) & took_step),
        ("ratio infinite", _INFINITE, np.isinf(ratio)),
        ("ratio NaN", _NAN, np.isnan(ratio)),
    )
    for _, color, where in kinds:
        image[where] = to_rgb(color)
    axis.imshow(image, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(colors, cax=axis.inset_axes((1.012, 0, 0.02, 1)))
    bar.ax.tick_params(which="both", labelsize=8, colors=_INK)
    bar.outline.set_visible(False)
    places = _spread(len(kept), 9)
    axis.set_xticks(places, [str(steps[kept[k]]) for k in places])
    axis.set_xlabel("step" + (f" ({len(kept)} of {len(tables)} are shown)" if len(kept) < len(tables) else ""), fontsize=9, color=_INK)
    return [Patch(color=color, label=text) for text, color, where in kinds if where.any()]


def _spread(count: int, most: int):
    """At most `most` of range(count), evenly, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _drawable(values):
    return np.isfinite(values) & (values > 0)


# What has no place on a logarithmic axis is marked at its ends.
_ENDS = (("0", lambda x: x == 0, 0.012, "<"), ("infinite", np.isinf, 0.988, ">"), ("NaN", np.isnan, 0.988, "X"))


def _dots(axis, values, color, label, fill=None):
    y, good = np.arange(len(values)), _drawable(values)
    size = 4.5 if len(y) <= 120 else 2.5
    for _, which, x, marker in _ENDS:
        where = which(values)
        if where.any():
            ends = np.full(where.sum(), x)
            axis.plot(ends, y[where], marker, color=color, markersize=size + 2, transform=axis.get_yaxis_transform(), clip_on=False)
    return axis.plot(values[good], y[good], "o", color=color, markerfacecolor=fill, markersize=size, label=label)[0]


def _marks(values) -> list:
    from matplotlib.lines import Line2D

    values = np.concatenate(values)
    return [Line2D([], [], marker=m, color=_INK, linestyle="none", label=text) for text, which, _, m in _ENDS if which(values).any()]


def _log_axis(axis, values) -> None:
    exponents = np.log10(values[_drawable(values)])
    low, high = (exponents.min(), exponents.max()) if exponents.size else (-1.0, 1.0)
    margin = max(0.06 * (high - low) + 0.15, (2.1 - (high - low)) / 2)  # two decades, so that two powers of ten are on the axis
    axis.set_xlim(10.0 ** max(low - margin, -300), 10.0 ** min(high + margin, 300))
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter("")
    axis.grid(axis="x", color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
