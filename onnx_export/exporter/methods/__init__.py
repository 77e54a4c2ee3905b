"""Export each method: one file per method, and the table of decoding methods."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_sparse.methods import SAAP, Dense, Method, SparQ

from .base import Decoding
from .saap import SaapDecoding
from .sparq import SparQDecoding

DECODE: Mapping[type[Method], type[Decoding]] = {Dense: Decoding, SparQ: SparQDecoding, SAAP: SaapDecoding}
EXACT = Decoding(Dense())  # for layers without a sparse method
