"""Start MLX's distributed runtime, and check that all ranks run the same command."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..checks import ConfigError
from ..files import file_hash

# Environment variables that mlx.launch (ring, JACCL, NCCL) and Open MPI set. MLX supports no other MPI.
ENVIRONMENT = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE")
# Options that may differ between ranks.
LOCAL = frozenset({"allowed_origins", "host", "log_level", "output_dir", "port", "prompt_cache_file", "verbose"})
# Options that name a file or folder. The path may differ between machines, but the contents must be equal.
PATHS = frozenset({"adapter_path", "attn_config", "chat_template", "draft_model", "model"})
# Files that identify the model in a folder.
DESCRIPTIONS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
SHORT = 60  # longest option value that a message repeats, in characters
MAGIC = 0x5A11  # first number of every message, to detect ranks that run another program
LOST = re.compile(r"\[(ring|jaccl|mpi|nccl|distributed)\]")  # prefix of MLX's connection errors


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of ranks. If no launcher started this process, it is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @classmethod
    def start(cls) -> Ranks:
        """Start MLX's distributed runtime if a launcher started this process, and wait for all ranks.

        Raises:
            ConfigError: MLX cannot reach a rank.
        """
        if not any(name in os.environ for name in ENVIRONMENT) or _single_process():
            return cls()
        import mlx.core as mx

        try:
            group = mx.distributed.init()
        except RuntimeError as error:
            raise ConfigError(f"ranks: expected all ranks to start this command, got: {error}.") from None
        return cls(group.rank(), group.size())

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks in rank order. All ranks must call this method with JSON-serializable values.

        Raises:
            ConfigError: a rank runs another program, or has exited.
        """
        if self.size == 1:
            return [value]
        import mlx.core as mx
        import numpy as np

        def exchange(numbers: mx.array) -> np.ndarray:
            try:
                return np.array(mx.distributed.all_gather(numbers[None], stream=mx.cpu))
            except RuntimeError as error:
                raise ConfigError(connection_error(error) or str(error)) from None

        data = json.dumps(value).encode()
        heads = exchange(mx.array([MAGIC, len(data)], mx.int32))
        for rank, (magic, _) in enumerate(heads):
            if magic != MAGIC:
                raise ConfigError(
                    f"mlx-sparse-attention: expected this package on all ranks, got none on rank {rank}. Install it."
                )
        padded = np.zeros(max(1, int(heads[:, 1].max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = exchange(mx.array(padded))
        return [json.loads(row.tobytes()[:length]) for row, (_, length) in zip(rows, heads, strict=True)]


def connection_error(error: RuntimeError) -> str | None:
    """Return a one-line message if ``error`` is a connection error from MLX, or None for any other error."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"ranks: expected all ranks to run this command to the end, got: {text}." if LOST.match(text) else None


def _single_process() -> bool:
    """Return True if `mlx.launch` started only one process. In this case, the host file of `mlx.launch` is empty."""
    hosts = os.environ.get("MLX_HOSTFILE")
    try:
        return bool(hosts) and not Path(str(hosts)).read_text().strip()
    except OSError:
        return False


Facts = dict[str, tuple[str, str]]  # for each name: text that must be equal on all ranks, text for messages


def facts_of(args: argparse.Namespace, files: Iterable[str]) -> Facts:
    """Return a dict of the package versions, option values and file digests that must be equal on all ranks.

    Each value is a pair of a text to compare and a text for messages.

    Args:
        args: parsed arguments of the command.
        files: paths of the artefacts that the methods read.
    """
    versions = {"mlx-sparse-attention": __version__, **{name: version(name) for name in ("mlx", "mlx-lm")}}
    facts: Facts = {name: (found, found) for name, found in versions.items()}
    options = {name: value for name, value in vars(args).items() if name not in LOCAL and not name.startswith("_")}
    # Compare the options first that differ most often.
    for name in sorted(options, key=lambda name: (name != "model", not name.startswith("attn"), name)):
        facts[f"--{name.replace('_', '-')}"] = _fact(options[name], name in PATHS)
    for place, file in enumerate(files):
        facts["artefact" if place == 0 else f"artefact {place + 1}"] = _fact(file, True)
    return facts


def _fact(value: object, path: bool) -> tuple[str, str]:
    """Return a text for comparing ``value`` between ranks, and a text for messages.

    If ``path`` is True and ``value`` is the path of a file or a model folder, ranks compare the digest from `_digest`.
    """
    if value is None:
        return "none", "none"
    if isinstance(value, bool):
        return ("yes",) * 2 if value else ("no",) * 2
    text = str(value)
    if path and (digest := _digest(Path(text))) is not None:
        return digest, f"{text} ({digest[:8]})"
    if len(text) > SHORT or not text.isprintable():
        digest = hashlib.sha256(text.encode()).hexdigest()
        return digest, f"a text of {len(text):,} characters ({digest[:8]})"
    return text, text


def _digest(path: Path) -> str | None:
    """Return a digest of the file or model folder ``path``, or None if ``path`` is neither or cannot be read.

    For a model folder, hash the files in `DESCRIPTIONS`. If there is no weight index, also hash the weight file sizes.
    """
    found = hashlib.sha256()
    try:
        if path.is_file():
            return file_hash(path)
        described = [path / name for name in DESCRIPTIONS if (path / name).is_file()]
        for file_path in described:
            found.update(file_path.name.encode() + file_path.read_bytes())
        if described and not (path / DESCRIPTIONS[-1]).is_file():
            # If there is no index, the weights are in one file: compare its size. If there is an index, a machine may
            # have only a part of the weight files.
            found.update(str(sorted(file.stat().st_size for file in path.glob("*.safetensors"))).encode())
    except OSError:
        return None
    return found.hexdigest() if described else None


def difference(facts: list[Mapping[str, tuple[str, str]] | None], refused: list[bool]) -> str | None:
    """Return a message about the first fact that differs between ranks, or None if all facts are equal.

    Args:
        facts: for each rank, the result of `facts_of`; None if the rank could not parse its arguments.
        refused: for each rank, True if the rank has printed an error about its arguments.
    """
    known = {rank: own for rank, own in enumerate(facts) if own is not None}
    for name in dict.fromkeys(name for own in known.values() for name in own):
        values = {rank: own.get(name, ("", "none")) for rank, own in known.items()}
        if len({compared for compared, _ in values.values()}) > 1:
            shown: dict[str, list[int]] = {}
            for rank, (_, text) in values.items():
                shown.setdefault(text, []).append(rank)
            got = _joined([f"{text} on {_named(ranks)}" for text, ranks in shown.items()])
            return f"{name}: expected the same value on all ranks, got {got}."
    if any(refused):
        ranks = _named([rank for rank, wrong in enumerate(refused) if wrong])
        return f"arguments: expected valid arguments on all ranks, got an error on {ranks}."
    return None


def _named(ranks: list[int]) -> str:
    """Return ``ranks`` as text, for example "rank 0" or "ranks 0, 1 and 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {_joined([str(rank) for rank in ranks])}"


def _joined(parts: list[str]) -> str:
    """Return ``parts`` as text, for example "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
