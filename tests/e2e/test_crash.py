"""kill -9 in a real run, in the small form: `crash_full.py` has every point, at `make crash-test`."""

from __future__ import annotations

import jax
from crash import BEFORE_A_CHECKPOINT, Crashes


def test_killed_twice_on_one_host(tmp_path):
    """As it writes a grade, before there is a checkpoint; and as it saves the first one."""
    crashes = Crashes.make(tmp_path, str(jax.config.jax_compilation_cache_dir))
    assert crashes.start("whole", "none") == 0, crashes.errors("whole")
    crashes.survives("few", "torn:Graded@1", BEFORE_A_CHECKPOINT["saving"])
