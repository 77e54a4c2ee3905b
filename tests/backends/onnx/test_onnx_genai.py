"""Check exported models on onnxruntime-genai."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import pytest
import tiny_models
from exported import (
    SAAP_FILE,
    SAMPLE,
    SAMPLE_SAAP,
    SPARQ,
    by_method,
    exported,
    tokens_in_steps,
    tokens_of_mlx_after_dense_prefill,
)
from mlx_sparse.onnx_export.runtime import genai, native
from mlx_sparse.onnx_export.runtime.runner import Runner
from require import absent

from mlx_sparse.checks import ArtefactError

pytestmark = pytest.mark.slow  # another runtime

STEPS = 24
PROMPT = tiny_models.prompt_of(100)


@pytest.fixture
def native_library() -> Path:
    if reason := native.unavailable():
        absent("ort", reason)
    return native.library_path()


@pytest.fixture(params=["bodies", "native"])
def with_kernels(request: pytest.FixtureRequest) -> bool:
    if request.param == "native":
        request.getfixturevalue("native_library")
    return request.param == "native"


class Generator:
    """Generator of onnxruntime-genai for a folder."""

    def __init__(self, folder: Path, rows: int = 1, **search: object) -> None:
        self.model = og.Model(str(folder))
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=rows, **search)
        self.generator = og.Generator(self.model, params)

    def generate(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Append prompts of equal length, and return the greedy tokens."""
        given = np.array(prompts, np.int32)
        self.generator.append_tokens(given if len(prompts) > 1 else given[0])
        for _ in range(steps):
            self.generator.generate_next_token()
        return [self.generator.get_sequence(i)[-steps:].tolist() for i in range(len(prompts))]


def copy_of(folder: Path, tmp_path: Path, with_kernels: bool) -> Path:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    if with_kernels:
        genai.add_native_library(copy)
    return copy


@by_method
@pytest.mark.parametrize("layers", [2, 3])  # with an odd number of SparQ layers the last virtual layer has one state
def test_tokens_equal_mlx(method: str, layers: int, with_kernels: bool, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": layers}
    folder = copy_of(exported(method, **changes), tmp_path, with_kernels)
    [tokens] = Generator(folder).generate([PROMPT], STEPS)
    assert tokens[1:] == tokens_of_mlx_after_dense_prefill(method, PROMPT, STEPS, **changes)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (SPARQ, {}),
        (SAMPLE, {"num_hidden_layers": 3}),
        (SAAP_FILE, {"num_hidden_layers": 3}),
        (SAMPLE_SAAP, {}),
        *((method, {"dtype": dtype}) for method in ("dense", SPARQ) for dtype in ("float16", "bfloat16")),
    ],
    ids=str,
)
def test_tokens_equal_those_of_the_runner(
    method: str, changes: dict[str, Any], with_kernels: bool, tmp_path: Path
) -> None:
    folder = copy_of(exported(method, **changes), tmp_path, with_kernels)
    chunk = 2048 if "sample" in method else 512
    assert json.loads((folder / genai.CONFIG).read_text())["search"]["chunk_size"] == chunk
    runner = Runner(folder, native="auto" if with_kernels else "off")
    prompt = tiny_models.prompt_of(200)
    assert Generator(folder).generate([prompt], STEPS) == tokens_in_steps(runner, [prompt], STEPS)


@by_method
def test_rows_of_a_batch_equal_single_rows(method: str) -> None:
    prompts = [tiny_models.prompt_of(60, seed) for seed in (1, 2)]
    together = Generator(exported(method), rows=2).generate(prompts, STEPS)
    assert together == [Generator(exported(method)).generate([prompt], STEPS)[0] for prompt in prompts]
    assert together[0] != together[1]


@by_method
def test_a_long_prompt_is_split_into_chunks(method: str) -> None:
    prompt = tiny_models.prompt_of(600)
    folder = exported(method, max_length=1024)
    assert json.loads((folder / genai.CONFIG).read_text())["search"]["chunk_size"] < len(prompt)
    [tokens] = Generator(folder).generate([prompt], STEPS)
    assert tokens[1:] == tokens_of_mlx_after_dense_prefill(method, prompt, STEPS)


@by_method
def test_rewind_removes_all_tokens(method: str) -> None:
    generator = Generator(exported(method))
    generator.generate([PROMPT[::-1]], 5)
    generator.generator.rewind_to(0)
    [tokens] = generator.generate([PROMPT], STEPS)
    assert tokens[1:] == tokens_of_mlx_after_dense_prefill(method, PROMPT, STEPS)


@pytest.mark.parametrize("several", [True, False])
def test_generation_stops_at_every_end_token(several: bool, tmp_path: Path) -> None:
    folder = copy_of(exported("dense"), tmp_path, with_kernels=False)
    tokens = list(Runner(folder).generate(PROMPT, 8))
    genai.write_config(folder, {"eos_token_id": [tiny_models.VOCAB - 1, tokens[5]] if several else tokens[5]})
    generator = Generator(folder)
    generator.generate([PROMPT], 0)
    said = 0
    while not generator.generator.is_done():
        generator.generator.generate_next_token()
        said += 1
    assert said == tokens.index(tokens[5]) + 1


def test_more_tokens_than_max_length_are_refused() -> None:
    folder = exported(SPARQ, max_length=250)  # in caches of 256
    with pytest.raises(RuntimeError, match=r"max_length .251. cannot be greater than model context_length .250."):
        Generator(folder, max_length=251)
    generator = Generator(folder)
    generator.generate([PROMPT * 2], 50)
    assert generator.generator.is_done()


@pytest.mark.usefixtures("native_library")
def test_a_native_library_needs_a_folder_for_genai(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"^folder: expected a folder from export-onnx with genai_config.json"):
        genai.add_native_library(tmp_path)
    assert not list(tmp_path.iterdir())
