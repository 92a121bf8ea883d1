"""Which host takes which prompts: computed alike on every host, from the prompts alone."""

from __future__ import annotations

from collections.abc import Sequence


def shares(lengths: Sequence[int], num_hosts: int, *, balance: bool) -> list[list[int]]:
    """Indices of the prompts that each host takes, ascending; every prompt once, counts differing by at most one.

    Args:
      lengths: of the prompts, in tokens.
      balance: even out the hosts' prompt tokens: the longest first, each to the host with the fewest tokens that has
        room (Graham's LPT rule, 1969, with equal counts). Else consecutive prompts to one host.

    Example: shares([9, 1, 2, 8], 2, balance=True) is [[0, 1], [2, 3]].
    """
    room = [len(lengths) // num_hosts + (rank < len(lengths) % num_hosts) for rank in range(num_hosts)]
    taken: list[list[int]] = [[] for _ in room]
    if not balance:
        first = 0
        for rank, count in enumerate(room):
            taken[rank] = list(range(first, first + count))
            first += count
        return taken
    tokens = [0] * num_hosts
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min((r for r in range(num_hosts) if len(taken[r]) < room[r]), key=lambda r: (tokens[r], r))
        taken[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(indices) for indices in taken]
