"""Chat templates, one turn at a time: token in, token out, at a cost that does not grow with the conversation."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freshper.errors import ConfigError

logger = logging.getLogger("freshper.policies")

_SYSTEM, _FIRST, _REPLY, _SECOND, _AGAIN, _THIRD = (
    f"freshper{name}probe" for name in ("system", "first", "reply", "second", "again", "third")
)
_REASONING = f"<think>\nbecause\n</think>\n\n{_REPLY}"
_AWKWARD = "\n\t <b>Ä & 'x' \\ {{ y }}</b>\n\t "  # a content that a template might trim or rewrite
_BREAK = "\u27e6break\u27e7"

_OURS = re.compile("\u27e6(?=(?:\\d+|break)\u27e7)")  # where a text writes the marks of _Spelling: they are broken too

_Trim = Callable[[str], str]


class ChatEncoder:
    """Encodes the turns of a conversation one by one, as a tokenizer's chat template encodes it whole.

    The template is rendered a few times at construction, with placeholders for the texts. What stands around them is
    kept, so that a turn costs the same however long the conversation is, and sampled tokens are never encoded again.
    A turn is tokenized together with the template text around it: where two pieces of text meet, the tokens are those
    of the whole rendering. Two things are deliberately different: white space that a template puts around a reply
    belongs to the reply, and no text can become a control token (see :meth:`following`).

    A template that writes earlier turns differently once the conversation has grown (it strips their reasoning, it
    numbers them) cannot be followed token by token. Then what was sampled stays as it is; ``differences`` names what
    the whole rendering would have changed, and one line per template is logged.

    Attributes: ``end_tokens``, the tokens that end a reply, first the one that the template puts there;
    ``has_system``, whether instructions go into a system message or, without one, in front of the first observation;
    ``differences``, one phrase each, empty when the incremental tokens are those of the whole conversation.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        """``tokenizer`` is a fast transformers tokenizer; ``template_arguments`` are variables for its template.

        Raises :class:`ConfigError` when there is no chat template, when it refuses that user and assistant take
        turns or does not show what they say, when it does not open the reply, and when nothing can end a reply.
        """
        self._tokenizer = tokenizer
        template = _Template(tokenizer, dict(template_arguments or {}))
        plain = _study(template, None)
        asked = _study_system(template)
        # Some templates put the system message into the last user turn: there it would move from turn to turn.
        self.has_system = asked is not None and (asked.stable or not plain.stable)
        chosen = asked if asked is not None and self.has_system else plain
        notes = [*plain.notes, *chosen.notes, *_reply_notes(template)]
        if plain.following.literals != chosen.following.literals:
            notes.append("the template writes later turns differently when there is no system message")
        if "strftime_now" in template.source and "date_string" not in template.arguments:
            notes.append("the template writes today's date: a run resumed tomorrow reads another prompt")
        end, rest = _end_of_turn(tokenizer, chosen.following.literals[0])
        eos = tokenizer.eos_token
        if end is None and eos is None:
            raise ConfigError(
                "the chat template puts no special token after a reply and the tokenizer has no eos_token: no reply "
                "could end before its length limit"
            )
        if end is None:
            notes.append(f"the template puts no end token after a reply: replies end with {eos!r}, which stays")
        self._template_end = end is not None
        opener = str(eos if end is None else end)
        following = _Form((opener + rest, *chosen.following.literals[1:]), chosen.following.trims)
        self._spelling = _Spelling(tokenizer, [plain.opening, chosen.opening, following])
        self._plain, self._asked, self._following = plain.opening, chosen.opening, following
        ends = [tokenizer.convert_tokens_to_ids(opener), *([] if eos is None else [tokenizer.eos_token_id])]
        self.end_tokens: tuple[int, ...] = tuple(dict.fromkeys(map(int, ends)))
        notes += self._seam_notes(template)
        self.differences: tuple[str, ...] = tuple(dict.fromkeys(notes))
        if self.differences:
            _log_once(f"chat template: sampled tokens are kept as they are, though {'; '.join(self.differences)}")

    def first(self, observation: str, instructions: str | None) -> list[int]:
        """Tokens of the conversation's beginning, up to where the reply begins.

        Without instructions (None, or an empty text) a template that has a default system message writes it.
        """
        if not instructions:
            return self._spelling.encode(self._plain, [observation])
        if self.has_system:
            return self._spelling.encode(self._asked, [instructions, observation])
        return self._spelling.encode(self._plain, [_joined(instructions, observation)])

    def following(self, observation: str, *, cut: bool) -> list[int]:
        """Tokens between a sampled reply and the next one: what ends the old turn, the observation, the next opening.

        ``cut`` says that the last reply has no end token, because it ran into a limit: then the template's is added.

        Special tokens that stand in the observation as text are spelled, and so is every other added token that the
        template itself writes: an environment can neither end its turn nor open another one. Where a tokenizer has no
        other way to write such a text, it is broken in two; a single character of that kind is left out.
        """
        tokens = self._spelling.encode(self._following, [observation])
        opener = tokens.index(self.end_tokens[0])  # a normalizer may have put a token in front of it
        return tokens[opener if cut and self._template_end else opener + 1 :]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of reply tokens without end tokens and special tokens.

        Bytes that are no valid UTF-8 become replacement characters; ids that the tokenizer does not know (models pad
        their vocabulary) are left out.
        """
        kept = [int(token) for token in tokens if token not in self.end_tokens]
        return str(self._tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=True))

    def messages(self, texts: Sequence[str], instructions: str | None) -> list[dict[str, str]]:
        """The conversation that ``texts`` (observation, reply, observation, ...) make, as the template takes it."""
        if not instructions or self.has_system:
            return _messages(texts, instructions or None)
        return _messages([_joined(instructions, texts[0]), *texts[1:]], None)

    def _seam_notes(self, template: _Template) -> Iterator[str]:
        """Placeholders encoded turn by turn, against the same encoded whole."""
        whole = template.tokens(self.messages([_FIRST], _SYSTEM))
        if self.first(_FIRST, _SYSTEM) != whole:
            yield "the first turn is tokenized differently in the whole conversation"
        whole = template.tokens(self.messages([_FIRST, _REPLY, _SECOND], None))
        tail = self.following(_SECOND, cut=True)
        if whole[-len(tail) :] != tail:
            yield "later turns are tokenized differently in the whole conversation"


@functools.cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)


def _joined(instructions: str, observation: str) -> str:
    return f"{instructions}\n\n{observation}"


def _messages(texts: Sequence[str], system: str | None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


class _Template:
    """A tokenizer's chat template. What goes wrong inside a template becomes a :class:`ConfigError`."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            raise ConfigError(f"{type(tokenizer).__name__} is no fast tokenizer: load one that has a tokenizer.json")
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so no conversation can be written for the model: name a tokenizer "
                "that has one, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self.arguments = arguments
        try:
            self.source: str = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates, and none is the default
            raise ConfigError(f"the tokenizer's chat templates cannot be used: {error}") from error

    def _apply(self, messages: list[dict[str, str]], **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, return_dict=False, **how, **self.arguments)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:  # templates are programs
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def text(self, texts: Sequence[str], system: str | None, *, opened: bool = True) -> str:
        """The conversation rendered up to where the next reply begins, or without that when not ``opened``."""
        return str(self._apply(_messages(texts, system), tokenize=False, add_generation_prompt=opened))

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """The same conversation, encoded whole."""
        return list(self._apply(messages, tokenize=True, add_generation_prompt=True))

    def tail(self, texts: Sequence[str], system: str | None) -> str:
        """What is rendered after the first reply."""
        return self.text(texts, system).partition(_REPLY)[2]


@dataclass(frozen=True, slots=True)
class _Form:
    """Template text around the contents of messages (one trim each): literal, content, literal, ..., literal."""

    literals: tuple[str, ...]
    trims: tuple[_Trim, ...] = ()

    def trimmed(self, contents: Sequence[str]) -> list[str]:
        return [trim(content) for trim, content in zip(self.trims, contents, strict=True)]

    def text(self, contents: Sequence[str]) -> str:
        """The literals with these contents between them."""
        return self.literals[0] + "".join(
            content + literal for content, literal in zip(contents, self.literals[1:], strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Study:
    """What was learned of a template: the first turn, any later turn, and what cannot be had turn by turn."""

    opening: _Form
    following: _Form
    stable: bool  # a turn keeps its text when the conversation grows
    notes: tuple[str, ...]


def _study_system(template: _Template) -> _Study | None:
    """The template with a system message; None when it refuses one, hides it, or does not keep it in the first turn."""
    try:
        return _study(template, _SYSTEM)
    except ConfigError:
        return None


def _study(template: _Template, system: str | None) -> _Study:
    one = template.text([_FIRST], system)
    three = template.text([_FIRST, _REPLY, _SECOND], system)
    five = template.text([_FIRST, _REPLY, _SECOND, _AGAIN, _THIRD], system)
    opening = _cut(one, [_FIRST] if system is None else [system, _FIRST])
    head, tail = _cut(three, [_REPLY])
    following = _cut(tail, [_SECOND])
    if system is not None and system in tail:
        raise ConfigError("the chat template moves the system message to a later turn")
    notes = [_growth_note(template, system, one, head)]
    stable = notes[0] is None and five.startswith(head + _REPLY + following[0])
    later = _cut(five, [_AGAIN])[1]
    if not five.startswith(head + _REPLY + following[0]) or later != tail.replace(_SECOND, _THIRD):
        notes.append("the template writes later turns differently from earlier ones (it may number them)")
    before = [] if system is None else [system]
    slots = [
        _Slot(opening, [*before, ""], lambda text: template.text([text], system)),
        _Slot(following, [""], lambda text: template.tail([_FIRST, _REPLY, text], system)),
    ]
    trims = [slot.trim() for slot in slots]
    if system is not None:
        trims.insert(0, _Slot(opening, ["", _FIRST], lambda text: template.text([_FIRST], text)).trim())
    if None in trims:
        notes.append("the template rewrites messages, which are kept here")
    if not all(slot.same("") for slot in slots):
        notes.append("the template writes an empty message in another way")
    known = [str if trim is None else trim for trim in trims]
    forms = _Form(opening, tuple(known[:-1])), _Form(following, tuple(known[-1:]))
    return _Study(*forms, stable, tuple(note for note in notes if note is not None))


def _cut(text: str, marks: Sequence[str]) -> tuple[str, ...]:
    """What stands around the marks. Raises :class:`ConfigError` unless each is there once, in this order."""
    counts = [text.count(mark) for mark in marks]
    if counts != [1] * len(marks):
        raise ConfigError(
            f"the chat template shows the texts of a conversation {counts} times: each must be there once and unchanged"
        )
    pieces = re.split("|".join(map(re.escape, marks)), text)
    if "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True)) != text:
        raise ConfigError("the chat template changes the order of a conversation")
    return tuple(pieces)


def _growth_note(template: _Template, system: str | None, one: str, head: str) -> str | None:
    """How the text ``head`` before the first reply, seen from the next turn, differs from what it was (``one``)."""
    if head.startswith(one) and not head[len(one) :].strip():
        return None
    if one.startswith(head):
        return f"the template leaves {one[len(head) :]!r} out before the replies of earlier turns"
    if not head.startswith(one):
        return "the template rewrites earlier turns when the conversation grows"
    if one == template.text([_FIRST], system, opened=False):
        raise ConfigError(
            f"the chat template renders no generation prompt: it never writes {head[len(one) :]!r}, which stands "
            "before a reply, so a model would not know that it is its turn"
        )
    return f"the template adds {head[len(one) :]!r} before the replies of earlier turns"


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of one content (the empty one of ``contents``) in a form, and how the template fills it."""

    literals: tuple[str, ...]
    contents: list[str]
    render: Callable[[str], str]

    def same(self, text: str, trim: _Trim = str) -> bool:
        """Whether the template writes ``text`` as its trimmed self."""
        filled = [content or trim(text) for content in self.contents]
        try:
            return self.render(text) == _Form(self.literals).text(filled)
        except ConfigError:  # it refuses such a text
            return False

    def trim(self) -> _Trim | None:
        """What the template does to the white space around a content; None when it changes more than that."""
        known: tuple[_Trim, ...] = (str, str.strip, str.lstrip, str.rstrip)
        return next((trim for trim in known if self.same(_AWKWARD, trim)), None)


def _reply_notes(template: _Template) -> Iterator[str]:
    if _REASONING not in template.text([_FIRST, _REASONING, _SECOND], None):
        yield "the template strips the reasoning (<think>) of earlier replies"
    if f"\n {_REPLY} \n" not in template.text([_FIRST, f"\n {_REPLY} \n", _SECOND], None):
        yield "the template trims white space around earlier replies"


def _end_of_turn(tokenizer: Any, after: str) -> tuple[str | None, str]:
    """The special token that ends a reply, if the template text after a reply begins with one, and what follows it."""
    text = after.lstrip()
    names = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    end = next((name for name in names if text.startswith(name)), None)
    return (None, after) if end is None else (end, text[len(end) :])


class _Spelling:
    """Encodes forms: control tokens in the literals stay what they are, in the contents they are spelled.

    Works on a copy of the tokenizer that spells all control tokens and knows a stand-in for each one that a literal
    holds, which swallows the white space beside it if that one does. So the text between two control tokens reaches
    the normalizer, the pre-tokenizer and the model just as it does in the whole conversation. Only a control token that
    the tokenizer finds in the *normalized* text is treated otherwise: a combining character beside it would hide it.
    """

    def __init__(self, tokenizer: Any, forms: Sequence[_Form]) -> None:
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
        self._marked = {form: _Form(tuple(map(self._mark, form.literals))) for form in forms}

    def _mark(self, literal: str) -> str:
        return self._names.sub(lambda name: self._stand_ins[name[0]], literal)

    def encode(self, form: _Form, contents: Sequence[str]) -> list[int]:
        """Tokens of one of the forms with these contents, each trimmed as the template does it."""
        marked = self._marked[form]
        texts = [_OURS.sub(f"\u27e6{_BREAK}", text) for text in form.trimmed(contents)]
        while True:
            encoding = self._backend.encode(marked.text(texts), add_special_tokens=False)
            broken = self._broken(encoding, marked.literals, texts)
            if broken == texts:
                return [self._meant.get(token, token) for token in encoding.ids if token != self._break]
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
