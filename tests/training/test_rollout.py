"""Rollout files: the backbone's own answers with exact masks, resumable, each line independent of the batch it was made in."""

import dataclasses
import json

import fakes
import pytest

from mtp_jax.config import DecodeConfig
from mtp_jax.decoding import generate
from mtp_jax.prompts import Conversation, Message
from mtp_jax.training import data, rollout

TEXTS = ["abc", "hello", "z", "quick brown", "lazy", "fox", "over"]


def ask(text, task="a", where=""):
    return Conversation(task=task, messages=(Message("user", text),), where=where)


PROMPTS = [ask(text, "a" if i % 2 else "b") for i, text in enumerate(TEXTS)]
GREEDY = DecodeConfig(max_new_tokens=12)
SAMPLED = DecodeConfig(max_new_tokens=12, temperature=1.0, seed=5)
STOP = 16


@pytest.fixture(scope="module")
def stopping():
    return fakes.backbone(stop_tokens=(STOP,))


def records(path):
    return {record["prompt_index"]: record for record in map(json.loads, path.read_text().splitlines())}


def write(backbone, out, prompts=PROMPTS, config=GREEDY, batch_size=4, **changes):
    return rollout.rollout(backbone, prompts, out, config, batch_size=batch_size, **changes)


@pytest.fixture(scope="module")
def greedy(stopping, tmp_path_factory):
    out = tmp_path_factory.mktemp("rollout") / "greedy.jsonl"
    progress = []
    report = write(stopping, out, progress=lambda done, total: progress.append((done, total)))
    assert progress == [(done, 7) for done in range(1, 8)]
    return out, report


def test_lines_hold_prompt_answer_and_an_exact_mask(stopping, greedy):
    out, report = greedy
    found = records(out)
    assert sorted(found) == list(range(7))
    runtime = generate.make_runtime(stopping, column_blocks=False)
    answers = generate.run(runtime, [stopping.tokenizer.encode(text) for text in TEXTS], dataclasses.replace(GREEDY, stop_tokens=(STOP,))).outputs
    for index, output in enumerate(answers):
        prompt = stopping.tokenizer.encode(TEXTS[index])
        record = found[index]
        assert record["tokens"] == prompt + output.tokens
        assert record["answer_mask"] == [0] * len(prompt) + [1] * len(output.tokens)
        assert (record["task"], record["finish_reason"]) == (PROMPTS[index].task, output.finish_reason)
        assert (record["tokens"][-1] == STOP) == (output.finish_reason == "stop")
    assert report == rollout.RolloutReport(input=7, done=7, failed=0, skipped=0, tokens=sum(len(output.tokens) for output in answers))
    assert len(data.read_rollouts([out], vocab_size=64)) == 7


def test_counts_add_up(stopping, tmp_path):
    prompts = [*PROMPTS[:3], ask(""), ask("x" * 250, where="long.jsonl:7"), ask("y" * 20), ask("z" * 19)]
    report = write(stopping, tmp_path / "out.jsonl", prompts, max_prompt_tokens=19)
    assert (report.input, report.done, report.failed, report.skipped) == (7, 4, 2, 1)
    assert report.failures[0].startswith("conversation 3: prompt 0 is empty")
    assert report.failures[1].startswith("long.jsonl:7: prompt 0 has 250 tokens: with max_new_tokens=12 that exceeds")
    assert sorted(records(tmp_path / "out.jsonl")) == [0, 1, 2, 6]


def test_an_interrupted_run_goes_on_after_a_line_that_was_cut_off(stopping, greedy, tmp_path):
    whole = greedy[0].read_text().splitlines()
    out = tmp_path / "greedy.jsonl"
    out.write_text("".join(line + "\n" for line in whole[:4]) + whole[4][:25])
    (tmp_path / "greedy.jsonl.settings.json").write_bytes(greedy[0].with_name("greedy.jsonl.settings.json").read_bytes())
    report = write(stopping, out)
    assert records(out) == records(greedy[0]) and len(out.read_text().splitlines()) == 7
    assert report.done == 7 and report.tokens == sum(sum(json.loads(line)["answer_mask"]) for line in whole[4:])
    before = out.read_bytes()
    assert write(stopping, out).tokens == 0 and out.read_bytes() == before


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(config=dataclasses.replace(GREEDY, max_new_tokens=13)), "made with max_new_tokens=12, this run has 13"),
        (dict(config=dataclasses.replace(GREEDY, temperature=0.5)), "made with temperature=0.0, this run has 0.5"),
        (dict(config=dataclasses.replace(GREEDY, seed=1)), "made with seed=0, this run has 1"),
        (dict(config=dataclasses.replace(GREEDY, min_p=0.5)), "made with min_p=0.0, this run has 0.5"),
        (dict(prompts=PROMPTS[::-1]), "made with prompts="),
        (dict(answers="given"), "made with answers='backbone', this run has 'given'"),
        (dict(max_prompt_tokens=9), "made with max_prompt_tokens=512, this run has 9"),
    ],
)
def test_other_settings_are_refused(stopping, greedy, change, message):
    before = greedy[0].read_bytes()
    with pytest.raises(rollout.RolloutError, match=message):
        write(stopping, greedy[0], **change)
    assert greedy[0].read_bytes() == before


def test_a_file_from_before_there_were_min_p_and_answers_is_continued(stopping, greedy, tmp_path):
    out = tmp_path / "old.jsonl"
    out.write_bytes(greedy[0].read_bytes())
    settings = json.loads(greedy[0].with_name("greedy.jsonl.settings.json").read_text())
    assert (settings.pop("min_p"), settings.pop("answers")) == (0.0, "backbone")
    (tmp_path / "old.jsonl.settings.json").write_text(json.dumps(settings))
    assert write(stopping, out).done == 7 and out.read_bytes() == greedy[0].read_bytes()


def test_another_backbone_or_a_foreign_file_is_refused(stopping, greedy, tmp_path):
    with pytest.raises(rollout.RolloutError, match="made with backbone="):
        write(dataclasses.replace(stopping, fingerprint="f" * 16), greedy[0])
    (tmp_path / "notes.jsonl").write_text("mine\n")
    with pytest.raises(rollout.RolloutError, match="exists without notes.jsonl.settings.json"):
        write(stopping, tmp_path / "notes.jsonl")
    assert (tmp_path / "notes.jsonl").read_text() == "mine\n"


def test_sampled_answers_depend_neither_on_the_batch_nor_on_interruptions(stopping, tmp_path):
    write(stopping, tmp_path / "four.jsonl", config=SAMPLED, batch_size=4)
    write(stopping, tmp_path / "three.jsonl", config=SAMPLED, batch_size=3)
    four, three = records(tmp_path / "four.jsonl"), records(tmp_path / "three.jsonl")
    assert four == three
    assert len({tuple(record["tokens"][-12:]) for record in four.values()}) == 7
    whole = (tmp_path / "four.jsonl").read_text().splitlines()
    (tmp_path / "part.jsonl").write_text("".join(line + "\n" for line in whole[:3]))
    (tmp_path / "part.jsonl.settings.json").write_bytes((tmp_path / "four.jsonl.settings.json").read_bytes())
    write(stopping, tmp_path / "part.jsonl", config=SAMPLED, batch_size=4)
    assert records(tmp_path / "part.jsonl") == four
    write(stopping, tmp_path / "seed.jsonl", config=dataclasses.replace(SAMPLED, seed=6), batch_size=4)
    assert sum(records(tmp_path / "seed.jsonl")[i]["tokens"] != four[i]["tokens"] for i in range(7)) >= 6
