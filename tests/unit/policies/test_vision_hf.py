"""Hugging Face image-text models as policies: turns with pictures, saving, adapters, and what is refused."""

import importlib.util
import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, LlavaConfig

from freshper.errors import ConfigError, EnvError
from freshper.policies.core import SeeingPolicy, check_policy, reply_all
from freshper.policies.export import export
from freshper.policies.hf import HFPolicy, HFVisionPolicy, policy_of
from freshper.policies.loading import find_model, load_model
from freshper.policies.lora import Lora, add_adapters
from freshper.policies.memory import estimate
from freshper.trajectory import SamplingParams


def _sibling(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo, texts = _sibling("vision_zoo"), _sibling("model_zoo")
IMAGES = (zoo.picture(1), zoo.picture(2, 96, 32))


@pytest.fixture(scope="module", params=zoo.FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    zoo.write_model(folder, request.param)
    return folder


def policy_in(folder, version=0, **arguments):
    return policy_of(load_model(str(folder), device="cpu", **arguments), version, slots=3)


def logits(policy):
    tokens = torch.tensor([policy.encode_turn("Where is the goal?", "Go on.", images=IMAGES)])
    with torch.inference_mode():
        return policy.model(**({"input_ids": tokens} | policy.picture_inputs(tokens, [IMAGES]))).logits


def shake(model):
    """Move every trained weight, as training would."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def refusal(folder, **arguments):
    with (
        mock.patch.object(AutoModelForImageTextToText, "from_pretrained", side_effect=AssertionError("weights read")),
        pytest.raises(ConfigError) as caught,
    ):
        find_model(str(folder), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_becomes_a_policy_that_sees(folder):
    policy = policy_in(folder, 4)
    assert isinstance(policy, HFVisionPolicy)
    assert isinstance(policy, SeeingPolicy)
    assert policy.version == 4
    assert policy.context == zoo.CONTEXT
    assert len(policy.end_tokens) == 1
    check_policy(policy, policy.encode_turn("Where?", "Go."))


def test_pictures_stand_before_the_text_of_their_turn(folder):
    policy = policy_in(folder)
    shown = [token for image in IMAGES for token in policy.reader.expansion(image)]
    placeholder = policy.reader.placeholder
    for instructions in ("Cross the lake.", "", None):
        tokens = policy.encode_turn("Where?", instructions, images=IMAGES)
        assert tokens.count(placeholder) == shown.count(placeholder)
        last = max(place for place, token in enumerate(tokens) if token == placeholder)
        assert "Where?" in policy.tokenizer.decode(tokens[last:])
        assert "Where?" not in policy.tokenizer.decode(tokens[:last])
    cut = policy.encode_turn("Where?", None, cut=True, images=IMAGES)
    assert cut == [policy.end_tokens[0], *tokens]


def test_text_cannot_forge_a_picture(folder):
    policy = policy_in(folder)
    text = f"a {policy.reader.picture} b <|vision_start|><|image_pad|><|vision_end|><image>"
    tokens = policy.encode_turn(text, text, images=IMAGES[:1])
    assert tokens.count(policy.reader.placeholder) == policy.reader.tokens(IMAGES[0]).count(policy.reader.placeholder)
    assert policy.reader.placeholder not in policy.encode_turn(text, None)


def test_a_broken_picture_is_the_environment_s_error(folder):
    with pytest.raises(EnvError, match="no picture that can be decoded"):
        policy_in(folder).encode_turn("Where?", "Go.", images=[b"\x89PNG"])


def test_replies_depend_on_what_is_shown(folder):
    policy = policy_in(folder)
    greedy = SamplingParams(temperature=0.0)
    said = set()
    for seed in range(6):
        image = zoo.picture(50 + seed)
        conversations = policy.begin(1, greedy, 0)
        conversations.submit(0, policy.encode_turn("Where?", "Go.", images=[image]), 6, [image])
        replies = []
        while not replies:
            replies = conversations.finished()
        said.add(replies[0][1].tokens)
    assert len(said) > 1


def test_publish_and_engine_after_it(folder):
    policy = policy_in(folder)
    other = zoo.make_model(policy.model.config.model_type, seed=8)
    policy.publish(other, 3)
    assert (policy.version, policy.model) == (3, other)
    [reply] = reply_all(policy.begin(1, SamplingParams(), 1), [0], [policy.encode_turn("a", "b")], [3])
    assert 1 <= len(reply.tokens) <= 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_policy_comes_back_the_same(folder, tmp_path, dtype):
    policy = policy_in(folder, 7, dtype=dtype)
    shake(policy.model)
    policy.save(tmp_path / "saved")
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert isinstance(loaded, HFVisionPolicy)
    assert loaded.version == 7
    assert torch.equal(logits(loaded), logits(policy))
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=getattr(torch, dtype))
    assert torch.equal(logits(policy_of(load_model(str(tmp_path / "saved"), dtype=dtype))), logits(policy))
    assert type(again) is type(policy.model)


@pytest.mark.parametrize("merge", [False, True])
def test_export_is_a_folder_for_transformers(folder, tmp_path, merge):
    policy = policy_in(folder, 2, lora=Lora(rank=4 if merge else 0, targets="all-linear"))
    shake(policy.model)
    policy.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", merge=merge)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    )
    exported = policy_in(tmp_path / "out")
    torch.testing.assert_close(logits(exported), logits(policy), rtol=1e-4, atol=1e-4)
    assert type(model) is type(exported.model)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_saved_adapters_come_back_on_their_base(folder, tmp_path, targets):
    policy = policy_in(folder, 7, lora=Lora(rank=4, targets=targets))
    shake(policy.model)
    policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert torch.equal(logits(loaded), logits(policy))
    base = policy_in(folder)
    assert not torch.equal(logits(base), logits(policy))


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=3), Lora(rank=5, targets="q_proj,v_proj")])
def test_parameters_and_weights_are_estimated_exactly(family, lora):
    model = zoo.make_model(family).to(torch.bfloat16)
    config = model.config
    if lora.rank:
        model = add_adapters(model, lora, seed=0)
    found = estimate(config, dtype=torch.bfloat16, lora=lora)
    real = list(model.parameters())
    assert found.parameters == sum(p.numel() for p in real)
    assert found.trainable == sum(p.numel() for p in real if p.requires_grad)
    assert found.weights == sum(p.numel() * p.itemsize for p in real)
    less = estimate(config, dtype=torch.bfloat16, lora=lora, gradient_checkpointing=True)
    more = estimate(config, dtype=torch.bfloat16, lora=lora, attention="eager")
    assert less.activations < found.activations < more.activations


def test_the_parameters_of_a_published_model_are_counted():
    """Qwen2.5-VL-3B's, as its model card gives them: 3.75 billion, of which 3.09 are those of Qwen2.5-3B."""
    text = {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16}
    text |= {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=True)
    found = estimate(config, dtype=torch.bfloat16)
    assert found.parameters == pytest.approx(3.75e9, rel=2e-3)
    assert found.weights == 2 * found.parameters


def test_activations_of_pictures_are_within_the_estimate(folder):
    """What autograd keeps of a conversation that is almost all pictures."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    policy = policy_in(folder)
    tokens = torch.tensor([policy.encode_turn("x", None, images=[zoo.picture(seed) for seed in range(8)])])
    given = policy.picture_inputs(tokens, [[zoo.picture(seed) for seed in range(8)]])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.base_model(**({"input_ids": tokens} | given), use_cache=False).last_hidden_state
    assert output.requires_grad
    foreseen = estimate(model.config, token_budget=tokens.numel()).activations
    assert 0.3 < sum(kept.values()) / foreseen < 1.4


def test_a_model_of_text_alone_is_no_policy_that_sees(tmp_path):
    texts.write_model(tmp_path)
    assert find_model(str(tmp_path)).reader is None
    with pytest.raises(ConfigError, match="reads text alone"):
        HFVisionPolicy(load_model(str(tmp_path), device="cpu"))
    policy = policy_in(tmp_path)
    assert type(policy) is HFPolicy
    assert not isinstance(policy, SeeingPolicy)


def test_image_text_models_that_are_not_known_are_named(tmp_path):
    LlavaConfig().save_pretrained(tmp_path)
    assert "of image-text models, qwen2_vl, qwen2_5_vl, qwen3_vl, idefics3, smolvlm are known here" in refusal(tmp_path)


def test_a_folder_without_what_cuts_pictures_is_refused(tmp_path):
    zoo.write_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert "image processor of model" in refusal(tmp_path)


HIDING = zoo.QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
TWICE = zoo.QWEN_TEMPLATE.replace("<|image_pad|>", "<|image_pad|><|image_pad|>")


@pytest.mark.parametrize(("template", "times"), [(HIDING, 0), (TWICE, 2)])
def test_a_template_that_hides_pictures_is_refused(tmp_path, template, times):
    zoo.write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert f"writes '<|image_pad|>' {times} times for 1 pictures" in refusal(tmp_path)


def test_the_template_that_is_kept_with_the_processor_is_used_and_saved(tmp_path):
    zoo.write_model(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    assert "has no chat template" in refusal(tmp_path / "base")
    (tmp_path / "base" / "chat_template.json").write_text(json.dumps({"chat_template": zoo.QWEN_TEMPLATE}))
    policy = policy_in(tmp_path / "base")
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == zoo.QWEN_TEMPLATE
    loaded = HFPolicy.load(tmp_path / "saved", device="cpu")
    assert loaded.encode_turn("x", "y", images=IMAGES) == policy.encode_turn("x", "y", images=IMAGES)


def test_a_template_that_numbers_pictures_is_followed_and_noted(tmp_path, caplog):
    """Numbers would have to count on over turns: what is written turn by turn does not, and a line says so."""
    zoo.write_model(tmp_path)
    numbering = "{% set n = namespace(v=0) %}" + zoo.QWEN_TEMPLATE.replace(
        "<|vision_start|>", "{% set n.v = n.v + 1 %}Picture {{ n.v }}: <|vision_start|>"
    )
    (tmp_path / "chat_template.jinja").write_text(numbering)
    with caplog.at_level(logging.WARNING, "freshper"):
        policy = policy_in(tmp_path)
    tokens = policy.encode_turn("Where?", "Go.", images=IMAGES)
    assert "Picture 2: <|vision_start|>" in policy.tokenizer.decode(tokens)
    assert any("it may number them" in line for line in caplog.messages)
