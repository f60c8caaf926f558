"""The estimate of memory against what models really take."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from freshper.policies.core import reply_all
from freshper.policies.lora import Lora, add_adapters
from freshper.policies.memory import MemoryEstimate, estimate, skeleton
from freshper.policies.slots import SlotConversations
from freshper.trajectory import SamplingParams

_spec = importlib.util.spec_from_file_location("model_zoo", Path(__file__).with_name("model_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

QWEN = {
    "0.5B": (494_032_768, (896, 4864, 24, 14, 2, 151_936, True)),
    "7B": (7_615_616_512, (3584, 18_944, 28, 28, 4, 152_064, False)),
}


@pytest.mark.parametrize("size", QWEN)
def test_published_parameter_counts(size):
    """Qwen2.5's, as its model cards give them, without its weights."""
    count, (hidden, inner, layers, heads, keys, vocabulary, tied) = QWEN[size]
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    found = estimate(config, dtype=torch.bfloat16)
    assert found.parameters == found.trainable == count
    assert found.weights == 2 * count
    assert found.optimizer == (4 + 4 + 4) * count  # two moments, and what adds up small steps


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=3), Lora(rank=5, targets="q_proj,v_proj")])
def test_parameters_and_weights_are_exact(kind, lora):
    if kind == "gpt2" and "q_proj" in lora.targets:
        lora = Lora(rank=5, targets="c_attn")
    model = zoo.make_model(kind).to(torch.bfloat16)
    if lora.rank:
        model = add_adapters(model, lora, seed=0)
    found = estimate(zoo.config_of(kind), dtype=torch.bfloat16, lora=lora)
    real = list(model.parameters())
    assert found.parameters == sum(p.numel() for p in real)
    assert found.trainable == sum(p.numel() for p in real if p.requires_grad)
    assert found.weights == sum(p.numel() * p.itemsize for p in real)
    assert found.gradients == sum(p.numel() * p.itemsize for p in real if p.requires_grad)


def test_the_moments_of_adamw_are_exact():
    model = zoo.make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    moments = [s for state in optimizer.state.values() for name, s in state.items() if name.startswith("exp_avg")]
    assert estimate(model.config).optimizer == sum(moment.numel() * moment.itemsize for moment in moments)


def saved_bytes(config, rows, columns, *, dtype, attention, checkpointing=False):
    """Bytes that autograd keeps of a forward pass through the decoder, weights left out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(rows * columns).reshape(rows, columns) % 300
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_what_autograd_keeps(kind, dtype, attention):
    if kind == "gemma2" and attention == "sdpa":
        attention = "eager"  # it has no other
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "head_dim": 32}
    config = zoo.config_of(kind, **shape)
    real = saved_bytes(config, 4, 96, dtype=dtype, attention=attention)
    found = estimate(config, dtype=dtype, attention=attention, token_budget=4 * 96, longest=96).activations
    # Gemma 2 also keeps attention weights before its soft cap, and has four norms a layer.
    assert 0.8 < real / found < (1.5 if kind == "gemma2" else 1.2)


def test_recomputation_keeps_one_number_a_token_and_layer():
    config = zoo.config_of("llama", hidden_size=128, intermediate_size=384, num_hidden_layers=8)
    real = saved_bytes(config, 4, 96, dtype=torch.float32, attention="sdpa", checkpointing=True)
    options = {"token_budget": 4 * 96, "longest": 96}
    whole = estimate(config, **options)
    again = estimate(config, gradient_checkpointing=True, **options)
    one_layer = whole.activations // 8
    assert 0.7 < real / (again.activations - one_layer) < 1.3
    assert again.activations < whole.activations / 3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_cache_bounds_what_the_sampler_keeps(kind):
    model = zoo.make_model(kind)
    talk = SlotConversations(model, (), 6, SamplingParams(), seed=0, max_positions=256, slots=4)
    rows = range(4)
    for _ in range(3):
        reply_all(talk, rows, [[7] * 20] * 4, [20] * 4)
    layers = talk._cache.layers
    real = sum(t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values))
    found = estimate(model.config, conversations=4, longest=120).cache
    needed = sum(4 * 120 * t.shape[1] * t.shape[3] * 4 for layer in layers for t in (layer.keys, layer.values))
    assert needed <= real <= found <= 2 * needed


def test_logits_and_draws_grow_with_the_vocabulary():
    config = zoo.config_of("llama")
    found = estimate(config, token_budget=100, conversations=7)
    assert found.logits == 100 * 320 * 20
    assert found.draws == 7 * 320 * 28
    assert estimate(config, token_budget=100, logit_rows=9).logits == 9 * 320 * 20


def test_a_reference_costs_a_copy_or_nothing():
    config = zoo.config_of("llama")
    assert estimate(config).reference == 0
    assert estimate(config, reference=True).reference == estimate(config).weights
    assert estimate(config, reference=True, lora=Lora(rank=2)).reference == 0


def test_a_quantized_base_takes_half_a_byte_a_weight():
    config = zoo.config_of("llama", hidden_size=256, intermediate_size=1024)
    whole = estimate(config, lora=Lora(rank=1))
    packed = estimate(config, lora=Lora(rank=1, quantize="4bit"))
    model = skeleton(config)
    linear = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    assert packed.parameters == whole.parameters
    assert whole.weights - packed.weights == pytest.approx((4 - 0.516) * linear, rel=1e-3)


def test_learning_and_sampling_take_turns():
    parts = {"parameters": 1, "trainable": 1, "weights": 100, "gradients": 20, "optimizer": 40, "reference": 7}
    big = MemoryEstimate(**parts, activations=10, logits=5, scratch=3, cache=50, draws=1)
    assert big.kept == 147
    assert big.peak == 147 + 51
    assert MemoryEstimate(**parts, activations=50, logits=5, scratch=3, cache=50, draws=1).peak == 147 + 75
    assert MemoryEstimate(**parts, activations=0, logits=5, scratch=90, cache=50, draws=1).peak == 147 + 110


def test_the_table_names_every_part():
    table = estimate(zoo.config_of("llama"), reference=True).table().splitlines()
    assert len({len(line) for line in table}) == 1
    assert all(line.endswith(" GiB") for line in table)
    assert [line.split("  ")[0].split(" (")[0] for line in table] == [
        *("weights", "gradients", "AdamW moments", "reference model", "activations of one pass"),
        *("logits of one pass", "a step of AdamW", "key-value cache while sampling", "distributions while sampling"),
        "peak",
    ]


REAL = """
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
from freshper.policies.memory import estimate
shape = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, vocab_size=4096)
def train(config, rows, columns):
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.arange(rows * columns).reshape(rows, columns) % config.vocab_size
    for _ in range(2):
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float() / 1.1, -1)
        loss = -logprobs.gather(-1, ids[:, 1:, None]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
def used():
    # Not getrusage: what that says begins with the size of the process that we were forked from.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
train(AutoConfig.for_model("llama", **(shape | {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64})), 1, 8)
before = used()
config = AutoConfig.for_model("llama", **shape)
train(config, 8, 128)
print(used() - before, estimate(config, token_budget=8 * 128, conversations=1, longest=128).peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_within_a_third_of_what_a_process_takes():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", REAL], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    real, found = map(int, run.stdout.split())
    assert 1 / 1.33 < real / found < 1.33, (real, found)
