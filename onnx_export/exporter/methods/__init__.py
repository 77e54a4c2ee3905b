"""Export the attention methods, with one module per method. `DECODE` lists the decode methods."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_sparse.core.base import Dense, Method
from mlx_sparse.methods import SAAP, SparQ

from .base import Decoding
from .saap import SaapDecoding
from .sparq import SparQDecoding

DECODE: Mapping[type[Method], type[Decoding]] = {Dense: Decoding, SparQ: SparQDecoding, SAAP: SaapDecoding}
EXACT = Decoding(Dense())  # method of the layers that stay dense
