"""Forms of template text around contents, and their tokens: control tokens in the template, plain text in contents."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_BREAK = "\u27e6break\u27e7"
_OURS = re.compile("\u27e6(?=(?:\\d+|break)\u27e7)")  # where a text writes the marks of Spelling: they are broken too
_REMEMBERED = 64  # texts

Trim = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Form:
    """Template text around the contents of messages (one trim each): literal, content, literal, ..., literal."""

    literals: tuple[str, ...]
    trims: tuple[Trim, ...] = ()

    def trimmed(self, contents: Sequence[str]) -> list[str]:
        """The contents as the template trims them."""
        return [trim(content) for trim, content in zip(self.trims, contents, strict=True)]

    def text(self, contents: Sequence[str]) -> str:
        """The literals with these contents between them."""
        return self.literals[0] + "".join(
            content + literal for content, literal in zip(contents, self.literals[1:], strict=True)
        )


class Spelling:
    """Encodes forms: control tokens in the literals stay what they are, in the contents they are spelled.

    Works on a copy of the tokenizer that spells all control tokens and knows a stand-in for each one that a literal
    holds, which swallows the white space beside it if that one does. So the text between two control tokens reaches
    the normalizer, the pre-tokenizer and the model just as it does in the whole conversation. Only a control token that
    the tokenizer finds in the *normalized* text is treated otherwise: a combining character beside it would hide it.
    """

    def __init__(self, tokenizer: Any, forms: Sequence[Form]) -> None:
        from tokenizers import AddedToken

        added = {str(token.content): (int(id_), token) for id_, token in tokenizer.added_tokens_decoder.items()}
        # Some tokenizers have runs of white space among their added tokens: these are ordinary text.
        names = [name for name in added if added[name][1].special or any(map(str.isalnum, name))]
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))  # tokenizers takes the longest
        self._names = re.compile(pattern or r"(?!)")
        written = {name for form in forms for literal in form.literals for name in self._names.findall(literal)}
        special = [name for name in added if name in written or added[name][1].special]
        self._stand_ins = {name: f"\u27e6{added[name][0]}\u27e7" for name in sorted(written)}
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.add_special_tokens([added[name][1] for name in special])
        self._backend.encode_special_tokens = True
        for name, stand_in in [*self._stand_ins.items(), (None, _BREAK)]:
            like = None if name is None else added[name][1]
            swallows = {side: getattr(like, side, False) for side in ("lstrip", "rstrip")}
            self._backend.add_tokens([AddedToken(stand_in, special=False, normalized=False, **swallows)])
        self._meant = {self._backend.token_to_id(text): added[name][0] for name, text in self._stand_ins.items()}
        self._break = self._backend.token_to_id(_BREAK)
        unknown = tokenizer.unk_token  # what a tokenizer cannot write is no forgery, unless the same token ends a turn
        harmless = {unknown} - {tokenizer.eos_token, tokenizer.bos_token, *written}
        self._control = {added[name][0] for name in special if name not in harmless}
        self._marked = {form: Form(tuple(map(self._mark, form.literals))) for form in forms}
        self._remembered: dict[tuple[Form, tuple[str, ...]], tuple[int, ...]] = {}

    def _mark(self, literal: str) -> str:
        return self._names.sub(lambda name: self._stand_ins[name[0]], literal)

    def encode(self, form: Form, contents: Sequence[str]) -> list[int]:
        """Tokens of a form with these contents, each trimmed as the template does it.

        The form is one of those given at first, or has no control tokens that these have not. What was asked for
        lately is remembered: the episodes of a group begin alike.
        """
        asked = form, tuple(contents)
        if asked not in self._remembered:
            if len(self._remembered) == _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest one
            self._remembered[asked] = self._encode(*asked)
        return list(self._remembered[asked])

    def _encode(self, form: Form, contents: tuple[str, ...]) -> tuple[int, ...]:
        marked = self._marked.get(form)
        if marked is None:
            marked = self._marked[form] = Form(tuple(map(self._mark, form.literals)))
        texts = [_OURS.sub(f"\u27e6{_BREAK}", text) for text in form.trimmed(contents)]
        while True:
            encoding = self._backend.encode(marked.text(texts), add_special_tokens=False)
            broken = self._broken(encoding, marked.literals, texts)
            if broken == texts:
                return tuple(self._meant.get(token, token) for token in encoding.ids if token != self._break)
            texts = broken

    def _broken(self, encoding: Any, literals: Sequence[str], texts: list[str]) -> list[str]:
        """The contents with every forged control token broken in the middle, or left out when it is one character.

        Some models reach a control token by its text alone: it is a piece like any other (unigram), or a whole word.
        """
        if self._control.isdisjoint(encoding.ids):
            return texts
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token in self._control]
        broken, start = [], 0
        for literal, text in zip(literals, texts, strict=False):
            start += len(literal)
            pieces, done = [], 0
            for first, last in ((first - start, last - start) for first, last in spans):
                if last > 0 and first < len(text):  # else it is another content's, or the template's own
                    middle = 0 if first < 0 else len(text) if last > len(text) else (first + last) // 2
                    pieces += [text[done:middle], _BREAK]
                    done = middle + 1 if last - first == 1 else middle
            broken.append("".join([*pieces, text[done:]]))
            start += len(text)
        return broken
