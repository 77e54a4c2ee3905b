"""Random histories of prompt caches. The float64 oracle checks every sparse call of a history.

A history is a tiny random model of one family, a method with random settings, and random operations on a few of the
model's prompt caches: prefill in chunks, decode steps, trims, copies, files, batches, another method. A mismatch is
recorded with the seed of its history. For H2O the attention received so far is kept in float64. Where a selection
depends on less than float32 resolves, both selections are right and a tie is counted.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from attention_recorder import AttentionRecorder, Sequence
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from random_models import Draw
from saap_artefacts import write_artefact

import mlx_sparse
from mlx_sparse.checks import ConfigError
from mlx_sparse.lm.model import plan_of

LONGEST, HELD = 640, 4  # tokens of a sequence, caches of a history


@dataclass
class Held:
    """A prompt cache and what its sequences should hold."""

    caches: list[Any]
    rows: list[Sequence]

    @property
    def batch(self) -> bool:
        return hasattr(self.caches[0], "left_padding")

    def copied(self) -> Held:
        return Held(copy.deepcopy(self.caches), [row.copy() for row in self.rows])

    def rebuilt(self) -> Held:
        """A fresh cache with the same rows."""
        fresh = copy.deepcopy(self.caches)
        for cache in fresh:
            cache.state = cache.state
        return Held(fresh, [row.copy(rebuilt=True) for row in self.rows])


@dataclass
class History:
    """One history; `run` raises what it finds wrong."""

    seed: int
    witness: AttentionRecorder
    folder: Path
    attn: str | None = None  # random ones where it is None
    done: list[str] = field(default_factory=list)
    family: str = ""

    def run(self) -> None:
        self.draw = Draw(self.seed)
        self.family, self.model = self.draw.model()
        self.done.append(f"model {self.family}")
        self.held: list[Held] = []
        self.artefact: Path | None = None
        try:
            self.switch()
            self.start()
            for _ in range(self.draw.number(8, 20)):
                usable = [name for name, weight in OPERATIONS.items() for _ in range(weight)]
                getattr(self, self.draw.one(usable))()
                while len(self.held) > HELD:
                    self.held.pop(self.draw.number(0, len(self.held) - 1))
            self.rebuild()
        finally:
            mlx_sparse.disable(self.model)

    def call(self, held: Held, tokens: Any, counts: list[int] | None = None) -> list[Any]:
        counts = [tokens.shape[1]] * len(held.rows) if counts is None else counts
        if plan_of(self.model) is not None:
            return self.witness.run(self.model, tokens, held.caches, held.rows, counts)
        with self.witness.attending_densely(self.model):
            return self.witness.run(self.model, tokens, held.caches, held.rows, counts)

    def feed(self, held: Held, *counts: int) -> None:
        for count in counts:
            self.call(held, self.draw.tokens(len(held.rows), count))

    def pick(self, *, batch: bool | None = None) -> Held | None:
        found = [held for held in self.held if batch is None or held.batch == batch]
        return self.draw.one(found) if found else None

    def note(self, what: str, held: Held | None = None) -> None:
        where = "" if held is None else f" of cache {self.held.index(held)} {[row.length for row in held.rows]}"
        self.done.append(f"{what}{where}")

    # Operations: each does nothing where it has nothing to be done on.

    def switch(self) -> None:
        """Another method, or none for a while."""
        mlx_sparse.disable(self.model)
        if self.done[1:] and self.draw.number(0, 5) == 0:
            self.note("disable")
            return
        while plan_of(self.model) is None:
            attn = self.attn or self.draw.attn(self._artefact)
            try:
                mlx_sparse.enable(self.model, attn)
                self.note(f"enable {attn}")
            except ConfigError as refused:  # it can serve no layer of this model
                self.note(f"refused {attn}: {refused}")
                if self.attn:
                    return

    def _artefact(self) -> Path:
        self.artefact = self.artefact or write_artefact(self.folder / f"a{self.seed}", self.model)
        return self.artefact

    def start(self) -> None:
        """A new cache, its prompt in pieces."""
        held = Held(make_prompt_cache(self.model), [Sequence()])
        self.held.append(held)
        pieces = [self.draw.one([1, 7, 40, 130, 255, 300]) for _ in range(self.draw.number(1, 3))]
        self.note(f"start {pieces}", held)
        self.feed(held, *pieces)

    def prompt(self) -> None:
        if (held := self.pick()) is not None and max(row.length for row in held.rows) < LONGEST:
            count = self.draw.one([2, 17, 40, 90, 256])
            self.note(f"prompt {count}", held)
            self.feed(held, count)

    def steps(self) -> None:
        if (held := self.pick()) is not None:
            count = self.draw.one([1, 2, 5, 9])
            self.note(f"steps {count}", held)
            self.feed(held, *[1] * count)

    def trim(self) -> None:
        if (held := self.pick()) is not None:
            most = min(row.length for row in held.rows) - 1
            self._trim(held, min(self.draw.one([1, 3, 16, 90, 300]), most))

    def _trim(self, held: Held, count: int) -> None:
        if count > 0 and trim_prompt_cache(held.caches, count):
            self.note(f"trim {count}", held)
            for row in held.rows:
                row.trim(count)

    def verify(self) -> None:
        """Drafts, some of them rejected."""
        if (held := self.pick()) is not None:
            count = self.draw.number(2, 8)
            self.note(f"verify {count}", held)
            self.feed(held, count)
            self._trim(held, self.draw.number(0, count - 1))
            self.feed(held, 1)

    def copies(self) -> None:
        if (held := self.pick()) is not None:
            self.note("copy", held)
            self.held.append(held.copied())

    def file(self) -> None:
        """mlx-lm cannot go on with the file of a batch with windows."""
        if (held := self.pick(batch=False)) is not None:
            self.note("file", held)
            path = str(self.folder / f"{self.seed}-{len(self.done)}.safetensors")  # what is loaded is read when needed
            save_prompt_cache(path, held.caches)
            held.caches = load_prompt_cache(path)
            held.rows = [row.copy(rebuilt=True) for row in held.rows]

    def merge(self) -> None:
        alone = [held for held in self.held if not held.batch]
        if alone:
            parts = [self.draw.one(alone).copied() for _ in range(self.draw.number(1, 3))]
            merged = [layers[0].merge(list(layers)) for layers in zip(*(part.caches for part in parts), strict=True)]
            self.held.append(Held(merged, [part.rows[0] for part in parts]))
            self.note("merge", self.held[-1])

    def extend(self) -> None:
        held = self.pick(batch=True)
        others = [other for other in self.held if other.batch and other is not held]
        if held is not None and others and len(held.rows) < HELD:
            other = self.draw.one(others)
            self.note(f"extend by cache {self.held.index(other)}", held)
            self.held = [entry for entry in self.held if entry is not other]
            for ours, theirs in zip(held.caches, other.caches, strict=True):
                ours.extend(theirs)
            held.rows += other.rows

    def filter(self) -> None:
        if (held := self.pick(batch=True)) is not None:
            kept = sorted({self.draw.number(0, len(held.rows) - 1) for _ in held.rows})
            self.note(f"filter {kept}", held)
            for cache in held.caches:
                cache.filter(kept)
            held.rows = [held.rows[place] for place in kept]

    def extract(self) -> None:
        if (held := self.pick(batch=True)) is not None:
            place = self.draw.number(0, len(held.rows) - 1)
            self.note(f"extract {place}", held)
            self.held.append(Held([cache.extract(place) for cache in held.caches], [held.rows[place].copy()]))

    def ragged(self) -> None:
        """Prompts of several lengths, padded on the right while they are processed."""
        held = self.pick(batch=True)
        if held is None or max(row.length for row in held.rows) > LONGEST:
            return
        lengths = [self.draw.number(1, self.draw.one([4, 60, 200])) for _ in held.rows]
        longest = max(*lengths, 2)
        padding = [longest - length for length in lengths]
        first = self.draw.number(2, longest)
        pieces = [longest] if longest - first < 2 else [first, longest - first]
        self.note(f"ragged {lengths} in {pieces}", held)
        tokens = self.draw.tokens(len(lengths), longest)
        for cache in held.caches:
            cache.prepare(lengths=lengths, right_padding=padding)
        start = 0
        for piece in pieces:
            counts = [min(max(length - start, 0), piece) for length in lengths]
            self.call(held, tokens[:, start : start + piece], counts)
            start += piece
        for cache in held.caches:
            cache.finalize()
        self.feed(held, 1)

    def rebuild(self) -> None:
        """The next step is that of a fresh cache with the same rows."""
        plan, held = plan_of(self.model), self.pick()
        if plan is None or held is None:
            return
        self.note("rebuild", held)
        token = self.draw.tokens(len(held.rows), 1)
        ours, theirs = self.call(held.copied(), token), self.call(held.rebuilt(), token)
        if plan.decode is not None and not REBUILT.get(plan.decode.name, lambda decode: True)(plan.decode):
            return
        pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.out is not None]
        if pairs and pairs[0][1].out is not None:  # deeper layers are handed what differs by rounding
            one, other = pairs[0]
            off = float(np.abs(one.out - other.out).max())
            assert off <= one.allowed + other.allowed, f"a rebuilt cache attends otherwise, by {off:.3g}"


# Methods that attend otherwise once what they keep has been rebuilt, and the settings with which they do not: H2O's
# scores are lost, SAAP's lists go on from where they were folded last.
REBUILT: dict[str, Callable[[Any], bool]] = {
    "h2o": lambda decode: False,
    "saap": lambda decode: decode.artefact is not None and decode.fold_every == 1,
}

# How often each is drawn.
OPERATIONS = {
    "steps": 5, "prompt": 3, "trim": 3, "verify": 3, "copies": 1, "file": 1, "merge": 2, "extend": 1, "filter": 1,
    "extract": 1, "ragged": 2, "rebuild": 1, "switch": 1, "start": 1,
}  # fmt: skip


@dataclass
class Found:
    """What the histories so far did and found."""

    histories: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    sparse: Counter[str] = field(default_factory=Counter)
    dense: int = 0
    ties: int = 0
    unchecked: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def take(self, seed: int, folder: Path, attn: str | None = None) -> History:
        """Run the history of ``seed``."""
        witness = AttentionRecorder()
        history = History(seed, witness, folder, attn)
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
