"""From the settings that every task made of a data set has to the sources of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from freshper.envs.datasets import DataSource
from freshper.errors import ConfigError


class DataSettings(Protocol):
    """What a task's settings say of its data; 0 of ``limit`` and -1 of ``shuffle_seed`` switch these off."""

    @property
    def data(self) -> str:
        """A local file, a folder, or the name of a hub data set."""
        ...

    @property
    def subset(self) -> str:
        """The hub's configuration, or a folder in ``data``."""
        ...

    @property
    def train_split(self) -> str:
        """Split that is trained on."""
        ...

    @property
    def eval_split(self) -> str:
        """Split that evaluates; empty divides the training questions."""
        ...

    @property
    def eval_data(self) -> str:
        """Another source for evaluation; empty takes ``data``."""
        ...

    @property
    def limit(self) -> int:
        """The first so many usable rows of each source."""
        ...

    @property
    def shuffle_seed(self) -> int:
        """Order of the rows before the limit."""
        ...


def check_data(settings: DataSettings) -> None:
    """Raise :class:`ConfigError` for settings that no source can have."""
    if settings.limit < 0:
        raise ConfigError(f"limit {settings.limit} must be at least 0 (0: all rows)")


def sources_of(settings: DataSettings, columns: Mapping[str, str]) -> tuple[DataSource, DataSource | None]:
    """Where training and evaluation rows come from; None where the training rows are divided.

    ``columns`` are names as the task knows them, and as the data has them. Raises :class:`ConfigError` for a source
    that cannot be.
    """

    def source(data: str, split: str) -> DataSource:
        whole = DataSource(
            data,
            columns=columns,
            limit=settings.limit or None,
            shuffle_seed=settings.shuffle_seed if settings.shuffle_seed >= 0 else None,
        )
        return whole if whole.is_file else replace(whole, subset=settings.subset, split=split)

    train = source(settings.data, settings.train_split)
    if settings.eval_data or (settings.eval_split and not train.is_file):
        return train, source(settings.eval_data or settings.data, settings.eval_split)
    return train, None
