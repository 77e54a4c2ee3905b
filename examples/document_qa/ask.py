"""Answer questions about a document from the KV cache that `mlx_lm.cache_prompt` saved."""

import argparse
import copy

from mlx_lm import load, stream_generate
from mlx_lm.models.cache import load_prompt_cache

import mlx_sparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("cache", help="the file that cache_prompt wrote")
parser.add_argument("questions", nargs="+")
parser.add_argument("--attn", default="sparq:dense_below=0", help="default: %(default)s")
parser.add_argument("--max-tokens", type=int, default=24)
options = parser.parse_args()

document, metadata = load_prompt_cache(options.cache, return_metadata=True)
model, tokenizer = load(metadata["model"])

# The cache ends within the user's message. The rest of the prompt is the question and the end of the chat template.
message = [{"role": "user", "content": "QUESTION"}]
rest = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).partition("QUESTION")[2]

print(f"document: {document[0].offset} tokens")
with mlx_sparse.sparse(model, options.attn) as report:
    for question in options.questions:
        prompt = tokenizer.encode(question + rest, add_special_tokens=False)
        cache = copy.deepcopy(document)  # keep the cache of the document unchanged for the next question
        parts = stream_generate(model, tokenizer, prompt, max_tokens=options.max_tokens, prompt_cache=cache)
        print(f"\n{question}\nanswer: {''.join(part.text for part in parts)}")
print(f"\n{report}")
