"""experiments/compare.py on the tiny backbone."""

import importlib
import json
from pathlib import Path

import fakes
import pytest

from mtp_jax import config as config_lib
from mtp_jax import prompts as prompts_lib
from mtp_jax.decoding import generate
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
    small, smaller = fakes.baseline(backbone, "standalone"), fakes.baseline(backbone, "standalone", seed=2)
    medusa = fakes.baseline(backbone, "medusa", num_draft=2)
    heads = {"ours": {"": head}, "small": {"": small, "two": smaller}, "parallel": {"": medusa}}
    methods = ["ours=mtp", "copy=prompt_lookup", "small=standalone", "parallel=medusa"]
    decode, decoded = generate.run, []

    def stopped(runtime, rows, *arguments, **options):
        decoded.append(rows[0])
        if len(decoded) == 20:
            raise KeyboardInterrupt
        return decode(runtime, rows, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "run", stopped)
        run(compare, backbone, heads, methods, tmp_path, repeats=2)
    decoded.append(None)  # goes on with the third prompt, as eight runs are one prompt's: vanilla, and each method with 2 and 3 drafts, Medusa with 2
    with monkeypatch.context() as patch:
        patch.setattr(generate, "run", stopped)
        result = run(compare, backbone, heads, methods, tmp_path, repeats=2)
    after = decoded[decoded.index(None) + 1 :]
    assert len(after) == (2 * len(PROMPTS) - 2) * 8 + 7 * compare.SPLIT_PROMPTS - 7  # prompts from the median on are split: two
    assert result == json.loads((tmp_path / "result.json").read_text())
    wanted = ["ours, M = 2", "ours, M = 3", "copy, M = 2", "copy, M = 3", "small, M = 2", "small, M = 3", "parallel, M = 2"]
    assert list(result["methods"]) == wanted  # Medusa has two heads
    one, two = ([prompt for prompt in PROMPTS if prompt.task == task] for task in ("one", "two"))
    for key, task, chosen, drafter, trained, num_draft in (
        ("ours, M = 3", None, PROMPTS, "mtp", head, 3),
        ("ours, M = 3", "two", two, "mtp", head, 3),
        ("small, M = 2", "one", one, "standalone", small, 2),
        ("small, M = 2", "two", two, "standalone", smaller, 2),
    ):
        found, costs = result["methods"][key], result["methods"][key]["costs"]
        values = found["overall"] if task is None else found["tasks"][task]
        config = config_lib.DecodeConfig(max_new_tokens=20, stop_tokens=(16,), num_draft=num_draft)
        alone = acceptance.evaluate(backbone, trained, chosen, config, drafter=drafter)
        for name in ("tokens_per_step", "accept_unconditional", "prompts", "identical", "steps"):
            assert values[name] == alone["overall"][name], (key, task, name)
        assert values["identical"] == len(chosen) and len(values["speedups"]) == 2 and 0 < costs["draft_share"] < 1
        assert costs["parameter_bytes"] == alone["drafter_bytes"]["parameters"] * (2 if drafter == "standalone" else 1)
    kv = 2 * 2 * 3 * 10 * 4  # two layers, K and V, three heads of ten, four bytes a slot
    assert result["methods"]["small, M = 2"]["costs"]["state_bytes"] == {"512": 512 * kv, "4096": 4096 * kv}
    assert result["methods"]["ours, M = 2"]["costs"]["state_bytes"] == {"512": 0, "4096": 0}
    report.comparison(result, "result.json")  # has all it needs

    monkeypatch.setattr(generate, "run", None)  # nothing is run again
    assert run(compare, backbone, heads, ["ours=mtp"], tmp_path, repeats=2) == result
    with pytest.raises(ValueError, match="made with other settings"):
        run(compare, backbone, heads, ["ours=mtp"], tmp_path, repeats=3)
    monkeypatch.undo()
    (tmp_path / "result.json").unlink()
    monkeypatch.setattr(compare, "_decode_all", lambda *arguments: None)  # the first repeat is in the journal
    once = run(compare, backbone, heads, methods, tmp_path, repeats=1)["methods"]["copy, M = 3"]["overall"]
    assert once["repeated"] == 4 and once["speedups"] == result["methods"]["copy, M = 3"]["overall"]["speedups"][:1] and once["prompts"] == 4


def test_a_prompt_takes_its_median_run(compare):
    def pair(tokens, plain, fast, task="one"):
        texts = ([generate.Output(text, "", 3, 2, 2, [1], "length")] for text in ([1, 2, 3, 4], tokens))
        return acceptance.Pair(task, [0], *texts, plain, fast)

    variant = compare.Variant(compare.Method("a", "jacobi"), {}, config_lib.DecodeConfig(num_draft=1))
    same, other = [1, 2, 3, 4], [1, 2, 3, 5]
    runs = [[pair(same, 1.0, 2.0), pair(same, 9.0, 3.0), pair(same, 2.0, 4.0)], [pair(same, 4.0, 1.0), pair(other, 4.0, 1.0), pair(same, 4.0, 1.0)]]
    values = compare._summary(variant, [*runs, [pair(same, 1.0, 4.0, "two")]])
    whole, one, two = values["overall"], values["tasks"]["one"], values["tasks"]["two"]
    assert whole["speedup"] == round((2 + 4 + 1) / (3 + 1 + 4), 4) and whole["speedups"] == [round(5 / 3, 4), round(13 / 4, 4), round(6 / 5, 4)]
    assert (whole["prompts"], whole["repeated"], whole["identical"]) == (3, 2, 2)
    assert (one["speedup"], one["identical"], two["speedup"], two["speedups"], two["repeated"]) == (1.5, 1, 0.25, [0.25], 1)


def test_a_method_that_is_none(compare):
    assert compare.Method.parse("a=jacobi") == compare.Method("a", "jacobi", {})
    assert compare.Method.parse("a=eagle@runs/x") == compare.Method("a", "eagle", {"": "runs/x"})
    assert compare.Method.parse("a=eagle@x,b:y") == compare.Method("a", "eagle", {"": "x", "b": "y"})
    for text in ("mtp", "=mtp", "a=ngram", "a=@x", "a=eagle@", "a=eagle@b:y", "a=eagle@x,"):
        with pytest.raises(ValueError, match="must be NAME=DRAFTER"):
            compare.Method.parse(text)


def test_prompts_are_drawn_by_task_and_length(compare, backbone):
    drawn = compare.draw(backbone, PROMPTS, {"": 1}, 6, 0)
    assert [(prompt.task, prompt.text) for prompt in drawn] in ([("one", "xyz"), ("two", text)] for text in ("hello", "aaaa"))
    assert compare.draw(backbone, PROMPTS, {"": 9}, 99, 0) == [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]]
    assert compare.draw(backbone, PROMPTS, compare.limits(["9", "one=0"]), 99, 0) == [PROMPTS[1], PROMPTS[3]]
    with pytest.raises(ValueError, match="--limit three=2: no prompt is of this task"):
        compare.draw(backbone, PROMPTS, compare.limits(["9", "three=2"]), 99, 0)
    for texts in (["one=2"], ["x"], ["2", "one=-1"], ["2.5"]):
        with pytest.raises(ValueError, match="must be N, and then perhaps TASK=N"):
            compare.limits(texts)
