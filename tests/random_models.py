"""Random choices of a history: a tiny model, the text of a method, numbers and tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import FAMILIES, VOCAB, build

# Families and what their models may be built with; with a window of 16 a cache soon cannot be trimmed any more.
WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": ["sliding_attention", "full_attention"] * 2},  # as Mistral's
    "gemma3_text": {"sliding_window_pattern": 2},
    "gpt_oss": {},
    "cohere2": {"num_hidden_layers": 4},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
}
PLAIN = [*(family for family in FAMILIES if family not in WINDOWED), "llama", "cohere2", "starcoder2", "nemotron"]
PREFILL = ("sample", "minference", "bigbird", "streaming_prefill")
DECODE = ("sparq", "sparq", "online", "online", "trained", "kmeans", "h2o", "streaming", "oracle_top_k", "flexgen")


class Draw:
    """Random choices of one history."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def tokens(self, rows: int, count: int) -> Any:
        return self.rng.integers(1, VOCAB, (rows, count))

    def model(self) -> tuple[str, Any]:
        seed = self.number(0, 9)
        heads = {"num_key_value_heads": self.one([1, 2, 4])}
        if self.number(0, 1):
            family = self.one(list(WINDOWED))
            window = {"sliding_window": self.one([16, 400]), "num_hidden_layers": 4, **WINDOWED[family]}
            if family == "gpt_oss":
                window["num_hidden_layers"] = 2
            return f"{family} with windows", build(family, seed, **heads, **window)
        family = self.one(PLAIN)
        nested = family in ("mistral3", "internlm2")  # their heads are elsewhere, or fixed
        return family, build(family, seed, **({} if nested else heads))

    def attn(self, artefact: Callable[[], Path]) -> str:
        """The text of a method for prompts, one for steps, or both."""
        kind = self.number(0, 9)
        parts = [self._prefill()] if kind < 4 else []
        if kind > 0:
            parts.append(self._decode(artefact, beside=bool(parts)))
        return "+".join(parts)

    def _prefill(self) -> str:
        name = self.one(PREFILL)
        text = f"{name}:block_size={self.one([32, 64])}"
        if name == "sample":
            alphas = [self.one([0.3, 0.6, 0.9]) for _ in range(2)]
            above = self.one(["", ",dense_above=0.9"])
            text += f",alpha_column={alphas[0]},alpha_slash={alphas[1]},chunks={self.number(1, 3)},dense_below=0{above}"
        elif name == "minference":
            text += f",vertical_tokens={self.number(1, 80)},slash_tokens={self.number(1, 80)}"
        elif name != "bigbird":
            text += f",window={self.one([0.02, 0.2])}"
        return text

    def _decode(self, artefact: Callable[[], Path], *, beside: bool) -> str:
        name = self.one([name for name in DECODE if not (beside and name == "h2o")])
        top_k = self.one([2, 8, 31])
        window = self.one(["", f",local_window={self.number(0, top_k)}"])
        reduced = f",group_reduce={self.one(['softmax', 'logits'])}"
        if name == "sparq":
            score, mix = self.one(["query", "query_key"]), self.one(["auto", "true", "false"])
            rank = f"rank={self.one([1, 4, 12, 16])},component_score={score},reallocate={mix},dense_below=0"
            return f"sparq:{rank},top_k={top_k}{reduced}{window}"
        if name in ("online", "trained", "kmeans"):
            exact = f"sink_tokens={self.number(0, 3)},recent_tokens={self.number(1, 20)},dense_below=0"
            folds = f"fold_every={self.one([1, 2, 7, 64])},dense_layers={self.number(0, 1)},probes={self.number(1, 8)}"
            who = "buckets=8" if name == "online" else f"artefact={artefact()}"
            return f"saap:mode={name},{who},{exact},{folds}"
        if name == "streaming":
            return f"streaming:sink_tokens={self.number(0, 4)},recent_tokens={self.number(1, 20)}"
        if name == "flexgen":
            return f"flexgen:top_k={top_k}"
        return f"{name}:top_k={top_k}{window}{reduced if name == 'oracle_top_k' else ''}"
