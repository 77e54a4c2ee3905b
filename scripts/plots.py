#!/usr/bin/env python3
"""Draw the plots for the documentation. This script needs matplotlib.

python scripts/plots.py speed      docs/speed.svg: first token and tokens per second, from docs/results/speed.jsonl
python scripts/plots.py peers      docs/results/peers.svg: tokens per second beside other runtimes, from peers.jsonl
python scripts/plots.py prefill    docs/results/prefill.svg: copies and needles against density, from prefill.jsonl
python scripts/plots.py why        docs/results/why.svg: why SparQ and SAAP work, from docs/results/why.jsonl
python scripts/plots.py quality    docs/quality.svg: copying accuracy against bytes, from docs/results/quality.jsonl
python scripts/plots.py needles    docs/results/needle.svg: needles by depth and context, from the same rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from mlx_sparse.methods import SparQ, parse

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # makes the files reproducible
matplotlib.rcParams |= {"axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}
from matplotlib import pyplot as plt  # noqa: E402 - the renderer is selected first

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
AGREEMENT = [
    (model, D, f"{method}/agreement", f"{color}{style}", f"{name}, {label}")
    for model, D, color, name in (("smollm2", 64, "C0", "SmolLM2"), ("gemma", 256, "C1", "Gemma 3"))
    for method, style, label in (
        ("sparq-rank-{}-local_window-0", "o-", "default"),
        ("sparq-preset-paper-rank-{}-local_window-0", "o--", "paper"),
        ("random_projection-rank-{}", "o:", "random projection"),
    )
]
RECALL = [
    ("smollm2", 64, f"sparq-rank-{{}}-top_k-{k}/recall", f"C{i}o-", f"top_k={k}")
    for i, k in enumerate((32, 64, 128, 256))
]
MODELS = {"smollm2-135m-instruct": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M"}
METHODS = {"dense": "0.45", "sparq": "tab:blue", "gather:share=0.75,dense_below=0": "tab:cyan"}  # with colors

RUNTIMES = {  # by method: label and color
    "sparq:key_bits=4,dense_below=512": ("ours, sparq", "tab:blue"),
    "saap:dense_below=4096": ("ours, saap", "tab:cyan"),
    "dense": ("ours, dense", "0.45"),
    "llama-cpp-python==0.3.36, flash attention off": ("llama.cpp", "tab:orange"),
    "onnxruntime==1.32.0, GroupQueryAttention, int8 activations": ("ONNX Runtime, int8", "tab:red"),
}
PREFILL = {"gather": "C0", "sample": "C1", "minference": "C2", "bigbird": "C3", "streaming_prefill": "C4"}


def main() -> int:
    """Draw the requested plot, and return the exit code."""
    actions = {"speed": draw_speed, "peers": draw_peers, "prefill": draw_prefill, "why": draw_why}
    actions |= {"quality": draw_quality, "needles": draw_needles}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(f"usage: plots.py {'|'.join(actions)}")
    print(actions[sys.argv[1]]())
    return 0


def draw_speed() -> Path:
    """Draw the time to the first token and the speed of SmolLM2 by context length, from rows of `bench generate`."""
    rows = [
        row for row in _rows("speed", task="generate", model="smollm2-135m-instruct") if row["method"].endswith(" mlx")
    ]
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    units = {"time_to_first_token": "time to the first token, s", "generation": "generation, tokens/s"}
    for axes, (metric, unit) in zip(panels, units.items(), strict=True):
        for method, color in METHODS.items():
            own = [row for row in rows if row["method"] == f"{method} mlx" and row["metric"] == metric]
            label = "plain mlx-lm" if method == "dense" else f"--attn {method.partition(':')[0]}"
            axes.plot([row["context"] for row in own], [row["mean"] for row in own], "o-", color=color, label=label)
        axes.set_ylim(bottom=0)
        _by_context(axes, sorted({row["context"] for row in rows}), unit, "SmolLM2-135M, float32, two CPU cores")
    return _save(figure, "speed.svg")


def draw_peers() -> Path:
    """Draw the tokens per second of the exported SmolLM2 and of other runtimes by context, on one thread."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for method, (label, color) in RUNTIMES.items():
        own = [row for row in _rows("peers", metric="tokens_per_second") if row["method"] == method]
        axes.plot([row["context"] for row in own], [row["median"] for row in own], "o-", color=color, label=label)
    axes.set_ylim(0, 80)  # room for the legend
    _by_context(
        axes, sorted({row["context"] for row in own}), "tokens per second", "SmolLM2-135M, 4-bit weights, one thread"
    )
    return _save(figure, "results/peers.svg")


def draw_prefill() -> Path:
    """Draw the tokens that SmolLM2 predicts correctly inside a sparse prefill of 4,096 tokens, against the density."""
    rows = _rows("prefill", metric="accuracy", model="smollm2-135m-instruct")
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained", sharex=True)
    shown = {}
    for axes, task in zip(panels, ("copying", "needle"), strict=True):
        here = [row for row in rows if row["task"] == task and row["context"] == 4096]
        by_method: dict[str, list[dict[str, Any]]] = {}
        for row in here:
            by_method.setdefault(row["method"].partition(":")[0], []).append(row)
        (dense,) = by_method.pop("dense")
        shown["dense"] = axes.axhline(dense["mean"], color="0.45", linestyle="--")
        for method, own in by_method.items():
            own.sort(key=lambda row: row["density"])
            across, up, bars = zip(*((row["density"], row["mean"], row["difference_sem"]) for row in own), strict=True)
            shown[method] = axes.errorbar(across, up, bars, fmt="o-", capsize=2, color=PREFILL[method])
        axes.set(xlabel="density: share of the causal pairs", ylabel="tokens predicted correctly", ylim=(0, 1))
        axes.set_title(f"{task}, SmolLM2-135M, 4k tokens, n = {dense['examples']}")
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=6)
    return _save(figure, "results/prefill.svg")


def draw_why() -> Path:
    """Draw the attention mass and the bucket spans by layer, and agreement and recall by rank (scripts/why.py)."""
    rows = {row["key"]: row for row in _rows("why")}
    figure, ((mass, agreement), (recall, spans)) = plt.subplots(2, 2, figsize=(9.6, 6), layout="constrained")
    for axes, name, style, label in (
        (mass, "top_32_mass", "C0o-", "32 highest scores"),
        (spans, "span_pre_rope", "C2o-", "keys before RoPE"),
        (spans, "span_rope", "C3o-", "keys after RoPE"),
    ):
        axes.plot(rows[f"why/smollm2/text/2k/dense/{name}"]["by_layer"], style, label=label)
        axes.set(xlabel="layer of SmolLM2-135M", ylim=(0, 1))
    mass.set(title="Few keys receive most of the attention", ylabel="share of the softmax")
    spans.set(title="Span of k-means buckets", ylabel="span of a bucket (share of the text)")
    for axes, title, label, lines in (
        (agreement, "Few components find the best 128 keys", "agreement with the exact top 128", AGREEMENT),
        (recall, "Recall by rank and top_k, SmolLM2-135M", "attention recall", RECALL),
    ):
        for model, D, method, style, name in lines:
            ranks = [rank for rank in (4, 8, 16, 32, 64, 128) if rank <= D // 2]
            found = [rows[f"why/{model}/text/2k/{method.format(rank)}"]["mean"] for rank in ranks]
            axes.plot([rank / D for rank in ranks], found, style, label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="rank / D", ylabel=label, ylim=(0, 1))
    for axes in (mass, spans, agreement, recall):
        axes.legend(fontsize=8)
    return _save(figure, "results/why.svg")


def draw_quality() -> Path:
    """Draw the share of tokens copied correctly against the bytes of a decode step, by method, model and context."""
    rows = _rows("quality", task="copying", metric="accuracy")
    places = sorted({(row["context"], row["model"]) for row in rows if row["budget"]})
    colors = {method: f"C{i}" for i, method in enumerate(dict.fromkeys(row["method"] for row in rows))}
    figure, panels = plt.subplots(1, len(places), figsize=(4.2 * len(places), 3.6), layout="constrained", squeeze=False)
    shown = {}
    for axes, (context, model) in zip(panels[0], places, strict=True):
        here = [row for row in rows if (row["model"], row["context"]) == (model, context)]
        shown["dense"] = axes.axhline(here[0]["dense"], color="0.45", linestyle="--")
        for method in dict.fromkeys(row["method"] for row in here if row["method"] != "dense"):
            own = sorted((row for row in here if row["method"] == method), key=lambda row: row["share"])
            across, up, bars = zip(*((row["share"], row["mean"], row["difference_sem"]) for row in own), strict=True)
            shown[method] = axes.errorbar(across, up, bars, fmt="o-", capsize=2, color=colors[method])
        axes.set_xscale("log", base=2)
        axes.set(xlabel="share of dense attention's bytes (counted)", ylabel="tokens copied correctly")
        axes.set_title(f"{MODELS[model]}, {context / 1024:.0f}k tokens, n = {here[0]['examples']}")
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=4)
    return _save(figure, "quality.svg")


def draw_needles() -> Path:
    """Draw the accuracy of needles by depth and context, for dense attention and `--attn sparq`, for each model."""
    rows = [row for row in _rows("quality", task="needle", metric="accuracy") if row.get("depth") and not row["budget"]]
    places = [(model, dense) for model in MODELS for dense in (True, False)]
    figure, panels = plt.subplots(1, len(places), figsize=(11, 2.6), layout="constrained")
    for axes, (model, dense) in zip(panels, places, strict=True):
        own = [row for row in rows if row["model"] == model and (row["method"] == "dense") == dense]
        contexts, depths = sorted({row["context"] for row in own}), list(dict.fromkeys(row["depth"] for row in own))
        found = {(row["context"], row["depth"]): row["mean"] for row in own if dense or _is_default(row)}
        shown = [[found[context, depth] for depth in depths] for context in contexts]
        axes.imshow(shown, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, line in enumerate(shown):
            for x, value in enumerate(line):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(depths)), depths)
        axes.set_yticks(range(len(contexts)), [f"{context / 1024:.0f}k" for context in contexts])
        axes.set_xlabel("depth of the needle")
        axes.grid(visible=False)
        axes.set_title(f"{MODELS[model]}, {'dense' if dense else '--attn sparq'}")
    return _save(figure, "results/needle.svg")


def _is_default(row: dict[str, Any]) -> bool:
    """Return True if the row's method is `--attn sparq`, or equal to it at the row's context."""
    (config,) = parse(row["method"])
    return config.at(row["context"]) == SparQ(dense_below=0).at(row["context"])


def _rows(page: str, **wanted: str) -> list[dict[str, Any]]:
    """Return the rows of docs/results/``page``.jsonl whose fields have the values ``wanted``."""
    rows = map(json.loads, (RESULTS / f"{page}.jsonl").read_text().splitlines())
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _by_context(axes: Any, contexts: list[int], label: str, title: str) -> None:
    axes.set_xticks(contexts, [f"{S:,}" for S in contexts])
    axes.set(xlabel="context, tokens", ylabel=label, title=title)
    axes.legend()


def _save(figure: Any, name: str) -> Path:
    figure.savefig(DOCS / name, metadata={"Date": None})
    return DOCS / name


if __name__ == "__main__":
    sys.exit(main())
