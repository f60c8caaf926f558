"""Live progress in the terminal, of one run from its metrics and of a comparison from its run folders."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from freshper.errors import ConfigError, RunFolderError
from freshper.reports.follow import Follower
from freshper.reports.run_folder import FINISHED, METRICS_FILE, RESULT_FILE, RUNNING, read_status
from freshper.reports.text import count, duration, number, plural, short_count, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

PLAIN_SECONDS = 10.0  # between two lines where the output is not a terminal
SMOOTHED = 20  # iterations in the smoothed values
WAITING = "waiting"


class _Display(ABC):
    """A live panel on a terminal, plain lines elsewhere. Subclasses say what stands in either."""

    def __init__(self, console: Console | None, clock: Callable[[], float]) -> None:
        from rich.console import Console

        self._console = Console() if console is None else console
        self._clock = clock
        self._live: Live | None = None
        self._last_line = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @abstractmethod
    def _panel(self) -> RenderableType:
        """What the live panel shows now."""

    @abstractmethod
    def _line(self) -> str:
        """The same in one plain line."""

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tick(self, *, at_once: bool = False) -> None:
        """Print a plain line when one is due. The live panel refreshes itself."""
        if self._live is None and (at_once or self._clock() - self._last_line >= PLAIN_SECONDS):
            self._last_line = self._clock()
            self._say(self._line())


class TrainProgress(_Display):
    """The progress of one run, fed with the flat metrics of every iteration.

    Use as a context manager. On a terminal one panel with bar, ETA, score, success and the state of replay;
    elsewhere a plain line about every 10 s, for the first iteration and for the last.
    """

    def __init__(
        self,
        total_iterations: int,
        title: str,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_total(total_iterations)
        super().__init__(console, clock)
        self._total = total_iterations
        self._title = title
        self._phase = "starting"
        self._latest: dict[str, float] = {}
        self._scores: list[float] = []
        self._successes: list[float] = []
        self._pace = _Pace(clock)

    def note(self, text: str) -> None:
        """Tell the phase, such as "warm start"; shown until the next note."""
        self._phase = text
        if self._live is None:
            self._say(f"{self._title}: {text}")

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one iteration; absent names keep what was last known (an evaluation, say)."""
        self._latest = {**self._latest, **metrics}
        self._scores.append(metrics.get("rollout/score", math.nan))
        self._successes.append(metrics.get("rollout/success", math.nan))
        iteration = self._iteration
        self._pace.mark(iteration)
        self._tick(at_once=iteration >= self._total)

    @property
    def _iteration(self) -> int:
        return int(self._latest.get("iteration", 0))

    def _get(self, name: str) -> float:
        return self._latest.get(name, math.nan)

    def _eta(self) -> str:
        return duration(self._pace.remaining(self._total - self._iteration))

    def _heldout(self) -> str:
        sampled, greedy = self._get("eval/sampled_success"), self._get("eval/greedy_success")
        return f"{number(sampled)}, greedy {number(greedy)}"

    def _line(self) -> str:
        parts = [
            f"{self._title}: iteration {self._iteration}/{self._total}",
            f"score {number(self._get('rollout/score'), 2)} (mean {number(_recent(self._scores), 2)})",
            f"success {number(self._get('rollout/success'))} (mean {number(_recent(self._successes))})",
            f"episodes {count(self._get('episodes'))}",
            f"updates {count(self._get('policy_version'))}",
            f"{short_count(self._get('time/tokens_per_s'))} tokens/s",
        ]
        if "replay/age_mean" in self._latest or "replay/ess_fraction" in self._latest:
            parts.append(f"age {number(self._get('replay/age_mean'), 1)}")
            parts.append(f"ESS {number(self._get('replay/ess_fraction'), 2)}")
        if "eval/sampled_success" in self._latest or "eval/greedy_success" in self._latest:
            parts.append(f"held-out {self._heldout()}")
        return "  ".join([*parts, f"ETA {self._eta()}"])

    def _panel(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        place = f"{self._iteration}/{self._total}"
        bar.add_row(Text(place), ProgressBar(total=self._total, completed=self._iteration), Text(f"ETA {self._eta()}"))
        facts = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for ratio in (None, 1, None, 1):
            facts.add_column(no_wrap=True, ratio=ratio)
        for left, its, right, theirs in self._facts():
            facts.add_row(Text(left, style="dim"), Text(its), Text(right, style="dim"), Text(theirs))
        top = _top(self._successes)
        bars = sparkline(self._successes, 48, high=top)
        line = Text.assemble(("success ", "dim"), (bars, "cyan"), (f" 0 to {number(top, 2)}" if bars else "", "dim"))
        return Panel(
            Group(bar, Text(""), facts, line),
            title=Text(self._title, style="bold"),
            subtitle=Text(self._phase, style="dim"),
            title_align="left",
            subtitle_align="right",
            box=box.ROUNDED,
            width=min(100, self._console.width),
        )

    def _facts(self) -> list[tuple[str, str, str, str]]:
        score = f"{number(self._get('rollout/score'), 2)}  mean {number(_recent(self._scores), 2)}"
        success = f"{number(self._get('rollout/success'))}  mean {number(_recent(self._successes))}"
        return [
            ("score", score, "success", success),
            ("episodes", count(self._get("episodes")), "updates", count(self._get("policy_version"))),
            (
                "replay age",
                number(self._get("replay/age_mean"), 1),
                "replay ESS",
                number(self._get("replay/ess_fraction"), 2),
            ),
            ("tokens/s", short_count(self._get("time/tokens_per_s")), "held-out", self._heldout()),
        ]


class CompareProgress(_Display):
    """The progress of several runs, read from the metrics.jsonl that each of them writes.

    ``runs`` maps a name to a run folder. Call :meth:`poll` every now and then (twice a second is plenty):
    each call reads only what was appended since the last one. A run that was killed stays "running": whoever
    started it knows.
    """

    def __init__(
        self,
        runs: Mapping[str, Path],
        total_iterations: int,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_total(total_iterations)
        super().__init__(console, clock)
        self._total = total_iterations
        self._rows = [_Row(name, Path(folder)) for name, folder in runs.items()]
        self._pace = _Pace(clock, marks=600)

    def poll(self) -> bool:
        """Read what the runs have appended; true when every one of them has ended."""
        for row in self._rows:
            before = row.state
            row.poll()
            if self._live is None and row.state != before and row.state not in (RUNNING, WAITING):
                self._say(f"{row.name}: {row.state} at iteration {row.iteration}{row.flaw}")
        self._pace.mark(sum(row.iteration for row in self._rows))
        ended = all(row.ended for row in self._rows)
        self._tick(at_once=ended)
        return ended

    def _eta(self) -> str:
        left = sum(max(0, self._total - row.iteration) for row in self._rows if not row.ended)
        return duration(self._pace.remaining(left))

    def _line(self) -> str:
        states = [row.state for row in self._rows]
        done = sum(row.ended for row in self._rows)
        running = "  ".join(
            f"{row.name} {row.iteration}/{self._total} score {number(row.score, 2)}{row.flaw}"
            for row in self._rows
            if row.state == RUNNING
        )
        head = f"{done}/{len(states)} runs ended, {states.count(RUNNING)} running, ETA {self._eta()}"
        return f"{head}  {running}".rstrip()

    def _panel(self) -> RenderableType:
        from rich import box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = sum(row.ended for row in self._rows)
        table = Table(
            box=box.SIMPLE_HEAD,
            title=Text(f"{done} of {len(self._rows)} runs ended · ETA {self._eta()}", style="bold"),
            title_justify="left",
        )
        table.add_column("run", no_wrap=True)
        table.add_column("state")  # the one that may wrap: names and numbers must stay whole
        table.add_column("", width=16)
        for heading in ("iteration", "score", "success"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("success over time", no_wrap=True)
        top = _top([value for row in self._rows for value in row.successes])
        styles = {FINISHED: "green", RUNNING: "cyan", WAITING: "dim"}
        for row in self._rows:
            table.add_row(
                Text(row.name),
                Text(row.state + row.flaw, style=styles.get(row.state, "red")),
                ProgressBar(total=self._total, completed=row.iteration, width=16),
                f"{row.iteration}/{self._total}",
                number(row.score, 2),
                number(_recent(row.successes)),
                Text(sparkline(row.successes, 20, high=top), style="cyan"),
            )
        return table


class _Row:
    """One run of a comparison, as far as its files tell."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.state = WAITING
        self.iteration = 0
        self.scores: list[float] = []
        self.successes: list[float] = []
        self._result = folder / RESULT_FILE
        self._follower = Follower(folder / METRICS_FILE)

    @property
    def ended(self) -> bool:
        return self.state not in (RUNNING, WAITING)

    @property
    def score(self) -> float:
        """Mean score of the last iterations."""
        return _recent(self.scores)

    @property
    def flaw(self) -> str:
        """What is wrong with its metrics, if anything."""
        return f" ({plural(self._follower.broken, 'broken line')})" if self._follower.broken else ""

    def poll(self) -> None:
        """Read what was appended and whether the run has ended."""
        lines = self._follower.poll()
        if self._follower.restarted:
            self.scores, self.successes, self.iteration = [], [], 0
        for line in lines:
            self.iteration = int(line.get("iteration", self.iteration))
            self.scores.append(line.get("rollout/score", math.nan))
            self.successes.append(line.get("rollout/success", math.nan))
        try:
            status = read_status(self._result)
        except RunFolderError:
            status = None  # half written: the next poll reads it whole, and the report names it if it stays so
        self.state = status or (RUNNING if self.iteration else WAITING)


class _Pace:
    """Iterations per second over the last marks, for an ETA that follows a machine that gets busier."""

    def __init__(self, clock: Callable[[], float], marks: int = 60) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=marks)

    def mark(self, iterations: int) -> None:
        """Note that so many iterations are done by now."""
        if not self._marks or iterations != self._marks[-1][1]:
            self._marks.append((self._clock(), iterations))

    def remaining(self, iterations: int) -> float:
        """Seconds for so many more iterations; nan before there is a pace."""
        if iterations <= 0:
            return 0.0
        if len(self._marks) < 2:
            return math.nan
        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        return iterations * (ended - began) / (last - first) if last > first and ended > began else math.nan


def _recent(values: list[float]) -> float:
    known = [value for value in values[-SMOOTHED:] if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _top(values: list[float]) -> float:
    """The upper end of a line of bars, 1 while all values are 0."""
    return max((value for value in values if value > 0), default=1.0)


def _check_total(total_iterations: int) -> None:
    if total_iterations < 1:
        raise ConfigError(f"total_iterations is {total_iterations}, must be at least 1; there is nothing to follow")
