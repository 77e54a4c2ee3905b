"""scripts/kv_bits.py: the memory of prompts and steps over quantised caches."""

from __future__ import annotations

import json
import sys

import pytest
from shell import ROOT, run


@pytest.mark.usefixtures("without_torch")
def test_quantised_caches_are_smaller_and_stay_so_with_sparq() -> None:
    options = ["--lengths", "700", "--max-tokens", "3", "--layers", "1", "--kv-bits", "4", "-o", "json"]
    done = run(sys.executable, ROOT / "scripts" / "kv_bits.py", *options)
    assert done.returncode == 0, done.stderr
    rows = {row["way"]: row for row in json.loads(done.stdout)["rows"]}
    sparq = "--attn sparq:dense_below=0"
    ways = [
        "plain",
        sparq,
        *(f"{way}--kv-bits 4" for way in ("", "--attn dense ", f"{sparq} ", f"{sparq},score=copy ")),
    ]
    assert list(rows) == ways
    caches = {way: row["caches"] for way, row in rows.items()}
    assert caches["--kv-bits 4"] == caches["--attn dense --kv-bits 4"] == caches[f"{sparq} --kv-bits 4"]
    assert caches["--kv-bits 4"] < caches[f"{sparq},score=copy --kv-bits 4"] < caches["plain"] < caches[sparq]
    assert all(min(row["prompt"], row["steps"]) >= row["caches"] for row in rows.values())
