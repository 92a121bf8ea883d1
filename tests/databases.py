"""Which database the service's tests use: SQLite in the test's folder, or one of a PostgreSQL server's.

With LOCOJAX_TEST_POSTGRES (see with_postgres.py) every test folder has a database of its own there.
"""

from __future__ import annotations

import hashlib
import os
import pathlib

import sqlalchemy as sa
from with_postgres import VARIABLE


def database_for(folder: pathlib.Path) -> str | None:
    """The URL of the folder's database, which is made when it is first asked for; None: SQLite's own place."""
    server = os.environ.get(VARIABLE)
    if server is None:
        return None
    name = "t" + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            exists = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
            if connection.execute(exists, {"name": name}).first() is None:
                connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
    finally:
        engine.dispose()
    return server.replace("/postgres?", f"/{name}?")
