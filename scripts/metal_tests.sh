#!/usr/bin/env bash
# Run tests on the Metal GPU under the validation that the environment asks for, and fail if the tests do or if the
# validation says anything. Writes metal_tests_NAME.xml and .log.
#
#   scripts/metal_tests.sh NAME PYTEST_ARGUMENT...
set -euo pipefail

if (($# < 2)); then
  echo "metal_tests.sh: error: expected NAME PYTEST_ARGUMENT..., got $# arguments." >&2
  exit 2
fi
name=$1 status=0
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Metal writes its findings to the process's own standard error, which pytest must not swallow.
.venv/bin/python -m pytest "$@" --capture=sys --junitxml="metal_tests_$name.xml" 2>"metal_tests_$name.log" || status=$?
cat "metal_tests_$name.log" >&2
.venv/bin/python scripts/check_report.py validation "metal_tests_$name.log" || status=1
exit "$status"
