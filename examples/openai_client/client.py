"""Ask mlx_lm.server a question with OpenAI's client."""

import argparse
from pathlib import Path

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", type=Path)
parser.add_argument("question")
parser.add_argument("--server", default="http://127.0.0.1:8080/v1", help="default: %(default)s")
parser.add_argument("--max-tokens", type=int, default=24)
options = parser.parse_args()

client = OpenAI(base_url=options.server, api_key="not needed", max_retries=20)  # the server may still be starting
stream = client.chat.completions.create(
    model="default_model",  # the model of the server's --model
    messages=[{"role": "user", "content": f"{options.text.read_text()}\n{options.question}"}],
    max_tokens=options.max_tokens,
    temperature=0,
    stream=True,
)
print("answer: ", end="")
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
