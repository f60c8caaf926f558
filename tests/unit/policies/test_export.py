"""A saved policy as a plain folder: transformers loads it, and it says the same."""

import importlib.util
import io
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from freshper.cli.export import run_export
from freshper.errors import ConfigError, RunFolderError, SnapshotError
from freshper.policies.export import export
from freshper.policies.hf import HFPolicy
from freshper.policies.loading import load_model
from freshper.policies.lora import Lora
from freshper.policies.tiny import TinyPolicy

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

IDS = torch.tensor([[0, 40, 41, 42, 43, 44, 1]])


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.float()


def saved_policy(folder, kind="llama", dtype="float32", rank=0):
    """A policy that has been trained a little, in ``folder / "saved"``."""
    zoo.write_model(folder / "base", kind)
    loaded = load_model(str(folder / "base"), device="cpu", dtype=dtype, lora=Lora(rank=rank))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policy = HFPolicy(loaded, version=4)
    policy.save(folder / "saved")
    return policy


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("merge", [False, True])
def test_a_whole_model_is_the_same_bit_for_bit(tmp_path, kind, merge):
    policy = saved_policy(tmp_path, kind)
    facts = export(tmp_path / "saved", tmp_path / "out", merge=merge)
    assert facts["policy_version"] == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(model), logits(policy.model))
    assert not (tmp_path / "out" / "freshper.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == zoo.CHATML
    assert {entry.name for entry in tmp_path.iterdir()} == {"base", "saved", "out"}


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_merged_adapters_need_no_base(tmp_path, kind):
    policy = saved_policy(tmp_path, kind, rank=4)
    export(tmp_path / "saved", tmp_path / "out", merge=True)
    for file in (tmp_path / "base").iterdir():
        file.unlink()
    assert not list((tmp_path / "out").glob("adapter*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    torch.testing.assert_close(logits(model), logits(policy.model), rtol=1e-5, atol=1e-5)
    again = load_model(str(tmp_path / "out"), device="cpu")
    assert torch.equal(logits(again.model), logits(model))


def test_adapters_alone_are_peft_s_own_folder(tmp_path):
    policy = saved_policy(tmp_path, rank=4)
    export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    facts = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(tmp_path / "base")
    assert (facts["r"], facts["lora_alpha"]) == (4, 16.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(policy.model), rtol=0, atol=0)


def test_a_half_precision_base_stays_one(tmp_path):
    """Base and adapter are added in float32 and rounded once."""
    policy = saved_policy(tmp_path, dtype="bfloat16", rank=4)
    export(tmp_path / "saved", tmp_path / "out", merge=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    name = "model.layers.1.mlp.up_proj"
    layer = policy.model.get_base_model().get_submodule(name)
    base = zoo.make_model("llama").get_submodule(name).weight
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    exact = base + 16.0 / 4 * delta
    assert torch.equal(model.get_submodule(name).weight, exact.to(torch.bfloat16))


def test_the_embedded_policy(tiny, tmp_path):
    assert isinstance(tiny, TinyPolicy)
    tiny.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", merge=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(model), logits(tiny.model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"


def test_nothing_is_written_over_and_nothing_is_left_behind(tmp_path):
    saved_policy(tmp_path, rank=4)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists"):
        export(tmp_path / "saved", tmp_path / "out", merge=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        export(tmp_path / "saved", tmp_path / "file" / "out")
    full = mock.patch(
        "transformers.PreTrainedModel.save_pretrained", side_effect=OSError(28, "No space left on device")
    )
    with full, pytest.raises(OSError, match="No space"):
        export(tmp_path / "saved", tmp_path / "new", merge=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"base", "saved", "out", "file"}
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("merge", [False, True])
def test_a_damaged_policy_is_not_exported(tmp_path, merge):
    saved_policy(tmp_path)
    (tmp_path / "saved" / "config.json").write_text("{}")
    with pytest.raises(SnapshotError, match=r"config\.json changed"):
        export(tmp_path / "saved", tmp_path / "out", merge=merge)
    assert not (tmp_path / "out").exists()


def run(*words):
    screen = io.StringIO()
    code = run_export([*words], Console(width=1000, file=screen))
    return code, screen.getvalue()


def test_the_command(tmp_path):
    saved_policy(tmp_path, rank=2)
    folder = tmp_path / "run"
    with pytest.raises(RunFolderError, match="is no run folder"):
        run(str(folder), str(tmp_path / "out"))
    folder.mkdir()
    (folder / "config.toml").write_text("")
    with pytest.raises(RunFolderError, match="holds no last policy yet"):
        run(str(folder), str(tmp_path / "out"), "--which", "last")
    (folder / "model").mkdir()
    (tmp_path / "saved").rename(folder / "model" / "best")
    code, said = run(str(folder), str(tmp_path / "adapter"))
    assert code == 0
    assert f"best policy, version 4 (adapters of {tmp_path / 'base'})" in said
    code, said = run(str(folder), str(tmp_path / "whole"), "--merge")
    assert code == 0
    assert "best policy, version 4\n" in said
    assert (tmp_path / "whole" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="which"):
        run(str(folder), str(tmp_path / "x"), "--which", "first")
