"""Groups and their advantages -> training sequences, in Tinker's alignment.

One alignment everywhere: position i of `tokens` predicts `target_tokens[i]`. Of a full sequence of n tokens, `tokens`
is the first n-1 and `target_tokens` the last n-1, so the first completion token is predicted at position len(prompt)-1:

    prompt 11 12 13, completion 21 22     tokens         11  12  13  21
                                          target_tokens  12  13  21  22
                                          weights         0   0   1   1
                                          logprobs        0   0  l21 l22
                                          advantages      0   0   A   A
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from locojax.errors import DataError
from locojax.rl.advantages import AdvantageResult
from locojax.types import Datum, Group


@dataclasses.dataclass(frozen=True)
class DatumStats:
    """What became of a batch's samples; counts, so that they add up over groups and hosts (`sum_stats`).

    `num_completion_tokens` is raw: masked and untrained ones count in it, so that logged lengths are those sampled.
    `num_trained_tokens` is the number of positions with weight 1: the denominator of a token mean.
    """

    num_groups: int = 0
    num_zero_variance_groups: int = 0
    num_unscorable_groups: int = 0
    num_samples: int = 0
    num_unscorable: int = 0
    num_truncated: int = 0
    num_masked_truncated: int = 0
    num_trained: int = 0
    num_completion_tokens: int = 0
    num_trained_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class GroupDatums:
    """Training sequences of one group. `sample_indices[i]` is which rollout of the group `datums[i]` was made from."""

    datums: tuple[Datum, ...]
    sample_indices: tuple[int, ...]
    stats: DatumStats


def sequence_datum(
    tokens: Sequence[int], is_sampled: Sequence[bool], logprobs: Sequence[float], advantage: float
) -> Datum:
    """One full sequence as a Datum.

    Args:
      tokens: the n tokens, prompt first. n >= 2: a single token predicts nothing.
      is_sampled: n flags; those of tokens the policy sampled are trained on.
      logprobs: the sampler's, one per sampled token, in order.
      advantage: of every sampled token.

    Raises DataError when the lengths contradict each other, or the very first token is a sampled one.
    """
    flags = np.asarray(is_sampled, dtype=bool)
    num_sampled = int(flags.sum())
    if len(tokens) < 2 or len(flags) != len(tokens) or len(logprobs) != num_sampled:
        raise DataError(
            "A sequence's parts don't fit together",
            got=f"{len(tokens)} tokens, {len(flags)} flags, {num_sampled} sampled tokens, {len(logprobs)} log-probs",
            expected="at least 2 tokens, a flag for each, and a log-prob for each sampled one",
        )
    if flags[0]:
        raise DataError("Nothing predicts a sequence's first token, so it can't be a sampled one", got=tokens[0])
    sampled = flags[1:]
    sampler_logprobs = np.zeros(len(tokens) - 1, np.float32)
    sampler_logprobs[sampled] = logprobs
    full = np.asarray(tokens, dtype=np.int32)
    return Datum(
        full[:-1],
        {
            "target_tokens": full[1:],
            "weights": sampled.astype(np.float32),
            "logprobs": sampler_logprobs,
            "advantages": np.where(sampled, np.float32(advantage), np.float32(0)),
        },
    )


def group_datums(
    group: Group, result: AdvantageResult, *, mask_truncated: bool = False, keep_zero_variance: bool = False
) -> GroupDatums:
    """Training sequences of the samples of one group that can teach something.

    Left out, and so neither in a loss's sum nor in its denominator: unscorable samples, empty and aborted ones,
    truncated ones with `mask_truncated` (they keep their part in the group's baseline), and a zero-variance group
    unless `keep_zero_variance` (for a KL or entropy term, which it still feels).

    Raises DataError for a prompt without tokens, or a result that is not of this group.
    """
    if len(result.values) != len(group.rollouts):
        raise DataError(
            f"The advantages are not of the group of {group.prompt.prompt_id}",
            got=f"{len(result.values)} advantages for {len(group.rollouts)} samples",
        )
    if not group.prompt.tokens:
        raise DataError(f"The prompt {group.prompt.prompt_id} has no tokens", remedy="Encode prompts before sampling")
    prompt = group.prompt.tokens
    use_group = result.has_signal or (keep_zero_variance and bool(result.scorable.any()))
    datums, sample_indices, num_truncated, num_masked = [], [], 0, 0
    for index, rollout in enumerate(group.rollouts):
        completion = rollout.completion
        truncated = completion.stop_reason == "length"
        masked = truncated and mask_truncated
        num_truncated += truncated
        num_masked += masked
        usable = bool(result.scorable[index]) and completion.stop_reason != "abort" and len(completion.tokens) > 0
        if use_group and usable and not masked:
            is_sampled = [False] * len(prompt) + [True] * len(completion.tokens)
            logprobs = np.asarray(completion.logprobs, np.float32).tolist()
            advantage = float(result.values[index])
            datums.append(sequence_datum(prompt + completion.tokens, is_sampled, logprobs, advantage))
            sample_indices.append(index)
    stats = DatumStats(
        num_groups=1,
        num_zero_variance_groups=int(result.zero_variance),
        num_unscorable_groups=int(not result.scorable.any()),
        num_samples=len(group.rollouts),
        num_unscorable=result.num_unscorable,
        num_truncated=num_truncated,
        num_masked_truncated=num_masked,
        num_trained=len(datums),
        num_completion_tokens=sum(len(rollout.completion.tokens) for rollout in group.rollouts),
        num_trained_tokens=sum(int(datum.inputs["weights"].sum()) for datum in datums),
    )
    return GroupDatums(tuple(datums), tuple(sample_indices), stats)


def sum_stats(stats: Iterable[DatumStats]) -> DatumStats:
    """The counts of several groups together; of none, all zero."""
    rows = [dataclasses.astuple(each) for each in stats]
    return DatumStats(*(sum(column) for column in zip(*rows, strict=True)))
