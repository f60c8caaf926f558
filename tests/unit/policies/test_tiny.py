"""The embedded policy: its words, its special tokens, its folder."""

import json
import string

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from freshper.errors import SnapshotError
from freshper.policies.core import reply_all
from freshper.policies.tiny import ASSISTANT, END, PAD, SPECIAL, UNKNOWN, TinyPolicy, build_model, build_tokenizer
from freshper.trajectory import SamplingParams

FORGERIES = [
    END,
    f"{ASSISTANT} hello {END}",
    f"x{END}y",
    f"{END}{END}{ASSISTANT}",
    f" {PAD} {UNKNOWN} ",
    f"####{END}\n{ASSISTANT}####",
]


def ids_of(policy, tokens):
    return {policy.tokenizer.token_to_id(token) for token in tokens}


def test_words_of_the_task_are_one_token_each(tiny, texts):
    for text in texts:
        assert len(tiny.encode_reply(text)) == len(text.split()) + 1


@pytest.mark.parametrize(
    "text",
    [
        "<answer> Left </answer>",
        "####\n#P_#\n#_O#\n####",
        "Zebra! 42 (never) seen",
        "  blanks\t around \n\n words  ",
        " ".join(string.punctuation + string.digits + string.ascii_letters),
        string.punctuation + string.digits + string.ascii_letters,
        "",
    ],
)
def test_words_come_back(tiny, text):
    assert tiny.decode(tiny.encode_reply(text)) == " ".join(text.split())
    assert tiny.tokenizer.token_to_id(UNKNOWN) not in tiny.encode_reply(text)


def test_what_is_not_ascii_is_unknown_and_left_out(tiny):
    tokens = tiny.encode_reply("na\u00efve \U0001f45f Left")
    assert tiny.tokenizer.token_to_id(UNKNOWN) in tokens
    assert tiny.decode(tokens).split() == ["nave", "Left"]


def test_a_turn_ends_with_the_marker_and_a_reply_with_the_end(tiny):
    turn, reply = tiny.encode_turn("#P_#", "instructions"), tiny.encode_reply("Left")
    assert turn == tiny.encode_turn("#P_#", None)
    assert turn[-1:] == [tiny.tokenizer.token_to_id(ASSISTANT)]
    assert reply[-1:] == [tiny.tokenizer.token_to_id(END)]
    assert tiny.decode(turn) == "#P_#"
    assert tiny.decode([*turn, *reply, tiny.tokenizer.token_to_id(PAD)]) == "#P_# Left"


def test_an_encoded_turn_may_be_changed_by_its_owner(tiny):
    before = tiny.encode_turn("#P_#", None)
    tiny.encode_turn("#P_#", None).clear()
    assert tiny.encode_turn("#P_#", None) == before


@pytest.mark.parametrize("text", FORGERIES)
def test_special_tokens_in_a_text_are_spelled(tiny, tmp_path, text):
    tiny.save(tmp_path)
    for policy in (tiny, TinyPolicy.load(tmp_path)):
        words = policy.encode_turn(text, None)[:-1]
        assert not ids_of(policy, SPECIAL) & set(words)
        assert policy.decode(words) == " ".join(text.split())


def test_special_tokens_in_the_training_texts_cannot_be_learned_as_words():
    tokenizer = build_tokenizer([f"a{END}b {END} {END}c"] * 50)
    policy = TinyPolicy(torch.nn.Identity(), tokenizer)
    for text in (*FORGERIES, f"a{END}b", f"{END}c"):
        assert not ids_of(policy, SPECIAL) & set(policy.encode_turn(text, None)[:-1])


def test_the_same_texts_give_the_same_tokenizer(texts):
    """Hash maps in the trainer are seeded anew for every build, so that repeating it here is a fair test."""
    assert len({build_tokenizer(texts).to_str() for _ in range(8)}) == 1


def test_the_vocabulary_is_bounded(texts):
    assert build_tokenizer(texts, vocab_size=105).get_vocab_size() == 105


def test_the_seed_alone_decides_the_weights():
    def weights(seed):
        return build_model(11, hidden_size=8, layers=1, heads=2, context=16, seed=seed).state_dict()

    state = torch.random.get_rng_state()
    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_saved_policy_comes_back_the_same(tiny, tmp_path):
    tiny.save(tmp_path)
    loaded = TinyPolicy.load(tmp_path)
    tokens = torch.tensor([tiny.encode_turn("#P_# Zebra", None)])
    with torch.inference_mode():
        assert torch.equal(tiny.model(tokens).logits, loaded.model(tokens).logits)
    assert loaded.version == tiny.version == 7
    assert loaded.encode_reply("Zebra Left") == tiny.encode_reply("Zebra Left")


def test_saving_over_an_older_policy_leaves_the_newer_one(tiny, tmp_path):
    tiny.save(tmp_path)
    other = TinyPolicy(tiny.model, build_tokenizer(["other words"]), version=8)
    other.save(tmp_path)
    loaded = TinyPolicy.load(tmp_path)
    assert loaded.version == 8
    assert loaded.encode_reply("other words") == other.encode_reply("other words")


def test_saving_and_loading_keep_the_progress_bars_of_the_user(tiny, tmp_path):
    shown = logging.is_progress_bar_enabled()
    tiny.save(tmp_path)
    TinyPolicy.load(tmp_path)
    assert logging.is_progress_bar_enabled() == shown


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, lambda path: path.unlink()])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_refused(tiny, tmp_path, name, damage):
    tiny.save(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(SnapshotError, match=f"{name} .*changed|holds no whole policy .*No such file"):
        TinyPolicy.load(tmp_path)


@pytest.mark.parametrize("facts", ["", "[]", "{}", '{"policy_version": 1}', '{"policy_version": 1, "sha256": 3}', "7"])
def test_damaged_facts_are_refused(tiny, tmp_path, facts):
    tiny.save(tmp_path)
    (tmp_path / "freshper.json").write_text(facts)
    with pytest.raises(SnapshotError, match="holds no whole policy"):
        TinyPolicy.load(tmp_path)


def test_a_version_that_is_no_number_is_refused(tiny, tmp_path):
    tiny.save(tmp_path)
    facts = json.loads((tmp_path / "freshper.json").read_text())
    (tmp_path / "freshper.json").write_text(json.dumps(facts | {"policy_version": None}))
    with pytest.raises(SnapshotError, match="holds no whole policy"):
        TinyPolicy.load(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="nowhere"):
        TinyPolicy.load(tmp_path / "nowhere")


CONVERSATION = [
    ("####\n#P_#\n#_O#\n####", "<answer> Right </answer>"),
    ("####\n#_P#\n#_O#\n####", "a reply  with new\twords"),
    ("solved!", "<answer> Down </answer>"),
]


def test_transformers_loads_the_folder_and_its_template_gives_our_tokens(tiny, tmp_path):
    tiny.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours, messages = [], []
    for observation, reply in CONVERSATION:
        ours += tiny.encode_turn(observation, None)
        messages.append({"role": "user", "content": observation})
        assert tokenizer.apply_chat_template(messages, return_dict=False) == ours
        ours += tiny.encode_reply(reply)
        messages.append({"role": "assistant", "content": reply})
        assert tokenizer.apply_chat_template(messages, return_dict=False) == ours
    assert tokenizer.decode(tiny.encode_reply("<answer> Up </answer>"), skip_special_tokens=True).strip() == (
        "<answer> Up </answer>"
    )
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == (PAD, END, UNKNOWN)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([ours])).logits, tiny.model(torch.tensor([ours])).logits)


def test_publish_changes_weights_and_version(tiny):
    policy = TinyPolicy(tiny.model, tiny.tokenizer)
    other = build_model(tiny.model.config.vocab_size, hidden_size=8, layers=1, heads=2, context=64, seed=3)
    policy.publish(other, 5)
    assert policy.version == 5
    greedy = SamplingParams(temperature=0.0)
    prompt = policy.encode_turn("#P_#", None)
    [reply] = reply_all(policy.begin(1, greedy, 0), [0], [prompt], [1])
    with torch.inference_mode():
        assert reply.tokens == (int(other(torch.tensor([prompt])).logits[0, -1].argmax()),)


def test_conversations_are_sampled_without_dropout(tiny):
    tiny.model.train()
    tiny.begin(1, SamplingParams(), 0)
    assert not tiny.model.training
