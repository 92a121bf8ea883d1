"""`locojax profile`: a real step's recording, read and divided; the table, the JSON and the chart."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny import CONFIG

from locojax import cli, settings
from locojax.config import Config
from locojax.errors import HostError
from locojax.measure import profile_report, trace
from locojax.measure.coin import COIN, coin
from locojax.measure.division import CLASSES, ROWS, Division, divide
from locojax.measure.profile import Profile, Recorder, _from_array, _to_array, profiled_config
from locojax.rl.rewards import load_reward


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A step on two devices: 60 ms of sleep, then a loop of products and sums over the devices, then a wait."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def body(x):
        def once(_, x):
            return jnp.tanh(x @ x) + jax.lax.psum(x, "x") * 0.001

        return jax.lax.fori_loop(0, 50, once, x)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))
    x = jax.device_put(np.full((1200, 600), 0.01, np.float32), NamedSharding(mesh, PartitionSpec("x")))
    program(x).block_until_ready()
    recorder, folder = Recorder(1), tmp_path_factory.mktemp("trace")
    with trace.recording(folder), trace.marked_step(), recorder.step(0):
        with recorder.phase("reward"):
            time.sleep(0.06)
        with recorder.phase("train"):
            program(x).block_until_ready()
        with recorder.phase("wait"):
            time.sleep(0.05)
        time.sleep(0.04)
    return recorder.last(), trace.read(folder)


def test_a_recording_tells_devices_phases_and_collectives(recorded):
    account, spans = recorded
    assert len(spans.devices) == 2
    assert [name for name, _, _ in spans.phases] == ["reward", "train", "wait"]
    found = divide(spans)
    sums = {row: sum(values.values()) for row, values in found.seconds.items()}
    same = {"abs": 0.03}  # two clocks, and on a busy machine a pause between reading one and the other
    assert found.wall == pytest.approx(account.wall, **same)
    assert sums == pytest.approx({**account.seconds, "unaccounted": account.unaccounted}, **same)
    assert found.seconds["reward"]["host"] == pytest.approx(sums["reward"])
    assert found.seconds["wait"]["network"] == pytest.approx(sums["wait"])
    assert found.seconds["unaccounted"]["unaccounted"] == pytest.approx(sums["unaccounted"])
    train = found.seconds["train"]
    assert train["compute"] + train["network"] > 0.5 * sums["train"]
    assert min(train["compute"], train["network"]) > 0  # the loop's own operation hides no collective inside of it
    for device in spans.devices:
        assert len(device.working) > 50 and len(device.collective) == 50
        (run,) = device.busy
        assert run[0] <= device.working[0, 0] and run[1] >= max(device.working[-1, 1], device.collective[-1, 1])
    assert sum(found.shares().values()) == pytest.approx(1.0)


def test_a_recording_without_a_step_is_refused(tmp_path):
    with trace.recording(tmp_path):
        pass
    with pytest.raises(HostError, match="recording of the step is of no use. Got: no marked step"):
        trace.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "category", "expected"),
    [
        ("all-reduce.3", "", True), ("%all-gather-start.1", "", True), ("reduce-scatter", "", True),
        ("collective-permute-done.2", "", True), ("psum.7", "", True), ("all_gather_invariant", "", True),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "", True), ("fusion.12", "all-gather fusion", True),
        ("fusion.12", "convolution fusion", False), ("reduce.4", "", False), ("dot.1", "", False),
        ("add_psum_fusion", "", False),
    ],
)  # fmt: skip
def test_collectives_are_told_by_name_or_category(name, category, expected):
    assert trace.is_collective(name, category) is expected


def test_hosts_exchange_their_figures_as_numbers():
    seconds = {row: {name: 0.1 * i + 0.01 * j for j, name in enumerate(CLASSES)} for i, row in enumerate(ROWS[2:5])}
    mine = Division(1.25, seconds, 4)
    back = _from_array(_to_array(mine).astype(np.float32))
    assert back.wall == 1.25 and back.num_devices == 4 and list(back.seconds) == list(seconds)
    for row, values in seconds.items():
        assert back.seconds[row] == pytest.approx(values, rel=1e-6)


def test_the_profiled_run_is_its_steps_alone(tmp_path):
    config = settings.replace(Config(), {"model.name": "random:x.json", "run.seed": 3})
    found = profiled_config(config, 2, str(tmp_path))
    assert found.run.num_steps == 3 and found.run.eval_every == 0 and found.run.seed == 3
    assert found.data.reward == COIN
    assert profiled_config(Config(), 2, str(tmp_path)).data.reward == "task"  # a real model's rewards are its own
    assert load_reward(COIN) is coin
    flips = [coin("", text, None, {}) for text in map(str, range(200))]
    assert 0.3 < np.mean(flips) < 0.7 and set(flips) == {0.0, 1.0}


@pytest.mark.extended
def test_the_command_profiles_a_config_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = [f"model.name=random:{tmp_path}", "run.prompts_per_step=2", "rollout.group_size=4"]
    arguments += ["rollout.max_tokens=4", "grading.deadline_seconds=60", "--json", str(out), "--plot", str(picture)]
    assert cli.main(["profile", *arguments, "--warm-up", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "parameters, step 1 on 1 host, 1 cpu device" in shown and "100.0 %" in shown
    found = json.loads(out.read_text())
    assert found["step"] == 1 and found["place"]["num_hosts"] == 1 and len(found["hosts"]) == 1
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    seconds = found["hosts"][0]["seconds"]
    assert seconds["decode"]["compute"] > 0 and seconds["train"]["compute"] > 0
    assert sum(sum(row.values()) for row in seconds.values()) == pytest.approx(found["hosts"][0]["wall"])
    assert "host 0" in picture.read_text()


def profile(number: int, compute: float, num_hosts: int = 1) -> Profile:
    shares = {"compute": compute, "network": 0.1, "host": 0.9 - compute, "unaccounted": 0.0}
    division = Division(2.0, {"decode": {name: 2 * share for name, share in shares.items()}}, 4)
    place = {"platform": "tpu", "num_hosts": num_hosts, "num_devices": 4 * num_hosts}
    return Profile(f"m{number}", number, 2, (division,) * num_hosts, None, place)


def test_profiles_of_several_sizes_are_drawn_smallest_first(tmp_path, capsys):
    paths = []
    for number, compute in ((8_000_000_000, 0.8), (135_000_000, 0.3)):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(profile_report.to_json(profile(number, compute, 2))))
    picture, out = tmp_path / "scale.svg", tmp_path / "all.json"
    assert cli.main(["profile", "--scale", *map(str, paths), "--plot", str(picture), "--json", str(out)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == "135M 30.0 % 10.0 % 60.0 % 0.0 % 100.0 % 2.000 s m135000000".split()
    assert rows[2] == "8B 80.0 % 10.0 % 10.0 % 0.0 % 100.0 % 2.000 s m8000000000".split()
    text = picture.read_text()
    assert text.index(">135M<") < text.index(">8B<") and "hosts: 2, devices: 8" in text
    assert [one["num_parameters"] for one in json.loads(out.read_text())] == [8_000_000_000, 135_000_000]


def test_each_configuration_is_profiled_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    commands = []

    def pretend(command, check):
        commands.append(command[3:])
        found = profile_report.to_json(profile(1000 * len(commands), 0.5))
        Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pretend)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "big.toml").write_text("")
    files = [str(tmp_path / "config.json"), str(tmp_path / "big.toml")]
    assert cli.main(["profile", files[1], "run.seed=3", "--warm-up", "1", "--scale", *files]) == 0
    assert [command[: command.index("--json")] for command in commands] == [
        ["profile", files[1], "run.seed=3", f"model.name=random:{files[0]}", "--warm-up", "1"],
        ["profile", files[1], "run.seed=3", "--warm-up", "1"],
    ]
    assert len(capsys.readouterr().out.splitlines()) >= 3
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 2))
    assert cli.main(["profile", "--scale", files[0]]) == 1
    assert "config.json failed. Got: exit code 2, its error is above" in capsys.readouterr().err


def test_several_hosts_have_a_row_each_and_their_mean():
    shown = _text(profile_report.table(profile(1000, 0.5, num_hosts=3)))
    assert "host 2" in shown and "mean" in shown and "1K parameters, step 2 on 3 hosts, 12 tpu devices" in shown


def _text(renderable) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_wrong_arguments_are_refused(tmp_path, capsys):
    for arguments, text in (
        (["a.toml", "b.toml"], "'b.toml' is neither a setting nor the configuration file, which is 'a.toml'"),
        (["--warm-up", "0"], "A step is profiled after others have warmed up. Got: --warm-up 0. Expected: at least 1"),
        (["--scale", "x.json", "--trace", "y"], "--trace keeps one profile's files"),
        (["--scale", str(tmp_path / "x.json")], "x.json can't be read: "),
    ):
        assert cli.main(["profile", *arguments]) == 2
        assert text in capsys.readouterr().err
