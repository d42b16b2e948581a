"""Result files of a comparison as one page of tables and plots, in Markdown and HTML.

The files are what experiments/compare.py writes; each is a part of the page. Both pages have the same numbers, and the best of each column is set in
bold, whoever's it is. A method that was run with several numbers of drafts has all of them in the last table of its part, and stands elsewhere with
the one that was fastest.

The table at the end is arithmetic, not measurement: what a standalone drafter costs in memory beside a backbone of three to four billion parameters,
on the assumptions that stand above it. It is there because "130 MB saved" has been reported for such a pair, without its parts.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_jax import files

MEBI = 2**20


class ReportError(ValueError):
    """A result file lacks something, or there is nothing to draw with."""


@dataclass(frozen=True)
class Table:
    """Cells as text; `best` holds (row, column) of those to be set in bold."""

    title: str
    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def markdown(self) -> str:
        shown = [[f"**{cell}**" if (r, c) in self.best else cell for c, cell in enumerate(row)] for r, row in enumerate(self.rows)]
        lines = ["| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in shown])

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.header)
        body = ""
        for r, row in enumerate(self.rows):
            cells = (f"<b>{html.escape(cell)}</b>" if (r, c) in self.best else html.escape(cell) for c, cell in enumerate(row))
            body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _get(values: Any, *path: str, where: str) -> Any:
    for number, name in enumerate(path):
        if not isinstance(values, dict) or name not in values:
            raise ReportError(f"{where}: field {'.'.join(path[: number + 1])!r} is missing")
        values = values[name]
    return values


def _best(rows: Sequence[Sequence[float | None]], better: Sequence[Callable[[Any], Any] | None]) -> frozenset[tuple[int, int]]:
    """Cells whose column's `better` picks them: max, min, or None for no choice. Equal cells are all the best."""
    found = set()
    for column, choose in enumerate(better):
        values = [row[column] for row in rows if row[column] is not None]
        if choose is not None and values:
            top = choose(values)
            found |= {(r, column + 1) for r, row in enumerate(rows) if row[column] == top}
    return frozenset(found)


def fastest(result: dict[str, Any], where: str) -> dict[str, Any]:
    """The result with each method at the number of drafts that was fastest for it, the fastest method first."""

    def speed(key: str) -> float:
        return _get(result, "methods", key, "overall", "speedup", where=where)

    best: dict[str, str] = {}
    for key in sorted(_get(result, "methods", where=where), key=speed, reverse=True):
        best.setdefault(_get(result, "methods", key, "name", where=where), key)
    return result | {"methods": {key: result["methods"][key] for key in best.values()}}


def training(result: dict[str, Any], where: str) -> Table:
    """One line a head: its size, and how it was trained as far as its card says."""
    columns = ["optimizer", "learning_rate", "steps", "batch_size", "rows_per_sequence", "seed"]
    rows: dict[tuple[str, str], list[str]] = {}
    for key, method in _get(result, "methods", where=where).items():
        for task, head in _get(method, "heads", where=f"{where}: {key}").items():
            parameters, how = _get(head, "parameters", where=f"{where}: {key}: heads"), head.get("training", {})
            rows[method["name"], task] = [
                method["name"],
                task,
                f"{parameters / 1e6:.2f} M",
                f"{head['draft_vocabulary']:,}",
                *(str(how.get(c, "")) for c in columns),
            ]
    return Table("Heads", ["method", "for", "parameters", "draft vocabulary", *columns], list(rows.values()))


def comparison(result: dict[str, Any], where: str, title: str = "Methods") -> Table:
    """One line a method: speed, and what it costs.

    Raises:
      ReportError: naming the field that is missing.
    """
    columns: list[tuple[str, tuple[str, ...], float, str, Callable[[Any], Any] | None]] = [
        ("tokens per step", ("overall", "tokens_per_step"), 1, ".2f", max),
        ("wall clock against vanilla", ("overall", "speedup"), 1, ".2f", max),
        ("passes per 100 tokens", ("overall", "passes_per_100_tokens"), 1, ".1f", min),
        ("drafting, % of time", ("costs", "draft_share"), 100, ".0f", min),
        ("added to prefill, ms", ("costs", "prefill_added_ms"), 1, ".1f", None),
        ("parameters, MiB", ("costs", "parameter_bytes"), 1 / MEBI, ".1f", min),
        ("state at 512 slots, MiB", ("costs", "state_bytes", "512"), 1 / MEBI, ".2f", min),
        ("at 4,096, MiB", ("costs", "state_bytes", "4096"), 1 / MEBI, ".2f", min),
        ("read per token, MiB", ("costs", "bytes_per_token"), 1 / MEBI, ".0f", min),
    ]
    values, rows = [], []
    for name, method in _get(result, "methods", where=where).items():
        numbers = [_get(method, *path, where=f"{where}: {name}") for _, path, _, _, _ in columns]
        values.append(numbers)
        same = [_get(method, "overall", field, where=f"{where}: {name}") for field in ("identical", "prompts")]
        shown = ["" if n is None else format(n * factor, form) for n, (_, _, factor, form, _) in zip(numbers, columns, strict=True)]
        rows.append([name, *shown, f"{same[0]} / {same[1]}"])
    best = _best(values, [better for *_, better in columns])
    return Table(title, ["method", *(column[0] for column in columns), "identical to vanilla"], rows, best)


def by_task(result: dict[str, Any], where: str, field: str = "tokens_per_step", title: str = "Tokens per step by task") -> Table:
    """One line a method, one column a task."""
    methods = _get(result, "methods", where=where)
    tasks = list(dict.fromkeys(task for method in methods.values() for task in _get(method, "tasks", where=where)))
    values = [[_get(method, "tasks", task, field, where=f"{where}: {name}") for task in tasks] for name, method in methods.items()]
    rows = [[name, *(f"{value:.2f}" for value in row)] for name, row in zip(methods, values, strict=True)]
    return Table(title, ["method", *tasks], rows, _best(values, [max] * len(tasks)))


def by_position(result: dict[str, Any], where: str) -> Table:
    """Share of steps in which draft k was kept."""
    methods = _get(result, "methods", where=where)
    kept = {name: _get(method, "overall", "accept_unconditional", where=f"{where}: {name}") for name, method in methods.items()}
    longest = max((len(shares) for shares in kept.values()), default=0)
    values = [[*shares, *[None] * (longest - len(shares))] for shares in kept.values()]
    rows = [[name, *("" if share is None else f"{share:.2f}" for share in row)] for name, row in zip(kept, values, strict=True)]
    return Table("Drafts kept, share of all steps", ["method", *map(str, range(1, longest + 1))], rows, _best(values, [max] * longest))


def beside(result: dict[str, Any], where: str, one: str, others: Sequence[str]) -> Table:
    """One line a task: method `one` against each of `others`.

    Drafts kept are those of a step, on average: the sum of the shares of steps in which draft 1, 2, .. was kept. Wall clock is the ratio of what both
    gain on vanilla. Above 1, `one` is ahead.

    Raises:
      ReportError: no such method in the result, or a field is missing.
    """
    methods = {method["name"]: method for method in fastest(result, where)["methods"].values()}
    for name in (one, *others):
        if name not in methods:
            raise ReportError(f"{where}: no method is named {name!r}; there are {', '.join(methods)}")
    tasks = list(_get(methods[one], "tasks", where=f"{where}: {one}"))

    def figures(name: str, task: str | None) -> tuple[float, float, float, float]:
        part = ("overall",) if task is None else ("tasks", task)
        found = _get(methods[name], *part, where=f"{where}: {name}")
        first, *_ = shares = found["accept_unconditional"]
        return found["tokens_per_step"], first, sum(shares), found["speedup"]

    rows = []
    for task in (*tasks, None):
        every = [figures(name, task) for name in (one, *others)]
        row = [task or "all", *(f"{tokens:.2f}" for tokens, *_ in every), *(f"{first:.2f}" for _, first, _, _ in every)]
        for at in (2, 3):
            row += [f"{every[0][at] / other[at]:.2f}" if other[at] else "" for other in every[1:]]
        rows.append(row)
    header = ["task", *(f"tokens per step, {name}" for name in (one, *others)), *(f"first draft kept, {name}" for name in (one, *others))]
    header += [f"drafts kept a step, {one} / {name}" for name in others] + [f"wall clock, {one} / {name}" for name in others]
    return Table(f"{one} beside {', '.join(others)}", header, rows)


PUBLISHED = """Assumed: a backbone of the Gemini Nano kind, three to four billion parameters, and a standalone drafter of 128 million beside it, 12 layers of
width 768 with 4 key heads of 64 and a table of 65,536 tokens; keys and values in 16 bits. A zero-copy head has layers too, but no table and
no cache: the last two columns are what it saves where both have as many layers. The whole drafter in 8 bits is 128 MB, without its cache."""


def published_shape() -> Table:
    """Memory of that drafter in MiB; see PUBLISHED."""
    parameters, table, layers, kv_heads, head_dim = 128e6, 65_536 * 768, 12, 4, 64
    rows = []
    for name, bits in (("4 bits", 4), ("8 bits", 8), ("16 bits", 16)):
        whole, rows_of_table = parameters * bits / 8 / MEBI, table * bits / 8 / MEBI
        caches = [2 * layers * kv_heads * head_dim * slots * 2 / MEBI for slots in (512, 4096)]
        rows.append(
            [name, f"{whole:.0f}", f"{rows_of_table:.0f}", *(f"{cache:.0f}" for cache in caches), *(f"{rows_of_table + cache:.0f}" for cache in caches)]
        )
    header = ["parameters in", "drafter, MiB", "of it the table", "its cache at 512 slots", "at 4,096", "table and cache at 512", "at 4,096"]
    return Table("Memory of a standalone drafter of 128 million parameters", header, rows)


def plots(result: dict[str, Any], where: str) -> dict[str, bytes]:
    """SVG files by name.

    Raises:
      ReportError: no matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ReportError("the report's plots need matplotlib: pip install 'mtp-jax[report]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mtp-jax"  # the same file from the same numbers
    from matplotlib import pyplot

    methods, found = fastest(result, where)["methods"], {}
    colours = {method["name"]: pyplot.colormaps["tab20"](number % 20) for number, method in enumerate(methods.values())}

    def save(name: str, figure: Any, axes: Any) -> None:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pyplot.close(figure)
        found[name] = buffer.getvalue()

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for key, method in methods.items():
        shares = method["overall"]["accept_unconditional"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=key, color=colours[method["name"]])
    axes.set(xlabel="position of the draft", ylabel="share of steps in which it was kept", ylim=(0, 1))
    save("acceptance", figure, axes)

    tasks = list(dict.fromkeys(task for method in methods.values() for task in method["tasks"]))
    figure, axes = pyplot.subplots(figsize=(4 + 1.2 * len(tasks), 4.5), layout="constrained")
    for number, (key, method) in enumerate(methods.items()):
        places = [index + (number - len(methods) / 2) * 0.8 / len(methods) for index in range(len(tasks))]
        heights = [method["tasks"].get(task, {}).get("tokens_per_step", 0) for task in tasks]
        axes.bar(places, heights, width=0.8 / len(methods), align="edge", label=key, color=colours[method["name"]])
    axes.set_xticks(range(len(tasks)), tasks, rotation=20)
    axes.set_ylabel("tokens per step")
    save("tasks", figure, axes)

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, colour in colours.items():
        points = sorted((m["num_draft"], m["overall"]["speedup"]) for m in result["methods"].values() if m["name"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="num_draft", ylabel="wall clock against vanilla")
    save("speedup", figure, axes)

    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(methods) + 1.2), layout="constrained")
    names = [method["name"] for method in methods.values()]
    parameters = [method["costs"]["parameter_bytes"] / MEBI for method in methods.values()]
    axes.barh(names, parameters, label="parameters")
    axes.barh(names, [method["costs"]["state_bytes"]["4096"] / MEBI for method in methods.values()], left=parameters, label="state at 4,096 slots")
    axes.set_xlabel("MiB beside the backbone")
    save("memory", figure, axes)
    return found


CAPTIONS = {"acceptance": "Drafts kept by position", "tasks": "Tokens per step by task", "speedup": "Wall clock by number of drafts", "memory": "Memory"}


def write(results: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """report.md with its plots beside it, and report.html with everything inside.

    Args:
      results: of experiments/compare.py, by what names them in errors and, in front, the plots' files.

    Raises:
      ReportError: something is missing in a result, or matplotlib is; or two results have files of one name.
    """
    stems = [Path(where).stem for where in results]
    if len(set(stems)) < len(stems):
        twice = next(stem for stem in stems if stems.count(stem) > 1)
        raise ReportError(f"{twice}: the name of two result files, and plots are named after them; rename one")
    parts = [_part(result, where) for where, result in results.items()]
    out.mkdir(parents=True, exist_ok=True)
    text, page, written = "# Drafters compared\n\nBold: the best of a column.\n", "<h1>Drafters compared</h1><p>Bold: the best of a column.</p>", []
    for stem, (title, about, tables, images) in zip(stems, parts, strict=True):
        text += f"\n## {title}\n\n" + "\n".join(f"* {line}" for line in about) + "\n"
        page += f"<h2>{html.escape(title)}</h2><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in about) + "</ul>"
        for table in tables:
            text += f"\n### {table.title}\n\n{table.markdown()}\n"
            page += f"<h3>{html.escape(table.title)}</h3>{table.html()}"
        for name, data in images.items():
            written.append(out / f"{stem}_{name}.svg")
            files.write_text(written[-1], data.decode())
            text += f"\n### {CAPTIONS[name]}\n\n![{CAPTIONS[name]}]({written[-1].name})\n"
            page += f'<h3>{CAPTIONS[name]}</h3><img alt="{CAPTIONS[name]}" src="data:image/svg+xml;base64,{base64.b64encode(data).decode()}">'
    shape = published_shape()
    text += f"\n## {shape.title}\n\n{PUBLISHED}\n\n{shape.markdown()}\n"
    page += f"<h2>{html.escape(shape.title)}</h2><p>{html.escape(PUBLISHED)}</p>{shape.html()}"
    table_style = "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .5rem}img{max-width:100%}"
    style = f"<style>body{{font-family:sans-serif;max-width:75rem;margin:2rem auto}}{table_style}</style>"
    files.write_text(out / "report.md", text)
    files.write_text(out / "report.html", f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Drafters compared</title>{style}{page}</html>\n')
    return [out / "report.md", out / "report.html", *written]


def _part(result: dict[str, Any], where: str) -> tuple[str, list[str], list[Table], dict[str, bytes]]:
    """Title, what it was run with, tables and plots of one result."""
    settings = _get(result, "settings", where=where)
    temperature = _get(settings, "decode", "temperature", where=f"{where}: settings")
    best = fastest(result, where)
    tables = [
        comparison(best, where),
        by_task(best, where),
        by_task(best, where, "speedup", "Wall clock against vanilla by task"),
        by_position(best, where),
        training(result, where),
        comparison(result, where, "Every number of drafts"),
    ]
    title = f"Temperature {temperature:g}" if temperature else "Greedy"
    title += f", {_get(settings, 'prompts', 'count', where=f'{where}: settings')} prompts"
    return title, [f"{name}: {_shown(value)}" for name, value in settings.items()], tables, plots(result, where)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
