"""Check the command export-onnx: its one-line errors, and that a failed export leaves no files."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import onnx
import pytest
import tiny_models
from mlx import nn
from mlx.utils import tree_flatten
from mlx_sparse.onnx_export.exporter import command, compare, decoder, export, weights
from mlx_sparse.onnx_export.exporter.methods.sparq import SparQDecoding
from mlx_sparse.onnx_export.runtime.runner import Runner

from mlx_sparse import cli
from mlx_sparse.checks import ArtefactError

NAMES = {"model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "genai_config.json"}
SPARQ = "sparq:rank=4,top_k=4"
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command with output tmp_path/out and returns its error or its output."""

    def call(model: object, *options: str, out: str = "out") -> str:
        try:
            command.main(["--model", str(model), "-o", str(tmp_path / out), *options])
        except SystemExit as stop:
            assert stop.code == 2
            return capsys.readouterr().err
        return capsys.readouterr().out

    return call


def assert_refused(message: str, expected: str, folder: Path) -> None:
    """Assert that the message is a one-line error and that the folder has no new files."""
    assert re.fullmatch(rf"export-onnx: error: [^\n]*{expected}[^\n]*\n", message), message
    assert [file.name for file in folder.iterdir()] in ([], ["model"])


def test_the_command_is_a_subcommand_of_mlx_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for call in (lambda: command.main(["--help"]), lambda: cli.main(["export-onnx", "--help"])):
        with pytest.raises(SystemExit) as stop:
            call()
        assert stop.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("usage: export-onnx ")
    assert cli.main([]) == 0
    assert re.search(r"^ +export-onnx\b", capsys.readouterr().out, re.MULTILINE)


def test_export_prints_the_method_and_the_verification(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    said = run(llama, "--method", SPARQ, "--max-length", "100")
    assert re.match(
        r".*/out: sparq:rank=4,top_k=4,.*, 100 tokens, 0 MB.\nChecked on onnxruntime: logits of up to", said
    )
    assert {file.name for file in (tmp_path / "out").iterdir()} == NAMES
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("in_config", [None, 5, [0, 5]], ids=str)
@pytest.mark.parametrize("generation", [{}, {"eos_token_id": [7, 3]}], ids=str)
def test_an_exported_model_ends_at_the_tokens_of_mlx_lm(
    run: Callable[..., str], tmp_path: Path, in_config: Any, generation: dict[str, Any]
) -> None:
    folder = changed(tmp_path / "model", eos_token_id=in_config)  # the tokenizer ends at token 0
    (folder / "generation_config.json").write_text(json.dumps(generation))
    run(folder, "--method", SPARQ, "--max-length", "64")
    _, tokenizer = mlx_lm.load(str(folder))
    assert Runner(tmp_path / "out").eos == tokenizer.eos_token_ids
    genai = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]
    assert set(genai["eos_token_id"]) == tokenizer.eos_token_ids


def test_attn_config_sets_parameters(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    (tmp_path / "attn.toml").write_text("[sparq]\nrank = 5\ntop_k = 9\n")
    said = run(llama, "--attn-config", str(tmp_path / "attn.toml"), "--method", "sparq:top_k=7")
    assert "sparq:rank=5,top_k=7" in said


@pytest.mark.parametrize(("options", "expected"), TABLES["wrong arguments"])
def test_wrong_arguments_are_refused(
    run: Callable[..., str], llama: Path, tmp_path: Path, options: list[str], expected: str
) -> None:
    assert_refused(run(llama, *options), expected, tmp_path)


def test_dense_below_is_a_setting_of_the_method(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    run(llama, "--method", f"{SPARQ},dense_below=33", "--max-length", "64")
    nodes = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.node
    assert {a.i for node in nodes for a in node.attribute if a.name == "dense_below"} == {33}


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ([], "reallocate=false,component_score=query,key_bits=16,dense_below=10922"),
        (["--native"], "reallocate=false,component_score=query_key,dense_below=512"),
    ],
    ids=str,
)
def test_default_files_become_sparse_within_their_default_length(
    run: Callable[..., str], tmp_path: Path, options: list[str], method: str
) -> None:
    folder = described({"sizes": {"head_dim": 64}, "config": {"max_position_embeddings": 131_072}}, tmp_path / "model")
    said = run(folder, *options)
    assert f": sparq:top_k=128,local_window=32,{method}, 16384 tokens, " in said
    assert "All decode steps are dense" not in said


def described(entry: dict[str, Any], folder: Path) -> Path:
    """Write the model of a table entry, which has a family, weight sizes and changes of config.json."""
    tiny_models.write(folder, entry.get("family", "llama"), **entry.get("sizes", {}))
    config = json.loads((folder / "config.json").read_text()) | entry.get("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, **config: Any) -> Path:
    """Write a tiny llama model with changes in its config.json."""
    return described({"config": config}, folder)


def with_weights(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> Path:
    """Change the weights of the model in a folder, or of a new tiny llama."""
    file = (folder if folder.exists() else tiny_models.write(folder)) / "model.safetensors"
    arrays = dict(mx.load(str(file)))
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    return folder


def float16_caches(folder: Path) -> Path:
    """Write a tiny llama whose keys exceed float16, although its weights do not."""

    def change(weights: dict[str, mx.array]) -> None:
        norm = "model.layers.0.input_layernorm.weight"
        weights[norm] = weights[norm] * 3e4

    return with_weights(folder, change)


def cut(folder: Path, count: int) -> Path:
    """Write a tiny llama whose weight file is truncated."""
    file = tiny_models.write(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:count])
    return folder


def without(folder: Path, name: str) -> Path:
    (tiny_models.write(folder) / name).unlink()
    return folder


def quantized(folder: Path, **how: Any) -> Path:
    """Write a tiny llama with quantized weights."""
    changed(folder, intermediate_size=96, quantization=how)
    model = tiny_models.build(intermediate_size=96)
    nn.quantize(model, **how)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


DOWN = "model.layers.1.mlp.down_proj"
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "3 bits": (
        lambda p: quantized(p, bits=3, group_size=32),
        "model.embed_tokens: expected a weight of 4 or 8 bits, got 3. Export with --dtype float32",
    ),
    "mxfp4": (
        lambda p: quantized(p, bits=4, group_size=32, mode="mxfp4"),
        "model.embed_tokens: expected affine quantized weights, got mode mxfp4",
    ),
    "codes of another type": (
        lambda p: with_weights(
            quantized(p, bits=4, group_size=32),
            lambda w: w.update({f"{DOWN}.weight": w[f"{DOWN}.weight"].view(mx.int32)}),
        ),
        "--model: expected a model that mlx-lm can load",
    ),
    "scales of another shape": (
        lambda p: with_weights(
            quantized(p, bits=4, group_size=32), lambda w: w.update({f"{DOWN}.scales": w[f"{DOWN}.scales"][:, :1]})
        ),
        "--model: expected a model that mlx-lm can load",
    ),
    "missing folder": (lambda p: p / "nowhere/at/all", "--model: expected a model that mlx-lm can load"),
    "repository that cannot be reached": (lambda p: "nobody/nothing", "--model: expected a model.*nobody/nothing"),
    "no config": (lambda p: without(p, "config.json"), "--model: expected a model.*config.json"),
    "broken config": (lambda p: (changed(p) / "config.json").write_text("{") and p, "--model: expected a model"),
    "no weights": (lambda p: without(p, "model.safetensors"), "No safetensors found"),
    "weights cut in the header": (lambda p: cut(p, 100), "--model: expected a model that mlx-lm can load"),
    "weights cut in the data": (lambda p: cut(p, 60_000), "--model: expected "),
    "a weight too few": (lambda p: with_weights(p, lambda w: w.pop(f"{DOWN}.weight")), f"{DOWN}.weight"),
    "a weight too many": (lambda p: with_weights(p, lambda w: w.update(extra=mx.zeros(3))), "extra"),
    "a weight of another shape": (
        lambda p: with_weights(p, lambda w: w.update({f"{DOWN}.weight": mx.zeros((3, 3))})),
        f"{DOWN}.weight",
    ),
    "NaN": (
        lambda p: with_weights(p, lambda w: w.update({f"{DOWN}.weight": w[f"{DOWN}.weight"] * np.nan})),
        f"{DOWN}.weight: expected finite weights, got NaN or infinity",
    ),
    "NaN in a norm": (
        lambda p: with_weights(p, lambda w: w.update({"model.norm.weight": w["model.norm.weight"] * np.nan})),
        "model.norm.weight: expected finite weights, got NaN or infinity",
    ),
    **{name: (functools.partial(described, entry), entry["message"]) for name, entry in TABLES["models"].items()},
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_exported_are_refused(
    run: Callable[..., str], tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make, expected = MODELS[case]
    model = make(tmp_path / "model")
    assert_refused(run(model, "--method", SPARQ, "--max-length", "64"), expected, tmp_path)


def test_weights_too_large_for_the_type_are_refused(run: Callable[..., str], tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model", lambda w: w.update({f"{DOWN}.weight": w[f"{DOWN}.weight"] * 1e6}))
    message = run(model, "--method", SPARQ, "--dtype", "float16")
    assert_refused(message, f"--dtype: expected a type with the range of {DOWN}.weight, got float16", tmp_path)


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_existing_output_is_not_changed(run: Callable[..., str], llama: Path, tmp_path: Path, what: str) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    kept.mkdir()
    {
        "file": lambda: out.write_text("mine"),
        "folder": lambda: (out.mkdir(), (out / "mine").write_text("mine")),
        "link": lambda: out.symlink_to(kept),
    }[what]()
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    message = run(llama, "--method", SPARQ)
    assert re.fullmatch(r"export-onnx: error: -o: expected a folder that is empty or does not exist, got .*\n", message)
    assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_empty_and_missing_folders_are_accepted(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for out in ("out", "new/folders/out"):
        run(llama, "--method", SPARQ, "--max-length", "64", out=out)
        assert {file.name for file in (tmp_path / out).iterdir()} == NAMES


@pytest.mark.parametrize("place", [(decoder.Decoder, "_mlp"), (export, "reference"), (export, "compare")])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(28, "No space left on device"), "-o: .*No space left on device"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_failure_leaves_nothing_behind(
    run: Callable[..., str],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[Any, str],
    error: BaseException,
    expected: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(*place, fail)
    assert_refused(run(llama, "--method", SPARQ, out="new/folders/out"), expected, tmp_path)


def test_a_full_disk_leaves_nothing_behind(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        message = run(llama, "--method", SPARQ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_refused(message, "-o: expected a folder that can be written.*File too large", tmp_path)


def test_sigterm_leaves_nothing_behind(
    run: Callable[..., str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(export, "reference", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    assert_refused(run(llama, "--method", SPARQ), "interrupted", tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_folder_has_default_permissions(run: Callable[..., str], llama: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    run(llama, "--method", SPARQ, "--max-length", "64")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_caches_beyond_memory_are_refused(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(compare, "zeros", fail)
    model = changed(tmp_path / "model", max_position_embeddings=1 << 20)
    message = run(model, "--method", SPARQ, "--max-length", "1000000")
    assert_refused(message, "--max-length: expected caches that fit into memory", tmp_path)


def test_the_current_folder_is_not_replaced(
    run: Callable[..., str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = run(llama, "--method", SPARQ, out=".")
    assert_refused(message, "-o: expected a folder that can be replaced, got .*the current folder", tmp_path)


def test_keys_too_large_for_the_type_are_refused(run: Callable[..., str], tmp_path: Path) -> None:
    message = run(float16_caches(tmp_path / "model"), "--method", SPARQ, "--dtype", "float16")
    assert_refused(message, "--dtype: expected a type with the range of keys and values, got float16", tmp_path)


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    run: Callable[..., str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export.compare

    def meanwhile(*args: Any) -> compare.Agreement:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")
        return original(*args)

    monkeypatch.setattr(export, "compare", meanwhile)
    assert "-o: expected a folder that can be written" in run(llama, "--method", SPARQ)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "activation": lambda m: m.setattr(decoder.Decoder, "_silu", decoder.Decoder._gelu),
    "scale of a norm": lambda m: m.setattr(
        weights.Weights,
        "vector",
        lambda self, name, array, shift=0.0, original=weights.Weights.vector: original(self, name, array, shift + 1e-4),
    ),
    "position": lambda m: m.setattr(
        decoder, "rope_of", lambda module, original=decoder.rope_of: dataclasses.replace(original(module), scale=1.01)
    ),
    "pairs": lambda m: m.setattr(
        decoder,
        "rope_of",
        lambda module, original=decoder.rope_of: dataclasses.replace(original(module), traditional=True),
    ),
    "rank": lambda m: _attributes(m, rank=5),
    "window": lambda m: _attributes(m, reallocate=1),
    "components": lambda m: _attributes(m, component_score=1),
}


def _attributes(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    original = SparQDecoding.attributes
    monkeypatch.setattr(SparQDecoding, "attributes", lambda self, lanes: original(self, lanes) | changes)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_with_wrong_logits_is_rejected(
    run: Callable[..., str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, dtype: str
) -> None:
    WRONG[what](monkeypatch)
    expected = "model.onnx: expected logits within .* of MLX's, got .* attention.*Nothing was written"
    assert_refused(run(llama, "--method", SPARQ, "--dtype", dtype), expected, tmp_path)


def test_nan_logits_are_rejected(
    run: Callable[..., str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compare._steps

    def spoiled(*args: Any) -> list[np.ndarray]:
        prompted, step = original(*args)
        return [prompted, np.where(np.arange(step.shape[1]) == 7, np.nan, step)]

    monkeypatch.setattr(compare, "_steps", spoiled)
    assert_refused(run(llama, "--method", "dense"), "expected logits within .* got nan with dense", tmp_path)


@pytest.mark.parametrize(
    ("row", "others", "accepted"), [(1.0, 0.25, True), (1.25, 0.0, True), (1.5, 0.0, False), (0.0, 0.5, False)]
)
def test_one_row_may_differ_by_the_effect_of_its_keys(row: float, others: float, accepted: bool) -> None:
    wanted, dense, got = np.zeros((3, 2)), np.ones((3, 2)), np.full((3, 2), others)
    got[0] = row
    if accepted:
        assert compare._median_error(got, wanted, dense, 0.25, where="x") == others
    else:
        with pytest.raises(ArtefactError, match=r"expected logits within 2.5e-01 of MLX's, got .* with x"):
            compare._median_error(got, wanted, dense, 0.25, where="x")
