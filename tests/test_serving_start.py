"""What an engine process holds once it has started."""

from __future__ import annotations

import numpy as np
import pytest
from serving_fakes import FakeLink
from tiny import write_tiny_model

from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_compilations import CompilationCounter
from locojax.hosts.serving_settings import ServeSettings
from locojax.hosts.serving_start import start


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16")])
def test_the_table_is_on_the_device_once_if_both_sides_want_it_alike(dtypes, tmp_path):
    settings = ServeSettings(
        str(write_tiny_model(tmp_path / "tiny")), max_adapters=1, max_rank=2, row_tokens=16, max_slots=2,
        max_resident_samplers=1, warm_up=False, cache_dir=str(tmp_path / "cache"), compute_dtype=dtypes[0],
        sample_dtype=dtypes[1],
    )  # fmt: skip
    loop = start(settings, FakeLink(), PhaseClock(), CompilationCounter(), lambda doing: None)
    ours = loop._trainer._fixed.base["embed"]
    theirs = loop._samplers._engine._policy.loaded.weights["embed"]
    shared = ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
    assert shared == (dtypes[0] == dtypes[1])
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs, np.float32), atol=0.01)
