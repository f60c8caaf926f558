"""OpenEnv servers as environments, over real sockets."""

import gc
import importlib.util
from functools import partial
from pathlib import Path

import pytest

from freshper.envs import check_env, make_env, write_action
from freshper.envs.contract import check_splits
from freshper.errors import ConfigError, EnvError, UnknownNameError

_spec = importlib.util.spec_from_file_location("openenv_server", Path(__file__).with_name("openenv_server.py"))
server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(server)

TRANSPORTS = ("http", "websocket")


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    if request.param == "websocket":
        pytest.importorskip("websockets", reason="sessions need the extra openenv")
    return request.param


def serving(transport, told=None, **more):
    told = told or server.pages(server.schema())
    if transport == "http":
        return server.http_server(server.Game(), told, **more)
    return server.websocket_server(server.Game, told, **more)


def test_sessions_keep_the_contract():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket") as task:
        for split in ("train", "eval"):
            check_env(partial(make_env, task, split), [write_action(str(number)) for number in range(1, 10)])
        check_splits(make_env(task, "train"), make_env(task, "eval"))


def solve(env, seed=0):
    env.reset(seed)
    for number in range(1, 10):
        outcome = env.step(write_action(str(number)))
        if outcome.done:
            return outcome
    return None


def test_an_episode(transport):
    with serving(transport) as task:
        env = make_env(task, transport=transport)
        assert env.instructions == (
            "You act in Game: Guess a number.\nYou have 20 turns. Reply like this: <answer> ... </answer>, with "
            "number: integer, Your guess."
        )
        assert env.reset(0).startswith("from 1 to ")
        first = env.step(write_action("0"))
        assert (first.observation, first.reward, first.done) == ("text: higher\ntries: 1", 0.0, False)
        assert env.state()["step_count"] == 1
        last = solve(env)
        assert (last.reward, last.success) == (1.0, True)
        env.close()
        assert solve(env).success


@pytest.mark.parametrize("reply", ["1", "<answer>one</answer>", "<answer>[</answer>", "<answer></answer>"])
def test_a_reply_that_cannot_be_read_does_not_reach_the_server(transport, reply):
    with serving(transport) as task:
        env = make_env(task, transport=transport, split_by="seed")
        first = env.reset(0)
        outcome = env.step(reply)
        assert (outcome.observation, outcome.reward, outcome.valid) == (first, -0.15, False)
        assert env.state()["step_count"] == 0


def test_what_the_server_does_not_take_is_shown(transport):
    with serving(transport) as task:
        env = make_env(task, transport=transport)
        env.reset(0)
        outcome = env.step(write_action('"one"'))
        assert outcome.observation == "error: number: Input should be a valid integer"
        assert (outcome.reward, outcome.valid, outcome.done) == (-0.15, False, False)
        assert env.step(write_action("0")).observation.startswith("text: higher")


def test_an_environment_that_raises_ends_its_episode_only():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket") as task:
        env = make_env(task)
        env.reset(0)
        with pytest.raises(EnvError, match=r"step: 'thirteen' \(EXECUTION_ERROR\)|step: thirteen"):
            env.step(write_action("13"))
        assert solve(env).success


def test_a_full_server_says_so_and_lets_in_who_comes_later():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket", sessions=1) as task:
        first, second = make_env(task), make_env(task)
        assert first.reset(0)
        with pytest.raises(EnvError, match=r"the server is full.*CAPACITY_REACHED"):
            second.reset(0)
        first.close()
        assert solve(make_env(task)).success


def test_a_forgotten_environment_leaves_its_session():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket", sessions=1) as task:
        env = make_env(task)
        env.reset(0)
        del env
        gc.collect()
        assert solve(make_env(task)).success


def test_a_session_that_is_gone_ends_the_episode():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket") as task:
        env = make_env(task)
        env.reset(0)
        env._session._connection.close()
        with pytest.raises(EnvError, match="the session broke at step"):
            env.step(write_action("1"))
        with pytest.raises(EnvError, match="the session is gone"):
            env.state()
        assert solve(env).success


@pytest.mark.parametrize("answer", ["nonsense", "[]", '{"type": "observation"}', '{"type": "error"}'])
def test_another_protocol_is_an_error(answer):
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    broken = r"another protocol|the session broke|\("
    with serving("websocket", raw=answer) as task, pytest.raises(EnvError, match=broken):
        make_env(task).reset(0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ((500, {"detail": "boom"}), r"answered \{'detail': 'boom'\} \(500\)"),
        ((200, b"<html>"), "which is no JSON"),
        ((200, [1]), r"answered \[1\]"),
        ((200, {"observation": "text", "done": False}), "observation 'text' is no JSON object"),
        ((200, {"observation": {}, "done": True}), "is over before it begins"),
    ],
)
def test_a_server_that_answers_nonsense_is_an_error(raw, message):
    with serving("http", raw=raw) as task, pytest.raises(EnvError, match=message):
        make_env(task, transport="http", split_by="seed").reset(0)


@pytest.mark.parametrize(("reward", "done"), [("1", False), (None, 1), ([], False)])
def test_rewards_that_are_none_are_an_error(reward, done):
    with serving("http") as task:
        env = make_env(task, transport="http")
        env.reset(0)
        env._session.ask = lambda *_: {"observation": {"a": 1}, "reward": reward, "done": done}
        with pytest.raises(EnvError, match="the server answered reward"):
            env.step(write_action("1"))


TEXT = {"code": {"type": "string"}, "more": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}


@pytest.mark.parametrize(
    ("fields", "required", "options", "reply", "action"),
    [
        (TEXT, ["code"], {}, "<answer> x = 1 </answer>", {"code": "x = 1"}),
        (TEXT, ["code"], {"whole_reply": True}, "x = 1", {"code": "x = 1"}),
        (TEXT, ["code"], {"action_field": "more"}, "<answer>3</answer>", {"more": 3}),
        (TEXT, ["code", "more"], {}, '<answer>{"code": "a", "more": 2}</answer>', {"code": "a", "more": 2}),
        (TEXT, [], {}, "<answer>[1]</answer>", None),
        ({"move": {"enum": ["up"], "type": "string"}}, ["move"], {}, "<answer>up</answer>", {"move": "up"}),
        ({"move": {"$ref": "#/x"}}, ["move"], {}, "<answer>up</answer>", {"move": "up"}),
    ],
)
def test_how_a_reply_becomes_an_action(fields, required, options, reply, action):
    with serving("http", server.pages(server.schema(fields, required))) as task:
        env = make_env(task, transport="http", **options)
        assert env._form.read(reply) == action
        assert env.free_form is bool(options.get("whole_reply"))


def test_instructions_name_every_field():
    with serving("http", server.pages(server.schema(TEXT, []), named=False)) as task:
        shown = make_env(task, transport="http").instructions
    assert shown.startswith("You act in an environment.\n")
    assert '"code": string, "more": integer/null' in shown


def test_observations_and_resets_as_one_likes():
    with serving("http") as task:
        env = make_env(task, transport="http", observation_field="text", reset={"hint": "!"})
        assert env.reset(0).endswith("!")
        assert env.step(write_action("0")).observation == "higher"
        with pytest.raises(UnknownNameError, match=r"unknown observation_field 'txt'. Did you mean 'text'"):
            make_env(task, transport="http", observation_field="txt").reset(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "htp"}, "unknown transport 'htp'. Did you mean 'http'"),
        ({"timeout": 0}, "timeout 0 must be above 0"),
        ({"split_by": "env"}, "know no splits"),
        ({"action_field": "numbr"}, "Did you mean 'number'"),
        ({"whole_reply": True}, "whole_reply needs an action with one field of text"),
        ({"max_turn": 3}, "Did you mean 'max_turns'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with serving("http") as task, pytest.raises(ConfigError, match=message):
        make_env(task, **options)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://"])
def test_wrong_addresses_are_named(url):
    with pytest.raises(ConfigError, match="must be openenv:http://HOST:PORT"):
        make_env(f"openenv:{url}")


def test_a_server_that_is_not_there_is_named():
    with serving("http") as task:
        pass
    with pytest.raises(ConfigError, match="no OpenEnv server answers"):
        make_env(task)


def test_a_server_of_another_kind_is_named():
    with serving("http", {"/schema": (200, {})}) as task, pytest.raises(ConfigError, match="is it an OpenEnv server"):
        make_env(task)


def test_a_server_that_hangs_is_given_up():
    pytest.importorskip("websockets", reason="sessions need the extra openenv")
    with serving("websocket") as task:
        env = make_env(task)
        env.reset(0)
        env._session._timeout = 0.05
        env._session._connection.send = lambda _: None  # the message never arrives
        with pytest.raises(EnvError, match=r"no answer to step within 0.05 s"):
            env.step(write_action("1"))
