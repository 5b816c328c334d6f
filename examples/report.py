"""What came of the trainings: the table, the verdict on the curves and the picture."""

import numpy as np

OURS, PEER, INK, FAINT = "#0b7285", "#e8590c", "#212529", "#adb5bd"


def smooth(losses, window):
    """Means over windows of consecutive losses."""
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def verdict(ours, peer):
    """Whether two loss curves agree, as far as the scatter of the losses lets one tell.

    Rounding differs between implementations, and training magnifies it; so from some step on only curves that
    are smoothed over a window can be compared, and only to the standard error of the means that they consist of.
    """
    a, b = np.array(ours["losses"]), np.array(peer["losses"])
    window = max(1, len(a) // 20)
    # Of one loss around the curve: from second differences, which know nothing of its slope, and by their median,
    # which knows nothing of the few steps in which it bends.
    scatter = 1.4826 * np.median(np.abs(np.diff(b, 2))) / 6**0.5 if len(b) > 2 else 0.0
    tolerance = max(2 * scatter / window**0.5, 1e-3)
    apart = np.abs(smooth(a, window) - smooth(b, window)).max()
    first = np.abs(a - b)[:10].max()
    agree = bool(apart <= tolerance)
    sentence = (f"{ours['framework']}: the curves {'agree' if agree else 'DO NOT AGREE'}: as means over {window} steps they are "
                f"at most {apart:.2g} apart, with a tolerance of {tolerance:.2g} (two standard errors of such a mean, from "
                f"the scatter of {peer['optimizer']}'s losses), and in the first {len(a[:10])} steps at most {first:.1g}.")
    return {"framework": ours["framework"], "agree": agree, "window": window, "largest_difference": float(apart),
            "tolerance": float(tolerance), "first_steps_difference": float(first), "sentence": sentence}


def summary(settings, results):
    """Results with what follows from them, for JSON."""
    pairs = [(results[k], results[k + 1]) for k in range(0, len(results), 2)]  # ours, then its peer
    for pair in pairs:
        for result in pair:
            seconds = result["seconds"]
            window = max(1, len(result["losses"]) // 20)
            result["final_loss"] = float(np.mean(result["losses"][-window:]))
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
    axis.set_ylabel("nats for each masked byte")
    axis.legend(frameon=False, loc="upper right")


def _apart(axis, ours, peer, agreement):
    window = agreement["window"]
    difference = np.abs(smooth(ours["losses"], window) - smooth(peer["losses"], window))
    axis.semilogy(_steps(ours["losses"], window), np.maximum(difference, 1e-8), color=OURS, linewidth=1.3)
    axis.axhline(agreement["tolerance"], color=PEER, linestyle="--", linewidth=1.2)
    axis.annotate(f"tolerance {agreement['tolerance']:.2g}", (0.99, agreement["tolerance"]), (0, 4), color=PEER,
                  xycoords=("axes fraction", "data"), textcoords="offset points", ha="right")
    axis.set_title(f"{ours['framework']}: how far the curves are apart")
    axis.set_xlabel(f"step (means over {window})")
    axis.set_ylim(top=max(1.0, 10 * agreement["tolerance"]))


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
