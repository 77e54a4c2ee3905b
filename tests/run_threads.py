"""python run_threads.py FOLDER: for each method, eight threads that generate with one enabled model at the same time.

Prints one JSON line per method. A process of its own: what goes wrong here may end it, and with MLX's CPU streams of
several threads any Python process (MLX 0.32.4, no model, nothing of this project) ends in SIGABRT or SIGSEGV now and
then as it exits.
"""

import json
import os
import sys
import threading
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from saap_artefacts import ONLINE, attn, write_artefact
from tiny_models import build, prompt_of

import mlx_sparse

THREADS, LAYERS, STEPS, PIECE = 8, 2, 20, 80
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
SPARQ = "sparq:rank=4,top_k=16,dense_below=0"
METHODS = {
    "sparq": SPARQ,
    "streaming": "streaming:recent_tokens=16",
    "flexgen": "flexgen:top_k=16",
    "oracle_top_k": "oracle_top_k:top_k=16",
    "h2o": "h2o:top_k=16",
    "sample": SAMPLE,
    "minference": "minference:block_size=32",
    "bigbird": "bigbird:block_size=32",
    "streaming_prefill": "streaming_prefill:window=1,block_size=32",
    "sample+sparq": f"{SAMPLE}+{SPARQ}",
    "sample+saap": f"{SAMPLE}+{ONLINE},probes=3",
    "saap:mode=online": f"{ONLINE},probes=3",
    "saap:mode=trained": "trained",
    "saap:mode=kmeans": "kmeans",
}


def generate(model, seed):
    """Tokens of a prompt, and what the model gave for each vocabulary entry."""
    steps = generate_step(mx.array(prompt_of(250, seed)), model, max_tokens=STEPS, prefill_step_size=PIECE)
    tokens, logprobs = zip(*steps, strict=True)
    return tokens, mx.stack(logprobs).tolist()


class Reader(threading.Thread):
    """Reads a report all the time, in every way there is."""

    def __init__(self, report):
        super().__init__()
        self.report, self.reads, self.errors, self.done = report, 0, [], threading.Event()

    def run(self):
        while not self.done.wait(0.002):
            try:
                self.read()
                self.reads += 1
            except Exception as error:
                self.errors.append(f"reader: {type(error).__name__}: {error}")
                return

    def read(self):
        report = self.report
        assert str(report)
        found = report.as_dict()
        json.dumps(found)
        calls = found["sparse_calls"] + sum(found["dense_calls"].values()) + (found["prefill"] or {"calls": 0})["calls"]
        assert calls % LAYERS == 0, "of whole calls of the model"
        assert report.sparse_bytes >= found["sparse_bytes"]
        if report.prefill is not None:
            assert set(report.prefill.density) <= set(range(LAYERS))
        if report.buckets is not None:
            assert 0 <= report.buckets.selectivity <= 1


def together(model, report):
    """What each thread generates while all do and one reads the report, which is read before any of them ends."""
    found, errors, reader = {}, [], Reader(report)
    generated, read = threading.Barrier(THREADS + 1), threading.Event()

    def work(seed):
        try:
            found[seed] = generate(model, seed)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        generated.wait()
        read.wait()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in [reader, *threads]:
        thread.start()
    generated.wait()
    reader.done.set()
    reader.join()
    said = None
    try:
        said = str(report), report.as_dict()
    except Exception as error:
        errors.append(f"main thread: {type(error).__name__}: {error}")
    read.set()
    for thread in threads:
        thread.join()
    return [found.get(seed) for seed in range(THREADS)], [*reader.errors, *errors], reader.reads, said


def main(folder):
    model = build()
    artefact = write_artefact(folder / "model", model)
    for name, settings in METHODS.items():
        config = attn(artefact, 3, mode=settings) if settings in ("trained", "kmeans") else settings
        with mlx_sparse.sparse(model, config) as report:
            alone = [generate(model, seed) for seed in range(THREADS)]
            expected = str(report), report.as_dict()
        with mlx_sparse.sparse(model, config) as report:
            found, errors, reads, said = together(model, report)
        same = [ours == theirs for ours, theirs in zip(found, alone, strict=True)]
        line = {"method": name, "errors": errors, "same": same, "reads": reads, "expected": expected, "said": said}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
