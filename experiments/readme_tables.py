"""Rewrite the tables of README.md from the files in experiments/results.

    python experiments/readme_tables.py          rewrite
    python experiments/readme_tables.py --check  exit 1 if README.md is not what the results say

Each table stands between `<!-- table:NAME -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import ablate

from mtp_jax.evaluation import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def acceptance() -> str:
    result = load("evaluate_hybrid.json")
    rows = []
    for name, values in [*sorted(result["tasks"].items()), ("all", result["overall"])]:
        kept = " ".join(f"{values['accept_unconditional'][k - 1]:.2f}" for k in (1, 2, 3, 4, 10))
        figures = [f"{values['tokens_per_step']:.2f}", kept, f"{values['speedup']:.2f}x", f"{values['identical']} / {values['prompts']}"]
        rows.append([name, str(values["prompts"]), *figures])
    return table(["task", "prompts", "tokens per step", "drafts kept at 1 2 3 4 10", "wall clock", "identical to vanilla"], rows)


def speed() -> str:
    rows = []
    for path in sorted(RESULTS.glob("evaluate_*.json")):
        result = json.loads(path.read_text())
        values, settings = result["overall"], result["settings"]
        figures = [f"{values['tokens_per_step']:.2f}", f"{values['speedup']:.2f}x" if settings["batch_size"] == 1 else "not at batch 1"]
        same = f"{values['identical']:,} / {values['prompts']:,}"
        rows.append([settings["backbone"], settings["drafter"], str(settings["num_draft"]), str(settings["batch_size"]), *figures, same])
    return table(["backbone", "drafter", "num_draft", "batch", "tokens per step", "wall clock against vanilla", "identical to vanilla"], rows)


def alone() -> str:
    """The head by itself, and prompt lookup with as many drafts, by task."""
    head, lookup = load("evaluate_mtp.json"), load("evaluate_prompt_lookup.json")
    rows = []
    for name, values in sorted(head["tasks"].items(), key=lambda item: -item[1]["tokens_per_step"]):
        kept = " ".join(f"{share:.2f}" for share in values["accept_unconditional"])
        other = f"{lookup['tasks'][name]['tokens_per_step']:.2f}" if name in lookup["tasks"] else ""
        rows.append([name, str(values["prompts"]), f"{values['tokens_per_step']:.2f}", kept, other, f"{values['identical']} / {values['prompts']}"])
    return table(["task", "prompts", "head alone", "drafts kept at 1 2 3 4", "prompt lookup", "identical to vanilla"], rows)


def passes() -> str:
    """What one pass and one step cost, in one-token steps of the same process."""
    found = load("bench.json")["passes"]
    verify = {(item["width"], item["layout"]): item["ratio"] for item in found["verify"]}
    draft = {item["num_draft"]: item["ratio"] for item in found["draft"]}
    step = {item["num_draft"]: item["ratio"] for item in found["steps"] if item["drafter"] == "drafter"}
    widths = [1, 2, 3, 4, 5]
    rows = [
        ["verify pass, column blocks", *(f"{verify[width, 'column_blocks']:.2f}" for width in widths)],
        ["verify pass, plain layout", *(f"{verify[width, 'plain']:.2f}" for width in widths)],
        ["drafting", "", *(f"{draft[width - 1]:.2f}" for width in widths[1:])],
        ["whole step", "1.00", *(f"{step[width - 1]:.2f}" for width in widths[1:])],
    ]
    return table(["tokens in the pass", *map(str, widths)], rows)


def transformers() -> str:
    result = load("transformers.json")
    rows = [
        [name, f"{values['tokens_per_second']:.1f}", f"{values['speedup']:.2f}x", f"{values['identical']} / {result['settings']['count']}"]
        for name, values in result["methods"].items()
    ]
    return table(["method", "tokens/s", f"against {result['settings']['speedup_against']}", "identical to our vanilla"], rows)


def comparison() -> str:
    return report.comparison(report.fastest(load("comparison.json"), "comparison.json"), "comparison.json").markdown()


def comparison_tasks() -> str:
    return report.by_task(report.fastest(load("comparison.json"), "comparison.json"), "comparison.json").markdown()


def comparison_standalone() -> str:
    """The claim that the method comes with: the head beside a standalone drafter, a general one and one for each task."""
    return report.beside(load("comparison.json"), "comparison.json", "mtp", ["standalone", "standalone_per_task"]).markdown()


def comparison_drafts() -> str:
    """Each method with every number of drafts, and sampled."""
    drafts, sampled = load("comparison_drafts.json")["methods"], load("comparison_sampled.json")["methods"]
    numbers = sorted({method["num_draft"] for method in drafts.values()})
    rows = []
    for method in report.fastest(load("comparison.json"), "comparison.json")["methods"].values():
        found = [drafts.get(f"{method['name']}, M = {number}") for number in numbers]
        found += [one for one in sampled.values() if one["name"] == method["name"]]
        shown = [f"{one['overall']['tokens_per_step']:.2f} ({one['overall']['speedup']:.2f}x)" if one else "" for one in found]
        rows.append([method["name"], *shown])
    return table(["method", *(f"M = {number}" for number in numbers), "temperature 1, M = 4"], rows)


def ablations() -> str:
    return ablate.markdown(load("ablations.json"), by_task=False)


TABLES = {
    "acceptance": acceptance,
    "speed": speed,
    "alone": alone,
    "passes": passes,
    "transformers": transformers,
    "comparison": comparison,
    "comparison_tasks": comparison_tasks,
    "comparison_standalone": comparison_standalone,
    "comparison_drafts": comparison_drafts,
    "ablations": ablations,
}


def main() -> int:
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = old
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- /table -->)", re.DOTALL)
        if not pattern.search(new):
            print(f"README.md: no place for table {name}", file=sys.stderr)
            return 1
        content, before = make(), new
        new = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", new)
        if "--check" in sys.argv[1:] and new != before:
            print(f"README.md: table {name} is not what the results say", file=sys.stderr)
    if "--check" in sys.argv[1:]:
        return 0 if new == old else 1
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
