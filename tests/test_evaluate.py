"""`mlx-sparse eval`: examples, figures and refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import VOCAB, build, write

import mlx_sparse
from mlx_sparse.evaluate import runner
from mlx_sparse.evaluate.results import Row
from mlx_sparse.evaluate.run import main
from mlx_sparse.evaluate.runner import Steps
from mlx_sparse.evaluate.tasks import BITS_TOKENS, COPY_PROMPT, COPY_TARGET, TASKS, Example

CONTEXT = 400
TOKENS = [1 + (i * i + i // 7) % (VOCAB - 1) for i in range(4 * (CONTEXT + BITS_TOKENS))]


class Words:
    """Two bytes for each token."""

    def decode(self, tokens: list[int]) -> str:
        return "ab" * len(tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [2 + sum(word.encode()) % (VOCAB - 2) for word in text.split()]


class Progress:
    """Counts what a progress bar is told."""

    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    methods = ["sparq:rank=4,top_k=500", "sparq:rank=4,top_k=8", "sparq:rank=16,top_k=8", "oracle_top_k:top_k=8"]
    examples = [Example(TOKENS[:100], TOKENS[100:120]), Example(TOKENS[7:90], TOKENS[90:110])]
    progress, model = Progress(), build()
    subjects = [Steps(model, Words(), example, 512) for example in examples]
    result = runner.run("task", subjects, methods, progress)
    assert progress.count == 2 * (1 + len(methods))
    return dict(zip(["dense", *methods], result, strict=True))


def test_every_key_is_dense_to_float32_accuracy(rows: dict[str, Row]) -> None:
    row = rows["sparq:rank=4,top_k=500"]
    assert row.mean.agreement == 1
    assert abs(row.delta.bits) < 1e-5
    assert abs(row.mean.kl) < 1e-5
    assert (row.sparse_calls, row.compression) == (0, 1)  # and says that nothing ran sparsely


def test_few_keys_run_sparsely_and_cost_something(rows: dict[str, Row]) -> None:
    row = rows["sparq:rank=4,top_k=8"]
    assert row.method == "sparq:rank=4,top_k=8,component_score=query"
    assert row.sparse_calls == 2 * 2 * 20
    assert row.dense_calls == 0
    assert row.mean.kl > 1e-3
    assert row.compression < 0.5


def test_rank_D_costs_what_the_best_keys_cost(rows: dict[str, Row]) -> None:
    all_components, best_keys = rows["sparq:rank=16,top_k=8"].mean, rows["oracle_top_k:top_k=8"].mean
    assert all_components.kl == pytest.approx(best_keys.kl, rel=1e-3)


def test_bits_per_byte_is_the_likelihood_of_the_target() -> None:
    model, prompt, target = build(), TOKENS[:30], TOKENS[30:40]
    logits = model(mx.array([[*prompt, *target]]))[0].astype(mx.float32)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    bits = -sum(logp[29 + i, token].item() for i, token in enumerate(target)) / 0.6931471805599453
    row = runner.run("task", [Steps(model, Words(), Example(prompt, target), 512)], [], Progress())[0]
    assert row.mean.bits == pytest.approx(bits / (2 * len(target)), rel=1e-4)
    best = logp.argmax(axis=-1).tolist()
    assert row.mean.accuracy == pytest.approx(
        sum(best[29 + i] == token for i, token in enumerate(target)) / len(target)
    )


def test_kl_is_from_dense_attention_to_the_method() -> None:
    dense, sparse = mx.array([[0.9, 0.1]]), mx.array([[0.5, 0.5]])
    found = runner.outcome(mx.log(sparse), mx.log(dense), [0], 1)
    assert found.kl == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-5)


def test_a_bits_per_byte_example_continues_the_text() -> None:
    for example in TASKS["bits_per_byte"](TOKENS, context=CONTEXT, limit=3, seed=1):
        text = example.prompt + example.target
        assert (len(example.prompt), len(example.target)) == (CONTEXT, BITS_TOKENS)
        assert any(TOKENS[i : i + len(text)] == text for i in range(len(TOKENS)))


def test_a_repetition_example_asks_for_what_stands_in_the_prompt() -> None:
    examples = list(TASKS["repetition"](TOKENS, context=CONTEXT, limit=3, seed=1))
    assert examples == list(TASKS["repetition"](TOKENS, context=CONTEXT, limit=3, seed=1))
    for example in examples:
        assert (len(example.prompt), len(example.target)) == (CONTEXT, COPY_TARGET)
        excerpt = example.prompt[-COPY_PROMPT:] + example.target
        assert any(example.prompt[i : i + len(excerpt)] == excerpt for i in range(CONTEXT - len(excerpt)))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "sparc"], "attn: expected one of"),
        (["--methods", "sparq", "--limit", "0"], "--limit, --context: expected at least 1 and 1024"),
        (["--methods", "sparq", "--context", "100"], "--limit, --context: expected at least 1 and 1024"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_loaded(argv: list[str], message: str) -> None:
    with pytest.raises(mlx_sparse.ConfigError, match=message):
        main(argv)


def test_the_command_prints_one_json_line_for_each_row(
    tmp_path: Path, blas_environment: dict[str, str], without_torch: dict[str, str]
) -> None:
    write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{token}" for token in TOKENS[:1800]))
    command = [sys.executable, "-m", "mlx_sparse.cli", "eval", "--model", str(tmp_path / "model"), "--context", "1024"]

    def run(*more: str) -> Any:
        return subprocess.run(
            [*command, *more],
            env=blas_environment | without_torch,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    done = run("--methods", "sparq:rank=4,top_k=16", "--limit", "1", "--json", "--text", str(text))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["task"] for line in lines] == ["bits_per_byte"] * 2 + ["repetition"] * 2
    assert all(line["sparse_calls"] > 0 for line in lines[1::2])
    short = run("--methods", "sparq:rank=4", "--limit", "4", "--text", str(text))
    assert short.returncode == 2
    assert short.stderr.strip().splitlines()[-1].startswith("mlx-sparse: error: --limit: expected 4 x 1,152 tokens")
