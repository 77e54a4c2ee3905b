"""Tiny random models of mlx-lm's families: real code and real shapes, invented weights."""

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

from mlx_sparse.methods import SparQ, Step

VOCAB = 96
EOS = 0  # the model never says it: its row of the output matrix is zero

# What nearly all families are called with; mlx-lm's ModelArgs.from_dict takes what it knows.
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# Family: what differs from BASE. All of these attend through mlx-lm's function.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral3": {"text_config": {**BASE, "model_type": "llama"}},
    "ministral3": {
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**MIXTURE, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "gemma": {},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2},
    "phi3": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "internlm2": {},
    "olmo2": {},
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    "gpt_oss": {
        **MIXTURE,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "mixtral": MIXTURE,
}

# Multi-head latent attention: what is cached is not what is attended.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

# Families that no method here can serve.
UNSERVED: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "olmo": {"d_model": 64, "n_layers": 2, "mlp_hidden_size": 80, "n_heads": 4, "embedding_size": VOCAB},
    "phi3small": {
        "hidden_size": 128,
        "dense_attention_every_n_layers": 1,  # every layer is block-sparse
        "ff_intermediate_size": 80,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
    },
    "plamo2": {"num_hidden_layers": 2, "hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 8},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "deepseek_v2": {**LATENT, "rope_scaling": YARN},
    "deepseek_v3": {**LATENT, "rope_scaling": YARN, "n_group": 1, "topk_group": 1, "n_routed_experts": None},
    "glm4_moe_lite": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
}


# Served too, in part at least; for the tests of what SAAP sees of a model.
MORE: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"use_qk_norm": True, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "cohere2": {
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "layer_norm_bias": False,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
    },
    "nanochat": {},
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 4,
    },
    "starcoder2": {"norm_epsilon": 1e-5, "use_bias": False},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class EveryStepSparQ(SparQ):
    """SparQ that takes the sparse step even where it selects every key, to compare that step with dense attention."""

    def shortest_context(self, step: Step | None = None) -> int:
        return 0


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model."""
    own = (FAMILIES | UNSERVED | MORE).get(family, {})
    return {**BASE, **own, "model_type": family, **changes}


def build(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A tiny model of ``family`` whose tokens depend on what it attends to; the same one for the same seed."""
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
        return array + 0.3 * noise  # norms, sinks
    if array.ndim == 2 and array.shape[0] == VOCAB:  # embeddings and output matrix
        return mx.where(mx.arange(VOCAB)[:, None] == EOS, 0.0, noise)
    # Twice the scale that keeps the variance: peaked attention, and outputs that follow it.
    return 2.0 * noise / math.sqrt(array.shape[-1])


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """A prompt of random tokens."""
    return [int(t) for t in mx.random.randint(1, VOCAB, (length,), key=mx.random.key(seed)).tolist()]


def greedy(model: Any, prompt: list[int], steps: int, cache: list[Any] | None = None) -> tuple[list[int], mx.array]:
    """``steps`` greedy tokens, each from a step of one token after the prompt, and the logits of those steps."""
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
    """A tokenizer of `VOCAB` words, ``w1`` to ``w95``, apart by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<eos>": EOS, **{f"w{i}": i for i in range(1, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def words(prompt: list[int]) -> str:
    """The text of tokens."""
    return " ".join(f"w{token}" for token in prompt)


def write(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write an ordinary mlx-lm model directory; return ``path``."""
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
