"""What somebody else wrote cannot steer the terminal."""

from freshper.cli.visible_text import visible


def test_signs_that_steer_a_terminal_are_shown():
    assert visible("a\x1b[2Jb\x07\r\x00\x7f\x9b") == "a\u241b[2Jb\u2407\u240d\u2400\u2421\u2421"
    assert visible("\u202eabc\u2066d\u2028e") == "\u2421abc\u2421d\u2421e"


def test_all_else_stays_as_it_is():
    text = "a line\n\tanother: \u00e9\u4e2d\U0001f600 [bold]"
    assert visible(text) == text
