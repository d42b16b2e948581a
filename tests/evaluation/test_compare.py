"""experiments/compare.py on the tiny backbone."""

import importlib
import json
from pathlib import Path

import fakes
import jax
import pytest

from mtp_jax import config as config_lib
from mtp_jax import prompts as prompts_lib
from mtp_jax.evaluation import acceptance, report

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
PROMPTS = [prompts_lib.Prompt("one", "abcabcab"), prompts_lib.Prompt("two", "hello"), prompts_lib.Prompt("one", "xyz"), prompts_lib.Prompt("two", "aaaa")]
CONFIG = config_lib.DecodeConfig(max_new_tokens=20, stop_tokens=(16,))


@pytest.fixture(scope="module")
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        return importlib.import_module("compare")


def run(compare, backbone, heads, methods, out, **options):
    parsed = [compare.Method.parse(text) for text in methods]
    return compare.compare(backbone, parsed, heads, PROMPTS, CONFIG, (2, 3), out / "result.json", out, **options)


def test_figures_are_those_of_evaluate(compare, backbone, head, tmp_path, monkeypatch):
    own = fakes.baseline(backbone, "standalone")
    medusa = fakes.baseline(backbone, "medusa", num_draft=2)
    heads = {"ours": head, "small": own, "parallel": medusa}
    result = run(compare, backbone, heads, ["ours=mtp", "copy=prompt_lookup", "small=standalone", "parallel=medusa"], tmp_path, repeats=2)
    assert result == json.loads((tmp_path / "result.json").read_text())
    wanted = ["ours, M = 2", "ours, M = 3", "copy, M = 2", "copy, M = 3", "small, M = 2", "small, M = 3", "parallel, M = 2"]
    assert list(result["methods"]) == wanted  # Medusa has two heads
    for key, drafter, num_draft in (("ours, M = 3", "mtp", 3), ("small, M = 2", "standalone", 2)):
        found, costs = result["methods"][key], result["methods"][key]["costs"]
        config = config_lib.DecodeConfig(max_new_tokens=20, stop_tokens=(16,), num_draft=num_draft)
        alone = acceptance.evaluate(backbone, heads[found["name"]], PROMPTS, config, drafter=drafter)
        for name in ("tokens_per_step", "accept_unconditional", "prompts", "identical", "steps"):
            assert found["overall"][name] == alone["overall"][name]
            assert found["tasks"]["two"][name] == alone["tasks"]["two"][name]
        assert found["overall"]["identical"] == 4 and len(found["overall"]["speedups"]) == 2
        assert costs["parameter_bytes"] == alone["drafter_bytes"]["parameters"] and 0 < costs["draft_share"] < 1
    kv = sum(leaf.size for leaf in jax.tree.leaves(own.params)) > 0 and 2 * 2 * 3 * 10 * 4  # two layers, K and V, three heads of ten, four bytes a slot
    assert result["methods"]["small, M = 2"]["costs"]["state_bytes"] == {"512": 512 * kv, "4096": 4096 * kv}
    assert result["methods"]["ours, M = 2"]["costs"]["state_bytes"] == {"512": 0, "4096": 0}
    report.comparison(result, "result.json")  # has all it needs

    monkeypatch.setattr(acceptance, "evaluate", None)  # nothing is run again
    assert run(compare, backbone, heads, ["ours=mtp"], tmp_path, repeats=2) == result
    with pytest.raises(ValueError, match="made with other settings"):
        run(compare, backbone, heads, ["ours=mtp"], tmp_path, repeats=3)


def test_a_method_that_is_none(compare):
    assert compare.Method.parse("a=eagle@runs/x") == compare.Method("a", "eagle", "runs/x")
    for text in ("mtp", "=mtp", "a=ngram", "a=@x"):
        with pytest.raises(ValueError, match="must be NAME=DRAFTER"):
            compare.Method.parse(text)


def test_prompts_are_drawn_by_task_and_length(compare, backbone):
    drawn = compare.draw(backbone, PROMPTS, 1, 6, 0)
    assert [(prompt.task, prompt.text) for prompt in drawn] in ([("one", "xyz"), ("two", text)] for text in ("hello", "aaaa"))
    assert compare.draw(backbone, PROMPTS, 9, 99, 0) == [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]]
