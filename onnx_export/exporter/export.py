"""Export an mlx-lm model to a folder for ONNX Runtime. Check the model, write the files, and verify the logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import onnx
from mlx.utils import tree_flatten
from mlx_lm import utils
from tqdm import tqdm

import mlx_sparse
from mlx_sparse.checks import ConfigError, check_choice, check_int, did_you_mean, reason_of
from mlx_sparse.core.base import Dense, Method
from mlx_sparse.files import new_folder
from mlx_sparse.methods import Sample, load_toml, parse

from .. import build
from ..compose import inline as inlined
from ..defaults import FOR_ALL, SAMPLE_CHUNK, lanes_for
from ..domain import COMPAT, DEFAULT, DOMAIN, SPEC
from ..runtime import native as kernels
from ..runtime.genai import eos_tokens, write_config
from .compare import Agreement, compare
from .decoder import Decoder, Target
from .families import Family, check_modules, family_of
from .graph import DataFile, Graph
from .methods import DECODE, sample
from .reference import reference
from .weights import QUANTIZED

if TYPE_CHECKING:
    from mlx import nn

_NAMES = [kind.name for kind in DECODE]
EXPORTED = [*_NAMES, Sample.name, *(f"{Sample.name}+{name}" for name in _NAMES if name != Dense.name)]
MOST = 2**31 - 1  # largest number of tokens
MAX_LENGTH = 16_384  # default of --max-length if the model allows it
# Tokenizer files, which are copied if the model has them.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Exported:
    """Result of `export`.

    Attributes:
        method: the method and its settings as text, with every "auto" resolved.
        sparse_from: number of keys at and above which decode steps are sparse; None if all decode steps are dense.
    """

    folder: Path
    method: str
    max_length: int
    nbytes: int
    agreement: Agreement
    sparse_from: int | None


def export(
    model: str,
    out: str | Path,
    *,
    method: str = "sparq",
    attn_config: str | Path | None = None,
    max_length: int | None = None,
    dtype: str | None = None,
    compat: bool = False,
    inline: bool = False,
    native: bool = False,
    genai: bool = True,
) -> Exported:
    """Export a model to the folder ``out``. Write model.onnx, its data, the tokenizer and genai_config.json.

    Args:
        model: a folder or a Hugging Face repository that mlx-lm loads.
        out: a folder that does not exist or is empty. All files are verified before they appear in this folder.
        method: one of `EXPORTED` with optional settings, such as "sparq:rank=16". The default of ``dense_below`` comes
            from the cost model in `defaults`, which does not depend on the machine.
        attn_config: TOML file with a table for each method, such as [sparq]; ``method`` overrides it.
        max_length: maximum number of tokens in a sequence. The default is the limit of the model, at most `MAX_LENGTH`.
        dtype: type of caches and unquantized weights: float32, float16 or bfloat16. The default is the type of the
            model. If you set float32, quantized weights are dequantized.
        compat: write opset 18 and IR 8 instead of opset 24 and IR 11.
        inline: replace the operators with their function bodies, for runtimes that do not support local functions.
        native: the file will run with the native kernels only. Its settings are then those of ``--attn``, with int4
            scoring keys, and its decode steps are sparse from shorter contexts on.
        genai: write genai_config.json, unless ``inline`` is set.

    Raises:
        ConfigError: an argument is invalid, or the model cannot be exported.
        ArtefactError: the weights are corrupt, or the logits of the exported file differ too much from MLX's.
        BackendUnavailable: the file needs native kernels for its verification, and this machine has none.
        OSError: ``out`` cannot be written.
    """
    prompts, config = methods_of(method, attn_config, native=native)
    _check_native(config, native=native, inline=inline)
    if dtype is not None:
        check_choice("--dtype", dtype, tuple(build.TYPES))
    if max_length is not None:
        check_int("--max-length", max_length, 1, MOST)
    folder = Path(out)
    _check_free(folder)
    loaded, source, settings = load(model)
    family = family_of(settings)
    check_modules(loaded, dequantize=dtype == "float32")
    length = length_of(settings, max_length)
    decode = DECODE[type(config)].resolve(config.at(0), loaded, native=native)
    target = Target(
        decode,
        max_length=length,
        lanes=lanes_for(length),
        dtype=dtype or weight_dtype(loaded),
        dequantize=dtype == "float32",
        genai=genai and not inline,
        prompts=prompts and sample.resolve(prompts, length),
    )

    def lower(proto: onnx.ModelProto) -> onnx.ModelProto:
        return inlined(proto) if inline else proto

    with new_folder(folder) as made:
        proto = _write(made, loaded, family, target, settings, compat=compat)
        onnx.save(lower(proto), made / "model.onnx")
        nbytes = sum(file.stat().st_size for file in made.iterdir())
        _copy_tokenizer(source, made)
        if target.genai:
            write_config(made, settings)
        with tqdm(total=2, desc="check", unit="runtime", disable=None) as bar:
            expected = reference(loaded, target)
            del loaded  # onnxruntime loads its own copy of the weights
            mx.clear_cache()
            bar.update()
            agreement = compare(proto, made, expected, target, lower)
            bar.update()
    return Exported(folder, target.text, length, nbytes, agreement, target.decode.sparse_from)


def _check_free(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"-o: expected a folder that is empty or does not exist, got {folder}. Nothing was written.")
    if folder.is_mount() or folder.samefile(Path.cwd()):
        raise ConfigError(
            f"-o: expected a folder that can be replaced, got a mount point or the current folder: {folder}. "
            "Name a new folder inside it."
        )


def _check_native(config: Method, *, native: bool, inline: bool) -> None:
    """Check that the options and this machine allow int4 scoring keys, which only the native kernels support."""
    key_bits = getattr(config, "key_bits", 16)
    if key_bits == 16:
        return
    if inline:
        raise ConfigError(f"key_bits: expected 16 with --inline, got {key_bits}, which only the native kernels run.")
    if not native:
        raise ConfigError(
            f"key_bits: expected 16 for a file that every runtime runs, got {key_bits}. Add --native if you "
            "will run the file with the native kernels of this package."
        )
    kernels.library_path()


def methods_of(text: str, attn_config: str | Path | None, *, native: bool) -> tuple[Sample | None, Method]:
    """Parse ``--method`` (``text``) and ``--attn-config`` into the prefill method (or None) and the decode method."""
    defaults = {} if native else FOR_ALL
    base = {**defaults, **(load_toml(attn_config, defaults) if attn_config is not None else {})}
    names = [part.partition(":")[0].strip() for part in text.split("+")]
    if set(names) not in [set(known.split("+")) for known in EXPORTED]:
        known = f"{', '.join(EXPORTED[:-1])} or {EXPORTED[-1]}, with [:key=value,...]"
        raise ConfigError(f"--method: expected {known}, got {text!r}.{did_you_mean(names[-1], EXPORTED)}")
    configs = {config.name: config for config in parse(text, base)}
    prompts = cast("Sample | None", configs.pop(Sample.name, None))
    return prompts, next(iter(configs.values()), Dense())


def load(model: str) -> tuple[nn.Module, Path, Mapping[str, object]]:
    """Load a model with lazy weights. Return mlx-lm's model, its folder, and its config.json with all `end_tokens`."""
    try:
        source = utils._download(model)
        settings = utils.load_config(source)
        family_of(settings)
        loaded, settings = utils.load_model(source, lazy=True)
        loaded(mx.array([[0, 0]]))  # lazy, so this call checks shapes without any computation
        _check_tokens(settings)
        ends = end_tokens(source, settings)
    except ConfigError:
        raise
    except Exception as error:  # mlx-lm, huggingface_hub and MLX raise many types
        raise ConfigError(
            f"--model: expected a model that mlx-lm can load, got {model} ({reason_of(error)})."
        ) from None
    return loaded, source, {**settings, "eos_token_id": ends}


def end_tokens(source: Path, settings: Mapping[str, object]) -> list[int]:
    """Return the token ids at which mlx-lm ends a text.

    They come from ``settings``, in which mlx-lm combines config.json and generation_config.json, and from the tokenizer
    in the folder ``source``, if there is one.
    """
    ends = eos_tokens(settings)
    if any((source / name).is_file() for name in TOKENIZER if name != "generation_config.json"):
        found = utils.load_tokenizer(source, eos_token_ids=ends or None).eos_token_ids
        ends = [token for token in found if token is not None]  # mlx-lm 0.31 lists None for a tokenizer without one
    return sorted(ends)


def _check_tokens(settings: Mapping[str, object]) -> None:
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = settings.get(key)
        ids = value if isinstance(value, list) and key.startswith("eos") else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise ConfigError(f"--model: expected {key} to be a token id, got {shorten(repr(value), 80)}.")


def length_of(settings: Mapping[str, object], requested: int | None) -> int:
    """Return the maximum number of tokens. If ``requested`` is None, return the default for a model's ``settings``."""
    limit = settings.get("max_position_embeddings")
    limit = limit if isinstance(limit, int) and limit > 0 else None
    if requested is None:
        return min(limit or MAX_LENGTH, MAX_LENGTH)
    if limit is not None and requested > limit:
        raise ConfigError(
            f"--max-length: expected at most max_position_embeddings={limit} of the model, got {requested}."
        )
    return requested


def weight_dtype(model: nn.Module) -> str:
    """Return the dtype name of the embedding weights, or of their scales if the weights are quantized."""
    embedding = model.model.embed_tokens
    dtype = (embedding.scales if isinstance(embedding, QUANTIZED) else embedding.weight).dtype
    name = str(dtype).removeprefix("mlx.core.")
    if name not in build.TYPES:
        raise ConfigError(f"--model: expected weights of type {', '.join(build.TYPES)}, got {name}. Set --dtype.")
    return name


def _write(
    folder: Path, model: nn.Module, family: Family, target: Target, settings: Mapping[str, object], *, compat: bool
) -> onnx.ModelProto:
    """Write the external data file of model.onnx to ``folder`` and return the model."""
    left = set(dict(tree_flatten(model.parameters())))
    with DataFile(folder) as data, tqdm(total=len(left), desc="weights", unit="tensor", disable=None) as bar:

        def written(name: str) -> None:
            left.discard(name)
            bar.update()

        graph = Graph(data)
        Decoder(model, family, target, graph, written).add()
    if left:
        raise ConfigError(f"--model: expected only weights that the exporter supports, got {min(left)}.")
    return graph.model(COMPAT if compat else DEFAULT, metadata(target, settings))


def metadata(target: Target, settings: Mapping[str, object]) -> dict[str, str]:
    """Return a dict with the metadata of model.onnx, such as the method, the maximum length and the versions."""
    metadata = {
        "spec": SPEC,
        "version": mlx_sparse.__version__,
        "method": target.text,
        "model_type": settings["model_type"],
        "max_length": target.max_length,
        "dtype": target.dtype,
        "eos_token_ids": json.dumps(eos_tokens(settings)),
    }
    if target.prompts is not None:
        metadata["prefill_chunk"] = SAMPLE_CHUNK
    return {f"{DOMAIN}.{key}": str(value) for key, value in metadata.items()}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
