"""Build tiny models of mlx-lm's model families with random weights."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_sparse.core.base import Step
from mlx_sparse.methods import SparQ

VOCAB = 96
EOS = 0  # never generated, because its row of the output matrix is zero

# "base" has the fields that almost all families share. The other tables have the differing fields of each family.
# "families" call mlx-lm's attention function. No method supports "unserved", and methods support some layers of "more".
# `ModelArgs.from_dict` of mlx-lm ignores unknown fields.
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BASE, FAMILIES, UNSERVED, MORE = (CONFIGS[name] for name in ("base", "families", "unserved", "more"))


@dataclass(frozen=True)
class EveryStepSparQ(SparQ):
    """SparQ that stays sparse even if all keys are selected, so that tests can compare it with dense attention."""

    def shortest_context(self, step: Step | None = None) -> int:
        return 0


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model of ``family``. ``changes`` override its entries."""
    own = (FAMILIES | UNSERVED | MORE).get(family, {})
    return {**BASE, **own, "model_type": family, **changes}


def build(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Build a tiny model of ``family`` whose tokens depend on attention. Equal seeds give equal models."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config_of(family, **changes)))
    key = mx.random.key(seed)
    weights = []
    for name, array in tree_flatten(model.parameters()):
        key, subkey = mx.random.split(key)
        weights.append((name, _weight(name, array, subkey)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weight(name: str, array: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    noise = mx.random.normal(array.shape, key=key)
    if "A_log" in name or name.endswith("dt_bias"):
        return array
    if name.endswith("bias"):
        return 0.3 * noise
    if array.ndim == 1:
        return array + 0.3 * noise  # weights of norms, and attention sinks
    if array.ndim == 2 and array.shape[0] == VOCAB:  # embeddings and the output matrix
        return mx.where(mx.arange(VOCAB)[:, None] == EOS, 0.0, noise)
    # Twice the variance-preserving scale makes attention peaked, so that the output depends on attention.
    return 2.0 * noise / math.sqrt(array.shape[-1])


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Return a prompt of random tokens."""
    return [int(t) for t in mx.random.randint(1, VOCAB, (length,), key=mx.random.key(seed)).tolist()]


def greedy(model: Any, prompt: list[int], steps: int, cache: list[Any] | None = None) -> tuple[list[int], mx.array]:
    """Decode greedily in ``steps`` calls after the prefill. Return the tokens and the logits of these calls."""
    cache = make_prompt_cache(model) if cache is None else cache
    logits = model(mx.array([prompt]), cache=cache)[:, -1]
    tokens, seen = [], []
    for _ in range(steps):
        logits = model(mx.argmax(logits, axis=-1)[:, None], cache=cache)[:, -1]
        mx.eval(logits)
        tokens.append(int(mx.argmax(logits, axis=-1).item()))
        seen.append(logits)
    return tokens, mx.concatenate(seen)


def tokenizer_json() -> Any:
    """Return a tokenizer whose tokens are the words ``w1`` to ``w95``, separated by spaces. Token 0 is EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<eos>": EOS, **{f"w{i}": i for i in range(1, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def words(prompt: list[int]) -> str:
    """Decode a list of tokens to text."""
    return " ".join(f"w{token}" for token in prompt)


def write(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model as an mlx-lm model folder. Return ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(family, eos_token_id=EOS, **changes)
    (path / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build(family, seed, **changes).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer_json().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "model_max_length": 4096,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
