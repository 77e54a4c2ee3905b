"""Run random histories of prompt caches, and check every sparse call with the float64 oracle.

A history consists of a tiny random model of one family, a method with random settings, and random operations on a few
prompt caches. The operations are prefill in chunks, decode steps, trims, copies, files, batches and a change of the
method. A mismatch is recorded with the seed of its history. For H2O the accumulated attention is stored in float64.
If a selection depends on differences below the resolution of float32, both selections are right and a tie is counted.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from attention_recorder import AttentionRecorder, Sequence
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache
from random_models import Draw
from saap_artefacts import write_artefact

import mlx_sparse
from mlx_sparse.checks import ConfigError
from mlx_sparse.lm.model import plan_of
from mlx_sparse.model_info import new_caches

MAX_TOKENS, MAX_CACHES = 640, 4  # maximum tokens per sequence, maximum caches per history
MAX_HISTORIES = 40  # until a planted bug is found


SPARQ = "sparq:rank=4,top_k=8,component_score=query_key,reallocate=true,dense_below=0"
SAAP = "saap:mode=online,buckets=8,probes=2,recent_tokens=8,merge_every=7,dense_layers=0,dense_below=0"


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method."""


@dataclass
class Tracked:
    """A prompt cache with the expected contents of its sequences."""

    caches: list[Any]
    rows: list[Sequence]

    @property
    def batch(self) -> bool:
        return hasattr(self.caches[0], "left_padding")

    def copied(self) -> Tracked:
        return Tracked(copy.deepcopy(self.caches), [row.copy() for row in self.rows])

    def rebuilt(self) -> Tracked:
        """Return a new cache with the same keys and values."""
        fresh = copy.deepcopy(self.caches)
        for cache in fresh:
            cache.state = cache.state
        return Tracked(fresh, [row.copy(rebuilt=True) for row in self.rows])


@dataclass
class History:
    """A random history. `run` raises an error at the first mismatch."""

    seed: int
    witness: AttentionRecorder
    folder: Path
    attn: Any = None  # None draws random methods
    done: list[str] = field(default_factory=list)
    family: str = ""
    more: ClassVar[dict[str, int]] = {}  # relative frequencies of more operations

    def run(self) -> None:
        self.draw = Draw(self.seed)
        self.family, self.model = self.build()
        self.done.append(f"model {self.family}")
        self.tracked: list[Tracked] = []
        self.artefact: Path | None = None
        try:
            self.switch()
            self.start()
            for _ in range(self.draw.number(8, 20)):
                usable = [name for name, weight in (OPERATIONS | self.more).items() for _ in range(weight)]
                getattr(self, self.draw.one(usable))()
                while len(self.tracked) > MAX_CACHES:
                    self.tracked.pop(self.draw.number(0, len(self.tracked) - 1))
            self.rebuild()
        finally:
            mlx_sparse.disable(self.model)

    def build(self) -> tuple[str, Any]:
        return self.draw.model()

    def call(self, tracked: Tracked, tokens: Any, counts: list[int] | None = None, forward: Any = None) -> list[Any]:
        counts = [tokens.shape[1]] * len(tracked.rows) if counts is None else counts
        with self.witness.attending_densely(self.model) if plan_of(self.model) is None else nullcontext():
            return self.witness.run(forward or self.model, tokens, tracked.caches, tracked.rows, counts)

    def feed(self, tracked: Tracked, *counts: int) -> None:
        for count in counts:
            self.call(tracked, self.draw.tokens(len(tracked.rows), count))

    def pick(self, *, batch: bool | None = None) -> Tracked | None:
        found = [tracked for tracked in self.tracked if batch is None or tracked.batch == batch]
        return self.draw.one(found) if found else None

    def log(self, text: str, tracked: Tracked | None = None) -> None:
        where = (
            "" if tracked is None else f" of cache {self.tracked.index(tracked)} {[row.length for row in tracked.rows]}"
        )
        self.done.append(f"{text}{where}")

    # Operations. An operation without a suitable cache does nothing.

    def switch(self) -> None:
        """Enable another method, or leave the model disabled for some operations."""
        mlx_sparse.disable(self.model)
        if self.done[1:] and self.draw.number(0, 5) == 0:
            self.log("disable")
            return
        while plan_of(self.model) is None:
            attn = self.attn or self.draw.attn(self._artefact)
            try:
                # With "auto" on a CPU, the native kernels do not return their selection.
                mlx_sparse.enable(self.model, attn, backend="auto" if self.seed % 2 else "ops")
                self.log(f"enable {attn}")
            except ConfigError as refused:  # the method supports no layer of this model
                self.log(f"refused {attn}: {refused}")
                if self.attn:
                    return

    def _artefact(self) -> Path:
        self.artefact = self.artefact or write_artefact(self.folder / f"a{self.seed}", self.model)
        return self.artefact

    def start(self) -> None:
        """Start a new cache with a prompt in chunks."""
        tracked = Tracked(new_caches(self.model), [Sequence()])
        self.tracked.append(tracked)
        chunks = [self.draw.one([1, 7, 40, 130, 255, 300]) for _ in range(self.draw.number(1, 3))]
        self.log(f"start {chunks}", tracked)
        self.feed(tracked, *chunks)

    def prompt(self) -> None:
        if (tracked := self.pick()) is not None and max(row.length for row in tracked.rows) < MAX_TOKENS:
            count = self.draw.one([2, 17, 40, 90, 256])
            self.log(f"prompt {count}", tracked)
            self.feed(tracked, count)

    def steps(self) -> None:
        if (tracked := self.pick()) is not None:
            count = self.draw.one([1, 2, 5, 9])
            self.log(f"steps {count}", tracked)
            self.feed(tracked, *[1] * count)

    def trim(self) -> None:
        if (tracked := self.pick()) is not None:
            most = min(row.length for row in tracked.rows) - 1
            self._trim(tracked, min(self.draw.one([1, 3, 16, 90, 300]), most))

    def _trim(self, tracked: Tracked, count: int) -> None:
        if count > 0 and trim_prompt_cache(tracked.caches, count):
            self.log(f"trim {count}", tracked)
            for row in tracked.rows:
                row.trim(count)

    def verify(self) -> None:
        """Verify several draft tokens and reject some of them."""
        if (tracked := self.pick()) is not None:
            count = self.draw.number(2, 8)
            self.log(f"verify {count}", tracked)
            self.feed(tracked, count)
            self._trim(tracked, self.draw.number(0, count - 1))
            self.feed(tracked, 1)

    def copies(self) -> None:
        if (tracked := self.pick()) is not None:
            self.log("copy", tracked)
            self.tracked.append(tracked.copied())

    def file(self) -> None:
        """Save and load a cache. mlx-lm cannot continue a batch with sliding windows from a file."""
        if (tracked := self.pick(batch=False)) is not None:
            self.log("file", tracked)
            path = str(self.folder / f"{self.seed}-{len(self.done)}.safetensors")  # a loaded file is read lazily
            save_prompt_cache(path, tracked.caches)
            tracked.caches = load_prompt_cache(path)
            tracked.rows = [row.copy(rebuilt=True) for row in tracked.rows]

    def merge(self) -> None:
        alone = [tracked for tracked in self.tracked if not tracked.batch and hasattr(tracked.caches[0], "merge")]
        if alone:
            parts = [self.draw.one(alone).copied() for _ in range(self.draw.number(1, 3))]
            merged = [self.merged(list(layers)) for layers in zip(*(part.caches for part in parts), strict=True)]
            self.tracked.append(Tracked(merged, [part.rows[0] for part in parts]))
            self.log("merge", self.tracked[-1])

    def merged(self, layers: list[Any]) -> Any:
        return layers[0].merge(layers)

    def extend(self) -> None:
        tracked = self.pick(batch=True)
        others = [other for other in self.tracked if other.batch and other is not tracked]
        if tracked is not None and others and len(tracked.rows) < MAX_CACHES:
            other = self.draw.one(others)
            self.log(f"extend by cache {self.tracked.index(other)}", tracked)
            self.tracked = [entry for entry in self.tracked if entry is not other]
            for ours, theirs in zip(tracked.caches, other.caches, strict=True):
                ours.extend(theirs)
            tracked.rows += other.rows

    def filter(self) -> None:
        if (tracked := self.pick(batch=True)) is not None:
            kept = sorted({self.draw.number(0, len(tracked.rows) - 1) for _ in tracked.rows})
            self.log(f"filter {kept}", tracked)
            for cache in tracked.caches:
                cache.filter(kept)
            tracked.rows = [tracked.rows[place] for place in kept]

    def extract(self) -> None:
        if (tracked := self.pick(batch=True)) is not None:
            place = self.draw.number(0, len(tracked.rows) - 1)
            self.log(f"extract {place}", tracked)
            self.tracked.append(
                Tracked([cache.extract(place) for cache in tracked.caches], [tracked.rows[place].copy()])
            )

    def ragged(self) -> None:
        """Process prompts of several lengths with padding on the right."""
        tracked = self.pick(batch=True)
        if tracked is None or max(row.length for row in tracked.rows) > MAX_TOKENS:
            return
        lengths = [self.draw.number(1, self.draw.one([4, 60, 200])) for _ in tracked.rows]
        longest = max(*lengths, 2)
        padding = [longest - length for length in lengths]
        first = self.draw.number(2, longest)
        chunks = [longest] if longest - first < 2 else [first, longest - first]
        self.log(f"ragged {lengths} in {chunks}", tracked)
        tokens = self.draw.tokens(len(lengths), longest)
        for cache in tracked.caches:
            cache.prepare(lengths=lengths, right_padding=padding)
        start = 0
        for chunk in chunks:
            counts = [min(max(length - start, 0), chunk) for length in lengths]
            self.call(tracked, tokens[:, start : start + chunk], counts)
            start += chunk
        for cache in tracked.caches:
            cache.finalize()
        self.feed(tracked, 1)

    def write(self) -> None:
        """Write arrays and lengths directly, as programs do that know nothing of the auxiliary state."""
        if (tracked := self.pick()) is None:
            return
        others = [other for other in self.tracked if other is not tracked and kinds(other) == kinds(tracked)]
        cut = self.draw.number(1, 9)
        if tracked.batch and self.draw.number(0, 1):
            order = [self.draw.number(0, len(tracked.rows) - 1) for _ in tracked.rows]
            self.log(f"write sequences {order}", tracked)
            for cache in tracked.caches:
                change(cache, lambda name, value: value if name == "_idx" else value[mx.array(order)])
            tracked.rows = [tracked.rows[place] for place in order]
        elif others and self.draw.number(0, 2):
            other = self.draw.one(others)
            self.log(f"write cache {self.tracked.index(other)}", tracked)
            for mine, theirs in zip(tracked.caches, other.copied().caches, strict=True):
                change(mine, lambda name, value, theirs=theirs: getattr(theirs, name))
            tracked.rows = other.rows
        elif cut < min(row.length for row in tracked.rows):
            self.log(f"write a length less {cut}", tracked)
            for cache in tracked.caches:
                change(cache, lambda name, value: value - cut if name in ("offset", "_idx") else value)
            for row in tracked.rows:
                row.trim(cut)
        tracked.rows = [row.copy(rebuilt=True) for row in tracked.rows]
        self.feed(tracked, 1)

    def rebuild(self) -> None:
        """Compare the next decode step with a decode step over a fresh cache with the same rows."""
        plan, tracked = plan_of(self.model), self.pick()
        if plan is None or tracked is None:
            return
        self.log("rebuild", tracked)
        token = self.draw.tokens(len(tracked.rows), 1)
        ours, theirs = self.call(tracked.copied(), token), self.call(tracked.rebuilt(), token)
        if plan.decode is not None and not REBUILT.get(plan.decode.name, lambda decode: True)(plan.decode):
            return
        pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.out is not None]
        if pairs and pairs[0][1].out is not None:  # inputs of deeper layers differ by rounding
            one, other = pairs[0]
            off = float(np.abs(one.out - other.out).max())
            assert off <= one.allowed + other.allowed, f"a rebuilt cache differs by {off:.3g}"


class WrittenHistory(History):
    """A random history of a program that also writes arrays and lengths of its caches directly."""

    more: ClassVar = {"write": 12}

    def build(self) -> tuple[str, Any]:
        """Draw a model without sliding windows, whose caches have further attributes."""
        family, model = super().build()
        while kinds(Tracked(new_caches(model), [])) & {("RotatingKVCache", None)}:
            family, model = super().build()
        return family, model


def change(cache: Any, new: Callable[[str, Any], Any]) -> None:
    """Set each attribute that a program may write to ``new(name, value)``."""
    for name in ("keys", "values", "left_padding", "offset", "_idx"):
        if hasattr(cache, name):
            setattr(cache, name, new(name, getattr(cache, name)))


def kinds(tracked: Tracked) -> set[tuple[str, Any]]:
    """Return the names of the cache classes and the numbers of bits of their rows."""
    return {(type(cache).__name__, getattr(cache, "bits", None)) for cache in tracked.caches}


# Return True if rebuilding the auxiliary cache state does not change the output of a method. H2O loses its scores.
# The lists of SAAP depend on the length at their last rebuild, except with merge_every=1.
REBUILT: dict[str, Callable[[Any], bool]] = {
    "h2o": lambda decode: False,
    "saap": lambda decode: decode.artefact is not None and decode.merge_every == 1,
}

# Relative frequencies of the operations.
OPERATIONS = {
    "steps": 5, "prompt": 3, "trim": 3, "verify": 3, "copies": 1, "file": 1, "merge": 2, "extend": 1, "filter": 1,
    "extract": 1, "ragged": 2, "rebuild": 1, "switch": 1, "start": 1,
}  # fmt: skip


@dataclass
class Summary:
    """Counts and mismatches of the histories so far."""

    histories: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    sparse: Counter[str] = field(default_factory=Counter)
    dense: int = 0
    ties: int = 0
    unchecked: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def take(self, seed: int, folder: Path, attn: Any = None, kind: type[History] = History) -> History:
        """Run the history of ``seed``."""
        witness = AttentionRecorder()
        history = kind(seed, witness, folder, attn)
        try:
            with witness.recording_calls():
                history.run()
        except Exception as error:
            where = traceback.format_exc(limit=-3)
            what = f"{type(error).__name__}: {error}"
            self.mismatches.append({"seed": seed, "error": what, "done": history.done, "where": where})
        self.histories += 1
        self.families[history.family] += 1
        self.operations.update(line.split(" ")[0] for line in history.done)
        self.sparse.update({f"{history.family}, {method}": count for method, count in witness.sparse.items()})
        self.dense += witness.dense
        self.ties += witness.ties
        self.unchecked += witness.unchecked
        return history

    def find(self, first: int, folder: Path, attn: str, kind: type[History] = History) -> None:
        """Find a planted bug from the history ``first`` on, and replay the history."""
        while not self.mismatches and self.histories < MAX_HISTORIES:
            self.take(first + self.histories, folder, attn, kind)
        (mismatch,), again = self.mismatches, Summary()
        again.take(mismatch["seed"], folder, attn, kind)
        assert [wrong["done"] for wrong in again.mismatches] == [mismatch["done"]]
