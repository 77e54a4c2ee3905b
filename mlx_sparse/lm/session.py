"""Define `Session`, a running command of mlx-lm or mlx-vlm. It checks options, loads models and prints reports."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.call_report import JSON_KEY, Counts, Report, listing
from ..checks import ConfigError, SparseAttentionError
from ..core import registry
from ..core.base import Method, Prefill
from ..core.decide import NEVER
from ..model_info import is_drafter
from .loading import blas_note, has_all_weights, loading, quantizing, refuse_rotating_cache, unfit_warning
from .options import fail, print_error, print_line, requested
from .ranks import Ranks, difference, facts_of

if TYPE_CHECKING:
    from mlx import nn

    from ..calibrate import Calibration
    from .plan import Plan

T = TypeVar("T")
LONG_PROMPT = 512  # tokens of a prompt whose prefill is reported
INTERVAL = 5.0  # seconds between two lines about a prefill


class Session:
    """Options, models and reports of a running command of mlx-lm or mlx-vlm.

    Attributes:
        report_format: value of ``--attn-report``.
        reports: dict from (model path, methods) to the report.
        requests: dict from the kind of lm-eval request to numbers of sparse and dense attention calls.
        ranks: rank of this process and number of ranks.
    """

    def __init__(self, command: str) -> None:
        self.report_format = "text"
        self.reports: dict[tuple[str, tuple[Method, ...]], Report] = {}
        self.requests: dict[str, object] = {}
        self.ranks = Ranks()
        self.command = command
        self.library = "mlx_vlm" if command.startswith("mlx_vlm") else "mlx_lm"
        self.only_prompts = command.endswith("cache_prompt")
        self.suites = command.endswith("evaluate")
        self.serves = command.endswith("server") and self.library == "mlx_lm"
        self.configs: tuple[Method, ...] = ()
        self.named = False  # True if an option names the methods, so that MLX_SPARSE_ATTN does not
        self.prefill: Prefill | None = None
        self.decode: Method | None = None
        self.backend = "auto"
        self.calibration: Calibration | None = None
        self.max_tokens: int | None = None
        self.max_kv_size: int | None = None
        self.lossless: int | None = None  # number of drafts for each check; 0 to select it by speed
        self.draft: str | None = None
        self.loading: str | None = None
        self.loads = self.loads_at_start = 0
        self.loads_part = False  # True while mlx-lm loads a model that it shards
        self.exit_stack = contextlib.ExitStack()  # closed when the command ends

    def configure(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Check and store the options before a model is loaded. Exit if an option is invalid."""
        from ..calibrate import Calibration

        self.report_format = args.attn_report
        self.lossless = args.lossless
        self.named = args.attn is not None or args.attn_config is not None
        if self.library != "mlx_lm" and self.lossless is not None:
            fail(parser, f"--lossless: expected mlx-lm, got {self.command}.")
        if args.attn is args.attn_config is None:
            if self.lossless is not None:
                fail(parser, "--lossless: expected --attn METHOD for the drafts, got none.")
            return
        try:
            configs, calibrates = requested(args)
            # With --attn dense, mlx-lm's own attention runs, except where ours is requested or needs less memory.
            dense = args.attn_backend != "cpu" and getattr(args, "kv_bits", None) is None
            if dense and self.lossless is None and not any(config.sparse for config in configs):
                return
            prefill, decode = self._checked(args, configs)
        except SparseAttentionError as error:
            fail(parser, str(error))
        names = "+".join(config.name for config in configs)
        if "recall" in self.report_format and prefill is None:
            fail(
                parser,
                f"--attn-report: expected text, full, json or off with --attn {names}, got {self.report_format}.",
            )
        prompt_cache = getattr(args, "prompt_cache_file", None)
        if prompt_cache is not None and not self.only_prompts and not os.path.isfile(prompt_cache):  # noqa: PTH113 - False for a name that is too long
            fail(parser, f"--prompt-cache-file: expected an existing file, got {prompt_cache}.")
        if self.suites and prefill is not None and args.batch_size > 1:
            args.batch_size = 1
            print_line(f"[mlx-sparse] using --batch-size 1: {prefill.name} needs prompts without padding.")
        self.configs, self.prefill, self.decode = configs, prefill, decode
        self.backend = args.attn_backend
        self.calibration = Calibration(
            measures=calibrates, chunk=getattr(args, "prefill_step_size", None) or 2048, progress=self.print_line
        )
        self.max_tokens = getattr(args, "max_tokens", None) if self.command.endswith("generate") else None
        self.max_kv_size = getattr(args, "max_kv_size", None) if self.library == "mlx_lm" else None
        self.draft = getattr(args, "draft_model", None)
        self.loads_at_start = sum(getattr(args, name, None) is not None for name in ("model", "draft_model"))

    def _checked(self, args: argparse.Namespace, configs: tuple[Method, ...]) -> tuple[Prefill | None, Method | None]:
        """Run all checks that need no model, and return the prefill method and the decode method."""
        from .hooks import hooks_of
        from .model import select_methods
        from .speculative.generation import check_drafts, check_options

        prefill, decode = select_methods(configs)
        if self.lossless is not None:
            check_options(args, self.command, generates=not (self.suites or self.only_prompts))
            check_drafts(prefill, decode, self.lossless or None)
        for config in configs:
            registry.require(args.attn_backend, config.name)
            hooks_of(config).check(config)
        return prefill, decode

    def handshake(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace | None, *, refused: bool = False
    ) -> None:
        """Check that all ranks run the same command. If they do not, exit on all ranks.

        Args:
            args: the parsed arguments of the command; None if they could not be parsed.
            refused: True if this rank has printed an error about its arguments and will exit.
        """
        problem = None
        try:
            self.ranks = Ranks.start()
            if self.ranks.size == 1:
                return
            files = [config.file for config in self.configs if config.file is not None]
            facts = None if args is None else facts_of(args, files)
            gathered = self.ranks.gather({"facts": facts, "refused": refused})
            problem = difference([rank["facts"] for rank in gathered], [rank["refused"] for rank in gathered])
        except ConfigError as error:
            problem = str(error)
        if problem is not None and not refused:
            fail(parser, problem)

    def find(self, original: Callable[..., T], model: str, *args: object, **kwargs: object) -> T:
        """Find ``model`` on disk or on the Hugging Face Hub as mlx-lm does, and record that this command loads it."""
        self.loads += not self.loads_part
        self.loading = model
        with self._exiting_on_error(), loading(model):
            return original(model, *args, **kwargs)

    def quantize(self, original: Callable[..., T], caches: list[object], *args: object, **kwargs: object) -> T:
        """Quantize ``caches`` as mlx-lm's ``maybe_quantize_kv_cache`` does, from the start that the user has set."""
        with quantizing(caches):
            return original(caches, *args, **kwargs)

    def stream(self, original: Callable[..., Any], model: nn.Module, *args: object, **kwargs: object) -> Iterator[Any]:
        """Generate as mlx-lm's ``stream_generate`` does, print the progress of the prefill, and report its time."""
        from .model import plan_of

        start = printed = time.monotonic()

        def count(done: int, total: int) -> None:
            nonlocal printed
            now = time.monotonic()
            if total >= LONG_PROMPT and (not done or (done < total and now >= printed + INTERVAL)):
                speed = f", {done / (now - start):,.1f} tokens/s" if done else ""
                self.print_line(f"prefill: {done:,} of {total:,} tokens{speed}")
                printed = now

        plan = plan_of(model)
        for n, response in enumerate(original(model, *args, **{"prompt_progress_callback": count} | kwargs)):
            if plan is not None and n == 0:
                seconds = response.prompt_tokens / response.prompt_tps
                plan.report.add(Counts(time_to_first_token=(seconds,)))
            yield response

    def load(self, original: Callable[..., Any], model: Path, *args: object, **kwargs: object) -> object:
        """Load a model as mlx-lm's ``load_model`` does, and enable the methods on this model."""
        from ..model_info import record_facts

        with self._exiting_on_error():
            with loading(model):
                if self.max_kv_size is not None:
                    refuse_rotating_cache(Path(model))
                loaded = original(model, *args, **kwargs)
            enabled = loaded[0] if isinstance(loaded, tuple) else loaded  # mlx-vlm returns the model only
            if self.loads_part:
                complete = any(config.file is not None for config in self.configs) and has_all_weights(Path(model))
                record_facts(enabled, complete=complete)
            elif (plan := self._enable(enabled, str(model))) is not None:
                if self.serves:  # requests do not wait for a measurement: a model of a request has modeled lengths
                    at_start = self.loads <= self.loads_at_start
                    plan.calibration.measure_now(plan.layers if at_start else ())
                self._print_start(plan, enabled)
        return loaded

    def load_part(self, original: Callable[..., Any], model: str, *args: object, **kwargs: object) -> object:
        """Load this rank's part of a model and enable the methods."""
        self.loads += 1
        self.loads_part = True
        try:
            loaded = original(model, *args, **kwargs)
        finally:
            self.loads_part = False
        with self._exiting_on_error():
            self._enable_part(loaded[0], str(model))
        return loaded

    def _enable_part(self, model: nn.Module, path: str) -> None:
        """Enable the methods on this rank's part of a model. If one rank fails, raise an error on all ranks."""
        from .model import require_served

        plan, refusal = None, None
        try:
            plan = self._enable(model, path)
        except SparseAttentionError as error:
            refusal = error
        gathered = self.ranks.gather([refusal and str(refusal), plan and plan.report.served_layers])
        if refusal is not None:
            raise refusal
        for rank, (text, _) in enumerate(gathered):
            if text is not None:
                raise ConfigError(f"rank {rank}: {text}")
        if plan is not None:
            if not any(served for _, served in gathered):
                require_served(plan.report, plan.name)
            self._print_start(plan, model)

    def _enable(self, model: nn.Module, path: str) -> Plan | None:
        """Enable the methods on a loaded model.

        If the command has loaded the model before, the earlier report counts the calls of both models.

        Returns:
            The plan of the model, or None if no method applies to the model.
        """
        from .model import enable, plan_of

        configs = self.configs
        if is_drafter(model):
            return None
        if self.loading == self.draft:
            # An artefact belongs to the main model, not to the draft model.
            configs = tuple(config for config in configs if config.file is None)
        if not configs:
            return None
        report = enable(
            model,
            configs,
            backend=self.backend,
            recall="recall" in self.report_format,
            calibration=self.calibration,
            lossless=self.lossless is not None,
            draft_tokens=self.lossless or None,
        )
        plan = plan_of(model)
        assert plan is not None
        report.model = Path(path).name
        plan.count_in(self.reports.setdefault((path, configs), report))
        plan.decodes = not self.only_prompts
        if (known := unfit_warning(report.model_type)) is not None:
            self.print_line(known)
        return plan

    def _print_start(self, plan: Plan, model: nn.Module) -> None:
        """Print the sparse layers, the crossover lengths and the BLAS before the first token is generated."""
        if self.report_format not in ("text", "full", "recall"):
            return
        self.print_line("; ".join([*plan.report.opening(), *filter(None, [blas_note(model)])]))
        if self.max_tokens is not None and plan.decodes and plan.configs:
            plan.watch = functools.partial(self._watch, plan)

    def _watch(self, plan: Plan, S: int, counts: Counts) -> None:
        """Print a line if no attention call in this run can be sparse.

        Args:
            S: number of keys in the first decode step.
            counts: numbers of sparse and dense attention calls in the first decode step.
        """
        prompts = plan.report.prefill
        if counts.sparse_calls or (prompts is not None and prompts.calls):
            return
        starts, longest = plan.sparse_from(), S + (self.max_tokens or 0)
        if S < starts <= longest:
            return
        if longest < starts < NEVER:
            reason = f"this run has at most {longest:,} keys, and decode steps are sparse from {starts:,} keys"
        elif plan.lossless is not None and starts < NEVER:  # the first step of a lossless run is dense
            return
        else:
            reason = f"calls so far: {listing(plan.report.dense_calls)}"
        self.print_line(f"no call will be sparse: {reason}")

    @contextlib.contextmanager
    def _exiting_on_error(self) -> Iterator[None]:
        """Exit if a worker thread cannot load the first model, because mlx-lm's server would otherwise keep running."""
        try:
            yield
        except SparseAttentionError as error:
            if self.loads <= self.loads_at_start and threading.current_thread() is not threading.main_thread():
                print_error(self.command, str(error))
                os._exit(2)
            raise

    def prints(self) -> bool:
        """Return True if this process prints. Only rank 0 prints, and ``--attn-report off`` disables all printing."""
        return self.report_format != "off" and self.ranks.rank == 0

    def print_line(self, text: str) -> None:
        """Print ``text`` with a prefix to standard error. Do nothing if `prints` is False."""
        if self.prints():
            print_line(f"[mlx-sparse] {text}")

    def log(self, text: str) -> None:
        """Write ``text`` to the command's log. Do nothing if `prints` is False."""
        if self.prints():
            logging.info(f"[mlx-sparse] {text}")

    def as_dict(self) -> dict[str, object]:
        """Return the reports as plain data for JSON."""
        reports = {JSON_KEY: [report.as_dict() for report in list(self.reports.values())]}
        return reports | ({"requests": self.requests} if self.requests else {})

    def print_report(self) -> None:
        """Print the reports to standard error, because the generated text goes to standard output."""
        if not self.prints():
            return
        if "json" in self.report_format:
            print_line(json.dumps(self.as_dict()))
        else:
            for report in self.reports.values():
                text = report.summary() if self.report_format == "text" else report
                print_line(f"[mlx-sparse] {text}")

    def calls(self) -> Counts:
        """Return the call counts of all models. Its ``prefill`` is the number of sparse prefill calls, or None."""
        found = list(self.reports.values())
        return Counts(
            sum(report.sparse_calls for report in found),
            sum((report.dense_calls for report in found), Counter()),
            prefill=None if self.prefill is None else sum(report.prefill.calls for report in found if report.prefill),
        )
