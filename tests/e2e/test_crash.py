"""kill -9 in a real run, in the small form: `crash_full.py` has every point, at `make crash-test`."""

from __future__ import annotations

import signal

import jax
from crash import BEFORE_A_CHECKPOINT, Crashes

from locojax.hosts.journal import read
from locojax.hosts.journal_files import open_folder
from locojax.hosts.journal_records import Admitted, Decoded


def test_killed_twice_on_one_host(tmp_path):
    """As it writes a grade, before there is a checkpoint; and as it saves the first one. And while it decodes."""
    crashes = Crashes.make(tmp_path, str(jax.config.jax_compilation_cache_dir))
    assert crashes.start("whole", "none") == 0, crashes.errors("whole")
    crashes.survives("few", "torn:Graded@1", BEFORE_A_CHECKPOINT["saving"])
    # Two tokens a call, and killed after the second: the run goes on with what each of the step's samples had by then.
    two = ("rollout.decode_iterations=2",)
    assert crashes.start("decoding", "after:Decoded@1#2", settings=two) == -signal.SIGKILL, crashes.errors("decoding")
    records, torn = read(open_folder(str(tmp_path / "decoding/journal")), "rollouts/step_000001.host0.log")
    admitted, first, second = records
    assert isinstance(admitted, Admitted) and isinstance(first, Decoded) and isinstance(second, Decoded) and not torn
    crashes.survives("decoding", settings=two)
    assert crashes.num_begun("decoding") == sum(len(piece.tokens) for piece in (*first.pieces, *second.pieces)) > 0
