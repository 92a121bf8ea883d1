"""`locojax serve`: what it refuses before anything starts, and what its processes are started with."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from tiny import write_tiny_model

from locojax import cli, cli_serve
from locojax.hosts import folder_lock
from locojax.hosts.place import with_huge_pages
from locojax.hosts.serving_settings import ServeSettings
from locojax.server.auth import KEYS_VARIABLE
from locojax.server.supervisor import Child, Supervisor
from locojax.types import PEFT_FILES


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def started(monkeypatch) -> list[list[Child]]:
    """What would have been supervised."""
    found: list[list[Child]] = []
    monkeypatch.setattr(Supervisor, "run", lambda self: found.append([r.child for r in self._running]) or 0)
    return found


def test_two_processes_are_started(model, tmp_path, started, capsys):
    arguments = ["serve", str(model), "--port", "0", "--data-dir", str(tmp_path / "data"), "--alias", "org/other"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in PEFT_FILES:
        (adapter / file).touch()
    more = ["--max-rank", "16", "--row-tokens", "128", "--no-warm-up", "--import-peft", f"mine={adapter}"]
    assert cli.main([*arguments, *more]) == 0
    ((engine, api),) = started
    settings = ServeSettings.from_json(engine.command[-2])
    assert (settings.model, settings.max_rank, settings.row_tokens, settings.warm_up) == (str(model), 16, 128, False)
    given = json.loads(api.command[-1])
    assert given["model_names"] == [str(model), "org/other"] and given["tokenizer_id"] is None
    assert given["imports"] == [["mine", str(adapter)]]
    assert given["address"] == engine.command[-1]
    (lock,) = engine.pass_fds
    assert api.pass_fds == (given["socket"], lock)
    (secret,) = api.environment.values()
    assert len(bytes.fromhex(secret)) == 32
    assert engine.environment == api.environment | with_huge_pages(os.environ)  # only the engine computes
    shown = capsys.readouterr().err
    assert f"export TINKER_BASE_URL={given['url']}\n" in shown and "export TINKER_API_KEY=tml-local\n" in shown


def test_two_servers_dont_share_a_data_folder(model, tmp_path, started, capsys):
    arguments = ["serve", str(model), "--port", "0", "--data-dir", str(tmp_path)]
    with folder_lock.hold(tmp_path, "server", remedy="", say=print):
        assert cli.main(arguments) == 2 and not started
    refused = f"The folder {tmp_path} is in use by another server. Got: process {os.getpid()}. Expected: one at a time."
    assert f"{refused} Stop it, or pass another --data-dir." in capsys.readouterr().err.replace("\n", "")
    assert cli.main(arguments) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 0), (None, 0)])
def test_the_exit_code_says_whether_to_start_it_again(model, tmp_path, monkeypatch, number, code):
    def run(self):
        self.stopped_by = number
        return 0

    monkeypatch.setattr(Supervisor, "run", run)
    assert cli.main(["serve", str(model), "--port", "0", "--data-dir", str(tmp_path)]) == code


@pytest.mark.extended
def test_a_gguf_model_has_its_tokenizer_laid_out(tmp_path, started):
    assert cli.main(["serve", "smollm2-135m", "--port", "0", "--data-dir", str(tmp_path)]) == 0
    ((_, api),) = started
    assert json.loads(api.command[-1])["tokenizer_id"] == str(tmp_path / "tokenizer")
    first = cli_serve.served_tokenizer("smollm2-135m", tmp_path)
    again = cli_serve.served_tokenizer("smollm2-135m", tmp_path)
    assert first.encode("Hello there") == again.encode("Hello there") and first.eos_ids == again.eos_ids
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()


def test_keys_reach_neither_command_line_nor_terminal(model, tmp_path, started, capsys, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("tml-0123456789abcdef\n")
    arguments = ["serve", str(model), "--port", "0", "--data-dir", str(tmp_path)]
    assert cli.main([*arguments, "--host", "0.0.0.0", "--keys-file", str(file)]) == 0
    assert "0123456789" not in str(started) + capsys.readouterr().err
    monkeypatch.setenv(KEYS_VARIABLE, "tml-0123456789abcdef")
    assert cli.main(arguments) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "locojax serve serves one model. Got: none. Expected: locojax serve MODEL."),
        (["a", "b"], "locojax serve serves one model. Got: a b."),
        (["smolm2-135m"], "There is no model 'smolm2-135m'. Got: no directory or file of that name"),
        (["MODEL", "--host", "0.0.0.0"], "Listening on 0.0.0.0 would let everyone on the network train"),
        (["MODEL", "--keys-file", "/none"], "The file of API keys /none can't be read"),
        (["MODEL", "--data-dir", "/dev/null/x"], "The data folder /dev/null/x can't be written. Got: Not a directory."),
        (["MODEL", "--port", "70000"], "The port is out of range. Got: 70000."),
        (["MODEL", "--host", "999.1.1.1", "--keys-file", "KEYS"], "There is no address '999.1.1.1' to listen on"),
        (["MODEL", "--max-rank", "0"], "The server's max_rank is out of range. Got: 0. Expected: 1 or more."),
        (["MODEL", "--max-rank", "x"], "Argument --max-rank: invalid int value: 'x'. See `locojax serve --help`."),
        (["MODEL", "--nonsense"], "Unknown option '--nonsense'."),
        (["MODEL", "--import-peft", "MODEL"], "--import-peft names an adapter and its folder. Got:"),
        (["MODEL", "--import-peft", "mine=/dev"], "no PEFT adapter to import in /dev. Got: no adapter_config.json."),
    ],
)
def test_what_is_refused_at_start(model, tmp_path, capsys, options, says):
    (tmp_path / "keys").write_text("tml-0123456789abcdef\n")
    names = {"MODEL": str(model), "KEYS": str(tmp_path / "keys")}
    data = [] if "--data-dir" in options else ["--data-dir", str(tmp_path / "data")]
    assert cli.main(["serve", *(names.get(option, option) for option in options), *data]) == 2
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_named(model, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(model), "--port", str(port), "--data-dir", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"Port {port} of 127.0.0.1 can't be listened on. Got: Address already in use." in shown
    assert "pass another --port" in shown


def test_a_missing_extra_is_named(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_serve, "_PACKAGES", ("fastapi", "nothing_of_this_name"))
    assert cli.main(["serve", str(model), "--data-dir", str(tmp_path)]) == 2
    assert "needs the Python package nothing_of_this_name" in capsys.readouterr().err


def test_help_and_refusals_import_neither_jax_nor_fastapi():
    code = (
        "import sys; from locojax import cli; cli.main(['serve', 'nothing-of-this-name']);"
        "print([name for name in ('jax', 'fastapi', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
