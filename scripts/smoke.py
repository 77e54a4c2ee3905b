#!/usr/bin/env python3
"""Test an installed wheel or sdist. Run this script with the Python of its environment.

  python scripts/smoke.py             test commands, the start-up hook, and a tiny random model with sparse attention
  python scripts/smoke.py --native    also require the native ONNX kernels, and run the model with them (extra onnx)

The script fetches only OpenBLAS, on Linux. From the checkout it imports only the tiny model of the tests.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
PROMPT = " ".join(f"w{1 + i % 90}" for i in range(40))


def run(*command):
    """Run a command of this environment and return its output. If the command fails, print the output and exit."""
    print("$", *command[:3], flush=True)
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr)
        sys.exit(f"{command[0]}: expected success, got exit status {done.returncode}")
    return done.stdout, done.stderr


def expect(fact, what, got):
    if not fact:
        sys.exit(f"expected {what}, got {got}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="fail without the native ONNX kernels")
    native = parser.parse_args().native
    import mlx_sparse

    place = Path(mlx_sparse.__file__)
    expect(ROOT not in place.parents, "an installed package", place)
    if native:
        from mlx_sparse.onnx_export.runtime.native import unavailable

        expect(importlib.util.find_spec("onnxruntime"), "the extra onnx", "no onnxruntime")
        expect(unavailable() is None, "native kernels", unavailable())
    version = run("mlx-sparse", "--version")[0].strip()
    expect(version == mlx_sparse.__version__, f"version {mlx_sparse.__version__}", version)
    print(run("mlx-sparse", "doctor", "--fast-blas")[0])
    table = run("mlx-sparse", "matrix")[0]
    expect("sparq" in table, "sparq in the table", table)

    sys.path.insert(0, str(ROOT / "tests" / "testing"))
    import tiny_models

    os.chdir(tempfile.mkdtemp())
    tiny_models.write(Path("model"))
    ask = ["--prompt", PROMPT, "--max-tokens", "8"]
    _, errors = run(
        "python", "-m", "mlx_lm", "generate", "--model", "model", *ask, "--attn", SPARSE, "--attn-report", "json"
    )
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    expect(lines and lines[-1]["mlx_sparse_report"][0]["sparse_calls"], "sparse calls in mlx_lm generate", errors)

    if importlib.util.find_spec("onnxruntime"):
        run("mlx-sparse", "export-onnx", "--model", "model", "--method", SPARSE, "--max-length", "64", "-o", "onnx")
        results = [
            json.loads(run("mlx-sparse", "run-onnx", "onnx", *ask, "--native", how, "--json")[0])
            for how in ("auto", "off")
        ]
        texts = [result["text"] for result in results]
        expect(texts[0] == texts[1] and texts[0], "the same text with native kernels and without", texts)
        print("ONNX:", results[0]["kernels"])
        expect(not native or results[0]["kernels"] == "native kernels", "native kernels", results[0]["kernels"])
    print(f"mlx-sparse-attention {version} works on Python {sys.version.split()[0]}.")


if __name__ == "__main__":
    main()
