"""What the bench says it measures is what its programs do, and its document has every part."""

import dataclasses
import json

import fakes
import numpy as np
import pytest

from mtp_jax.config import ConfigError
from mtp_jax.decoding import generate, loop
from mtp_jax.evaluation import bench
from mtp_jax.prompts import Prompt

PLAN = bench.Plan(num_drafts=(2,), widths=(4,), batch_sizes=(2,), context=9, passes=3, rounds=2, decode_rounds=2, max_new_tokens=6)
PROMPTS = [Prompt("a", "hello"), Prompt("a", "goodbye"), Prompt("b", "z")]


@pytest.fixture(scope="module")
def bed(runtime):
    return bench.make_bed(runtime.without_drafter(), runtime, fakes.prompts(5)[0], PLAN)


@pytest.fixture(scope="module")
def programs(bed):
    return bed.programs()


@pytest.fixture(scope="module")
def document(backbone, head):
    seen = []
    result = bench.bench(backbone, head, PROMPTS, PLAN, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    return json.loads(json.dumps(result))


def test_all_that_is_timed(programs):
    verify = [("verify", width, "column_blocks") for width in (1, 2, 3, 4)]
    drafting = [("draft", 2, ""), ("step", 2, "drafter"), ("step", 2, "none")]
    assert list(programs) == [bench.MATVEC, bench.READ, bench.ONE_TOKEN, *verify, *drafting]
    assert {timed.count for key, timed in programs.items() if key != bench.READ} == {3}


@pytest.mark.parametrize("key", [bench.ONE_TOKEN, ("step", 2, "drafter"), ("step", 2, "none")])
def test_a_run_makes_as_many_steps_as_it_says_of_every_row(programs, key):
    for _ in range(2):  # the first leaves nothing used up
        before = programs[key].prepare()
        lengths = np.asarray(before.cache.lengths)
        after = programs[key].run(before)
        assert after.steps.tolist() == [3, 3] and not after.done.any()
        committed = np.asarray(after.cache.lengths) - lengths
        assert lengths.tolist() == [9, 9] and (committed >= 3).all()
        if key[2] == "none":
            assert committed.tolist() == [3, 3] and after.drafted.tolist() == [0, 0]
        else:
            assert after.drafted.tolist() == [6, 6]


def test_jobs_have_the_same_slots(runtime):
    """Whatever M is: 128 slots would be enough for the smallest alone."""
    plan = dataclasses.replace(PLAN, num_drafts=(1, 5), context=99, passes=4)
    bed = bench.make_bed(runtime.without_drafter(), runtime, fakes.prompts(5)[0], plan)
    assert {job.num_slots for job in (bed.vanilla, *bed.drafted.values(), bed.nothing)} == {256}  # 99 + 26 + M + 1 slots
    assert bed.nothing is not None and bed.nothing.rules.num_draft == 5
    assert bed.vanilla.prompt_lengths.tolist() == [99, 99]


def test_verify_pass_is_that_of_the_loop(bed):
    """One pass over the pending token, with the cache that comes out, is a vanilla step."""
    state = bed.vanilla.prefill()
    _, module, params = bed.layout(1)
    stepped = bed.vanilla.decode(bed.vanilla.prefill(), at_most=1)
    tokens, cache = bench._verify_passes(module, params, state.pending[:, None], state.cache, np.int32(1))
    np.testing.assert_array_equal(tokens[:, 0], stepped.pending)
    for one, other in zip(cache.keys, stepped.cache.keys, strict=True):
        np.testing.assert_array_equal(one[:, :, 9], other[:, :, 9])


def test_draft_is_that_of_the_loop(bed):
    job = bed.drafted[2]
    state = job.prefill()
    context = loop.context_of(state, job.backbone[1], job.request)
    proposal, _ = loop.propose_alone(job.runtime.drafter, job.backbone[1], job.runtime.drafter_params, state, job.request, config=job.rules)
    pending, tokens, _ = bench._drafts(job.runtime.drafter, job.rules, job.runtime.drafter_params, (), context, np.int32(1))
    np.testing.assert_array_equal(pending, proposal.tokens[:, 1])
    np.testing.assert_array_equal(tokens[:, :-1], state.tokens[:, :-1])


def test_document_has_every_part(document, head, backbone):
    assert list(document) == ["roofline", "passes", "end_to_end", "predicted", "drafter_bytes", "settings"]
    roof, passes = document["roofline"], document["passes"]
    assert list(passes) == ["one_token", "verify", "draft", "steps"]
    assert passes["one_token"]["ratio"] == 1.0
    assert [(item["width"], item["layout"]) for item in passes["verify"]] == [(width, "column_blocks") for width in (1, 2, 3, 4)]
    assert [item["num_draft"] for item in passes["draft"]] == [2]
    assert [(item["num_draft"], item["drafter"]) for item in passes["steps"]] == [(0, "none"), (2, "drafter"), (2, "none")]
    assert passes["steps"][0]["ratio"] == 1.0
    for item in [passes["one_token"], *passes["verify"], *passes["draft"], *passes["steps"]]:
        assert item["ms"] > 0 and item["ratio"] > 0
    assert {"overhead_ms", "overhead_ratio"} <= set(passes["steps"][1])

    keys = ["weight_bytes", "cache_bytes", "flops", "compiled", "gb_per_second", "best_ms", "one_token_ms", "one_token_over_best", "accelerators"]
    assert list(roof) == keys
    assert roof["one_token_ms"] == passes["one_token"]["ms"]
    assert roof["one_token_over_best"] == pytest.approx(roof["one_token_ms"] / roof["best_ms"], rel=0.01)
    assert roof["weight_bytes"]["total"] == roof["weight_bytes"]["layers"] + roof["weight_bytes"]["unembedding"]
    assert roof["compiled"]["flops"] > roof["flops"] > 0 and roof["compiled"]["bytes"] > 0
    assert list(roof["gb_per_second"]) == ["matvec", "read"] and min(roof["gb_per_second"].values()) > 0
    assert [device["name"] for device in roof["accelerators"]] == ["TPU v5e", "TPU v6e", "H100 SXM"]
    assert all(device["steps"][0]["ratio"] > 1 and device["source"].startswith("https://") for device in roof["accelerators"])

    (whole,) = document["end_to_end"]
    times = {item["width"]: item["ms"] for item in passes["verify"]}
    expected = (1 + sum(whole["accept_unconditional"])) * times[1] / (times[3] + passes["draft"][0]["ms"])
    assert document["predicted"]["speedups"] == pytest.approx({"0": 1.0, "2": expected}, rel=1e-2)
    assert document["predicted"]["best_num_draft"] == (2 if document["predicted"]["speedups"]["2"] > 1 else 0)
    assert (whole["batch_size"], whole["num_draft"], whole["prompts"], whole["identical"]) == (2, 2, 3, 3)
    assert whole["tokens_per_step"] >= 1 and whole["speedup"] > 0 and whole["tokens_per_second"] > 0 and whole["differences"] == []
    assert document["drafter_bytes"] == generate.make_runtime(backbone, head).drafter_bytes()["parameters"] and whole["state_bytes"] == 0
    settings = document["settings"]
    assert (settings["drafter"], settings["slots"], settings["plan"]["context"], settings["num_draft"]) == ("mtp", 128, 9, 2)


def test_without_a_head_and_in_both_layouts(backbone):
    plan = dataclasses.replace(PLAN, num_drafts=(1,), widths=(), rounds=1, decode_rounds=0, both_layouts=True)
    result = bench.bench(backbone, None, PROMPTS, plan)
    assert [(item["width"], item["layout"]) for item in result["passes"]["verify"]] == [(w, name) for w in (1, 2) for name in ("column_blocks", "plain")]
    assert result["passes"]["draft"] == [] and [item["num_draft"] for item in result["passes"]["steps"]] == [0]
    assert result["predicted"] is None
    assert result["end_to_end"] == [] and result["settings"]["head"] is None and result["drafter_bytes"] == 0
    assert all(device["steps"] == [] for device in result["roofline"]["accelerators"])


def test_median_of_the_rounds(monkeypatch, backbone, head):
    """Each group's median time, not the mean; outputs are the same each time."""
    seconds = iter([9.0, 1.0, 2.0, 1.0, 3.0, 1.0])  # vanilla, head; the second round is measured the other way round

    def run(runtime, rows, config, *, warm_up, row_numbers):
        drafted = runtime.drafter is not None
        output = generate.Output(tokens=[1, 2, 3], text="", prompt_tokens=5, steps=2, drafted=4, accepted=[1] if drafted else [], finish_reason="length")
        return generate.DecodeResult([output], 0.0, next(seconds), drafter_bytes={"parameters": 0, "state": 0})

    monkeypatch.setattr(generate, "run", run)
    vanilla = generate.make_runtime(backbone)
    plan = dataclasses.replace(PLAN, num_drafts=(1,), batch_sizes=(1,), decode_rounds=3)
    config = generate.with_stop_tokens(bench.config_lib.DecodeConfig(), backbone)
    (found,) = bench._end_to_end(vanilla, generate.attach(vanilla, head), PROMPTS[:1], [[1]], config, plan, lambda done, total: None)
    assert found["speedup"] == 3.0  # of (9, 1, 3) and (1, 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_drafts=()), r"num_drafts=\(\): must name at least one"),
        (dict(num_drafts=(1, 0)), "num_drafts=0: each must be at least 1"),
        (dict(widths=(0,)), "widths=0: each must be at least 1"),
        (dict(batch_sizes=(-1,)), "batch_sizes=-1: each must be at least 1"),
        (dict(rounds=0), "rounds=0: must be at least 1"),
        (dict(decode_rounds=-1), "decode_rounds=-1: must be at least 0"),
    ],
)
def test_impossible_plans(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PLAN, **change)


def test_nothing_runs_when_a_prompt_or_context_is_too_long(backbone, head, monkeypatch):
    monkeypatch.setattr(bench.timing, "take_turns", lambda *_: pytest.fail("the passes were measured"))
    with pytest.raises(generate.PromptError, match="prompt 1 has 253 tokens"):
        bench.bench(backbone, head, [PROMPTS[0], Prompt("a", "x" * 253)], PLAN)
    with pytest.raises(generate.PromptError, match="prompt 0 has 250 tokens"):
        bench.bench(backbone, head, PROMPTS, dataclasses.replace(PLAN, context=250))
