"""Test the results of an evaluation: tables, and the facts of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from report_rows import ROWS, row
from tiny_models import build

from mlx_sparse.model_info import weights_hash
from mlx_sparse.tools.evaluate.results import run_facts
from mlx_sparse.tools.evaluate.table import plus_minus, tables


def test_tables_are_complete() -> None:
    found = tables(ROWS)
    assert [table.caption for table in found] == [
        "copying: decode steps after the prompt",
        "copying: tokens inside a sparse prompt",
        "needle: decode steps after the prompt",
    ]
    shown = {cell for table in found for cells in table.rows for cell in cells}
    assert shown >= {
        "sparq:rank=16,top_k=77",  # the settings derived from the budget
        *("0.136", "0.124"),  # formula and count
        "-0.040 ± 0.003",
        "ran densely: 1,000 fewer than 2,048 keys",
        "50% sparse; dense: 1,000 a sliding window",
        "0.20 to 0.50",  # density by layer
        "0% 0.25, 50% 0.50, 100% 1.00",  # accuracy by depth
    }


def test_control_characters_and_long_names_are_replaced() -> None:
    (table,) = tables([row("a\x1b\nb"), row("x" * 1000)])
    (first, *_), (second, *_) = table.rows
    assert first == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"
    assert len(second) < 1000 and "…" in second


def test_facts_hold_no_private_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    text = SimpleNamespace(name="~/book.txt", text="zwölf", sha256="ef" * 32)
    options = {"seed": 1, "prefill_step_size": 512, "batch": 4}
    facts = run_facts("mlx-sparse eval --model ~/m", "~/m", build(), [(text, 7)], **options)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["texts"] == [{"name": "~/book.txt", "sha256": "ef" * 32, "bytes": 6, "tokens": 7}]
    shape = {"type": "llama", "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert facts["model"].items() >= shape.items()
    assert "a-secret" not in str(facts) and str(Path.home()) not in str(facts)


def test_weights_hash_covers_config_and_weights() -> None:
    found = weights_hash(build())
    assert weights_hash(build()) == found

    def changed(change: Any) -> str:
        model = build()
        change(model)
        return weights_hash(model)

    def last_value(model: Any) -> None:
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[-1, -1] += 1

    changes = [
        lambda model: setattr(model.args, "rms_norm_eps", 1e-6),
        last_value,
        lambda model: model.set_dtype(mx.bfloat16),
        lambda model: nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: "self_attn.q" in path),
    ]
    assert len({found, *map(changed, changes)}) == 5


def test_a_mean_that_rounds_to_zero_has_no_minus_sign() -> None:
    assert plus_minus(-1e-9, 1e-9, 3) == "0.000 ± 0.000"
    assert plus_minus(-1e-9, math.nan, 3, signed=True) == "+0.000"
