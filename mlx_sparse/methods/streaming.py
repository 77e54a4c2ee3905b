"""StreamingLLM, a baseline of either stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_block_size, check_int, check_share
from . import stats
from .base import Method, Prefill


@dataclass(frozen=True)
class Streaming(Method):
    """First ``sink_tokens`` and last ``recent_tokens`` keys (StreamingLLM, LM-Infinite).

    Attributes:
        sink_tokens: first keys that are attended.
        recent_tokens: last keys that are attended, at least 1.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    reads: ClassVar[str] = "the first 16 and the last 112 keys (StreamingLLM); forgets the middle"
    look: ClassVar[tuple[str, str]] = ("#E69F00", "D")
    grows: ClassVar[str] = "recent_tokens"

    sink_tokens: int = 16
    recent_tokens: int = 112

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.streaming_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class StreamingPrefill(Prefill):
    """The first keys and a window that is a share of the context, for prompts (StreamingLLM)."""

    name: ClassVar[str] = "streaming_prefill"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    reads: ClassVar[str] = "a window and the first keys; forgets the middle"
    look: ClassVar[tuple[str, str]] = ("#E69F00", "D")

    block_size: int = 64
    sink_tokens: int = 4
    window: float = 0.08

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_share("window", self.window)
        check_block_size(self.block_size)
