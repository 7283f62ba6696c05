"""The one error of the command line: a message for the user and exit status 1."""

from __future__ import annotations


class CliError(Exception):
    """Something the user can mend; the message says what is wrong and what to do."""
