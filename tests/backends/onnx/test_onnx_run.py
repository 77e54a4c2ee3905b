"""Check `mlx-sparse run-onnx` with exported models."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import numpy as np
import onnx
import pytest
import tiny_models
from exported import SPARQ, by_method, copied, exported
from mlx_sparse.onnx_export import Runner
from mlx_sparse.onnx_export.runtime import run

from mlx_sparse import cli

PROMPT = tiny_models.prompt_of(100)
WORDS = tiny_models.words(PROMPT)
REAL = Path(__file__).parents[2] / "testing" / "run_smollm2.py"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # a real model


def generate(*arguments: str) -> int:
    return cli.main(["run-onnx", *arguments])


@by_method
def test_the_command_prints_text_and_statistics(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(method)
    assert generate(str(folder), "--prompt", WORDS, "--max-tokens", "24", "--native", "off") == 0
    rule, text, second, *lines = capsys.readouterr().out.splitlines()
    assert rule == second == "=" * 10
    assert text == tiny_models.words(list(Runner(folder, native="off").generate(PROMPT, 24)))
    assert re.fullmatch(r"Prompt: 100 tokens, \d+\.\d{3} tokens-per-sec", lines[0])
    assert re.fullmatch(r"Generation: 24 tokens, \d+\.\d{3} tokens-per-sec", lines[1])
    assert lines[2] == f"Attention: {Runner(folder).metadata['mlx_sparse.method']}, function bodies (no native kernels)"


@pytest.mark.parametrize(
    ("method", "dense"),
    [
        ("sparq:top_k=16,dense_below=100", False),
        ("sparq:top_k=16,dense_below=101", True),
        ("sparq:top_k=100,dense_below=0", True),
        ("sample+sparq:top_k=16,dense_below=101", True),
        ("sample", False),
        ("dense", False),
        ("unknown", False),
    ],
)
def test_the_command_notes_runs_without_a_sparse_step(method: str, dense: bool) -> None:
    assert run._all_steps_dense(method, 100) == dense
    result = run.Result("", 1, 1.0, 1, 1.0, "stop", method, dense, "native kernels")
    note = " (all steps dense)" if dense else ""
    assert result.summary().endswith(f"Attention: {method}{note}, native kernels")


def test_the_command_reads_a_prompt_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: WORDS, raising=False)
    assert generate(str(exported(SPARQ)), "--prompt", "-", "-m", "3", "--json", "--threads", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == 100
    assert found["generation_tokens"] == 3
    assert found["finish_reason"] == "length"
    assert found["text"] == tiny_models.words(list(Runner(exported(SPARQ)).generate(PROMPT, 3)))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prompt_that_is_not_utf8_is_refused(locale: str) -> None:
    environment = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(
        command("--prompt", "-"), input=b"\xff\xfe", capture_output=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stderr == b"mlx-sparse: error: --prompt: expected text in UTF-8, got other bytes.\n"


def test_a_chat_template_is_used_unless_ignored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = copied("dense", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "w1 w2 {% for message in messages %}{{ message['content'] }}{% endfor %} w3"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first, text = {"SpecialToken": {"id": "w1", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],  # a beginning-of-text token, which chat templates also write
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"w1": {"id": "w1", "ids": [tokenizer["model"]["vocab"]["w1"]], "tokens": ["w1"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    counts = []
    for extra in ([], ["--ignore-chat-template"]):
        assert generate(str(folder), "--prompt", "w5 w6", "-m", "2", "--json", *extra) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts == [5, 3]


def test_finish_reason_is_stop_at_an_end_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokens = list(Runner(exported("dense")).generate(PROMPT, 8))

    def end_there(model: onnx.ModelProto) -> None:
        entry = next(entry for entry in model.metadata_props if entry.key == "mlx_sparse.eos_token_ids")
        entry.value = json.dumps([tiny_models.VOCAB - 1, tokens[5]])

    folder = copied("dense", tmp_path, end_there)
    assert generate(str(folder), "--prompt", WORDS, "-m", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["generation_tokens"], found["finish_reason"]) == (5, "stop")


def test_unencodable_characters_are_replaced(tmp_path: Path) -> None:
    folder = copied("dense", tmp_path)
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(re.sub(r'"w(\d+)"', r'"ü\1"', tokenizer), encoding="utf-8")
    code = "import sys; from mlx_sparse import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run-onnx", str(folder), "--prompt", "\u00fc5", "-m", "3"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\n\?\d+", done.stdout)


def test_a_failing_chat_template_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("dense", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('a system message\\nis needed') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert generate(str(folder), "--prompt", "w5") == 2
    error = capsys.readouterr().err
    assert error == (
        "mlx-sparse: error: model: expected a chat template that runs, got: a system message. "
        "Set --ignore-chat-template.\n"
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlx_sparse.cli", "run-onnx", str(exported(SPARQ)), *arguments]


def talking() -> subprocess.Popen[bytes]:
    """Start the command and wait until it prints text."""
    long = [sys.executable, "-m", "mlx_sparse.cli", "run-onnx", str(exported(SPARQ, max_length=2048)), "-m", "1900"]
    process = subprocess.Popen(
        [*long, "--prompt", WORDS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdout.readline() == b"==========\n"
    assert process.stdout.read(1)
    return process


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    with talking() as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_ends_the_command_quietly() -> None:
    with talking() as process:
        assert process.stderr
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
    assert process.returncode == 130


def test_standard_input_may_be_closed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command("--prompt", "-")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "mlx-sparse: error: --prompt: expected text on standard input, which is closed.\n"


def test_default_max_tokens_fills_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(str(exported("dense", max_length=250)), "--prompt", WORDS, "--json") == 0
    assert json.loads(capsys.readouterr().out)["generation_tokens"] == 151


def test_equal_seeds_generate_equal_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        arguments = ["--prompt", WORDS, "-m", "20", "--json", "--temp", "1.5", "--top-p", "0.9", "--seed", seed]
        assert generate(str(exported("dense")), *arguments) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", WORDS, "-m", "200"], "prompt and max_tokens: expected at most 256 tokens, which the model was"),
        (["--prompt", WORDS * 3], "prompt: expected at most 256 tokens, which the model was"),
        (["--prompt", ""], "--prompt: expected some text, got none."),
        (["--prompt", "w1", "-m", "0"], "--max-tokens: expected an integer of at least 1, got 0."),
        (["--prompt", "w1", "--temp", "-1"], "--temp: expected a number of at least 0, got -1.0."),
        (["--prompt", "w1", "--temp", "nan"], "--temp: expected a number of at least 0, got nan."),
        (["--prompt", "w1", "--top-p", "0"], "--top-p: expected a number above 0 and at most 1, got 0.0."),
        (["--prompt", "w1", "--seed", "-1"], "--seed: expected an integer of at least 0, got -1."),
        (["--prompt", "w1", "--threads", "0"], "threads: expected an integer of at least 1, got 0."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(str(exported("dense")), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mlx-sparse: error: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.onnx"])
def test_a_folder_with_missing_files_is_refused(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied("dense", tmp_path)
    (folder / missing).unlink()
    assert generate(str(folder), "--prompt", "w1") == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse: error: model: expected ")
    assert error.count("\n") == 1


def test_the_runner_needs_no_mlx() -> None:
    """Run an exported model without MLX."""
    code = f"""
import sys
sys.modules["mlx"] = sys.modules["mlx.core"] = sys.modules["mlx_lm"] = None  # importing them fails
from mlx_sparse import cli
sys.exit(cli.main(["run-onnx", {str(exported(SPARQ))!r}, "--prompt", "w1 w2", "-m", "3"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Generation: 3 tokens" in done.stdout


# Sampling and text


def test_samples_follow_the_distribution_of_mlx_lm() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    pick = run.sampler(2.0, 0.9, seed=0)
    drawn = np.bincount([pick(logits) for _ in range(20000)], minlength=4) / 20000
    kept = np.sqrt([0.5, 0.3, 0.15, 0.0])  # top-p before the temperature; the last is beyond 0.9
    assert np.abs(drawn - kept / kept.sum()).max() < 0.015


def test_characters_of_several_tokens_are_complete() -> None:
    class Bytes:
        """A tokenizer whose tokens are bytes."""

        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode("utf-8", errors="replace")

    text = "süß 🙂 日本"
    detokenizer = run.Detokenizer(Bytes())
    pieces = [detokenizer.add(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert detokenizer.rest() == ""
    assert detokenizer.add("🙂".encode()[0]) == ""
    assert detokenizer.rest() == "\ufffd"


# A real model

TEXT = (
    "The lighthouse keeper's name was Marta. Every evening at six she climbed the ninety stairs, lit the lamp, and "
    "wrote one line about the weather in a green book. In winter the line was short. One evening a boy came to the "
    "door and asked her who wrote the green book. She told him that"
)


QUESTION = "Why is the sky blue? Answer in one sentence."


@pytest.fixture(scope="module")
def real(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Export SmolLM2 with sparse steps at 76 keys and more, and return the results of `run_smollm2.py`."""
    folder = tmp_path_factory.mktemp("exported") / "smollm2"
    argv = [str(REAL), str(smollm2), str(folder), TEXT, QUESTION]
    done = commands.run(argv, dict(os.environ))
    assert done.returncode == 0, done.stderr
    yield folder, json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(folder)


def test_smollm2_generates_the_tokens_of_mlx(real: tuple[Path, dict[str, Any]]) -> None:
    folder, found = real
    assert 60 < len(found["prompt"]) < 76, "the text turns sparse after some steps"
    assert found["calls_per_layer"] == len(found["prompt"]) + 16 - 75
    assert found["dense"] < 1e-5 * found["largest"]
    assert list(Runner(folder, native="off").generate(found["prompt"], 16)) == found["tokens"]


def test_smollm2_command_generates_the_text_of_mlx(
    real: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = real
    capsys.readouterr()
    assert generate(str(folder), "--prompt", QUESTION, "-m", "32", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == expected["chat"]
    assert found["text"] == expected["answer"]
    assert len(found["text"].split()) > 10
