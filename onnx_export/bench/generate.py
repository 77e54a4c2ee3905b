"""``mlx-sparse bench generate --engine onnx``: tokens per second of decoding with an exported model.

Of its caches only the sizes matter to the speed, so they are filled with random numbers: a prompt of 32,768 tokens
would take a CPU half an hour. What the steps compute is checked all the same: the first layer that leaves out keys has
to hand on the same with native kernels as with the operators' bodies, after each of a few tokens. Not the last one: on
such caches a float16 that is rounded otherwise changes which keys the next layers choose, and with them everything.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from mlx_sparse.checks import ConfigError, check_int
from mlx_sparse.lm.loading import loading
from mlx_sparse.lm.saap import load_artefact
from mlx_sparse.methods import parse
from mlx_sparse.methods.scoring_keys import GROUP
from mlx_sparse.oracle import code_keys, key_spread
from mlx_sparse.tools.bench.core import Length, Row, say, too_large
from mlx_sparse.tools.bench.run import Plan
from mlx_sparse.tools.environment import memory
from mlx_sparse.tools.formats import table as markdown

from ..exporter.export import Exported, export
from ..runtime import native
from ..runtime.runner import MODEL, Runner
from .caches import CODED_BITS, records_of

DENSE = "dense"
KERNELS = {"auto": "native", "off": "bodies"}  # what `Runner` takes, and what it is called here
TOKENS = (5, 6, 7)  # appended first, one or the other
LARGEST_SHARE = 0.6  # of the memory of the machine
MOST_ERROR = 1e-2  # of the largest number, between native kernels and bodies
EXACT = ("CachedAttention", "SampleAttention")  # of one query
KEYS = re.compile(r"past_key_values\.\d+\.key")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Turns:
    """Decoding with one file and one kind of kernels from one length on.

    Attributes:
        logits: of the first step, for each of `TOKENS`.
        handed_on: what the first layer that leaves out keys made of that step: the key that the next layer appends, or
            the logits where no layer follows.
        speeds: tokens per second of each turn.
        busy: tokens per second of the processor's time, which other programs disturb less.
    """

    logits: Array
    handed_on: Array
    speeds: list[float]
    busy: list[float]


def plan(
    model: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    max_tokens: int,
    repeat: int,
    threads: int,
    dtype: str | None,
) -> Plan:
    """Export ``model`` with each method, and decode ``max_tokens`` after each length in turns.

    Measuring raises:
        ConfigError: a method or the model cannot be exported, or the caches do not fit into memory.
        ArtefactError: a file does not run.
    """
    check_int("--threads", threads, 1)
    capacity = max(lengths) + max_tokens + 1
    about = [f"{Path(model).name} exported, onnxruntime {version('onnxruntime')}, threads: {threads}"]
    about += [f"{max_tokens} tokens in each of {repeat} turns, caches of random numbers; medians (quartiles)"]

    def measure(case: str, _: float) -> Iterator[Row]:
        found: dict[tuple[str, str, int], Turns] = {}
        with tempfile.TemporaryDirectory(prefix="mlx-sparse-bench-") as scratch:
            source, own = _allowing(model, capacity, Path(scratch) / "source")
            if own is not None and own < capacity:
                about.append(f"the model was made for {own:,} tokens: beyond them this is about speed only")
            files = {
                method: export(
                    str(source), Path(scratch) / str(i), method=method, max_length=capacity, dtype=dtype, genai=False
                )
                for i, method in enumerate((DENSE, *methods))
            }
            for mode, kernels in KERNELS.items():
                if mode == "auto" and (missing := native.unavailable()):
                    about.append(f"no native kernels ({missing})")
                    continue
                decoders = {method: Decoder(file, method, mode, threads) for method, file in files.items()}
                for S in lengths:
                    say(f"  {kernels}: after {S:,} tokens")
                    for method, turns in _in_turns(decoders, S, max_tokens, repeat).items():
                        found[method, kernels, S] = turns
        yield from (row(files[method], method, kernels, S, threads, found) for method, kernels, S in found)

    return Plan({}, [Path(model).name], measure, lambda rows: f"{'; '.join(about)}.\n\n{table(rows)}")


def _allowing(model: str, capacity: int, folder: Path) -> tuple[Path, int | None]:
    """A copy of ``model`` for contexts of ``capacity`` tokens, whose weights are links; and what it was made for."""
    from mlx_lm import utils

    with loading(model):
        source = Path(utils._download(model)).absolute()
        settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    own = settings.get("max_position_embeddings")
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    if isinstance(own, int) and own < capacity:
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": capacity}))
    return folder, own if isinstance(own, int) else None


class Decoder:
    """An exported model with random numbers in its caches, the same for every kind of kernels."""

    def __init__(self, file: Exported, method: str, mode: str, threads: int) -> None:
        self.runner = Runner(file.folder, native=mode, threads=threads)
        caches = self.runner.caches
        needed = 2 * sum(array.nbytes for array in caches.values())  # there are those of the other method too
        if too_large(needed, memory(), LARGEST_SHARE):
            raise ConfigError(f"--lengths: expected caches that fit into memory, got {file.max_length} tokens.")
        rng = np.random.Generator(np.random.SFC64(1))
        noise = rng.standard_normal(max(array.size for array in caches.values()), np.float32)
        for array in caches.values():
            if array.dtype.kind == "i":
                array[...] = rng.integers(0, _buckets(method), array.shape, array.dtype)
            elif array.dtype.kind != "u":  # codes are those of the keys
                array[...] = noise[: array.size].reshape(array.shape)
        self._sparq = list(_sparq_caches(file, caches))
        for keys, keys_t, _, _, lanes in self._sparq:
            keys_t[...] = _component_major(keys, lanes)
        layers = list(_coded_caches(file, caches))
        self._coded = _Coded(layers) if layers else None
        self._sums: dict[int, list[Array]] = {}
        self._first = 0  # token that was written since
        self._next_keys = _keys_after_the_first_choice(file)

    def first(self, S: int, token: int) -> Array:
        """The logits of the step that appends ``token`` to ``S`` tokens."""
        if S not in self._sums:
            self._sums[S] = [_sums_of(keys[:, :, :S], values[:, :, :S]) for keys, _, values, _, _ in self._sparq]
        for (_, _, _, sums, _), found in zip(self._sparq, self._sums[S], strict=True):
            sums[...] = found
        if self._coded is not None:
            self._coded.put(S, slice(self._first, self.runner.length))
        self._first = S
        self.runner.go_on_from(S)
        return self.runner.step([[token]]).copy()

    def handed_on(self, S: int, logits: Array) -> Array:
        """What the first layer that leaves out keys made of the step after ``S`` tokens, which gave ``logits``."""
        return logits if self._next_keys is None else self.runner.caches[self._next_keys][:, :, S].astype(np.float32)


class _Coded:
    """SparQ layers with codes, of the same random numbers each.

    Steps overwrite keys that later codes are of, and bodies the codes of groups that are not full.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array, Array, Array, int]]) -> None:
        self._layers = layers
        keys = layers[0][0]
        self._rows = keys.copy()  # of keys and of values
        self._codes = code_keys(keys)
        self._records = records_of(self._codes)
        self._summaries: dict[int, Array] = {}

    def put(self, S: int, written: slice) -> None:
        """Give every layer what a prompt of ``S`` tokens leaves, after steps that wrote the rows ``written``."""
        if S not in self._summaries:
            self._summaries[S] = self._summary(S)
        for keys, codes, values, summary, _ in self._layers:
            keys[:, :, written] = values[:, :, written] = self._rows[:, :, written]
            codes[...], summary[...] = self._records, self._summaries[S]

    def _summary(self, S: int) -> Array:
        """What `SparQCodedAttention` keeps beside the codes of ``S`` tokens."""
        rows, M = self._rows[:, :, :S].astype(np.float32, copy=False), S // GROUP
        lo, step = (array[..., :M] for array in (self._codes.lo, self._codes.step))
        spread = key_spread(self._codes._replace(lo=lo, step=step), rows)
        centre = self._codes.centre if M else np.zeros_like(self._codes.centre)
        summary = np.stack([rows.sum(axis=2), centre, spread], axis=2)
        return summary.reshape(len(summary), -1, summary.shape[-1])


def _sparq_caches(file: Exported, caches: Mapping[str, Array]) -> Iterator[tuple[Array, Array, Array, Array, int]]:
    """Of every SparQ layer its keys, keys component-major, values and sums, and how many keys lie side by side."""
    for node in onnx.load(file.folder / MODEL, load_external_data=False).graph.node:
        if node.op_type in ("SparQAttention", "SampleSparQAttention"):
            keys, keys_t, values, sums = (caches[name] for name in node.input[-6:-2])
            yield keys, keys_t, values, sums, next(entry.i for entry in node.attribute if entry.name == "lanes")


def _coded_caches(file: Exported, caches: Mapping[str, Array]) -> Iterator[tuple[Array, Array, Array, Array, int]]:
    """Of every SparQ layer with codes its keys, their codes, values and summary, and the bits of a code."""
    for node in onnx.load(file.folder / MODEL, load_external_data=False).graph.node:
        if node.op_type in ("SparQCodedAttention", "SampleSparQCodedAttention"):
            keys, codes, values, summary = (caches[name] for name in node.input[-6:-2])
            yield keys, codes, values, summary, CODED_BITS


def _keys_after_the_first_choice(file: Exported) -> str | None:
    """The cache of keys of the layer that follows the first one that may leave out keys; None where none follows."""
    graph = onnx.load(file.folder / MODEL, load_external_data=False).graph
    caches = [(node.op_type, [name for name in node.input if KEYS.fullmatch(name)]) for node in graph.node]
    layers = [(names[0], kind) for kind, names in caches if names]  # its other states like keys come later
    choosing = [i for i, (_, kind) in enumerate(layers) if kind not in EXACT]
    after = choosing[0] + 1 if choosing else 1
    return layers[after][0] if after < len(layers) else None


def _component_major(keys: Array, lanes: int) -> Array:
    """``(B, Hkv, C, D)`` in the other layout of `SparQAppend`."""
    B, H, C, D = keys.shape
    return keys.reshape(B, H, C // lanes, lanes, D).swapaxes(3, 4).reshape(keys.shape)


def _sums_of(keys: Array, values: Array) -> Array:
    """What `SparQAppend` keeps of ``(B, Hkv, S, D)``: ``(B, Hkv, 3, D)``."""
    keys, values = keys.astype(np.float32, copy=False), values.astype(np.float32, copy=False)
    apart = keys - keys.mean(axis=2, keepdims=True)
    return np.stack([array.sum(axis=2) for array in (values, keys, apart * apart)], axis=2)


def _buckets(method: str) -> int:
    configs: list[Any] = [config for config in parse(method) if config.before_rope]
    artefacts = [load_artefact(config) for config in configs]
    return next(artefact.buckets for artefact in artefacts if artefact is not None)


def _in_turns(decoders: Mapping[str, Decoder], S: int, max_tokens: int, repeat: int) -> dict[str, Turns]:
    """``repeat`` turns of each, after one step that does not count."""
    found: dict[str, Turns] = {}
    for method, decoder in decoders.items():
        logits, handed_on = [], []
        for token in TOKENS:
            logits.append(decoder.first(S, token))
            handed_on.append(decoder.handed_on(S, logits[-1]))
        found[method] = Turns(np.stack(logits), np.stack(handed_on), [], [])
    for _ in range(repeat):
        for method, decoder in decoders.items():
            token = int(decoder.first(S, TOKENS[0])[0].argmax())
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(max_tokens):
                token = int(decoder.runner.step([[token]])[0].argmax())
            found[method].speeds.append(max_tokens / (time.perf_counter() - start))
            found[method].busy.append(max_tokens / (time.process_time() - busy))
    return found


def row(
    file: Exported, method: str, kernels: str, S: int, threads: int, found: Mapping[tuple[str, str, int], Turns]
) -> Row:
    """What is to be said of one method, one kind of kernels and one length; no speed of a step that is wrong."""
    turns, dense = found[method, kernels, S], found[DENSE, kernels, S]
    both = [found[method, other, S] for other in KERNELS.values() if (method, other, S) in found]
    error = _error(both[0].handed_on, both[1].handed_on) if len(both) > 1 else None
    details = {"method": method, "attn": file.method, "kernels": kernels, "threads": threads, "error": error}
    made = Row(Length(S), method, details=details, spreads={}, turns=len(turns.speeds))
    made.failed = not all(np.isfinite(each.logits).all() for each in both) or (error or 0.0) > MOST_ERROR
    made.compare("generation", turns.speeds, dense.speeds)
    made.compare("busy", turns.busy, dense.busy)
    if made.failed:
        made.spreads = dict.fromkeys(made.spreads)
        made.note = "its steps differ between native kernels and bodies, or give logits that are not finite"
    elif file.sparse_from is not None and S < file.sparse_from:
        made.note = f"its steps are dense below {file.sparse_from:,} keys"
    return made


def _error(ours: Array, theirs: Array) -> float:
    """Largest difference relative to the largest number, after the token where that is largest."""
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(ours, theirs, strict=True))


def table(rows: Sequence[Row]) -> str:
    """For people: tokens per second, in parentheses their quartiles, and the ratio to dense attention."""
    lengths = sorted({row.case.S for row in rows})
    texts = []
    for of, name in (("second", "generation"), ("second of the processor's time", "busy")):
        lines = []
        for method, kernels in dict.fromkeys((row.name, row.details["kernels"]) for row in rows):
            ours = {row.case.S: row for row in rows if (row.name, row.details["kernels"]) == (method, kernels)}
            lines.append([f"`{method}`", kernels, *(_cell(ours[S], name) if S in ours else "" for S in lengths)])
        texts.append(markdown([f"tokens per {of}", "kernels", *(f"{S:,} tokens" for S in lengths)], lines))
    notes = [f"* `{row.name}`, {row.details['kernels']}, at {row.case.S:,}: {row.note}." for row in rows if row.note]
    return "\n\n".join([*texts, *(["\n".join(notes)] if notes else [])])


def _cell(row: Row, name: str) -> str:
    speed, over = row.spreads[name], row.spreads[f"{name}_ratio"]
    if speed is None or over is None:
        return "wrong"
    ratio = "" if row.name == DENSE else f", {over.median:.2f} x"
    return f"{speed.median:.1f} ({speed.low:.1f} to {speed.high:.1f}){ratio}"
