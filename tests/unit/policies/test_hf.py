"""A Hugging Face model as a policy: its turns, its replies, its folder."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freshper.envs import make_env
from freshper.errors import ConfigError, PolicyError, SnapshotError
from freshper.policies.core import check_policy, reply_all
from freshper.policies.hf import HFPolicy
from freshper.policies.loading import load_model
from freshper.policies.lora import Lora
from freshper.policies.saved import read_facts
from freshper.policies.tiny import TinyPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

IDS = torch.tensor([[0, 40, 41, 42, 43, 44, 1]])


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.clone()


def shake(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(params=["llama", "gpt2", "gemma2"])
def kind(request):
    return request.param


@pytest.fixture
def folder(tmp_path, kind):
    zoo.write_model(tmp_path / "base", kind)
    return tmp_path / "base"


def policy_of(folder, version=0, **arguments):
    return HFPolicy(load_model(str(folder), device="cpu", **arguments), version)


@pytest.mark.parametrize("rank", [0, 4])
def test_it_keeps_the_contract(folder, rank):
    policy = policy_of(folder, lora=Lora(rank=rank))
    shake(policy.model)
    check_policy(policy, policy.encode_turn("####\n#P_#", "Push the box."))


def test_turns_are_those_of_the_chat_template(folder):
    policy = policy_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Push the box."}, {"role": "user", "content": "####\n#P_#"}]
    said = [*policy.tokenizer.encode("<answer> Left </answer>"), 1]
    ours = policy.encode_turn("####\n#P_#", "Push the box.") + said
    ours += policy.encode_turn("#_P#", None)
    messages += [{"role": "assistant", "content": "<answer> Left </answer>"}, {"role": "user", "content": "#_P#"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours == whole
    assert policy.decode(said) == "<answer> Left </answer>"
    assert policy.encode_turn("#_P#", None, cut=True) == [1, *policy.encode_turn("#_P#", None)]
    assert policy.encode_turn("#P#", "")[-3:] == policy.encode_turn("#P#", "Go")[-3:]


def test_an_end_token_beside_the_template_s_ends_a_reply_too(tmp_path):
    zoo.write_model(tmp_path)
    facts = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(facts | {"eos_token_id": [1, 3]}))
    policy = policy_of(tmp_path)
    ends = torch.tensor(3)
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, ends, 1e4))
    [reply] = reply_all(policy.begin(1, SamplingParams(0.0), 0), [0], [policy.encode_turn("a", "b")], [5])
    assert reply.tokens == (3,)
    assert not reply.cut
    assert policy.decode(reply.tokens) == ""


@pytest.mark.parametrize("rank", [0, 4])
def test_an_episode_s_log_probs_are_the_model_s_own(tmp_path, kind, rank):
    zoo.write_model(tmp_path, kind, max_position_embeddings=1024)
    policy = policy_of(tmp_path, version=3, lora=Lora(rank=rank))
    shake(policy.model)
    envs = [make_env("sokoban", split="train") for _ in range(3)]
    starts = [Start(seed, f"group-{seed}") for seed in range(3)]
    limits = Limits(max_reply_tokens=6, max_episode_tokens=900, max_turns=2)
    rollout = collect(envs, policy, starts, limits=limits, sampling=SamplingParams(), seed=1)
    assert rollout.errors == ()
    assert [len(trajectory.turns) for trajectory in rollout.trajectories] == [2, 2, 2]
    for trajectory in rollout.trajectories:
        assert trajectory.policy_version == 3
        tokens = torch.tensor(trajectory.tokens.tolist())[None]
        with torch.inference_mode():
            every = torch.log_softmax(policy.model(input_ids=tokens).logits[0, :-1], -1)
        ours = every.gather(-1, tokens[0, 1:, None])[:, 0]
        mask = torch.tensor(trajectory.response_mask.tolist())[1:]
        recorded = torch.tensor(trajectory.behavior_logprobs.tolist())[1:]
        torch.testing.assert_close(recorded[mask], ours[mask], rtol=0, atol=1e-4)


def test_a_conversation_longer_than_the_model_is_refused(folder):
    policy = policy_of(folder)
    with pytest.raises(PolicyError, match="limit is 256"):
        policy.begin(1, SamplingParams(), 0).submit(0, [5] * 250, 10)


def test_publish_changes_weights_and_version(folder):
    policy = policy_of(folder)
    other = policy_of(folder).model
    shake(other)
    policy.publish(other, 5)
    assert policy.version == 5
    assert policy.model is other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_policy_comes_back_the_same(folder, tmp_path, dtype):
    policy = policy_of(folder, version=7, dtype=dtype)
    shake(policy.model)
    policy.save(tmp_path / "saved")
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert loaded.version == 7
    assert str(loaded.model.dtype) == f"torch.{dtype}"
    assert torch.equal(logits(loaded.model), logits(policy.model))
    assert loaded.end_tokens == policy.end_tokens
    assert loaded.encode_turn("#P#", "Go") == policy.encode_turn("#P#", "Go")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=getattr(torch, dtype))
    assert torch.equal(logits(plain), logits(policy.model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_adapters_come_back_on_their_base(folder, tmp_path, dtype):
    policy = policy_of(folder, version=7, dtype=dtype, lora=Lora(rank=4, targets="all-linear"))
    shake(policy.model)
    policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert loaded.version == 7
    assert torch.equal(logits(loaded.model), logits(policy.model))
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert {name for name, p in loaded.model.named_parameters() if p.requires_grad} == names
    other = HFPolicy.load(tmp_path / "saved", device="cpu", dtype="bfloat16" if dtype == "float32" else "float32")
    torch.testing.assert_close(logits(other.model).float(), logits(policy.model).float(), rtol=0.2, atol=0.3)
    assert other.dtype != policy.dtype
    other.save(tmp_path / "again")
    assert HFPolicy.load(tmp_path / "again", device="cpu").dtype == other.dtype


def test_adapters_are_refused_on_other_weights(folder, tmp_path):
    policy = policy_of(folder, lora=Lora(rank=4))
    policy.save(tmp_path / "saved")
    zoo.write_model(folder, policy.model.config.model_type, seed=9)
    with pytest.raises(SnapshotError, match="trained on other weights"):
        HFPolicy.load(tmp_path / "saved", device="cpu")
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        HFPolicy.load(tmp_path / "saved", device="cpu")


def test_training_a_loaded_policy_leaves_its_folder_alone(folder, tmp_path):
    """Weights are mapped from the file: what is written to them must not go back there."""
    policy_of(folder).save(tmp_path / "saved")
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    shake(loaded.model)
    assert read_facts(tmp_path / "saved")
    again = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert not torch.equal(logits(again.model), logits(loaded.model))


@pytest.mark.parametrize("rank", [0, 4])
def test_every_damaged_file_is_noticed(tmp_path, rank):
    zoo.write_model(tmp_path / "base")
    policy_of(tmp_path / "base", lora=Lora(rank=rank)).save(tmp_path / "saved")
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "freshper.json"} < names
    for name in names:
        content = (tmp_path / "saved" / name).read_bytes()
        (tmp_path / "saved" / name).write_bytes(content[:-3])
        with pytest.raises(SnapshotError, match="saved"):
            HFPolicy.load(tmp_path / "saved", device="cpu")
        (tmp_path / "saved" / name).write_bytes(content)
    assert HFPolicy.load(tmp_path / "saved", device="cpu").version == 0


def test_a_policy_of_another_engine_is_refused(tiny, tmp_path):
    assert isinstance(tiny, TinyPolicy)
    tiny.save(tmp_path)
    with pytest.raises(SnapshotError, match="engine tiny, not hf"):
        HFPolicy.load(tmp_path)


def test_generation_settings_that_contradict_each_other_can_be_saved(tmp_path):
    """Instruct models come with a temperature for people; transformers refuses to save it without do_sample."""
    zoo.write_model(tmp_path / "base")
    facts = json.loads((tmp_path / "base" / "generation_config.json").read_text())
    settings = json.dumps(facts | {"do_sample": False, "temperature": 0.6, "top_p": 0.9})
    (tmp_path / "base" / "generation_config.json").write_text(settings)
    policy = policy_of(tmp_path / "base")
    policy.save(tmp_path / "saved")
    assert torch.equal(logits(HFPolicy.load(tmp_path / "saved", device="cpu").model), logits(policy.model))
