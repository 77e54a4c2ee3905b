"""What is known of methods on a real model, told by `mlx-sparse advise`: SparQ at a quarter passes, eviction fails."""

from __future__ import annotations

import json
from pathlib import Path

import commands

from mlx_sparse.methods import load_toml

ARGUMENTS = "--methods sparq,h2o,streaming --budget 1/4 --passage 512 --limit 2 --json"


def test_sparq_at_a_quarter_of_the_transfers_passes_where_eviction_and_windows_fail(
    smollm2: Path, tmp_path: Path, blas_environment: dict[str, str], without_torch: dict[str, str]
) -> None:
    saved = tmp_path / "attn.toml"
    command = ["-m", "mlx_sparse.cli", "advise", str(smollm2), *ARGUMENTS.split(), "--save", str(saved)]
    done = commands.run(command, blas_environment | without_torch | {"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    passing = {one["attn"].partition(":")[0]: one["passes"] for one in found["quality"]["tries"]}
    assert passing == {"oracle_top_k": True, "sparq": True, "h2o": False, "streaming": False}
    rounding, *_ = found["quality"]["changes"]
    mark = found["quality"]["mark"]
    assert rounding["name"] == "bfloat16 instead of float32"
    for kind in ("repetition", "bits_per_byte"):
        assert 0 < rounding[kind]["kl"] < mark[kind]["kl"] < 0.2  # a mark that everything meets is none
    assert found["attn"] == "sparq:rank=16"
    assert [str(config) for config in load_toml(saved).values()] == [found["attn"]]
    # 30 layers of 3 KV heads of 64 in float32; all weights, as the embedding is the output matrix too.
    assert found["layers"] == [
        {"kind": "full", "layers": 30, "per_token": 46080, "read": 46080, "fixed": 0, "window": None}
    ]
    assert found["weights"] == 4 * 134_515_008
