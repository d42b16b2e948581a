"""`mtp-jax bench`: what a step costs here, part by part, and what a head gains by batch size and num_draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared

Given = tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")
Numbers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")]


@dataclass(frozen=True, kw_only=True)
class Bench(shared.DraftFlags):
    """Measure speed: how near a step is to the memory's bandwidth, what verifying and drafting add to it, and tokens/s on whole answers.

    Everything is compiled first; programs then take turns in one process, and medians and ratios of a round are kept. Use a quiet machine."""

    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """JSON-lines files of prompts, as for evaluate. Default: those of the demo."""
    limit: Annotated[int | None, shared.Unset] = None
    """Take only so many prompts of each file, or of the demo. Default: all."""
    num_draft: Numbers = (1, 2, 3, 4)
    """Numbers of tokens drafted per step, each of which is measured. Verify passes have 1 to the largest of them + 1 tokens."""
    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...", help_behavior_hint="")] = ()
    """Further widths of verify passes to measure, such as 8 16. Default: none."""
    batch_sizes: Numbers = (1,)
    """Prompts of one task decoded together, each of which is measured; passes are measured at the first."""
    both_layouts: shared.Switch = False
    """Measure verify passes also in the weights' layout that the loop does not take."""
    context: int = 128
    """Tokens before the passes that are measured."""
    passes: int = 16
    """Passes in one run of a program."""
    rounds: int = 5
    """Runs of each program, after one to warm up."""
    decode_rounds: int = 3
    """Times that each prompt is decoded, with and without the head; 0 leaves this part out."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    bandwidth: Annotated[float | None, Given] = None
    """Memory bandwidth in GB/s of an accelerator to predict times for, in bfloat16; needs --tflops. Default: published figures of a few."""
    tflops: Annotated[float | None, Given] = None
    """Its bfloat16 TFLOP/s."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the JSON document to this file."""

    def run(self) -> dict[str, Any]:
        """Returns the JSON document of `evaluation.bench.bench`."""
        shared.check_positive(limit=1 if self.limit is None else self.limit)
        if (self.bandwidth is None) != (self.tflops is None):
            raise shared.UsageError("--bandwidth and --tflops: give both, or neither")
        for name, value in (("bandwidth", self.bandwidth), ("tflops", self.tflops)):
            if value is not None and not value > 0:
                raise shared.UsageError(f"--{name} {value}: must be above 0")
        prompts = self._read_prompts()
        from mtp_jax.evaluation import bench, roofline

        names = ("widths", "batch_sizes", "both_layouts", "context", "passes", "rounds", "decode_rounds", "max_new_tokens")
        plan = bench.Plan(num_drafts=self.num_draft, **{name: getattr(self, name) for name in names})
        backbone, head = shared.load_both(self.backbone, self.head, self.drafter)
        devices = roofline.ACCELERATORS
        if self.bandwidth is not None and self.tflops is not None:
            devices = (roofline.Accelerator(name="given", gigabytes_per_second=self.bandwidth, teraflops=self.tflops, source="command line"),)
        shared.say("compiling each program first (not timed)")
        with shared.progress("bench") as report:
            result = bench.bench(
                backbone, head, prompts, plan, drafter=self.drafter, accelerators=devices, progress=lambda done, total: report(done, total, "")
            )
        if self.out is not None:
            files.write_json(self.out, result)
        show(result)
        return result

    def _read_prompts(self) -> list[prompts_lib.Prompt]:
        if self.prompts:
            return prompts_lib.read(self.prompts, limit=self.limit)
        from mtp_jax import demo

        return [prompts_lib.Prompt(task, text) for task, text in demo.PROMPTS[: self.limit]]


def show(result: dict[str, Any]) -> None:
    """Print tables of the three parts."""
    _show_passes(result["passes"])
    _show_roofline(result["roofline"])
    if result["end_to_end"]:
        _show_end_to_end(result)
    if result["predicted"]:
        speeds = ", ".join(f"{num_draft}: {value:.2f}x" for num_draft, value in result["predicted"]["speedups"].items())
        shared.say(f"predicted from passes and acceptance, by num_draft: {speeds}; best {result['predicted']['best_num_draft']}")


def _show_passes(passes: dict[str, Any]) -> None:
    rows = [["one-token step", _ms(passes["one_token"]["ms"]), "1.00", ""]]
    for item in passes["verify"]:
        rows.append([f"verify pass, {item['width']} wide, {item['layout']}", _ms(item["ms"]), f"{item['ratio']:.2f}", ""])
    for item in passes["draft"]:
        rows.append([f"draft of {item['num_draft']}", _ms(item["ms"]), f"{item['ratio']:.2f}", ""])
    for item in passes["steps"]:
        who = "" if item["drafter"] == "drafter" else (", vanilla" if item["num_draft"] == 0 else ", nothing drafted")
        rows.append([f"step, num_draft {item['num_draft']}{who}", _ms(item["ms"]), f"{item['ratio']:.2f}", f"{_ms(item['overhead_ms'])} overhead"])
    _print_table(["inside the loop", "ms", "one-token steps", ""], rows)


def _show_roofline(roof: dict[str, Any]) -> None:
    weights = roof["weight_bytes"]
    shared.say(
        f"a one-token step reads {weights['total'] / 1e6:,.1f} MB of weights (unembedding {weights['unembedding'] / 1e6:,.1f}) "
        f"and {roof['cache_bytes'] / 1e6:,.1f} MB of cache"
    )
    measured = ", ".join(f"{value:.1f} GB/s by {'a matrix-vector product' if name == 'matvec' else 'threads'}" for name, value in roof["gb_per_second"].items())
    shared.say(
        f"this device reads {measured}: at best {roof['best_ms']:.2f} ms; it takes {roof['one_token_ms']:.2f} ms, {roof['one_token_over_best']:.2f} times that"
    )
    rows = []
    for device in roof["accelerators"]:
        steps = "  ".join(f"{step['num_draft']}: {step['ratio']:.2f}" for step in device["steps"])
        rows.append([device["name"], f"{device['one_token_ms']:.3f}", steps])
    _print_table(["predicted at best, bfloat16", "one-token ms", "step by num_draft, in one-token steps"], rows)


def _show_end_to_end(result: dict[str, Any]) -> None:
    rows = []
    for item in result["end_to_end"]:
        rows.append(
            [
                str(item["batch_size"]),
                str(item["num_draft"]),
                f"{item['tokens_per_step']:.2f}",
                f"{item['identical']}/{item['prompts']}",
                f"{item['vanilla_tokens_per_second']:.1f}",
                f"{item['tokens_per_second']:.1f}",
                f"{item['speedup']:.2f}x",
            ]
        )
    _print_table(["batch", "num_draft", "tokens/step", "identical", "vanilla tokens/s", "tokens/s", "speedup"], rows)
    state = max(item["state_bytes"] for item in result["end_to_end"])
    shared.say(f"the drafter adds {result['drafter_bytes']:,} bytes of parameters and {state:,} bytes of state")


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(header[0], box=None)
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    shared.console.print(table)


def _ms(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
