#!/bin/bash
# Runs pytest inside a Bazel test: tools/pytest.sh PYTHON FILE [argument of pytest]...
#
# `bazel test --test_filter=EXPRESSION` becomes pytest's -k. No test at all is a failure (pytest's exit status 5).
set -euo pipefail
python=$1
shift

# Nothing is read from or left in the user's home or the source tree.
export HOME=$TEST_TMPDIR PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
export HYPOTHESIS_STORAGE_DIRECTORY=$TEST_TMPDIR/hypothesis MPLBACKEND=Agg

exec "$python" -m pytest -q -rs -p no:cacheprovider --rootdir="$PWD" --basetemp="$TEST_TMPDIR/pytest" \
  --junitxml="$XML_OUTPUT_FILE" ${TESTBRIDGE_TEST_ONLY:+-k "$TESTBRIDGE_TEST_ONLY"} "$@"
