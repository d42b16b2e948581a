"""What verify-exact finds: nothing between decoding with a drafter and without, and every fault that is planted."""

import dataclasses
import json

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints import load
from mtp_jax.config import ConfigError, DecodeConfig, head_config_for
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import exactness
from mtp_jax.evaluation import journal as journal_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.prompts import Prompt

ROWS = fakes.prompts(3, 9, 20)  # 12 tokens a verify pass, few enough for column blocks
CONFIG = DecodeConfig(max_new_tokens=40, num_draft=3, stop_tokens=(16,), keep_logits=True)
PROMPTS = [Prompt("a", "hello"), Prompt("b", "goodbye"), Prompt("a", "a" * 90), Prompt("a", "letters"), Prompt("b", "z")]


TWO_LAYERS = dataclasses.replace(fakes.BACKBONE, num_layers=2, layer_types=("full", "sliding"))  # most of the time here is compilation


@pytest.fixture(scope="module")
def backbone():
    return fakes.backbone(TWO_LAYERS)


@pytest.fixture(scope="module")
def head(backbone):
    return fakes.head(backbone, head_config_for(TWO_LAYERS, width=16, mlp_width=24, draft_vocab_size=24))


def compare(ways, config=CONFIG, rows=ROWS):
    return exactness.compare(ways, rows, config, row_numbers=range(len(rows)))


def scripted_ways(alone, config=CONFIG):
    """Ways whose drafter knows what `alone` writes: of three drafts a step, it spoils the last."""
    script = np.zeros((len(ROWS), 256), np.int32)
    for row, output in enumerate(generate_lib.run(alone, ROWS, config).outputs):
        script[row, : len(ROWS[row]) + len(output.tokens)] = ROWS[row] + output.tokens
    return exactness.ways_of(dataclasses.replace(alone, drafter=fakes.Scripted(wrong_at=3), drafter_params=jnp.asarray(script)))


@pytest.fixture(scope="module", params=[True, False], ids=["column blocks", "plain"])
def layout(request, backbone):
    return scripted_ways(generate_lib.make_runtime(backbone, column_blocks=request.param))


@pytest.fixture(scope="module")
def ways(backbone):
    return scripted_ways(generate_lib.make_runtime(backbone, column_blocks=True))


def noise(params, seed, size):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + size * rng.normal(size=leaf.shape).astype(np.float32), params)


def spoiled(runtime, seed=3, size=0.02):
    """The same backbone but for noise in its passes after the prefill."""
    return dataclasses.replace(runtime, step_params=noise(runtime.step_params, seed, size), prefill_params=noise(runtime.prefill_params, seed, size))


def test_drafted_logits_are_those_of_fixed_width_in_every_bit(layout):
    records = compare(layout)
    assert sum(record.tokens for record in records) > 60
    for record in records:
        assert record.steps == -(-(record.tokens - 1) // 3)  # two drafts and a token more a step, or little was verified
        strict, loose = record.against["fixed_width"], record.against["one_token"]
        assert strict == exactness.Comparison(positions=record.tokens, other_bits=0, largest=0.0)
        assert (loose.positions, loose.parted_at, loose.gap) == (record.tokens, None, None)
        assert loose.largest < 1e-4


def test_samples_are_exact(backbone):
    config = dataclasses.replace(CONFIG, temperature=1.2, top_k=20)
    records = compare(scripted_ways(generate_lib.make_runtime(backbone), config), config)
    assert sum(record.tokens - record.steps for record in records) > 30
    for record in records:
        assert record.against["fixed_width"] == exactness.Comparison(positions=record.tokens, other_bits=0, largest=0.0)
        assert record.against["one_token"].parted_at is None


def test_bfloat16():
    backbone = fakes.backbone(dataclasses.replace(TWO_LAYERS, dtype="bfloat16"))
    records = compare(scripted_ways(generate_lib.make_runtime(backbone)))
    for record in records:
        assert record.against["fixed_width"] == exactness.Comparison(positions=record.tokens, other_bits=0, largest=0.0)
    assert sum(record.tokens - record.steps for record in records) > 30


def best_two(backbone, tokens):
    """The gap after `tokens`, and the best token, by a pass over the whole text without a cache."""
    output = backbone_lib.Backbone(backbone.config).apply({"params": backbone.params}, jnp.asarray([tokens]))
    order = np.argsort(logits := np.asarray(output.logits[0, -1]))
    return float(logits[order[-1]] - logits[order[-2]]), int(order[-1])


@pytest.mark.parametrize("keep_logits", [True, False], ids=["logits", "tokens only"])
def test_other_weights_are_caught_where_they_tell(backbone, ways, keep_logits):
    """The drafter's script stays that of the right weights, so that drafts are kept and rejected."""
    config = dataclasses.replace(CONFIG, keep_logits=keep_logits)
    wrong = spoiled(ways.drafted)
    reference = generate_lib.run(ways.one_token, ROWS, config).outputs
    other = generate_lib.run(wrong.without_drafter(), ROWS, config).outputs
    records = compare(dataclasses.replace(ways, drafted=wrong), config)
    parted = 0
    for row, record in enumerate(records):
        one, two = reference[row].tokens, other[row].tokens
        expected = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
        for found in record.against.values():
            assert found.parted_at == expected
            if expected is None:
                continue
            gap, best = best_two(backbone, ROWS[row] + one[:expected])
            assert (found.positions, found.tokens) == (expected + 1, [best, two[expected]]) and best == one[expected]
            assert found.gap == pytest.approx(gap, rel=1e-3, abs=1e-4)
            assert (found.first_other_bits, found.other_bits) == ((0, expected + 1) if keep_logits else (None, None))
            assert (found.largest or 0) > 0 or not keep_logits
            parted += 1
    assert parted >= 2 and len({record.against["fixed_width"].parted_at for record in records}) > 1


def test_a_last_bit_is_caught_where_no_token_changes(ways):
    """The verify pass rounds otherwise: its final norm's scale is the next float. Position 0, which the prefill chooses, is not touched."""
    scale = ways.drafted.step_params["final_norm"]["scale"]
    params = {**ways.drafted.step_params, "final_norm": {"scale": jnp.nextafter(scale, jnp.float32(9))}}
    rounded = dataclasses.replace(ways.drafted, step_params=params)
    for record in compare(dataclasses.replace(ways, drafted=rounded)):
        found = record.against["fixed_width"]
        assert (found.parted_at, found.first_other_bits) == (None, 1)
        assert 0 < found.other_bits < record.tokens and 0 < found.largest < 1e-4


def test_a_text_that_ends_early_is_caught(ways):
    """As a drafter would do it that commits too little. The text that goes on has a gap, the one that had ended has none."""
    tokens = list(range(1, 6))
    outputs = [
        generate_lib.Output(tokens=own, text="", prompt_tokens=3, steps=4, drafted=8, accepted=[0, 0], finish_reason="length") for own in (tokens, tokens[:3])
    ]
    assert exactness._compare_tokens(*outputs) == exactness.Comparison(positions=4, parted_at=3, tokens=[4, None])
    assert exactness._compare_tokens(*outputs[::-1]) == exactness.Comparison(positions=4, parted_at=3, tokens=[None, 4])
    ended = [exactness._compare_tokens(*outputs[::-1])] * len(ROWS)
    assert exactness._with_gaps(ended, ways.one_token, ROWS, CONFIG, range(3)) == ended


def _records():
    """By hand: prompt 1 parts from both references at position 2, after other bits from position 1 on."""
    same = exactness.Comparison(positions=7, other_bits=0, largest=0.0)
    near = exactness.Comparison(positions=7, other_bits=6, first_other_bits=1, largest=0.25)
    parted = exactness.Comparison(positions=3, parted_at=2, tokens=[8, 9], gap=0.5, other_bits=2, first_other_bits=1, largest=1.5)
    return [
        exactness.Record(1, 5, 2, [2, 0], {"fixed_width": parted, "one_token": parted}),
        exactness.Record(0, 7, 3, [2, 1], {"fixed_width": same, "one_token": near}),
    ]


def test_result_by_hand():
    result = exactness.result_of(_records())
    place = {"prompt": 1, "position": 2, "reference_token": 8, "drafted_token": 9, "gap": 0.5}
    assert result == {
        "exact": False,
        "prompts": 2,
        "tokens": 12,
        "steps": 5,
        "tokens_per_step": 2.0,
        "accept_unconditional": [0.8, 0.2],
        "accept_conditional": [0.8, 0.25],
        "against": {
            "fixed_width": {
                "identical": 1,
                "tokens_compared": 10,
                "tokens_identical": 9,
                "other_bits": 2,
                "largest_logit_difference": 1.5,
                "first_other_bits": [{"prompt": 1, "position": 1}],
                "largest_gap": 0.5,
                "differences": [place],
            },
            "one_token": {
                "identical": 1,
                "tokens_compared": 10,
                "tokens_identical": 9,
                "other_bits": 8,
                "largest_logit_difference": 1.5,
                "first_other_bits": [{"prompt": 0, "position": 1}, {"prompt": 1, "position": 1}],
                "largest_gap": 0.5,
                "differences": [place],
            },
        },
    }
    assert exactness.result_of(_records()[1:])["exact"]
    bits = dataclasses.replace(_records()[1], against={"fixed_width": _records()[1].against["one_token"]})
    assert not exactness.result_of([bits])["exact"]  # the tokens are the same, the logits not
    blind = exactness.Comparison(positions=7)
    unmeasured = exactness.result_of([exactness.Record(0, 7, 3, [2, 1], {"fixed_width": blind, "one_token": blind})])
    assert unmeasured["exact"]
    assert [unmeasured["against"]["one_token"][name] for name in ("other_bits", "largest_logit_difference", "first_other_bits", "largest_gap")] == [None] * 4


def test_lists_are_capped_and_counts_are_not():
    one = _records()[0]
    result = exactness.result_of([dataclasses.replace(one, prompt=i) for i in range(50)])["against"]["fixed_width"]
    assert (result["identical"], result["tokens_compared"], result["tokens_identical"], result["other_bits"]) == (0, 150, 100, 100)
    assert len(result["differences"]) == len(result["first_other_bits"]) == exactness.MAX_LISTED


@pytest.fixture
def scripted(monkeypatch):
    """Replace the comparison of a group: the prompts of each call are written down, and prompt 3 parts."""
    calls = []

    def compare(ways, rows, config, *, row_numbers):
        calls.append(list(row_numbers))
        by_prompt = {3: _records()[0]}
        return [dataclasses.replace(by_prompt.get(number, _records()[1]), prompt=number) for number in row_numbers]

    monkeypatch.setattr(exactness, "compare", compare)
    return calls


def test_batches_are_of_like_length_and_padding_does_not_count(backbone, head, scripted):
    seen = []
    result = exactness.verify_exact(backbone, head, PROMPTS, CONFIG, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert scripted == [[4, 0], [1, 3], [2, 2]] and seen == [(2, 5), (4, 5), (5, 5)]
    assert (result["prompts"], result["against"]["fixed_width"]["identical"]) == (5, 4)
    assert [place["prompt"] for place in result["against"]["fixed_width"]["differences"]] == [3]


def test_a_stopped_run_goes_on_from_its_journal(backbone, head, scripted, tmp_path):
    journal = tmp_path / "out.json.partial.jsonl"
    whole = exactness.verify_exact(backbone, head, PROMPTS, CONFIG, batch_size=2)
    scripted.clear()

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exactness.verify_exact(backbone, head, PROMPTS, CONFIG, batch_size=2, journal=journal, progress=stop)
    with open(journal, "a") as file:
        file.write('[{"prompt": 2, "tok')  # as a crash leaves it
    assert exactness.verify_exact(backbone, head, PROMPTS, CONFIG, batch_size=2, journal=journal) == whole
    assert scripted == [[4, 0], [1, 3], [2, 2]]
    assert [len(json.loads(line)) for line in journal.read_text().splitlines()[1:]] == [2, 2, 1]
    assert json.loads(json.dumps(whole)) == whole
    for name, changes in {"tokens_only=False": {"tokens_only": True}, "batch_size=2": {"batch_size": 3}}.items():
        with pytest.raises(journal_lib.JournalError, match=f"is of a run with {name}"):
            exactness.verify_exact(backbone, head, PROMPTS, CONFIG, **({"batch_size": 2, "journal": journal} | changes))
    with pytest.raises(journal_lib.JournalError, match="prompts="):
        exactness.verify_exact(backbone, head, PROMPTS[:4], CONFIG, batch_size=2, journal=journal)
    other = dataclasses.replace(head, params=jax.tree.map(lambda leaf: leaf * 2, head.params))
    with pytest.raises(journal_lib.JournalError, match="weights="):
        exactness.verify_exact(backbone, other, PROMPTS, CONFIG, batch_size=2, journal=journal)


def test_nothing_is_decoded_when_a_prompt_or_setting_is_wrong(backbone, head, scripted):
    with pytest.raises(generate_lib.PromptError, match="prompt 1 has 250 tokens"):
        exactness.verify_exact(backbone, head, [PROMPTS[0], Prompt("a", "x" * 250)], CONFIG)
    with pytest.raises(ConfigError, match="num_draft=0: must be at least 1"):
        exactness.verify_exact(backbone, head, PROMPTS, dataclasses.replace(CONFIG, num_draft=0))
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        exactness.verify_exact(backbone, head, PROMPTS, CONFIG, batch_size=0)
    with pytest.raises(ConfigError, match="accept='rejection': must be 'match' here"):
        exactness.verify_exact(backbone, head, PROMPTS, dataclasses.replace(CONFIG, temperature=1.0, accept="rejection"))
    with pytest.raises(ConfigError, match="drafter='mtp': needs a head"):
        exactness.verify_exact(backbone, None, PROMPTS, CONFIG)
    assert scripted == []


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 6])  # column blocks, and the plain layout with 15 and 30 tokens a pass
def test_real_weights_in_every_bit(batch_size):
    from mtp_jax import demo

    backbone = load.load_backbone("smollm2-135m-instruct")
    head = load.load_head("smollm2-135m-instruct-mtp", backbone)
    prompts = [Prompt(kind, text) for kind, text in demo.PROMPTS]
    result = exactness.verify_exact(backbone, head, prompts, DecodeConfig(max_new_tokens=64, num_draft=4), batch_size=batch_size)
    strict = result["against"]["fixed_width"]
    assert result["exact"] and (strict["other_bits"], strict["largest_logit_difference"], strict["identical"]) == (0, 0.0, 6)
    assert result["tokens"] > 200 and result["tokens_per_step"] > 1.5
