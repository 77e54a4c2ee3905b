"""Test the text form METHOD[:key=value,...][+METHOD...], presets and TOML files."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_tables import read_tables

import mlx_sparse
from mlx_sparse import methods
from mlx_sparse.checks import ConfigError
from mlx_sparse.core import stats
from mlx_sparse.core.base import Dense, Method, Step
from mlx_sparse.core.decide import ENOUGH_SAVED, NEVER
from mlx_sparse.methods import (
    H2O,
    MAX_TOML_BYTES,
    METHODS,
    FlexGen,
    OracleTopK,
    SparQ,
    Streaming,
    load_toml,
    parse,
    split_methods,
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
def test_printed_text_names_every_key_that_differs_from_its_default(config: SparQ, base: SparQ) -> None:
    spelled = ",".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(SparQ))
    assert parse(f"sparq:{spelled}", {"sparq": base}) == (config,)
    named = {pair.partition("=")[0] for pair in str(config).partition(":")[2].split(",")}
    for field in dataclasses.fields(SparQ):
        assert (field.name in named) == (getattr(config, field.name) != field.default)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_alone_has_its_defaults(name: str) -> None:
    assert parse(name) == (METHODS[name](),)
    assert str(METHODS[name]()) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sparq:rank=16,top_k=64", SparQ(rank=16, top_k=64)),
        (" sparq : rank = 16 , top_k = 64 ", SparQ(rank=16, top_k=64)),
        ("sparq:reallocate=true", SparQ(reallocate=True)),
        ("sparq:reallocate=False", SparQ(reallocate=False)),
        ("sparq:local_window=none", SparQ()),
        ("sparq:local_window=0", SparQ(local_window=0)),
        ("streaming:sink_tokens=4,recent_tokens=60", Streaming(sink_tokens=4, recent_tokens=60)),
    ],
)
def test_text_is_read_as_values(text: str, expected: Method) -> None:
    assert parse(text) == (expected,)


def test_methods_keep_their_order() -> None:
    assert parse("streaming + sparq:rank=8 + h2o") == (Streaming(), SparQ(rank=8), H2O())


def test_every_method_can_be_imported_from_the_package() -> None:
    assert all(getattr(methods, cls.__name__) is cls for cls in METHODS.values())


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparQ().rank = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("preset", "settings"),
    [("paper", {"component_score": "query", "key_bits": 16}), ("robust", {"component_score": "query_key"})],
)
def test_a_preset_sets_what_the_specification_lists(preset: str, settings: dict[str, Any]) -> None:
    assert parse(f"sparq:preset={preset}") == (SparQ(**settings),)


@pytest.mark.parametrize(("text", "qk_norm", "expected"), DATA["resolved"])
def test_for_model_resolves_auto(text: str, qk_norm: bool, expected: str) -> None:
    """Test "auto". Reallocation is off if the estimated attention recall is too low."""
    (config,) = parse(text)
    assert isinstance(config, SparQ)
    assert str(config.for_model(qk_norm=qk_norm)) == expected


def test_auto_is_the_papers_rule_for_one_query_head_per_kv_head() -> None:
    assert str(SparQ().for_model(qk_norm=False, grouped=False)) == "sparq:component_score=query"
    assert SparQ().for_model(qk_norm=True, grouped=False).component_score == "query_key"


def test_every_preset_of_the_code_is_in_the_specification() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spec" / "sparq.md").read_text(encoding="utf-8")
    for preset, settings in SparQ.presets.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{preset}` |"))
        cell = row.split("|")[2].strip()
        assert parse("sparq:" + cell.replace(" ", "")) == (SparQ(**settings),)


def test_the_defaults_of_method_and_function_are_the_presets_default_and_paper() -> None:
    assert parse("sparq:preset=default") == (SparQ(),)
    defaults = inspect.signature(mlx_sparse.sparq_attention).parameters
    paper = SparQ.preset("paper")
    assert paper == {"component_score": "query", "key_bits": 16, "reallocate": "auto"}
    assert paper == {name: defaults[name].default for name in paper}
    assert SparQ.preset("default") == {"component_score": "query_key", "key_bits": 4, "reallocate": False}
    one_head = SparQ.preset("default", grouped=False)
    assert one_head == {"component_score": "query", "key_bits": 4, "reallocate": "auto"}
    with pytest.raises(ConfigError, match=r"^preset: expected one of default, paper, robust, got 'best'\.$"):
        SparQ.preset("best")


@pytest.mark.parametrize("text", ["sparq:preset=paper,rank=8", "sparq:rank=8,preset=paper"])
def test_keys_override_a_preset_in_any_order(text: str) -> None:
    assert parse(text) == (dataclasses.replace(parse("sparq:preset=paper")[0], rank=8),)
    assert parse(text.replace("rank=8", "top_k=200"))[0].top_k == 200  # type: ignore[attr-defined]


def test_keys_override_presets_bases_and_defaults_in_this_order() -> None:
    base = {"sparq": SparQ(rank=8, top_k=500, reallocate=False)}
    expected = SparQ(rank=8, reallocate=False, component_score="query", top_k=500, local_window=9, key_bits=16)
    assert parse("sparq:preset=paper,local_window=9", base) == (expected,)


def test_a_base_of_another_method_is_not_used() -> None:
    assert parse("h2o", {"sparq": SparQ(top_k=5)}) == (H2O(),)


NAMES = ", ".join(METHODS)


@pytest.mark.parametrize(("text", "message"), DATA["wrong texts"])
def test_a_wrong_text_is_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == message.replace("{names}", NAMES)


@given(st.text(max_size=40) | st.text(alphabet="sparqh2o:=,+_ rank0123\n", max_size=40))
def test_any_text_is_parsed_or_a_one_line_error(text: str) -> None:
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
    assert load_toml(write(tmp_path, "\ufeff[sparq]\n")) == {"sparq": SparQ()}, "with a byte order mark"
    base = load_toml(write(tmp_path, "[sparq]\nrank = 16\ntop_k = 64\n[h2o]\ntop_k = 9\n"))
    assert parse("sparq:top_k=32", base) == (SparQ(rank=16, top_k=32),)


def test_a_toml_file_of_exactly_the_largest_size_is_read(tmp_path: Path) -> None:
    assert load_toml(write(tmp_path, "[sparq]\n#".ljust(MAX_TOML_BYTES, "x"))) == {"sparq": SparQ()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *DATA["wrong toml"],
        ("x" * (MAX_TOML_BYTES + 1), "attn-config: expected a TOML file of at most 1 MiB, got {path}."),
    ],
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
def test_a_file_that_is_not_toml_is_a_one_line_error(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(f"attn-config: expected valid TOML, got {path} (")
    assert "\n" not in str(caught.value)


def test_the_error_names_a_missing_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value) == f"attn-config: expected a readable TOML file, got {path} (No such file or directory)."


def test_a_folder_is_refused_as_a_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^attn-config: expected a readable TOML file"):
        load_toml(tmp_path)


# --- Costs of a configuration ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("sparq", 2048),
        ("sparq:top_k=16", 17),
        ("sparq:top_k=16,dense_below=0", 17),
        ("sparq:top_k=16,dense_below=50", 50),
        ("h2o:top_k=16", 17),
    ],
)
def test_contexts_of_up_to_top_k_keys_are_dense(text: str, shortest: int) -> None:
    assert parse(text)[0].shortest_context() == shortest


@pytest.mark.parametrize("device", ENOUGH_SAVED)
@pytest.mark.parametrize("sizes", [(8, 4, 128, 2), (16, 4, 128, 4), (2, 16, 64, 2)], ids=str)
@pytest.mark.parametrize("key_bits", [16, 4])
def test_sparq_is_dense_until_a_step_saves_enough_bytes(key_bits: int, sizes: tuple[int, ...], device: str) -> None:
    step, config = Step(*sizes, device), SparQ(key_bits=key_bits)

    def saved(S: int) -> float:
        attended = step.itemsize * (stats.dense_elements(S, step.D) - (config.rows(S) + 4) * step.D)
        scored = step.itemsize * 32 * S if key_bits == 16 else 32 * S * 9 / 16
        return step.heads * (attended - scored - 2 * (4 if key_bits == 16 else 1) * step.G * S)

    first = config.shortest_context(step)
    assert saved(first - 1) < ENOUGH_SAVED[step.device] <= saved(first)
    assert SparQ(dense_below=300).shortest_context(step) == 300
    assert SparQ(top_k=64).shortest_context(step) == 65


@pytest.mark.parametrize(
    ("S", "top_k"), [(1, 128), (4095, 128), (4096, 256), (8191, 256), (8192, 512), (1 << 17, 8192)]
)
def test_the_default_number_of_attended_keys_grows_with_the_context(S: int, top_k: int) -> None:
    config = SparQ()
    assert config.at(S) == SparQ(top_k=top_k)
    assert config.rows(S) == 2 * min(S, top_k)
    assert config.elements(S, 64) == SparQ(top_k=top_k).elements(S, 64)
    assert SparQ(top_k=7).at(S) == SparQ(top_k=7), "a given number does not grow"


def test_sizes_do_not_change_the_crossover_of_array_operations() -> None:
    assert SparQ().shortest_context(Step(8, 4, 128, 2)) == SparQ().shortest_context(Step(8, 4, 128, 2, "ops")) == 2048


def test_no_context_is_sparse_if_scores_cost_more_than_keys() -> None:
    assert SparQ(key_bits=16).shortest_context(Step(2, 32, 64, 2, "g")) == NEVER


@pytest.mark.parametrize(
    "ask",
    [lambda: Dense().attended, lambda: Dense().shortest_context(), lambda: Dense().elements(9, 9)],
    ids=["attended", "shortest_context", "elements"],
)
def test_dense_has_no_sparse_cost(ask: Callable[[], int]) -> None:
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
def test_a_list_is_split_between_methods(text: str, methods: list[str]) -> None:
    assert split_methods(text) == methods
    for method in methods:
        parse(method)


@pytest.mark.parametrize("text", ["", "sparq,,h2o", "sparq,", "rank=16,sparq"])
def test_a_list_with_an_empty_entry_or_a_leading_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="methods: expected a list such as sparq:rank=16,streaming, got"):
        split_methods(text)
