"""List all operators: their inputs, outputs and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_sparse.checks import BLOCK_SIZES
from mlx_sparse.methods.scoring_keys import GROUP

from .domain import Attribute, Operator, Tensor

_SPEC = Attribute("spec", int, "Version of the meaning of the node. This page describes 1.", 1, 1)
_SCALE = Attribute("scale", float, "Factor of the logits, c; usually D ** -0.5.")
_SPARQ = (
    _SPEC,
    Attribute("rank", int, "Components read for every key, r: 1 to D.", 1),
    Attribute("top_k", int, "Keys attended to, k; the local ones count.", 1),
    Attribute("local_window", int, "Last valid keys, l, that are always attended to: 0 to `top_k`.", 0),
    Attribute("reallocate", int, "1 gives the mass left over to the mean value (sparq.10); 0 does not.", 0, 1),
    Attribute(
        "component_score",
        int,
        "Score of a component (sparq.1): 0 is |q|, 1 is |q| times the deviation of the keys, without t.",
        0,
        1,
    ),
    _SCALE,
)
_SAAP = (
    _SPEC,
    Attribute("probes", int, "Buckets that one query visits per KV head: 1 to N.", 1),
    Attribute("sink_tokens", int, "First valid keys that are always attended to.", 0),
    Attribute("recent_tokens", int, "Last valid keys that are always attended to, the new one included.", 1),
    _SCALE,
)
WINDOW = Attribute(
    "window",
    int,
    "0, or w: a query at position p attends to keys after p - w only, its own the last of them.",
    0,
)
SAMPLE = (
    _SPEC,
    Attribute("alpha_column", float, "Share of the sample's mass that the kept key blocks hold; 1 keeps all.", 0, 1),
    Attribute("alpha_slash", float, "Share of the sample's mass that the kept offset bins hold; 1 keeps all.", 0, 1),
    Attribute("chunks", int, "Regions of row blocks, each with a sample of its own; at most one per row block.", 1),
    Attribute("block_size", int, "Queries per row block and keys per key block.", choices=BLOCK_SIZES),
    _SCALE,
)
_PADDING = Tensor(
    "left_padding",
    "tensor(int64)",
    "B",
    "First valid key of each row, 0 without padding. Keys before it may be NaN.",
)
_LENGTH = Tensor("length", "tensor(int64)", "B", "Keys written in each row, the current tokens included.")
_KEYS = Tensor("keys", "T", "B Hkv C D", "Keys. Those from `length` on are never read into the result.")
_VALUES = Tensor("values", "T", "B Hkv C D", "Values.")
OUTPUT = Tensor("output", "T", "B Hq L D", "Attention output.")

# What the operators with caches share.
_IN_PLACE = (
    "A caller who binds one buffer to a `past_*` and its `present_*` appends in place. A token before the first slot "
    "or after the last is an error of the runtime."
)
_QUERY = Tensor("query", "T", "B Hq L D", "Queries of the new tokens, with their positions encoded.")
_KEY = Tensor("key", "T", "B Hkv L D", "Keys of the new tokens, with their positions encoded.")
_VALUE = Tensor("value", "T", "B Hkv L D", "Values of the new tokens.")
_PAST_KEY = Tensor("past_key", "T", "B Hkv C D", "Keys so far.")
_PAST_VALUE = Tensor("past_value", "T", "B Hkv C D", "Values so far.")
_PAST_LENGTH = Tensor("past_length", "tensor(int64)", "B", "Tokens so far in each row.")
_PRESENT_KEY = Tensor("present_key", "T", "B Hkv C D", "`past_key` with the new tokens.")
_PRESENT_VALUE = Tensor("present_value", "T", "B Hkv C D", "`past_value` with the new tokens.")

# What the operators with SparQ's caches share.
_LANES = Attribute("lanes", int, "Keys per chunk of `past_key_t`; C is a multiple of it.", 1)
_DENSE_BELOW = Attribute(
    "dense_below",
    int,
    "Attend to one query densely while the longest row, the new token included, has fewer keys; 0 never does.",
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
        "Keys so far, component-major: in memory [B, Hkv, C / lanes, D, lanes]. Component d of key j lies at "
        "((j // lanes) * D + d) * lanes + j % lanes of its head's C * D elements.",
    ),
    _PAST_VALUE,
    Tensor(
        "past_sums",
        "tensor(float)",
        "B Hkv 3 D",
        "Sums over the valid tokens so far: of the values, of the keys, and of the squared differences of the keys "
        "from their mean.",
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

# What SparQ needs with keys in few bits.
_CODES = (
    "Groups of 64 keys in codes, (sparq.17) to (sparq.20), from the first valid key of each row on: for each component "
    "of each KV head ceil(C / 64) groups of 36 bytes, the record: lo and step as float16, lowest byte "
    "first, then the codes, lowest bits first. Only groups of 64 valid keys are read."
)
_SUMMARY = (
    "Of each KV head three rows: sum of the valid values; centre of the keys, (sparq.17); spread of each component, "
    "(sparq.22), or its standard deviation where no key is coded, for `component_score` 1."
)


# What SAAP needs besides: docs/spec/saap.md.
_BUCKET_IDS = "Bucket of each key so far, 0 to N - 1; a key with any other number is in none."
_SAAP_NETWORK = (
    Tensor("centroids", "W", "Hkv N D", "Centroids of the N buckets, of which there are at most 32767."),
    Tensor("hidden_weight", "W", "Hkv D H", "Hidden layer of the query networks; without one, H is 0."),
    Tensor("hidden_bias", "W", "Hkv H", "Its biases."),
    Tensor("out_weight", "W", "Hkv features N", "Output layer: `features` is H, or D without a hidden layer."),
    Tensor("out_bias", "W", "Hkv N", "Its biases; zeros where there are none."),
)

OWN: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "SparQ",
            "One decode step of SparQ attention over buffers that the caller keeps: docs/spec/sparq.md. A row whose "
            "`length` is at most `top_k` is attended densely; a row without a valid key gives 0.",
            _SPARQ,
            (
                Tensor("query", "T", "B Hq 1 D", "Query of the current token, with its position encoded."),
                _KEYS,
                Tensor(
                    "keys_t",
                    "T",
                    "B Hkv chunks D lanes",
                    "The same keys, component-major in chunks of `lanes` keys: key j is at chunk j // lanes, lane "
                    "j % lanes. One chunk will do. Only the chunks up to the longest row are read.",
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
                    "Keys attended to, ascending, then -1 in empty slots. The last axis is `top_k`, or the number of "
                    "keys in the chunks read where that is smaller.",
                ),
            ),
        ),
        Operator(
            "DenseAttention",
            "Exact attention of the last L tokens over the valid keys up to each, or over the last `window` positions. "
            "A query without a valid key gives 0.",
            (_SPEC, _SCALE, WINDOW),
            (
                Tensor("query", "T", "B Hq L D", "Queries; query i of L sits at position `length` - L + i."),
                _KEYS,
                _VALUES,
                _PADDING,
                _LENGTH,
            ),
            (OUTPUT,),
        ),
        Operator(
            "Sample",
            "SampleAttention of the last L tokens over buffers that the caller keeps: docs/spec/sample.md. Dense where "
            "an alpha is 1 or every row block holds a sampled row.",
            SAMPLE,
            (
                Tensor("query", "T", "B Hq L D", "Queries; query i of L sits at position `length` - L + i."),
                _KEYS,
                _VALUES,
                Tensor(
                    "length",
                    "tensor(int64)",
                    "1",
                    "Keys written, the current tokens included: L to C, the same number in every row, none of which is "
                    "padded.",
                ),
            ),
            (
                OUTPUT,
                Tensor(
                    "blocks",
                    "tensor(int32)",
                    "B Hq ? ?",
                    "Key blocks attended to, ascending, then -1 in empty slots, for each row block that holds a query: "
                    "as wide as the longest list, or all key blocks where attention was dense.",
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
            "SparQAppend",
            f"`Append`, also to the component-major keys and the sums, and what `SparQ` takes of the sums. {_IN_PLACE}",
            (_SPEC, _LANES),
            (_KEY, _VALUE, *_SPARQ_PAST),
            (*_SPARQ_PRESENT, _VALUE_MEAN, _DEVIATION),
        ),
        Operator(
            "CachedAttention",
            "`Append`, then `DenseAttention` over the caches. The next `past_length` is `past_length` + L.",
            (_SPEC, _SCALE, WINDOW),
            (_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _PAST_LENGTH, _PADDING),
            (OUTPUT, _PRESENT_KEY, _PRESENT_VALUE),
        ),
        Operator(
            "SparQAttention",
            "`SparQAppend`, then attend: `SparQ` where L is 1 and the longest row has `dense_below` keys or more, "
            "`DenseAttention` with window 0 elsewhere. The next `past_length` is `past_length` + L.",
            (*_SPARQ, _LANES, _DENSE_BELOW),
            (_QUERY, _KEY, _VALUE, *_SPARQ_PAST),
            (OUTPUT, *_SPARQ_PRESENT),
        ),
        Operator(
            "SparQCoded",
            "`SparQ` with scores from few bits: (sparq.21) in place of (sparq.3), over the coded keys and the tail "
            "after them.",
            _SPARQ,
            (
                Tensor("query", "T", "B Hq 1 D", "Query of the current token, with its position encoded."),
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
                    "Keys attended to, ascending, then -1 in empty slots. The last axis is `top_k`, or the length "
                    "of the longest row, at least 1, where that is smaller.",
                ),
            ),
            has_body=False,
        ),
        Operator(
            "SparQCodedAttention",
            "`Append`, also the codes of the groups that are full now, then attend: `SparQCoded` where L is 1 and the "
            "longest row has `dense_below` keys or more, `DenseAttention` with window 0 elsewhere. The next "
            "`past_length` is `past_length` + L.",
            (*_SPARQ, _DENSE_BELOW),
            (
                _QUERY,
                _KEY,
                _VALUE,
                _PAST_KEY,
                Tensor("past_key_codes", "tensor(uint8)", "B HkvD groups 36", _CODES),
                _PAST_VALUE,
                Tensor("past_summary", "tensor(float)", "B 3Hkv D", _SUMMARY),
                _PAST_LENGTH,
                _PADDING,
            ),
            (
                OUTPUT,
                _PRESENT_KEY,
                Tensor(
                    "present_key_codes",
                    "tensor(uint8)",
                    "B HkvD groups 36",
                    "`past_key_codes` with the new groups.",
                ),
                _PRESENT_VALUE,
                Tensor("present_summary", "tensor(float)", "B 3Hkv D", "`past_summary` with the new tokens."),
            ),
            has_body=False,
        ),
        Operator(
            "SaapAttention",
            "`Append`, also the buckets of the new keys (saap.1), then attend. If L is 1 and the longest row has "
            "`dense_below` keys or more, the queries of a group visit `probes` buckets (saap.5), (saap.8). They attend "
            "to the keys of these buckets and to the first `sink_tokens` and last `recent_tokens` valid keys. This is "
            "(saap.10) with all keys listed that have left the window. Otherwise it is `DenseAttention` with window 0. "
            "The next `past_length` is `past_length` + L.",
            (*_SAAP, _DENSE_BELOW),
            (
                _QUERY,
                _KEY,
                _VALUE,
                Tensor("query_before", "T", "B Hq L D", "The same queries before their positions are encoded."),
                Tensor("key_before", "T", "B Hkv L D", "The same keys before their positions are encoded."),
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

# Functions that bodies call, no operators: they have no schema and no kernel of their own.
PROMPTS = "PromptAttention"
FUNCTIONS = (PROMPTS, "SparQComponents", "SparQChoice", "KeyChunks", "IsStep", "Rows", "SaapAppend", "Saap")
_WHEN_SAMPLED = (
    "A chunk is sampled if it has more than `block_size` tokens and no padding, and if all rows have one length of "
    "`dense_prompt_below` keys or more"
)
_DENSE_PROMPT = Attribute(
    "dense_prompt_below",
    int,
    "Prefill is dense while the rows, with the new tokens, have fewer keys; with 0 it never is.",
    0,
)


CODE_RECORD = 36  # bytes of a component of a group of coded keys: lo, step and 64 codes of 4 bits


def coded_axes(capacity: int) -> dict[str, int]:
    """Return the lengths of the axes that only coded keys have, in caches of ``capacity`` keys."""
    return {"groups": -(-capacity // GROUP)}


def _sampling(base: Operator) -> Operator:
    """Return the operator that attends by SampleAttention to prefill chunks, and is ``base`` otherwise."""
    kept = tuple(attribute for attribute in base.attributes if attribute is not WINDOW)
    same = f"`{base.name}`" + (" with window 0" if WINDOW in base.attributes else "")
    return replace(
        base,
        name=f"Sample{base.name.removeprefix('Cached')}",
        doc=f"{same}, but `Sample` for some prefill chunks. {_WHEN_SAMPLED}.",
        attributes=(*kept, *SAMPLE[1:-1], _DENSE_PROMPT),
        base=base.name,
    )


# Whatever appends to caches and attends can sample prompts.
_PAIRS = {pair.name: pair for pair in map(_sampling, OWN.values()) if pair.states and pair.outputs[0] is OUTPUT}
OPERATORS: Mapping[str, Operator] = {**OWN, **_PAIRS}
# States that a file cannot keep among its keys and values.
RECURRENT = sorted({name for each in OWN.values() for name, state in each.states.items() if not state.as_keys})
SAMPLING: Mapping[str, str] = {pair.base: name for name, pair in _PAIRS.items()}  # what also samples prompts
