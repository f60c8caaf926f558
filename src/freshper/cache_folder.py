"""Where things that took long to make are kept, and how they appear there whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from freshper.errors import ConfigError


def cache_folder() -> Path:
    """$FRESHPER_CACHE, or freshper in the user's cache directory."""
    if own := os.environ.get("FRESHPER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "freshper"


def keep(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    """Fill ``folder`` by ``make``, which is given an empty one, unless ``is_whole(folder)`` by now.

    The folder appears by a rename: nobody sees a part of it. Several processes may make the same one at once: the
    first to finish is kept, the others throw theirs away. A damaged one is replaced. Raises :class:`ConfigError`
    where the cache cannot be written.
    """
    if is_whole(folder):
        return
    with _building_site(folder.parent) as site:
        made = site / "made"
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:  # something is there
            if not is_whole(folder):  # the damaged one; other processes may be repairing it at this moment
                with contextlib.suppress(OSError):
                    folder.rename(site / "damaged")
                    made.rename(folder)


@contextlib.contextmanager
def _building_site(cache: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as the result."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        site = tempfile.TemporaryDirectory(dir=cache, prefix=".building-")
    except OSError as error:
        raise ConfigError(
            f"nothing can be kept in {cache} ({error.strerror or error}): set FRESHPER_CACHE to a folder that can be "
            "written"
        ) from None
    with site as name:
        yield Path(name)
