"""Test `mlx-sparse try`: the prompt, the prefill, the comparison, its output, and one run with the default model."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from rich.console import Console
from tiny_models import build, greedy, prompt_of, write

import mlx_sparse
from mlx_sparse import cli
from mlx_sparse.calibrate import Calibration
from mlx_sparse.core.decide import NEVER
from mlx_sparse.methods import parse
from mlx_sparse.tools import comparison
from mlx_sparse.tools.comparison import PREFILL_CHUNK, Comparison, Length, compare, encode_prompt, prefill
from mlx_sparse.tools.try_model import AFTER_KEY, KEY, MARGIN, QUESTION, advice, show, split_text
from mlx_sparse.tools.verdict import verdict

TEXT = " ".join(f"w{i % 90}" for i in range(700))
SPARSE = "sparq:rank=4,top_k=16,dense_below=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


def run(
    folder: Path, attn: str = SPARSE, *, context: int | None = 300, seconds: float = 90.0, **options: Any
) -> Comparison:
    model, tokenizer = load(str(folder))  # type: ignore[misc]
    given: dict[str, Any] = {
        "prompt": encode_prompt(tokenizer, TEXT, " w1 w2"),
        "config": parse(attn)[0],
        "length": Length(context, MARGIN, seconds),
        "max_tokens": 6,
        "calibration": Calibration(),
    }
    return compare(model, tokenizer, console=Console(quiet=True), **given | options)


def test_prompt_has_the_chat_template_around_document_and_question(folder: Path) -> None:
    tokenizer: Any = load(str(folder))[1]
    prompt = encode_prompt(tokenizer, "w1 w2", " w3")
    message = [{"role": "user", "content": "w1 w2 w3"}]
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    assert [*prompt.document, *prompt.end] == whole
    assert prompt.length == len(whole)


def test_key_is_before_the_last_characters_of_the_text() -> None:
    before, after = split_text("word " * 4000, None)
    assert KEY not in before and after.count(KEY) == 2 and after.endswith(QUESTION)
    assert before + after[after.index("word") : after.rindex("word") + 5] == "word " * 4000
    assert abs(after.count("word") * 5 - AFTER_KEY) < 10
    short, rest = split_text("ten words " * 10, None)
    assert len(short) == pytest.approx(50, abs=6) and KEY in rest
    assert split_text("a text", "Who?") == ("a text", "\n\nWho?")


def test_prefill_stops_before_it_exceeds_the_time() -> None:
    model, tokens = build(), prompt_of(2 * PREFILL_CHUNK + 10)
    seen: list[int] = []
    cache = make_prompt_cache(model)
    assert prefill(model, cache, tokens, 0.0, seen.append) == cache[0].offset == PREFILL_CHUNK
    assert prefill(model, cache, tokens[PREFILL_CHUNK:], 1e9, seen.append) == PREFILL_CHUNK + 10
    assert (seen, cache[0].offset) == ([PREFILL_CHUNK, PREFILL_CHUNK, 10], len(tokens))


def test_both_answers_continue_the_same_prompt(folder: Path) -> None:
    found = run(folder)
    model, tokenizer = load(str(folder))  # type: ignore[misc]
    prompt = encode_prompt(tokenizer, TEXT, " w1 w2")
    tokens = [*prompt.document[: 300 - len(prompt.end)], *prompt.end]
    assert (found.context, found.limit) == (300, "")
    assert found.dense.tokens[1:] == greedy(model, tokens, 5)[0]
    with mlx_sparse.sparse(model, SPARSE):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens[:-1]]), cache=cache))
        assert found.sparse.tokens[1:] == greedy(model, tokens[-1:], 5, cache)[0]
    assert found.report["sparse_calls"] > 0
    dense, sparse = (found.bytes_per_token(kind) or 0 for kind in ("dense", "sparse"))
    assert 0 < sparse < dense
    assert found.kl > 0 and 0 < found.compared <= found.same_tokens + 1


def test_steps_below_the_crossover_are_dense_even_if_the_time_allows_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "measure_crossover", lambda *_: (["sparse at 600 keys and longer"], 600))
    found = run(folder, "sparq:rank=4", context=None, seconds=0.0)
    assert found.report["sparse_calls"] == 0 and found.context < 600 and found.limit == "time"


@pytest.mark.parametrize(
    ("attn", "context", "message"),
    [
        ("sample", 300, "--attn: expected one decode method such as sparq, got sample"),
        ("sample+sparq", 300, "--attn: expected one decode method"),
        (SPARSE, 2, "--context: expected at least 3 tokens for the question, got 2"),
    ],
)
def test_wrong_options_are_one_line_errors(
    folder: Path, attn: str, context: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [str(folder), "--text", str(folder / "config.json"), "--question", "w1 w2"]
    assert cli.main(["try", *options, "--attn", attn, "--context", str(context)]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("mlx-sparse: error: "))
    assert message in line


def test_output_fits_a_terminal_and_begins_with_the_command(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = [str(folder), "--text", str(tmp_path / "text.txt"), "--question", "w3 [red]w4", "--attn", SPARSE]
    assert cli.main(["try", *options, "--context", "300", "--max-tokens", "4"]) == 0
    out, _ = capfd.readouterr()
    assert max(len(line) for line in out.splitlines() if str(folder) not in line) <= 80  # a command is one line
    assert "Question: w3 [red]w4" in out
    assert " x as fast as dense attention here" in out
    assert cli.main(["try", *options, "--context", "300", "--max-tokens", "4", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["context"], result["attn"], result["family"]) == (300, SPARSE, "llama")
    assert list(result["tokens_per_second"]) == ["dense", "native dense", "sparse"]


def faster(found: Comparison, speedup: float, native: float | None = None, **changes: Any) -> Comparison:
    """Return ``found`` with steps whose times have the ratios ``speedup`` and ``native`` to a sparse step."""
    dense, sparse = (
        dataclasses.replace(answer, steps=[1.0, seconds], tokens=found.dense.tokens)
        for answer, seconds in ((found.dense, speedup), (found.sparse, 1.0))
    )
    steps = None if native is None else dataclasses.replace(found.dense, steps=[1.0, native])
    return dataclasses.replace(found, dense=dense, native=steps, sparse=sparse, **{"kl": 0.0} | changes)


def test_advice_recommends_only_what_was_faster(folder: Path) -> None:
    found = run(folder)
    lines = advice(faster(found, 1.25), "m", "the family is unusual")
    assert lines[0].startswith("Use it") and lines[0].endswith(f": mlx_lm.generate --model m --attn {SPARSE}")
    assert lines[1] == "Warning: the family is unusual."
    assert lines[2].startswith(f"{SPARSE} is 1.25 x as fast as dense attention here.")
    lines = advice(faster(found, 0.87), "m", None)
    slower = "Not worth it on this machine: dense attention is faster at 300 tokens."
    assert lines[:2] == [slower, *verdict("m", "", useless="x")[1:]]
    unsafe = advice(faster(found, 1.25, kl=0.06), "m", None)
    assert re.fullmatch(r"Not safe for this model, see the numbers: the answers agree in \d+ of \d+ tokens.", unsafe[0])
    assert any("(mean KL divergence 0.0600 nats over" in line for line in unsafe)
    lines = advice(faster(found, 3.0, 1.5), "m", None)
    assert lines[3:5] == [
        "Native kernels alone make dense attention 2.00 x as fast. Compared with",
        f"native dense attention, {SPARSE} is 1.50 x as fast.",
    ]
    assert lines[0].startswith("Use it")
    lines = advice(faster(found, 3.0, 0.9), "m", None)
    assert lines[0] == slower
    lines = advice(faster(found, 0.87, crossover=NEVER), "m", None)
    assert lines[0] == "Not worth it on this machine: no length was found at which it is faster."
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    show(found, "m", None, console)
    assert re.search(r"^dense +█.*^native dense +█.*^sparse +█", console.export_text(), re.DOTALL | re.MULTILINE)


def test_advice_for_a_prompt_below_the_crossover_says_where_the_method_pays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attn, use = "sparq:rank=4", "For longer prompts: mlx_lm.generate --model m --attn sparq:rank=4"
    monkeypatch.setattr(comparison, "measure_crossover", lambda *_: (["sparse at 900 keys and longer"], 900))
    found = run(folder, attn, context=None)
    assert found.limit == "text" and found.report["sparse_calls"] == 0
    reason, command, *_ = advice(found, "m", None)
    below = "Not worth it on this machine below 900 tokens; this prompt has"
    assert (reason, command) == (f"{below} {found.context}, the whole text.", use)
    reason, command, *_, dense, _ = advice(run(folder, attn, context=400), "m", None)
    assert re.fullmatch(
        r"Every step was dense \(over fewer than .* keys\): the difference is from native kernels.", dense
    )
    assert (reason, command) == (f"{below} 400.", use)
    monkeypatch.setattr(comparison, "measure_crossover", lambda *_: (["sparse at 9000 keys and longer"], 9000))
    long = encode_prompt(load(str(folder))[1], 5 * TEXT, " w1 w2")  # longer than the model supports
    assert run(folder, attn, prompt=long, context=None).limit == "model"


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_default_model_finds_the_key(demo_cache: Path, smollm2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--attn", "sparq:dense_below=0", "--context", "1400", "--fast-blas", "--json"]
    assert cli.main(["try", "--cache-dir", str(demo_cache), *options]) == 0
    result = json.loads(capfd.readouterr().out)
    assert KEY in result["dense"]["text"] and result["identical"]
    report = result["report"]
    assert report["served_layers"] == report["layers"] == 30
    assert 0 < report["sparse_bytes"] < 0.5 * report["dense_bytes"]
