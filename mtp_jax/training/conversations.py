"""Token ids of conversations: the question that the backbone is to answer, or the file's own answers with exact masks.

Which tokens are answers is known from token ids alone, never searched for in text. For every assistant's turn the
conversation is rendered twice, up to where the answer begins and with it:

    question  <|im_start|> user .. <|im_end|> \\n <|im_start|> assistant \\n
    with it   <|im_start|> user .. <|im_end|> \\n <|im_start|> assistant \\n  Fine ! <|im_end|> \\n
    answer                                                                    1    1 1          0

The first must be a prefix of the second, and what is left is the answer, up to the token that stops it: a decoder that is
asked the question writes exactly this. Templates that render earlier turns otherwise once others follow (leaving out what a
model thought, say) break the rule, and so may tokens that run across the border; such conversations are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_jax.prompts import Message

if TYPE_CHECKING:
    from mtp_jax.checkpoints.tokenizer import Tokenizer


class ConversationError(ValueError):
    """A conversation can't become a training sequence."""


def encode_question(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids up to where the answer to the last message begins.

    Raises:
      ConversationError: several messages, or a system's, for a tokenizer without a chat template.
      CheckpointError: the chat template refuses the messages.
    """
    return _encode(tokenizer, messages, answer_next=True)


def encode_answers(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a whole conversation up to the end of its last answer, and a mask: 1 at the tokens of all answers.

    Without a chat template, prompt and answer are one text, and nothing stops the answer.

    Raises:
      ConversationError: naming the turn: what precedes it is no prefix of what includes it, or it has no tokens; or there is no answer at all.
      CheckpointError: the chat template refuses the messages.
    """
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise ConversationError("has no assistant's turn to take as the answer")
    spans, tokens = [], []
    for turn in turns:
        question = encode_question(tokenizer, messages[:turn])
        rendered = _encode(tokenizer, messages[: turn + 1], answer_next=False)
        begin = len(question)
        if not question:
            raise ConversationError(f"message {turn + 1}: has no tokens before it")
        if rendered[:begin] != question:
            raise ConversationError(f"message {turn + 1}: the tokens before this answer change when it follows them, so its own can't be told apart")
        stops = [place for place in range(begin, len(rendered)) if rendered[place] in tokenizer.stop_tokens]
        end = stops[0] + 1 if stops else len(rendered)
        if end == begin:
            raise ConversationError(f"message {turn + 1}: the answer has no tokens")
        spans.append((turn, begin, end, rendered[:end]))
        tokens = rendered[:end]
    for turn, _, end, rendered in spans:
        if tokens[:end] != rendered:
            raise ConversationError(f"message {turn + 1}: the tokens of this answer change when later turns follow")
    mask = [0] * len(tokens)
    for _, begin, end, _ in spans:
        mask[begin:end] = [1] * (end - begin)
    return tokens, mask


def _encode(tokenizer: Tokenizer, messages: Sequence[Message], *, answer_next: bool) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat([message._asdict() for message in messages], answer_next=answer_next)
    if [message.role for message in messages] not in (["user"], ["user", "assistant"]):
        raise ConversationError("has more than one question and answer, and the tokenizer has no chat template to write them with")
    return tokenizer.encode("".join(message.content for message in messages))
