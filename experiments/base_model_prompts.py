"""Prompts for a model that was never taught to follow instructions: each one framed by three worked examples, as plain text.

    python experiments/base_model_prompts.py prompts.jsonl --out framed.jsonl

Lines keep their `task`. The examples are this project's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mtp_jax import files, prompts

EXAMPLES = [
    ("Correct the mistakes: Their is two reason why I has not came.", "There are two reasons why I have not come."),
    ("Make this more polite: Send me the slides by noon.", "Could you please send me the slides by noon?"),
    ("Suggest a short reply to: Shall we move the meeting to Thursday?", "Thursday works for me. Same time?"),
]
FRAME = "Request: {request}\nAnswer:"


def framed(prompt: str) -> str:
    shown = "".join(f"{FRAME.format(request=request)} {answer}\n\n" for request, answer in EXAMPLES)
    return shown + FRAME.format(request=prompt)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+", help='JSON lines with "prompt" and perhaps "task"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=None, help="so many of each file")
    parser.add_argument("--max-characters", type=int, default=600, help="longer prompts are left out")
    args = parser.parse_args()
    found = []
    for path in args.prompts:
        found += [prompt for prompt in prompts.read([path]) if len(prompt.text) <= args.max_characters][: args.limit]
    files.write_text(args.out, "".join(json.dumps({"task": prompt.task, "prompt": framed(prompt.text)}) + "\n" for prompt in found))
    print(f"{args.out}: {len(found)} prompts", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
