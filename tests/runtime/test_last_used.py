"""The values that were used last, by key."""

from zbpp.runtime.last_used import LastUsed


def test_a_value_is_made_once_and_the_one_that_was_used_longest_ago_goes_first():
    kept, made = LastUsed[int, str](), []

    def value(key):
        return kept.of(key, lambda: made.append(key) or str(key))

    for key in range(64):
        value(key)
    assert value(0) == "0"  # used again: 1 goes first
    value(64)
    assert made == [*range(65)]
    assert [value(key) for key in (0, 2, 64)] == ["0", "2", "64"]
    assert made == [*range(65)]
    value(1)
    assert made == [*range(65), 1]
    kept.clear()
    value(64)
    assert made == [*range(65), 1, 64]
