"""Generate with SparQ and Triton kernels in transformers. The model is tiny and random, to show only the API."""

import argparse

import torch
from mlx_sparse.cuda_ref import SparQCache, register
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--attn", default="sparq:rank=16,top_k=48,dense_below=0", help="default: %(default)s")
parser.add_argument("--max-tokens", type=int, default=4)
options = parser.parse_args()

register()  # before the model is created or loaded
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    attn_implementation="sparq",
)
model = LlamaForCausalLM(config).to(device).eval()  # or from_pretrained(name, attn_implementation="sparq")
prompt = torch.randint(3, 64, (1, 100), device=device)

cache = SparQCache(model.config, options.attn)
out = model.generate(prompt, past_key_values=cache, max_new_tokens=options.max_tokens, do_sample=False)
print(f"tokens: {out[0, prompt.shape[1] :].tolist()}\n{cache.report}")
