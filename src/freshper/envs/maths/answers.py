r"""The final answer in a reply: ``<answer>…</answer>``, or ``\boxed{…}`` where a model has learned that."""

from __future__ import annotations

LONGEST = 500  # characters; what is longer is no final answer

_BOX = "\\boxed{"


def read_answer(reply: str) -> str | None:
    r"""The final answer of a reply, None when there is none or it is not clear which.

    What stands between the tags counts; without tags, the last ``\boxed{…}``. None when tags are nested, when two
    answers differ (a list of guesses), when the answer is blank, and when it is longer than ``LONGEST`` characters.
    """
    answers = set()
    # Split instead of a regular expression: linear in the reply, whatever a model babbles.
    for part in reply.split("</answer>")[:-1]:
        _, opened, inner = part.rpartition("<answer>")
        if not opened:
            return None
        if inner.strip():
            answers.add(inner.strip())
    if not answers:
        boxed = read_boxed(reply)
        answers = {boxed} if boxed else set()
    if len(answers) != 1:
        return None
    answer = answers.pop()
    inner_box = read_boxed(answer)
    answer = inner_box if inner_box is not None else answer
    return answer if 0 < len(answer) <= LONGEST else None


def read_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}`` of a text, None without a closed one."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(_BOX), min(len(text), start + len(_BOX) + LONGEST + 1)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(_BOX) : place].strip()
    return None
