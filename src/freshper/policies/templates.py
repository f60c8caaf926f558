"""What a chat template writes around the texts of a conversation: learned by rendering it with placeholders."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from freshper.errors import ConfigError
from freshper.policies.spelling import Form, Trim

SYSTEM, FIRST, REPLY, SECOND, AGAIN, THIRD = (
    f"freshper{name}probe" for name in ("system", "first", "reply", "second", "again", "third")
)
_REASONING = f"<think>\nbecause\n</think>\n\n{REPLY}"
_AWKWARD = "\n\t <b>Ä & 'x' \\ {{ y }}</b>\n\t "  # a content that a template might trim or rewrite


Message = dict[str, Any]


class Template:
    """A tokenizer's chat template. What goes wrong inside a template becomes a :class:`ConfigError`.

    With ``parts`` the content of a message is a list of parts, as image-text models take it, not a text.
    """

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], *, parts: bool = False) -> None:
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
        self._parts = parts
        self._pictures = 0
        try:
            self.source: str = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates, and none is the default
            raise ConfigError(f"the tokenizer's chat templates cannot be used: {error}") from error

    def showing(self, pictures: int) -> Template:
        """The same template, for conversations in which every user message shows so many pictures before its text."""
        other = copy.copy(self)
        other._pictures = pictures
        return other

    def messages(
        self, texts: Sequence[str], system: str | None, pictures: Sequence[int] | None = None
    ) -> list[Message]:
        """The conversation of ``texts`` (observation, reply, ...), ``pictures`` shown by each observation."""
        shown = [self._pictures] * len(texts) if pictures is None else [count for count in pictures for _ in range(2)]
        turns = [
            {"role": "assistant", "content": self._content(text, 0)}
            if place % 2
            else {"role": "user", "content": self._content(text, shown[place])}
            for place, text in enumerate(texts)
        ]
        return turns if system is None else [{"role": "system", "content": self._content(system, 0)}, *turns]

    def _content(self, text: str, pictures: int) -> Any:
        return [*[{"type": "image"}] * pictures, {"type": "text", "text": text}] if self._parts else text

    def _apply(self, messages: list[Message], **how: Any) -> Any:
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
        return str(self._apply(self.messages(texts, system), tokenize=False, add_generation_prompt=opened))

    def tokens(self, messages: list[Message]) -> list[int]:
        """The same conversation, encoded whole."""
        return list(self._apply(messages, tokenize=True, add_generation_prompt=True))

    def tail(self, texts: Sequence[str], system: str | None) -> str:
        """What is rendered after the first reply."""
        return self.text(texts, system).partition(REPLY)[2]


@dataclass(frozen=True, slots=True)
class Study:
    """What was learned of a template: the first turn, any later turn, and what cannot be had turn by turn."""

    opening: Form
    following: Form
    stable: bool  # a turn keeps its text when the conversation grows
    notes: tuple[str, ...]


def study_system(template: Template) -> Study | None:
    """The template with a system message; None when it refuses one, hides it, or does not keep it in the first turn."""
    try:
        return study(template, SYSTEM)
    except ConfigError:
        return None


def study(template: Template, system: str | None) -> Study:
    """What the template does, with or without ``system``. Raises :class:`ConfigError` where it hides texts."""
    one = template.text([FIRST], system)
    three = template.text([FIRST, REPLY, SECOND], system)
    five = template.text([FIRST, REPLY, SECOND, AGAIN, THIRD], system)
    opening = _cut(one, [FIRST] if system is None else [system, FIRST])
    head, tail = _cut(three, [REPLY])
    following = _cut(tail, [SECOND])
    if system is not None and system in tail:
        raise ConfigError("the chat template moves the system message to a later turn")
    notes = [_growth_note(template, system, one, head)]
    stable = notes[0] is None and five.startswith(head + REPLY + following[0])
    later = _cut(five, [AGAIN])[1]
    if not five.startswith(head + REPLY + following[0]) or later != tail.replace(SECOND, THIRD):
        notes.append("the template writes later turns differently from earlier ones (it may number them)")
    before = [] if system is None else [system]
    slots = [
        _Slot(opening, [*before, ""], lambda text: template.text([text], system)),
        _Slot(following, [""], lambda text: template.tail([FIRST, REPLY, text], system)),
    ]
    trims = [slot.trim() for slot in slots]
    if system is not None:
        trims.insert(0, _Slot(opening, ["", FIRST], lambda text: template.text([FIRST], text)).trim())
    if None in trims:
        notes.append("the template rewrites messages, which are kept here")
    if not all(slot.same("") for slot in slots):
        notes.append("the template writes an empty message in another way")
    known = [str if trim is None else trim for trim in trims]
    forms = Form(opening, tuple(known[:-1])), Form(following, tuple(known[-1:]))
    return Study(*forms, stable, tuple(note for note in notes if note is not None))


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


def _growth_note(template: Template, system: str | None, one: str, head: str) -> str | None:
    """How the text ``head`` before the first reply, seen from the next turn, differs from what it was (``one``)."""
    if head.startswith(one) and not head[len(one) :].strip():
        return None
    if one.startswith(head):
        return f"the template leaves {one[len(head) :]!r} out before the replies of earlier turns"
    if not head.startswith(one):
        return "the template rewrites earlier turns when the conversation grows"
    if one == template.text([FIRST], system, opened=False):
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

    def same(self, text: str, trim: Trim = str) -> bool:
        """Whether the template writes ``text`` as its trimmed self."""
        filled = [content or trim(text) for content in self.contents]
        try:
            return self.render(text) == Form(self.literals).text(filled)
        except ConfigError:  # it refuses such a text
            return False

    def trim(self) -> Trim | None:
        """What the template does to the white space around a content; None when it changes more than that."""
        known: tuple[Trim, ...] = (str, str.strip, str.lstrip, str.rstrip)
        return next((trim for trim in known if self.same(_AWKWARD, trim)), None)


def reply_notes(template: Template) -> Iterator[str]:
    """What the template changes in replies, a phrase each."""
    if _REASONING not in template.text([FIRST, _REASONING, SECOND], None):
        yield "the template strips the reasoning (<think>) of earlier replies"
    if f"\n {REPLY} \n" not in template.text([FIRST, f"\n {REPLY} \n", SECOND], None):
        yield "the template trims white space around earlier replies"


def end_of_turn(tokenizer: Any, after: str) -> tuple[str | None, str]:
    """The special token that ends a reply, if the template text after a reply begins with one, and what follows it."""
    text = after.lstrip()
    names = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    end = next((name for name in names if text.startswith(name)), None)
    return (None, after) if end is None else (end, text[len(end) :])
