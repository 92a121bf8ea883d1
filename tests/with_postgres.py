"""Runs a command beside a PostgreSQL server of its own, whose address it finds in LOCOJAX_TEST_POSTGRES.

    python tests/with_postgres.py python -m pytest tests/test_service.py

The server is made in a temporary folder and gone afterwards. Its programs are taken from PATH or from where Debian puts
them. PostgreSQL refuses to run as root: root starts it as the user `postgres`, whom Debian's package makes.
"""

from __future__ import annotations

import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import tempfile

VARIABLE = "LOCOJAX_TEST_POSTGRES"


def programs() -> pathlib.Path:
    """The folder with initdb and pg_ctl."""
    places = [*sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("initdb"):
        places.insert(0, pathlib.Path(found).parent)
    for place in places:
        if (place / "initdb").exists() and (place / "pg_ctl").exists():
            return place
    sys.exit("Got: no initdb and pg_ctl. Expected: PostgreSQL's server. On Debian: apt-get install postgresql")


def main(command: list[str]) -> int:
    if not command:
        sys.exit("Got: no command. Expected: with_postgres.py COMMAND ...")
    bin = programs()
    as_owner = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="loco-pg-") as folder:
        if as_owner:
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = f"{folder}/data"
        # A socket in the folder and no port: two of these side by side don't meet.
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        subprocess.run([*as_owner, str(bin / "initdb"), "-D", data, "-U", "loco", "-A", "trust", "-E", "UTF8"],
                       check=True, stdout=subprocess.DEVNULL, cwd=folder)  # fmt: skip
        control = [*as_owner, str(bin / "pg_ctl"), "-D", data, "-w", "-t", "60"]
        subprocess.run([*control, "-l", f"{folder}/log", "-o", options, "start"], check=True,
                       stdout=subprocess.DEVNULL, cwd=folder)  # fmt: skip
        try:
            url = f"postgresql+psycopg://loco@/postgres?host={folder}"
            return subprocess.run(command, env={**os.environ, VARIABLE: url}).returncode
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL, cwd=folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
