"""Loops that assert something: over nothing they would assert nothing."""


def filled(values):
    """Yield the values one after another; fail at the end if there was none."""
    empty = True
    for value in values:
        empty = False
        yield value
    assert not empty, "there was nothing to loop over"
