"""Seeds that depend on what is sampled, never on where or when: any host, slot or order gives the same tokens."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, step: int, prompt_id: str) -> int:
    """The seed of one prompt's group in one step: an integer in [0, 2**63).

    The first 8 bytes of BLAKE2b over the three fields, top bit cleared; sample i of the group then draws from
    (seed, i). Python's own `hash` would not do: it is salted per process, so two hosts would disagree.
    """
    fields = f"{run_seed}\0{step}\0{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "big") & (2**63 - 1)
