"""The embedded policy: a small decoder language model with its own tokenizer. No hub, no GPU, no account."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from freshper.errors import SnapshotError
from freshper.policies.cached import CachedConversations
from freshper.policies.quiet import no_progress_bars
from freshper.trajectory import SamplingParams

PAD, UNKNOWN, END, ASSISTANT = SPECIAL = ("<|pad|>", "<|unknown|>", "<|end|>", "<|assistant|>")
_WORD = "\u2581"  # stands before every word, where sentencepiece puts it too


class TinyPolicy:
    """A transformers causal LM and a tokenizer whose words are those of the task.

    Its chat template is short: the words of an observation, ``<|assistant|>``, the words of the reply,
    ``<|end|>``. The instructions are left out; the warm start has taught them.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, version: int = 0) -> None:
        self.model: Any = model  # a transformers causal LM
        # Special tokens that stand in a text are spelled: no observation can forge the end of a turn. Set here, as
        # tokenizer.json does not keep it.
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer  # a tokenizers.Tokenizer
        self._version = version
        self._end = int(tokenizer.token_to_id(END))
        self._assistant = int(tokenizer.token_to_id(ASSISTANT))
        # Observations repeat: small worlds have few distinct boards.
        self._words = functools.lru_cache(maxsize=100_000)(lambda text: tuple(tokenizer.encode(text).ids))

    @property
    def version(self) -> int:
        """Policy version of the weights it samples with."""
        return self._version

    def encode_turn(
        self,
        observation: str,
        instructions: str | None,  # noqa: ARG002
        *,
        cut: bool = False,  # noqa: ARG002
    ) -> list[int]:
        """The observation's words and ``<|assistant|>``; this template has no place for instructions.

        A reply that was cut is left without ``<|end|>``: the policy has learned with such conversations.
        """
        return [*self._words(observation), self._assistant]

    def encode_reply(self, text: str) -> list[int]:
        """The words of a reply and ``<|end|>``, as a demonstrator would have sampled them."""
        return [*self._words(text), self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Words joined by spaces, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def begin(self, count: int, sampling: SamplingParams, seed: int) -> CachedConversations:
        """Open ``count`` empty conversations."""
        self.model.eval()
        limit = self.model.config.max_position_embeddings
        return CachedConversations(self.model, (self._end,), count, sampling, seed=seed, max_positions=limit)

    def publish(self, model: nn.Module, version: int) -> None:
        """Sample with ``model`` from now on; sampler and learner share one module, so nothing is copied."""
        self.model = model
        self._version = version

    def save(self, folder: Path) -> None:
        """Write a folder that ``transformers`` loads too (config, safetensors, tokenizer.json), and checksums."""
        with no_progress_bars():
            self.model.save_pretrained(folder)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
        (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"chat_template": _CHAT_TEMPLATE}, indent=2))
        checksums = {name: _sha256(folder / name) for name in _FILES}
        own = {"policy_version": self._version, "sha256": checksums}
        (folder / "freshper.json").write_text(json.dumps(own, indent=2))

    @classmethod
    def load(cls, folder: Path) -> TinyPolicy:
        """The policy that :meth:`save` wrote. Raises :class:`SnapshotError` when files are missing or damaged."""
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        try:
            facts = json.loads((folder / "freshper.json").read_text())
            version, checksums = int(facts["policy_version"]), dict(facts["sha256"])
            damaged = [name for name in _FILES if _sha256(folder / name) != checksums[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{folder} holds no whole policy ({error!r})") from error
        if damaged:
            raise SnapshotError(f"{folder} is damaged: {', '.join(damaged)} changed since the policy was saved")
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        return cls(model, Tokenizer.from_file(str(folder / "tokenizer.json")), version)


_FILES = ("config.json", "model.safetensors", "tokenizer.json")  # what the policy is made of


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} "
    "{{ '<|assistant|>' if message['role'] == 'user' else '<|end|>' }} {% endfor %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Any:
    """Byte-pair encoding trained on ``texts``, cut at white space: frequent words become one token each.

    Every printable ASCII character is in the vocabulary, so words never seen are spelled, not lost. The same texts
    give the same tokenizer, in every process.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    # A word begins with a mark. Marking its end (`end_of_word_suffix`) would number the letters in the order of a
    # hash map, which differs from process to process.
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_WORD, split=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.Metaspace(_WORD)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=[_WORD, *map(chr, range(33, 127))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_without_special_tokens, texts), trainer)
    return tokenizer


def _without_special_tokens(text: str) -> str:
    """Merged from letters often enough, the text of a special token would get the special token's id."""
    for token in SPECIAL:
        text = text.replace(token, " ")
    return text


def build_model(vocab_size: int, *, hidden_size: int, layers: int, heads: int, context: int, seed: int) -> nn.Module:
    """A Llama decoder with random weights decided by ``seed``; the global torch generator is left untouched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # Not Qwen2: for that model type AutoTokenizer puts Qwen's own tokenizer in the place of the saved one.
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        # The usual 0.02 is made for wide models: at this width attention learns nothing for a long time.
        initializer_range=0.7 / hidden_size**0.5,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(config)
    return model
