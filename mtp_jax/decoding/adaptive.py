"""How many tokens to draft: a cost model for the whole run, from measured times and acceptance.

A step with M drafts costs draft(M) + verify(M + 1 rows) and commits 1 + a_1 + ... + a_M tokens on average, where a_k is the
share of steps in which drafts 1..k are all kept. M = 0 is vanilla decoding. (Within a run, `DecodeConfig.min_confidence` ends
single drafts early.) Leviathan et al. 2023 state the trade-off for equal acceptance at every position; measured a_k need no
such assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtp_jax import config as config_lib


def tokens_per_step(acceptance: Sequence[float], num_draft: int) -> float:
    """Mean tokens committed by a step with `num_draft` drafts.

    Args:
      acceptance: unconditional share of steps in which draft k was kept, k = 1, 2, ..; at least num_draft of them.
    """
    return 1.0 + sum(acceptance[:num_draft])


def speedups(verify_seconds: Mapping[int, float], draft_seconds: Mapping[int, float], acceptance: Sequence[float]) -> dict[int, float]:
    """Predicted speed against vanilla decoding for every M that the measurements cover.

    Args:
      verify_seconds: of a backbone pass, by rows; 1 must be among them.
      draft_seconds: of drafting M tokens, by M >= 1.
      acceptance: see `tokens_per_step`.

    Returns:
      M -> tokens per second relative to one-token decoding; 0 -> 1.0.

    Raises:
      ConfigError: no time for a pass of one row.
    """
    if 1 not in verify_seconds:
        raise config_lib.ConfigError(f"verify_seconds has {sorted(verify_seconds)} rows: must have 1, the one-token step")
    found = {0: 1.0}
    for num_draft in sorted(draft_seconds):
        if num_draft <= len(acceptance) and num_draft + 1 in verify_seconds:
            step = draft_seconds[num_draft] + verify_seconds[num_draft + 1]
            found[num_draft] = tokens_per_step(acceptance, num_draft) * verify_seconds[1] / step
    return found


def best_num_draft(verify_seconds: Mapping[int, float], draft_seconds: Mapping[int, float], acceptance: Sequence[float]) -> int:
    """The M with the highest predicted speed, the smallest of equals; 0 where drafting would not pay. Arguments as in `speedups`."""
    predicted = speedups(verify_seconds, draft_seconds, acceptance)
    return max(predicted, key=lambda num_draft: (predicted[num_draft], -num_draft))
