"""Answer a question about a text with mlx-lm and sparse attention."""

import argparse
from pathlib import Path

from mlx_lm import load, stream_generate

import mlx_sparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder or Hugging Face repo")
parser.add_argument("text", type=Path)
parser.add_argument("question")
parser.add_argument("--attn", default="sparq:dense_below=0", help="default: %(default)s")
parser.add_argument("--max-tokens", type=int, default=24)
options = parser.parse_args()

model, tokenizer = load(options.model)
messages = [{"role": "user", "content": f"{options.text.read_text()}\n{options.question}"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

print("answer: ", end="")
with mlx_sparse.sparse(model, options.attn) as report:
    for part in stream_generate(model, tokenizer, prompt, max_tokens=options.max_tokens):
        print(part.text, end="", flush=True)
print(f"\n{part.prompt_tokens} prompt tokens, {part.generation_tokens} generated tokens\n\n{report}")
