"""Provide a tiny model, its tokenizer and recorded prefill calls to the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from lm_prompts import PrefillCall, record_prefill_calls, tiny_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return tiny_tokenizer()


@pytest.fixture
def prefill_calls(monkeypatch: pytest.MonkeyPatch) -> list[PrefillCall]:
    return record_prefill_calls(monkeypatch)
