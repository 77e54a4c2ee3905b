"""Test SAAP's settings: text, TOML and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from json_tables import read_tables

from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import SAAP, load_toml, parse

DATA = read_tables(__file__)


def test_the_defaults_are_the_papers() -> None:
    config = SAAP(artefact="x")
    assert (config.probes, config.sink_tokens, config.recent_tokens, config.dense_layers) == (32, 1, 2047, 1)
    assert (config.mode, config.stage, config.attended) == ("trained", "decode", 2048)


@pytest.mark.parametrize(
    "config",
    [
        SAAP(artefact="model.saap.safetensors"),
        SAAP(artefact="a folder/model.safetensors", probes=8, dense_below=0),
        SAAP(mode="online"),
        SAAP(mode="online", buckets=64, probes=64, sink_tokens=0, recent_tokens=1, dense_layers=0, merge_every=1),
    ],
    ids=str,
)
def test_text_and_toml_round_trip(config: SAAP, tmp_path: Path) -> None:
    assert parse(str(config)) == (config,)
    lines = [f"{name} = {value!r}" for name, value in vars(config).items() if value is not None]
    (tmp_path / "attn.toml").write_text("\n".join(["[saap]", *lines]).replace("'", '"'))
    assert load_toml(tmp_path / "attn.toml") == {"saap": config}


def test_saap_combines_with_a_prefill_method() -> None:
    assert [config.name for config in parse("sample+saap:mode=online")] == ["sample", "saap"]


@pytest.mark.parametrize(("settings", "message"), DATA["wrong settings"])
def test_wrong_settings_are_a_one_line_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SAAP(**settings)
    assert "\n" not in str(caught.value)


def test_a_missing_artefact_is_reported_late_so_that_text_can_complete_toml(tmp_path: Path) -> None:
    (tmp_path / "attn.toml").write_text("[saap]\nprobes = 8\n")
    base = load_toml(tmp_path / "attn.toml")
    (config,) = parse("saap:artefact=model.saap.safetensors", base)
    assert config == SAAP(artefact="model.saap.safetensors", probes=8)
    assert config.file == "model.saap.safetensors"
    assert SAAP(mode="online").file is None
    with pytest.raises(ConfigError, match="artefact: expected a file that mlx-sparse train-saap wrote, got none"):
        _ = SAAP().file
