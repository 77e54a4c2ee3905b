"""Check the runner of exported models."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_models
from exported import SPARQ, by_kernels, copied, exported, need, tokens_in_steps, tokens_of_mlx
from mlx_sparse.onnx_export import Runner
from mlx_sparse.onnx_export.runtime import memory, runner

from mlx_sparse.checks import ArtefactError, ConfigError, ShapeError

STEPS = 24
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
PROMPT = tiny_models.prompt_of(100)


# This method reads all running statistics.
ROBUST = SPARQ + ",component_score=query_key,reallocate=true"
by_method = pytest.mark.parametrize("method", ["dense", SPARQ, ROBUST], ids=["dense", "sparq", "robust"])


# Runner


@by_method
@by_kernels
def test_tokens_equal_mlx(method: str, kernels: str) -> None:
    need(kernels)
    model = Runner(exported(method), native=kernels, threads=1)
    assert model.native == (kernels == "auto")
    tokens = list(model.generate(PROMPT, STEPS))
    assert tokens == tokens_of_mlx(method, PROMPT, STEPS)
    assert model.length == len(PROMPT) + STEPS - 1


@by_method
def test_chunked_prefill_equals_one_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Runner(exported(method), native="off")
    whole = model.prefill(PROMPT).copy()
    after = model.step([[5]]).copy()
    model.reset()
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 33)
    assert np.abs(model.prefill(PROMPT) - whole).max() <= 1e-5 * np.abs(whole).max()
    assert np.abs(model.step([[5]]) - after).max() <= 1e-5 * np.abs(after).max()


@by_method
def test_reset_removes_all_tokens(method: str) -> None:
    model = Runner(exported(method))
    first = list(model.generate(PROMPT, STEPS))
    other = list(model.generate(PROMPT[::-1], 5))  # continues
    model.reset()
    assert model.length == 0
    assert list(model.generate(PROMPT, STEPS)) == first
    assert other != first[:5]


@by_method
def test_copied_caches_continue_the_text(method: str) -> None:
    model, other = Runner(exported(method)), Runner(exported(method))
    model.prefill(PROMPT)
    other.step([[9]])
    for name, array in model.caches.items():
        other.caches[name][...] = array
    other.resume_at(len(PROMPT))
    for token in (5, 7):
        assert np.array_equal(other.step([[token]]), model.step([[token]]))
    for length in (0, other.max_length + 1):
        with pytest.raises(ConfigError, match=r"^length: expected an integer "):
            other.resume_at(length)
    assert other.length == len(PROMPT) + 2


@by_method
def test_padded_rows_equal_single_rows(method: str) -> None:
    prompts = [tiny_models.prompt_of(n, seed=n) for n in (60, 45)]
    padded = [prompts[0], [tiny_models.EOS] * 15 + prompts[1]]
    together = tokens_in_steps(Runner(exported(method), batch=2), padded, STEPS, [0, 15])
    for row, prompt in enumerate(prompts):
        assert together[row] == tokens_in_steps(Runner(exported(method)), [prompt], STEPS)[0]


def test_the_mask_grows_with_the_text() -> None:
    prompt = tiny_models.prompt_of(1500)
    model = Runner(exported(SPARQ, max_length=2048))
    assert list(model.generate(prompt, STEPS)) == tokens_of_mlx(SPARQ, prompt, STEPS)


def test_memory_does_not_grow_with_the_tokens() -> None:
    model = Runner(exported(SPARQ, max_length=2048))
    model.prefill(PROMPT)
    tracked = _growth(lambda: model.step([[7]]), 800)
    assert tracked < 1 << 20, f"{tracked} bytes"


def _growth(step: Any, count: int) -> int:
    """Return the growth of resident memory in bytes during the second half of the steps."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        return os.sysconf("SC_PAGE_SIZE") * int(statm.read_text().split()[1])

    for _ in range(count // 2):
        step()
    before = resident()
    for _ in range(count // 2):
        step()
    return resident() - before


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_caches_are_aligned_zeros_that_the_runtime_shares(dtype: Any) -> None:
    small, large = memory.zeros((2, 3), dtype), memory.zeros((8, 1024, 1024), dtype)
    assert not small.any() and not large.any()
    assert small.ctypes.data % memory.LINE == large.ctypes.data % memory.LINE == 0
    assert memory.ort_value(large).data_ptr() == large.ctypes.data


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [
        (251, 1, "prompt: expected at most 250 tokens, which the model was exported for, got 251."),
        (250, 2, "prompt and max_tokens: expected at most 250 tokens, which the model was exported for, got 251."),
    ],
)
def test_too_many_tokens_are_refused_before_anything_runs(length: int, count: int, message: str) -> None:
    model = Runner(exported("dense", max_length=250))
    with pytest.raises(ShapeError, match=f"^{re.escape(message)} Shorten it, or export with a larger --max-length.$"):
        model.generate(tiny_models.prompt_of(length), count)
    assert model.length == 0


def test_generation_can_fill_the_caches() -> None:
    model = Runner(exported("dense", max_length=250))
    assert len(list(model.generate(tiny_models.prompt_of(200), 51))) == 51
    with pytest.raises(ShapeError, match=r"^tokens: expected at most 250 tokens.* got 1 after 250"):
        model.step([[1]])


@pytest.mark.parametrize(("tokens", "padding"), TABLES["steps"])
def test_a_step_of_wrong_shape_is_refused(tokens: Any, padding: list[int] | None) -> None:
    model = Runner(exported("dense"))
    error, name = (ShapeError, "tokens") if padding is None else (ConfigError, "left_padding")
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        model.step(tokens, left_padding=padding)


def test_padding_after_the_start_is_refused() -> None:
    model = Runner(exported("dense"))
    model.step([[1, 2]])
    with pytest.raises(ConfigError, match=r"^left_padding: expected .* got \[1\] after 2 tokens.$"):
        model.step([[0, 3]], left_padding=[1])
    assert model.length == 2


# Files that export-onnx did not write


@pytest.mark.parametrize(("metadata", "message"), TABLES["metadata"])
def test_foreign_and_newer_files_are_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        known = {entry.key.removeprefix("mlx_sparse."): entry.value for entry in model.metadata_props} | metadata
        onnx.helper.set_model_props(model, {f"mlx_sparse.{k}": v for k, v in known.items() if v is not None})

    with pytest.raises(ArtefactError, match=f"^{re.escape(message)}[^\n]*$"):
        Runner(copied("dense", tmp_path, spoil))


def resize(info: onnx.ValueInfoProto, *dims: int | str) -> None:
    kind = info.type.tensor_type.elem_type
    info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, kind, dims))


MALFORMED: dict[str, tuple[Any, str]] = {
    "ids of one axis": (lambda i, o: resize(i["input_ids"], "length"), "inputs input_ids and attention_mask"),
    "rows of a fixed number": (lambda i, o: resize(i["input_ids"], 2, "length"), "open sizes of input_ids"),
    "one token, any rows": (lambda i, o: resize(i["input_ids"], "batch", 1), "open sizes of input_ids"),
    "logits of two axes": (lambda i, o: resize(o["logits"], "batch", 96), "logits of one token"),
    "no vocabulary": (lambda i, o: resize(o["logits"], "batch", 1, "words"), "logits of one token"),
    "logits of integers": (
        lambda i, o: setattr(o["logits"].type.tensor_type, "elem_type", onnx.TensorProto.INT64),
        "logits of one token",
    ),
    "open capacity": (
        lambda i, o: [resize(info, "batch", 2, "C", 16) for info in (i["past_key_values.0.key"], o["present.0.key"])],
        "past_key_values.0.key with a type and a size",
    ),
    "caches of doubles": (
        lambda i, o: [
            setattr(info.type.tensor_type, "elem_type", onnx.TensorProto.DOUBLE)
            for info in (i["past_key_values.0.key"], o["present.0.key"])
        ],
        "past_key_values.0.key with a type and a size",
    ),
    "caches of two lengths": (
        lambda i, o: [resize(info, "batch", 2, 64, 16) for info in (i["past_key_values.1.key"], o["present.1.key"])],
        "caches of one length",
    ),
    "another successor": (lambda i, o: resize(o["present.0.key"], "batch", 2, 64, 16), "caches and their successors"),
    "an input that is none": (lambda i, o: i["attention_mask"].__setattr__("name", "surprise"), "inputs input_ids"),
    "an unknown state": (
        lambda i, o: i["past_key_values.1.key"].__setattr__("name", "surprise"),
        r"caches and their successors \(not 'surprise'\)",
    ),
}


@pytest.mark.parametrize("which", MALFORMED)
def test_malformed_graphs_are_refused(which: str, tmp_path: Path) -> None:
    spoil, message = MALFORMED[which]
    folder = copied(
        "dense", tmp_path, lambda m: spoil(*({i.name: i for i in side} for side in (m.graph.input, m.graph.output)))
    )
    with pytest.raises(ArtefactError, match=rf"^model: expected {message}[^\n]*, got another in [^\n]*$"):
        Runner(folder)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info("x", 1, [1])
    out = onnx.helper.make_tensor_value_info("y", 1, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "other", [info], [out])
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opset), tmp_path / "model.onnx")
    with pytest.raises(ArtefactError, match=r"^model: expected a file that export-onnx wrote, got another file: "):
        Runner(tmp_path / "model.onnx")


@pytest.mark.parametrize("damage", ["no folder", "no model", "no data", "cut data", "cut model", "text"])
def test_a_damaged_folder_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    folder = copied("dense", tmp_path)
    model, data = folder / "model.onnx", folder / "model.onnx.data"
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage == "no model":
        model.unlink()
    elif damage == "no data":
        data.unlink()
    elif damage == "cut data":
        data.write_bytes(data.read_bytes()[:1000])
    else:
        model.write_bytes(model.read_bytes()[:5000] if damage == "cut model" else b"hello")
    with pytest.raises(ArtefactError, match=r"^model: expected [^\n]*$"):
        Runner(folder)


def test_a_snapshot_of_the_hub_runs_and_a_lone_link_to_the_weights_is_refused(tmp_path: Path) -> None:
    folder, snapshot = copied(SPARQ, tmp_path), tmp_path / "snapshots" / "main"
    (tmp_path / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(path for path in folder.iterdir() if path.is_file()):
        file.rename(tmp_path / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert list(Runner(snapshot).generate([1, 2, 3], 4)) == list(Runner(exported(SPARQ)).generate([1, 2, 3], 4))
    model = snapshot / "model.onnx"
    model.write_bytes((model.read_bytes(), model.unlink())[0])
    with pytest.raises(ArtefactError, match="escapes model directory"):
        Runner(snapshot)


def test_a_file_that_does_not_run_is_a_one_line_error(tmp_path: Path) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        attention = next(node for node in model.graph.node if node.op_type == "CachedAttention")
        attention.input[5] = "input_ids"  # as past_length

    folder = copied("dense", tmp_path, spoil)
    with pytest.raises(ArtefactError, match=r"^model: expected [^\n]* to (run|load), got: [^\n]*$"):
        Runner(folder).step([[1, 2]])


def test_invalid_tokens_are_refused_and_change_nothing() -> None:
    model = Runner(exported(SPARQ))
    with pytest.raises(ArtefactError, match=r"^model: expected [^\n]* to run, got: [^\n]*$"):
        model.step([[1, tiny_models.VOCAB]])
    assert model.length == 0
    assert list(model.generate(PROMPT, STEPS)) == tokens_of_mlx(SPARQ, PROMPT, STEPS)


def test_an_interrupted_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Runner(exported(SPARQ))
    run = onnxruntime.InferenceSession.run_with_iobinding

    def interrupted(*arguments: Any) -> None:  # as in Python, after onnxruntime has written its outputs
        run(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupted)
        model.step([PROMPT[::-1]])
    assert model.length == 0
    assert list(model.generate(PROMPT, STEPS)) == tokens_of_mlx(SPARQ, PROMPT, STEPS)


def test_nan_logits_are_an_error(tmp_path: Path) -> None:
    folder = copied("dense", tmp_path)
    data = folder / "model.onnx.data"
    data.write_bytes(b"\xff" * data.stat().st_size)  # NaN
    with pytest.raises(ArtefactError, match=r"^model: expected logits, got NaN from [^\n]*$"):
        list(Runner(folder).generate(PROMPT, 2))


@pytest.mark.parametrize("capacity", [1 << 40, 1 << 62])
def test_a_file_too_large_for_memory_is_refused(capacity: int, tmp_path: Path) -> None:
    def enlarge(model: onnx.ModelProto) -> None:
        for info in (*model.graph.input, *model.graph.output):
            if info.name.startswith(("past", "present")):
                info.type.tensor_type.shape.dim[2].dim_value = capacity

    folder = copied("dense", tmp_path, enlarge)
    with pytest.raises(ArtefactError, match=r"^model: expected sizes that fit into memory, got [^\n]*$"):
        Runner(folder)
