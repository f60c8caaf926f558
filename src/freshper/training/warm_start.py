"""The embedded policy's supervised phase: it clones a weak demonstrator. One for all arms and seeds, cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from freshper.cache_folder import cache_folder, keep
from freshper.envs import Pictured, Teachable, faults_of, write_action
from freshper.envs.own import is_own, own_class
from freshper.errors import ConfigError, DivergedError, EnvError, SnapshotError
from freshper.policies.tiny import TinyPolicy, build_model, build_tokenizer
from freshper.policies.tiny_vision import (
    TinyVisionPolicy,
    build_processor,
    build_seeing_model,
    build_seeing_tokenizer,
    load_tiny,
)
from freshper.rollout.env_calls import EnvCalls
from freshper.training.config import TrainConfig
from freshper.training.folders import slug
from freshper.training.seeds import derive_seed
from freshper.training.tasks import make_task

# The code that decides what comes out, within the package: a changed file makes a new warm start.
_CODE = (
    "envs/**/*.py",
    "policies/tiny.py",
    "policies/tiny_vision.py",
    "policies/vision.py",
    "training/seeds.py",
    "training/warm_start.py",
)
_CORPUS_EPISODES = 2_000  # demonstrations whose words the tokenizer learns

Note = Callable[[str], None]
Teacher = Literal["demonstrator", "solver"]

_TEACHERS: dict[Teacher, str] = {"demonstrator": "weak demonstrator", "solver": "solver"}


def warm_started_policy(config: TrainConfig, note: Note | None = None) -> TinyPolicy:
    """The policy before RL: from the cache, or built and put there. One that sees, where the task shows pictures.

    The cache's key is made of everything that decides the result, so a change of any builds anew. Several
    processes may ask at once: the folder appears whole, and the first one to finish is kept. A damaged one is
    built again. Raises :class:`ConfigError` when the cache cannot be written or the demonstrations do not fit the
    limits, :class:`DivergedError` when cloning them does not converge; then nothing is kept.
    """
    note = note or _ignore
    folder = cache_folder() / f"{slug(config.run.task)}-{_key(config)}"
    try:
        if folder.exists():
            return load_tiny(folder)
    except SnapshotError as damage:
        note(f"The warm start in the cache is built again: {damage}")
    _teachable(config)  # raises before anything is announced
    note(f"Warm start: cloning the {_TEACHERS[config.warm_start.teacher]} of {config.run.task}, kept in {folder}")

    def make(empty: Path) -> None:
        with _one_thread():
            _build(config, empty, note)

    keep(folder, make, _is_whole)
    return load_tiny(folder)


def _is_whole(folder: Path) -> bool:
    try:
        load_tiny(folder)
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
        "options": repr(config.env.options),  # in their order: that of a mixture's weights decides its draws
        "own": _own_code([config.run.task, config.env.options]),
        "tiny": config.tiny.model_dump(),
        "warm_start": config.warm_start.model_dump(),
        "libraries": {name: version(name) for name in ("freshper", "numpy", "torch", "transformers", "tokenizers")},
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


def _own_code(named: Any) -> list[str]:
    """Digests of the modules that hold what is one's own, wherever the settings name it."""
    if isinstance(named, Mapping):
        return [digest for pair in named.items() for part in pair for digest in _own_code(part)]
    if isinstance(named, list):
        return [digest for part in named for digest in _own_code(part)]
    if not (isinstance(named, str) and is_own(named)):
        return []
    try:
        kind = own_class(named)
        file = None if kind is None else inspect.getsourcefile(kind)
    except (ConfigError, TypeError):  # a URL, or what has no source
        return []
    return [] if file is None else [hashlib.sha256(Path(file).read_bytes()).hexdigest()]


@functools.cache
def _code_fingerprint() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file for pattern in _CODE for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _build(config: TrainConfig, folder: Path, note: Note) -> None:
    env = _teachable(config)
    with _lessons(config, env, "corpus") as lesson:
        episodes = (lesson() for _ in range(_CORPUS_EPISODES))
        # A list: inside the tokenizer's own code nobody could interrupt an environment that hangs.
        corpus = [text for episode in episodes for turn in episode for text in (turn.observation, turn.reply)]
    policy = new_policy(corpus, config, sees=isinstance(env, Pictured))
    clone(policy, config, note)
    policy.save(folder)


def new_policy(corpus: Iterable[str], config: TrainConfig, *, sees: bool) -> TinyPolicy:
    """The embedded policy before it has learned anything; the words of ``corpus`` become its tokens."""
    shape, seed = config.tiny.model_dump(), config.warm_start.seed
    if sees:
        tokenizer = build_seeing_tokenizer(corpus)
        return TinyVisionPolicy(build_seeing_model(tokenizer, seed=seed, **shape), tokenizer, build_processor())
    tokenizer = build_tokenizer(corpus)
    return TinyPolicy(build_model(tokenizer.get_vocab_size(), seed=seed, **shape), tokenizer)


def clone(policy: TinyPolicy, config: TrainConfig, note: Note) -> None:
    """Fit the policy's model to demonstrations, with the loss on reply tokens only."""
    settings = config.warm_start
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))
    half_turn = math.pi / settings.updates
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5 * (1 + math.cos(half_turn * done)))
    policy.model.train()
    for update, (tokens, labels, images) in enumerate(_batches(policy, config), start=1):
        # Padding stands on the right, where no reply of a causal model can see it.
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if isinstance(policy, TinyVisionPolicy):
            inputs |= policy.picture_inputs(tokens, images)
        logits = policy.model(**inputs, use_cache=False).logits
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


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the demonstrator saw and said."""

    observation: str
    images: tuple[bytes, ...]
    reply: str


_Images = tuple[bytes, ...]


def _batches(policy: TinyPolicy, config: TrainConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[_Images]]]:
    """Right-padded tokens (B, T), labels (B, T) that are -100 wherever no reply stands, and each row's pictures."""
    settings = config.warm_start
    with _lessons(config, _teachable(config), "demonstrations") as lesson:
        for _ in range(settings.updates):
            episodes = [lesson() for _ in range(settings.batch_size)]
            rows = [_encode(policy, episode, config.rollout.max_episode_tokens) for episode in episodes]
            width = max(len(tokens) for tokens, _ in rows)
            tokens = torch.zeros(len(rows), width, dtype=torch.long)
            labels = torch.full((len(rows), width), -100)
            for index, (row_tokens, mask) in enumerate(rows):
                tokens[index, : len(row_tokens)] = torch.tensor(row_tokens)
                labels[index, : len(row_tokens)] = torch.tensor(row_tokens).where(torch.tensor(mask), -100)
            yield tokens, labels, [tuple(image for turn in episode for image in turn.images) for episode in episodes]


def _encode(policy: TinyPolicy, episode: list[_Turn], limit: int) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    mask: list[bool] = []
    for turn in episode:
        shown: dict[str, Any] = {"images": turn.images} if turn.images else {}
        prompt, answer = policy.encode_turn(turn.observation, None, **shown), policy.encode_reply(turn.reply)
        tokens += [*prompt, *answer]
        mask += [False] * len(prompt) + [True] * len(answer)
    if len(tokens) > limit:
        raise ConfigError(
            f"a demonstration of {len(episode)} turns has {len(tokens)} tokens, rollout.max_episode_tokens is {limit}: "
            "raise it, or no episode could be played to its end"
        )
    return tokens, mask


def _teachable(config: TrainConfig) -> Teachable:
    env = make_task(config, "train")
    if not isinstance(env, Teachable):
        task = config.run.task
        raise ConfigError(
            f"task {task!r} has no demonstrator: the embedded policy cannot be warm-started on it. "
            "Name another model (--model), or give the task demonstrate() and solution()"
        )
    return env


@contextlib.contextmanager
def _lessons(config: TrainConfig, env: Teachable, name: str) -> Iterator[Callable[[], list[_Turn]]]:
    """What plays one demonstration after the other, each within env.timeout; ``name`` decides which ones."""
    settings, timeout = config.warm_start, config.env.timeout
    rng = np.random.default_rng(derive_seed(settings.seed, name))
    with EnvCalls[list[_Turn]](time_limit=timeout or None) as calls:

        def lesson() -> list[_Turn]:
            calls.call(0, lambda: _demonstration(env, rng, settings.teacher))
            [(_, answer)] = calls.answers(wait=True)
            if calls.hung:
                raise EnvError(
                    f"a demonstration of {config.run.task} took more than {timeout:g} s, and the warm start plays "
                    "thousands: raise env.timeout if that is right"
                )
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield lesson


def _demonstration(env: Teachable, rng: np.random.Generator, teacher: Teacher) -> list[_Turn]:
    """One episode of the teacher on a training level, turn by turn."""
    pictured = env if isinstance(env, Pictured) else None  # asked once: the check is slower than a turn
    turns = []
    with faults_of(env):
        observation, done = env.reset(int(rng.integers(2**62))), False
        while not done:
            images = () if pictured is None else pictured.images()
            turns.append(_Turn(observation, images, _taught(env, rng, teacher)))
            outcome = env.step(turns[-1].reply)
            observation, done = outcome.observation, outcome.done
    return turns


def _taught(env: Teachable, rng: np.random.Generator, teacher: Teacher) -> str:
    """What the teacher says here; where the solver knows no way, the demonstrator speaks."""
    actions = env.solution() if teacher == "solver" else None
    return write_action(actions[0]) if actions else env.demonstrate(rng)
