"""The exit codes of the command, besides 0."""

from typing import Final

FAILED: Final = 1
"""What was asked for went wrong while it ran."""
WRONG_INPUT: Final = 2
"""What was asked for makes no sense, or a library that it needs is not installed."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells count it: 128 + SIGINT."""
