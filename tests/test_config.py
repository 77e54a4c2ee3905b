"""Test the text form METHOD[:key=value,...][+METHOD...], presets and TOML files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_tables import read_tables

from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import (
    ENOUGH_SAVED,
    H2O,
    MAX_TOML_BYTES,
    METHODS,
    NEVER,
    Dense,
    FlexGen,
    Method,
    OracleTopK,
    SparQ,
    Step,
    Streaming,
    load_toml,
    parse,
    split_methods,
    stats,
)

DATA = read_tables(__file__)

counts = st.integers(min_value=1, max_value=10**9)


@st.composite
def windowed(draw: st.DrawFn) -> dict[str, Any]:
    top_k = draw(counts)
    return {"top_k": top_k, "local_window": draw(st.none() | st.integers(min_value=0, max_value=top_k))}


sparq_configs = st.builds(
    lambda window, **rest: SparQ(**window, **rest),
    windowed(),
    rank=counts,
    reallocate=st.sampled_from(["auto", True, False]),
    component_score=st.sampled_from(["auto", "query", "query_key"]),
    score=st.sampled_from(["rows", "copy"]),
    dense_below=st.just("auto") | st.integers(min_value=0, max_value=10**9),
)
configs = st.one_of(
    st.just(Dense()),
    sparq_configs,
    st.builds(Streaming, sink_tokens=st.integers(min_value=0, max_value=10**9), recent_tokens=counts),
    st.builds(lambda window: H2O(**window), windowed()),
    st.builds(FlexGen, top_k=counts),
    st.builds(lambda window: OracleTopK(**window), windowed()),
)


@given(st.lists(configs, min_size=1, unique_by=lambda config: config.name))
def test_printed_configurations_parse_to_themselves(methods: list[Method]) -> None:
    assert parse("+".join(str(method) for method in methods)) == tuple(methods)


@given(sparq_configs, sparq_configs)
def test_printed_text_has_every_changed_key(config: SparQ, base: SparQ) -> None:
    spelled = ",".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(SparQ))
    assert parse(f"sparq:{spelled}", {"sparq": base}) == (config,)
    named = {pair.partition("=")[0] for pair in str(config).partition(":")[2].split(",")}
    for field in dataclasses.fields(SparQ):
        assert (field.name in named) == (getattr(config, field.name) != field.default)


@pytest.mark.parametrize("name", METHODS)
def test_method_name_alone_means_defaults(name: str) -> None:
    assert parse(name) == (METHODS[name](),)
    assert str(METHODS[name]()) == name


@pytest.mark.parametrize(("text", "base", "expected"), DATA["parsed"])
def test_text_overrides_presets_base_and_defaults(text: str, base: str, expected: str) -> None:
    methods = parse(text, {method.name: method for method in parse(base)} if base else None)
    assert "+".join(map(str, methods)) == expected


@pytest.mark.parametrize(("text", "qk_norm", "expected"), DATA["auto"])
def test_auto_is_resolved_per_model(text: str, qk_norm: bool, expected: str) -> None:
    """Reallocation is off wherever alpha underestimates the attention mass of the selected keys."""
    (config,) = parse(text)
    assert isinstance(config, SparQ)
    assert str(config.for_model(qk_norm=qk_norm)) == expected


def test_auto_without_gqa_follows_the_paper() -> None:
    assert str(SparQ().for_model(qk_norm=False, grouped=False)) == "sparq:component_score=query"
    assert SparQ().for_model(qk_norm=True, grouped=False).component_score == "query_key"


def test_every_preset_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "spec" / "sparq.md").read_text(encoding="utf-8")
    for preset, settings in SparQ.presets.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{preset}` |"))
        cell = row.split("|")[2].strip()
        assert parse("sparq:" + cell.replace(" ", "")) == (SparQ(**settings),)


NAMES = ", ".join(METHODS)


@pytest.mark.parametrize(("text", "message"), DATA["mistakes"])
def test_wrong_text_is_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == message.replace("{names}", NAMES)


@given(st.text(max_size=40) | st.text(alphabet="sparqh2o:=,+_ rank0123\n", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        methods = parse(text)
    except ConfigError as error:
        assert ": expected " in str(error)
        assert "\n" not in str(error)
    else:
        assert parse("+".join(map(str, methods))) == methods


# --- TOML ------------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "attention.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_toml_has_one_table_per_method(tmp_path: Path) -> None:
    path = write(tmp_path, '# comment\n[sparq]\nrank = 16\nreallocate = false\npreset = "paper"\r\n[streaming]\n')
    sparq = SparQ(rank=16, reallocate=False, **SparQ.presets["paper"])
    assert load_toml(path) == {"sparq": sparq, "streaming": Streaming()}
    assert load_toml(str(path)) == load_toml(path)


def test_text_overrides_toml(tmp_path: Path) -> None:
    base = load_toml(write(tmp_path, "[sparq]\nrank = 16\ntop_k = 64\n[h2o]\ntop_k = 9\n"))
    assert parse("sparq:top_k=32", base) == (SparQ(rank=16, top_k=32),)


def test_toml_size_is_limited(tmp_path: Path) -> None:
    content = "[sparq]\n#".ljust(MAX_TOML_BYTES, "x")
    path = write(tmp_path, content)
    assert load_toml(path) == {"sparq": SparQ()}
    write(tmp_path, content + "x")
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value) == f"attn-config: expected a TOML file of at most 1 MiB, got {path}."


@pytest.mark.parametrize(
    ("text", "message"),
    DATA["toml_mistakes"],
    ids=lambda text: text[:30].replace("\n", " "),
)
def test_wrong_toml_is_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value) == message.replace("{path}", str(path)).replace("{names}", NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "[sparq",
        "[sparq]\nrank =",
        "[sparq]\nrank = 1\nrank = 2",
        "[sparq]\n[sparq]",
        b"\xff\xfe[sparq]",
        b"\x93NUMPY\x01\x00",
        "[sparq]\nrank = " + "9" * 5000,
        "a = " + "[" * 100_000,
    ],
    ids=["open", "no-value", "key-twice", "table-twice", "utf-16", "binary", "huge-integer", "deep"],
)
def test_invalid_toml_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(f"attn-config: expected valid TOML, got {path} (")
    assert "\n" not in str(caught.value)


def test_missing_toml_files_and_folders_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.toml", "No such file or directory"), (tmp_path, "")):
        with pytest.raises(ConfigError) as caught:
            load_toml(path)
        assert str(caught.value).startswith(f"attn-config: expected a readable TOML file, got {path} ({reason}")


# --- What a configuration costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "attended", "elements"),
    [
        ("sparq:rank=8,top_k=16", 16, 100 * 8 * 9 // 32 + 2 * 16 * 64 + 4 * 64),
        ("sparq:rank=8,top_k=16,key_bits=16", 16, 100 * 8 + 2 * 16 * 64 + 4 * 64),
        ("streaming:sink_tokens=4,recent_tokens=12", 16, 2 * 16 * 64 + 2 * 64),
        ("h2o:top_k=16", 16, 2 * 16 * 64 + 2 * 64 + 2 * 100),
        ("flexgen:top_k=16", 16, 100 * 64 + 16 * 64 + 2 * 64),
        ("oracle_top_k:top_k=16", 16, 2 * 16 * 64 + 2 * 64),
    ],
)
def test_attended_keys_and_moved_elements(text: str, attended: int, elements: int) -> None:
    (config,) = parse(text)
    assert config.attended == attended
    assert config.elements(100, 64) == elements


@pytest.mark.parametrize(("text", "shortest"), DATA["shortest"])
def test_shortest_sparse_context(text: str, shortest: int) -> None:
    assert parse(text)[0].shortest_context() == shortest


@pytest.mark.parametrize("gpu", ENOUGH_SAVED)
@pytest.mark.parametrize("sizes", [(8, 4, 128, 2), (16, 4, 128, 4), (2, 16, 64, 2)], ids=str)
@pytest.mark.parametrize("key_bits", [16, 4])
def test_gpu_threshold_follows_the_saved_bytes(key_bits: int, sizes: tuple[int, ...], gpu: str) -> None:
    step, config = Step(*sizes, gpu), SparQ(key_bits=key_bits)

    def saved(S: int) -> float:
        attended = step.itemsize * (stats.dense_elements(S, step.D) - 2 * config.top_k * step.D - 4 * step.D)
        scored = step.itemsize * 32 * S if key_bits == 16 else 32 * S * 9 / 16
        return step.heads * (attended - scored - 2 * (4 if key_bits == 16 else 1) * step.G * S)

    first = config.shortest_context(step)
    assert saved(first - 1) < ENOUGH_SAVED[step.gpu] <= saved(first)
    assert SparQ(dense_below=300).shortest_context(step) == 300
    assert SparQ(top_k=64).shortest_context(step) == 65


def test_cpu_threshold_ignores_sizes() -> None:
    assert SparQ().shortest_context(Step(8, 4, 128, 2)) == 2048


def test_expensive_scores_are_never_sparse() -> None:
    assert SparQ(key_bits=16).shortest_context(Step(2, 32, 64, 2, "g")) == NEVER


@pytest.mark.parametrize(
    "ask",
    [lambda: Dense().attended, lambda: Dense().shortest_context(), lambda: Dense().elements(9, 9)],
    ids=["attended", "shortest_context", "elements"],
)
def test_dense_has_no_cost(ask: Callable[[], int]) -> None:
    with pytest.raises(ConfigError, match=r"^attn: expected a sparse method, got dense\.$"):
        ask()


RANGES = "sample:block_size=64,ranges=1024:0.9:0.9:1/2048:0.8:0.8:1"


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("sparq", ["sparq"]),
        ("sparq:rank=16,top_k=64,h2o", ["sparq:rank=16,top_k=64", "h2o"]),
        (f"dense, {RANGES}, minference+sparq:rank=8,top_k=9", ["dense", RANGES, "minference+sparq:rank=8,top_k=9"]),
    ],
)
def test_method_lists_are_split_between_methods(text: str, methods: list[str]) -> None:
    assert split_methods(text) == methods
    for method in methods:
        parse(method)


@pytest.mark.parametrize("text", ["", "sparq,,h2o", "sparq,", "rank=16,sparq"])
def test_malformed_method_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="methods: expected a list such as sparq:rank=16,streaming, got"):
        split_methods(text)
