"""Test configurations of the prefill methods: text form, and settings by context length."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_tables import read_tables

from mlx_sparse.checks import ConfigError
from mlx_sparse.core.base import Method, Prefill
from mlx_sparse.core.decide import NEVER, SAMPLE_DENSE_ABOVE, SAMPLE_TUNED_BELOW
from mlx_sparse.methods import (
    METHODS,
    BigBird,
    Gather,
    MInference,
    Sample,
    SampleRange,
    SparQ,
    StreamingPrefill,
    load_toml,
    parse,
)

DATA = read_tables(__file__)

counts = st.integers(min_value=1, max_value=10**9)
shares = st.floats(min_value=0, max_value=1, exclude_min=True)
sizes = st.sampled_from([32, 64, 128])
ranges = st.lists(counts, unique=True, max_size=6).flatmap(
    lambda ends: st.tuples(*(st.builds(SampleRange, st.just(end), shares, shares, counts) for end in sorted(ends)))
)
configs = st.one_of(
    st.builds(
        Sample,
        alpha_column=shares,
        alpha_slash=shares,
        chunks=counts,
        block_size=sizes,
        dense_below=st.just("auto") | st.integers(min_value=0, max_value=10**9),
        dense_above=st.just("auto") | shares,
        ranges=ranges,
    ),
    st.builds(
        Gather, share=shares, **dict.fromkeys(("chunk", "samples", "exact_tail", "neighbors", "dense_below"), counts)
    ),
    st.builds(MInference, vertical_tokens=counts, slash_tokens=counts, block_size=sizes),
    st.builds(
        BigBird,
        window=shares,
        global_share=shares,
        random_blocks=st.integers(min_value=0, max_value=10**9),
        block_size=sizes,
    ),
    st.builds(StreamingPrefill, sink_tokens=st.integers(min_value=0, max_value=10**9), window=shares, block_size=sizes),
)

TUNED = Sample(
    ranges=(SampleRange(16384, 0.98, 0.9, 1), SampleRange(49152, 0.95, 0.95, 2), SampleRange(10**6, 0.8, 0.8, 4))
)


@given(configs)
def test_printed_configurations_parse_to_themselves(config: Method) -> None:
    assert parse(str(config)) == (config,)


@pytest.mark.parametrize(
    ("S", "expected"),
    [
        (1, Sample(alpha_column=0.98, alpha_slash=0.9)),
        (16383, Sample(alpha_column=0.98, alpha_slash=0.9)),
        (16384, Sample(chunks=2)),
        (999_999, Sample(alpha_column=0.8, alpha_slash=0.8, chunks=4)),
        (10**7, Sample(alpha_column=0.8, alpha_slash=0.8, chunks=4)),
    ],
)
def test_at_returns_the_settings_of_the_range(S: int, expected: Sample) -> None:
    assert dataclasses.replace(TUNED.at(S), ranges=()) == expected
    assert TUNED.at(S).shortest_context() == TUNED.shortest_context()
    assert Sample(chunks=3).at(S) == Sample(chunks=3)


def test_at_keeps_settings_that_ranges_do_not_have() -> None:
    config = parse("sample:block_size=64,dense_below=5,ranges=100:0.5:0.6:7")[0]
    assert isinstance(config, Sample)
    expected = Sample(alpha_column=0.5, alpha_slash=0.6, chunks=7, block_size=64, dense_below=5)
    assert dataclasses.replace(config.at(1), ranges=()) == expected


def test_ranges_are_tables_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(
        "[sample]\nblock_size = 64\n\n"
        "[[sample.ranges]]\nup_to = 16384\nalpha_column = 0.98\nalpha_slash = 0.9\nchunks = 1\n\n"
        "[[sample.ranges]]\nup_to = 49152\nalpha_column = 0.95\nalpha_slash = 0.95\nchunks = 2\n\n"
        "[sparq]\nrank = 16\n"
    )
    expected = Sample(block_size=64, ranges=TUNED.ranges[:2])
    assert load_toml(file) == {"sample": expected, "sparq": SparQ(rank=16)}
    assert parse("sample:block_size=128", load_toml(file)) == (Sample(ranges=TUNED.ranges[:2]),)


def test_sample_is_dense_without_tuned_ranges_unless_the_user_sets_a_context() -> None:
    assert Sample().shortest_context() == NEVER
    assert TUNED.shortest_context() == SAMPLE_TUNED_BELOW
    assert Sample(dense_below=7).shortest_context() == 7


@pytest.mark.parametrize("backend", ["ops", "metal"])
def test_sample_is_dense_above_a_density_unless_the_user_sets_one(backend: str) -> None:
    assert TUNED.max_density(backend) == SAMPLE_DENSE_ABOVE[backend] < 1
    assert Sample(dense_below=0).max_density(backend) == 1
    assert Sample(dense_below=0, dense_above=0.3).max_density(backend) == 0.3
    assert MInference().max_density(backend) == 1


def test_every_method_has_a_stage() -> None:
    prefill = {name for name, cls in METHODS.items() if issubclass(cls, Prefill)}
    assert {"sample", "minference"} <= prefill
    stages = {name: "prefill" if name in prefill else "decode" for name in METHODS}
    assert {name: cls.stage for name, cls in METHODS.items()} == stages | {"dense": "prefill and decode"}


@pytest.mark.parametrize(("text", "message"), DATA["wrong values"])
def test_wrong_values_are_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("entry", [1, "x", [[1]], [{"up_to": 5}], [{"up_to": 5, "a": 1}], [None]])
def test_values_that_are_not_ranges_are_refused(entry: Any) -> None:
    with pytest.raises(ConfigError, match="ranges: expected up_to:alpha_column:alpha_slash:chunks for each range"):
        Sample(ranges=entry)


@pytest.mark.parametrize(
    "text", [f"alpha_column=1{'0' * 400}", f"dense_above=1{'0' * 400}", f"ranges=9:1{'0' * 400}:1:1"]
)
def test_a_share_with_hundreds_of_digits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0 and at most 1, got 10"):
        parse(f"sample:{text}")


@pytest.mark.parametrize(
    "line", ["chunks = N", "alpha_column = N", "dense_below = N", "dense_above = N", "ranges = [{up_to = N}]", "N = 1"]
)
def test_integers_too_long_for_toml_are_a_one_line_error(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.toml"
    file.write_text("[sample]\n" + line.replace("N", "0x" + "f" * 5000))
    with pytest.raises(ConfigError) as caught:
        load_toml(file)
    assert "\n" not in str(caught.value)
