"""The command line: what it runs, what it prints, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest
from rich.console import Console

from locojax import cli, settings
from locojax.config import Config, load
from locojax.errors import CapacityError
from locojax.hosts.interrupt import Stopped
from locojax.hosts.metrics import RunResult
from locojax.measure.timeline import Timeline


@pytest.fixture
def loop(monkeypatch):
    """Stands in for the loop; `calls` holds what the command line asked of it, `fails` is raised if set."""
    fake = types.ModuleType("locojax.hosts.colocated")
    fake.calls, fake.fails = [], None

    def run(config, *, resume, timer):
        assert isinstance(timer, Timeline)
        fake.calls.append((config, resume))
        if fake.fails is not None:
            raise fake.fails
        return RunResult(2, 0.05, 1.0, 41.3, "runs/x")

    def describe(config):
        return settings.replace(config, {"training.rows": 3}), [("parameters", "134,515,008"), ("memory", "2.1 GiB")]

    fake.run, fake.describe = run, describe
    monkeypatch.setitem(sys.modules, "locojax.hosts.colocated", fake)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "set by hand, so left alone")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    return fake


def test_train_takes_a_file_settings_anywhere_and_options(loop, tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[run]\nseed = 3\nnum_steps = 4\n")
    assert cli.main(["train", "run.num_steps=5", str(path), "--resume", "rollout.stop=a=b"]) == 0
    ((config, resume),) = loop.calls
    assert (config.run.seed, config.run.num_steps, config.rollout.stop, resume) == (3, 5, ("a=b",), True)
    assert capsys.readouterr().out == "report: runs/x/report.html\nheld-out accuracy 0.05 -> 1.00 in 2 steps, 41 s\n"


def test_train_without_a_file(loop):
    assert cli.main(["train", "run.seed=9"]) == 0
    assert loop.calls == [(load(None, ["run.seed=9"]), False)]


def test_the_controller_is_a_flag_of_its_own(loop, capsys):
    assert cli.main(["train", "--dry-run", "--controller", "single"]) == 0
    options = cli._parse(["train", "run.seed=9", "--controller", "single"])
    assert options.config_of(options).hosts.controller == "single"
    assert cli.main(["train", "--controller", "both"]) == 2
    assert "hosts.controller" in capsys.readouterr().err


def test_dry_run_shows_and_runs_nothing(loop, capsys):
    assert cli.main(["train", "--dry-run", "run.seed=9"]) == 0
    shown = capsys.readouterr().out
    assert "rows = 3\n" in shown and "seed = 9\n" in shown
    assert shown.endswith("parameters  134,515,008\nmemory      2.1 GiB\n")
    assert loop.calls == []


def test_demo_has_a_folder_of_its_own_and_takes_settings(loop):
    assert cli.main(["demo", "run.num_steps=2"]) == 0
    ((config, resume),) = loop.calls
    assert config.run.name.startswith("demo-20") and config.run.num_steps == 2 and not resume
    assert config.model.name == "smollm2-135m" and config.data.source == "addition"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "none.toml"], "ConfigError: There is no configuration file 'none.toml'. Check the path."),
        (
            ["train", "rolout.group_size=2"],
            "ConfigError: Unknown setting 'rolout.group_size' (argument 'rolout.group_size=2'). "
            "The nearest is 'rollout.group_size'.",
        ),
        (["train", "--dryrun"], "ConfigError: Unknown option '--dryrun'. See `locojax COMMAND --help`."),
        (
            ["train", "a.toml", "b.toml"],
            "ConfigError: 'b.toml' is neither a setting nor the configuration file, which is 'a.toml'. "
            "Expected: locojax train CONFIG.toml key=value ....",
        ),
        (["trian"], "ConfigError: Argument COMMAND: invalid choice: 'trian' (choose from 'train', 'demo'). "),
    ],
)
def test_bad_input_ends_with_code_2_and_one_clear_line(loop, capsys, arguments, text):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    if "choose from" not in text:  # how argparse quotes the choices differs from Python to Python
        assert printed == text + "\n"
    assert loop.calls == []


def test_a_failed_run_ends_with_code_1_and_debug_shows_where(loop, capsys):
    loop.fails = CapacityError("A row doesn't fit", got=3, expected=2, remedy="Lower it")
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "CapacityError: A row doesn't fit. Got: 3. Expected: 2. Lower it.\n"
    assert cli.main(["train", "--debug"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "test_cli.py" in printed


def test_sigterm_ends_with_the_code_that_launchers_restart_on(loop, capsys, tmp_path):
    loop.fails = Stopped(signal.SIGTERM)
    assert cli.main(["train", f"run.dir={tmp_path}"]) == 75
    assert capsys.readouterr().err == "Stopped by SIGTERM, to be restarted with --resume.\n"
    loop.fails = Stopped(signal.SIGINT)
    assert cli.main(["train", f"run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"


def test_a_restartable_run_leaves_it_to_the_loop_whether_it_has_begun(loop):
    assert cli.main(["train", "--restartable"]) == 0 and cli.main(["train", "--restartable", "--resume"]) == 0
    assert [resume for _, resume in loop.calls] == [None, True]


def test_ctrl_c_says_how_to_go_on(loop, capsys, tmp_path):
    loop.fails = KeyboardInterrupt()
    command = ["train", f"run.dir={tmp_path}", "run.name=my run"]
    assert cli.main(command) == 2
    assert capsys.readouterr().err == "Stopped by Ctrl-C.\n"
    kept = tmp_path / "my run" / "config.toml"
    kept.parent.mkdir()
    kept.write_text(settings.to_toml(load(None, command[1:])))
    assert cli.main(command) == 2
    hint, stopped = capsys.readouterr().err.splitlines()
    assert (hint, stopped) == (
        f"To go on: locojax train '{kept}' --resume",
        "Stopped by Ctrl-C.",
    )
    loop.fails = None
    assert cli.main(["train", str(kept), "--resume"]) == 0
    assert loop.calls[-1] == (load(None, command[1:]), True)


def test_compiled_programs_are_kept_where_the_settings_or_the_user_say(loop, monkeypatch):
    cli.main(["train"])
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "set by hand, so left alone"
    cli.main(["train", "run.cache_dir=here"])
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == os.path.join("here", "xla")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("LOCOJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "mine")
    cli.main(["train"])
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == os.path.join("mine", "locojax", "xla")


def test_an_error_on_a_terminal_is_one_red_block(loop):
    console = Console(force_terminal=True, width=60, color_system="standard", record=True, quiet=False)
    with console.capture() as captured:
        cli._show(console, "CapacityError", CapacityError("A row doesn't fit", got=3, expected=2, remedy="Lower it"))
    lines = captured.get().splitlines()
    assert "\x1b[31m" in lines[0] and "CapacityError" in lines[0]
    assert [word for word in ("A row doesn't fit", "got: 3", "expected: 2", "Lower it") if word in captured.get()] == [
        "A row doesn't fit",
        "got: 3",
        "expected: 2",
        "Lower it",
    ]


def test_help_lists_every_setting_with_its_document():
    text = cli.settings_help()
    for leaf in settings.leaves(Config):
        assert f"  {leaf.key}=" in text
        assert leaf.doc in text
    assert "  rollout.top_p=1.0                    a number: above 0, at most 1\n" in text
    assert "  training.lora_mlp=true               true or false\n" in text
    assert "  data.held_out=none                   a string or none\n" in text


def test_help_needs_no_heavy_import():
    script = (
        "import sys\nfrom locojax import cli\n"
        "try:\n    cli.main(['train', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'jax', 'numpy', 'transformers', 'matplotlib', 'orbax'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_module_and_command_are_the_same():
    done = subprocess.run([sys.executable, "-m", "locojax", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == "locojax 0.1.0\n"
