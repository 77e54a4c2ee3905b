"""Convert a question about a text to token ids, or token ids on standard input to text.

python tokens.py FOLDER TEXT QUESTION > ids.txt
python tokens.py FOLDER < ids.txt
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

folder, *given = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
if given:
    text, question = Path(given[0]).read_text(), given[1]
    messages = [{"role": "user", "content": f"{text}\n{question}"}]
    print(*tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
else:
    print(tokenizer.decode([int(token) for token in sys.stdin.read().split()], skip_special_tokens=True))
