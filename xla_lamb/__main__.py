"""python -m xla_lamb doctor [--json]"""

import argparse
import json
import sys

from xla_lamb import doctor


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xla_lamb", description="LAMB as a fused XLA custom call.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser("doctor", help="say which implementation each device will take, and why")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    report = doctor.report()
    print(json.dumps(report, indent=2) if options.json else doctor.text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
