"""scripts/roofline_machines.py: its bytes against real models, its sums by hand, and the pages that hold it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import machines_model as machines
import mlx.core as mx
import pytest
import roofline_machines
from machines_model import CHIPS, JACCL, LENGTHS, LINKS, MODELS, RING, SHOWN, Message, Model, Way
from mlx import nn
from tiny_models import VOCAB, build

from mlx_sparse.common.shares import BLOCK
from mlx_sparse.common.thresholds import Layer
from mlx_sparse.methods import SparQ, Step
from mlx_sparse.methods.quest import Quest
from mlx_sparse.tools.advise.traffic import Served, side_bytes, weights_read
from mlx_sparse.tools.bench.core import Shape

DOCS = Path(__file__).parents[2] / "docs"
LLAMA = MODELS[0]


def quantised(family: str, **changes: Any) -> Any:
    model = build(family, hidden_size=64, intermediate_size=128, head_dim=32, **changes)
    nn.quantize(model, group_size=64, bits=4)
    return model


def of_matrices(model: Any) -> int:
    """Bytes of all arrays but norms."""
    modules = [module for _, module in model.named_modules() if hasattr(module, "scales")]
    return sum(array.nbytes for module in modules for array in module.values() if isinstance(array, mx.array))


@pytest.mark.parametrize(
    ("family", "changes", "model"),
    [
        ("llama", {}, Model("", 2, 64, Shape(4, 2, 32), 128, VOCAB)),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 64},
            Model("", 2, 64, Shape(4, 2, 32), 64, VOCAB, experts=4, active=2),
        ),
    ],
)
def test_weights_are_those_of_a_quantised_model(family: str, changes: dict[str, Any], model: Model) -> None:
    found = quantised(family, **changes)
    found.set_dtype(mx.float16)
    assert model.weights(1, held=True) == of_matrices(found)
    norms = sum(m.weight.nbytes for _, m in found.named_modules() if isinstance(m, nn.RMSNorm))
    assert model.weights(1, held=False) == weights_read(found) - norms
    whole = found.lm_head.weight.nbytes + found.lm_head.scales.nbytes + found.lm_head.biases.nbytes
    if model.experts == 1:  # what two machines share is all but the output matrix
        assert model.weights(2, held=False) == (model.weights(1, held=False) + whole) / 2


SIZES = dict(zip(MODELS, (8.03, 30.5, 70.6), strict=True))


@pytest.mark.parametrize(("model", "billions"), SIZES.items(), ids=[model.name for model in MODELS])
def test_the_models_are_of_the_size_in_their_names(model: Model, billions: float) -> None:
    assert model.weights(1, held=True) / machines.WEIGHT == pytest.approx(billions * 1e9, rel=0.005)


def test_what_is_kept_beside_the_cache_is_what_the_cache_keeps() -> None:
    S, D, heads = 4096, 64, 2
    layer = Layer("ops", Step(heads, 2, D, 2), mx.float16)
    for config in (SparQ(), SparQ(key_bits=16), Quest()):
        kept = side_bytes([Served(config.for_model(qk_norm=False), layer, 1)], S)
        assert heads * machines.beside(config, S, D) == pytest.approx(kept, rel=0.03), config


@pytest.mark.parametrize("S", [1, 63, 64, 65, 8192, 10_000])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_fullest_machine_holds_the_most_keys(S: int, number: int) -> None:
    dealt = Counter((p // BLOCK) % number for p in range(S))
    assert max(dealt.values()) <= machines.owned(S, number) < max(dealt.values()) + BLOCK


@pytest.mark.parametrize(
    ("link", "collective", "steps", "sent"),
    [
        (RING, "sum", 6, 1500),
        (RING, "gather", 3, 3000),
        (RING, "send", 1, 1000),
        (JACCL, "sum", 1, 1000),
        (JACCL, "gather", 1, 1000),
        (JACCL, "send", 1, 1000),
    ],
)
def test_a_collective_on_four_machines(link: machines.Link, collective: str, steps: int, sent: int) -> None:
    assert link.steps(collective, 4) == steps
    assert link.sent(Message(collective, 1000, 1), 4) == sent


def test_messages_of_a_token() -> None:
    def found(way: Way) -> list[Message]:
        return machines.messages(LLAMA, way, 4)

    assert found(Way("one", SparQ())) == []
    assert found(Way("tensor", SparQ())) == [Message("sum", 8192, 64)]
    assert found(Way("pipeline")) == [Message("send", 8192, 3), Message("gather", 8192, 1)]
    merged = Message("gather", 4 * 32 * 129, 32)
    assert found(Way("context")) == found(Way("context", SparQ())) == found(Way("context", Quest())) == [merged]
    assert found(Way("context", SparQ(), exact=True)) == [
        merged,
        Message("gather", 4 * 32, 32),
        Message("gather", 4 * 8 * 128, 32),
    ]
    assert found(Way("context", Quest(), exact=True)) == [merged, Message("gather", 4 * 8 * 64, 32)]


def test_time_is_bytes_steps_and_what_is_sent() -> None:
    S, kv = 131_072, 32 * 8 * 2 * (2 * 131_072 * 128 + 2 * 128)
    weights = LLAMA.weights(1, held=False)
    (one,) = set(machines.time(SHOWN, RING, LLAMA, Way("one"), 1, S))
    assert one == pytest.approx(1e3 * (weights + kv) / 546e9)
    best, worst = machines.time(SHOWN, RING, LLAMA, Way("context"), 4, S)
    reading = 1e3 * (weights + kv / 4) / 546e9
    sent = 32 * 3 * 4 * 32 * 129
    assert best == pytest.approx(reading + 1e3 * (96 * 170e-6 + sent / 7e9), rel=1e-4)
    assert worst == pytest.approx(reading + 1e3 * (96 * 475e-6 + sent / 1.25e9), rel=1e-4)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_what_each_way_divides(model: Model, link: machines.Link) -> None:
    S = 131_072
    one, tensor, pipeline, context = (Way(sharing) for sharing in ("one", "tensor", "pipeline", "context"))
    whole = machines.held(model, one, 1, S)
    for number in machines.MACHINES:
        divided = [machines.held(model, way, number, S) for way in (tensor, context)]
        assert [kv for _, kv, _ in divided] == [whole[1] / number] * 2
        assert divided[1][0] == whole[0]  # of the weights nothing is divided
        assert whole[0] / number < divided[0][0] < whole[0]
        assert machines.time(SHOWN, link, model, pipeline, number, S) > machines.time(SHOWN, link, model, one, 1, S)
        exact, local = (Way("context", SparQ(), exact=choice) for choice in (True, False))
        times = [machines.time(SHOWN, link, model, way, number, S) for way in (exact, local)]
        assert times[0] > times[1]


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("end", machines.END.values(), ids=machines.END)
def test_from_where_it_pays_on_it_is_faster(link: machines.Link, end: int) -> None:
    for ours, theirs in machines.pairs(SparQ()):
        first = machines.pays_from(SHOWN, link, LLAMA, ours, theirs, 2, end)
        for S in LENGTHS:
            times = [machines.time(SHOWN, link, LLAMA, way, 2, S)[end] for way in (ours, theirs)]
            if first is not None and S >= first:
                assert times[0] < times[1], (ours, theirs, S)
            elif S == LENGTHS[-1] or (first is not None and S == LENGTHS[LENGTHS.index(first) - 1]):
                assert times[0] >= times[1], (ours, theirs, S)


def test_the_longest_context_is_the_last_that_fits() -> None:
    for chip in CHIPS:
        for way in (Way("one"), Way("tensor", SparQ()), Way("context", SparQ())):
            number = 1 if way.sharing == "one" else 4
            S = 1024 * machines.longest(chip, MODELS[2], way, number)
            assert machines.fits(chip, MODELS[2], way, number, S)
            assert not machines.fits(chip, MODELS[2], way, number, S + 4 * 1024)


def test_slower_steps_than_said_make_context_sharding_faster_than_tensor_parallelism() -> None:
    for link in LINKS:
        between = machines.indifferent(SHOWN, link, LLAMA, 2)
        endless = (float("inf"), float("inf"))
        for factor, faster in ((0.9, False), (1.1, True)):
            slow = machines.Link("", link.mesh, (factor * between, factor * between), endless)
            context, tensor = (machines.time(SHOWN, slow, LLAMA, Way(s), 2, 32_768)[0] for s in ("context", "tensor"))
            assert (context < tensor) == faster


def test_the_command_prints_what_the_page_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline_machines.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("    python scripts/roofline_machines.py\n\nA model, not a measurement")
    page = (DOCS / "results" / "machines_model.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", printed, re.MULTILINE)
    assert len(tables) == 8
    for table in tables:
        assert table in page, table.partition("\n")[0]
    assert roofline_machines.main(["-o", "json", "--attn", "quest"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["chip"] for row in rows} == {chip.name for chip in CHIPS}


def test_the_page_of_servers_says_what_is_sent_per_layer() -> None:
    section = (DOCS / "servers.md").read_text(encoding="utf-8").partition("## Which sharding when")[2]
    rows = {row.split(" | ")[0]: row for row in section.splitlines()}
    layer = Model("", 1, LLAMA.hidden, LLAMA.shape, LLAMA.units, 0)
    for start, way in {
        "| tensor": Way("tensor"),
        "| context, dense, `streaming`, `saap`, or a local choice": Way("context"),
        "| context, `sparq` chosen exactly": Way("context", SparQ(), exact=True),
        "| context, `quest` chosen exactly": Way("context", Quest(), exact=True),
    }.items():
        found = machines.messages(layer, way, 2)
        assert f"| {sum(m.times for m in found)} " in rows[start], start
        assert f"| {sum(m.times * m.nbytes for m in found):,} |" in rows[start], start


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("sparq:rank=129", "rank: expected at most the head dim D=128, got 129."),
        ("saap", "--attn: expected sparq or quest with or without parameters, got saap."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(attn: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline_machines.main(["--attn", attn]) == 2
    assert capsys.readouterr().err == f"roofline_machines.py: error: {message}\n"
