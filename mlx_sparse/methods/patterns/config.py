"""Define the settings of the prefill baselines in the paper on SampleAttention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...checks import ConfigError, check_share
from ...core.base import Prefill
from ...core.blocks.layout import MINFERENCE_ROWS, Layout


@dataclass(frozen=True)
class StreamingPrefill(Prefill):
    """Attend in prefill to the first keys and to a window of recent keys (StreamingLLM).

    The window covers the share ``window`` of the context.
    """

    name: ClassVar[str] = "streaming_prefill"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    reads: ClassVar[str] = "a window and the first keys"
    limits: ClassVar[Mapping[str, int]] = {"sink_tokens": 0}

    block_size: int = 64
    sink_tokens: int = 4
    window: float = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("window", self.window)


@dataclass(frozen=True)
class MInference(Prefill):
    """Attend to fixed numbers of key blocks and diagonals in prefill (vertical-slash attention)."""

    name: ClassVar[str] = "minference"
    source: ClassVar[str] = "MInference, arXiv 2407.02490"
    reads: ClassVar[str] = "a fixed number of key blocks and distances with most of a sample's attention"
    limits: ClassVar[Mapping[str, int]] = {"vertical_tokens": 1, "slash_tokens": 1}

    block_size: int = 64
    vertical_tokens: int = 1000
    slash_tokens: int = 6096

    def layout(self, L: int, S: int) -> Layout:
        return Layout(L, S, 1, self.block_size, rows=MINFERENCE_ROWS)


@dataclass(frozen=True)
class BigBird(Prefill):
    """Attend to a sliding window, the first keys and random blocks in prefill.

    The window covers the share ``window`` of the context. The first keys cover the share ``global_share``.
    """

    name: ClassVar[str] = "bigbird"
    source: ClassVar[str] = "BigBird, arXiv 2007.14062"
    reads: ClassVar[str] = "a window, the first keys and random blocks"
    limits: ClassVar[Mapping[str, int]] = {"random_blocks": 0}

    block_size: int = 64
    window: float = 0.08
    global_share: float = 0.08
    random_blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("window", self.window)
        check_share("global_share", self.global_share)


@dataclass(frozen=True)
class HyperAttention(Prefill):
    """Attend in prefill to keys whose hashes are similar to the query's hash, and to a weighted sample of keys.

    See docs/spec/sample.md, "Baselines".

    Attributes:
        bucket_size: number of keys per bucket. Keys are sorted by hash and divided into buckets.
        sampled_keys: number of sampled keys, which represent all keys outside the query's bucket.
        hash_bits: number of random directions whose signs form the hash, 1..16.
        exact_rows: largest number of consecutive tokens among which attention is exact.
    """

    name: ClassVar[str] = "hyperattention"
    source: ClassVar[str] = "HyperAttention, arXiv 2310.05869"
    reads: ClassVar[str] = (
        "a bucket of keys with hashes similar to the query's, and a weighted sample. For comparison: no faster than "
        "dense attention here"
    )
    limits: ClassVar[Mapping[str, int]] = {"bucket_size": 1, "sampled_keys": 1, "hash_bits": 1, "exact_rows": 1}

    bucket_size: int = 256
    sampled_keys: int = 256
    hash_bits: int = 7
    exact_rows: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hash_bits > 16:
            raise ConfigError(f"hash_bits: expected 1..16, got {self.hash_bits}.")

    def supports_sinks(self, G: int) -> bool:
        """Return False. Sinks need a log-sum-exp that includes sampling weights, and HyperAttention returns none."""
        return False


@dataclass(frozen=True)
class HashSparse(Prefill):
    """Attend in prefill to earlier keys whose hash equals the query's hash (docs/spec/sample.md, "Baselines").

    Attributes:
        buckets: number C of hash values, two per random direction. The number must be even.
    """

    name: ClassVar[str] = "hash_sparse"
    source: ClassVar[str] = "Sparse Flash Attention, arXiv 2306.01160"
    reads: ClassVar[str] = "the keys with the query's hash. For comparison: no faster than dense attention here"
    limits: ClassVar[Mapping[str, int]] = {"buckets": 2}

    buckets: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets % 2:
            raise ConfigError(f"buckets: expected an even number, got {self.buckets}.")


PATTERNS = (MInference, BigBird, StreamingPrefill, HyperAttention, HashSparse)
