"""HyperAttention, a baseline for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import ConfigError, check_int
from .base import Prefill


@dataclass(frozen=True)
class HyperAttention(Prefill):
    """Keys in the query's bucket of a sort by hash, and a weighted sample of the others (docs/spec/sample.md).

    Attributes:
        bucket_size: keys of a bucket.
        sampled_keys: keys that stand for all others.
        hash_bits: random directions whose signs make a hash, 1..16.
        exact_rows: pieces of a prompt of up to so many queries attend each other in full.
    """

    name: ClassVar[str] = "hyperattention"
    source: ClassVar[str] = "HyperAttention, arXiv 2310.05869"
    reads: ClassVar[str] = (
        "a bucket of keys with hashes like the query's, and a weighted sample. To compare with: no faster than dense "
        "attention here"
    )
    look: ClassVar[tuple[str, str]] = ("#CC79A7", "X")

    bucket_size: int = 256
    sampled_keys: int = 256
    hash_bits: int = 7
    exact_rows: int = 4096

    def __post_init__(self) -> None:
        check_int("bucket_size", self.bucket_size, 1)
        check_int("sampled_keys", self.sampled_keys, 1)
        check_int("hash_bits", self.hash_bits, 1)
        if self.hash_bits > 16:
            raise ConfigError(f"hash_bits: expected 1..16, got {self.hash_bits}.")
        check_int("exact_rows", self.exact_rows, 1)

    def serves_sinks(self, G: int) -> bool:
        """The weights of the sample stand for keys that no log-sum-exp counts."""
        return False
