"""`python -m benchmarks.step`: the fused step against its peers and against the floor of memory.

    python -m benchmarks.step --set bert-large --against optax,keras,memcpy --json
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

from benchmarks import floor, sets

LEAST = 28  # bytes an element that any step moves: read p, g, m, v; write p, m, v
ON_TENSORFLOW = ("keras", "minimize")
PEERS = ("optax", *ON_TENSORFLOW, "reference", "dispatch", "memcpy")


def work(framework, options, contenders):
    """Measures one framework's contenders in a process of their own."""
    job = {"framework": framework, "set": options.set, "repeats": options.repeats, "loop": options.loop,
           "contenders": contenders}
    print(f"{framework}:", file=sys.stderr)
    child = subprocess.run([sys.executable, "-m", "benchmarks.worker", json.dumps(job)], stdout=subprocess.PIPE,
                           text=True, cwd=pathlib.Path(__file__).parent.parent)
    if child.returncode:
        why = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        sys.exit(f"benchmarks.step: the process for {framework} ended with {why}"
                 + ("; was there memory enough?" if child.returncode == -9 else ""))
    return json.loads(child.stdout.splitlines()[-1])


def machine():
    """The machine and the versions, as far as they bear on the figures."""
    name = platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    versions = {}
    for package in ("jax", "jaxlib", "optax", "tensorflow", "keras"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"processor": name, "cores": floor.cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "versions": versions}


def run(options):
    """All measurements of one set, as one dictionary for JSON."""
    shapes = sets.shapes(options.set)
    elements = sets.elements(shapes)
    report = {"set": options.set, "tensors": len(shapes), "parameters": elements, "repeats": options.repeats,
              "loop": options.loop, "machine": machine(), "results": {}}
    workers = {"jax": [peer for peer in options.against if peer not in ON_TENSORFLOW],
               "tensorflow": [peer for peer in options.against if peer in ON_TENSORFLOW]}
    if not workers["tensorflow"]:
        del workers["tensorflow"]
    for framework, contenders in workers.items():
        found = work(framework, options, contenders)
        report.setdefault("devices", {})[framework] = found["device"]
        if "memcpy" in contenders:
            report["floor"] = found["floor"]
        ours = None
        for name, result in found["results"].items():
            seconds = result["median_s"] = statistics.median(result["seconds"])
            ours = ours or seconds  # ours is the first of each framework
            moved = 0 if name == "dispatch alone" else elements * floor.BYTES.get(name, LEAST)
            result.update(framework=framework, min_s=min(result["seconds"]), times_ours=seconds / ours,
                          bytes=moved, gb_per_s=moved / seconds / 1e9)
            report["results"][name] = result
    least = report["results"].get("floor-28")
    for result in report["results"].values():
        result["times_floor_28"] = result["median_s"] / least["median_s"] if least else None
    return report


def table(report):
    """The report for people."""
    m = report["machine"]
    lines = [f"{report['set']}: {report['tensors']:,} tensors, {report['parameters']:,} parameters, float32, "
             f"{report['repeats']} rounds in turns"
             + (f", {report['loop']} steps in each JAX call" if report["loop"] > 1 else ""),
             f"{m['processor']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB; "
             + ", ".join(f"{name} {version}" for name, version in m["versions"].items())]
    if "floor" in report:
        lines.append(f"floor: {report['floor']}")
    header = ("", "median ms", "best ms", "x ours", "x floor", "GB/s", "trace s", "compile s", "extra MB", "temp MB")
    rows = [header]

    def number(value, digits, scale=1.0):
        return "" if value is None else f"{value * scale:,.{digits}f}"

    for name, r in report["results"].items():
        rows.append((name + (f" ({r['path']})" if r["path"] else ""), number(r["median_s"], 2, 1e3),
                     number(r["min_s"], 2, 1e3), number(r["times_ours"], 2), number(r["times_floor_28"], 2),
                     number(r["gb_per_s"] or None, 1), number(r["trace_s"], 2), number(r["compile_s"], 2),
                     number(r["peak_above_arrays_bytes"], 0, 1e-6), number(r["temporary_bytes"], 0, 1e-6)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines.append("")
    for row in rows:
        lines.append("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip())
    lines += ["", "x ours: median time over that of xla_lamb in the same framework. GB/s: of the 28 bytes an element "
              "that any step moves (40 for floor-40).", "extra: peak of resident memory in a step, above the arrays. "
              "temp: temporary memory by XLA's account."]
    return "\n".join(lines)


def peers(text):
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PEERS)}")
    return names


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=sets.SETS, default="bert-base", help="tensors to step (%(default)s)")
    parser.add_argument("--against", type=peers, default=["optax", "memcpy"], metavar="LIST",
                        help=f"peers, with commas: {', '.join(PEERS)} (optax,memcpy); minimize: loss scaling and clipping by "
                             "the global norm around LAMB, as wrappers of xla_lamb.minimize and as Keras has them")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="rounds (%(default)s)")
    parser.add_argument("--loop", type=int, default=1, metavar="N",
                        help="take N steps in a jitted loop in each call of JAX's contenders, which leaves out what a "
                             "call costs for its arguments (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.loop < 1:
        parser.error("--repeats and --loop must be at least 1")
    report = run(options)
    print(json.dumps(report, indent=1) if options.json else table(report))


if __name__ == "__main__":
    main()
