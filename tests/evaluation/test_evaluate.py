"""What evaluate counts, in which order it measures, and that its numbers are those of the decoder and of training."""

import dataclasses

import fakes
import numpy as np
import pytest

from mtp_jax.config import ConfigError, DecodeConfig, TrainConfig
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import acceptance
from mtp_jax.evaluation import journal as journal_lib
from mtp_jax.models import head as head_lib
from mtp_jax.prompts import Prompt
from mtp_jax.training import data, fit, walk

CONFIG = DecodeConfig(max_new_tokens=12, num_draft=2, stop_tokens=(63,))
PROMPTS = [Prompt("a", "hello"), Prompt("b", "goodbye"), Prompt("a", "a" * 90), Prompt("a", "letters"), Prompt("b", "z")]


def _output(tokens, steps, accepted):
    return generate_lib.Output(tokens=tokens, text="", prompt_tokens=3, steps=steps, drafted=steps * len(accepted), accepted=accepted, finish_reason="length")


def _by_hand():
    """Two tasks. With the head: 7 tokens in 3 steps and 5 in 2; 1 token in no step."""
    same, long = [1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5]
    return [
        acceptance.Pair("a", [0], [_output(same, 6, [])], [_output(same, 3, [2, 1])], 3.0, 2.0),
        acceptance.Pair("b", [1, 2], [_output(long, 4, []), _output([4], 0, [])], [_output([9, 8, 1, 6, 5], 2, [2, 0]), _output([4], 0, [0, 0])], 1.0, 0.5),
    ]


def test_summary_by_hand():
    assert acceptance.summary(_by_hand(), 2) == {
        "prompts": 3,
        "tokens": 13,
        "steps": 5,
        "tokens_per_step": 2.0,  # (6 + 4 + 0) / 5: first tokens are the prefill's
        "accept_unconditional": [0.8, 0.2],
        "accept_conditional": [0.8, 0.25],
        "identical": 2,
        "vanilla_tokens_per_second": 3.25,
        "tokens_per_second": 5.2,
        "speedup": 1.6,
    }
    assert acceptance.summary(_by_hand()[:1], 2)["accept_conditional"] == [0.6667, 0.5]


def test_differences_name_prompt_and_place():
    pairs = _by_hand()
    assert acceptance.differences(pairs) == [{"prompt": 1, "position": 2}]
    shorter = dataclasses.replace(pairs[0], drafted=[_output([1, 2, 3], 1, [1, 1])])
    assert acceptance.differences([pairs[1], shorter]) == [{"prompt": 0, "position": 3}, {"prompt": 1, "position": 2}]


@pytest.fixture
def scripted(monkeypatch):
    """Replace the decoder: a call takes 1 s alone and 0.5 s with the head, whose third token is wrong; calls are written down."""
    calls = []

    def run(runtime, rows, config, *, warm_up, row_numbers):
        drafted = runtime.drafter is not None
        calls.append(("head" if drafted else "vanilla", warm_up, list(row_numbers)))
        outputs = [_output([number, 1, 5 if drafted else 2], 1 if drafted else 2, [1, 1] if drafted else []) for number in row_numbers]
        return generate_lib.DecodeResult(outputs, 0.1, 0.4 if drafted else 0.9, drafter_bytes={"parameters": 7, "state": len(rows) if drafted else 0})

    monkeypatch.setattr(generate_lib, "run", run)
    return calls


@pytest.fixture(scope="module")
def pair(backbone, head):
    return backbone, head


def test_order_alternates_and_each_shape_warms_up_once(pair, scripted):
    seen = []
    result = acceptance.evaluate(*pair, PROMPTS, CONFIG, progress=lambda done, total: seen.append((done, total)))
    assert scripted == [
        ("vanilla", True, [4]),  # shortest first
        ("head", True, [4]),
        ("head", False, [0]),
        ("vanilla", False, [0]),
        ("vanilla", False, [3]),
        ("head", False, [3]),
        ("head", False, [1]),
        ("vanilla", False, [1]),
        ("vanilla", True, [2]),  # 90 tokens: the next prompt width
        ("head", True, [2]),
    ]
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert result["overall"]["speedup"] == 2.0 and result["tasks"]["b"]["tokens_per_second"] == 6.0
    assert result["overall"]["identical"] == 0
    assert result["differences"] == [{"prompt": number, "position": 2} for number in range(5)]
    assert list(result["tasks"]) == ["a", "b"] and [result["tasks"][task]["prompts"] for task in "ab"] == [3, 2]


def test_batches_are_of_one_task_and_padding_does_not_count(pair, scripted):
    result = acceptance.evaluate(*pair, PROMPTS, CONFIG, batch_size=2)
    assert [rows for name, _, rows in scripted if name == "head"] == [[0, 3], [4, 1], [2, 2]]
    assert result["overall"]["prompts"] == 5 and result["overall"]["tokens"] == 15
    assert result["tasks"]["a"]["tokens_per_second"] == 9.0  # three prompts in two calls of 0.5 s
    assert result["drafter_bytes"]["state"] == 2
    assert result["drafter_bytes"]["parameters"] == generate_lib.make_runtime(*pair).drafter_bytes()["parameters"]


def test_nothing_is_decoded_when_a_prompt_or_setting_is_wrong(pair, scripted):
    with pytest.raises(generate_lib.PromptError, match="prompt 1 has 250 tokens"):
        acceptance.evaluate(*pair, [PROMPTS[0], Prompt("a", "x" * 250)], CONFIG)
    with pytest.raises(ConfigError, match="num_draft=0: must be at least 1"):
        acceptance.evaluate(*pair, PROMPTS, dataclasses.replace(CONFIG, num_draft=0))
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        acceptance.evaluate(*pair, PROMPTS, CONFIG, batch_size=0)
    assert scripted == []


def test_a_stopped_run_goes_on_from_its_journal(pair, scripted, tmp_path):
    journal = tmp_path / "out.json.partial.jsonl"
    whole = acceptance.evaluate(*pair, PROMPTS, CONFIG)
    scripted.clear()

    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        acceptance.evaluate(*pair, PROMPTS, CONFIG, journal=journal, progress=stop)
    with open(journal, "a") as file:
        file.write('{"task": "a", "indi')  # as a crash leaves it
    assert len(scripted) == 6
    assert acceptance.evaluate(*pair, PROMPTS, CONFIG, journal=journal) == whole
    assert [numbers for _, _, numbers in scripted[6:]] == [[1], [1], [2], [2]]
    with pytest.raises(journal_lib.JournalError, match=r"is of a run with num_draft=\d+, this one has 1"):
        acceptance.evaluate(*pair, PROMPTS, dataclasses.replace(CONFIG, num_draft=1), journal=journal)
    with pytest.raises(journal_lib.JournalError, match="prompts="):
        acceptance.evaluate(*pair, PROMPTS[:4], CONFIG, journal=journal)


def test_settings_say_how_tokens_were_chosen(pair, scripted):
    chosen = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, accept="rejection", seed=4)
    settings = acceptance.evaluate(*pair, PROMPTS, dataclasses.replace(CONFIG, **chosen))["settings"]
    assert {name: settings[name] for name in chosen} == chosen


def test_without_a_head(pair, scripted):
    result = acceptance.evaluate(pair[0], None, PROMPTS, CONFIG)
    assert [name for name, _, _ in scripted] == ["vanilla"] * 5
    overall = result["overall"]
    assert (overall["tokens_per_step"], overall["accept_unconditional"], overall["identical"], overall["speedup"]) == (1.0, [], 5, 1.0)
    assert result["drafter_bytes"] == {"parameters": 0, "state": 0} and "differences" not in result
    assert (result["settings"]["head"], result["settings"]["num_draft"]) == (None, 0)


@pytest.fixture(scope="module")
def decoded(pair):
    """The real decoder, on prompts of like length so that all share one shape."""
    backbone, head = pair
    prompts = [Prompt("a" if i % 2 else "b", "".join(chr(97 + token % 26) for token in ids)) for i, ids in enumerate(fakes.prompts(*range(5, 29)))]
    return prompts, acceptance.evaluate(backbone, head, prompts, dataclasses.replace(CONFIG, max_new_tokens=60), batch_size=12)


def test_random_head_changes_nothing(decoded):
    prompts, result = decoded
    assert result["overall"]["identical"] == result["overall"]["prompts"] == len(prompts)
    assert result["overall"]["steps"] == sum(result["tasks"][task]["steps"] for task in "ab")
    assert 1.0 < result["overall"]["tokens_per_step"] < 3.0  # some drafts are kept, or the next test compares nothing


def test_decoded_acceptance_is_the_one_that_training_prints(pair, decoded):
    """Walk the backbone's own answers, teacher-forced: the same steps and kept drafts as the decoder's, within 3 %."""
    backbone, head = pair
    prompts, result = decoded
    ids = [backbone.tokenizer.encode(prompt.text) for prompt in prompts]
    config = dataclasses.replace(CONFIG, max_new_tokens=60)
    answers = generate_lib.run(generate_lib.make_runtime(backbone), ids[:12], config).outputs
    answers += generate_lib.run(generate_lib.make_runtime(backbone), ids[12:], config).outputs
    examples = [
        data.Example("a", np.array(prompt + output.tokens, np.int32), np.arange(len(prompt) + len(output.tokens)) >= len(prompt))
        for prompt, output in zip(ids, answers, strict=True)
    ]
    module, frozen = head_lib.Head(head.config, backbone.config), fit.make_frozen(backbone, head.draft_ids)
    walked = walk.measure(module, head.params, frozen, backbone, examples, TrainConfig(num_draft=2, max_length=128, batch_size=12))
    assert walked.steps == pytest.approx(result["overall"]["steps"], rel=0.03)
    assert walked.tokens == result["overall"]["tokens"] - len(prompts)
    np.testing.assert_allclose(walked.unconditional, result["overall"]["accept_unconditional"], rtol=0.03, atol=1e-4)
    assert walked.accepted[0] >= 20
