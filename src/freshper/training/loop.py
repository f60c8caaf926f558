"""The story of a run: begin or go on, iterate, evaluate, keep, write.

What is not here: what one iteration does (iteration: collect, learn, remember, replay, publish), how far the run has
come (standing), what it goes on from (checkpoint, resume), how the policy begins (policy, warm_start).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freshper.replay.buffer import ReplayBuffer
from freshper.training.build import Parts, build
from freshper.training.checkpoint import Checkpoint, Checkpoints
from freshper.training.config import TrainConfig
from freshper.training.evaluate import evaluate_both
from freshper.training.interrupt import StopRequest, termination_interrupts
from freshper.training.iteration import iterate
from freshper.training.metrics import Metrics
from freshper.training.policy import make_policy
from freshper.training.resume import Stateful, fingerprint, go_back, restore_run, run_state
from freshper.training.rng_state import settle_torch
from freshper.training.run_folder import RunFolder, TrainResult, choose_folder
from freshper.training.seeds import derive_seed
from freshper.training.standing import Standing

Listener = Callable[[Mapping[str, float]], None]
Note = Callable[[str], None]


def train(
    config: TrainConfig, *, resume: bool = False, on_iteration: Listener | None = None, note: Note | None = None
) -> TrainResult:
    """Run ``config`` to its end or to the first SIGINT; ``on_iteration`` gets metrics, ``note`` a sentence per phase.

    With ``resume`` the run in ``config.run.folder`` goes on from its newest checkpoint, as if it had never ended. The
    global random generators of Python, numpy and torch are set from ``run.seed``. Raises :class:`RunFolderError`
    when the folder is taken, or holds nothing to resume or a run with other settings, :class:`DivergedError` when
    updates stop being finite, :class:`EnvError` when all episodes of an iteration broke.
    """
    standing = Standing(config)
    with termination_interrupts(), RunFolder(choose_folder(config), config, resume=resume) as folder:
        checkpoints = Checkpoints(folder.path, config)
        saved, buffer = checkpoints.newest() if resume else (None, checkpoints.new_buffer())
        with buffer:
            if saved is not None:
                go_back(saved, standing, folder, config)
            try:
                Run(config, folder, checkpoints, standing, on_iteration, note).to_its_end(buffer, saved)
            except KeyboardInterrupt:
                standing.status = "interrupted"
                raise
            finally:
                folder.finish(facts := standing.result() | {"failed_saves": checkpoints.failures + folder.failures})
    return TrainResult(folder.path, standing.status, facts)


@dataclass(frozen=True)
class Run:
    """A run under way. ``standing`` always says how far it has come."""

    config: TrainConfig
    folder: RunFolder
    checkpoints: Checkpoints
    standing: Standing
    on_iteration: Listener | None
    note: Note | None

    def to_its_end(self, buffer: ReplayBuffer, saved: Checkpoint | None) -> None:
        """Begin, or go on from ``saved``, and iterate until the end or until somebody asks to stop."""
        config, standing, metrics = self.config, self.standing, Metrics()
        others: dict[str, Stateful] = {"standing": standing, "metrics": metrics}
        settle_torch(derive_seed(config.run.seed, "global"), config.run.threads)
        policy = make_policy(config, self.note)
        origin, parts = fingerprint(policy.model), build(config, policy, self.folder.path, buffer)
        if saved is None:
            standing.facts["warm_start"], _ = evaluate_both(policy, config)
        else:
            restore_run(saved, parts, others, origin=origin)
            self.write(saved.state["row"])
        if self.note:
            self.note(standing.announcement())
        stopping = False
        with StopRequest() as stop:
            while not (standing.over or stopping):
                standing.iteration += 1
                rollout = iterate(config, parts, standing.iteration, metrics)
                if standing.evaluates:
                    with metrics.timed("eval"):
                        metrics.add(self.evaluate(parts))
                if standing.samples:
                    self.folder.log_sample(standing.iteration, "fresh", rollout.transcripts[0])
                    self.folder.log_drift(standing.iteration, buffer.drift_by_age())
                row = metrics.close(standing.iteration, parts.learner.version, buffer, config.replay.ratio)
                standing.iterated(row)
                stopping = stop.asked and not standing.over
                if self.checkpoints.due(standing.iteration, last=stopping or standing.over):
                    with metrics.timed("checkpoint"):
                        state = run_state(parts, others, origin=origin, folder=self.folder, row=row)
                        self.checkpoints.save(standing.iteration, state, buffer)
                if stopping and not standing.evaluates:  # beyond what a run that goes on would have done
                    row |= self.evaluate(parts)
                self.write(row)
        standing.status = "finished" if standing.over else "interrupted"

    def evaluate(self, parts: Parts) -> dict[str, float]:
        """Play held-out levels, and keep the policy: as the last one, and as the best one if it is."""
        config, standing = self.config, self.standing
        numbers, played = evaluate_both(parts.policy, config)
        self.folder.log_sample(standing.iteration, "eval", played.transcripts[0])
        self.folder.save_model("last", parts.policy.save)
        if standing.evaluated(numbers):
            self.folder.save_model("best", parts.policy.save)
        return {f"eval/{name}": value for name, value in numbers.items()}

    def write(self, row: Mapping[str, float]) -> None:
        """Everything is known of an iteration: tell it."""
        self.folder.log(row)
        if self.on_iteration:
            self.on_iteration(row)
