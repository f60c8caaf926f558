"""Text that somebody else wrote, made safe to show in a terminal. Needs no library: errors are shown by it as well."""

# Signs that would move the cursor, ring, clear the screen, break a line or turn its direction around are shown, not
# obeyed: whoever babbles may send them.
_HIDDEN = [*range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(_HIDDEN, 0x2421)


def visible(text: str) -> str:
    """Text of somebody else's with its control characters as signs that can be seen."""
    return text.translate(_VISIBLE)
