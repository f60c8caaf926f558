"""What the doctor finds out about a machine and a config."""

import pytest

from freshper.errors import ConfigError, DivergedError
from freshper.training import doctor, loop
from freshper.training.config_file import make_config, merged

GIB = 2**30
SMALL = {
    "run": {"task": "frozenlake", "iterations": 40},
    "rollout": {"episodes": 4, "max_episode_tokens": 256},
    "tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "context": 256},
    "warm_start": {"updates": 10},
    "optimizer": {"warmup_updates": 100},
    "eval": {"every": 10, "episodes": 12},
    "replay": {"batch_size": 4, "ratio": 3},
    "checkpoint": {"every": 8},
}


def _config(**changes):
    return make_config(merged(SMALL, changes))


def test_the_machine_is_described():
    facts = doctor.hardware()
    assert facts["cpus"] >= 1
    assert 0 < facts["free"] <= facts["memory"]
    assert all(gpu["free"] <= gpu["memory"] for gpu in facts["gpus"])


def test_only_what_a_config_asks_for_is_needed():
    plain = _config(log={"tensorboard": False})
    assert doctor.needed_libraries(plain) == []
    asked = _config(log={"wandb": "project", "mlflow": "experiment"})
    assert [library for library, _, _ in doctor.needed_libraries(asked)] == ["tensorboard", "wandb", "mlflow"]


def test_what_is_missing_is_named_with_its_setting_and_its_extra(monkeypatch):
    looked_for = []
    monkeypatch.setattr(doctor, "find_spec", looked_for.append)
    assert doctor.missing_libraries(_config(log={"tensorboard": False, "trackio": "project"})) == [
        "log.trackio needs trackio: pip install 'freshper[trackio]'"
    ]
    assert looked_for == ["trackio"]


def test_a_folder_that_is_not_there_yet_is_tried_where_it_would_be_made(tmp_path):
    facts = doctor.folder_facts(tmp_path / "runs" / "new")
    assert (facts["writable"], facts["problem"]) == (True, "")
    assert facts["free"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    facts = doctor.folder_facts(tmp_path / "file" / "runs")
    assert not facts["writable"]
    assert facts["problem"] == "Not a directory"


def test_a_small_config_fits():
    facts = doctor.memory_facts(_config())
    assert facts["fits"]
    assert facts["changes"] == {}
    assert 0 < facts["peak"] < facts["free"]
    assert "AdamW moments" in facts["table"]


def test_the_estimate_follows_the_settings():
    def peak(**changes):
        return doctor.memory_facts(_config(**changes))["peak"]

    small = peak()
    assert peak(tiny={"hidden_size": 64}) > small
    assert peak(rollout={"episodes": 16}) > small
    assert peak(optimizer={"token_budget": 256}) < small, "fewer tokens in a pass"
    assert peak(optimizer={"token_budget": 10**6}) == small, "a batch has no more tokens than its episodes"


def test_what_does_not_fit_comes_with_a_setting_that_takes_less(monkeypatch):
    config = _config(optimizer={"token_budget": 2048}, rollout={"episodes": 64})
    need = doctor.memory_facts(config)["peak"]
    monkeypatch.setattr(doctor, "_memory", lambda: (need, need - 1))
    facts = doctor.memory_facts(config)
    assert not facts["fits"]
    assert list(facts["changes"]) == ["optimizer.token_budget 512"], "the embedded policy has no other choice"
    assert facts["changes"]["optimizer.token_budget 512"] < need


def test_a_model_of_ones_own_has_more_choices_and_they_add_up(monkeypatch):
    from transformers import LlamaConfig

    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
    monkeypatch.setattr(doctor, "_model_config", lambda config: LlamaConfig(vocab_size=8000, **shape))
    monkeypatch.setattr(doctor, "_memory", lambda: (2**20, 2**20))
    facts = doctor.memory_facts(_config(policy={"model": "some/model", "device": "cpu"}))
    names = list(facts["changes"])
    assert {"policy.gradient_checkpointing true", "policy.dtype bfloat16", "lora.rank 16"} <= set(names)
    assert all(size < facts["peak"] for size in facts["changes"].values())
    assert facts["changes"]["all of these"] < min(facts["changes"][name] for name in names[:-1])


def test_nearly_full_does_not_fit(monkeypatch):
    config = _config()
    need = doctor.memory_facts(config)["peak"]
    for free, fits in ((int(need * 1.05), False), (int(need * 1.2), True)):
        monkeypatch.setattr(doctor, "_memory", lambda free=free: (64 * GIB, free))
        assert doctor.memory_facts(config)["fits"] == fits


def test_a_model_that_cannot_be_had_is_an_error(tmp_path):
    with pytest.raises(ConfigError):
        doctor.memory_facts(_config(policy={"model": str(tmp_path / "nothing")}))


@pytest.fixture
def tried(monkeypatch):
    """Puts a run in the place of the real one; returns the configs that were run."""

    def install(*rows):
        configs = []

        def train(config, *, on_iteration, note):
            configs.append(config)
            for row in rows:
                on_iteration(row)

        monkeypatch.setattr(loop, "train", train)
        return configs

    return install


def test_two_iterations_tell_the_time_of_the_whole_run(tried):
    first = {"time/rollout_s": 90.0, "time/update_s": 90.0}
    second = {
        "time/rollout_s": 2.0,
        "time/update_s": 3.0,
        "time/eval_s": 8.0,
        "time/checkpoint_s": 0.5,
        "time/tokens_per_s": 1e3,
        "replay/updates": 3.0,
    }
    configs = tried(first, second)
    facts = doctor.time_iterations(_config())
    (config,) = configs
    assert (config.run.iterations, config.eval.episodes, config.optimizer.warmup_updates) == (2, 4, 0)
    assert not config.log.tensorboard
    assert config.replay == _config().replay
    # 4 of 12 episodes were played; one evaluation before RL, and 40 / 10; 40 / 8 checkpoints.
    assert facts["seconds"] == {"rollout": 2.0, "update": 3.0, "eval": 24.0, "checkpoint": 0.5}
    assert facts["iteration"] == 5.0
    assert facts["run"] == 40 * 5.0 + 5 * 24.0 + 5 * 0.5
    assert (facts["tokens_per_s"], facts["replay_updates"]) == (1e3, 3)
    assert facts["memory"]["process"] > 2**20


def test_replay_that_has_not_begun_yet_is_counted(tried):
    tried({"time/rollout_s": 1.0, "time/update_s": 2.0, "replay/updates": 0.0})
    facts = doctor.time_iterations(_config())
    assert facts["seconds"]["update"] == 8.0  # one fresh update was timed; three replay updates come with it


def test_what_a_run_raises_is_raised(monkeypatch):
    def train(config, **listeners):
        raise DivergedError("too many")

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(DivergedError, match="too many"):
        doctor.time_iterations(_config())


def test_two_real_iterations(monkeypatch, tmp_path):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    notes = []
    facts = doctor.time_iterations(_config(), notes.append)
    assert {"rollout", "update", "eval"} <= facts["seconds"].keys()
    assert facts["replay_updates"] == 3
    assert all(facts["seconds"][part] > 0 for part in ("rollout", "update", "eval"))
    assert facts["run"] > 40 * facts["iteration"]
    assert notes
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "the run itself leaves nothing behind"
