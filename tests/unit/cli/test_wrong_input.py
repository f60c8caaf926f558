"""Wrong input ends in one line and exit code 2, and leaves nothing behind."""

import pytest

from freshper import cli

TRAIN = ["train", "sokoban"]
COMPARE = ["compare", "sokoban"]

# Words of a command, and what its complaint must say.
WRONG = [
    # The command itself.
    (["nope"], "unknown command 'nope'. Known: compare, doctor, envs, eval, export, inspect, play, report, serve-"),
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
    (
        [*TRAIN, "--replay.freshness.kind", "exp"],
        "replay.freshness.kind = 'exp': input should be 'exponential', 'none' or 'auto'",
    ),
    ([*TRAIN, "--replay.priority", "rewrad"], "unknown priority 'rewrad'. Did you mean 'reward'?"),
    ([*TRAIN, "--algorithm.advantage", "grpoo"], "unknown advantage estimator 'grpoo'. Did you mean 'grpo'?"),
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
    (["envs", "extra"], "invalid choice 'extra'"),
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
    (folder / "run" / "metrics.jsonl").write_text("{}\n")
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
