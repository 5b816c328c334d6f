"""python -m xla_lamb doctor [--json]; python -m xla_lamb convert --from FORMAT --to FORMAT SRC DST"""

import argparse
import json
import os
import sys

from xla_lamb import checkpoints, doctor


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xla_lamb", description="LAMB as a fused XLA custom call.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    command = commands.add_parser("doctor", help="say which implementation each device will take, and why")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=_doctor)

    command = commands.add_parser(
        "convert",
        help="turn a checkpoint of one framework's LAMB into another's",
        description="Turns a checkpoint of one framework's LAMB into another's, and says what was not carried over. "
        "optax: an Orbax directory. keras: .keras or .weights.h5. tf_addons: a TensorFlow checkpoint's prefix, or .h5. "
        "apex (and timm): .safetensors, .pt or .pth.",
    )
    command.add_argument("--from", dest="source_format", required=True, choices=checkpoints.FORMATS, help="format of SRC")
    command.add_argument("--to", dest="target_format", required=True, choices=checkpoints.FORMATS, help="format of DST")
    command.add_argument(
        "--like",
        metavar="PATH",
        help="a checkpoint of the target, in its format: all but LAMB's state is taken from it (keras, tf_addons: needed)",
    )
    command.add_argument("--source-like", metavar="PATH", help="a .keras file that gives a .weights.h5 source its names and parameters")
    command.add_argument(
        "--names", metavar="FILE", help='JSON: {target name: source name, or {"from": source name, "transpose": true or a list of axes}}'
    )
    command.add_argument("--by-position", action="store_true", help="your word that both list the same tensors in the same order")
    command.add_argument("--force", action="store_true", help="replace DST")
    command.add_argument("source", metavar="SRC")
    command.add_argument("target", metavar="DST")
    command.set_defaults(run=_convert)

    options = parser.parse_args(arguments)
    return options.run(options)


def _doctor(options) -> int:
    report = doctor.report()
    print(json.dumps(report, indent=2) if options.json else doctor.text(report))
    return 0


def _convert(options) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        report = checkpoints.convert(
            options.source,
            options.target,
            options.source_format,
            options.target_format,
            like=options.like,
            source_like=options.source_like,
            names=_names(options.names),
            by_position=options.by_position,
            force=options.force,
        )
    except (checkpoints.CheckpointError, OSError, ImportError) as error:
        print("xla_lamb convert:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(report.text())
    return 0


def _names(path):
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise checkpoints.CheckpointError(f"--names {path} is not JSON: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
