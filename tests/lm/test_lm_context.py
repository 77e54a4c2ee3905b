"""Compare a context that is sharded over processes of MLX's ring with one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import context_ranks
import mlx.core as mx
import numpy as np
import pytest
from context_ranks import CASES, LOCAL
from context_ranks import run as run_here
from forked import BIN, start
from mlx_lm.models.cache import KVCache, load_prompt_cache
from rank_processes import run_ranks
from saap_artefacts import write_artefact
from tiny_models import build, prompt_of, words, write

import mlx_sparse
from mlx_sparse.cache.sharded_cache import BLOCK, Shard, ShardedKVCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # several processes

Run = tuple[np.ndarray[Any, Any], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    write_artefact(folder / "model", build())
    return folder


def in_ranks(folder: Path, size: int, names: list[str]) -> dict[str, list[Run]]:
    """Run each case on every rank."""
    argv = [sys.executable, context_ranks.__file__, str(folder), *names]
    results = run_ranks(lambda rank: argv, folder, size)
    assert not any(result.code for result in results), results
    found = {name: [np.load(folder / f"{name}.{rank}.npz") for rank in range(size)] for name in names}
    return {name: [(one["logits"], one["counts"].tolist()) for one in ranks] for name, ranks in found.items()}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[Run]]:
    """Run every case once on two ranks."""
    return in_ranks(folder, 2, list(CASES))


def check(name: str, ranks: list[Run], folder: Path) -> None:
    """Compare the ranks bitwise with each other and, within 1e-4 of the largest logit, with one process."""
    logits, report = run_here("dense" if name in LOCAL else name, None, folder)
    expected = np.array(logits)
    for found, (sparse, prompts, _, _, estimates) in ranks:
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), name
        assert (found.argmax(1) == expected.argmax(1)).all(), name
        assert (found == ranks[0][0]).all(), name
        if name not in LOCAL:
            assert sparse == report.sparse_calls, name
            assert prompts <= (report.prefill.calls if report.prefill else 0), name
        assert sparse > 0 or name == "dense", name
        if len(ranks) == 2:  # of four ranks, some have no keys
            assert (estimates > 0) == ("sparq" in CASES[name][1] and "own" not in name), name
    if name == "sample":
        assert ranks[0][1][1] > 0


def test_two_ranks_equal_one_process(ranks: dict[str, list[Run]], folder: Path):
    for name, found in ranks.items():
        check(name, found, folder)


def test_unsupported_cases_are_refused_on_all_ranks(ranks: dict[str, list[Run]], folder: Path):
    for rank in range(2):
        pages, method, lengths = json.loads((folder / f"refusals.{rank}.json").read_text())
        assert pages == "page_size: expected a divisor of 128 with shard, got 24."
        assert method.startswith("shard: expected one of sparq, quest, streaming, saap as decode method, got h2o.")
        assert lengths.endswith("number of tokens on all ranks, got 1 after 39 on rank 0 and 1 after 38 on rank 1.")


def test_four_ranks_equal_one_process(tmp_path: Path):
    for name, found in in_ranks(tmp_path, 4, ["dense", "sparq"]).items():
        check(name, found, tmp_path)


def test_messages_per_step_equal_the_documentation(ranks: dict[str, list[Run]]):
    """Compare the messages per layer with docs/distributed.md. Prefill sends the same messages in all cases."""
    messages = {name: found[0][1][3] for name, found in ranks.items()}
    dense = messages["dense"] + 1  # the crossover length is sent once
    assert messages["sparq"] - dense >= 2 * ranks["sparq"][0][1][0]
    assert messages["quest"] - dense == ranks["quest"][0][1][0]
    for name in ("streaming", "saap", *LOCAL):
        assert messages[name] == dense, name


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_positions_are_split_evenly_without_overlap(size: int):
    for length in (0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 64 * BLOCK):
        shards = [Shard(rank, size) for rank in range(size)]
        owned = [one.own(0, length) for one in shards]
        assert sorted(np.concatenate(owned).tolist()) == list(range(length))
        assert [len(own) for own in owned] == [one.before(length) for one in shards]
        assert max(map(len, owned)) - min(map(len, owned)) <= BLOCK
        chunks = [one.own(length // 3, length) for one in shards]
        assert sorted(np.concatenate(chunks).tolist()) == list(range(length // 3, length))


@pytest.mark.parametrize("size", [2, 4])
def test_rank_stores_its_part_of_the_bytes(size: int):
    whole = KVCache()
    caches = [ShardedKVCache(Shard(rank, size)) for rank in range(size)]
    rows = mx.random.normal((1, 2, 24576 + 300, 16))
    for first in range(0, rows.shape[2], 2048):
        for cache in (whole, *caches):
            take = cache.take if isinstance(cache, ShardedKVCache) else cache.update_and_fetch
            take(*[rows[:, :, first : first + 2048]] * 2)
    for rank, cache in enumerate(caches):
        assert cache.offset == whole.offset
        assert cache.nbytes == pytest.approx(whole.nbytes / size, rel=0.05)
        places = mx.array(Shard(rank, size).own(0, whole.offset))
        assert mx.array_equal(cache.own_rows()[0], rows[:, :, places])


def test_unsupported_shards_are_refused_in_one_line():
    with pytest.raises(
        mlx_sparse.ConfigError, match=r"^shard: expected several processes \(mlx.launch .*\), got one\.$"
    ):
        mlx_sparse.enable(build(), "sparq", shard="context")
    with pytest.raises(mlx_sparse.ConfigError, match=r"^shard: expected one of context, context:local, got rows\.$"):
        mlx_sparse.enable(build(), "sparq", shard="rows")
    cache = [ShardedKVCache(Shard(1, 2)), ShardedKVCache(Shard(1, 2))]
    with pytest.raises(mlx_sparse.ConfigError, match=r"^cache: expected a complete KV cache, got one shard"):
        build()(mx.array([[1]]), cache=cache)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    write(folder / "llama")
    return folder


SHARDED = ["--shard", "context", "--attn", "sparq:rank=4,top_k=16,dense_below=0"]
MODEL = ["--model", "llama", "--prompt"]


def test_cache_saved_on_two_ranks_continues_on_one_and_on_three(saved: Path):
    prompt = words(prompt_of(300))
    save = ["mlx_lm.cache_prompt", *MODEL, "-", "--prompt-cache-file", "two.safetensors"]
    assert [one.code for one in run_ranks(lambda rank: [*save, *SHARDED], saved, stdin=prompt)] == [0, 0]
    assert [file.name for file in saved.glob("*two*")] == ["two.safetensors"]
    loaded = load_prompt_cache(str(saved / "two.safetensors"))
    assert [type(cache) for cache in loaded] == [KVCache, KVCache]
    resume = ["mlx_lm.generate", "--prompt", "w3 w4 w5", "--max-tokens", "8", "--prompt-cache-file", "two.safetensors"]
    one = start([*resume, *SHARDED[2:]], saved, "")
    three = run_ranks(lambda rank: [*resume, *SHARDED], saved, 3)
    assert one.code == 0, one.err
    assert three[0].text == one.text != ""
    assert [rank.out for rank in three[1:]] == ["", ""]


def test_full_disk_keeps_the_existing_file(saved: Path):
    file = saved / "full.safetensors"
    file.write_text("before")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
    argv = ["mlx_lm.cache_prompt", *MODEL, "-", "--prompt-cache-file", file.name, *SHARDED]
    code = f"{limit} sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(BIN / argv[0]), *argv[1:]]
    for done in run_ranks(lambda rank: command, saved, stdin=words(prompt_of(300))):
        assert done.code == 2, done.err
        errors = [line for line in done.err.splitlines() if "error:" in line]
        assert len(errors) == 1
        assert "--prompt-cache-file: expected a file that can be written, got full.safetensors" in errors[0]
    assert file.read_text() == "before"
    assert [left.name for left in saved.glob("*full*")] == ["full.safetensors"]
