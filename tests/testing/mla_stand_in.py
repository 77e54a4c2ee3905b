"""Convert SmolLM2-135M-Instruct to multi-head latent attention (MLA), without training.

    python tests/testing/mla_stand_in.py FOLDER [SEED]

FOLDER gets a model of mlx-lm's class `deepseek_v3`. As in TransMLA (arXiv 2502.07864), a map mixes the KV heads of each
RoPE frequency, and only some of its outputs, the slots, keep RoPE. This map is unitary over complex numbers, which
commutes with RoPE. The latents contain the other slots and the values, in the basis of their principal components or,
with SEED, in a random basis. Dense attention does not depend on this basis.

mlx-lm applies an RMSNorm to the latents. A large constant component, which the norm removes, makes it nearly linear.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.utils import load

from mlx_sparse import blas
from mlx_sparse.files import cache_directory
from mlx_sparse.tools.assets.smollm2 import prepare_model, write_model
from mlx_sparse.tools.evaluate import texts

Array = np.ndarray
ROPE_DIMS = 64
LONGEST = 4096  # tokens: longest distance for the mean rotation of a slot without RoPE
CONSTANT = 30  # size of the constant component, relative to the root mean square norm of the latents


def input_moments(model: Any, tokens: list[int]) -> list[Array]:
    """Return the second moments ``(hidden, hidden)`` of the normed attention inputs of each layer."""
    hidden, found = model.model.embed_tokens(mx.array(tokens)[None]), []
    for layer in model.model.layers:
        rows = layer.input_layernorm(hidden)[0]
        found.append(np.array(rows.T @ rows, float) / len(tokens))
        hidden = layer(hidden, "causal", None)
    return found


class Slots:
    """Complex slots ``(frequency, mixed KV head)`` of one layer. A slot is a pair of components that RoPE rotates.

    Attributes:
        queries: complex ``(Hq, F, Hkv, hidden)`` weights.
        keys: complex ``(F, Hkv, hidden)`` weights.
        energy: ``(F, Hkv)`` energy of the keys, weighted by the energy of the queries.
    """

    def __init__(self, attention: Any, moments: Array) -> None:
        H, Hkv = attention.n_heads, attention.n_kv_heads
        group = np.arange(H) // (H // Hkv)
        q, k = (_complex(proj, n) for proj, n in ((attention.q_proj, H), (attention.k_proj, Hkv)))
        asked = _energy(q, moments)
        weight = np.sqrt([asked[group == g].sum(axis=0) for g in range(Hkv)])  # (Hkv, F)
        weighted = (k * weight[..., None]).swapaxes(0, 1)
        energy, mix = np.linalg.eigh(weighted @ moments @ weighted.conj().swapaxes(1, 2))
        mix = mix.conj().swapaxes(1, 2)  # rows are mixed heads
        self.keys, self.energy = mix @ weighted, energy
        scaled = q / weight[group][..., None]
        self.queries = np.stack([mix[:, :, g, None] * scaled[h, :, None] for h, g in enumerate(group)])


def _complex(projection: nn.Linear, heads: int) -> Array:
    """Return weights ``(heads, F, hidden)``, which have the two components of each RoPE frequency as one number."""
    weight = np.array(projection.weight, float).reshape(heads, 2, -1, projection.weight.shape[1])
    return weight[:, 0] + 1j * weight[:, 1]


def _energy(weight: Array, moments: Array) -> Array:
    """Return the mean square of each output ``(...)`` of ``weight (..., hidden)``."""
    return (weight @ moments * weight.conj()).real.sum(axis=-1)


def _halves(slots: Array) -> Array:
    """Return real weights: the real parts of all slots, then the imaginary parts."""
    return np.concatenate([slots.real, slots.imag], axis=-2)


def convert(model: Any, tokens: list[int], rotate: int | None = None) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the config and the weights of the converted model. ``tokens`` are a text to measure moments."""
    args = model.args
    moments = input_moments(model, tokens)
    layers = [Slots(layer.self_attn, moment) for layer, moment in zip(model.model.layers, moments, strict=True)]
    F, Hkv = layers[0].energy.shape
    frequency = np.repeat(args.rope_theta ** (-np.arange(F) / F), Hkv)
    distances = np.exp(np.linspace(0, math.log(LONGEST), 2000))
    mean_rotation = np.exp(1j * frequency[:, None] * distances).mean(axis=1)
    # A slot without RoPE has the mean rotation. All layers keep RoPE for the same slots, those with the largest loss.
    loss = sum(layer.energy.ravel() / layer.energy.sum() for layer in layers) * (1 - abs(mean_rotation) ** 2)
    roped = np.zeros(F * Hkv, bool)
    roped[np.argsort(-loss)[: ROPE_DIMS // 2]] = True
    weights = {
        name: np.array(value) for name, value in nn.utils.tree_flatten(model.parameters()) if ".self_attn." not in name
    }
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    basis = np.random.default_rng(rotate)
    for index, (layer, slots, moment) in enumerate(zip(model.model.layers, layers, moments, strict=True)):
        made = _attention(layer.self_attn, slots, moment, roped, mean_rotation, None if rotate is None else basis)
        weights |= {f"model.layers.{index}.self_attn.{name}": value for name, value in made.items()}
    H, rank, nope = weights["model.layers.0.self_attn.embed_q.weight"].shape
    period = 1 / frequency[roped] / args.rope_theta ** (np.arange(0, ROPE_DIMS, 2) / ROPE_DIMS)
    longest = args.max_position_embeddings
    rope: dict[str, Any] = {"type": "longrope", "original_max_position_embeddings": longest}
    rope |= dict.fromkeys(("short_factor", "long_factor"), period.tolist())
    names = "vocab_size hidden_size intermediate_size num_hidden_layers rms_norm_eps rope_theta max_position_embeddings"
    config = {name: getattr(args, name) for name in names.split()} | {
        **{"model_type": "deepseek_v3", "num_attention_heads": H, "num_key_value_heads": H, "attention_bias": True},
        **{"kv_lora_rank": rank, "q_lora_rank": None, "qk_rope_head_dim": ROPE_DIMS, "qk_nope_head_dim": nope},
        **{"v_head_dim": args.head_dim, "rope_scaling": rope},
        **{"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    }
    return config, weights


def _attention(
    attention: Any, slots: Slots, moments: Array, roped: Array, mean_rotation: Array, basis: np.random.Generator | None
) -> dict[str, Array]:
    """Return the weights of one converted attention module."""
    H, Hkv, hidden = attention.n_heads, attention.n_kv_heads, moments.shape[0]
    q, k = slots.queries.reshape(H, -1, hidden), slots.keys.reshape(-1, hidden)
    q_nope, k_nope = _halves(q[:, ~roped] * mean_rotation[~roped, None]), _halves(k[~roped])
    values = np.array(attention.v_proj.weight, float)
    energy = [_energy(rows, moments).sum() for rows in (k_nope, values)]
    balance = math.sqrt(energy[1] / energy[0])
    rows, n, D = np.concatenate([k_nope * balance, values]), len(k_nope), len(values) // Hkv
    axes = np.linalg.eigh(rows @ moments @ rows.T)[1][:, ::-1]
    if basis is not None:
        axes = axes @ np.linalg.qr(basis.standard_normal(axes.shape))[0]
    used = len(rows)
    rank = -(-(used + 1) // 32) * 32
    constant = CONSTANT * math.sqrt(2 * energy[1])
    bias, norm = np.zeros(rank + ROPE_DIMS), np.zeros(rank)
    bias[used], norm[:used] = constant, constant / math.sqrt(rank)
    latent, embed, unembed = np.zeros((rank, hidden)), np.zeros((H, rank, n)), np.zeros((H, D, rank))
    latent[:used], embed[:, :used] = axes.T @ rows, axes[:n].T / balance
    unembed[..., :used] = np.repeat(axes[n:].reshape(Hkv, D, used), H // Hkv, axis=0)
    rescaled = np.concatenate([q_nope, _halves(q[:, roped])], axis=1) * math.sqrt((n + ROPE_DIMS) / D)
    return {
        "q_proj.weight": rescaled.reshape(-1, hidden),
        "kv_a_proj_with_mqa.weight": np.concatenate([latent, _halves(k[roped])]),
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "embed_q.weight": embed,
        "unembed_out.weight": unembed,
        "o_proj.weight": np.array(attention.o_proj.weight),
        "o_proj.bias": np.zeros(hidden),
    }


def write(folder: Path, rotate: int | None = None, source: Path | None = None) -> Path:
    """Write the converted model to ``folder``. ``source`` is the folder of the model that is converted."""
    source = source or prepare_model()
    model, tokenizer, *_ = load(str(source))
    tokens = tokenizer.encode(texts.read(None)[0].text[:10_000])[:1024]
    config, weights = convert(model, tokens, rotate)
    folder.mkdir(parents=True)
    write_model(folder, config, {name: mx.array(value, mx.float32) for name, value in weights.items()})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder


if __name__ == "__main__":
    blas.load(cache_directory())
    print(write(Path(sys.argv[1]), *map(int, sys.argv[2:])))
