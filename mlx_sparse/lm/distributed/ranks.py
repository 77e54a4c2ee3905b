"""The ranks of MLX's distributed runtime that run one command together, and the check that they agree on it."""

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

# A launcher sets one of these: mlx.launch MLX_RANK for its ring, JACCL and NCCL backends, Open MPI (the only MPI that
# MLX takes) the other.
ENVIRONMENT = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE")
PACKAGES = ("mlx-sparse-attention", "mlx", "mlx-lm")
# Options that may differ between ranks.
LOCAL = frozenset({"allowed_origins", "host", "log_level", "output_dir", "port", "prompt_cache_file", "verbose"})
# Options that name a file or folder, which may lie elsewhere on another machine.
PATHS = frozenset({"adapter_path", "attn_config", "chat_template", "draft_model", "model"})
# Files that identify the model in a folder.
DESCRIPTIONS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
SHORT = 60  # characters of a text that a message repeats
MARK = 0x5A11  # begins every message: the numbers of another program do not
LOST = re.compile(r"\[(ring|jaccl|mpi|nccl|distributed)\]")  # begins MLX's errors about its connections


@dataclass(frozen=True)
class Ranks:
    """This process and those that run the same command with it; rank 0 of 1 without a launcher."""

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
            ConfigError: a rank runs something else, or has ended.
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
        heads = exchange(mx.array([MARK, len(data)], mx.int32))
        for rank, (mark, _) in enumerate(heads):
            if mark != MARK:
                raise ConfigError(
                    f"mlx-sparse-attention: expected it on all ranks, got none on rank {rank}. Install it there."
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


Facts = dict[str, tuple[str, str]]  # by name: the text that has to be equal, and the text that a message shows


def facts_of(args: argparse.Namespace, files: Iterable[str]) -> Facts:
    """Return what has to be the same on all ranks.

    Args:
        args: of the command.
        files: that the methods read.
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
    """Return the text that is compared for an option's value, and the text that a message shows."""
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
            # Weights in one file, which no index lists. Of several files a machine may have its own part alone.
            found.update(str(sorted(file.stat().st_size for file in path.glob("*.safetensors"))).encode())
    except OSError:
        return None
    return found.hexdigest() if described else None


def difference(facts: list[Mapping[str, tuple[str, str]] | None], refused: list[bool]) -> str | None:
    """Return a line about the first fact that is not the same on all ranks, or None.

    Args:
        facts: by rank; None where arguments could not be read.
        refused: by rank, whether its arguments are wrong. That rank has printed an error of its own.
    """
    known = {rank: of_rank for rank, of_rank in enumerate(facts) if of_rank is not None}
    for name in dict.fromkeys(name for of_rank in known.values() for name in of_rank):
        values = {rank: of_rank.get(name, ("", "none")) for rank, of_rank in known.items()}
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
    """Return ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {_joined([str(rank) for rank in ranks])}"


def _joined(parts: list[str]) -> str:
    """Return a list in words."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
