"""Stop strings inside the compiled loop: one automaton a string over the bytes of the text.

A string may begin in the middle of one token and end in the middle of a later one, of another draft, of another step. So
the automaton (Knuth, Morris and Pratt 1977) runs over bytes, and its moves are tabulated for whole tokens: state after
token = next[state, token]. State i means that the last i bytes of the text are the first i of the string; the last state
means found, and stays.

Worked string "ab", tokens "xa" and "bc": state 0 -> "xa" -> 1 -> "bc" -> 2, found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

if TYPE_CHECKING:
    from mtp_jax.checkpoints.tokenizer import Tokenizer


STATE_BUCKET = 16  # tables hold a multiple of so many states: strings of like length share their compiled programs


class StopTable(struct.PyTreeNode):
    """Moves of N automata; those of fewer states are padded."""

    next: UInt[Array, "N L V"]  # state after a token, from each state
    start: Int[Array, " N"]  # the state before the first token
    found: Int[Array, " N"]  # the state that means found

    @property
    def num_strings(self) -> int:
        return self.next.shape[0]


@functools.lru_cache(maxsize=8)
def table_for(tokenizer: Tokenizer, vocab_size: int, strings: tuple[str, ...]) -> StopTable:
    """`make_table` for a tokenizer; the newest are kept."""
    return make_table(tokenizer.token_bytes(vocab_size), strings, drops_first_space=tokenizer.drops_first_space)


def make_table(token_bytes: Sequence[bytes], strings: Sequence[str], *, drops_first_space: bool = False) -> StopTable:
    """Tabulate.

    Args:
      token_bytes: what each token adds to the text; empty for tokens that add nothing (control tokens).
      strings: at least one, none of them empty.
      drops_first_space: a space at the very beginning is no part of the text.
    """
    wanted = [string.encode() for string in strings]
    states = -(-(max(map(len, wanted)) + 2) // STATE_BUCKET) * STATE_BUCKET
    tables = np.zeros((len(wanted), states, len(token_bytes)), np.uint8 if states <= 256 else np.uint16 if states <= 2**16 else np.uint32)
    tables[:] = np.arange(states)[:, None]
    columns = list(_columns(token_bytes))
    for table, string in zip(tables, wanted, strict=True):
        moves = byte_moves(string).astype(table.dtype)
        for tokens, byte in columns:
            table[: len(moves), tokens] = moves[table[: len(moves), tokens], byte]
    start = [len(string) + 1 if drops_first_space else 0 for string in wanted]
    return StopTable(next=jnp.asarray(tables), start=jnp.asarray(start, jnp.int32), found=jnp.asarray([len(string) for string in wanted], jnp.int32))


def _columns(token_bytes: Sequence[bytes]) -> Iterator[tuple[Int[np.ndarray, " n"], UInt[np.ndarray, " n"]]]:
    """For j = 0, 1, ..: the tokens of more than j bytes, and byte j of each."""
    lengths = np.array([len(piece) for piece in token_bytes])
    begins = np.cumsum(lengths) - lengths
    joined = np.frombuffer(b"".join(token_bytes), np.uint8)
    for place in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > place)
        yield tokens, joined[begins[tokens] + place]


def byte_moves(string: bytes) -> Int[np.ndarray, "L 256"]:
    """State after one byte, from each of the len(string) + 1 states, of which the last stays, and from one more: the
    beginning of a text whose first space does not count."""
    length = len(string)
    moves = np.zeros((length + 2, 256), np.int32)
    moves[0, string[0]] = 1
    fallback = 0  # state of string[1:state]: where a mismatch goes on from
    for state in range(1, length):
        moves[state] = moves[fallback]
        moves[state, string[state]] = state + 1
        fallback = moves[fallback, string[state]]
    moves[length] = length
    moves[length + 1] = moves[0]
    moves[length + 1, ord(" ")] = 0
    return moves


def advance(table: StopTable, matched: Int[Array, "B N"], tokens: Int[Array, "B T"]) -> tuple[Int[Array, "B T N"], Bool[Array, "B T"]]:
    """States after each of T tokens, and whether any string has been found by then."""

    def one(states: Array, token: Array) -> tuple[Array, Array]:
        after = table.next[jnp.arange(table.num_strings), states, token[:, None]].astype(jnp.int32)  # [B, N]
        return after, after

    _, after = lax.scan(one, matched, tokens.T)
    after = after.swapaxes(0, 1)
    return after, (after == table.found).any(axis=-1)
