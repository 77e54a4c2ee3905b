"""Write ``genai_config.json``, the configuration of an exported model for onnxruntime-genai."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from mlx_sparse.checks import ArtefactError
from mlx_sparse.files import replace_file

from ..defaults import PREFILL_CHUNK
from ..operators import RECURRENT

CONFIG = "genai_config.json"


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write genai_config.json into the folder of an exported model.onnx.

    Args:
        config: content of the model's config.json, with all end-of-sequence tokens as ``eos_token_id``. Only
            ``eos_token_id``, ``bos_token_id``, ``pad_token_id`` and the network sizes are used.
    """
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    graph, metadata = proto.graph, {entry.key: entry.value for entry in proto.metadata_props}
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in graph.input}
    vocabulary = graph.output[0].type.tensor_type.shape.dim[2].dim_value
    caches = [name for name in shapes if name.startswith("past_key_values.") and name.endswith(".key")]
    if not caches:
        raise ArtefactError(f"model: expected caches named past_key_values.0.key and so on, got none in {folder}.")
    _, kv_heads, capacity, head_dim = shapes[caches[0]]
    length = int(metadata.get("mlx_sparse.max_length", capacity))
    heads = config.get("num_attention_heads", kv_heads)
    layers = config.get("num_hidden_layers", len(caches))
    inputs = {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    outputs = {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    states = [state for state in (*RECURRENT, "conv") if any(name.startswith(f"past_{state}.") for name in shapes)]
    # genai supports two states per layer in addition to keys and values, with these names.
    for role, state in zip(("recurrent", "conv"), states, strict=False):
        inputs[f"past_{role}_names"] = f"past_{state}.%d"
        outputs[f"present_{role}_names"] = f"present_{state}.%d"
    ends = eos_tokens(config)
    pad = config.get("pad_token_id")
    bos = config.get("bos_token_id")
    model = {
        "type": "decoder",  # genai's generic type, because the graph contains all properties of the model
        "vocab_size": vocabulary,
        "context_length": length,  # genai refuses longer texts
        "eos_token_id": ends,
        "pad_token_id": int(pad if pad is not None else ends[0] if ends else 0),
        **({} if bos is None else {"bos_token_id": int(bos)}),
        "decoder": {
            "filename": "model.onnx",
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_size": head_dim,
            "hidden_size": config.get("hidden_size", heads * head_dim),
            "inputs": inputs,
            "outputs": outputs,
        },
    }
    # Prefill in chunks limits the memory of a call.
    chunk = int(metadata.get("mlx_sparse.prefill_chunk", PREFILL_CHUNK))
    search = {"do_sample": False, "max_length": length, "past_present_share_buffer": True, "chunk_size": chunk}
    _write(folder, {"model": model, "search": search})


def eos_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the end-of-sequence token ids of ``config``, or an empty list if ``eos_token_id`` is missing or null."""
    eos = config.get("eos_token_id")
    return [int(token) for token in (eos if isinstance(eos, list) else [] if eos is None else [eos])]


def add_native_library(folder: Path | str) -> Path:
    """Copy the library of native kernels into an exported folder and register it in genai_config.json.

    onnxruntime-genai loads libraries only from the folder of the model. The exported model then runs only on
    machines with the same operating system and processor type.

    Returns:
        The path of the copy.

    Raises:
        BackendUnavailable: the kernels were not built.
        ArtefactError: the folder has no genai_config.json.
    """
    from . import native

    folder, source = Path(folder), native.library_path()
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        options = found["model"]["decoder"]["session_options"]
        options["custom_ops_library"] = source.name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ArtefactError(f"folder: expected a folder from export-onnx with {CONFIG}, got {folder}.") from None
    copy = folder / source.name
    replace_file(copy, lambda new: shutil.copyfile(source, new))
    _write(folder, found)
    return copy


def _write(folder: Path, content: Mapping[str, object]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    replace_file(folder / CONFIG, lambda new: new.write_text(text, encoding="utf-8"))
