#!/usr/bin/env bash
# Run tests on the Metal GPU with the validation that the environment enables. Fail if a test fails or if the validation
# reports anything. The script writes metal_tests_NAME.xml and metal_tests_NAME.log.
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
# Metal writes its findings to the standard error of the process, so pytest must not capture that stream.
.venv/bin/python -m pytest "$@" --capture=sys --junitxml="metal_tests_$name.xml" 2>"metal_tests_$name.log" || status=$?
cat "metal_tests_$name.log" >&2
.venv/bin/python scripts/check_report.py validation "metal_tests_$name.log" || status=1
exit "$status"
