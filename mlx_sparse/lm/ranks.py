"""The processes that run one model together on MLX's distributed runtime: who they are, and whether they agree."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checks import ConfigError

# One of these is set where a launcher started the process as one of several: MLX_RANK by mlx.launch for its ring, JACCL
# and NCCL backends, the other by Open MPI, the only MPI that MLX takes.
ENVIRONMENT = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE")
# Where rank 0 can be reached, as MLX is told: a file of the ring's addresses, JACCL's coordinator, NCCL's.
ADDRESSES = ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP")

PACKAGES = ("mlx-sparse-attention", "mlx", "mlx-lm")
# Options that may differ: they name what is on one machine, or are said by one rank.
LOCAL = frozenset({"allowed_origins", "host", "log_level", "output_dir", "port", "prompt_cache_file", "verbose"})
# Options whose value may be a file or a folder, which ranks may have in different places.
PATHS = frozenset({"adapter_path", "attn_config", "chat_template", "draft_model", "model"})
# What says which model a folder holds.
DESCRIPTIONS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
SHORT = 60  # characters of a text that a message repeats
MARK = 0x5A11  # begins what is gathered here: another program's numbers do not


@dataclass(frozen=True)
class Ranks:
    """This process and those that run the same command with it; rank 0 of 1 where it is alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """What the launcher says. MLX's runtime is started, which waits for the other processes, if there is one."""
        if not any(name in os.environ for name in ENVIRONMENT) or _alone():
            return cls()
        import mlx.core as mx

        group = mx.distributed.init()
        return cls(group.rank(), group.size())

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank; each of them has to call this.

        Raises:
            ConfigError: a rank called something else.
        """
        if self.size == 1:
            return [data]
        import mlx.core as mx
        import numpy as np

        def exchange(numbers: mx.array) -> Any:
            return np.array(mx.distributed.all_gather(numbers[None], stream=mx.cpu))

        heads = exchange(mx.array([MARK, len(data)], mx.int32))
        for rank, (mark, _) in enumerate(heads):
            if mark != MARK:
                raise ConfigError(
                    f"mlx-sparse-attention: expected it on all ranks, got none on rank {rank}. Install it there."
                )
        padded = np.zeros(max(1, int(heads[:, 1].max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = exchange(mx.array(padded))
        return [row.tobytes()[:length] for row, (_, length) in zip(rows, heads, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, plain data for JSON, by rank; each of them has to call this."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]


def _alone() -> bool:
    """Whether `mlx.launch` started a single process: the file of addresses that it then gives is empty."""
    hosts = os.environ.get("MLX_HOSTFILE")
    try:
        return bool(hosts) and not Path(str(hosts)).read_text().strip()
    except OSError:
        return False


def address_of_first() -> str | None:
    """The host name or address at which rank 0 can be reached, as far as MLX has been told."""
    for name in ADDRESSES:
        told = os.environ.get(name)
        if told and name == "MLX_HOSTFILE":
            try:
                told = json.loads(Path(told).read_text())[0][0]
            except (OSError, ValueError, LookupError, TypeError):
                continue
        if isinstance(told, str) and told:
            host, colon, port = told.rpartition(":")
            return host.strip("[]") if colon and port.isdigit() else told
    return None


Facts = dict[str, tuple[str, str]]  # by name: what has to be equal, and how it is shown


def facts_of(args: argparse.Namespace, files: Iterable[str]) -> Facts:
    """What has to be the same on all ranks.

    Args:
        args: of the command.
        files: that the methods read.
    """
    facts: Facts = {name: (version(name),) * 2 for name in PACKAGES}
    options = {name: value for name, value in vars(args).items() if name not in LOCAL and not name.startswith("_")}
    # What a person would have got wrong first.
    for name in sorted(options, key=lambda name: (name != "model", not name.startswith("attn"), name)):
        facts[f"--{name.replace('_', '-')}"] = _fact(options[name], name in PATHS)
    for place, file in enumerate(files):
        facts["artefact" if place == 0 else f"artefact {place + 1}"] = _fact(file, True)
    return facts


def _fact(value: Any, path: bool) -> tuple[str, str]:
    """What is compared of an option's value, and what is shown."""
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
    """A digest of a file, or of what describes the model in a folder; None if there is neither."""
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
            # Weights in one file, which nothing lists. Of several, a machine may hold its own part alone.
            found.update(str(sorted(file.stat().st_size for file in path.glob("*.safetensors"))).encode())
    except OSError:
        return None
    return found.hexdigest() if described else None


def difference(facts: list[Mapping[str, tuple[str, str]] | None], refused: list[bool]) -> str | None:
    """A line about the first thing that is not the same on all ranks; None if all is.

    Args:
        facts: by rank; None where arguments could not be read.
        refused: by rank, whether its arguments are wrong, about which it has said a line itself.
    """
    known = {rank: of_rank for rank, of_rank in enumerate(facts) if of_rank is not None}
    for name in dict.fromkeys(name for of_rank in known.values() for name in of_rank):
        values = {rank: of_rank.get(name, ("", "none")) for rank, of_rank in known.items()}
        if len({compared for compared, _ in values.values()}) > 1:
            shown: dict[str, list[int]] = {}
            for rank, (_, text) in values.items():
                shown.setdefault(text, []).append(rank)
            got = joined([f"{text} on {named(ranks)}" for text, ranks in shown.items()])
            return f"{name}: expected the same on all ranks, got {got}."
    if any(refused):
        ranks = named([rank for rank, wrong in enumerate(refused) if wrong])
        return f"arguments: expected the same on all ranks, got some that {ranks} refused."
    return None


def named(ranks: list[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {joined([str(rank) for rank in ranks])}"


def joined(parts: list[str]) -> str:
    """A list in words."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
