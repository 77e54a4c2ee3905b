"""Define all operators with their inputs, outputs, attributes and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_sparse.checks import BLOCK_SIZES
from mlx_sparse.methods.sparq.scoring_keys import GROUP

from .domain import Attribute, Operator, Tensor

_SPEC = Attribute("spec", int, "Version of the operator specification. This page describes version 1.", 1, 1)
_SCALE = Attribute("scale", float, "Factor c of the logits, usually D ** -0.5.")
_SPARQ = (
    _SPEC,
    Attribute("rank", int, "Number of components r that are read from every key: 1 to D.", 1),
    Attribute("top_k", int, "Number of keys k that are attended to, the local window included.", 1),
    Attribute("local_window", int, "Number l of last valid keys that are always attended to: 0 to `top_k`.", 0),
    Attribute(
        "reallocate",
        int,
        "1 assigns the softmax mass of the other keys to the mean value (sparq.10); 0 does not.",
        0,
        1,
    ),
    Attribute(
        "component_score",
        int,
        "Score of a component (sparq.1). 0: |q|. 1: |q| times the standard deviation of the keys, with t = 1.",
        0,
        1,
    ),
    _SCALE,
)
_SAAP = (
    _SPEC,
    Attribute("probes", int, "Number of buckets that one query visits per KV head: 1 to N.", 1),
    Attribute("sink_tokens", int, "Number of first valid keys that are always attended to.", 0),
    Attribute("recent_tokens", int, "Number of last valid keys that are always attended to, the new key included.", 1),
    _SCALE,
)
WINDOW = Attribute(
    "window", int, "Sliding window w: a query at position p attends to keys p - w < j <= p; 0 for no window.", 0
)
SAMPLE = (
    _SPEC,
    Attribute(
        "alpha_column",
        float,
        "Attention recall that the selected key blocks must reach in the sample; 1 selects all.",
        0,
        1,
    ),
    Attribute(
        "alpha_slash",
        float,
        "Attention recall that the selected offset bins must reach in the sample; 1 selects all.",
        0,
        1,
    ),
    Attribute(
        "chunks", int, "Number of regions of row blocks, each with its own sample; at most one per row block.", 1
    ),
    Attribute("block_size", int, "Queries per row block and keys per key block.", choices=BLOCK_SIZES),
    _SCALE,
)
_PADDING = Tensor(
    "left_padding", "tensor(int64)", "B", "First valid key of each row, 0 without padding. Keys before it may be NaN."
)
_LENGTH = Tensor("length", "tensor(int64)", "B", "Number of keys in each row, the current tokens included.")
_KEYS = Tensor("keys", "T", "B Hkv C D", "Keys. Keys from index `length` on have no effect.")
_VALUES = Tensor("values", "T", "B Hkv C D", "Values.")
OUTPUT = Tensor("output", "T", "B Hq L D", "Attention output.")

# Tensors of all operators with caches.
_IN_PLACE = (
    "If you bind the same buffer to `past_*` and `present_*`, the operator appends in place. If a token lies outside "
    "the slots 0 to C - 1, the runtime raises an error."
)
_QUERY = Tensor("query", "T", "B Hq L D", "Queries of the new tokens, after RoPE.")
_KEY = Tensor("key", "T", "B Hkv L D", "Keys of the new tokens, after RoPE.")
_VALUE = Tensor("value", "T", "B Hkv L D", "Values of the new tokens.")
_PAST_KEY = Tensor("past_key", "T", "B Hkv C D", "Keys so far.")
_PAST_VALUE = Tensor("past_value", "T", "B Hkv C D", "Values so far.")
_PAST_LENGTH = Tensor("past_length", "tensor(int64)", "B", "Number of tokens so far in each row.")
_PRESENT_KEY = Tensor("present_key", "T", "B Hkv C D", "`past_key` with the new tokens.")
_PRESENT_VALUE = Tensor("present_value", "T", "B Hkv C D", "`past_value` with the new tokens.")

# Tensors of the operators with SparQ's caches.
_LANES = Attribute("lanes", int, "Number of keys per chunk of `past_key_t`. C is a multiple of this number.", 1)
_DENSE_BELOW = Attribute(
    "dense_below",
    int,
    "A decode step is dense if the longest row, the new token included, has fewer keys than this number.",
    0,
)
_VALUE_MEAN = Tensor(
    "value_mean", "tensor(float)", "B Hkv D", "Mean of the valid values (sparq.9), for `reallocate` 1."
)
_DEVIATION = Tensor(
    "deviation",
    "tensor(float)",
    "B Hkv D",
    "Standard deviation of each component over the valid keys, for `component_score` 1.",
)
_SPARQ_PAST = (
    _PAST_KEY,
    Tensor(
        "past_key_t",
        "T",
        "B Hkv C D",
        "Keys so far, component-major: in memory [B, Hkv, C / lanes, D, lanes]. Component d of key j is at index "
        "((j // lanes) * D + d) * lanes + j % lanes of its head's C * D elements. Defined if the longest row has at "
        "least `dense_below` tokens so far; the call that reaches this length computes all keys.",
    ),
    _PAST_VALUE,
    Tensor(
        "past_sums",
        "tensor(float)",
        "B Hkv 3 D",
        "Running statistics over the valid tokens so far: sum of the values, sum of the keys, and sum of the squared "
        "differences between the keys and their mean. Defined as `past_key_t`.",
    ),
    _PAST_LENGTH,
    _PADDING,
)
_SPARQ_PRESENT = (
    _PRESENT_KEY,
    Tensor("present_key_t", "T", "B Hkv C D", "`past_key_t` with the new tokens."),
    _PRESENT_VALUE,
    Tensor("present_sums", "tensor(float)", "B Hkv 3 D", "`past_sums` with the new tokens."),
)

# Tensors of SparQ with int4 scoring keys.
_CODES = (
    "Int4 scoring keys in groups of 64, (sparq.17) to (sparq.20), counted from the first valid key of each row. Each "
    "component of each KV head has ceil(C / 64) records of 36 bytes: lo and step as little-endian float16, then the "
    "codes, low half byte first. Only groups of 64 valid keys are read."
)
_SUMMARY = (
    "Three rows per KV head: sum of the valid values; center of the keys, (sparq.17); spread of each component, "
    "(sparq.22), for `component_score` 1. If no key is quantized, the third row is the standard deviation."
)


# Tensors of SAAP, docs/spec/saap.md.
_BUCKET_IDS = "Bucket of each key so far, 0 to N - 1. A key with any other number is in no bucket."
_SAAP_NETWORK = (
    Tensor("centroids", "W", "Hkv N D", "Centroids of the N buckets; N is at most 32767."),
    Tensor("hidden_weight", "W", "Hkv D H", "Weights of the hidden layer of the query networks; H is 0 without one."),
    Tensor("hidden_bias", "W", "Hkv H", "Biases of the hidden layer."),
    Tensor("out_weight", "W", "Hkv features N", "Weights of the output layer. `features` is H, or D if H is 0."),
    Tensor("out_bias", "W", "Hkv N", "Biases of the output layer; zeros if the layer has no biases."),
)

OWN: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "SparQ",
            "Computes one decode step of SparQ attention over buffers that the caller owns (docs/spec/sparq.md). A row "
            "whose `length` is at most `top_k` is attended densely. The output of a row without a valid key is 0.",
            _SPARQ,
            (
                Tensor("query", "T", "B Hq 1 D", "Query of the current token, with position encoding applied."),
                _KEYS,
                Tensor(
                    "keys_t",
                    "T",
                    "B Hkv chunks D lanes",
                    "`keys`, component-major in chunks of `lanes` keys: key j is in chunk j // lanes, lane "
                    "j % lanes. One chunk is allowed. Only the chunks up to the longest row are read.",
                ),
                _VALUES,
                _PADDING,
                _LENGTH,
                _VALUE_MEAN,
                _DEVIATION,
            ),
            (
                Tensor("output", "T", "B Hq 1 D", "Attention output."),
                Tensor(
                    "indices",
                    "tensor(int32)",
                    "B Hkv ?",
                    "Keys attended to, ascending, then -1 in empty slots. The length of the last axis is the smaller "
                    "of `top_k` and the number of keys in the chunks that are read.",
                ),
            ),
        ),
        Operator(
            "DenseAttention",
            "Computes exact causal attention of the last L tokens to the valid keys, or to the last `window` "
            "positions. The output of a query without a valid key is 0.",
            (_SPEC, _SCALE, WINDOW),
            (
                Tensor("query", "T", "B Hq L D", "Queries; the position of query i is `length` - L + i."),
                _KEYS,
                _VALUES,
                _PADDING,
                _LENGTH,
            ),
            (OUTPUT,),
        ),
        Operator(
            "Sample",
            "SampleAttention of the last L tokens over buffers of the caller: docs/spec/sample.md. Attention is dense "
            "if an alpha is 1 or every row block contains a sampled row.",
            SAMPLE,
            (
                Tensor("query", "T", "B Hq L D", "Queries; the position of query i is `length` - L + i."),
                _KEYS,
                _VALUES,
                Tensor(
                    "length",
                    "tensor(int64)",
                    "1",
                    "Number of keys, including the current tokens (L to C). All rows have the same length, without "
                    "padding.",
                ),
            ),
            (
                OUTPUT,
                Tensor(
                    "blocks",
                    "tensor(int32)",
                    "B Hq ? ?",
                    "Key blocks attended to, ascending, then -1 in empty slots, for each row block that contains a "
                    "query. The length of the last axis is that of the longest list. If attention was dense, it is "
                    "the number of key blocks.",
                ),
            ),
        ),
        Operator(
            "Append",
            f"Append L tokens to caches of fixed capacity C. {_IN_PLACE}",
            (_SPEC,),
            (_KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _PAST_LENGTH),
            (_PRESENT_KEY, _PRESENT_VALUE),
        ),
        Operator(
            "CachedAttention",
            "Run `Append`, then `DenseAttention` over the caches. The next `past_length` is `past_length` + L.",
            (_SPEC, _SCALE, WINDOW),
            (_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _PAST_LENGTH, _PADDING),
            (OUTPUT, _PRESENT_KEY, _PRESENT_VALUE),
        ),
        Operator(
            "SparQAttention",
            "Run `Append`, update the component-major keys and the running statistics, then attend. If L is 1 and the "
            "longest row has at least `dense_below` keys, attend with `SparQ`, otherwise with `DenseAttention` and "
            "window 0. The next `past_length` is `past_length` + L.",
            (*_SPARQ, _LANES, _DENSE_BELOW),
            (_QUERY, _KEY, _VALUE, *_SPARQ_PAST),
            (OUTPUT, *_SPARQ_PRESENT),
        ),
        Operator(
            "SparQCoded",
            "`SparQ` with int4 scoring keys. (sparq.21) replaces (sparq.3): it scores full groups by their codes, and "
            "the keys after the last full group by `keys`.",
            _SPARQ,
            (
                Tensor("query", "T", "B Hq 1 D", "Query of the current token, with position encoding applied."),
                _KEYS,
                Tensor("key_codes", "tensor(uint8)", "B HkvD groups 36", _CODES),
                _VALUES,
                Tensor("summary", "tensor(float)", "B 3Hkv D", _SUMMARY),
                _PADDING,
                _LENGTH,
            ),
            (
                Tensor("output", "T", "B Hq 1 D", "Attention output."),
                Tensor(
                    "indices",
                    "tensor(int32)",
                    "B Hkv ?",
                    "Keys attended to, ascending, then -1 in empty slots. The length of the last axis is the smaller "
                    "of `top_k` and the length of the longest row, and at least 1.",
                ),
            ),
            has_body=False,
        ),
        Operator(
            "SparQCodedAttention",
            "Run `Append`, quantize the groups that became full, then attend. If L is 1 and the longest row has at "
            "least `dense_below` keys, attend with `SparQCoded`, otherwise with `DenseAttention` and window 0. The "
            "next `past_length` is `past_length` + L.",
            (*_SPARQ, _DENSE_BELOW),
            (
                _QUERY,
                _KEY,
                _VALUE,
                _PAST_KEY,
                Tensor(
                    "past_key_codes",
                    "tensor(uint8)",
                    "B HkvD groups 36",
                    "`key_codes` of `SparQCoded` for the tokens so far.",
                ),
                _PAST_VALUE,
                Tensor("past_summary", "tensor(float)", "B 3Hkv D", "`summary` of `SparQCoded` for the tokens so far."),
                _PAST_LENGTH,
                _PADDING,
            ),
            (
                OUTPUT,
                _PRESENT_KEY,
                Tensor(
                    "present_key_codes", "tensor(uint8)", "B HkvD groups 36", "`past_key_codes` with the new groups."
                ),
                _PRESENT_VALUE,
                Tensor("present_summary", "tensor(float)", "B 3Hkv D", "`past_summary` with the new tokens."),
            ),
            has_body=False,
        ),
        Operator(
            "SaapAttention",
            "Run `Append`, assign the new keys to buckets (saap.1), then attend. If L is 1 and the longest row has at "
            "least `dense_below` keys, the queries of a group visit `probes` buckets, (saap.5) and (saap.8). "
            "They attend to the keys of these buckets and to the first `sink_tokens` and last `recent_tokens` valid "
            "keys. This is (saap.10) with every key outside the recent window in the index. Otherwise attention is "
            "`DenseAttention` with window 0. The next `past_length` is `past_length` + L.",
            (*_SAAP, _DENSE_BELOW),
            (
                _QUERY,
                _KEY,
                _VALUE,
                Tensor("query_before", "T", "B Hq L D", "`query` before RoPE."),
                Tensor("key_before", "T", "B Hkv L D", "`key` before RoPE."),
                _PAST_KEY,
                _PAST_VALUE,
                Tensor("past_bucket_ids", "tensor(int16)", "B Hkv C", _BUCKET_IDS),
                _PAST_LENGTH,
                _PADDING,
                *_SAAP_NETWORK,
            ),
            (
                OUTPUT,
                _PRESENT_KEY,
                _PRESENT_VALUE,
                Tensor("present_bucket_ids", "tensor(int16)", "B Hkv C", "`past_bucket_ids` with the new keys."),
            ),
        ),
    )
}

# Functions that function bodies call. These are not operators: they have neither a schema nor a kernel.
PROMPTS = "PromptAttention"
FUNCTIONS = (
    *(PROMPTS, "SparQComponents", "SparQSelect", "SparQStates", "SparQRows", "SparQColumns"),
    *("SparQSums", "SparQMeans", "KeyChunks", "IsStep", "Rows", "SaapAppend", "Saap"),
)
_WHEN_SAMPLED = (
    "A chunk is sampled if it has more than `block_size` tokens, no row has padding, and all rows have the same length "
    "of at least `dense_prompt_below` keys"
)
_DENSE_PROMPT = Attribute(
    "dense_prompt_below",
    int,
    "A prefill chunk is dense if the rows, with the new tokens, have fewer keys than this number.",
    0,
)


CODE_RECORD = 36  # bytes per component of a group of int4 scoring keys: lo, step and 64 codes of 4 bits


def coded_axes(capacity: int) -> dict[str, int]:
    """Return a dict with the length of the axis ``groups`` of int4 scoring keys, for caches of ``capacity`` keys."""
    return {"groups": -(-capacity // GROUP)}


def _sampling(base: Operator) -> Operator:
    """Return the variant of operator ``base`` that uses SampleAttention for prefill chunks."""
    kept = tuple(attribute for attribute in base.attributes if attribute is not WINDOW)
    same = f"`{base.name}`" + (" with window 0" if WINDOW in base.attributes else "")
    return replace(
        base,
        name=f"Sample{base.name.removeprefix('Cached')}",
        doc=f"Like {same}, but sampled prefill chunks use `Sample`. {_WHEN_SAMPLED}.",
        attributes=(*kept, *SAMPLE[1:-1], _DENSE_PROMPT),
        base=base.name,
    )


# Each operator that appends to caches and attends has a variant with SampleAttention for prefill.
_PAIRS = {pair.name: pair for pair in map(_sampling, OWN.values()) if pair.states and pair.outputs[0] is OUTPUT}
OPERATORS: Mapping[str, Operator] = {**OWN, **_PAIRS}
# States whose shape differs from that of keys. The exporter cannot store such states in virtual layers for genai.
RECURRENT = sorted({name for each in OWN.values() for name, state in each.states.items() if not state.as_keys})
SAMPLING: Mapping[str, str] = {
    pair.base: name for name, pair in _PAIRS.items()
}  # from an operator's name to the name of its variant with SampleAttention
