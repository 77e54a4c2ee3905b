#!/usr/bin/env python3
"""Start a server that reads MLX_SPARSE_ATTN, and compare its answers to the answers of mlx-lm.

  python scripts/server_check.py --server rapid-mlx
  python scripts/server_check.py --server vllm-mlx --json -- --continuous-batching

Run this script with the Python of an environment that has the server, mlx-sparse-attention and openai. Options after
"--" are passed to the server. The script starts the server on a tiny random model once per value of MLX_SPARSE_ATTN.
A client sends one request, and then three requests at the same time. Each answer is compared to the answer that
mlx_lm.generate gives to the prompt alone, with the method of the server. The script fetches nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai

BIN = Path(sys.executable).parent
SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
VALUES = {"dense": "", "all keys": "sparq:rank=4,top_k=4096,dense_below=0", "sparse": SPARSE}
LENGTHS, TOKENS = (50, 75, 110), 200  # long answers, so that requests overlap
START_S, REQUEST_S, STOP_S = 180.0, 120.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="command of the server: vllm-mlx or rapid-mlx")
    parser.add_argument("--family", default="qwen3", help="model family (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    args = parser.parse_args()

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "testing"))
    import tiny_models

    os.environ.pop("MLX_SPARSE_ATTN", None)  # the models of this process are enabled in `references`
    checks: list[dict[str, str | bool]] = []

    def check(what: str, passed: bool, detail: str) -> None:
        checks.append({"check": what, "passed": passed, "detail": detail})

    with tempfile.TemporaryDirectory() as home:
        folder = tiny_models.write(Path(home) / "model", args.family)
        # The prompts share no prefix: a prompt cache has keys and values that sparse decode steps computed.
        prompts = [tiny_models.words([1 + i * (i + n) % 90 for i in range(2, n + 2)]) for n in LENGTHS]
        expected = {name: references(folder, value, prompts) for name, value in VALUES.items()}
        for name, value in VALUES.items():
            with serving([args.server, "serve", str(folder), *args.options], home, value) as (client, log):
                alone, *_ = ask(client, folder, prompts[0])
                with ThreadPoolExecutor(len(prompts)) as pool:
                    answers = list(pool.map(lambda prompt: ask(client, folder, prompt), prompts))
                lines = [line for line in log.read_text().splitlines() if "[mlx-sparse]" in line]
            served = [line for line in lines if "2 of 2 layers" in line]
            check(f"{name}: lines of mlx-sparse", len(lines) == len(served) == bool(value), " ".join(lines) or "none")
            check(f"{name}: one answer equals mlx-lm", alone == expected[name][0], f"{LENGTHS[0]} + {TOKENS} tokens")
            equal = [text == other for (text, *_), other in zip(answers, expected[name], strict=True)]
            overlap = max(first for _, first, _ in answers) < min(last for *_, last in answers)
            when = "at the same time" if overlap else "one after another"
            check(f"{name}: three answers equal mlx-lm", all(equal), f"{sum(equal)} of 3, computed {when}")
            changed = [text != other for (text, *_), other in zip(answers, expected["dense"], strict=True)]
            check(f"{name}: answers that differ from dense", changed == [name == "sparse"] * 3, f"{sum(changed)} of 3")

    packages = [args.server, "mlx", "mlx-lm", "mlx-vlm", "mlx-sparse-attention"]
    versions = {package: importlib.metadata.version(package) for package in packages}
    if args.json:
        print(json.dumps({"versions": versions, "options": args.options, "family": args.family, "checks": checks}))
    else:
        print(", ".join(f"{package} {number}" for package, number in versions.items()))
        for row in checks:
            print("pass" if row["passed"] else "FAIL", f"{row['check']} ({row['detail']})")
    sys.exit(not all(row["passed"] for row in checks))


def references(folder: Path, attn: str, prompts: list[str]) -> list[str]:
    """Generate the answers with mlx-lm, one prompt at a time, with the methods of ``attn``."""
    import mlx_lm

    import mlx_sparse

    model, tokenizer, *_ = mlx_lm.load(str(folder))
    if attn:
        mlx_sparse.enable(model, attn)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokens = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return [mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS) for prompt in tokens]


@contextmanager
def serving(command: list[str], home: str, attn: str) -> Iterator[tuple[openai.OpenAI, Path]]:
    """Start the server with MLX_SPARSE_ATTN=``attn``, yield a client and the log's path, and then end the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Each server has a home folder of its own, because rapid-mlx stores prompt caches on disk.
    own = {"HOME": tempfile.mkdtemp(dir=home), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "MLX_SPARSE_ATTN": attn}
    log = Path(own["HOME"]) / "log"
    command = [str(BIN / command[0]), *command[1:], "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=REQUEST_S, max_retries=0)
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                client.models.list()
                break
            except openai.APIError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
        yield client, log
    except openai.APIError:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(client: openai.OpenAI, folder: Path, prompt: str) -> tuple[str, float, float]:
    """Return an answer, and the times at which its first and last token arrived. If the server is busy, try again."""
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    deadline = time.monotonic() + REQUEST_S
    while True:
        try:
            stream = client.chat.completions.create(
                model=str(folder), messages=messages, max_tokens=TOKENS, temperature=0, stream=True
            )
            chunks = [(chunk.choices[0].delta.content or "", time.monotonic()) for chunk in stream if chunk.choices]
            times = [now for text, now in chunks if text]
            return "".join(text for text, _ in chunks), times[0], times[-1]
        except openai.APIError:  # vllm-mlx without --continuous-batching refuses a second stream
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
