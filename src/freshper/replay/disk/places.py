"""Where on disk every trajectory is, and the state file of a checkpoint, which holds that."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import MissingExtraError, SnapshotError
from freshper.replay.disk.frames import plain_arrays

BLOCK = 1 << 20  # bytes of a state file under one checksum
_DTYPES = {"serials": np.int64, "logs": np.int32, "offsets": np.int64, "rows": np.int32, "nbytes": np.int64}
_PLACE, _ARRAY = "place/", "array/"


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """n trajectories: ``rows`` of the frames at ``offsets`` of ``logs``; ``nbytes`` is the share of its frame."""

    serials: NDArray[np.int64]
    logs: NDArray[np.int32]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int32]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of trajectories n."""
        return len(self.serials)

    @classmethod
    def of_frame(
        cls, serials: NDArray[np.int64], log: int, offset: int, frame_bytes: int, lengths: NDArray[np.int64]
    ) -> Places:
        """Those of one frame; its bytes are shared out by ``lengths`` (n,), the tokens."""
        shares = np.cumsum(lengths) / max(int(lengths.sum()), 1)
        ends = np.concatenate([np.zeros(1, np.int64), (shares * frame_bytes).astype(np.int64)])
        return cls(
            serials=serials.copy(),
            logs=np.full(len(serials), log, dtype=np.int32),
            offsets=np.full(len(serials), offset, dtype=np.int64),
            rows=np.arange(len(serials), dtype=np.int32),
            nbytes=ends[1:] - ends[:-1],
        )

    @classmethod
    def joined(cls, parts: Sequence[Places]) -> Places:
        """All of ``parts``, in order."""
        return cls(
            **{
                name: np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])
                for name, dtype in _DTYPES.items()
            }
        )

    def take(self, rows: NDArray[Any]) -> Places:
        """The places at ``rows``, numbers or a mask."""
        return Places(**{name: getattr(self, name)[rows] for name in _DTYPES})

    def put(self, rows: NDArray[np.intp], places: Places) -> None:
        """Replace ``rows`` (m,) by ``places`` (m,)."""
        for name in _DTYPES:
            getattr(self, name)[rows] = getattr(places, name)

    def find(self, serials: NDArray[np.int64]) -> NDArray[np.intp]:
        """The row of every serial (m,). Raises :class:`SnapshotError` for one that is not stored."""
        order = np.argsort(self.serials, kind="stable")
        at = np.searchsorted(self.serials, serials, sorter=order)
        found = order[np.minimum(at, len(self) - 1)] if len(self) else np.zeros(len(serials), dtype=np.intp)
        unknown = self.serials[found] != serials if len(self) else np.ones(len(serials), dtype=np.bool_)
        if unknown.any():
            raise SnapshotError(
                f"{int(unknown.sum())} of {len(serials)} live trajectories are not in the log, e.g. serial number "
                f"{int(serials[unknown][0])}: they were never added, or an earlier checkpoint no longer had them"
            )
        return found


def state_path(directory: Path, mark: str) -> Path:
    """Where the state of a checkpoint stands."""
    return directory / f"state-{mark}.safetensors"


def encode_state(meta: dict[str, Any], arrays: dict[str, NDArray[Any]], places: Places) -> bytes:
    """``meta`` (JSON), ``arrays`` and the places of the live trajectories as the bytes of a safetensors file."""
    tensors = {_ARRAY + name: array for name, array in arrays.items()}
    tensors |= {_PLACE + name: getattr(places, name) for name in _DTYPES}
    content: bytes = _safetensors().save(plain_arrays(tensors), metadata={"meta": json.dumps(meta)})
    return content


def decode_state(content: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]], Places]:
    """What :func:`encode_state` was given."""
    size = int.from_bytes(content[:8], "little")
    meta = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["meta"])
    tensors = _safetensors().load(content)
    arrays = {name.removeprefix(_ARRAY): array for name, array in tensors.items() if name.startswith(_ARRAY)}
    return meta, arrays, Places(**{name: tensors[_PLACE + name] for name in _DTYPES})


def block_crcs(content: bytes) -> tuple[int, ...]:
    """The checksum of every block of :data:`BLOCK` bytes."""
    view = memoryview(content)
    return tuple(zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(content), BLOCK))


def _safetensors() -> Any:
    try:
        import safetensors.numpy as library
    except ImportError as error:
        raise MissingExtraError("safetensors", "disk") from error
    return library
