"""The random generators that belong to nobody: Python's, numpy's old one, and those of torch on every device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from freshper.errors import SnapshotError


def settle_torch(seed: int, threads: int) -> None:
    """Let the numbers of a run depend on nothing that was done before: threads and generators from its settings.

    Dropout draws from these generators, and so may an env of a user's.
    """
    torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)  # on every device


def rng_state() -> dict[str, Any]:
    """The state of all of them: tensors and plain values, ready for a checkpoint."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    inner = numpy_state["state"]
    return {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what :func:`rng_state` gave. Devices that are not there any more are left out.

    Raises :class:`SnapshotError` where it is no such state; some generators may have been set by then.
    """
    try:
        inner = state["numpy"]["state"]
        key = np.array(inner["key"], dtype=np.uint32)
        numpy_state = dict(state["numpy"]) | {"state": {"key": key, "pos": inner["pos"]}}
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SnapshotError(f"the saved random generators are damaged ({type(error).__name__}: {error})") from None
