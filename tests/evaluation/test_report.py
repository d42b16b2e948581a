"""Tables and pages of a comparison, from a made-up result file."""

import copy
import json
import re
import sys

import pytest

from mtp_jax import cli
from mtp_jax.evaluation import report


def method(name, num_draft, tokens_per_step, speedup, parameters, state, identical=4):
    overall = {
        "prompts": 4,
        "identical": identical,
        "tokens_per_step": tokens_per_step,
        "speedup": speedup,
        "passes_per_100_tokens": round(100 / tokens_per_step, 2),
        "accept_unconditional": [0.61, 0.37, 0.2, 0.1][:num_draft],
    }
    costs = {"parameter_bytes": parameters, "state_bytes": {"512": state, "4096": 8 * state}, "draft_share": 0.125, "prefill_added_ms": 3.25}
    tasks = {"copying": dict(overall), "chat": overall | {"tokens_per_step": 1.5}}
    costs["bytes_per_token"] = 300 * report.MEBI
    head = {"name": "h", "parameters": 1_230_000, "draft_vocabulary": 4096, "training": {"optimizer": "muon", "learning_rate": 0.02, "steps": 77}}
    return {"name": name, "drafter": "mtp", "num_draft": num_draft, "heads": {"every other task": head}, "overall": overall, "tasks": tasks, "costs": costs}


RESULT = {
    "settings": {"backbone": "tiny", "prompts": {"count": 4, "tasks": ["copying", "chat"]}, "decode": {"temperature": 0.0}, "repeats": 3},
    "methods": {
        "ours, M = 2": method("ours", 2, 2.41, 1.43, 10 * report.MEBI, 0),
        "ours, M = 4": method("ours", 4, 2.73, 1.31, 10 * report.MEBI, 0),
        "other <b>, M = 2": method("other <b>", 2, 2.07, 1.62, 20 * report.MEBI, report.MEBI, identical=3),
    },
}


def test_the_best_of_each_column_is_bold_whoever_has_it():
    lines = report.comparison(RESULT, "r.json").markdown().splitlines()
    assert lines[0].startswith("| method | tokens per step | wall clock against vanilla | passes per 100 tokens |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0] == ["ours, M = 2", "2.41", "1.43", "41.5", "**12**", "3.2", "**10.0**", "**0.00**", "**0.00**", "**300**", "4 / 4"]
    assert cells[1] == ["ours, M = 4", "**2.73**", "1.31", "**36.6**", "**12**", "3.2", "**10.0**", "**0.00**", "**0.00**", "**300**", "4 / 4"]
    assert cells[2] == ["other <b>, M = 2", "2.07", "**1.62**", "48.3", "**12**", "3.2", "20.0", "1.00", "8.00", "**300**", "3 / 4"]


def test_tables_by_task_and_by_position():
    assert report.by_task(RESULT, "r.json").markdown().splitlines()[2:] == [
        "| ours, M = 2 | 2.41 | **1.50** |",
        "| ours, M = 4 | **2.73** | **1.50** |",
        "| other <b>, M = 2 | 2.07 | **1.50** |",
    ]
    assert report.by_position(RESULT, "r.json").markdown().splitlines()[2:4] == [
        "| ours, M = 2 | **0.61** | **0.37** |  |  |",
        "| ours, M = 4 | **0.61** | **0.37** | **0.20** | **0.10** |",
    ]


def test_each_method_at_its_fastest_the_fastest_first():
    assert list(report.fastest(RESULT, "r.json")["methods"]) == ["other <b>, M = 2", "ours, M = 2"]
    assert report.training(RESULT, "r.json").rows[0] == ["ours", "every other task", "1.23 M", "4,096", "muon", "0.02", "77", "", "", ""]
    assert [row[0] for row in report.training(RESULT, "r.json").rows] == ["ours", "other <b>"]


def test_one_method_beside_others():
    result = copy.deepcopy(RESULT)
    result["methods"]["other <b>, M = 2"]["tasks"]["chat"] |= {"accept_unconditional": [0.3, 0.1], "speedup": 0.71}
    rows = report.beside(result, "r.json", "ours", ["other <b>"]).rows
    assert rows[0] == ["copying", "2.41", "2.07", "0.61", "0.61", "1.00", "0.88"]  # 1.43 / 1.62
    assert rows[1] == ["chat", "1.50", "1.50", "0.61", "0.30", "2.45", "2.01"]  # 0.98 / 0.4 and 1.43 / 0.71
    assert rows[2][0] == "all" and len(rows) == 3
    result["methods"]["other <b>, M = 2"]["tasks"]["chat"]["accept_unconditional"] = [0.0, 0.0]
    assert report.beside(result, "r.json", "ours", ["other <b>"]).rows[1][5] == ""
    with pytest.raises(report.ReportError, match="r.json: no method is named 'their'; there are other <b>, ours"):
        report.beside(result, "r.json", "ours", ["their"])


def test_memory_of_the_published_shape():
    """128 million numbers: 61 MiB in four bits, 244 in sixteen; the table is 65,536 x 768; the cache 12 x 2 x 4 x 64 numbers of two bytes a slot."""
    rows = report.published_shape().rows
    assert rows[0] == ["4 bits", "61", "24", "6", "48", "30", "72"]
    assert rows[2] == ["16 bits", "244", "96", "6", "48", "102", "144"]


def test_both_pages_have_all_numbers(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plots need the extra 'report'")
    sampled = copy.deepcopy(RESULT)
    sampled["settings"]["decode"]["temperature"] = 0.5
    sampled["methods"]["ours, M = 2"]["overall"]["speedup"] = 1.07
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    (tmp_path / "s.json").write_text(json.dumps(sampled))
    assert cli.main(["report", str(tmp_path / "r.json"), str(tmp_path / "s.json"), "--out", str(tmp_path / "page"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == sorted(path.rpartition("/")[2] for path in written)
    markdown, page = ((tmp_path / "page" / name).read_text() for name in ("report.md", "report.html"))
    for number in ("2.41", "2.73", "1.62", "48.3", "0.37", "3 / 4", "1.07", "Greedy", "Temperature 0.5"):
        assert number in markdown and number in page
    assert "other <b>, M" not in page and "other &lt;b&gt;, M" in page
    assert "src=" in page and re.search(r'src="(?!data:)', page) is None  # nothing beside the file is needed
    images = re.findall(r"\]\((\S+)\)", markdown)
    assert len(set(images)) == 8
    for name in images:
        assert (tmp_path / "page" / name).read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("path", [("settings",), ("methods", "ours, M = 4", "costs", "draft_share"), ("methods", "ours, M = 2", "tasks", "chat", "speedup")])
def test_a_missing_field_is_named(path, tmp_path, capsys):
    result = copy.deepcopy(RESULT)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert cli.main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "page")]) == 1
    said = capsys.readouterr().err
    assert path[-1] in said and "r.json" in said and said.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_two_results_of_one_name_are_refused(tmp_path):
    with pytest.raises(report.ReportError, match="^r: the name of two result files"):
        report.write({"a/r.json": RESULT, "b/r.json": RESULT}, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_without_matplotlib_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    assert cli.main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "page")]) == 1
    assert "need matplotlib: pip install 'mtp-jax[report]'" in capsys.readouterr().err
