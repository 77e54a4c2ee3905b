"""The contenders of `mlx-sparse bench --engine cuda`: what is measured, what is right, and what is held back.

On a GPU it runs there; elsewhere in Triton's interpreter, where its times mean nothing and all else is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref import bench
from mlx_sparse.cuda_ref.bench import cases, dense, inputs, prompts, saap, sparq
from mlx_sparse.cuda_ref.bench.cases import LLAMA, Prompt, SaapCase, SaapSetting, SparQCase, SparQSetting
from mlx_sparse.cuda_ref.bench.device import Device, Recorded
from mlx_sparse.cuda_ref.launchers import blocks
from torch_arrays import DEVICE, to_numpy

from mlx_sparse import oracle
from mlx_sparse.methods import stats
from mlx_sparse.tools.bench.command import main
from mlx_sparse.tools.bench.core import Row, Shape, Turns, measure

K = 1024
H200_L2, H200_MEMORY = 60 << 20, int(0.9 * 141e9)
LENGTHS = [4 * K << i for i in range(8)]
EVERY = cases.sparq_cases(LENGTHS, [1, 8, 64], [LLAMA, Shape(32, 32, 128)], "float16", SparQSetting(32, 128))
EVERY_SAAP = cases.saap_cases([64 * K, *cases.SAAP_BARS], [1], [LLAMA], "float16")
SMALL = [
    SparQCase("float16", Shape(8, 2, 64), 2, 300, (SparQSetting(16, 32), SparQSetting(8, 40), SparQSetting(16, 32, 4))),
    SparQCase("float16", Shape(3, 3, 64), 1, 257, (SparQSetting(16, 32), SparQSetting(16, 32, 4))),
    SparQCase("bfloat16", Shape(3, 1, 128), 1, 200, (SparQSetting(128, 40), SparQSetting(128, 40, 8))),
]
SETTINGS = cases.equal(0.1, 32, 64), SaapSetting(24, 8, 0.3, "a column", 64)
SAAP = SaapCase("float16", Shape(4, 2, 64), 2, 500, SETTINGS, 2, 38)  # few exact keys, so that there are others
PROMPT = Prompt("float16", Shape(2, 1, 64), 1, 400, block_size=32)
by_case = pytest.mark.parametrize("case", SMALL, ids=str)
by_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)
plain_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is on the CPU


@pytest.fixture(scope="module")
def device() -> Device:
    return Device()


def arrays(given: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values for the oracle."""
    return tuple(t.double().cpu().numpy() for t in (given.queries, given.keys[0], given.values[0]))


def sparq_settings(setting: SparQSetting) -> dict[str, int]:
    how = {"rank": setting.rank, "top_k": setting.top_k, "local_window": setting.window}
    return {**how, "key_bits": setting.key_bits}


def routed(setting: SaapSetting) -> saap.Routed:
    return saap.Routed(saap.SaapInputs(SAAP, 2, DEVICE), setting)


def oracle_route(found: saap.Routed) -> np.ndarray:
    network = {name: to_numpy(array) for name, array in found.networks[0]._asdict().items()}
    return oracle.saap_route(to_numpy(found.inputs.before), probes=found.setting.probes, **network)


# --- what is measured


def test_the_papers_case_comes_first_then_those_with_bars_then_the_rest_by_size() -> None:
    assert EVERY[0].papers
    held = [case for case in EVERY if case.bar]
    assert len(held) == 11
    assert set(EVERY[: len(held)]) == set(held)
    for part in (EVERY[1 : len(held)], EVERY[len(held) :]):
        assert [case.keys for case in part] == sorted(case.keys for case in part)
    assert len(EVERY) == len(set(EVERY)) == 48


@pytest.mark.parametrize("S", [4 * K, 64 * K, 512 * K])
def test_an_eighth_moves_an_eighth(S: int) -> None:
    setting = cases.eighth(S, 128)
    moved = stats.sparq_elements(S, 128, rank=setting.rank, top_k=setting.top_k)
    assert moved / stats.dense_elements(S, 128) == pytest.approx(1 / 8, rel=0.01)


def test_caches_are_enough_that_l2_holds_nothing_and_fit_where_bars_are() -> None:
    for case in (*EVERY, *EVERY_SAAP):
        copies = case.copies(H200_L2)
        assert copies * case.least >= 3 * H200_L2
        if case.bar:
            assert case.memory(copies) < H200_MEMORY
    for case in EVERY:
        for setting in case.settings:
            read = case.rows * (case.S * setting.scored(case.item) + case.item * 2 * setting.top_k * case.D)
            assert case.copies(H200_L2) * read >= 3 * H200_L2
    most = next(case for case in EVERY if case.B == 64 and case.S == 512 * K)
    assert most.memory(1) > H200_MEMORY


@by_case
def test_the_memory_of_inputs_is_within_the_estimate(case: SparQCase) -> None:
    made = inputs.SparQInputs(case, 2, DEVICE)
    taken = sum(t.numel() * t.element_size() for t in (made.keys, made.values, made.keys_t))
    assert taken == 2 * 3 * case.keys < case.memory(2)
    for cache in (made.keys, made.values, made.keys_t):
        assert torch.equal(cache[0], cache[1])
    assert torch.equal(made.keys_t[1], made.keys[0].transpose(-1, -2))


def test_every_bar_is_a_case_with_the_papers_network_at_5_percent() -> None:
    assert {case.S: case.bar for case in EVERY_SAAP if case.bar} == cases.SAAP_BARS
    for case in EVERY_SAAP:
        held, small, skewed = case.settings
        assert (held.hidden, held.buckets) == (1024, 1024)
        assert held.share == pytest.approx(0.05, rel=0.01)
        assert (small.hidden, small.share) == (256, held.share)
        assert (skewed.probes, skewed.share) == (32, cases.TABLE_5[case.S][1])


@by_setting
def test_visited_buckets_hold_the_share_that_is_asked_for(setting: SaapSetting) -> None:
    found = routed(setting)
    visited = oracle_route(found)
    ids = to_numpy(found._bucket_ids)
    measured = oracle.saap.selectivity(ids, visited, SAAP.sink_tokens, SAAP.recent_tokens)
    assert measured == pytest.approx(setting.share, rel=0.01)
    shares = setting.head_shares(SAAP.Hkv)
    assert (min(shares) < max(shares)) == bool(setting.column)
    covered = slice(SAAP.sink_tokens, SAAP.S - SAAP.recent_tokens)
    for h, share in enumerate(shares):
        sizes = np.bincount(ids[0, h, covered], minlength=setting.buckets)[visited[0, h]] / SAAP.outside
        np.testing.assert_allclose(sizes, setting.bucket_shares(share), atol=1.01 / SAAP.outside)


def test_every_copy_has_arrays_of_its_own() -> None:
    found = routed(SETTINGS[0])
    for first, second in zip(found.networks[0], found.networks[1], strict=True):
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
    first, second = found.indices
    assert torch.equal(first.key_ids, second.key_ids)
    assert first.key_ids.data_ptr() != second.key_ids.data_ptr()


def test_the_bars_leave_time_for_launches() -> None:
    """A bar that bytes alone do not allow could not be met."""
    for case in EVERY_SAAP:
        moved = sum(case.parts(case.settings[0]))
        assert case.dense_bytes / moved > 1.5 * (case.bar or 1)


# --- what is right


@by_case
def test_the_reference_of_sparq_is_the_oracle(case: SparQCase) -> None:
    made = inputs.SparQInputs(case, 1, DEVICE)
    dense = inputs.expected_dense(made)
    exact = oracle.dense_attention(*arrays(made))
    np.testing.assert_allclose(dense.out.cpu().numpy().reshape(exact.shape), exact, rtol=0, atol=1e-12)
    assert 0 < dense.allowed < 0.1
    for setting in case.settings:
        choice = inputs.Choice(made, setting)
        q, k, v = arrays(made)
        chosen = oracle.sparq_select(q, k, **sparq_settings(setting))
        indices = torch.tensor(chosen.indices, device=DEVICE)
        assert choice.wrong(indices, setting.window, 1e-9) is None
        exact = oracle.sparq_attention(q, k, v, **sparq_settings(setting))
        found = choice.expected(indices).out.cpu().numpy().reshape(exact.shape)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-7)  # the mean of the values is float32


@by_setting
def test_the_reference_of_saap_is_the_oracle(setting: SaapSetting) -> None:
    found = routed(setting)
    visited = oracle_route(found)
    assert found.wrong_route((torch.tensor(visited, device=DEVICE),)) is None
    window = {"sink_tokens": SAAP.sink_tokens, "recent_tokens": SAAP.recent_tokens}
    ids = to_numpy(found._bucket_ids)
    given = found.inputs.queries, found.inputs.keys[0], found.inputs.values[0]
    exact = oracle.saap_attention(*map(to_numpy, given), bucket_ids=ids, visited=visited, **window)
    expected = saap.expected_over(found.inputs, found.attended(torch.tensor(visited, device=DEVICE)))
    np.testing.assert_allclose(expected.out.cpu().numpy().reshape(exact.shape), exact, rtol=0, atol=1e-12)


def test_the_reference_of_prompts_is_the_oracle_over_the_drawn_blocks() -> None:
    drawn = prompts.PromptInputs(PROMPT, DEVICE)
    kept, counts = drawn.drawn(0.4)
    layout = PROMPT.layout
    lists = prompts.sample.merge(kept, layout, 0, layout.row_blocks, layout.key_blocks, torch.empty_like(counts))
    assert torch.equal(counts, (lists >= 0).sum(dim=3, dtype=torch.int32))
    assert 0.3 < float(counts.sum() / PROMPT.Hq / layout.causal_pairs) < 0.6
    q, k, v = (array.double().cpu().numpy() for array in drawn.qkv)
    out, _ = oracle.attend_blocks(q, k, v, lists.cpu().numpy(), block_size=32)
    found = drawn.expected(kept).out.cpu().numpy().reshape(4, PROMPT.Hq, 64)
    np.testing.assert_allclose(found, out[0][:, drawn.checked].swapaxes(0, 1), rtol=0, atol=1e-12)


def field(case: Any, device: Device, copies: int = 2) -> list[Recorded]:
    """The contenders of a case."""
    if isinstance(case, Prompt):
        return list(prompts.contenders(case, [cases.HELD], device))
    return list((saap if isinstance(case, SaapCase) else sparq).contenders(case, copies, device))


@plain_flex
@pytest.mark.parametrize("case", [*SMALL, SAAP, PROMPT], ids=str)
def test_every_contender_is_right_on_every_copy(case: Any, device: Device) -> None:
    ran = []
    for contender in field(case, device):
        name = contender.row.name
        try:
            contender.prepare()
            assert contender.check() is None, name
        except RuntimeError as error:
            assert "cudnn" in name or "efficient" in name, error  # which need a GPU, and not even there take all
            continue
        assert contender.step(0).seconds > 0
        ran.append(name)
    ours = {SparQCase: {"flash-gqa", "plain-sparq", "sparq", "scores", "scores+select"}, SaapCase: set(saap.NAMES)}
    assert ours.get(type(case), {"flash", "sampling", "attend", "included"}) | {"dense", "flex"} <= set(ran)


@pytest.mark.parametrize(
    "spoil",
    [lambda out: out * (15 / 16), lambda out: out.flatten().index_fill(0, torch.tensor(out.numel() - 1), torch.nan)],
    ids=["off by one tile", "not written"],
)
@pytest.mark.parametrize("name", ["dense", "sparq", "plain-sparq", "scores"])
def test_a_wrong_result_is_found(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], device: Device) -> None:
    contender = next(one for one in field(SMALL[0], device, 1) if one.row.name == name)
    step, wrong = contender._make()
    first, *rest = step(0)
    if name == "scores":  # rows are padded to multiples of 16
        first = first[..., : SMALL[0].S].contiguous()
    assert wrong((first, *rest)) is None
    assert "wrong" in str(wrong((spoil(first.cpu()).to(first.device).reshape(first.shape), *rest)))


def with_another_key(indices: torch.Tensor, case: SparQCase, window: int) -> torch.Tensor:
    indices[0, 0, 0] = next(key for key in range(case.S - window) if key not in indices[0, 0].tolist())
    return indices.sort(dim=2).values


def outside_the_window(indices: torch.Tensor, case: SparQCase, window: int) -> torch.Tensor:
    """All but the first key of the window, and one more key before it."""
    indices[0, 0, -window] = next(key for key in range(case.S - window) if key not in indices[0, 0].tolist())
    return indices.sort(dim=2).values


def with_first(indices: torch.Tensor, key: int) -> torch.Tensor:
    return torch.cat([torch.full_like(indices[..., :1], key), indices[..., 1:]], 2)


SPOILT_CHOICES: dict[str, Callable[[torch.Tensor, SparQCase, int], torch.Tensor]] = {
    "another key": with_another_key,
    "outside the window": outside_the_window,
    "not ascending": lambda indices, case, window: indices.flip(2),
    "one too few": lambda indices, case, window: indices[..., 1:],
    "an empty slot": lambda indices, case, window: with_first(indices, -1),
    "beyond the keys": lambda indices, case, window: with_first(indices, case.S).sort(dim=2).values,
}


@pytest.mark.parametrize("spoil", SPOILT_CHOICES.values(), ids=SPOILT_CHOICES)
def test_a_wrong_choice_is_found(spoil: Callable[[torch.Tensor, SparQCase, int], torch.Tensor]) -> None:
    case = SMALL[0]
    (setting, *_) = case.settings
    step, wrong = sparq.Field(inputs.SparQInputs(case, 1, DEVICE), setting).make("scores+select")
    (indices,) = step(0)
    assert wrong((indices,)) is None
    assert str(wrong((spoil(indices.clone(), case, setting.window),))).startswith("wrong choice: ")


def another_bucket(out: Any) -> Any:
    visited = out[0].clone()
    others = [bucket for bucket in range(64) if bucket not in visited[0, 0].tolist()]
    visited[0, 0, 0] = others[0]
    return (visited.sort(dim=2).values,)


def a_key_twice(out: Any) -> Any:
    indices = out[0].clone()
    indices[0, 0, 1] = indices[0, 0, 0]
    return indices, out[1]


def one_key_less(out: Any) -> Any:
    counts = out[1].clone()
    counts[0, 0] -= 1
    return out[0], counts


SPOILT: list[tuple[str, Callable[[Any], Any], str]] = [
    ("network", another_bucket, "wrong buckets: one left out scores"),
    ("network", lambda out: (out[0].flip(2),), "wrong buckets: expected"),
    ("network+list", a_key_twice, "wrong list: "),
    ("network+list", one_key_less, "wrong list: "),
    ("saap", lambda out: (out[0] * (15 / 16), *out[1:]), "wrong result: "),
]


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILT)
def test_a_wrong_step_of_saap_is_found(name: str, spoil: Callable[[Any], Any], message: str) -> None:
    step, wrong = routed(SETTINGS[0]).make(name)
    out = step(0)
    assert wrong(out) is None
    assert str(wrong(spoil(out))).startswith(message)


def test_a_share_of_the_keys_that_is_not_the_one_asked_for_is_found() -> None:
    found = routed(SETTINGS[0])
    found.setting = replace(found.setting, share=0.2)
    assert str(found.wrong_list(found.list(0))).startswith("wrong share of the keys: ")


@plain_flex
def test_a_wrong_prompt_is_found(device: Device) -> None:
    for contender in field(PROMPT, device):
        if contender.row.name != "cudnn":  # it needs a GPU
            step, wrong = contender._make()
            out = step(0)
            assert wrong(out) is None, contender.row.name
            assert str(wrong((torch.zeros_like(out[0]), *out[1:]))).startswith("wrong "), contender.row.name


# --- what is held back


def test_no_time_beside_a_wrong_result_on_any_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    def spoilt(self: Recorded) -> None:
        prepare(self)
        if self.row.name in ("sparq", "flash-gqa"):
            run = self._steps.run

            def wrong() -> None:
                run()
                self._steps.outputs[-1] = tuple(out + 0.1 for out in self._steps.outputs[-1])

            self._steps.run = wrong

    prepare = Recorded.prepare
    monkeypatch.setattr(Recorded, "prepare", spoilt)
    monkeypatch.setattr(SparQCase, "copies", lambda self, l2: 2)
    target = tmp_path / "cuda.jsonl"
    arguments = ["step", "--lengths", "200", "--batches", "1", "--shapes", "4x2x64", "--attn", "sparq:rank=16,top_k=32"]
    assert main([*arguments, "--repeat", "1", "-o", "jsonl", "--out", str(target)], "cuda") == 1
    assert capsys.readouterr().out == target.read_text()
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    for row in (line for line in lines if line["kind"] == "row"):
        wrong = row["contender"] in ("sparq", "flash-gqa")
        assert row["failed"] == wrong
        if wrong:
            assert row["note"].startswith("wrong result: error ")
            assert row["us"] is row["us_min"] is None
        elif row["us"]:
            assert (row["turns"], row["us"]) == (1, row["us_min"])
            bandwidth = row["run"]["machine"]["copy_bytes_per_second"]
            assert row["floor_us"] == pytest.approx(1e6 * row["bytes"] / bandwidth)
    text = lines[-1]["text"]
    assert "**Failed:**\n\n* torch SDPA flash, enable_gqa, 4x2x64, float16, batch 1, S = 200: wrong result" in text
    assert "| our sparq_decode, r=16, k=32 |  |" in text


@pytest.mark.parametrize("attn", ["saap", "sample"])
def test_the_other_commands_print_their_tables(attn: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench, "SAAP_LEAST", 100)
    monkeypatch.setattr(cases, "saap_cases", lambda *given: [replace(SAAP, B=1)])
    prompt = ["prompt", "--lengths", "300", "--shapes", "1x1x64", "--densities", "0.5"]
    arguments = prompt if attn == "sample" else ["step", "--attn", "saap", "--lengths", "500", "--shapes", "4x2x64"]
    assert main([*arguments, "--repeat", "1", "-o", "jsonl"], "cuda") == 0
    *lines, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line["kind"] == "row"]
    assert end["right"] and all(row["note"] or row["turns"] == 1 for row in rows)
    if attn == "sample":
        names = ["flash", "cudnn", "dense", "sampling", "attend", "included"]
        assert [row["contender"] for row in rows] == names and "| 1/1, 64 | 300 |" in end["text"]
    else:
        assert [row["hidden"] for row in rows if row["contender"] == "saap"] == [32, 24]
        assert "| 4/2, 64, 1 | 500 | H=32, 9.4%, equal buckets |" in end["text"]


def test_what_our_code_raises_is_a_failure_and_what_a_library_raises_is_not(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel\nand a long story")

    monkeypatch.setattr(saap.Routed, "step", broken)
    monkeypatch.setattr(dense, "dense_step", broken)
    rows = measure(SAAP, field(replace(SAAP, settings=SETTINGS[:1]), device), Turns(1))
    assert [row.name for row in rows if row.failed] == ["dense", "saap"]
    assert {row.note for row in rows if row.name in dense.NAMES} == {"no kernel"}


def test_what_fails_before_a_prompts_step_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no lists")

    monkeypatch.setattr(prompts.sample, "merge", broken)
    rows = measure(PROMPT, prompts.contenders(PROMPT, [0.1], device), Turns(1))
    assert [(row.name, row.note) for row in rows if row.failed] == [("", "no lists")]
    assert [row.name for row in rows if row.turns] == ["flash", "dense", "sampling"]


def test_a_broken_kernel_of_prompts_fails_where_it_is_used(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(blocks.Prefill, "attend", lambda *_: 1 / 0)
    rows = measure(PROMPT, prompts.contenders(PROMPT, [0.5], device), Turns(1))
    assert {row.name for row in rows if row.failed} == {"dense", "attend", "included"}


def test_the_results_of_contenders_do_not_pile_up(device: Device) -> None:
    for contender in prompts.contenders(replace(PROMPT, S=140), [], device):
        if contender.row.name != "cudnn":
            contender.prepare()
            contender.check()
            assert not contender._steps.outputs


def test_cases_that_do_not_fit_or_have_no_setting_are_left_out_with_the_reason(device: Device) -> None:
    def rows(case: Any) -> list[Row]:
        return list(bench.steps(case, 0.0, sparq.contenders, device, 1))

    (huge,) = rows(replace(SMALL[0], S=1 << 40))
    assert re.fullmatch(r"left out: needs \d+ GB of the \d+ GB there are", huge.note or "")
    (pointless,) = rows(replace(SMALL[0], settings=()))
    assert pointless.note == "left out: SparQ would attend to all keys"
