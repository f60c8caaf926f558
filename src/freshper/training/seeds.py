"""One seed becomes many: each use has its own stream, so no part's random numbers depend on another part."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for one use, named by ``path``: the same for ever, and unrelated to that of any other path."""
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
