"""Small tokenizers of every common kind, chat templates in the style of well-known models, and scripted chats."""

import functools
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from freshper.policies.core import Reply

PLAIN = ["<unk>", "<s>", "</s>", "<pad>"]
MARKS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
]
TEXTS = [
    "system\nYou are a helpful assistant.\nuser\nassistant\nmodel\n",
    "You play Sokoban. Reply with <answer> Left </answer>, <answer> Right </answer>, Up or Down.",
    "####\n#P_#\n#_O#\n####\n\n####\n#_P#\n#O_#\n####",
    "<think>\nThe box is left of me, so I push it.\n</think>\n\n<answer> Left </answer>",
    "### User: what now? ### Assistant: {\"move\": 'Down'} e = mc^2, naïve café Straße 東京",
] * 4
LLAMA3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)


def byte_level():
    """GPT-2: bytes, cut by a regular expression."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return core


def byte_level_whole_words():
    """Llama-3: bytes, another regular expression that keeps newlines with punctuation, whole words looked up first."""
    core = Tokenizer(models.BPE(ignore_merges=True))
    cut = pre_tokenizers.Split(LLAMA3, "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return core


def sentencepiece_bpe(prefix="normalizer"):
    """Llama-2: no words, a mark for spaces, one in front of every stretch of text; what is unknown becomes bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=PLAIN, show_progress=False))
    facts = json.loads(core.to_str())
    for byte in range(256):
        facts["model"]["vocab"][f"<0x{byte:02X}>"] = len(facts["model"]["vocab"])
    core = Tokenizer.from_str(json.dumps(facts))
    if prefix == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.normalizer = None
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return core


def word_piece():
    """BERT: lower case, no accents, unknown words. It loses white space."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=PLAIN, show_progress=False)
    )
    return core


def unigram():
    """T5, Gemma's ancestors: the likeliest pieces. Special tokens are pieces too: their text alone may yield them."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=PLAIN, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return core


KINDS = {
    "byte-level": byte_level,
    "whole words": byte_level_whole_words,
    "sentencepiece": sentencepiece_bpe,
    "metaspace first": lambda: sentencepiece_bpe("first"),
    "word pieces": word_piece,
    "unigram": unigram,
}

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL_LAST = (  # later Mistral models: the system message stands in the last user turn
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{{ bos_token }}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' }}{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN_3 = (  # reasoning of earlier turns is stripped
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
GLM = (  # the next role ends a turn
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
NUMBERED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + loop.index | string + '\n' + "
    "message['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' + "
    "(messages | length + 1) | string + '\n' }}{% endif %}"
)
# name: template, end of a turn, whether it has a place for a system message that stays where it is
STYLES = {
    "chatml": (CHATML, "<|im_end|>", True),
    "llama-2": (LLAMA_2, "</s>", True),
    "llama-3": (LLAMA_3, "<|eot_id|>", True),
    "gemma": (GEMMA, "<end_of_turn>", False),
    "zephyr": (ZEPHYR, "</s>", True),
    "mistral": (MISTRAL, "</s>", False),
    "mistral-last": (MISTRAL_LAST, "</s>", False),
    "qwen-3": (QWEN_3, "<|im_end|>", True),
    "glm": (GLM, "<|user|>", True),
}


@functools.cache
def core(kind):
    """The trained tokenizer as text: every use gets its own copy."""
    return KINDS[kind]().to_str()


def build(kind, template, names=None, **habits):
    """A transformers tokenizer; ``habits`` (``rstrip=True``, ...) are those of its control tokens."""
    tokenizer = Tokenizer.from_str(core(kind))
    habits = {"normalized": False, "special": True} | habits
    add = tokenizer.add_special_tokens if habits["special"] else tokenizer.add_tokens
    add([AddedToken(name, **habits) for name in (*PLAIN, *MARKS)])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **(special | (names or {})))


def whole(tokenizer, messages, opened=True, **arguments):
    """The conversation as transformers encodes it."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False, **arguments)


class Chat:
    """A policy with nothing but an encoder: it says the given (tokens, cut), row by row and turn by turn."""

    version = 3

    def __init__(self, encoder, replies):
        self.encoder, self.replies = encoder, replies
        self.decode = encoder.decode

    def encode_turn(self, observation, instructions, *, cut=False):
        if instructions is None:
            return self.encoder.following(observation, cut=cut)
        return self.encoder.first(observation, instructions)

    def begin(self, count, sampling, seed):
        self.left, self.waiting = [iter(replies) for replies in self.replies], []
        return self

    def submit(self, row, prompt, max_tokens):
        self.waiting.append(row)

    def finished(self):
        said = [(row, *next(self.left[row])) for row in self.waiting]
        self.waiting = []
        return [(row, Reply(tuple(tokens), (-0.5,) * len(tokens), cut=cut)) for row, tokens, cut in said]

    def close_row(self, row):
        pass
