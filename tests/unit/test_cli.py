"""The command line: help that explains everything, and wrong input that ends in one line and exit code 2."""

import inspect
import json

import pytest

from freshper import __version__, cli, envs
from freshper.training.config import TrainConfig
from freshper.training.config_file import field_paths

COMMANDS = ("train", "compare", "report", "eval", "play", "envs")
TRAIN = ["train", "sokoban"]
COMPARE = ["compare", "sokoban"]

# Words of a command, and what its complaint must say.
WRONG = [
    # The command itself.
    (["nope"], "unknown command 'nope'. Known: compare, envs, eval, play, report, train"),
    (["trian"], "Did you mean 'train'?"),
    (["--bogus"], "unknown command '--bogus'"),
    # A task or a config file.
    (["train", "sokobann"], "unknown task or config file 'sokobann'. Did you mean 'sokoban'?"),
    (["train", "nowhere.toml"], "cannot read the config nowhere.toml"),
    (["train", "broken.toml"], "cannot read the config broken.toml: Expected ']'"),
    (["train", "latin.toml"], "cannot read the config latin.toml: 'utf-8' codec"),
    (["train", "folder.toml"], "Is a directory"),
    (["train", "typo.toml"], "unknown setting run.itertions. Did you mean run.iterations?"),
    (["train", "scalar.toml"], "run = 3: input should be a valid dictionary"),
    (["train", "file"], "unknown task or config file 'file'"),
    (["compare", "sokobann"], "Did you mean 'sokoban'?"),
    # Arms.
    ([*TRAIN, "--arm", "frshper"], "unknown arm 'frshper'. Did you mean 'freshper'?"),
    ([*TRAIN, "--arm", ""], "unknown arm ''"),
    ([*TRAIN, "--arm"], "Missing value for argument '--arm'"),
    ([*TRAIN, "--arm", "on-policy", "--replay.ratio", "1"], "arm on-policy means replay.ratio = 0, not 1"),
    ([*TRAIN, "--arm", "epochs", "--replay.ratio=4"], "arm epochs means replay.ratio = 0, not 4"),
    ([*TRAIN, "--arm", "per", "--replay.freshness.kind", "exponential"], "arm per means replay.freshness.kind = none"),
    ([*COMPARE, "--arms", ""], "0 arms and 3 seeds: at least one of each is needed"),
    ([*COMPARE, "--arms", " , "], "0 arms and 3 seeds"),
    ([*COMPARE, "--arms", "per,prr"], "unknown arm 'prr'. Did you mean 'per'?"),
    ([*COMPARE, "--arms", "per,per"], "an arm is named twice in per, per"),
    ([*COMPARE, "--arms"], "Missing value for argument '--arms'"),
    ([*COMPARE, "--arm", "per"], "Unrecognized options: --arm, per; Perhaps you meant: --arms"),
    ([*COMPARE, "--run.arm", "per"], "--run.arm differs from run to run"),
    ([*COMPARE, "--run.seed=1"], "--run.seed differs from run to run"),
    ([*COMPARE, "--run.folder", "x"], "--run.folder differs from run to run"),
    # Values of settings.
    ([*TRAIN, "--replay.freshness.tau", "-1"], "replay.freshness.tau = '-1': input should be greater"),
    ([*TRAIN, "--replay.freshness.tau", "nan"], "replay.freshness.tau = 'nan'"),
    ([*TRAIN, "--replay.freshness.tau", "inf"], "replay.freshness.tau = 'inf'"),
    ([*TRAIN, "--replay.freshness.tau", "1e-9"], "replay.freshness.tau = '1e-9'"),
    ([*TRAIN, "--replay.alpha", "1e9"], "replay.alpha = '1e9'"),
    ([*TRAIN, "--replay.capacity", "0"], "replay.capacity = '0': input should be greater than or equal to 1"),
    ([*TRAIN, "--replay.capacity=8", "--rollout.episodes=8"], "replay.batch_size 32 exceeds replay.capacity 8"),
    ([*TRAIN, "--replay.freshness.kind", "exp"], "replay.freshness.kind = 'exp': input should be 'exponential' or"),
    ([*TRAIN, "--replay.priority", "rewrad"], "unknown priority 'rewrad'. Did you mean 'reward'?"),
    ([*TRAIN, "--algorithm.advantage", "grpo"], "unknown advantage estimator 'grpo'. Known: reinforce++"),
    ([*TRAIN, "--run.task", "sokban"], "unknown task 'sokban'. Did you mean 'sokoban'?"),
    ([*TRAIN, "--run.seed", "one"], "run.seed = 'one': input should be a valid integer"),
    ([*TRAIN, "--run.seed", "1.5"], "run.seed = '1.5': input should be a valid integer"),
    ([*TRAIN, "--run.seed", "-1"], "run.seed = '-1': input should be greater than or equal to 0"),
    ([*TRAIN, "--warm_start.seed", "9" * 30], "warm_start.seed = '999999"),
    # Settings that are none.
    ([*TRAIN, "--run.sede", "3"], "unknown setting run.sede. Did you mean run.seed?"),
    ([*TRAIN, "--runn.seed=3"], "unknown setting runn.seed. Did you mean run.seed?"),
    ([*TRAIN, "--replay.freshness", "none"], "unknown setting replay.freshness. Did you mean replay.freshness.kind?"),
    ([*TRAIN, "--run.seed"], "--run.seed needs a value"),
    ([*TRAIN, "--seed", "3"], "Unrecognized options: --seed, 3; a setting is named with its section, as in --run.seed"),
    ([*COMPARE, "--tau", "3"], "Unrecognized options: --tau, 3; a setting is named with its section"),
    ([*TRAIN, "extra"], "Unrecognized options: extra"),
    ([*TRAIN, "-x"], "Unrecognized options: -x"),
    # Where a run or a comparison goes.
    ([*TRAIN, "--run.folder", "file"], "cannot make the run folder file: File exists"),
    ([*TRAIN, "--run.folder", "file/run"], "cannot make the run folder file/run: Not a directory"),
    ([*TRAIN, "--run.folder", "run"], "run holds a run already: choose another with --run.folder"),
    ([*COMPARE, "--folder", "file"], "cannot make the folder file: File exists"),
    ([*COMPARE, "--folder", "broken"], "cannot read broken/compare.json"),
    ([*COMPARE, "--folder"], "Missing value for argument '--folder'"),
    # Counts.
    ([*COMPARE, "--seeds", "0"], "seeds 0 must be >= 1"),
    ([*COMPARE, "--seeds", "-2"], "seeds -2 must be >= 1"),
    ([*COMPARE, "--seeds", "1.5"], "Error parsing --seeds: invalid literal for int() with base 10: '1.5'"),
    ([*COMPARE, "--seeds", "three"], "Error parsing --seeds"),
    ([*COMPARE, "--jobs", "0"], "jobs 0 must be >= 1"),
    ([*COMPARE, "--jobs", "-1"], "jobs -1 must be >= 1"),
    # report
    (["report"], "Missing from freshper report: PATH Run folder, or folder of a comparison"),
    (["report", "nowhere"], "nowhere is not a folder"),
    (["report", "file"], "file is not a folder"),
    (["report", "empty"], "empty has no config.toml"),
    (["report", "broken"], "broken/compare.json is not valid JSON"),
    (["report", "run", "--json"], "run is a single run; --json prints the numbers of a comparison"),
    (["report", "run", "extra"], "Unrecognized options: extra"),
    # eval
    (["eval"], "Missing from freshper eval: PATH Run folder"),
    (["eval", "nowhere"], "nowhere is no run folder"),
    (["eval", "file"], "file is no run folder"),
    (["eval", "empty"], "empty is no run folder"),
    (["eval", "run"], "run holds no best policy yet"),
    (["eval", "run", "--episodes", "0"], "episodes 0 must be >= 1"),
    (["eval", "run", "--episodes", "-1"], "episodes -1 must be >= 1"),
    (["eval", "run", "--episodes", "many"], "Error parsing --episodes"),
    (["eval", "run", "--seed", "-1"], "seed -1 >= 0"),
    (["eval", "run", "--which", "first"], "invalid choice 'first' for argument '--which'"),
    (["eval", "run", "extra"], "Unrecognized options: extra"),
    # play
    (["play"], "Missing from freshper play: STR Run folder, or a task"),
    (["play", "sokobann"], "unknown run folder or task 'sokobann'. Did you mean 'sokoban'?"),
    (["play", "file"], "unknown run folder or task 'file'"),
    (["play", "empty"], "empty is no run folder"),
    (["play", "run", "--which", "last"], "run holds no last policy yet"),
    (["play", "sokoban", "--seed", "-1"], "seed -1 must be >= 0"),
    (["play", "run", "--seed", "-1"], "seed -1 must be >= 0"),
    (["play", "sokoban", "--seed", "x"], "Error parsing --seed"),
    (["play", "sokoban", "extra"], "Unrecognized options: extra"),
    # envs
    (["envs", "extra"], "Unrecognized options: extra"),
    (["envs", "--bogus"], "Unrecognized options: --bogus"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that can be wrong in it."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("empty", "run", "broken", "folder.toml"):
        (folder / name).mkdir()
    (folder / "file").touch()
    (folder / "run" / "config.toml").write_text('[run]\ntask = "sokoban"\n')
    (folder / "run" / "metrics.jsonl").touch()
    (folder / "broken" / "compare.json").write_text("{")
    (folder / "broken.toml").write_text("[run\n")
    (folder / "latin.toml").write_bytes(b"# caf\xe9\n")
    (folder / "typo.toml").write_text("[run]\nitertions = 3\n")
    (folder / "scalar.toml").write_text("run = 3\n")
    return folder


def _files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.name != ".lock"}


@pytest.mark.parametrize(
    ("words", "complaint"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_wrong_input_is_one_line_and_exit_code_2(place, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(place)
    monkeypatch.setenv(
        "FRESHPER_CACHE", str(place / "file" / "cache")
    )  # what is not refused must not train for minutes
    before = _files(place)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("freshper: ")
    assert complaint in err
    assert not set("╭│╰─") & set(err), "the frame of a box is no part of a sentence"
    assert _files(place).keys() == before.keys(), "a refused command leaves nothing behind"


def _sentences(words, capsys):
    """The help of a command, its frames and line breaks taken out; also where it was asked for by SystemExit."""
    try:
        code = cli.main(words)
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert (code or 0, err) == (0, "")
    return " ".join("".join(sign for sign in out if sign not in "│╭╮╰╯─").split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_explains_every_argument(command, flag, capsys):
    text = _sentences([command, flag], capsys)
    kind, _ = cli._COMMANDS[command]
    assert text.startswith(f"usage: freshper {command}")
    assert " ".join(kind.__doc__.split()) in text
    source = inspect.getsource(kind)
    sentences = [line.strip().strip('"') for line in source.splitlines() if line.strip().startswith('"""')][1:]
    assert len(sentences) >= len(kind.__dataclass_fields__)
    assert [sentence for sentence in sentences if sentence and sentence not in text] == []


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_explains_every_setting(command, capsys):
    text = _sentences([command, "sokoban", "--replay.freshness.tau", "3", "--help"], capsys)
    assert len(field_paths()) > 50
    for path in field_paths():
        assert f"--{path.replace('_', '-')} " in text
        assert _sentence(path) in text


def _sentence(path):
    section = TrainConfig
    *parents, name = path.split(".")
    for parent in parents:
        section = section.model_fields[parent].annotation
    return " ".join(section.model_fields[name].description.split())


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]], ids=["nothing", "--help", "-h"])
def test_the_overview_names_every_command(words, capsys):
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert tuple(cli._COMMANDS) == COMMANDS
    for name, (command, _) in cli._COMMANDS.items():
        assert f"  {name:9} {command.__doc__.splitlines()[0]}\n" in out


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"freshper {__version__}\n"


def test_envs_lists_the_tasks_one_a_line(capsys):
    assert cli.main(["envs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == envs.task_names()
    assert [line.split(maxsplit=1)[1] for line in lines] == [envs.describe(task) for task in envs.task_names()]


def test_envs_as_json(capsys):
    assert cli.main(["envs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {task: envs.describe(task) for task in envs.task_names()}


def test_a_task_without_a_preset_trains_with_the_defaults(monkeypatch):
    seen = []
    monkeypatch.setattr("freshper.training.loop.train", lambda config, **options: seen.append(config) or _leave())
    with pytest.raises(KeyError):
        cli.main(
            ["train", "sokoban-hard", "--replay.freshness.tau=30", "--replay.batch-size", "16", "--arm", "recency"]
        )
    (config,) = seen
    assert (config.run.task, config.run.arm, config.replay.priority) == ("sokoban-hard", "recency", "uniform")
    assert (config.replay.freshness.tau, config.replay.batch_size) == (30, 16)


def _leave():
    raise KeyError("far enough")


def test_programming_errors_keep_their_traceback(monkeypatch):
    """Only what was raised on purpose becomes a line: a bug of ours must stay visible."""

    def broken(words, console):
        raise ModuleNotFoundError("No module named 'freshper.gone'", name="freshper.gone")

    monkeypatch.setitem(cli._COMMANDS, "envs", (cli.EnvsCommand, broken))
    with pytest.raises(ModuleNotFoundError, match="gone"):
        cli.main(["envs"])
