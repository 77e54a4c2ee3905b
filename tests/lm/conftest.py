"""A tiny model, its tokenizer and the prefill calls, for the files of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from lm_prompts import Piece, record_pieces, tiny_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return tiny_tokenizer()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    return record_pieces(monkeypatch)
