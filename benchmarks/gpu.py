"""`python -m benchmarks.gpu`: is the CUDA kernel right, and how fast is it? One command for a bare machine with a GPU.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --only build --arch sm_90      # on any machine with nvcc

It needs JAX with CUDA, nvcc and g++; optax, to compare with; and neither TensorFlow nor Bazel nor a network. Five minutes at most:

    build      libxla_lamb.so, if Bazel has not built one with CUDA (build_bare.py)
    check      every type and trap against float64 (gpu_checks.py)
    bits       the same bits in every run, without CUDA graphs and with them
    sanitize   a small case under compute-sanitizer
    speed      against optax.lamb, the reference and a copy on the device (gpu_speed.py)

Every stage runs in processes of its own, so that the others go on if one dies. What is not measured runs side by side.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

from benchmarks import build_bare

ROOT = build_bare.ROOT
STAGES = ("build", "check", "bits", "sanitize", "speed")
TOOLS = ("memcheck", "racecheck", "synccheck")
LEAST = 28  # bytes an element that any step moves: read p, g, m, v; write p, m, v
GOALS = {"of_copy": 0.85, "times_ours": 3.0}  # on bert-large: of the copy's bandwidth, and optax.lamb's time over ours

# Seconds. The last two count from the start of the command.
LIMITS = {"detect": 60, "check": 150, "bits": 90, "sanitize": 60, "measure": 40, "compile": 200, "total": 290}
CHECK_PROCESSES = 3

# XLA ends a process that has a flag which it does not know, so each is tried first; the first that is known is taken. A CUDA graph is a
# command buffer to XLA. By default it makes one of five kernels or more, custom calls among them, and none of a loop.
MODES = {
    "graphs off": ["--xla_gpu_enable_command_buffer="],
    "graphs on": [
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE --xla_gpu_graph_min_graph_size=1",
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
    ],
}
# XLA says in its log when it records a custom call into a graph.
LOG_GRAPHS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cuda_command_buffer=5,gpu_command_buffer=5"}
RECORDED = "Trace into GPU command buffer"

# XLA takes ten minutes to compile optax.lamb over all 2,000 tensors of many-small, and two for a loop around our step over them. 400 are
# what one call of ours takes.
SPEED = [
    {"set": "bert-large"},
    {"set": "many-small", "tensors": 400},
    {"set": "many-small", "contenders": ["xla_lamb"], "forms": ["call"]},
]
SMALL_SPEED = [{"set": "many-small", "tensors": 3, "rounds": 2, "least_copied": 1 << 20}]

DETECT = """
import importlib.metadata, json, sys, jax
device = jax.devices(sys.argv[1])[0]
jax.block_until_ready(jax.numpy.zeros(1))
versions = {}
for package in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "optax", "numpy"):
    try:
        versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"gpu": device.device_kind, "capability": getattr(device, "compute_capability", None), "versions": versions}))
"""
INSPECT = """
import json
from xla_lamb import library
try:
    found = library.load()
    print(json.dumps({"path": found.path, "cuda": found.cuda and found.cuda.runtime, "driver": found.cuda and found.cuda.driver,
                      "handlers": len(found.handlers)}))
except library.Unavailable as error:
    print(json.dumps({"path": None, "cuda": None, "problem": str(error)}))
"""


def progress(text):
    print(f"benchmarks.gpu: {text}", file=sys.stderr, flush=True)


class Child:
    """A Python process of a stage. It prints lines of JSON; what else it says, and its standard error, is kept for the report."""

    def __init__(self, name, arguments, environment, folder, under=()):
        self.name, self.begin, self.lines, self.text, self.log = name, time.time(), [], [], folder / f"{name.replace(' ', '_')}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*under, sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        self.changed = threading.Condition()
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            with self.changed:
                (self.lines if isinstance(found, dict) else self.text).append(found if isinstance(found, dict) else line.rstrip())
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait_for(self, key, until):
        """Waits for a line with `key`, the end, or a time: whether there is such a line."""
        with self.changed:
            found = lambda: any(key in line for line in self.lines)
            self.changed.wait_for(lambda: self.ended or found(), max(0, until - time.time()))
            return found()

    def go(self):
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended, which `end` will tell

    def end(self, until):
        """Waits for its end, and ends it when it is time. Returns what went wrong, or None."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended, max(0, until - time.time()))
        if not self.ended:
            self.kill()
            return f"was stopped after {time.time() - self.begin:.0f} s{self._during()}"
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its output and did not end"
        if status == 0:
            return None
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{how}{self._during()}: {self.last_words()} (all of it is in {self.log})"

    def _during(self):
        begun = [line["begins"] for line in self.lines if "begins" in line]
        return f" during {begun[-1]}" if begun and "begins" in self.lines[-1] else ""

    def last_words(self):
        """The last line of its standard error that says something."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Fatal)\b", line)]
        return ([*lines, *telling] or ["it said nothing"])[-1][:500]

    def kill(self):
        if self.process.poll() is None:  # else its number may be somebody else's by now
            os.killpg(self.process.pid, signal.SIGKILL)  # the group that it leads
            self.process.wait()


class Bench:
    """One run of the command: where it runs, what it found."""

    def __init__(self, options):
        self.options = options
        self.platform, self.small = ("cpu", True) if options.rehearse else ("cuda", False)
        self.begin = time.time()
        self.children = []
        self.folder = pathlib.Path(options.folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")
        self.environment = {
            "JAX_PLATFORMS": "cpu" if options.rehearse else "cuda,cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the processes share the GPU
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self.flags = {}  # of each mode; None: XLA knows none
        self.report = {"machine": {}, "library": {}, "checks": [], "bits": {}, "sanitizer": {}, "speed": [], "problems": []}

    def start(self, name, *arguments, under=(), **environment):
        child = Child(name, arguments, {**self.environment, **environment}, self.folder, under)
        self.children.append(child)
        return child

    def start_module(self, name, module, *arguments, under=(), mode=None, **environment):
        if mode:
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {self.flags[mode]}".strip()
        return self.start(name, "-m", module, *arguments, under=under, **environment)

    def until(self, limit, begin=None):
        return min((begin or time.time()) + limit, self.begin + LIMITS["total"])

    def problem(self, text):
        self.report["problems"].append(text)
        progress(text)

    # Before the stages.

    def detect(self):
        """Asks JAX for its GPU, and for the flags of the modes. Returns why there is none."""
        found = self.start("detect", "-c", DETECT, self.platform)
        tries = {
            mode: [self.start(f"flags {mode} {i}", "-c", DETECT, self.platform, XLA_FLAGS=flags) for i, flags in enumerate(candidates)]
            for mode, candidates in MODES.items()
        }
        until = self.until(LIMITS["detect"])
        problem = found.end(until)
        if problem:
            return problem if found.process.returncode != 1 else found.last_words()
        self.report["machine"] = {**found.lines[-1], "cores": os.cpu_count(), **self.driver()}
        for mode, children in tries.items():
            known = [child.end(until) is None for child in children]
            self.flags[mode] = MODES[mode][known.index(True)] if any(known) else None
            if self.flags[mode] is None:
                self.problem(f"{mode}: XLA takes none of {' or '.join(MODES[mode])}")
        self.report["flags"] = self.flags
        return None

    @staticmethod
    def driver():
        try:
            query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
            line = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()[0]
            return dict(zip(("name", "driver", "memory"), map(str.strip, line.split(","))))
        except (OSError, subprocess.TimeoutExpired, IndexError):
            return {}

    def modes(self):
        return [mode for mode, flags in self.flags.items() if flags is not None]

    # The stages.

    def build(self):
        """Finds or builds the library for all that follows. Returns whether there is one."""
        begin, options = time.time(), self.options
        found = self.inspect()
        built = False
        if options.rebuild or not found["cuda"]:
            arch = options.arch or f"sm_{self.report['machine']['capability']}".replace(".", "")
            progress(f"build: libxla_lamb.so for {arch} in {self.folder}")
            try:
                path, built = build_bare.build(arch, self.folder, options.rebuild)
            except build_bare.Failed as error:
                self.problem(f"build: {error}")
                return False
            self.environment["XLA_LAMB_LIBRARY"] = str(path)
            found = self.inspect()
            if not found["cuda"]:
                self.problem(f"build: what was built cannot be used: {found.get('problem', 'it has no CUDA')}")
                return False
        self.environment["XLA_LAMB_LIBRARY"] = found["path"]
        self.report["library"] = {**found, "built": built, "seconds": time.time() - begin}
        progress(f"build: {found['path']} with CUDA {found['cuda']}, " + (f"built in {time.time() - begin:.0f} s" if built else "found"))
        return True

    def inspect(self):
        child = self.start("inspect", "-c", INSPECT)
        problem = child.end(self.until(60))
        return child.lines[-1] if not problem else {"path": None, "cuda": None, "problem": problem}

    def run(self, stages):
        """All stages but the build: everything that is not measured at once, then the measurements one by one."""
        how = lambda **more: json.dumps({"platform": self.platform, "small": self.small, **more})
        module = "benchmarks.gpu_checks"
        checks, bits, sanitizers, speed = [], {}, {}, []
        begin = time.time()
        if "check" in stages:
            shares = 1 if self.small else CHECK_PROCESSES
            progress(f"check: {shares} process(es)")
            checks = [self.start_module(f"check {i}", module, "check", how(share=i, shares=shares)) for i in range(shares)]
        if "bits" in stages:
            progress("bits: " + ", ".join(self.modes()))
            bits = {mode: self.start_module(f"bits {mode}", module, "bits", how(), mode=mode, **LOG_GRAPHS) for mode in self.modes()}
        if "sanitize" in stages:
            sanitizers = self.start_sanitizers(how())
        if "speed" in stages:
            progress("speed: compiles")
            speed = self.start_speed()
        for child in checks:
            self.end_check(child, self.until(LIMITS["check"], begin))
        for mode, child in bits.items():
            self.end_bits(mode, child, self.until(LIMITS["bits"], begin))
        if bits:
            self.compare_bits()
        for tool, child in sanitizers.items():
            self.end_sanitizer(tool, child, self.until(LIMITS["sanitize"], begin))
        for _, _, child in speed:
            child.wait_for("ready", self.until(LIMITS["compile"] + 20, self.begin))
        for job, mode, child in speed:
            self.end_speed(job, mode, child)

    def end_check(self, child, until):
        begin, problem = child.begin, child.end(until)
        found = [line for line in child.lines if "check" in line]
        self.report["checks"] += found
        for line in found:
            if line["problem"]:
                self.problem(f"check {line['check']}: {line['problem']}")
        if problem:
            self.problem(f"{child.name} {problem}")
        failed = sum(line["problem"] is not None for line in found)
        progress(f"{child.name}: {len(found)} checks, {failed} failed, {time.time() - begin:.0f} s")

    def end_bits(self, mode, child, until):
        problem = child.end(until)
        digests = {line["form"]: line["digests"] for line in child.lines if "form" in line}
        self.report["bits"][mode] = {"digests": digests, "recorded": child.log.read_text(errors="replace").count(RECORDED)}
        for form, found in digests.items():
            if len(set(found)) != 1:
                self.problem(f"bits {mode}, {form}: {len(found)} runs gave {len(set(found))} results")
        if problem:
            self.problem(f"bits {mode} {problem}")
        progress(f"bits {mode}: {seen(digests)}")

    def compare_bits(self):
        for form in ("call", "loop"):
            firsts = {found["digests"][form][0] for found in self.report["bits"].values() if form in found["digests"]}
            if len(firsts) > 1:
                self.problem(f"bits: {form} gives other results with CUDA graphs than without")

    def start_sanitizers(self, job):
        sanitizer = self.find_sanitizer()
        if sanitizer is None:
            self.report["sanitizer"] = {tool: "skipped: no compute-sanitizer" for tool in TOOLS}
            progress("sanitize: skipped: no compute-sanitizer")
            return {}
        progress(f"sanitize: {', '.join(TOOLS)} of {sanitizer}")
        mode = {"mode": "graphs off"} if self.flags["graphs off"] is not None else {}
        return {
            tool: self.start_module(
                f"sanitize {tool}", "benchmarks.gpu_checks", "sanitize", job, **mode,
                under=[sanitizer, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"],
                XLA_PYTHON_CLIENT_ALLOCATOR="platform",  # each array is an allocation, whose ends memcheck knows
            )
            for tool in TOOLS
        }  # fmt: skip

    @staticmethod
    def find_sanitizer():
        places = [shutil.which("compute-sanitizer")]
        try:
            top = build_bare.toolkit(build_bare.find_nvcc())
            places += [top / "bin/compute-sanitizer", top / "compute-sanitizer/compute-sanitizer"]
        except build_bare.Failed:
            pass
        return next((str(place) for place in places if place and os.path.isfile(place)), None)

    def end_sanitizer(self, tool, child, until):
        problem = child.end(until)
        said = [line for line in [*child.text, *child.log.read_text(errors="replace").splitlines()] if line.startswith("=====")]
        summary = next((line.strip("= ") for line in said if "SUMMARY" in line), None)
        errors = re.search(r"SUMMARY: (\d+)", summary) if summary else None
        if errors and int(errors[1]):
            found = f"failed: {summary}: " + " | ".join(line.strip("= ") for line in said if line.strip("= "))[:1500]
            self.problem(f"sanitize {tool} {found}")
        elif errors and not problem:
            found = f"passed: {summary}"
        else:  # the tool's own trouble says nothing about the kernel
            found = f"no answer: it {problem or 'gave no summary'}; " + " | ".join(line.strip("= ") for line in said[-4:])
        self.report["sanitizer"][tool] = found
        progress(f"sanitize {tool}: {found[:200]}")

    def start_speed(self):
        found = []
        until = self.begin + LIMITS["compile"]
        for job in SMALL_SPEED if self.small else SPEED:
            for mode in self.modes():
                if "contenders" in job and mode != "graphs off":
                    continue
                name = f"speed {job['set']} {job.get('tensors', '')} {mode}"
                arguments = json.dumps({"platform": self.platform, "until": until, **job})
                found.append((job, mode, self.start_module(name, "benchmarks.gpu_speed", arguments, mode=mode)))
        return found

    def end_speed(self, job, mode, child):
        begin = time.time()
        child.go()
        problem = child.end(self.until(LIMITS["measure"]))
        what = f"speed {job['set']}, {mode}"
        if problem:
            self.problem(f"{what} {problem}")
            return
        result = {"set": job["set"], "mode": mode, **child.lines[-1]}
        self.report["speed"].append(derive(result))
        progress(f"{what}: {result['tensors']} tensors, measured in {time.time() - begin:.0f} s")

    def close(self):
        for child in self.children:
            child.kill()


# The report ---------------------------------------------------------------------------------------------------------------


def derive(result):
    """Adds what follows from the seconds of one set in one mode."""
    least = LEAST * result["parameters"]
    for row in [*result["copies"], *result["results"]]:
        row["median_s"], row["best_s"] = statistics.median(row["seconds"]), min(row["seconds"])
    result["copy_bytes_per_s"] = result["copied_bytes"] / min(row["median_s"] for row in result["copies"])
    result["floor_s"] = least / result["copy_bytes_per_s"]
    ours = {row["form"]: row["median_s"] for row in result["results"] if row["contender"] == "xla_lamb"}
    for row in result["results"]:
        row["bytes_per_s"] = least / row["median_s"]
        row["of_copy"] = row["bytes_per_s"] / result["copy_bytes_per_s"]
        row["times_ours"] = row["median_s"] / ours[row["form"]] if row["form"] in ours else None
    return result


def seen(digests):
    return "; ".join(f"{form}: {len(found)} runs, {len(set(found))} result(s)" for form, found in digests.items()) or "no result"


def goals(report):
    """What was asked for on bert-large, for each mode, in a loop, where dispatch does not count: [{goal, mode, value, met}]."""
    found = []
    for result in report["speed"]:
        if result["set"] != "bert-large":
            continue
        rows = {row["contender"]: row for row in result["results"] if row["form"] == "loop"}
        for goal, contender in (("of_copy", "xla_lamb"), ("times_ours", "optax.lamb")):
            value = rows[contender][goal] if contender in rows else None
            found.append({"goal": goal, "least": GOALS[goal], "mode": result["mode"], "value": value,
                          "met": None if value is None else value >= GOALS[goal]})  # fmt: skip
    return found


def number(value, digits=0, scale=1.0):
    return "" if value is None else f"{value * scale:,.{digits}f}"


def speed_table(result):
    rows = [("", "form", "median ms", "best ms", "GB/s at 28 B", "% of copy", "x ours", "extra MB", "temp MB", "trace s", "compile s")]
    ms, gb, mb = (lambda x: number(x, 3, 1e3)), (lambda x: number(x, 0, 1e-9)), (lambda x: number(x, 0, 1e-6))
    for r in result["copies"]:
        rows.append((r["what"], r["form"], ms(r["median_s"]), ms(r["best_s"]), gb(result["copied_bytes"] / r["median_s"]), *[""] * 6))
    rows.append(("floor: 28 bytes", "", ms(result["floor_s"]), "", gb(result["copy_bytes_per_s"]), "100.0", *[""] * 5))
    for r in result["results"]:
        speed = ms(r["median_s"]), ms(r["best_s"]), gb(r["bytes_per_s"]), number(r["of_copy"], 1, 100), number(r["times_ours"], 2)
        cost = mb(r["extra_bytes"]), mb(r["temporary_bytes"]), number(r["trace_s"], 1), number(r["compile_s"], 1)
        rows.append((r["contender"], r["form"], *speed, *cost))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [f"{result['set']}: {result['tensors']:,} tensors, {result['parameters']:,} parameters, float32; {result['mode']}"]
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines + [f"{name}: {why}" for name, why in result["missing"].items()] + [""]


def table(report, stages):
    """The report for people."""
    m, library = report["machine"], report["library"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    lines = [
        f"{m.get('name', m['gpu'])}, compute capability {m['capability']}, driver {m.get('driver')}, {m['cores']} CPU cores; {versions}",
        f"{library['path']}: CUDA {library['cuda']}, the driver supports {library['driver']}",
        "",
    ]
    for result in report["speed"]:
        lines += speed_table(result)
    if report["speed"]:
        lines += [
            f"form: each step in a jitted call, or {report['speed'][0]['loop']} in a jitted loop. % of copy: of the fastest copy above.",
            "extra: the peak of device memory above what lay there; blank where an earlier contender's was higher. temp: by XLA's account.",
            "All were compiled beside one another and the checks.",
            "",
        ]
    if "check" in stages:
        failed = sum(line["problem"] is not None for line in report["checks"])
        lines.append(f"check: {len(report['checks']) - failed} of {len(report['checks'])} passed")
        lines += [f"  {line['check']}: {line['note']}" for line in report["checks"] if line["note"]]
    for mode, found in report["bits"].items():
        lines.append(f"bits, {mode}: {seen(found['digests'])}; XLA's log has {found['recorded']} recordings of calls into graphs")
    lines += [f"sanitize, {tool}: {found}" for tool, found in report["sanitizer"].items()]
    text = {"of_copy": "of the copy's bandwidth at 28 bytes a parameter", "times_ours": "times faster than jit(optax.lamb)"}
    for goal in report["goals"]:
        said = "not measured" if goal["value"] is None else f"{goal['value']:.2f}, {'met' if goal['met'] else 'NOT met'}"
        lines.append(f"goal on bert-large, {goal['mode']}: at least {goal['least']:.2f} {text[goal['goal']]}: {said}")
    lines.append("no problems" if not report["problems"] else f"{len(report['problems'])} PROBLEMS:")
    return "\n".join([*lines, *(f"  {problem}" for problem in report["problems"])])


def stages(text):
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(STAGES)}")
    return names


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=stages, default=STAGES, metavar="LIST", help=f"stages, with commas: {','.join(STAGES)} (all)")
    parser.add_argument("--rebuild", action="store_true", help="build the library with nvcc and g++, whatever is there")
    parser.add_argument("--arch", metavar="sm_NUMBER", help="GPU to build for (the one that is here)")
    parser.add_argument("--json", default="gpu.json", metavar="PATH", help="where the report goes (%(default)s)")
    parser.add_argument("--folder", default=str(ROOT / ".gpu"), metavar="PATH", help="for the build and the logs (%(default)s)")
    # All of it on the CPU kernel and with next to no elements, for tests.
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.arch and not re.fullmatch(r"sm_\d+", options.arch):
        parser.error(f"--arch must be sm_ and a number, such as sm_90, not {options.arch!r}")
    return options


def main(arguments=None):
    options = parse(arguments)
    bench = Bench(options)
    report = bench.report
    try:
        if options.only == ["build"] and options.arch:
            return 0 if bench.build() else 1
        problem = bench.detect()
        if problem:
            print(f"benchmarks.gpu: there is no CUDA GPU that JAX can use: {problem}", file=sys.stderr)
            return 2
        if bench.build():
            bench.run(options.only)
    finally:
        bench.close()
    report["goals"] = goals(report)
    report["seconds"] = time.time() - bench.begin
    pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if report["library"]:
        print(table(report, options.only))
    progress(f"{report['seconds']:.0f} s; the report is in {options.json}")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
