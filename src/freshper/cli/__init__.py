"""The command ``freshper``: train, compare, report, eval, play, envs. Wrong input ends in one line and exit code 2."""

from freshper.cli.dispatch import main

__all__ = ["main"]
