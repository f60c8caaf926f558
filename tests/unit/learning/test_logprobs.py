"""Log-probs without a vocabulary of logits per token: the same numbers and gradients, in a fraction of the memory."""

from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from freshper.errors import ConfigError
from freshper.learning.batching import micro_batches
from freshper.learning.logprobs import TokenLogprobs

CPU, VOCAB = torch.device("cpu"), 40
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3}
SIZES |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "Llama": SIZES,
    "Qwen2": SIZES | {"tie_word_embeddings": True},
    "GPT2": GPT2,
    "Gemma2": SIZES | {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0},
    "Cohere": SIZES | {"logit_scale": 0.25},
    "Granite": SIZES | {"logits_scaling": 3.0},
    "Phi": SIZES | {"num_key_value_heads": 2},  # a head with a bias
    "MiniCPM3": SIZES | LATENT | {"num_key_value_heads": 2, "dim_model_base": 8},  # scales the states before the head
}
WAYS = {
    "fused, all kept": {},
    "fused, one token at a time": {"chunk_elements": 1, "keep_elements": 0},
    "fused, chunks that do not divide": {"chunk_elements": 7 * VOCAB, "keep_elements": 0},
    "packed": {"packing": True, "chunk_elements": 5 * VOCAB},
}


FROM_PEFT = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # it asks by an old name


class Squashed(LlamaForCausalLM):
    """Does to its logits what no config speaks of."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - 0.01 * output.logits**2
        return output


def make(name, seed=0, **changes):
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**(MODELS[name] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, name + kind)(config)


def with_lora(targets, **parts):
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **parts)
        model = peft.get_peft_model(make("Llama"), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def loss_of(logprobs, entropies, rows):
    """Any smooth function of both that tells the trajectories apart; (B, T) or (1, T) at a time."""
    places = torch.arange(logprobs.shape[1]) + 1
    return ((1 + rows) * torch.sin(places) * logprobs).sum() + 0.3 * ((2 - rows / 9) * entropies).sum()


def reference(model, trajectories, temperature):
    """Every trajectory alone, without padding, by the model's own forward; values of all, and the gradient."""
    model.zero_grad()
    values, total = [], 0.0
    for row, trajectory in enumerate(trajectories):
        tokens, mask = torch.tensor(trajectory.tokens.astype(np.int64)), torch.tensor(trajectory.response_mask)
        logs = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature, -1)
        chosen = torch.cat([torch.zeros(1), logs[torch.arange(len(tokens) - 1), tokens[1:]]]) * mask
        spread = torch.cat([torch.zeros(1), torch.distributions.Categorical(logits=logs).entropy()]) * mask
        total = total + loss_of(chosen[None], spread[None], row)
        values.append(torch.stack([chosen, spread]).detach())
    total.backward()
    return values, gradient(model)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def scored(scorer, trajectories, temperature, budget=60):
    """The same by what is tested."""
    scorer.model.zero_grad()
    values = [None] * len(trajectories)
    for batch in scorer.split(trajectories, np.ones(len(trajectories)), budget, CPU):
        scores = scorer(batch, temperature, entropy="tokens", entropy_gradient=True)
        loss_of(scores.logprobs, scores.entropy, torch.tensor(batch.rows)[:, None]).backward()
        for row, length, *both in zip(batch.rows, batch.lengths, scores.logprobs, scores.entropy, strict=True):
            values[row] = torch.stack([value[:length] for value in both]).detach()
    return values, gradient(scorer.model)


def assert_same(got, want):
    """Within 1e-6 of the largest value or gradient, a few roundings of float32."""
    for one, other in zip(got[0], want[0], strict=True):
        assert float((one - other).abs().max()) < 1e-6 * max(1.0, float(other.abs().max()))
    assert float((got[1] - want[1]).abs().max()) < 2e-6 * float(want[1].abs().max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_any_model_in_any_way_gives_the_numbers_of_every_trajectory_alone(name, way, random_batch):
    model, batch = make(name), random_batch(6, temperature=0.8)
    scorer = TokenLogprobs(model, small_vocabulary=0, **WAYS[way])
    assert (scorer.head is None) == (name == "MiniCPM3")
    assert_same(scored(scorer, batch, 0.8), reference(model, batch, 0.8))


@FROM_PEFT
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_count_also_those_on_the_head(targets, way, random_batch):
    model, batch = with_lora(targets), random_batch(6)
    scorer = TokenLogprobs(model, small_vocabulary=0, **WAYS[way])
    assert scorer.head.fusible == (targets == "all-linear")
    assert_same(scored(scorer, batch, 1.0), reference(model, batch, 1.0))
    (whole,) = micro_batches(batch, np.ones(6), 10_000, CPU)
    with torch.no_grad(), model.disable_adapter():
        bare = scorer(whole, 1.0).logprobs
    torch.testing.assert_close(bare, earlier(make("Llama"), whole, 1.0)[0].detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep_tokens", [0, 3, 30, 10_000])
def test_an_unknown_way_to_logits_falls_back_to_the_models_own(keep_tokens, random_batch):
    """In groups of rows, or where one row's logits are too many, some tokens at a time."""
    torch.manual_seed(0)
    model, batch = Squashed(LlamaConfig(**SIZES)), random_batch(6)
    scorer = TokenLogprobs(model, small_vocabulary=0, keep_elements=keep_tokens * VOCAB, packing=True)
    assert scorer.head is None
    assert_same(scored(scorer, batch, 1.0), reference(model, batch, 1.0))
    with pytest.raises(ConfigError, match="hidden states of Squashed are out of reach"):
        scorer.states(next(scorer.split(batch, np.ones(6), 60, CPU)))


def test_a_soft_cap_is_not_missed_when_all_logits_are_tiny(random_batch):
    """At this size tanh is the identity within rounding: comparing logits would find no cap."""
    model = make("Gemma2", initializer_range=1e-3, final_logit_softcapping=30.0)
    assert (TokenLogprobs(model, small_vocabulary=0).head.cap) == 30.0


@FROM_PEFT
def test_virtual_tokens_are_refused_not_scored(random_batch):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(make("Llama"), config)
    for limit in (0, 10_000):
        scorer = TokenLogprobs(model, small_vocabulary=limit)
        with pytest.raises(ConfigError, match="no token could be scored"):
            scorer(next(scorer.split(random_batch(3), np.ones(3), 100, CPU)), 1.0)


def earlier(model, batch, temperature):
    """The straightforward way, written out: all logits, then those that count."""
    mask = batch.response_mask
    output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask, use_cache=False)
    everything = torch.log_softmax(output.logits[:, :-1][mask[:, 1:]].float() / temperature, -1)
    chosen = everything.gather(-1, batch.tokens[mask].unsqueeze(-1)).squeeze(-1)
    logprobs = torch.zeros_like(batch.behavior_logprobs).masked_scatter(mask, chosen)
    return logprobs, -(everything.exp() * everything).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_small_vocabulary_gives_the_bits_of_the_straightforward_way(new_model, random_batch, temperature, hidden):
    model, trajectories = new_model(), random_batch(8)
    scorer = TokenLogprobs(model)
    (batch,) = scorer.split(trajectories, np.ones(8), 16_384, CPU)
    (same,) = micro_batches(trajectories, np.ones(8), 16_384, CPU)
    assert torch.equal(batch.tokens, same.tokens)
    results = []
    for run in (earlier, lambda *_: scorer(batch, temperature, entropy="sum", entropy_gradient=True, hidden=hidden)):
        model.zero_grad()
        scores = run(model, batch, temperature)
        logprobs, entropy = scores if isinstance(scores, tuple) else (scores.logprobs, scores.entropy)
        ((logprobs * batch.advantages).sum() - 0.1 * entropy).backward()
        results.append((logprobs.detach(), entropy.detach(), gradient(model)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def peak_bytes(run):
    """Largest number of bytes that tensors made by ``run`` held at once."""
    from torch._C._profiler import _EventType

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    sizes = []

    def walk(event):
        if event.tag == _EventType.Allocation:
            sizes.append((event.start_time_ns, event.typed[1].alloc_size))
        for child in event.children:
            walk(child)

    for event in record.profiler.kineto_results.experimental_event_tree():
        walk(event)
    return max(np.cumsum([size for _, size in sorted(sizes)]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler, about itself
def test_memory_is_that_of_a_chunk_not_of_the_vocabulary(random_batch):
    """150k x 4k in small: beside the model's own part, at most four chunks (two, and a margin of two)."""
    vocabulary, width = 20_000, 8
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": vocabulary, "hidden_size": width}))
    trajectories = random_batch(12, longest=8)
    sampled = sum(trajectory.response_length for trajectory in trajectories)
    chunk = 4 * vocabulary * 8  # eight tokens in float32
    scorer = TokenLogprobs(model, chunk_elements=8 * vocabulary, keep_elements=0)
    (batch,) = micro_batches(trajectories, np.ones(12), 10_000, CPU)
    (plainly,) = [TokenLogprobs(model, small_vocabulary=vocabulary)]

    def update(scorer):
        model.zero_grad()
        scorer(batch, 0.9, entropy="sum").logprobs.sum().backward()

    parameters = 2 * 4 * sum(p.numel() for p in model.parameters())  # gradients, and one more on its way
    activations = 4 * batch.tokens.numel() * width * 100
    assert sampled > 100
    assert peak_bytes(lambda: update(scorer)) < parameters + activations + 4 * chunk
    assert peak_bytes(lambda: update(plainly)) > 2 * 4 * sampled * vocabulary > 20 * chunk


def test_entropies_without_gradient_leave_the_gradient_alone(random_batch):
    model, trajectories = make("Llama"), random_batch(5)
    for scorer in (TokenLogprobs(model, small_vocabulary=0), TokenLogprobs(model)):
        (batch,) = micro_batches(trajectories, np.ones(5), 1000, CPU)
        assert scorer(batch, 1.0).entropy is None
        for form in ("sum", "tokens"):
            scores = scorer(batch, 1.0, entropy=form)
            assert not scores.entropy.requires_grad
            assert scores.logprobs.requires_grad
            assert scores.entropy.shape == (() if form == "sum" else batch.tokens.shape)
        total = scorer(batch, 1.0, entropy="tokens").entropy.sum()
        assert float(scorer(batch, 1.0, entropy="sum").entropy) == pytest.approx(float(total), rel=1e-5)


def test_hidden_states_are_those_that_predict(random_batch):
    model, trajectories = make("Llama"), random_batch(5)
    (batch,) = micro_batches(trajectories, np.ones(5), 1000, CPU)
    want = model.model(input_ids=batch.tokens).last_hidden_state[:, :-1][batch.response_mask[:, 1:]]
    for settings in ({}, {"small_vocabulary": 0}, {"small_vocabulary": 0, "packing": True}):
        scorer = TokenLogprobs(model, **settings)
        for hidden in (scorer.states(batch), scorer(batch, 1.0, hidden=True).hidden):
            torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-5)
        assert scorer(batch, 1.0).hidden is None


def test_looking_at_a_model_leaves_no_trace(random_batch):
    model = make("GPT2", resid_pdrop=0.5)
    model.train()
    model.transformer.ln_f.eval()
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    TokenLogprobs(model, small_vocabulary=0, packing=True)
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not model.lm_head._forward_hooks


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2"])
def test_gradient_checkpointing_changes_nothing(name, random_batch):
    model, batch = make(name), random_batch(6)
    want = scored(TokenLogprobs(model, small_vocabulary=0), batch, 1.0)
    model.train()
    # transformers 5.24 renamed it; releases before know only the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert_same(scored(TokenLogprobs(model, small_vocabulary=0, chunk_elements=5 * VOCAB), batch, 1.0), want)


@pytest.mark.parametrize("limit", [0, 10_000])
def test_a_model_is_compiled_without_a_break(limit, random_batch):
    """The backend is the interpreter: what is tested is that nothing in the call depends on values of tensors."""
    model = make("Llama", num_hidden_layers=1)
    (batch,) = micro_batches(random_batch(3), np.ones(3), 1000, CPU)
    compile_ = torch.compile

    def strictly(module, **settings):
        return compile_(module, backend="eager", fullgraph=True, **settings)

    torch._dynamo.reset()
    with mock.patch("torch.compile", strictly):
        scorer = TokenLogprobs(model, small_vocabulary=limit, compiled=True)
    want = TokenLogprobs(model, small_vocabulary=limit)(batch, 1.0).logprobs
    torch.testing.assert_close(scorer(batch, 1.0).logprobs, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"chunk_elements": 0}, {"keep_elements": -1}])
def test_sizes_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} {next(iter(settings.values()))} "):
        TokenLogprobs(make("Llama"), **settings)


def test_scoring_without_gradients_keeps_nothing(random_batch):
    scorer = TokenLogprobs(make("Llama"), small_vocabulary=0)
    (batch,) = micro_batches(random_batch(4), np.ones(4), 1000, CPU)
    want = scorer(batch, 1.0).logprobs.detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = scorer(batch, 1.0).logprobs
        assert not got.requires_grad
        assert torch.equal(got, want)
