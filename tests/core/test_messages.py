"""Test error messages: truncated input, suggestions and file names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import file_size_limit
from require import absent
from tiny_models import write

from mlx_sparse import blas, cli
from mlx_sparse.checks import (
    LONGEST,
    ConfigError,
    Parser,
    SparseAttentionError,
    check_choice,
    check_int,
    check_share,
    read_length,
    read_shape,
)
from mlx_sparse.core import registry
from mlx_sparse.files import replace_file
from mlx_sparse.lm.loading import loading
from mlx_sparse.methods import load_toml, parse
from mlx_sparse.methods.text import split_methods
from mlx_sparse.tools import formats
from mlx_sparse.tools.assets.store import build_directory, check_directory
from mlx_sparse.tools.evaluate.journal import Journal
from mlx_sparse.tools.evaluate.results import Outcome

HUGE = 100_000
PLAIN, SPACED = "x" * HUGE, "x y " * (HUGE // 4)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(SparseAttentionError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# Functions that receive a text of 100 kB, and the start of their messages.
ECHOING: dict[str, tuple[Callable[[str], Any], str]] = {
    "method": (parse, "attn: expected one of dense, sparq, "),
    "key": (lambda text: parse(f"sparq:{text}=1"), "sparq: expected one of the keys rank, "),
    "value": (lambda text: parse(f"sparq:rank={text}"), "rank: expected an integer of at least 1, got "),
    "number": (lambda text: parse(f"sparq:rank=-{'1' * 4000}"), "rank: expected an integer of at least 1, got "),
    "preset": (lambda text: parse(f"sparq:preset={text}"), "sparq: expected one of the presets "),
    "pair": (lambda text: parse(f"sparq:{text}"), "sparq: expected key=value, got "),
    "ranges": (lambda text: parse(f"sample:ranges={text}"), "ranges: expected up_to:"),
    "list": (lambda text: split_methods(f"{text},,"), "methods: expected a list such as "),
    "backend": (lambda text: registry.require(text, "sparq"), "backend: expected auto"),
    "choice": (lambda text: check_choice("dtype", text, ("f16", "f32")), "dtype: expected one of f16, f32, got "),
    "share": (lambda text: check_share("window", text), "window: expected a number above 0 and at most 1, got "),
    "list of values": (lambda text: check_int("top_k", [text] * 9, 1), "top_k: expected an integer of at least 1"),
    "length": (read_length, "--lengths: expected numbers such as 1k,2k,3000, got "),
    "shape": (read_shape, "--shapes: expected query heads x KV heads x head dim such as 32x8x128, got "),
    "TOML file": (load_toml, "attn-config: expected a readable TOML file, got "),
    "form": (
        lambda text: formats.check_options(argparse.Namespace(output=text, out=None)),
        "-o: expected one of md, json, jsonl, got ",
    ),
}


@pytest.mark.parametrize("text", [PLAIN, SPACED, PLAIN + "'"], ids=["plain", "spaced", "apostrophe"])
@pytest.mark.parametrize("name", ECHOING)
def test_repeated_input_is_truncated(name: str, text: str) -> None:
    call, beginning = ECHOING[name]
    message = message_of(lambda: call(text))
    assert message.startswith(beginning)
    assert len(message) <= LONGEST + len(" ... ")
    assert not re.search(r"\S{210}", message)


def test_toml_keys_and_values_are_truncated(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for content, beginning in (
        (f'"{PLAIN}" = 1', "attn-config: expected one table per method"),
        (f'["{PLAIN}"]', "attn: expected one of"),
        (f'[sparq]\n"{PLAIN}" = 1', "sparq: expected one of the keys"),
        (f'[sparq]\nrank = "{PLAIN}"', "rank: expected an integer"),
        (f"[sparq]\nrank = [{'1, ' * HUGE}]", "rank: expected an integer"),
    ):
        file.write_text(content)
        message = message_of(lambda: load_toml(file))
        assert message.startswith(beginning)
        assert len(message) <= LONGEST + len(" ... ")


def test_advice_survives_truncation() -> None:
    message = message_of(lambda: formats.check_options(argparse.Namespace(output=SPACED, out=None)))
    assert message.endswith("--out names a file.")
    short = "model: expected 'a b', got \"it's\" and 'c'. Do this."
    assert str(ConfigError(short)) == short


@pytest.mark.parametrize("argv", [[PLAIN], ["matrix", PLAIN], ["eval", "--limit", PLAIN]])
def test_commands_truncate_input(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(argv) == 2
    except SystemExit as ended:
        assert ended.code == 2
    err = capsys.readouterr().err
    assert 0 < len(err) < 3000
    assert "error: " in err.splitlines()[-1]
    with pytest.raises(SystemExit):
        Parser(prog="p").parse_args([SPACED])
    assert len(capsys.readouterr().err) < LONGEST + 100


@pytest.mark.parametrize(
    ("call", "suggestion"),
    [
        (lambda: parse("sparc"), "got 'sparc'. Did you mean sparq?"),
        (lambda: parse("SparQ"), "got 'SparQ'. Did you mean sparq?"),
        (lambda: parse("spraq"), "got 'spraq'. Did you mean sparq?"),
        (lambda: parse("sparq:topk=4"), "got 'topk'. Did you mean top_k?"),
        (lambda: parse("sparq:preset=robot"), "got 'robot'. Did you mean robust?"),
        (lambda: parse("sparq:component_score=quer"), "got 'quer'. Did you mean query?"),
        (lambda: parse("saap:mode=train"), "got 'train'. Did you mean trained?"),
        (lambda: registry.require("mettal", "sparq"), "Did you mean metal?)."),
        (lambda: check_choice("--dtype", "bfloat61", ("float16", "bfloat16")), "Did you mean bfloat16?"),
    ],
)
def test_unknown_names_get_a_suggestion(call: Callable[[], Any], suggestion: str) -> None:
    assert message_of(call).endswith(suggestion)
    assert message_of(lambda: parse("zzz")).endswith("got 'zzz'.")


def test_full_disk_error_names_the_file(tmp_path: Path) -> None:
    file, results = tmp_path / "whole.txt", tmp_path / "results.jsonl"
    journal = Journal(results, "test", "key", Outcome)

    def build(folder: Path) -> None:
        (folder / "part").write_bytes(bytes(5000))

    with file_size_limit(1000):
        for write_it, name in (
            (lambda: replace_file(file, lambda new: new.write_bytes(bytes(5000))), file),
            (lambda: journal.add("x" * 5000, Outcome(0, 1, 1, 1)), results),
            (lambda: build_directory(tmp_path / "model", build), tmp_path / "model"),
        ):
            with pytest.raises(OSError, match="too large") as caught:
                write_it()
            assert caught.value.filename == str(name)
    assert not file.exists()


def test_eval_on_a_full_disk_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_torch: Any
) -> None:
    write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(commands.text(1800))
    out, before = tmp_path / "out", tmp_path / "before"
    argv = ["eval", "--model", str(tmp_path / "model"), "--context", "512", "--text", str(text), "--limit", "1"]
    argv += ["--methods", "sparq:rank=4,top_k=4,dense_below=0", "--tasks", "copying", "--out"]
    assert cli.main([*argv, str(before)]) == 0  # the first run lets MLX write its compiled kernels
    with file_size_limit(700):
        assert cli.main([*argv, str(out)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert re.fullmatch(rf"mlx-sparse: error: {out}/\S+: expected to read or write it, got: File too large\.", line)


DEEP = "[" * 100_000


def test_damaged_manifests_are_a_one_line_error(tmp_path: Path) -> None:
    directory = build_directory(tmp_path / "model", lambda folder: (folder / "a").write_text("a"))
    (directory / "mlx-sparse-manifest.json").write_text(DEEP)
    assert "got a damaged mlx-sparse-manifest.json" in message_of(lambda: check_directory(directory))


def test_deep_genai_settings_are_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := registry.unavailable("onnx"):
        absent("onnx", reason)
    from mlx_sparse.onnx_export.runtime import genai, native

    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "library.so")
    (tmp_path / "genai_config.json").write_text(DEEP)
    assert "from export-onnx with genai_config.json" in message_of(lambda: genai.add_native_library(tmp_path))


def test_only_pinned_libraries_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the manifest of the folder is not trusted, because an attacker could have written it."""
    monkeypatch.setattr(blas, "LIBRARIES", blas.BUILDS["x86_64"])
    first, *_ = blas.LIBRARIES
    folder = build_directory(tmp_path / "b", lambda new: [(new / name).write_text("other") for name in blas.LIBRARIES])
    check_directory(folder)
    with pytest.raises(ValueError, match=rf"{first}: expected a library of OpenBLAS, got another file\. Delete"):
        blas.checked(folder)


def test_errors_of_the_hub_keep_their_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("mlx_sparse.onnx_export.exporter.export")

    def failing() -> None:
        with loading("m"):
            raise OSError("404 Client Error. (Request ID: 1)\n\nIf the repo is gated,\nlog in.")

    assert message_of(failing).endswith("got m (404 Client Error. (Request ID: 1) If the repo is gated, log in.).")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "set 'HF_HUB_OFFLINE=0'" in message_of(lambda: export.load("nowhere/at-all"))
