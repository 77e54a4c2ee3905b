#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: run the tests of the Triton kernels and the benchmarks within 10 minutes, and write
# FILE.jsonl and FILE.md to send back. python3 needs numpy, torch 2.11 and triton 3.6 or newer, and pytest for the
# tests. The tests of transformers run if it is installed. The script needs neither mlx, nor an installation of this
# project, nor a network.
#
#   scripts/gpu_check.sh [--dry-run] [-o FILE.jsonl]
set -euo pipefail

# shellcheck source=scripts/check_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/check_steps.sh" "$@"
if ! $dry_run; then
  gpu=$(python3 -c 'import torch, triton; print(torch.cuda.is_available() or "torch without a GPU")' 2>&1 | tail -n 1) || true
  [[ $gpu == True ]] || refuse "python3 with torch, triton and an NVIDIA GPU, got $gpu. --dry-run shows what would run"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

# Succeed if python3 has a package.
has() {
  python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>"$work/has.log"
}

# Describe the machine for the report, without serial numbers and host names.
describe() {
  echo "gpu: $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
  echo "driver: $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
  echo "commit: $(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)"
}

# Import this checkout through links, because another version may be installed.
mkdir -p "$work/tree/mlx_sparse"
ln -s "$root"/mlx_sparse/* "$root/cuda_ref" "$work/tree/mlx_sparse/"
ln -s "$root/tests" "$root/scripts" "$root/docs" "$root/pyproject.toml" "$work/tree/"
cd "$work/tree"
export PYTHONPATH="$work/tree"
export TRITON_INTERPRET=0 # run on the GPU even if the environment requests the interpreter
$dry_run || describe | tee "$work/machine.txt"

# A failing test does not end the script; the report lists it. Tests run in parallel because kernels compile slowly.
parallel=()
if has xdist; then
  parallel=(-n 8)
fi
transformers=()
if has transformers || $dry_run; then
  transformers=(tests/backends/triton/test_triton_hf.py tests/backends/triton/test_triton_hf_cache.py)
fi
if has pytest || $dry_run; then
  run timeout --signal=INT --kill-after=10 200 python3 -m pytest tests/backends/triton/test_triton_kernels.py \
    tests/backends/triton/test_triton_saap.py tests/backends/triton/test_triton_prompts.py tests/backends/triton/test_triton_bench.py \
    "${transformers[@]}" \
    tests/core/test_decode.py tests/core/test_select.py tests/methods/sample/test_prefill.py tests/methods/saap/test_buckets.py -k triton \
    --import-mode=importlib -o "pythonpath=tests tests/testing" -p no:cacheprovider "${parallel[@]}" -q --junitxml="$work/tests.xml" ||
    echo "status: $?" | tee "$work/tests_status.txt"
else
  echo "pytest is not installed: the tests do not run, the benchmark checks its results itself." | tee "$work/no_tests"
fi
save "$work/bench.jsonl" timeout --signal=INT --kill-after=10 190 \
  python3 -m mlx_sparse.tools.bench.command step --runtime cuda --attn sparq,sparq:key_bits=16 --batches 1,8,64 --lengths 4k,16k,64k,128k --shapes 32x8x128,32x32x128 --budget-s 150 -o jsonl || echo "The benchmark of decode steps ended with status $?."
save "$work/saap.jsonl" timeout --signal=INT --kill-after=10 90 \
  python3 -m mlx_sparse.tools.bench.command step --runtime cuda --attn saap --lengths 64k,128k,256k --shapes 32x8x128 --budget-s 60 -o jsonl || echo "The benchmark of SAAP's steps ended with status $?."
save "$work/prefill.jsonl" timeout --signal=INT --kill-after=10 110 \
  python3 -m mlx_sparse.tools.bench.command prefill --runtime cuda --attn sample,sample:alpha_column=0.5,alpha_slash=0.5 --lengths 8k,16k,32k,64k --budget-s 75 -o jsonl || echo "The benchmark of prefill ended with status $?."
run python3 scripts/check_report.py gpu "$work" "$output"
