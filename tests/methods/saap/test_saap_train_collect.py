"""Test the queries and keys that `mlx-sparse train-saap` collects from the layers that SAAP supports."""

from __future__ import annotations

import os
from pathlib import Path

import commands
import mlx.core as mx
import numpy as np
import pytest
from commands import Progress, tokens
from mlx_lm.models.cache import make_prompt_cache
from repository_paths import FIXTURES
from tiny_models import build

from mlx_sparse.checks import ArtefactError
from mlx_sparse.tools.evaluate.journal import Journal
from mlx_sparse.tools.train.collect import Collection, Done, collect, find_layer_shapes

TOKENS = tokens(1200)


def test_collected_rows_match_the_model(tmp_path: Path) -> None:
    model = build(num_hidden_layers=3)
    windows = [TOKENS[:600], TOKENS[600:1200]]
    found = Collection(tmp_path, find_layer_shapes(model, 1), 2, 600, queries=50, first=100, seed=3)
    collect(model, found, windows, key="k", progress=Progress())
    assert list(found.layer_shapes) == [1, 2]
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([windows[1]]), cache=caches))
    positions = found.positions[1]
    assert (np.diff(positions) > 0).all() and positions[0] >= 100
    for number in found.layer_shapes:
        texts = found.texts(number)
        attention = model.layers[number].self_attn
        keys = np.array(caches[number].keys[0, :, :600])
        # The collector runs in chunks, which changes the order of sums, and stores float16.
        np.testing.assert_allclose(texts.rope_keys[1], keys, rtol=2**-10, atol=2e-3)
        rotated = attention.rope(mx.array(texts.pre_rope_keys[1].astype(np.float32))[None])[0]
        np.testing.assert_allclose(np.array(rotated), keys, rtol=2**-9, atol=1e-2)
        queries = mx.array(texts.pre_rope_queries[1].astype(np.float32))
        for row, position in enumerate(positions[:5]):
            again = np.array(attention.rope(queries[None, :, [row]], offset=int(position)))[0, :, 0]
            np.testing.assert_allclose(texts.rope_queries[1][:, row], again, rtol=2**-9, atol=1e-2)


def test_higher_layers_do_not_run(tmp_path: Path) -> None:
    model = build(num_hidden_layers=4)
    places = find_layer_shapes(model, 1)
    above = model.layers[3].self_attn
    project, seen = above.q_proj, []
    above.q_proj = lambda x: seen.append(x.shape[1]) or project(x)
    found = Collection(tmp_path, {1: places[1], 2: places[2]}, 1, 600, queries=50, first=100, seed=3)
    collect(model, found, [TOKENS[:600]], key="k", progress=Progress())
    assert set(seen) == {1}  # one token per call, in the trace that finds the source of the rows
    for layer in (1, 2):
        assert found.texts(layer).rope_keys[0].any(axis=-1).all()


@pytest.mark.parametrize(
    "entries", [{"1": 600}, {"1": 600, "0": 600}, {"0": 599}, {"0": 600, "text": 600}, {"0": 600, "1": 600, "2": 600}]
)
def test_wrong_resume_journal_is_refused(tmp_path: Path, entries: dict[str, int]) -> None:
    journal = Journal(tmp_path / "windows.jsonl", "train-saap", "k", Done)
    for name, length in entries.items():
        journal.add(name, Done(length))
    model = build()
    found = Collection(tmp_path, find_layer_shapes(model, 1), 2, 600, queries=50, first=100, seed=3)
    message = "expected the first of 2 texts of 600 tokens in order, got other entries. Delete the folder"
    with pytest.raises(ArtefactError, match=message):
        collect(model, found, [TOKENS[:600], TOKENS[600:]], key="k", progress=Progress())


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", [0, 1]),
        ("qwen3", [0, 1]),
        ("glm4", [0, 1]),
        ("smollm3", [0, 1]),
        ("gemma3_text", [1, 3]),
        ("gpt_oss", [1]),
    ],
)
def test_sliding_window_layers_are_excluded(family: str, layers: list[int]) -> None:
    assert list(find_layer_shapes(build(family), 0)) == layers


def test_dense_layers_count_attention_layers_only() -> None:
    """Test a model that begins with a convolution: only attention layers count."""
    layers = {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3], "num_hidden_layers": 4}
    block = {
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }
    model = build("lfm2", **layers, **block, norm_eps=1e-5, conv_bias=False, conv_L_cache=3)
    assert [list(find_layer_shapes(model, dense)) for dense in (0, 1)] == [[1, 3], [3]]


def test_memory_is_independent_of_the_text_length(tmp_path: Path, without_torch: dict[str, str]) -> None:
    """Collect four times the text, much larger than the model, with at most a quarter of its size as extra memory."""
    script = """
import resource, sys
sys.path[:0] = {folders!r}
from pathlib import Path
from tiny_models import build
from commands import Progress
from mlx_sparse.checks import ArtefactError
from mlx_sparse.tools.evaluate.journal import Journal
from mlx_sparse.tools.train.collect import Collection, collect, find_layer_shapes
model = build(head_dim=256)
windows = [[1 + (i * i + i // 7 + w) % 95 for i in range(1024)] for w in range(int(sys.argv[1]))]
found = Collection(Path(sys.argv[2]), find_layer_shapes(model, 0), len(windows), 1024, 1000, first=0, seed=0)
collect(model, found, windows, key="k", progress=Progress())
print(found.bytes, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    script = script.format(folders=[str(FIXTURES)])
    sizes = []
    for windows in (2, 8):
        place = tmp_path / str(windows)
        place.mkdir()
        done = commands.run(["-c", script, str(windows), str(place)], os.environ | without_torch)
        sizes.append([int(number) for number in done.stdout.split()])
    (few, least), (many, most) = sizes
    assert most - least < 0.25 * (many - few), sizes
