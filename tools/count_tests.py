"""Prints `N passed, N failed, N skipped` for the test cases of the last `bazel test //...`; Bazel itself counts targets."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).absolute().parent.parent


def main():
    query = [str(ROOT / "tools/bazel.sh"), "query", "--noshow_progress", "tests(//...)"]
    targets = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    total = failed = skipped = 0
    for target in targets:
        report = ROOT / "bazel-testlogs" / target.lstrip("/").replace(":", "/") / "test.xml"
        try:
            suites = list(ElementTree.parse(report).iter("testsuite"))
        except (OSError, ElementTree.ParseError) as error:  # not built, or killed
            print(f"{target}: {error}", file=sys.stderr)
            total, failed = total + 1, failed + 1
            continue
        for suite in suites:
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    print(f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main()
