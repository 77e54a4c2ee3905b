"""List what a run of a tiny model cannot show: the checkpoints of each family, and results that others report.

The names help to find a row. The ``config.json`` of a checkpoint names its family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# mlx-lm's family: models that people load.
CHECKPOINTS: Mapping[str, str] = {
    "afm7": "Apple's on-device 3B",
    "afmoe": "Trinity",
    "apertus": "Apertus 8B, 70B",
    "bailing_hybrid": "Ling and Ring 2.5",
    "bailing_moe": "Ling and Ring 1.5 and 2.0",
    "bailing_moe_linear": "Ring-linear 2.0",
    "bitnet": "BitNet b1.58 2B",
    "cohere": "Command R, Aya",
    "cohere2": "Command R7B, Command A",
    "dbrx": "DBRX",
    "deepseek": "DeepSeek 7B, DeepSeekMoE 16B",
    "deepseek_v2": "DeepSeek V2, V2-Lite, Coder-V2",
    "deepseek_v3": "DeepSeek V3, R1, V3.1; Kimi K2; Moonlight",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v41": "DeepSeek V4.1",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "exaone": "EXAONE 3.5",
    "exaone4": "EXAONE 4.0",
    "exaone_moe": "K-EXAONE",
    "falcon_h1": "Falcon-H1",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 4B, 12B, 27B",
    "gemma3_text": "Gemma 3 270M, 1B",
    "gemma3n": "Gemma 3n E2B, E4B",
    "gemma4": "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B",
    "glm4": "GLM-4 9B, 32B",
    "glm4_moe": "GLM-4.5, 4.5-Air, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5, 5.1, 5.2",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder",
    "gpt_neox": "Pythia",
    "gpt_oss": "gpt-oss-20b, 120b",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "granitemoehybrid": "Granite 4",
    "helium": "Helium",
    "hunyuan": "Hunyuan-Large, A13B",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "internlm2": "InternLM 2, 2.5",
    "internlm3": "InternLM 3",
    "jamba": "Jamba",
    "kimi_k25": "Kimi K2.5",
    "kimi_k3": "Kimi K3",
    "kimi_linear": "Kimi-Linear 48B-A3B",
    "kimi_vl": "Kimi-VL",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-8B-A1B",
    "lfm2-vl": "LFM2-VL",
    "llama": "Llama 2 to 3.3, Mistral 7B, SmolLM2, Yi",
    "llama4": "Llama 4 Scout, Maverick",
    "longcat_flash": "LongCat-Flash",
    "mamba": "Mamba, Falcon-Mamba",
    "mamba2": "Mamba 2",
    "mimo": "MiMo 7B",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minicpm": "MiniCPM",
    "minicpm3": "MiniCPM3",
    "minimax": "MiniMax M2, M2.1, M2.5",
    "minimax_m3_vl": "MiniMax-M3",
    "ministral3": "Ministral 3 3B, 8B, 14B",
    "mistral3": "Mistral Small 3.1, 3.2",
    "mistral4": "Mistral Small 4",
    "mixtral": "Mixtral",
    "nanochat": "nanochat",
    "nemotron": "Nemotron-4, Minitron",
    "nemotron-nas": "Llama-Nemotron Super, Ultra",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2 and 3",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "openelm": "OpenELM",
    "phi": "Phi-2",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "phi3small": "Phi-3-small",
    "phimoe": "Phi-3.5-MoE",
    "pixtral": "Pixtral",
    "plamo2": "PLaMo 2",
    "qwen": "Qwen",
    "qwen2": "Qwen 2, 2.5, 2.5-Coder; DeepSeek-R1-Distill-Qwen",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen2_vl": "Qwen2-VL, Qwen2.5-VL",
    "qwen3": "Qwen3 0.6B to 32B",
    "qwen3_5": "Qwen3.5-27B, Qwen3.6-27B, Qwen3.8-27B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, 122B-A10B; Qwen3.6-35B-A3B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    "qwen3_vl": "Qwen3-VL 2B to 32B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv7": "RWKV-7",
    "seed_oss": "Seed-OSS-36B",
    "smollm3": "SmolLM3-3B",
    "solar_open": "Solar Open 100B",
    "stablelm": "StableLM 2",
    "starcoder2": "StarCoder2",
    "step3p5": "Step-3.5-Flash",
}

# Real weights of it that were run here, and the page that says so, from docs/.
REAL: Mapping[str, tuple[str, str]] = {
    "llama": ("SmolLM2-135M-Instruct", "results/quality.md"),
    "gemma3_text": ("Gemma 3 270M", "results/quality.md"),
}

# What others say of choosing keys that a model was not trained to choose.
_BAD = (
    "**unfit**: in the global layers even the best 2,048 keys are reported far outside the band of harmless changes",
    "https://github.com/asher/gmlx/issues/17",
)
REPORTED: Mapping[str, tuple[str, str]] = {
    "gemma4": _BAD,
    "gemma4_text": _BAD,
    "qwen3_5": (
        "the best keys of Qwen3.5-9B's full layers are reported within 0.5 points of dense on RULER, 4k to 100k",
        "https://arxiv.org/abs/2606.07703",
    ),
}


@dataclass(frozen=True)
class Absent:
    """A model that people run elsewhere, and that this version of mlx-lm does not have.

    Attributes:
        family: what its module would be called, if that is known.
        attention: as its makers, or other engines, describe it.
        source: where that was read.
    """

    models: str
    family: str
    attention: str
    source: str


ABSENT = (
    Absent(
        "Qwen3.8-Flash-Next 180B-A6B",
        "",
        "36 layers of Gated DeltaNet, 12 that are trained to choose their keys (QSA)",
        "https://github.com/ggml-org/llama.cpp/issues/27742",
    ),
    Absent(
        "GLM-5.3-Flash",
        "",
        "34 layers of Kimi Delta Attention, 11 that are trained to choose their keys (DSA)",
        "https://github.com/unslothai/llama.cpp/issues/116",
    ),
    Absent(
        "DeepSeek V4, V4-Flash",
        "deepseek_v4",
        "a window of 128, and 512 compressed keys that it is trained to choose",
        "https://github.com/ml-explore/mlx-lm/issues/1281",
    ),
)
