"""One run of a command with ``--attn``: what was asked, the models it loads, what it says."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import ConfigError, SparseAttentionError
from ..common import families
from ..common.call_report import JSON_KEY, Counts, Report, listing
from ..methods import NEVER, Dense, Method, Prefill, parse, read_toml, registry

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from .plan import Plan


class Session:
    """One run of a command with ``--attn``."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.only_prompts = command.endswith("cache_prompt")
        self.suites = command.endswith("evaluate")
        self.serves = command.endswith("server")
        self.configs: tuple[Method, ...] = ()
        self.prefill: Prefill | None = None
        self.decode: Method | None = None
        self.backend = "auto"
        self.report_as = "text"
        self.calibration: Calibration | None = None
        self.max_tokens: int | None = None
        self.max_kv_size: int | None = None
        self.quantised: dict[str, int] = {}  # bits and group size, where caches are
        self.shard: str | None = None
        self.draft: str | None = None
        self.loading: str | None = None
        self.reports: dict[tuple[str, tuple[Method, ...]], Report] = {}  # by model and methods
        self.requests: dict[str, Any] = {}  # of suites, by kind: the calls they made
        self.loads = self.loads_at_start = 0
        self.loads_part = False  # whether mlx-lm is loading what it will cut
        self.terminated = False
        self.meanwhile = contextlib.ExitStack()  # what is undone when the command ends

    def configure(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Check our options and their company before anything is loaded; a mistake ends the program here."""
        from ..calibrate import Calibration
        from .hooks import hooks_of
        from .model import select_methods

        self.report_as = args.attn_report
        self.shard = args.shard
        if args.attn is args.attn_config is self.shard is None:
            return
        calibrates = not args.no_calibrate
        try:
            base: dict[str, Method] = {}
            if args.attn_config is not None:
                base, options = read_toml(args.attn_config)
                calibrates = calibrates and options.calibrate
            configs = parse(args.attn, base) if args.attn is not None else tuple(base.values()) or (Dense(),)
            quantises = getattr(args, "kv_bits", None) is not None
            if self.shard is not None:
                self._share(args)
            elif not quantises and not any(config.sparse for config in configs):
                return
            prefill, decode = select_methods(configs)
            for config in configs:
                registry.require(args.attn_backend, config.name)
                hooks_of(config).check(config)
        except SparseAttentionError as error:
            fail(parser, str(error))
        names = "+".join(config.name for config in configs)
        if "mass" in self.report_as and prefill is None:
            fail(parser, f"--attn-report: expected text, json or off with --attn {names}, got {self.report_as}.")
        prompt_cache = getattr(args, "prompt_cache_file", None)
        if prompt_cache is not None and not self.only_prompts and not Path(prompt_cache).is_file():
            fail(parser, f"--prompt-cache-file: expected a file, got {prompt_cache}.")
        if self.suites and prefill is not None and args.batch_size > 1:
            args.batch_size = 1
            print(f"[mlx-sparse] --batch-size 1: {prefill.name} takes prompts without padding.", file=sys.stderr)
        self.configs, self.prefill, self.decode = configs, prefill, decode
        self.backend = args.attn_backend
        self.calibration = Calibration(
            measures=calibrates, piece=getattr(args, "prefill_step_size", 2048), say=self.say
        )
        self.max_tokens = getattr(args, "max_tokens", None) if self.command.endswith("generate") else None
        self.max_kv_size = getattr(args, "max_kv_size", None)
        if quantises:
            self.quantised = {"group_size": getattr(args, "kv_group_size", 64), "bits": args.kv_bits}
        self.draft = getattr(args, "draft_model", None)
        self.loads_at_start = sum(getattr(args, name, None) is not None for name in ("model", "draft_model"))
        if self.serves:
            from . import serving

            self.meanwhile.enter_context(serving.shown(self))

    def _share(self, args: argparse.Namespace) -> None:
        """Every process runs the whole command; the first one is heard."""
        import mlx.core as mx

        if getattr(args, "kv_bits", None) is not None:
            raise ConfigError("--shard: expected caches in full precision, got --kv-bits. Drop one.")
        if getattr(args, "batch_size", 1) > 1:
            raise ConfigError(f"--shard: expected one sequence at a time, got --batch-size {args.batch_size}.")
        if mx.distributed.init().rank() > 0:
            nowhere = self.meanwhile.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115
            self.meanwhile.enter_context(contextlib.redirect_stdout(nowhere))

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's ``save_prompt_cache``."""
        if self.shard is None:
            return original(*args, **kwargs)
        from .slices.files import save

        with self._ending_the_program():
            return save(original, *args, **kwargs)

    def find(self, original: Callable[..., Any], model: str, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's search for a model, on disk or on the hub."""
        self.loads += not self.loads_part
        self.loading = model
        with self._ending_the_program(), loading(model):
            return original(model, *args, **kwargs)

    def load(self, original: Callable[..., Any], model: Path, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's ``load_model`` with the methods enabled on what it loads."""
        with self._ending_the_program():
            with loading(model):
                if self.max_kv_size is not None:
                    refuse_rotating_cache(Path(model))
                loaded = original(model, *args, **kwargs)
            if self.quantised:
                refuse_unquantisable(loaded[0], self.quantised)
            if not self.loads_part:
                self._enable(loaded[0], str(model))
        return loaded

    def load_part(self, original: Callable[..., Any], model: str, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's ``sharded_load``, which cuts what it has loaded: the methods are enabled on this process's part."""
        if self.shard is not None:
            from mlx_lm import utils

            kept = ("return_config", "tokenizer_config", "trust_remote_code")
            return utils.load(model, **{name: kwargs[name] for name in kept if name in kwargs})
        self.loads += 1
        self.loads_part = True
        try:
            loaded = original(model, *args, **kwargs)
        finally:
            self.loads_part = False
        with self._ending_the_program():
            self._enable(loaded[0], str(model))
        return loaded

    def _enable(self, model: Any, path: str) -> None:
        """Enable the methods on a loaded model; one that was loaded before goes on in its report."""
        from .model import enable, plan_of

        configs = self.configs
        if self.loading == self.draft:
            # An artefact is the model's, and no other's.
            configs = tuple(config for config in configs if config.file is None)
        if not configs:
            return
        report = enable(
            model,
            configs,
            backend=self.backend,
            mass="mass" in self.report_as,
            calibration=self.calibration,
            shard=self.shard,
        )
        plan = plan_of(model)
        assert plan is not None
        report.model = Path(path).name
        plan.count_in(self.reports.setdefault((path, configs), report))
        plan.decodes = not self.only_prompts
        if (known := families.warning(report.model_type)) is not None:
            self.say(known)
        if self.report_as in ("text", "mass"):
            self._say_outlook(plan)

    def _say_outlook(self, plan: Plan) -> None:
        """What will happen, before the first token."""
        lines = plan.report.opening()
        if any(config.measurable for config in plan.configs):
            lines.append("dense_below=N in --attn decides otherwise")
        self.say("; ".join(lines))
        if self.max_tokens is not None and plan.decodes and plan.configs:
            plan.watch = functools.partial(self._watch, plan)

    def _watch(self, plan: Plan, S: int, counts: Counts) -> None:
        """Say so if nothing will be sparse; ``counts`` are those of the first step, over ``S`` keys."""
        prompts = plan.report.prefill
        if counts.sparse_calls or (prompts is not None and prompts.calls):
            return
        starts, longest = plan.sparse_from(), S + (self.max_tokens or 0)
        if S < starts <= longest:
            return
        if longest < starts < NEVER:
            why = f"this run has at most {longest:,} keys, and no step with fewer than {starts:,} is"
        else:  # something else is in the way, or there are no steps to be sparse
            why = f"calls so far: {listing(plan.report.dense_calls)}"
        self.say(f"nothing will be sparse: {why}")

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        if self.report_as != "off":
            print(f"[mlx-sparse] {text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Tell who keeps the command's log."""
        if self.report_as != "off":
            logging.info(f"[mlx-sparse] {text}")

    @contextlib.contextmanager
    def _ending_the_program(self) -> Iterator[None]:
        """The server loads on a thread of its own, and would live on without the model it was started with."""
        try:
            yield
        except SparseAttentionError as error:
            if self.loads <= self.loads_at_start and threading.current_thread() is not threading.main_thread():
                print_error(self.command, str(error))
                os._exit(2)
            raise

    def calls(self) -> Counts:
        """The calls of all models so far, with the number of those of prompts; None where prompts stay dense."""
        found = [report.calls() for report in list(self.reports.values())]
        return Counts(
            sum(counts.sparse_calls for counts in found),
            sum((counts.dense_calls for counts in found), Counter()),
            prefill=None if self.prefill is None else sum(counts.prefill.calls for counts in found if counts.prefill),
        )

    def as_dict(self) -> dict[str, Any]:
        """The reports as plain data for JSON."""
        requests = {"requests": self.requests} if self.requests else {}
        return {JSON_KEY: [report.as_dict() for report in list(self.reports.values())]} | requests

    def print_report(self) -> None:
        """The call report on standard error, so that the text on standard output stays the model's."""
        if "json" in self.report_as:
            print(json.dumps(self.as_dict()), file=sys.stderr)
        elif self.report_as != "off":
            for report in self.reports.values():
                print(f"[mlx-sparse] {report}", file=sys.stderr)


@contextlib.contextmanager
def loading(model: object) -> Iterator[None]:
    """Say in one line what went wrong with finding or reading ``model``.

    Raises:
        ConfigError: in place of what mlx-lm and the hub raise.
    """
    try:
        yield
    except SparseAttentionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {model} ({reason}).") from None


def refuse_rotating_cache(model_path: Path) -> None:
    """Raise `ConfigError` if ``--max-kv-size`` gives the model in ``model_path`` rotating caches; do not load it."""
    from mlx_lm import utils

    config = utils.load_config(model_path)
    model_class, _ = utils._get_classes(config)
    if not hasattr(model_class, "make_cache"):
        raise ConfigError(
            f"--max-kv-size: expected none with --attn for {config.get('model_type')}, whose caches it makes rotating, "
            "which no method here reads. Drop one."
        )


def refuse_unquantisable(model: Any, form: Mapping[str, int]) -> None:
    """Raise `ConfigError` if mlx-lm cannot quantise the caches of ``model``: it would say so in mid-prompt.

    Args:
        form: arguments of ``to_quantized``; 64 components to a group if they do not say.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..common.model_info import leaves

    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)  # not evaluated
    for cache in leaves(caches):
        try:
            if hasattr(cache, "to_quantized"):
                cache.to_quantized(**form)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"--kv-bits: expected caches that mlx-lm can quantise, got: {reason} Drop it.") from None


def fail(parser: argparse.ArgumentParser, message: str) -> Any:
    """End the program with one line; argparse's own error prints the whole usage before it."""
    end(parser.prog, message)


def end(program: str, message: str) -> Any:
    """End the program with one line."""
    print_error(program, message)
    raise SystemExit(2)


def print_error(program: str, message: str) -> None:
    """One line on standard error."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
