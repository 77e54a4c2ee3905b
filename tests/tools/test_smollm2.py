"""Test the converted model against its GGUF file, and the checks of the cache."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from json_tables import read_tables
from tokenizers import Tokenizer

from mlx_sparse import blas
from mlx_sparse.checks import ArtefactError
from mlx_sparse.files import cache_directory, file_hash
from mlx_sparse.tools.assets import openblas, store
from mlx_sparse.tools.assets import smollm2 as converter
from mlx_sparse.tools.assets.store import build_directory

pytestmark = pytest.mark.slow  # a real model

DATA = read_tables(__file__)
PROSE = topics["compound"][:600]


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Expect a one-line `ArtefactError` of the standard form that contains ``words``."""
    with pytest.raises(ArtefactError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message and "expected" in message and "got" in message
    assert words in message


def gguf_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of q and k as llama.cpp's converter does."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def reader(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)


def test_tensors_match_an_independent_reader(smollm2: Path, reader: gguf.GGUFReader) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = mx.load(str(smollm2 / "model.safetensors"))
    for name, weight in weights.items():
        found = names.get_name(name, try_suffixes=(".weight",))
        tensor = tensors.pop(found)
        ours, theirs = np.array(weight), gguf.dequantize(tensor.data, tensor.tensor_type)
        if found.endswith(("attn_q.weight", "attn_k.weight")):
            ours = gguf_rows(ours, heads=9 if "attn_q" in found else 3)
        assert ours.dtype == np.float32 and ours.shape == theirs.shape, name
        # A reader of d * q + m may round the product or use an FMA, so the tolerance is one unit of the largest term.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=float(np.abs(theirs).max()) * 2**-22, err_msg=name)
    assert not tensors


def test_hyper_parameters_come_from_the_file(smollm2: Path, reader: gguf.GGUFReader) -> None:
    fields = reader.fields
    config = json.loads((smollm2 / "config.json").read_text())
    for ours, theirs in DATA["fields"].items():
        assert config[ours] == pytest.approx(fields[f"llama.{theirs}"].contents(), rel=1e-7), ours


@pytest.mark.parametrize(
    "text", [PROSE, "naïve “quotes” … 中文, عربى, 🤖👩‍👩‍👧", "  two  spaces\n\n\ttab\r\n", "12345 = 0x3039"]
)
def test_tokenizer_round_trip(smollm2: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_specials_digits_and_template(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [1]
    assert len(tokenizer.encode("71853", add_special_tokens=False)) == 5
    assert tokenizer.eos_token_ids == {2}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def load_tokenizer(model: Path) -> Any:
    from mlx_lm import utils

    return utils.load_tokenizer(model)


@pytest.fixture(params=[False, True], ids=["wheel", "source archive"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], str, dict[str, bool]]:
    """Return pip options that find tiny==1.0 without a network, the hash of its file, and the kind of the file."""
    folder = tmp_path / "index"
    folder.mkdir()
    if request.param:
        file = folder / "tiny-1.0.tar.gz"
        with tarfile.open(file, "w:gz") as archive:
            for name, text in DATA["source"].items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    else:
        file = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            for name, text in DATA["wheel"].items():
                wheel.writestr(name, text)
    return ["--no-index", "--find-links", str(folder)], file_hash(file), {"source": request.param}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
def test_links_in_archives_are_not_files(tmp_path: Path, kind: bytes) -> None:
    file = tmp_path / "tiny-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo("tiny-1.0/tiny/data.bin")
        entry.type, entry.linkname = kind, "tiny-1.0/tiny/elsewhere"
        archive.addfile(entry)
    with refused("expected files *data.bin, got none"):
        store.read_files(file, "*data.bin")


def test_files_are_fetched_once_and_verified(tmp_path: Path, tiny: tuple[list[str], str, dict[str, bool]]) -> None:
    options, sha256, kind = tiny
    cache = tmp_path / "cache"
    with refused("HASHES"):
        store.fetch("tiny==1.0", "0" * 64, cache, options, **kind)
    assert list(cache.iterdir()) == []
    file = store.fetch("tiny==1.0", sha256, cache, options, **kind)
    assert store.read_files(file, "*tiny/data.bin") == {"data.bin": b"data"}
    with refused("expected files *.onnx"):
        store.read_files(file, "*.onnx")
    assert store.fetch("tiny==1.0", sha256, cache, ["--no-index"], **kind) == file
    with file.open("r+b") as archive:
        archive.write(b"damage")
    before = file.read_bytes()
    with refused("Move it away"):
        store.fetch("tiny==1.0", sha256, cache, options, **kind)
    assert file.read_bytes() == before


def test_pip_failures_are_one_line_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("No matching distribution"):
        store.fetch("tiny==1.0", "0" * 64, tmp_path, ["--no-index"])
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda _: None)
    with refused("ensurepip"):
        store.fetch("tiny==1.0", "0" * 64, tmp_path)


def test_truncated_gguf_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with smollm2_gguf.open("rb") as file:
        short.write_bytes(file.read(1 << 20))
    with refused("SHA-256"):
        converter.convert(short, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["short.gguf"]


def test_foreign_and_damaged_directories_stay(tmp_path: Path) -> None:
    foreign = tmp_path / converter.NAME
    foreign.mkdir()
    (foreign / "config.json").write_text("mine")
    with refused("written by mlx-sparse"):
        converter.prepare_model(tmp_path)
    assert (foreign / "config.json").read_text() == "mine"

    ours = build_directory(tmp_path / "ours", lambda folder: write(folder / "a", "whole"))
    for damage in (lambda: write(ours / "a", "w"), (ours / "a").unlink, lambda: write(ours / "b", "")):
        damage()
        with refused("damaged"):
            build_directory(ours, lambda folder: write(folder / "a", "whole"))


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        write(folder / "half", "")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_directory(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "mlx-sparse"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    where = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert cache_directory() == Path("/home/someone") / where / "mlx-sparse"


@pytest.mark.parametrize("step", ["fetch", "_unpack"])
def test_concurrent_unpacking_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    """Test two processes, of which the faster removes the wheel before the slower reads it."""
    monkeypatch.setattr(openblas.platform, "machine", lambda: "x86_64")
    libraries = blas.BUILDS["x86_64"]
    monkeypatch.setattr(openblas, "fetch", lambda *_: tmp_path / "wheel")

    def faster(*_: object) -> None:
        build_directory(tmp_path / blas.DIRECTORY, lambda folder: [write(folder / n, n) for n in libraries])
        raise ArtefactError("wheel: expected a wheel, got no file.")

    monkeypatch.setattr(openblas, step, faster)
    openblas.fetch_libraries(tmp_path)
    assert capsys.readouterr().err == ""
    assert [(tmp_path / blas.DIRECTORY / name).read_text() for name in libraries] == list(libraries)
