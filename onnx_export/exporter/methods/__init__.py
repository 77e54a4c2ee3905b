"""How each method is exported: one file per method, and the table of those that decode."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_sparse.methods import SAAP, Dense, Method, SparQ
from mlx_sparse.methods.quest import Quest

from .base import Decoding
from .quest import QuestDecoding
from .saap import SaapDecoding
from .sparq import SparQDecoding

DECODE: Mapping[type[Method], type[Decoding]] = {
    Dense: Decoding,
    SparQ: SparQDecoding,
    SAAP: SaapDecoding,
    Quest: QuestDecoding,
}
EXACT = Decoding(Dense())  # of layers that a method does not serve
