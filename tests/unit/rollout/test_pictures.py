"""Pictures on their way from the environment to the policy and into the trajectory."""

import pytest

from freshper.envs.core import Outcome
from freshper.errors import ConfigError, EnvError
from freshper.policies.scripted import ScriptedPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams, StopReason


class Album:
    """Shows some pictures, more in every turn; ``shows`` are those of each turn, the last ones at the end."""

    task, instructions, max_turns = "album", "Look.", 9

    def __init__(self, *shows):
        self.shows, self.turn = shows, 0

    def reset(self, seed):
        self.turn = 0
        return "look 0"

    def step(self, reply):
        self.turn += 1
        done = self.turn == len(self.shows) - 1
        return Outcome(f"look {self.turn}", 1.0, done, done, True)

    def images(self):
        return self.shows[self.turn]


class Seeing(ScriptedPolicy):
    """Remembers what it was shown, and cannot read what begins with "bad"."""

    def __init__(self):
        super().__init__(lambda observation: "ok")
        self.encoded, self.submitted = [], []

    def encode_turn(self, observation, instructions, *, cut=False, images=()):
        if any(image.startswith(b"bad") for image in images):
            raise EnvError("a picture cannot be decoded")
        self.encoded.append((observation, tuple(images)))
        return super().encode_turn(observation, instructions, cut=cut)

    def begin(self, count, sampling, seed):
        conversations = super().begin(count, sampling, seed)
        submit = conversations.submit

        def seeing(row, prompt, max_tokens, images=()):
            self.submitted.append((row, tuple(images)))
            submit(row, prompt, max_tokens)

        conversations.submit = seeing
        return conversations

    def picture_inputs(self, tokens, images):
        return {}


def gather(policy, *envs, **how):
    starts = [Start(n, f"{n}") for n in range(len(envs))]
    return collect(envs, policy, starts, limits=Limits(100, 10_000), sampling=SamplingParams(), seed=0, **how)


@pytest.mark.parametrize("how", [{}, {"env_timeout": 30.0}, {"env_threads": 2}])
def test_pictures_reach_the_policy_and_the_trajectory_in_order(how):
    policy = Seeing()
    shows = (b"a", b"b"), (), (b"c",), (b"end",)
    rollout = gather(policy, Album(*shows), **how)
    assert policy.encoded == [("look 0", shows[0]), ("look 1", shows[1]), ("look 2", shows[2])]
    assert policy.submitted == [(0, shows[0]), (0, shows[1]), (0, shows[2])]
    (trajectory,), (transcript,) = rollout.trajectories, rollout.transcripts
    assert trajectory.images == (b"a", b"b", b"c")  # what is shown at the end is no part of what was answered
    assert [turn.images for turn in trajectory.turns] == [2, 0, 1]
    assert [turn.images for turn in transcript.turns] == list(shows[:3])
    assert transcript.final_images == (b"end",)


@pytest.mark.parametrize(
    "shows", [((b"bad",), (b"x",)), ((b"a",), (b"bad",), ()), (("text",), ()), ((b"",), ()), (7, 7)]
)
def test_a_picture_that_is_none_ends_its_episode_alone(shows):
    rollout = gather(Seeing(), Album(*shows), Album((b"a",), ()))
    assert [t.stop_reason for t in rollout.transcripts] == [StopReason.ERROR, StopReason.TERMINATED]
    assert len(rollout.trajectories) == 1


def test_a_policy_of_text_alone_is_refused():
    with pytest.raises(ConfigError, match="task 'album' shows pictures, and ScriptedPolicy reads none"):
        gather(ScriptedPolicy(lambda observation: "ok"), Album((b"a",), ()))


def test_a_policy_that_sees_plays_text_too():
    policy = Seeing()
    rollout = gather(policy, Album((), (), ()))
    assert rollout.trajectories[0].images == ()
    assert policy.submitted == [(0, ()), (0, ())]
