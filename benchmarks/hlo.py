"""`python -m benchmarks.hlo`: what XLA's compiler for NVIDIA GPUs makes of a step, ours and its peers'; it needs no GPU.

    python -m benchmarks.hlo --set bert-large --gpus A100,H200
"""

import argparse
import json
import sys

from benchmarks import sets
from tests import compilers

STEPS = {
    "xla_lamb": dict(implementation="fused"),
    "xla_lamb reference": dict(implementation="reference"),
    "optax.lamb": dict(step="optax"),
}


def run(name, gpus):
    """The figures of all steps over the set `name` for each of `gpus`, as one dictionary for JSON."""
    shapes = sets.shapes(name)
    report = {"set": name, "tensors": len(shapes), "parameters": sets.elements(shapes), "results": []}
    for gpu in gpus:
        print(f"{gpu}:", file=sys.stderr)
        found = compilers.compile_steps([dict(target=gpu, shapes=shapes, **options) for options in STEPS.values()], timeout=3600)
        for step, result in zip(STEPS, found):
            if "error" in result:
                sys.exit(f"benchmarks.hlo: {result['error']}")
            each = result["bytes"] / result["parameters"]
            report["results"].append({"gpu": gpu, "step": step, "bytes_each": each, **result})
    return report


def table(report):
    """The report for people."""
    rows = [("", "", "calls", "kernels", "bytes/parameter", "temp MB", "compile s")]
    for r in report["results"]:
        rows.append((r["gpu"], r["step"], f"{len(r['calls'])}", f"{r['kernels']:,}", f"{r['bytes_each']:.1f}",
                     f"{r['temporary'] / 1e6:,.1f}", f"{r['compile_s']:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [f"{report['set']}: {report['tensors']:,} tensors, {report['parameters']:,} parameters, float32, donated", ""]
    for row in rows:
        lines.append("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip())
    lines += ["", "calls: of our kernels. kernels: all that is launched, calls and copies too. bytes/parameter: of the "
              "operands and results of", "all these, once each. A call has two passes and would move 40 if no cache helped; "
              "its own traffic is counted in its tests."]
    return "\n".join(lines)


def gpus(text):
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in compilers.GPUS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(compilers.GPUS)}")
    return names


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hlo", description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=sets.SETS, default="bert-large", help="tensors to step (%(default)s)")
    parser.add_argument("--gpus", type=gpus, default=list(compilers.GPUS), metavar="LIST",
                        help=f"with commas: {', '.join(compilers.GPUS)} (all)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = run(options.set, options.gpus)
    print(json.dumps(report, indent=1) if options.json else table(report))


if __name__ == "__main__":
    main()
