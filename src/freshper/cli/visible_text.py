"""Text that somebody else wrote, made safe to show in a terminal. Needs no library: errors are shown by it as well."""

# Signs that would move the cursor, ring or clear the screen are shown, not obeyed: whoever babbles may send them.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(127, 160), 0x2421
)


def visible(text: str) -> str:
    """Text of somebody else's with its control characters as signs that can be seen."""
    return text.translate(_VISIBLE)
