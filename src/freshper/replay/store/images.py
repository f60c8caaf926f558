"""Images: encoded pictures kept once, however many trajectories show them."""

from __future__ import annotations

from collections.abc import Iterable


class ImageStore:
    """Encoded images (PNG, JPEG, ...) by their content, each with the number of its users.

    Python's own hash of the bytes finds a candidate and the bytes decide: two images are the same only when every
    byte is, so no collision can swap them. The hash is computed once for every object that is handed in.
    Not thread-safe: the owner holds the lock.
    """

    def __init__(self) -> None:
        self._images: dict[bytes, bytes] = {}  # content -> the one object that is kept and shared
        self._users: dict[bytes, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        """Number of distinct images."""
        return len(self._images)

    @property
    def total_bytes(self) -> int:
        """Bytes of the distinct images."""
        return self._bytes

    def users(self, image: bytes) -> int:
        """How many times ``image`` is in use; 0 when it is not kept."""
        return self._users.get(image, 0)

    def new_bytes(self, images: Iterable[bytes]) -> int:
        """Bytes by which :attr:`total_bytes` would grow if ``images`` were kept."""
        return sum(len(image) for image in set(images) if image not in self._users)

    def keep(self, images: Iterable[bytes]) -> tuple[bytes, ...]:
        """The kept objects that equal ``images`` (n,); each has one user more."""
        kept = []
        for image in images:
            known = self._images.get(image)
            if known is None:
                known = bytes(image)  # a subclass might carry more than the content
                self._images[known] = known
                self._bytes += len(known)
            self._users[known] = self._users.get(known, 0) + 1
            kept.append(known)
        return tuple(kept)

    def drop(self, images: Iterable[bytes]) -> None:
        """One user less for each of ``images`` (n,); the last one takes the image away. KeyError for an unknown one."""
        for image in images:
            left = self._users[image] - 1
            if left:
                self._users[image] = left
            else:
                del self._users[image]
                self._bytes -= len(self._images.pop(image))
