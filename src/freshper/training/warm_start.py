"""The embedded policy's supervised phase: it clones a weak demonstrator. One for all arms and seeds, cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from freshper.envs import Teachable, make_env
from freshper.errors import ConfigError, DivergedError, SnapshotError
from freshper.policies.cache_folder import cache_folder, keep
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.training.config import TrainConfig
from freshper.training.seeds import derive_seed

# The code that decides what comes out, within the package: a changed file makes a new warm start.
_CODE = ("envs/*.py", "policies/tiny.py", "training/seeds.py", "training/warm_start.py")
_CORPUS_EPISODES = 2_000  # demonstrations whose words the tokenizer learns

Note = Callable[[str], None]


def warm_started_policy(config: TrainConfig, note: Note | None = None) -> TinyPolicy:
    """The policy before RL: from the cache, or built and put there.

    The cache's key is made of everything that decides the result, so a change of any builds anew. Several
    processes may ask at once: the folder appears whole, and the first one to finish is kept. A damaged one is
    built again. Raises :class:`ConfigError` when the cache cannot be written or the demonstrations do not fit the
    limits, :class:`DivergedError` when cloning them does not converge; then nothing is kept.
    """
    note = note or _ignore
    folder = cache_folder() / f"{config.run.task}-{_key(config)}"
    try:
        if folder.exists():
            return TinyPolicy.load(folder)
    except SnapshotError as damage:
        note(f"The warm start in the cache is built again: {damage}")
    note(f"Warm start: cloning the weak demonstrator of {config.run.task}, kept in {folder}")

    def make(empty: Path) -> None:
        with _one_thread():
            _build(config, empty, note)

    keep(folder, make, _is_whole)
    return TinyPolicy.load(folder)


def _is_whole(folder: Path) -> bool:
    try:
        TinyPolicy.load(folder)
    except SnapshotError:
        return False
    return True


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of floats depend on the number of threads: with one, the result does not depend on who builds it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ignore(text: str) -> None:
    """Nobody listens."""


def _key(config: TrainConfig) -> str:
    everything = {
        "code": _code_fingerprint(),
        "task": config.run.task,
        "tiny": config.tiny.model_dump(),
        "warm_start": config.warm_start.model_dump(),
        "libraries": {name: version(name) for name in ("freshper", "numpy", "torch", "transformers", "tokenizers")},
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _code_fingerprint() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file for pattern in _CODE for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _build(config: TrainConfig, folder: Path, note: Note) -> None:
    settings, shape = config.warm_start, config.tiny
    rng = np.random.default_rng(derive_seed(settings.seed, "corpus"))
    corpus = (text for _ in range(_CORPUS_EPISODES) for turn in _demonstration(config.run.task, rng) for text in turn)
    tokenizer = build_tokenizer(corpus)
    model = build_model(tokenizer.get_vocab_size(), seed=settings.seed, **shape.model_dump())
    policy = TinyPolicy(model, tokenizer)
    clone(policy, config, note)
    policy.save(folder)


def clone(policy: TinyPolicy, config: TrainConfig, note: Note) -> None:
    """Fit the policy's model to demonstrations, with the loss on reply tokens only."""
    settings = config.warm_start
    rng = np.random.default_rng(derive_seed(settings.seed, "demonstrations"))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))
    half_turn = math.pi / settings.updates
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5 * (1 + math.cos(half_turn * done)))
    policy.model.train()
    for update, (tokens, labels) in enumerate(_batches(policy, config, rng), start=1):
        # Padding stands on the right, where no reply of a causal model can see it.
        logits = policy.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if not torch.isfinite(loss):
            raise DivergedError(
                f"warm start: the loss is {float(loss.detach())} at update {update}; lower warm_start.learning_rate "
                f"({settings.learning_rate:g})"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 50 == 0 or update == settings.updates:
            note(f"Warm start: update {update} of {settings.updates}, loss {float(loss.detach()):.3f}")


def _batches(
    policy: TinyPolicy, config: TrainConfig, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded tokens (B, T), and labels (B, T) that are -100 wherever no reply stands."""
    for _ in range(config.warm_start.updates):
        episodes = [_demonstration(config.run.task, rng) for _ in range(config.warm_start.batch_size)]
        rows = [_encode(policy, episode, config.rollout.max_episode_tokens) for episode in episodes]
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full((len(rows), width), -100)
        for index, (row_tokens, mask) in enumerate(rows):
            tokens[index, : len(row_tokens)] = torch.tensor(row_tokens)
            labels[index, : len(row_tokens)] = torch.tensor(row_tokens).where(torch.tensor(mask), -100)
        yield tokens, labels


def _encode(policy: TinyPolicy, episode: list[tuple[str, str]], limit: int) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    mask: list[bool] = []
    for observation, reply in episode:
        prompt, answer = policy.encode_turn(observation, None), policy.encode_reply(reply)
        tokens += [*prompt, *answer]
        mask += [False] * len(prompt) + [True] * len(answer)
    if len(tokens) > limit:
        raise ConfigError(
            f"a demonstration of {len(episode)} turns has {len(tokens)} tokens, rollout.max_episode_tokens is {limit}: "
            "raise it, or no episode could be played to its end"
        )
    return tokens, mask


def _demonstration(task: str, rng: np.random.Generator) -> list[tuple[str, str]]:
    """One episode of the demonstrator on a training level: (observation, reply) of every turn."""
    env: Any = make_env(task, split="train")
    if not isinstance(env, Teachable):
        raise ConfigError(f"task {task!r} has no demonstrator: the embedded policy cannot be warm-started on it")
    observation = env.reset(int(rng.integers(2**62)))
    turns = []
    while True:
        reply = env.demonstrate(rng)
        turns.append((observation, reply))
        outcome = env.step(reply)
        if outcome.done:
            return turns
        observation = outcome.observation
