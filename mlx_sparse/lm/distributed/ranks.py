"""The ranks of MLX's distributed runtime that run one command, and the check that their commands are the same."""

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

from ...checks import ConfigError

# Variables that launchers set: mlx.launch (ring, JACCL, NCCL), and Open MPI, the only MPI that MLX supports.
ENVIRONMENT = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE")
PACKAGES = ("mlx-sparse-attention", "mlx", "mlx-lm")
# Options that may differ between ranks.
LOCAL = frozenset({"allowed_origins", "host", "log_level", "output_dir", "port", "prompt_cache_file", "verbose"})
# Options that name a file or folder; the path may differ between machines, the contents may not.
PATHS = frozenset({"adapter_path", "attn_config", "chat_template", "draft_model", "model"})
# Files that identify the model in a folder.
DESCRIPTIONS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
SHORT = 60  # characters of a text that a message repeats
MAGIC = 0x5A11  # first number of every message, to detect other programs
LOST = re.compile(r"\[(ring|jaccl|mpi|nccl|distributed)\]")  # prefix of MLX's errors about connections


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of ranks that run the same command; rank 0 of 1 without a launcher."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Start MLX's runtime if there is a launcher. This waits until all ranks have started it.

        Raises:
            ConfigError: MLX cannot reach a rank.
        """
        if not any(name in os.environ for name in ENVIRONMENT) or _alone():
            return cls()
        import mlx.core as mx

        try:
            group = mx.distributed.init()
        except RuntimeError as error:
            raise ConfigError(f"ranks: expected all of them to start this command, got: {error}.") from None
        return cls(group.rank(), group.size())

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, plain data for JSON. All ranks call this.

        Raises:
            ConfigError: a rank runs another program, or has exited.
        """
        if self.size == 1:
            return [value]
        import mlx.core as mx
        import numpy as np

        def exchange(numbers: mx.array) -> Any:
            try:
                return np.array(mx.distributed.all_gather(numbers[None], stream=mx.cpu))
            except RuntimeError as error:
                raise ConfigError(lost(error) or str(error)) from None

        data = json.dumps(value).encode()
        heads = exchange(mx.array([MAGIC, len(data)], mx.int32))
        for rank, (magic, _) in enumerate(heads):
            if magic != MAGIC:
                raise ConfigError(
                    f"mlx-sparse-attention: expected it on all ranks, got none on rank {rank}. Install it on that rank."
                )
        padded = np.zeros(max(1, int(heads[:, 1].max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = exchange(mx.array(padded))
        return [json.loads(row.tobytes()[:length]) for row, (_, length) in zip(rows, heads, strict=True)]


def lost(error: RuntimeError) -> str | None:
    """Return a line about an error with which MLX reports a lost connection; None for other errors."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"ranks: expected all of them to run this command to its end, got: {text}." if LOST.match(text) else None


def _alone() -> bool:
    """Return True if `mlx.launch` started a single process: its file of addresses is empty then."""
    hosts = os.environ.get("MLX_HOSTFILE")
    try:
        return bool(hosts) and not Path(str(hosts)).read_text().strip()
    except OSError:
        return False


Facts = dict[str, tuple[str, str]]  # by name: the text that must be equal, and the text for messages


def facts_of(args: argparse.Namespace, files: Iterable[str]) -> Facts:
    """Return the facts that must be the same on all ranks: versions, options and contents of files.

    Args:
        args: arguments of the command.
        files: files that the methods read.
    """
    facts: Facts = {name: (version(name),) * 2 for name in PACKAGES}
    options = {name: value for name, value in vars(args).items() if name not in LOCAL and not name.startswith("_")}
    # The options that differ most often come first.
    for name in sorted(options, key=lambda name: (name != "model", not name.startswith("attn"), name)):
        facts[f"--{name.replace('_', '-')}"] = _fact(options[name], name in PATHS)
    for place, file in enumerate(files):
        facts["artefact" if place == 0 else f"artefact {place + 1}"] = _fact(file, True)
    return facts


def _fact(value: Any, path: bool) -> tuple[str, str]:
    """Return the text of an option's value for the comparison, and the text for messages."""
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
    """Return a digest of a file, or of the files that identify the model in a folder; None without either."""
    found = hashlib.sha256()
    try:
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    found.update(block)
            return found.hexdigest()
        described = [path / name for name in DESCRIPTIONS if (path / name).is_file()]
        for file_path in described:
            found.update(file_path.name.encode() + file_path.read_bytes())
        if described and not (path / DESCRIPTIONS[-1]).is_file():
            # Weights in one file have no index. With an index, a machine may have only a part of the files.
            found.update(str(sorted(file.stat().st_size for file in path.glob("*.safetensors"))).encode())
    except OSError:
        return None
    return found.hexdigest() if described else None


def difference(facts: list[Mapping[str, tuple[str, str]] | None], refused: list[bool]) -> str | None:
    """Return a line about the first fact that is not the same on all ranks, or None.

    Args:
        facts: facts by rank; None if the arguments could not be parsed.
        refused: by rank, True if the rank has printed an error about its arguments.
    """
    known = {rank: own for rank, own in enumerate(facts) if own is not None}
    for name in dict.fromkeys(name for own in known.values() for name in own):
        values = {rank: own.get(name, ("", "none")) for rank, own in known.items()}
        if len({compared for compared, _ in values.values()}) > 1:
            shown: dict[str, list[int]] = {}
            for rank, (_, text) in values.items():
                shown.setdefault(text, []).append(rank)
            got = _joined([f"{text} on {_named(ranks)}" for text, ranks in shown.items()])
            return f"{name}: expected the same on all ranks, got {got}."
    if any(refused):
        ranks = _named([rank for rank, wrong in enumerate(refused) if wrong])
        return f"arguments: expected the same on all ranks, got some that {ranks} refused."
    return None


def _named(ranks: list[int]) -> str:
    """Return the ranks as text: "rank 0" or "ranks 0, 1 and 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {_joined([str(rank) for rank in ranks])}"


def _joined(parts: list[str]) -> str:
    """Return a list as text: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
