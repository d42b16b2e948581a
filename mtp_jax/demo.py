"""`mtp-jax demo`: six everyday prompts, with and without the head, measured side by side.

The prompts are written so that, in SmolLM2's chat template, all of them and 64 new tokens fit one shape: everything
compiles once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_jax import config as config_lib
from mtp_jax.commands import shared

if TYPE_CHECKING:
    from mtp_jax.decoding.generate import Output
    from mtp_jax.evaluation.acceptance import Pair

PROMPTS: tuple[tuple[str, str], ...] = (
    (
        "summarise notifications",
        """Summarize these notifications in one or two short sentences.

- Calendar: Dentist appointment moved to Thursday at 3:30 PM, same address
- Mum: Can you bring the blue cooler on Sunday? We will be nine people now
- City Library: "The Long Winter" is ready for pick-up until Friday
- Parcel: Your running shoes arrive today between 4 PM and 6 PM
- Weather: Heavy rain expected from 5 PM, strong wind near the coast""",
    ),
    (
        "summarise notifications",
        """Summarize these notifications in one or two short sentences.

- Build bot: main is red, 3 tests failed in payments after the last merge
- Priya: I can look at the payments failure, but only after lunch
- Jonas: Release call is moved from 2 PM to 4 PM because of the failed build
- Expenses: Your March report was approved, 214.60 euros will be paid on Monday
- Facilities: The lift on the north side is out of service until tomorrow""",
    ),
    (
        "proofread",
        """Proofread the following text and correct all spelling and grammar mistakes. Reply with the corrected text only.

Yesterday me and my brother goes to the old harbor to look at the boats. Their was a small market were people was selling fish, bread and flowers.
We buyed two loafs of bread and a bag of apples, than we sat on the wall and eated them while the sun go down behind the iland.
My brother have took many photos, but most of them is to dark.""",
    ),
    (
        "proofread",
        """Proofread the following text and correct all spelling and grammar mistakes. Reply with the corrected text only.

Thank you for you're message about the broken lamp. We are sory that it arrive damaged and we will sends a new one untill Friday.
You doesn't need to return the old lamp, but please send us a foto of it so that we can told the shipping company what have happened.
If you has more questions, just writes us or calls us any time between nine and five a clock.""",
    ),
    (
        "suggest a reply",
        """Write a short, friendly reply to this message.

From: Lena
Hi! The kitchen people just called, they can start two days earlier, on Tuesday morning at 8 instead of Thursday. Somebody would have to let them in
and show them where the water is turned off. I am at the office all of Tuesday. Could you be there, and is it all right for you if they work
until the evening? They need an answer by noon today, and they would like a phone number.""",
    ),
    (
        "rewrite",
        """Rewrite the following message so that it is polite and professional. Keep all the facts.

Hey, I have been waiting for the signed contract for two weeks now and nobody tells me anything. The printer wants a decision by Wednesday, and
without the contract I can't order the 500 brochures. Just send me the thing today or at least say who has it. If it is stuck with your lawyers,
give me a name and a number and I will call them myself.""",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Demo(shared.DraftLengthFlags):
    """Start here: six prompts answered with and without the head, and what the head gains and costs.

    Prints each answer, tokens per step, tokens/s of both, and whether the two outputs are identical."""

    max_new_tokens: int = 64
    """Longest answer, in tokens."""

    def run(self) -> dict[str, Any]:
        """Returns what was printed: `prompts` (a list), `summary`, `drafter_bytes` and `seconds`."""
        start = time.perf_counter()
        config = config_lib.DecodeConfig(max_new_tokens=self.max_new_tokens, **self.draft_lengths())
        backbone, head = shared.load_both(self.backbone, self.head, self.drafter)
        drafting = head is not None or self.drafter != "mtp"
        if drafting and config.num_draft < 1:
            raise config_lib.ConfigError("num_draft=0: must be at least 1 when there is a head; pass --head none for vanilla decoding")
        import dataclasses

        from mtp_jax.decoding import generate as generate_lib
        from mtp_jax.evaluation import acceptance

        config = dataclasses.replace(config, stop_tokens=tuple(backbone.tokenizer.stop_tokens))
        ids = [generate_lib.encode_prompt(backbone, text) for _, text in PROMPTS]
        generate_lib.check_prompts(ids, backbone.config, config.max_new_tokens)
        vanilla = generate_lib.make_runtime(backbone)
        drafted = generate_lib.attach(vanilla, head, self.drafter) if drafting else None
        size = (drafted or vanilla).drafter_bytes()
        shared.say(
            f"{backbone.name} alone, and with {self.drafter} drafting ({_name(head)}), "
            f"which adds {size['parameters']:,} bytes of parameters and {size['state']:,} bytes of state"
        )
        shared.say("compiling, half a minute the first time (not timed) ...")
        warmed: set[tuple[int, ...]] = set()
        pairs: list[Pair] = []
        records: list[dict[str, Any]] = []
        for number, (kind, text) in enumerate(PROMPTS):
            plain, fast = acceptance.side_by_side(
                vanilla,
                drafted,
                [ids[number]],
                config,
                warmed,
                row_numbers=[number],
                drafted_first=number % 2 == 0,
                early=lambda result, number=number: _show_text(number, generate_lib.with_text(result, backbone).outputs[0].text),
            )
            pairs.append(acceptance.make_pair(kind, [number], plain, generate_lib.with_text(fast, backbone)))
            records.append(_record(text, pairs[-1]))
            _show_numbers(records[-1])
        summary = acceptance.summary(pairs, config.num_draft if drafting else 0)
        seconds = time.perf_counter() - start
        shared.say(
            f"\n{summary['identical']} of {summary['prompts']} outputs identical; {summary['tokens_per_step']:.2f} tokens per step; "
            f"{summary['tokens_per_second']:.1f} tokens/s with the head, {summary['vanilla_tokens_per_second']:.1f} without: {summary['speedup']:.2f}x; "
            f"the head adds {size['parameters'] + size['state']:,} bytes ({seconds:.0f} s in all)"
        )
        return {"prompts": records, "summary": summary, "drafter_bytes": size, "seconds": round(seconds, 1)}


def _name(head: Any) -> str:
    return "no head" if head is None else f"head {head.name}"


def _record(prompt: str, pair: Pair) -> dict[str, Any]:
    output: Output = pair.drafted[0]
    return {
        "kind": pair.task,
        "prompt": prompt,
        "text": output.text,
        "tokens": len(output.tokens),
        "tokens_per_step": round(output.tokens_per_step, 4),
        "tokens_per_second": round(len(output.tokens) / pair.drafted_seconds, 3),
        "vanilla_tokens_per_second": round(len(pair.vanilla[0].tokens) / pair.vanilla_seconds, 3),
        "identical": output.tokens == pair.vanilla[0].tokens,
    }


def _show_text(number: int, text: str) -> None:
    shared.say(f"\n[{number + 1}/{len(PROMPTS)}] {PROMPTS[number][0]}")
    shared.say(text.strip())


def _show_numbers(record: dict[str, Any]) -> None:
    shared.say(
        f"  {record['tokens']} tokens, {record['tokens_per_step']:.2f} per step; {record['tokens_per_second']:.1f} tokens/s with the head, "
        f"{record['vanilla_tokens_per_second']:.1f} without; {'identical' if record['identical'] else 'DIFFERENT'}"
    )
