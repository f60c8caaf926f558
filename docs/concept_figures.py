"""Draw the pictures of docs/concepts.md with the package itself: `python docs/concept_figures.py`."""

from __future__ import annotations

import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from freshper import AutoTau, Exponential, Floored, NoDecay, PowerLaw, ReplayBuffer, Trajectory, Turn
from freshper.replay.diagnostics import drift_by_age

IMAGES = Path(__file__).parent / "images"
ALPHA, TAU = 0.6, 100.0
Floats = NDArray[np.float64]


def episode(version: int, reward: float) -> Trajectory:
    """The shortest trajectory there is."""
    turns = (Turn(0, 1, 2, reward),)
    mask, logprobs = np.array([False, True]), np.array([0, -1], dtype=np.float32)
    return Trajectory(np.array([0, 1]), mask, logprobs, turns, "terminated", True, version, "task", "group", 0)  # type: ignore[arg-type]


def filled(freshness: object, versions: int = 600) -> ReplayBuffer:
    """One episode per policy version, with rewards spread over two decades."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(versions, freshness=freshness, alpha=ALPHA)  # type: ignore[arg-type]
    rewards = rng.permutation(np.geomspace(0.1, 10, versions))
    buffer.add([episode(v, r) for v, r in enumerate(rewards.tolist())], policy_version=versions)
    return buffer


def decays(axes: Axes) -> None:
    """Families of freshness."""
    ages = np.arange(400)
    for name, decay in (
        ("NoDecay()", NoDecay()),
        ("Exponential(100)", Exponential(TAU)),
        ("Exponential(100, max_age=200)", Exponential(TAU, max_age=200)),
        ("PowerLaw(100, 1)", PowerLaw(TAU, 1)),
        ("Floored(Exponential(100), 0.2)", Floored(Exponential(TAU), 0.2)),
    ):
        axes.plot(ages, decay(ages), label=name)
    axes.set(xlabel="age, in policy versions", ylabel="freshness", title="Decays", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize=8)


def common_factor(axes: Axes) -> None:
    """Priorities fall, probabilities stay: why nothing is refreshed."""
    written, bases = np.array([0, 40, 80]), np.array([3.0, 1.0, 0.5])
    now = np.arange(80, 280)
    priorities = bases[:, None] * np.exp(-(now - written[:, None]) / TAU)
    weights = priorities**ALPHA
    for item, color in enumerate(("tab:blue", "tab:orange", "tab:green")):
        axes.plot(now, priorities[item], color=color, lw=1, label=f"priority, written at version {written[item]}")
        axes.plot(now, weights[item] / weights.sum(0), color=color, ls="--", lw=2)
    axes.plot([], [], color="gray", ls="--", lw=2, label="its probability")
    axes.set(xlabel="policy version", title="Time multiplies all priorities by the same number")
    axes.legend(frameon=False, fontsize=8)


def corrections(left: Axes, right: Axes) -> None:
    """What a draw of an item counts for on average, P times its sampling weight, by age; and the mean weight."""
    buffer, old = filled(Exponential(TAU)), filled(Exponential(TAU), versions=2000)
    warnings.simplefilter("ignore", UserWarning)  # buffer_max says itself what the right panel shows
    names = ("no correction", "toward freshness", "toward uniform")
    means: dict[str, list[float]] = {"batch_max": [], "buffer_max": []}
    for name in names:
        keys, counts = [], []
        beta = 0.0 if name == "no correction" else 1.0
        toward = "uniform" if name == "toward uniform" else "freshness"
        for _ in range(200):
            batch = buffer.sample(512, policy_version=600, beta=beta, toward=toward, normalization="none")  # type: ignore[arg-type]
            keys.append(batch.keys)
            counts.append(batch.sampling_weights)
        total = np.bincount(np.concatenate(keys), np.concatenate(counts), minlength=600)
        smooth = np.convolve(total / total.sum(), np.ones(30) / 30, mode="valid") * 600
        left.plot(600 - np.arange(len(smooth)) - 15, smooth, label=name)
        for rule, found in means.items():
            batch = old.sample(64, policy_version=2000, beta=beta, toward=toward, normalization=rule)  # type: ignore[arg-type]
            found.append(batch.mean_sampling_weight)
    left.axhline(1, color="gray", lw=0.8)
    left.set(xlabel="age", ylabel="part of the gradient / 1/N", title="Who the gradient listens to (beta = 1)")
    left.legend(frameon=False, fontsize=8)
    places = np.arange(len(names))
    for shift, (rule, found) in zip((-0.2, 0.2), means.items(), strict=True):
        right.bar(places + shift, found, 0.4, label=rule)
    right.set_xticks(places, names)
    right.set(
        ylabel="mean sampling weight",
        title="What normalization leaves, oldest item 20 tau",
        yscale="log",
    )
    right.legend(frameon=False, fontsize=8)


def log_ratios(rng: np.random.Generator, ages: NDArray[np.int64], drift: float) -> Floats:
    """log(pi/mu) of trajectories whose policy drifts by ``drift`` nats per version: N(-KL, 2 KL) under mu."""
    kl = drift * ages
    drawn: Floats = rng.normal(-kl, np.sqrt(2 * kl))
    return drawn


def ess(axes: Axes) -> None:
    """ESS and KL by age, measured and true."""
    rng = np.random.default_rng(1)
    ages = rng.integers(0, 400, 60_000)
    ratios = log_ratios(rng, ages, 0.005)
    bins = drift_by_age(ratios, ages, np.full(len(ages), 1e-5), edges=range(0, 401, 25))
    middles = [(one.age_low + one.age_high) / 2 for one in bins]
    grid = np.arange(400)
    axes.plot(grid, np.exp(-2 * 0.005 * grid), color="tab:blue", label="ESS fraction, true")
    axes.plot(middles, [one.ess_fraction for one in bins], "o", ms=4, color="tab:blue", label="measured")
    axes.plot(grid, np.exp(-0.005 * grid), color="tab:orange", label="bound exp(-KL), true")
    axes.plot(middles, np.exp([-one.kl for one in bins]), "s", ms=4, color="tab:orange", label="measured")
    axes.set(xlabel="age", title="What an old trajectory is still worth", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize=8)


def auto_tau(axes: Axes) -> None:
    """Tau found online from three starts; the drift quadruples in the middle."""
    for first, color in ((5.0, "tab:blue"), (60.0, "tab:green"), (2000.0, "tab:red")):
        rng, auto, taus = np.random.default_rng(2), AutoTau(tau=first, target=0.1), []
        for version in range(800):
            drift = 0.001 if version < 400 else 0.004
            ages = rng.exponential(auto.tau / ALPHA, 32).astype(np.int64)
            chances = np.exp(-ALPHA * ages / auto.tau) / 1e5
            ratios = log_ratios(rng, ages, drift)
            auto.observe(ratios, ages, chances, alpha=ALPHA, policy_version=version)
            taus.append(auto.tau)
        axes.plot(taus, color=color, label=f"begun at {first:g}")
    truth = np.where(np.arange(800) < 400, 0.1 / 0.001, 0.1 / 0.004) * ALPHA
    axes.plot(truth, color="black", ls="--", lw=1, label="true")
    axes.set(xlabel="replay updates of 32 trajectories", ylabel="tau", yscale="log", title='freshness="auto"')
    axes.legend(frameon=False, fontsize=8)


def save(name: str, draw: list[object]) -> None:
    """One picture with a panel for each function, or both panels for one that takes two."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.8))
    if len(draw) == 1:
        draw[0](*panels)  # type: ignore[operator]
    else:
        for one, axes in zip(draw, panels, strict=True):
            one(axes)  # type: ignore[operator]
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=110)
    print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    save("freshness", [decays, common_factor])
    save("corrections", [corrections])
    save("drift", [ess, auto_tau])
