"""What came of the trainings: the table, the verdict on the curves and the picture."""

import numpy as np

OURS, PEER, INK, FAINT = "#0b7285", "#e8590c", "#212529", "#adb5bd"


def smooth(losses, window):
    """Means over windows of consecutive losses."""
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def verdict(ours, peer):
    """Whether two loss curves agree.

    Two implementations round differently. If each step adds no more than one unit in the last place to the loss,
    the curves stay together within `rounding`. Long trainings magnify rounding beyond that; then the curves can
    still agree as means over a window, to the standard error of such means (`scatter`).
    """
    a, b = np.array(ours["losses"]), np.array(peer["losses"])
    rounding = len(b) * 2.0**-23 * b.max()
    apart = np.abs(a - b).max()
    window = _window(b)
    # Of one loss around the curve: from second differences, which know nothing of its slope, and by their median,
    # which knows nothing of the few steps in which it bends.
    spread = 1.4826 * np.median(np.abs(np.diff(b, 2))) / 6**0.5 if len(b) > 2 else 0.0
    scatter = 2 * spread / window**0.5
    apart_smooth = np.abs(smooth(a, window) - smooth(b, window)).max()
    names = f"{ours['framework']}: the curves of {ours['optimizer']} and {peer['optimizer']}"
    if apart <= rounding:
        kind, tolerance = "rounding", rounding
        sentence = (f"{names} agree: no loss differs by more than {apart:.1g}, and the tolerance is {rounding:.1g} "
                    f"(a unit in the last place for each of {len(b)} steps).")
    else:
        kind, tolerance = "scatter" if apart_smooth <= scatter else None, scatter
        sentence = (f"{names} {'agree' if kind else 'DO NOT AGREE'}: as means over {window} steps they are at most "
                    f"{apart_smooth:.2g} apart, and the tolerance is {scatter:.2g} (two standard errors of such a mean); "
                    f"single losses differ by up to {apart:.1g}, which is more than rounding ({rounding:.1g}).")
    return {"framework": ours["framework"], "agree": kind is not None, "within": kind, "largest_difference": float(apart),
            "tolerance": float(tolerance), "rounding": float(rounding), "scatter": float(scatter), "window": window,
            "largest_difference_of_means": float(apart_smooth), "sentence": sentence}


def _window(losses):
    return max(1, len(losses) // 20)


def summary(settings, results):
    """Results with what follows from them, for JSON."""
    pairs = [(results[k], results[k + 1]) for k in range(0, len(results), 2)]  # ours, then its peer
    for pair in pairs:
        for result in pair:
            seconds = result["seconds"]
            result["final_loss"] = float(np.mean(result["losses"][-_window(result["losses"]):]))
            result["share"] = seconds["optimizer"] / seconds["whole"]
            result["times_ours"] = seconds["optimizer"] / pair[0]["seconds"]["optimizer"]
    return {"settings": settings, "results": results, "verdicts": [verdict(*pair) for pair in pairs]}


def _label(result):
    return result["optimizer"] + (f" ({result['path']})" if result["path"] else "")


def table(summary):
    """The table that the run ends with."""
    rows = [("framework", "optimizer", "final loss", "optimizer ms", "whole step ms", "share", "x ours", "peak MB")]
    for r in summary["results"]:
        rows.append((r["framework"], _label(r), f"{r['final_loss']:.3f}", f"{r['seconds']['optimizer'] * 1e3:.2f}",
                     f"{r['seconds']['whole'] * 1e3:.1f}", f"{r['share']:.1%}", f"{r['times_ours']:.2f}",
                     f"{r['peak_bytes'] / 1e6:,.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) if k < 2 else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths)))
             for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(summary, path):
    """The picture: loss curves, how far they are apart, and times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results, verdicts = summary["results"], summary["verdicts"]
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
                         "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
                         "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11})
    columns = len(verdicts)
    figure, axes = plt.subplots(2, columns + 1, figsize=(5 * (columns + 1), 7), layout="constrained", squeeze=False,
                                height_ratios=(3, 2))
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for column, agreement in enumerate(verdicts):
        ours, peer = results[2 * column:2 * column + 2]
        _curves(axes[0, column], ours, peer, agreement)
        _apart(axes[1, column], ours, peer, agreement)
        for row in (0, 1):
            axes[row, column].sharey(axes[row, 0])
    _times(axes[0, columns], results)
    _shares(axes[1, columns], results)
    s = summary["settings"]
    figure.suptitle(f"Pretraining BERT ({s['model']}) on masked bytes: {s['steps']} steps of {s['batch']} x {s['length']} bytes",
                    fontsize=13, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _steps(losses, window):
    return np.arange(len(losses) - window + 1) + (window + 1) / 2


def _curves(axis, ours, peer, agreement):
    window = agreement["window"]
    axis.plot(np.arange(1, len(peer["losses"]) + 1), peer["losses"], color=FAINT, linewidth=0.6)
    for result, style in ((peer, {"color": PEER, "linewidth": 4.5, "alpha": 0.45}),
                          (ours, {"color": OURS, "linewidth": 1.6})):
        axis.plot(_steps(result["losses"], window), smooth(result["losses"], window), label=_label(result), **style)
    axis.set_title(f"{ours['framework']}: loss")
    if axis.get_subplotspec().is_first_col():
        axis.set_ylabel("nats for each masked byte")
    axis.legend(frameon=False, loc="upper right")


def _apart(axis, ours, peer, agreement):
    difference = np.abs(np.array(ours["losses"]) - np.array(peer["losses"]))
    axis.semilogy(np.arange(1, len(difference) + 1), np.maximum(difference, 1e-8), ".", color=OURS, markersize=4)
    for name in ("rounding", "scatter"):
        level = max(agreement[name], 1e-8)
        axis.axhline(level, color=PEER, linestyle="--", linewidth=1.2)
        axis.annotate(f"{name} {level:.1g}", (0.99, level), (0, 4), color=PEER, ha="right",
                      xycoords=("axes fraction", "data"), textcoords="offset points")
    axis.set_title(f"{ours['framework']}: difference of the losses")
    axis.set_xlabel("step (at the bottom: equal losses)")
    axis.set_ylim(5e-9, max(2.0, 2 * difference.max()))


def _bars(axis, results, values, labels, title):
    places = [k + 0.4 * (k // 2) for k in range(len(results))]
    axis.barh(places, values, color=[PEER if k % 2 else OURS for k in range(len(results))], height=0.72)
    for place, value, label in zip(places, values, labels):
        axis.annotate(label, (value, place), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(places, [f"{r['framework']}\n{r['optimizer'].removeprefix('keras.optimizers.')}" for r in results])
    axis.tick_params(length=0)
    axis.set_xlim(0, 1.3 * max(values))
    axis.invert_yaxis()
    axis.set_title(title)


def _times(axis, results):
    values = [1e3 * r["seconds"]["optimizer"] for r in results]
    labels = [f"{value:.1f} ms" + (f", {r['times_ours']:.1f} x" if k % 2 else "") for k, (value, r) in enumerate(zip(values, results))]
    _bars(axis, results, values, labels, "Time of the optimizer alone, ms")


def _shares(axis, results):
    values = [100 * r["share"] for r in results]
    _bars(axis, results, values, [f"{value:.1f} %" for value in values], "Its share of the whole step, %")
