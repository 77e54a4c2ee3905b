#!/usr/bin/env bash
# On a Mac with Apple silicon: run the kernel tests and the benchmarks on its GPU, and write FILE.jsonl and FILE.md
# to send back. The script installs its requirements into .venv.
#
#   scripts/mac_check.sh [--dry-run] [-o FILE.jsonl]
set -euo pipefail

# shellcheck source=scripts/check_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/check_steps.sh" "$@"
if ! $dry_run && [[ $(uname -sm) != "Darwin arm64" ]]; then
  refuse "a Mac with Apple silicon, got $(uname -sm). --dry-run shows what would run"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Run the kernel tests: tests NAME COMMAND... A failing test does not end the script; the report lists it.
# Metal writes its findings to the standard error of the process, so pytest must not capture that stream.
tests() {
  local name=$1 status=0
  shift
  run "$@" .venv/bin/python -m pytest tests/backends/metal/test_metal_kernels.py tests/backends/metal/test_metal_prefill.py \
    tests/core/test_decode.py tests/core/test_select.py tests/methods/sample/test_prefill.py \
    tests/methods/saap/test_buckets.py -k metal --capture=sys \
    --junitxml="$work/$name.xml" 2>"$work/$name.log" || status=$?
  if ((status)); then
    echo "The tests ended with status $status."
    cat "$work/$name.log" >&2
  fi
}

# Describe the machine for the report, without serial numbers and host names.
describe() {
  echo "model: $(sysctl -n hw.model)"
  echo "macos: $(sw_vers -productVersion)"
  echo "gpu_cores: $(system_profiler SPDisplaysDataType | awk -F': ' '/Total Number of Cores/ { print $2; exit }')"
  echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)"
}

run python3 scripts/dev.py setup
run .venv/bin/mlx-sparse doctor || echo "The doctor found problems." # continue in spite of problems
if ! $dry_run; then
  describe | tee "$work/machine.txt"
fi
tests validated env METAL_DEVICE_WRAPPER_TYPE=1 METAL_DEBUG_ERROR_MODE=0 MTL_SHADER_VALIDATION=1 \
  MTL_SHADER_VALIDATION_REPORT_TO_STDERR=1
tests plain env
save "$work/bench.jsonl" .venv/bin/mlx-sparse bench step --backend metal --lengths 1k,2k,4k,8k,16k,32k,64k,128k \
  --shapes 32x8x128,32x32x128,9x3x64,8x1x256,16x2x128 -o jsonl || echo "The benchmark failed."
# The alphas select from few to nearly all blocks, to compare the kernel with MLX's own attention.
alphas=()
for alpha in 0.5 0.9 0.999; do
  alphas+=("sample:alpha_column=$alpha,alpha_slash=$alpha")
done
save "$work/prefill.jsonl" .venv/bin/mlx-sparse bench prefill --attn "$(IFS=, && echo "${alphas[*]}")" --backend metal \
  --lengths 8k,32k --shapes 32x8x128 -o jsonl || echo "The prefill benchmark failed."
run .venv/bin/python scripts/check_report.py mac "$work" "$output"
