"""Tiny random models of mlx-lm's families: its own code in the layers' own order, a few layers and invented weights."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCAB, LAYERS, HEAD_DIM = 96, 4, 16
WINDOW = 8  # keys of a sliding window: fewer than the prompts that are run
INSTALLED = ("hf_olmo",)  # packages that a family only asks to be there

# What fields are called all over; a family takes those that it knows.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "dim_model_base", "block_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "mlp_hidden_size"), 80),
    **dict.fromkeys(("ff_intermediate_size", "n_inner", "shared_intermediate_size", "block_ff_dim"), 80),
    **dict.fromkeys(("dense_intermediate_size", "shared_expert_intermediate_size", "moe_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "embedding_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("scale_depth", "scale_emb", "output_multiplier"), 1.0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "embedding_size", "num_vocab"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "block_size"), 4096),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_bias", "use_qkv_bias", "bias"), False),
    **dict.fromkeys(("conv_bias", "mamba_proj_bias", "mamba_conv_bias", "block_auto_adjust_ff_dim"), False),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "norm_topk_prob", "post_norm", "use_conv_bias"), True),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta"), 10000.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "attention_multiplier"), 0.5),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),  # what the kernels of a GPU need
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "hidden_size_per_head"), HEAD_DIM),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", "conv1d_width"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "group_norm_size"), 1),
    "mlp_only_layers": [],
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "query_pre_attn_scalar": HEAD_DIM,
    "layer_norm_bias": False,
}

S3F = ["sliding_attention"] * 3 + ["full_attention"]
S4F = ["sliding_attention"] * 4 + ["full_attention"]
ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
MLA_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
LONGCAT = {"zero_expert_num": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
KDA = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}

# What a family needs besides, or has otherwise. Under "text_config" is what its text model does.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": S3F},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 4, "num_key_value_heads": 4},
    "bailing_moe_linear": {"layer_group_size": 4, "num_key_value_heads": 4},
    "bailing_moe_v3": {"model_type": "bailing_hybrid"},
    "cohere2": {"sliding_window_pattern": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000},
    },
    "deepseek_v2": {"rope_scaling": MLA_YARN, "num_key_value_heads": 4},
    "deepseek_v3": {"rope_scaling": MLA_YARN, "num_key_value_heads": 4},
    "deepseek_v32": {**INDEXER, "rope_scaling": MLA_YARN, "num_key_value_heads": 4},
    "deepseek_v41": {
        **INDEXER,
        "rope_scaling": None,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 2, 3],
        "index_source_layer_ids": [1, 2, 3],
    },
    "dots1": {"scoring_func": "noaux_tc"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLLG"},
    "exaone_moe": {"layer_types": S3F, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    },
    "gear": {"layer_types": S3F},
    "gemma3": {"num_hidden_layers": 6, "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6}},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "layer_types": S4F * 2,
            "activation_sparsity_pattern": [0.5] * 10,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 4,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
        }
    },
    "gemma4": {"text_config": {"model_type": "gemma4_text"}},
    "gemma4_text": {
        "num_hidden_layers": 10,
        "layer_types": S4F * 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm_moe_dsa": {
        **INDEXER,
        "num_key_value_heads": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": {"num_key_value_heads": 4},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_scaling": YARN},
    "granitemoehybrid": {"layer_types": ["mamba"] * 3 + ["attention"]},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2, "rope_scaling": "dynamic"},
    "hunyuan_v1_dense": {"rope_scaling": "dynamic"},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": {"model_type": "kimi_k2", "num_key_value_heads": 4, "rope_scaling": MLA_YARN}},
    "kimi_k3": {"text_config": {"model_type": "kimi_linear", "linear_attn_config": KDA, "num_key_value_heads": 4}},
    "kimi_linear": {"linear_attn_config": KDA, "num_key_value_heads": 4},
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3", "num_key_value_heads": 4}},
    "laguna": {"layer_types": ["full_attention", *S3F[:3]], "rope_parameters": ROPES},
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
    },
    "lfm2-vl": {
        "text_config": {
            "model_type": "lfm2",
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
        }
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "use_expert_bias": True},
    "llama4": {
        "text_config": {
            "model_type": "llama4_text",
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {**LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": LONGCAT,
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8, "time_step_limit": (0.01, 10.0), "time_step_rank": "auto"},
    "mellum": {"layer_types": S3F, "rope_parameters": ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": 1.0}},
    "minimax_m3_vl": {
        "text_config": {
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        }
    },
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "mistral4": {"rope_parameters": {**MLA_YARN, "llama_4_scaling_beta": 0.1}, "num_key_value_heads": 4},
    "muse_glimmer": {"layer_types": S3F, "num_hidden_layers": 4},
    "muse_spark": {
        "text_config": {
            "layer_types": S3F,
            "layer_rope_theta": [10000.0] * 3 + [0],
            "rope_parameters": {"rope_theta": 10000.0},
            "final_logit_softcapping": 20.0,
            "num_shared_experts": 0,
        }
    },
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            },
            {
                "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            },
        ]
        * 2
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "-", "M", "*"], "time_step_limit": [0.01, 10.0]},
    "olmo": {"mlp_hidden_size": 80},
    "olmo3": {"layer_types": S3F},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "hidden_size": 128,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "vocab_size": 100352,  # it writes to the logits of tokens of its own tokenizer, whatever their number
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "short_mscale": 1.2,
            "original_max_position_embeddings": 4096,
        }
    },
    "phi": {"num_key_value_heads": 4},
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"num_hidden_layers": 8},
    "qwen": {"intermediate_size": 160},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5": {"text_config": {"model_type": "qwen3_5_text", "full_attention_interval": 4}},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5_moe_text", "full_attention_interval": 4}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv7": {
        "head_dim": 32,
        **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16),
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "spark2_5": {"rope_parameters": ROPES},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {
        "rope_theta": [10000.0] * 4,
        "layer_types": ["full_attention", *S3F[:3]],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {"num_attention_heads": 4},
    "youtu_llm": {"num_key_value_heads": 4},
}


def module_of(family: str) -> ModuleType:
    """mlx-lm's module of a family.

    Raises:
        ImportError: it cannot be imported here.
    """
    with contextlib.ExitStack() as stack:
        for name in INSTALLED:
            stack.enter_context(_there(name))
        try:
            return importlib.import_module(f"mlx_lm.models.{family}")
        except (ImportError, SystemExit) as error:
            raise ImportError(f"cannot be imported: {error}") from error


@contextlib.contextmanager
def _there(name: str) -> Iterator[None]:
    """Let an import of a package that is not there go well."""
    missing = name not in sys.modules
    if missing:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        if missing:
            del sys.modules[name]


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a tiny model of ``family``; one that is not known gets what families have in common."""
    own = dict(FAMILIES.get(family, {}))
    config = {**SIZES, "model_type": family, **own}
    if config.get("rope_scaling") == "dynamic":
        config["rope_scaling"] = {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}
    fields = inspect.signature(module_of(family).ModelArgs).parameters
    if "text_config" in fields:
        text = own.get("text_config", {})
        inner = FAMILIES.get(text.get("model_type", ""), {}) if family == "gemma4" else {}
        config["text_config"] = {**SIZES, "model_type": family, **inner, **text}
    return config


def build(family: str) -> Any:
    """A tiny model of ``family`` with random weights, the same ones every time.

    Raises:
        Exception: whatever its module raises of these sizes.
    """
    module = module_of(family)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config_of(family)))
    # What a family begins with as zeros would hide what is attended.
    weights: Any = tree_flatten(model.parameters())
    zeros = [(name, array) for name, array in weights if _is_zero(array)]
    model.update(tree_unflatten([(name, _noise(array)) for name, array in zeros]))
    model.eval()
    mx.eval(model.parameters())
    return model


def _is_zero(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating) and not array.any().item()


def _noise(array: mx.array) -> mx.array:
    return (0.2 * mx.random.normal(array.shape)).astype(array.dtype)


def prompt_of(length: int) -> list[int]:
    """Tokens, the same ones every time."""
    return [1 + (7 * i * i + 3 * i) % (VOCAB - 1) for i in range(length)]
