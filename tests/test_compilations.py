"""A run on ragged lengths compiles nothing after its second step: each new program would be a pause, for ever."""

from __future__ import annotations

import dataclasses
import json

import jax
from tiny import write_tiny_model

from locojax.config import load
from locojax.hosts import colocated
from locojax.measure.timeline import Timeline

REWARD = """
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
"""
COMPILED = "/jax/core/compile/backend_compile_duration"


def test_no_compilation_after_the_second_step(tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"question": chr(65 + i) + "x" * (3 + 5 * i % 23), "answer": ""} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(
        None,
        [
            f"model.name={model}", f"data.source={tmp_path / 'data.jsonl'}", "data.template=Q: {question}",
            "data.chat=false",
            f"data.reward={tmp_path / 'rewards.py'}:score", "rollout.max_tokens=40", "rollout.group_size=4",
            "run.prompts_per_step=4", "run.num_steps=7", "run.eval_every=3", "run.eval_prompts=2",
            "run.checkpoint_at_end=false", f"run.dir={tmp_path}", f"run.cache_dir={tmp_path / 'cache'}",
        ],
    )  # fmt: skip
    # About a tenth of the bytes a random model draws end a completion: lengths from 1 to 40.
    ends = tuple(chr(code) for code in range(ord("a"), ord("z") + 1))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop=ends))

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == COMPILED else None
    )
    after: list[int] = []
    step = colocated.Loop._step

    def counted(self, step_index, collector):
        step(self, step_index, collector)
        after.append(len(compiled))

    monkeypatch.setattr(colocated.Loop, "_step", counted)
    try:
        colocated.run(config, resume=False, timer=Timeline())
    finally:
        jax.monitoring.clear_event_listeners()
    lengths = {
        json.loads(line)["num_tokens"]
        for path in (tmp_path / "run" / "samples").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    }
    assert len(lengths) > 10, "the lengths are not ragged"
    assert after[0] > 0, "compilations are not counted"
    assert after[1:] == [after[1]] * 6, f"programs compiled by the end of each step: {after}"
