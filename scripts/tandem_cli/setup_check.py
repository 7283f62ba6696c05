"""``python -m tandem_cli.setup_check``: can this Python make the virtual environment?

``make setup`` runs it before anything is installed, possibly with a Python that is too old, so
it imports nothing but this package's light modules and the standard library.
"""

from __future__ import annotations

import importlib.util
import sys

from tandem_cli.errors import CliError
from tandem_cli.libpython import libpython_folder, python_version


def check_python() -> None:
    """Raises with what to install: version, venv module, shared libpython."""
    version = python_version()
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise CliError(f"{sys.executable} has no module {module}; on Debian or Ubuntu run "
                           f"`apt install python{version}-venv`")
    libpython_folder()


if __name__ == "__main__":
    try:
        check_python()
    except CliError as problem:
        sys.exit(f"error: {sys.executable}: {problem}\n"
                 "Another Python is chosen with `make setup PYTHON=/path/to/python3`.")
