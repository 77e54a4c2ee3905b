"""Compute spans and random numbers for the baselines that hash queries and keys (docs/spec/sample.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Span:
    """Queries at positions ``[start, stop)`` and the earlier keys at positions ``[first, last)``.

    If a span has few keys, the queries of the span attend to all its keys. Otherwise the keys are selected by hash.
    """

    start: int
    stop: int
    first: int
    last: int


def random_words(count: int) -> Array:
    """Return ``count`` uint64 random numbers (SplitMix64 with seed 0). Every run and every head gets equal numbers."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def signs(D: int, count: int) -> Array:
    """Return ``count`` random directions for hashing as a float32 array ``(D, count)`` of 1 and -1 (sample.15)."""
    high: Array = random_words(D * count) >> np.uint64(63)
    return (1 - 2 * high.astype(np.float32)).reshape(D, count)


def sampled(first: int, last: int, count: int) -> Array:
    """Divide the keys ``[first, last)`` into ``count`` equal parts. Return a random key of each part (sample.18)."""
    borders = first + np.arange(count + 1) * (last - first) // count
    lengths = (borders[1:] - borders[:-1]).astype(np.uint64)
    return borders[:-1] + (random_words(count) % lengths).astype(np.int64)


def pieces(L: int, S: int, exact_rows: int) -> Iterator[tuple[int, int, tuple[Span, ...]]]:
    """Halve the positions ``[S - L, S)`` repeatedly, until each range has at most ``exact_rows`` queries (sample.16).

    Yields:
        ``start`` and ``stop`` of a range, and the spans that contain the queries of the range.
    """

    def cut(start: int, stop: int, before: tuple[Span, ...]) -> Iterator[tuple[int, int, tuple[Span, ...]]]:
        if stop - start <= exact_rows:
            yield start, stop, before
            return
        middle = (start + stop) // 2
        yield from cut(start, middle, before)
        yield from cut(middle, stop, (*before, Span(middle, stop, start, middle)))

    start = S - L
    yield from cut(start, S, (Span(start, S, 0, start),) if start else ())
