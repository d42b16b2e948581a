"""Conversations: three forms of a line, exact masks of every answer from token ids, and counts that add up."""

import dataclasses
import json

import fakes
import pytest
import tiny_files

from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints.tokenizer import Tokenizer
from mtp_jax.config import ConfigError, DecodeConfig
from mtp_jax.decoding import generate
from mtp_jax.prompts import Conversation, Message, Prompt, PromptFileError
from mtp_jax.training import conversations, data, rollout

START, END = 1, 2  # <|im_start|> and <|im_end|>
TURNS = (Message("user", "hello 1"), Message("assistant", "hi!"), Message("user", "12"), Message("assistant", "hello hello"))
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% else %}...{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGING = "{% for message in messages %}{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}assistant>he{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_hf(tiny_files.write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def with_template(folder, template):
    return Tokenizer.from_hf(tiny_files.write_hf_tokenizer(folder, chat_template=template))


@pytest.fixture(scope="module")
def chatting(tokenizer):
    """A random backbone that answers in chat."""
    backbone = fakes.backbone(dataclasses.replace(fakes.BACKBONE, vocab_size=tiny_files.CONFIG.vocab_size))
    return dataclasses.replace(backbone, tokenizer=tokenizer)


def write(path, *records):
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def lines(path):
    return {record["prompt_index"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_three_forms_of_a_line(tmp_path):
    path = write(
        tmp_path / "mail.jsonl",
        {"prompt": "hello"},
        {"prompt": "hello", "answer": "hi", "task": "x", "reference": "unused"},
        {"messages": [{"role": "system", "content": "be brief"}, *(message._asdict() for message in TURNS)], "task": "y"},
    )
    found = prompts_lib.read_conversations([path])
    assert found == [
        Conversation("mail", (Message("user", "hello"),), f"{path}:1"),
        Conversation("x", (Message("user", "hello"), Message("assistant", "hi")), f"{path}:2"),
        Conversation("y", (Message("system", "be brief"), *TURNS), f"{path}:3"),
    ]
    assert [conversation.question for conversation in found] == [found[0].messages, found[0].messages, found[2].messages[:4]]
    assert prompts_lib.read_conversations([path], limit=1) == found[:1]
    assert prompts_lib.digest_conversations(found[:1]) == prompts_lib.digest([Prompt("mail", "hello")])
    changed = dataclasses.replace(found[2], messages=found[2].messages[:-1])
    others = [found[0]], [found[1]], [found[2]], [changed], [dataclasses.replace(found[2], task="z")]
    assert len({prompts_lib.digest_conversations(items) for items in others}) == 5


@pytest.mark.parametrize(
    "record, message",
    [
        ("{", "not JSON"),
        ([1], "needs an object with a text 'prompt', or with 'messages'"),
        ({"prompt": 1}, "needs an object with a text 'prompt'"),
        ({"prompt": " "}, "'prompt' is empty"),
        ({"prompt": "a", "answer": None}, "'answer' must be text"),
        ({"prompt": "a", "answer": "\n"}, "'answer' is empty"),
        ({"prompt": "a", "messages": []}, "must have only one of the forms"),
        ({"messages": {}}, "'messages' must be a list"),
        ({"messages": []}, "'messages' must hold a user's message"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "message 2: needs an object with text 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "message 2: needs an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1: role 'tool' must be one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 1: 'content' is empty"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "message 1: 'content' isn't Unicode text"),
    ],
)
def test_bad_lines_are_named(tmp_path, record, message):
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(PromptFileError, match=f"bad.jsonl:2: .*{message}"):
        prompts_lib.read_conversations([path])


def test_the_mask_covers_every_answer_and_its_stop_token(tokenizer):
    """By hand: two answers, each up to <|im_end|>; neither the newline behind it nor the next turn's frame belong to it."""
    tokens, mask = conversations.encode_answers(tokenizer, TURNS)
    begin = tokenizer.encode("<|im_start|>system\nbe hello<|im_end|>\n<|im_start|>user\nhello 1<|im_end|>\n<|im_start|>assistant\n")
    between = tokenizer.encode("\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n")
    first, second = [*tokenizer.encode("hi!"), END], [*tokenizer.encode("hello hello"), END]
    assert tokens == [*begin, *first, *between, *second]
    assert mask == [0] * len(begin) + [1] * len(first) + [0] * len(between) + [1] * len(second)


def test_a_final_question_is_left_out_of_given_answers(tokenizer):
    whole, asked = conversations.encode_answers(tokenizer, TURNS[:2]), conversations.encode_answers(tokenizer, TURNS[:3])
    assert whole == asked and whole[0][-1] == END


def test_an_answer_that_says_what_the_question_says_is_told_apart(tokenizer):
    """The same words on both sides: a search in text would find the wrong ones."""
    tokens, mask = conversations.encode_answers(tokenizer, (Message("user", "hello"), Message("assistant", "hello")))
    marked = [token for token, answer in zip(tokens, mask, strict=True) if answer]
    assert marked == [*tokenizer.encode("hello"), END] and mask.index(1) == len(tokens) - len(marked)


def test_the_question_and_the_given_answer_begin_alike(tokenizer):
    tokens, mask = conversations.encode_answers(tokenizer, TURNS)
    question = conversations.encode_question(tokenizer, Conversation("t", TURNS).question)
    last = max(place for place, answer in enumerate(mask) if not answer) + 1
    assert question == tokens[:last]


def test_templates_that_render_history_otherwise_are_refused(tmp_path):
    tokenizer = with_template(tmp_path, FORGETFUL)
    tokens, mask = conversations.encode_answers(tokenizer, TURNS[:2])
    assert sum(mask) == len(tokenizer.encode("hi!")) + 1
    with pytest.raises(conversations.ConversationError, match="message 2: the tokens of this answer change when later turns follow"):
        conversations.encode_answers(tokenizer, TURNS)


def test_tokens_across_the_border_are_refused(tmp_path):
    """The question ends in "he", a token of its own; with the answer behind it, "hello" is one token."""
    with pytest.raises(conversations.ConversationError, match="message 2: the tokens before this answer change when it follows them"):
        conversations.encode_answers(with_template(tmp_path, MERGING), (Message("user", "1"), Message("assistant", "hello")))


def test_a_template_without_stop_tokens(tmp_path):
    """The answer is all that its turn adds, and nothing of a next one."""
    template = "{% for message in messages %}{{ message['role'] }}>{{ message['content'] }}|{% endfor %}{% if add_generation_prompt %}assistant>{% endif %}"
    tokenizer = with_template(tmp_path, template)
    tokens, mask = conversations.encode_answers(tokenizer, TURNS)
    assert tokens == tokenizer.encode("user>hello 1|assistant>hi!|user>12|assistant>hello hello|")
    assert [token for token, answer in zip(tokens, mask, strict=True) if answer] == tokenizer.encode("hi!|") + tokenizer.encode("hello hello|")


def test_without_a_template(tmp_path):
    tokenizer = with_template(tmp_path, None)
    tokens, mask = conversations.encode_answers(tokenizer, (Message("user", "12 "), Message("assistant", "ab")))
    assert tokens == tokenizer.encode("12 ab") and mask == [0, 0, 0, 1, 1]
    assert conversations.encode_question(tokenizer, TURNS[:1]) == tokenizer.encode("hello 1")
    for messages in (TURNS[:3], (Message("system", "a"), Message("user", "b"))):
        with pytest.raises(conversations.ConversationError, match="no chat template"):
            conversations.encode_question(tokenizer, messages)


def test_given_answers_become_the_lines_that_training_reads(chatting, tmp_path):
    items = [
        Conversation("a", TURNS[:2]),
        Conversation("b", TURNS),
        Conversation("c", TURNS[:1], "talk.jsonl:3"),  # no answer
        Conversation("d", (Message("user", "1" * 30), TURNS[1])),  # a long question
        Conversation("e", (TURNS[0], Message("assistant", "2" * 300)), "talk.jsonl:5"),  # more than the backbone's 256 positions
    ]
    limit = len(conversations.encode_question(chatting.tokenizer, TURNS[:3]))
    report = rollout.rollout(chatting, items, tmp_path / "out.jsonl", DecodeConfig(), answers="given", max_prompt_tokens=limit)
    assert (report.input, report.done, report.failed, report.skipped) == (5, 2, 2, 1)
    assert report.failures[0] == "talk.jsonl:3: has no assistant's turn to take as the answer"
    assert report.failures[1].startswith("talk.jsonl:5: prompt 0 has ")
    found = lines(tmp_path / "out.jsonl")
    assert sorted(found) == [0, 1] and {record["finish_reason"] for record in found.values()} == {"given"}
    for index, record in found.items():
        assert (record["tokens"], record["answer_mask"]) == conversations.encode_answers(chatting.tokenizer, items[index].messages)
    assert report.tokens == sum(sum(record["answer_mask"]) for record in found.values())
    examples = data.read_rollouts([tmp_path / "out.jsonl"], vocab_size=chatting.config.vocab_size)
    assert [example.answer.astype(int).tolist() for example in examples] == [found[0]["answer_mask"], found[1]["answer_mask"]]
    with pytest.raises(ConfigError, match="answers='both': must be one of backbone, given"):
        rollout.rollout(chatting, items, tmp_path / "both.jsonl", DecodeConfig(), answers="both")  # type: ignore[arg-type]


def test_the_backbone_answers_the_last_question_anew(chatting, tmp_path):
    """What the file answers there makes no difference; what it answered before does."""
    config = DecodeConfig(max_new_tokens=6)
    items = [Conversation("a", TURNS), Conversation("a", TURNS[:3]), Conversation("a", (TURNS[0], Message("assistant", "no"), *TURNS[2:]))]
    report = rollout.rollout(chatting, items, tmp_path / "out.jsonl", config, batch_size=2)
    assert (report.done, report.failed, report.skipped) == (3, 0, 0)
    found = lines(tmp_path / "out.jsonl")
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["tokens"] != found[2]["tokens"]
    question = conversations.encode_question(chatting.tokenizer, TURNS[:3])
    runtime = generate.make_runtime(chatting, column_blocks=False)
    (output,) = generate.run(runtime, [question], dataclasses.replace(config, stop_tokens=chatting.tokenizer.stop_tokens)).outputs
    assert found[0]["tokens"] == question + output.tokens and found[0]["answer_mask"] == [0] * len(question) + [1] * len(output.tokens)
