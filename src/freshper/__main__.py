"""``python -m freshper`` is the command ``freshper``."""

from freshper.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
