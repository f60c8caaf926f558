"""Chat templates, one turn at a time: token in, token out, at a cost that does not grow with the conversation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from freshper.errors import ConfigError
from freshper.policies.spelling import Form, Spelling
from freshper.policies.templates import (
    FIRST,
    REPLY,
    SECOND,
    SYSTEM,
    Message,
    Study,
    Template,
    end_of_turn,
    reply_notes,
    study,
    study_system,
)

logger = logging.getLogger("freshper.policies")


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

    def __init__(
        self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None, *, picture: str | None = None
    ) -> None:
        """Learn the chat template of ``tokenizer``.

        Args:
            tokenizer: a fast transformers tokenizer.
            template_arguments: variables for its template.
            picture: for image-text models, the one token that their template writes where a picture is shown. The
                content of a message is then given to the template as a list of parts.

        Raises :class:`ConfigError` when there is no chat template, when it refuses that user and assistant take
        turns or does not show what they say, when it does not open the reply, when nothing can end a reply, and when
        pictures are not written one token each.
        """
        self._tokenizer = tokenizer
        self._picture = picture
        template = Template(tokenizer, dict(template_arguments or {}), parts=picture is not None)
        self._template = template
        plain = study(template, None)
        asked = study_system(template)
        # Some templates put the system message into the last user turn: there it would move from turn to turn.
        self.has_system = asked is not None and (asked.stable or not plain.stable)
        chosen = asked if asked is not None and self.has_system else plain
        notes = [*plain.notes, *chosen.notes, *reply_notes(template)]
        if plain.following.literals != chosen.following.literals:
            notes.append("the template writes later turns differently when there is no system message")
        if "strftime_now" in template.source and "date_string" not in template.arguments:
            notes.append("the template writes today's date: a run resumed tomorrow reads another prompt")
        end, _ = end_of_turn(tokenizer, chosen.following.literals[0])
        eos = tokenizer.eos_token
        if end is None and eos is None:
            raise ConfigError(
                "the chat template puts no special token after a reply and the tokenizer has no eos_token: no reply "
                "could end before its length limit"
            )
        if end is None:
            notes.append(f"the template puts no end token after a reply: replies end with {eos!r}, which stays")
        self._end = end
        opener = str(eos if end is None else end)
        ends = [tokenizer.convert_tokens_to_ids(opener), *([] if eos is None else [tokenizer.eos_token_id])]
        self.end_tokens: tuple[int, ...] = tuple(dict.fromkeys(map(int, ends)))
        self._turns = {0: self._turns_of(plain, chosen)}
        if picture is not None:
            self._turns[1], more = self._study_turns(1)
            notes += more
        self._spelling = Spelling(tokenizer, [form for turns in self._turns.values() for form in turns])
        notes += self._seam_notes()
        self.differences: tuple[str, ...] = tuple(dict.fromkeys(notes))
        if self.differences:
            _log_once(f"chat template: sampled tokens are kept as they are, though {'; '.join(self.differences)}")

    def first(self, observation: str, instructions: str | None, *, pictures: int = 0) -> list[int]:
        """Tokens of the conversation's beginning, up to where the reply begins.

        Without instructions (None, or an empty text) a template that has a default system message writes it. Each of
        the ``pictures`` that stand before the observation is one token, that of the template.
        """
        turns = self._showing(pictures)
        if not instructions:
            return self._spelling.encode(turns.plain, [observation])
        if self.has_system:
            return self._spelling.encode(turns.asked, [instructions, observation])
        return self._spelling.encode(turns.plain, [_joined(instructions, observation)])

    def following(self, observation: str, *, cut: bool, pictures: int = 0) -> list[int]:
        """Tokens between a sampled reply and the next one: what ends the old turn, the observation, the next opening.

        ``cut`` says that the last reply has no end token, because it ran into a limit: then the template's is added.
        ``pictures`` is as in :meth:`first`.

        Special tokens that stand in the observation as text are spelled, and so is every other added token that the
        template itself writes: an environment can neither end its turn nor open another one, nor forge a picture.
        Where a tokenizer has no other way to write such a text, it is broken in two; a single character of that kind
        is left out.
        """
        tokens = self._spelling.encode(self._showing(pictures).following, [observation])
        opener = tokens.index(self.end_tokens[0])  # a normalizer may have put a token in front of it
        return tokens[opener if cut and self._end is not None else opener + 1 :]

    def _showing(self, pictures: int) -> _Turns:
        if pictures not in self._turns:
            self._turns[pictures], _ = self._study_turns(pictures)
        return self._turns[pictures]

    def _study_turns(self, pictures: int) -> tuple[_Turns, tuple[str, ...]]:
        """The forms of turns that show so many pictures, and notes.

        Raises :class:`ConfigError` for a template that hides some.
        """
        if self._picture is None:
            raise ConfigError(f"a turn shows {pictures} pictures, and the model reads text alone")
        template = self._template.showing(pictures)
        plain = study(template, None)
        turns = self._turns_of(plain, study(template, SYSTEM) if self.has_system else plain)
        for form in turns:
            written = sum(literal.count(self._picture) for literal in form.literals)
            if written != pictures:
                raise ConfigError(
                    f"the chat template writes {self._picture!r} {written} times for {pictures} pictures: the model "
                    "would not know what it is shown"
                )
        return turns, plain.notes

    def _turns_of(self, plain: Study, chosen: Study) -> _Turns:
        end, rest = end_of_turn(self._tokenizer, chosen.following.literals[0])
        opener = str(self._tokenizer.eos_token if end is None else end)
        following = Form((opener + rest, *chosen.following.literals[1:]), chosen.following.trims)
        return _Turns(plain.opening, chosen.opening, following)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of reply tokens without end tokens and special tokens.

        Bytes that are no valid UTF-8 become replacement characters; ids that the tokenizer does not know (models pad
        their vocabulary) are left out.
        """
        kept = [int(token) for token in tokens if token not in self.end_tokens]
        return str(self._tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=True))

    def messages(
        self, texts: Sequence[str], instructions: str | None, *, pictures: Sequence[int] | None = None
    ) -> list[Message]:
        """The conversation that ``texts`` (observation, reply, observation, ...) make, as the template takes it.

        ``pictures`` says how many each observation shows.
        """
        if not instructions or self.has_system:
            return self._template.messages(texts, instructions or None, pictures)
        return self._template.messages([_joined(instructions, texts[0]), *texts[1:]], None, pictures)

    def _seam_notes(self) -> Iterator[str]:
        """Placeholders encoded turn by turn, against the same encoded whole."""
        for shown in self._turns:
            whole = self._template.tokens(self.messages([FIRST], SYSTEM, pictures=[shown]))
            if self.first(FIRST, SYSTEM, pictures=shown) != whole:
                yield "the first turn is tokenized differently in the whole conversation"
            whole = self._template.tokens(self.messages([FIRST, REPLY, SECOND], None, pictures=[shown, shown]))
            tail = self.following(SECOND, cut=True, pictures=shown)
            if whole[-len(tail) :] != tail:
                yield "later turns are tokenized differently in the whole conversation"


class _Turns(NamedTuple):
    """The forms of a first turn without and with instructions, and of any later turn."""

    plain: Form
    asked: Form
    following: Form


@functools.cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)


def _joined(instructions: str, observation: str) -> str:
    return f"{instructions}\n\n{observation}"
