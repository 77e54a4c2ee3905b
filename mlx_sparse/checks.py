"""Define the error classes, and check the arguments of the public functions.

Every message reads ``<argument>: expected X, got Y. <what to do>``.
The checks read only ``.shape``, so they work for NumPy, MLX and torch arrays.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn, Protocol

BLOCK_SIZES = (32, 64, 128)  # block sizes for prefill that every backend supports
MAX_BUCKETS = 4096  # largest number of SAAP buckets whose scores fit into the buffers of the kernels

ECHO = 200  # longest word or quoted text in a message, in characters
LONGEST = 1000  # longest message, in characters
_WORD = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|\S+""")


def shortened(message: str) -> str:
    """Shorten ``message`` and its long words and quotations. Messages may quote hostile input."""
    message = _WORD.sub(lambda word: echoed(word[0]), message)
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"


def echoed(value: str) -> str:
    """Return ``value``, cut after `ECHO` characters."""
    return value if len(value) <= ECHO else f"{value[:ECHO]}..."


def reason_of(error: BaseException) -> str:
    """Return the message of another library's error in one line, with the advice at its end."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return " Did you mean X?" with the known name X that is most similar to ``name``, or an empty string."""
    close = difflib.get_close_matches(str(name)[:ECHO].lower(), [str(one) for one in known], n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that prints one-line errors, shortened with `shortened`, and no usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shortened(message)}\n")

    def add_model(self, about: str) -> None:
        """Add the model as a positional argument and as ``--model``. All commands accept both forms."""
        self.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="as --model")
        self.add_argument("--model", metavar="MODEL", help=about)


class SparseAttentionError(Exception):
    """Base class of this package's errors. The error message is shortened with `shortened`."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class ConfigError(SparseAttentionError, ValueError):
    """A parameter, a method name or a configuration file is invalid."""


class ShapeError(SparseAttentionError, ValueError):
    """An array has the wrong shape."""


class BackendUnavailable(SparseAttentionError, RuntimeError):
    """A backend cannot run on this machine or with the installed packages."""


class ArtefactError(SparseAttentionError, ValueError):
    """A file is damaged, has the wrong format, or was made for a different model."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention call: B sequences, Hq query heads, Hkv KV heads, L queries, S keys and head dim D.

    ``Dv`` is the head dim of the values, or 0 in a call without values.
    """

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    D: int
    Dv: int = 0

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv


class Shaped(Protocol):
    """Array of any library."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, at: slice, /) -> object: ...


def check_qkv(queries: Shaped, keys: Shaped, values: Shaped) -> Sizes:
    """Check that ``queries (B, Hq, L, D)``, ``keys (B, Hkv, S, D)`` and ``values (B, Hkv, S, Dv)`` are compatible.

    Return the sizes of the attention call.
    """
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if len(array.shape) != 4:
            raise ShapeError(f"{name}: expected 4 axes (B, heads, length, D), got shape {tuple(array.shape)}.")
    B, Hq, L, D = queries.shape
    Bk, Hkv, S, Dk = keys.shape
    Dv = values.shape[3]
    if tuple(values.shape[:3]) != tuple(keys.shape[:3]) or Dv < 1:
        raise ShapeError(
            f"values: expected the shape of keys {tuple(keys.shape)} but for D, got {tuple(values.shape)}."
        )
    if Bk != B or Dk != D:
        raise ShapeError(f"keys: expected (B={B}, Hkv, S, D={D}) to fit queries, got {tuple(keys.shape)}.")
    if min(B, Hkv, L, D) < 1 or Hq % Hkv:
        raise ShapeError(f"queries: expected a multiple of Hkv={Hkv} heads and no empty axis, got {(B, Hq, L, D)}.")
    if S < L:
        raise ShapeError(f"keys: expected at least L={L} keys, got S={S}. Keys include the current tokens.")
    return Sizes(B, Hq, Hkv, L, S, D, Dv)


def check_shape(name: str, array: Shaped | None, expected: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless ``array`` is None or has exactly the ``expected`` shape."""
    if array is not None and tuple(array.shape) != expected:
        raise ShapeError(f"{name}: expected shape {expected}, got {tuple(array.shape)}.")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an int of at least ``low`` and at most ``high``; raise `ConfigError` otherwise."""
    upper = "" if high is None else f" and at most {high}"
    # Integral includes NumPy's integers.
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        raise ConfigError(f"{name}: expected an integer of at least {low}{upper}, got {value!r}.")
    return number


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    # Compare types too: 1 == True in Python, but `reallocate=1` is an error.
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        listed = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
        raise ConfigError(f"{name}: expected one of {listed}, got {value!r}.{did_you_mean(value, choices)}")


def check_rank(rank: object, D: int) -> int:
    """Return ``rank`` if it is an int in 1..D; raise `ConfigError` otherwise."""
    value = check_int("rank", rank, 1)
    if value > D:
        raise ConfigError(f"rank: expected at most the head dim D={D}, got {value}.")
    return value


def check_local_window(local_window: object, top_k: int) -> int:
    """Return ``local_window`` (default: ``top_k // 4``) if it is an int in 0..top_k; raise `ConfigError` otherwise."""
    if local_window is None:
        return top_k // 4
    value = check_int("local_window", local_window, 0)
    if value > top_k:
        raise ConfigError(f"local_window: expected at most top_k={top_k}, which includes it, got {value}.")
    return value


def check_decode_step(sizes: Sizes, method: str) -> None:
    """Raise `ShapeError` unless there is exactly one query per sequence."""
    if sizes.L != 1:
        raise ShapeError(f"queries: expected one query per sequence for {method}, got L={sizes.L}.")


def check_share(name: str, value: object) -> float:
    """Return ``value`` if it is a number in (0, 1]; raise `ConfigError` otherwise."""
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < number <= 1:  # NaN too
        raise ConfigError(f"{name}: expected a number above 0 and at most 1, got {value!r}.")
    return float(number)


def check_block_size(block_size: object) -> None:
    """Raise `ConfigError` unless ``block_size`` is one of `BLOCK_SIZES`."""
    check_choice("block_size", block_size, BLOCK_SIZES)


def check_sample(alpha_column: object, alpha_slash: object, chunks: object, block_size: object) -> None:
    """Raise `ConfigError` unless the parameters of SampleAttention are valid."""
    check_share("alpha_column", alpha_column)
    check_share("alpha_slash", alpha_slash)
    check_int("chunks", chunks, 1)
    check_block_size(block_size)


def check_saap(sizes: Sizes, bucket_ids: Shaped, visited: Shaped, sink_tokens: object, recent_tokens: object) -> None:
    """Raise `ShapeError` or `ConfigError` unless the arrays and parameters of SAAP are valid."""
    check_shape("bucket_ids", bucket_ids, (sizes.B, sizes.Hkv, sizes.S))
    if len(visited.shape) != 3 or tuple(visited.shape[:2]) != (sizes.B, sizes.Hkv):
        raise ShapeError(f"visited: expected shape (B={sizes.B}, Hkv={sizes.Hkv}, n), got {tuple(visited.shape)}.")
    check_int("sink_tokens", sink_tokens, 0)
    check_int("recent_tokens", recent_tokens, 1)


def check_centroids(keys: Shaped, centroids: Shaped) -> None:
    """Raise `ShapeError` unless ``centroids`` has the shape ``(Hkv, C, D)`` that fits ``keys (B, Hkv, n, D)``."""
    kept = tuple(centroids.shape)
    if len(keys.shape) != 4 or len(kept) != 3 or kept[::2] != tuple(keys.shape[1::2]) or 0 in kept:
        raise ShapeError(
            f"centroids: expected (Hkv, C, D) to fit keys (B, Hkv, n, D) of shape {tuple(keys.shape)}, got {kept}."
        )


def check_router(
    queries: Shaped,
    out_weight: Shaped,
    out_bias: Shaped | None,
    hidden_weight: Shaped | None,
    hidden_bias: Shaped | None,
) -> int:
    """Check the shapes of SAAP's query router (saap.5) and return the number of buckets."""
    if len(queries.shape) != 4 or queries.shape[2] != 1 or 0 in queries.shape:
        raise ShapeError(f"queries: expected shape (B, Hq, 1, D), got {tuple(queries.shape)}.")
    Hq, D = queries.shape[1], queries.shape[3]
    if len(out_weight.shape) != 3 or 0 in out_weight.shape or Hq % out_weight.shape[0]:
        raise ShapeError(
            f"out_weight: expected (Hkv, rows, C) with Hkv a divisor of Hq={Hq}, got {tuple(out_weight.shape)}."
        )
    Hkv, hidden, C = out_weight.shape
    check_shape("hidden_weight", hidden_weight, (Hkv, D, hidden))
    if hidden_weight is None:
        check_shape("out_weight", out_weight, (Hkv, D, C))
        if hidden_bias is not None:
            raise ConfigError("hidden_bias: expected none without hidden_weight, got one.")
    check_shape("hidden_bias", hidden_bias, (Hkv, hidden))
    check_shape("out_bias", out_bias, (Hkv, C))
    return int(C)


def read_length(text: str, name: str = "--lengths") -> int:
    """Parse a number of keys such as ``4096`` or ``4k``."""
    number, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{name}: expected numbers such as 1k,2k,3000, got {text!r}.")
    return int(number) * factor


def read_shape(text: str) -> tuple[int, int, int]:
    """Parse the number of query heads, the number of KV heads and the head dim from a text such as ``32x8x128``."""
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ConfigError(f"--shapes: expected query heads x KV heads x head dim such as 32x8x128, got {text!r}.")
    return sizes
