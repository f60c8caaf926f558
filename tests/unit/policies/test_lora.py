"""Adapters: where they go, what they train, and the base behind them."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from freshper.errors import ConfigError, PolicyError
from freshper.policies.lora import (
    Lora,
    adapted_layers,
    add_adapters,
    attach_adapter,
    fingerprint,
    has_adapter,
    inner_model,
    linear_layers,
    reference_of,
    without_adapter,
)

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

IDS = torch.tensor([[0, 40, 41, 42, 43, 44, 1]])
LINEAR = {  # names of a layer's linear layers, from the models' papers and code
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "qwen2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gemma2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
}


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.clone()


def shake(model, seed=0):
    """Adapters that change something: they begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(kind="llama", **settings):
    return add_adapters(zoo.make_model(kind), Lora(**({"rank": 4} | settings)), seed=3)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_all_linear_layers_but_the_head_get_an_adapter(kind):
    model = zoo.make_model(kind)
    assert {name.rpartition(".")[2] for name in linear_layers(model)} == LINEAR[kind]
    shapes = [tuple(layer.weight.shape) for layer in adapted_layers(model, Lora(rank=4)).values()]
    with_adapters = add_adapters(model, Lora(rank=4), seed=0)
    trained = [p for p in with_adapters.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(shapes)
    assert sum(p.numel() for p in trained) == sum(4 * (rows + columns) for rows, columns in shapes)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_training_begins_at_the_base_and_moves_the_adapters_alone(kind):
    base = zoo.make_model(kind)
    model = add_adapters(copy.deepcopy(base), Lora(rank=4), seed=0)
    assert torch.equal(logits(model), logits(base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):  # the first update moves B alone: B is zero, so A has no gradient yet
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not torch.allclose(logits(model), logits(base))
    with without_adapter(model) as reference:
        assert torch.equal(logits(reference), logits(base))


def test_an_adapted_layer_adds_the_scaled_product():
    """W x + alpha / rank * B A x, by hand."""
    model = shake(adapted(rank=2, alpha=6.0, targets="down_proj"))
    layer = inner_model(model).model.layers[1].mlp.down_proj
    inputs = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = inputs @ layer.base_layer.weight.T + 3.0 * inputs @ a.T @ b.T
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("q_proj", {"q_proj"}),
        ("q_proj, down_proj", {"q_proj", "down_proj"}),
        ("layers.1.mlp.up_proj,", {"up_proj"}),
        ("all-linear", LINEAR["llama"]),
    ],
)
def test_named_targets_are_those_of_peft(targets, names):
    layers = adapted_layers(zoo.make_model("llama"), Lora(rank=4, targets=targets))
    assert {name.rpartition(".")[2] for name in layers} == names
    model = adapted(targets=targets)
    wrapped = {name for name, module in inner_model(model).named_modules() if hasattr(module, "lora_A")}
    assert wrapped == set(layers)


@pytest.mark.parametrize("targets", ["query", "q_proj,query", "proj", "", " , ", "lm_head"])
def test_targets_that_match_nothing(targets):
    with pytest.raises(ConfigError, match=r"lora.targets .*down_proj, gate_proj, k_proj, o_proj, q_proj"):
        adapted_layers(zoo.make_model("llama"), Lora(rank=4, targets=targets))


@pytest.mark.parametrize(
    "wrong",
    [{"rank": -1}, {"alpha": 0}, {"dropout": 1.0}, {"rank": 4, "quantize": "8bit"}, {"quantize": "4bit"}],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError, match="lora"):
        Lora(**wrong)


def test_the_seed_alone_decides_the_adapters():
    def weights(seed):
        model = add_adapters(zoo.make_model("llama"), Lora(rank=4), seed=seed)
        return {name: p for name, p in model.named_parameters() if "lora_A" in name}

    state = torch.random.get_rng_state()
    first = weights(1)
    torch.rand(5)
    again, other = weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    torch.random.set_rng_state(state)
    weights(4)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_reference_pass_leaves_a_recorded_graph_alone():
    """The learner scores the reference between its own forward and backward pass."""

    def gradients(look):
        model = shake(adapted(dropout=0.0)).train()
        loss = model(input_ids=IDS, labels=IDS).loss
        if look:
            with torch.no_grad(), reference_of(model)() as reference:
                assert not reference.training
                reference(input_ids=IDS)
            assert model.training
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, looked = gradients(False), gradients(True)
    assert plain.keys() == looked.keys()
    assert len(plain) == 28
    assert all(torch.equal(plain[name], looked[name]) for name in plain)


def test_the_adapters_come_back_whatever_happens():
    model = shake(adapted()).train()
    before = logits(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with pytest.raises(KeyError), without_adapter(model):
        raise KeyError
    assert model.training
    assert torch.equal(logits(model), before)
    assert trained == [name for name, p in model.named_parameters() if p.requires_grad]


def test_dropout_is_off_in_the_reference():
    model = shake(adapted(dropout=0.5)).train()
    with without_adapter(model) as reference:
        assert torch.equal(logits(reference), logits(reference))
    assert not torch.equal(logits(model), logits(model))


def test_the_reference_of_a_plain_model_is_a_frozen_copy():
    model = zoo.make_model("llama").train()
    reference = reference_of(model)
    before = logits(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with reference() as frozen:
        assert torch.equal(logits(frozen), before)
        assert not any(p.requires_grad for p in frozen.parameters())
        assert not frozen.training
    assert not torch.equal(logits(model), before)
    assert all(p.requires_grad for p in model.parameters())


def test_the_reference_of_an_adapted_model_copies_nothing():
    model = shake(adapted())
    with reference_of(model)() as reference:
        assert reference is model
        assert not torch.equal(logits(reference), logits(shake(adapted())))


def test_a_plain_model_has_no_adapter():
    model = zoo.make_model("llama")
    assert not has_adapter(model)
    assert inner_model(model) is model
    with pytest.raises(PolicyError, match="has no adapter"), without_adapter(model):
        pytest.fail("it was entered")


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_saved_adapters_come_back_on_another_copy_of_the_base(tmp_path, kind):
    model = shake(adapted(kind))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = attach_adapter(zoo.make_model(kind), tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert not again.training
    names = {name for name, p in again.named_parameters() if p.requires_grad}
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_of_a_half_precision_base_are_float32_and_its_norms_too_when_quantized():
    half = zoo.make_model("llama").to(torch.bfloat16)
    model = add_adapters(copy.deepcopy(half), Lora(rank=4), seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    model = add_adapters(half, Lora(rank=4, quantize="4bit"), seed=0)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float32}
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}


def test_the_fingerprint_is_of_the_base():
    base = zoo.make_model("qwen2")
    own = fingerprint(base, torch.float32)
    assert fingerprint(shake(adapted("qwen2")), torch.float32) == own
    assert fingerprint(zoo.make_model("qwen2", seed=1), torch.float32) != own
    half = fingerprint(base, torch.bfloat16)
    assert half != own
    assert half == fingerprint(copy.deepcopy(base).to(torch.bfloat16), torch.bfloat16)
    with torch.no_grad():
        base.model.norm.weight[3] += 0.01
    assert fingerprint(base, torch.float32) != own
