"""A proof on the real model: what is learnt from some text holds for text that was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import commands
import pytest

from mlx_sparse.artefact import load

pytestmark = pytest.mark.slow  # a real model

# Five texts of Python's language reference, two layers: less than a minute of one core.
ARGUMENTS = (
    "--context 1024 --windows 3 --queries 600 --buckets 32 --recent-tokens 127 --farther-than 64 --layers 20 24 "
    "--steps 150 --json"
)


def test_routers_find_the_far_attention_of_a_real_model(
    smollm2: Path, tmp_path: Path, blas_environment: dict[str, str], without_torch: dict[str, str]
) -> None:
    out = tmp_path / "smollm2.safetensors"
    command = ["-m", "mlx_sparse.cli", "train-saap", "--model", str(smollm2), "-o", str(out), *ARGUMENTS.split()]
    done = commands.run(command, blas_environment | without_torch)
    assert done.returncode == 0, done.stderr
    made = load(out)
    assert (list(made.layers), made.hidden, made.layers[20].centroids.shape) == ([20, 24], 128, (3, 32, 64))
    found = json.loads(done.stdout)
    recall = found["mean"]["recall"]
    at_20 = 2
    # Buckets at random would find 0.05, 0.1 and 0.2.
    assert all(recall["kmeans"][i] > 2.5 * share for i, share in enumerate(found["selectivities"]))
    assert all(recall["trained"][i] > 2.5 * share for i, share in enumerate(found["selectivities"]))
    assert recall["trained"][at_20] > recall["kmeans"][at_20]
    # The networks know where attention goes, on text they have not seen, in every head.
    assert all(head["loss"]["trained"] < 0.7 * head["loss"]["kmeans"] for head in found["heads"])
    assert mean(head["rows"] for head in found["heads"]) > 1000
