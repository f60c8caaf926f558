"""Where a run stands: what it has done, what evaluation has found, and whether it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from freshper.errors import SnapshotError
from freshper.training.config import TrainConfig
from freshper.training.early_stop import EarlyStop


class Standing:
    """Counts a run's iterations and evaluations; ``facts`` are what result.json says of them."""

    def __init__(self, config: TrainConfig) -> None:
        self.iteration = 0
        self.status = "failed"  # until it is known better
        self.facts: dict[str, Any] = {"iterations": 0, "episodes": 0, "policy_version": 0}
        self._config = config
        self._scores = EarlyStop(config.eval.patience)
        self._seconds_before = 0.0
        self._started = time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: all iterations are done, or eval.patience is used up."""
        return self.iteration >= self._config.run.iterations or self._scores.due

    @property
    def evaluates(self) -> bool:
        """Whether the policy is evaluated after this iteration."""
        return self.iteration % self._config.eval.every == 0 or self.iteration == self._config.run.iterations

    @property
    def samples(self) -> bool:
        """Whether an episode of this iteration is written as text."""
        return self.iteration % self._config.run.sample_every == 0 or self.over

    def announcement(self) -> str:
        """A sentence at the beginning."""
        since = f" from iteration {self.iteration} on" if self.iteration else ""
        return f"training{since}; held-out success before RL: {self.facts['warm_start']['sampled_success']:.2f}"

    def evaluated(self, numbers: Mapping[str, float]) -> bool:
        """Take the numbers of an evaluation; returns whether its sampled score is the best so far."""
        self.facts["eval"] = dict(numbers)
        return self._scores.update(numbers["sampled_score"])

    def iterated(self, row: Mapping[str, float]) -> None:
        """Take the numbers of an iteration that is done."""
        counts = {name: row[name] for name in ("episodes", "policy_version")}
        self.facts |= {"iterations": self.iteration} | counts

    def result(self) -> dict[str, Any]:
        """What result.json holds if the run ends now. Seconds are those of all processes whose work still counts."""
        facts = {"status": self.status} | self.facts
        if self.status == "finished" and self.iteration < self._config.run.iterations:
            facts["stopped_early"] = f"{self._scores.without_gain} evaluations in a row were no better (eval.patience)"
        return facts | {"seconds": self._seconds()}

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` goes on from, as plain values."""
        return {
            "iteration": self.iteration,
            "facts": dict(self.facts),
            "scores": self._scores.state(),
            "seconds": self._seconds(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`. Raises :class:`SnapshotError` where it is none, and changes nothing then."""
        try:
            iteration, facts, seconds = int(state["iteration"]), dict(state["facts"]), float(state["seconds"])
            self._scores.restore(state["scores"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"the saved counters are damaged ({type(error).__name__}: {error})") from None
        self.iteration, self.facts, self._seconds_before = iteration, facts, seconds
