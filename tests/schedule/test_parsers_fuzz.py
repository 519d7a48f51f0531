"""Whatever text comes in: a timetable comes out, or a PlanError that says where. Never anything else.

Texts are drawn at three distances from valid ones: any characters, any pieces of the grammars, and
valid texts with a few pieces changed.
"""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.timetables import random_timetable
from zbpp.planning import about_in_words, read_costs, read_memory_limit
from zbpp.schedule import Costs, CostsInBytes, PlanError, Timetable, from_csv, to_csv

FORMS = {"text": (str, Timetable.parse), "csv": (to_csv, from_csv)}
EXAMPLES = settings(max_examples=150)

# How a refusal begins: with a place in the text, or with what the text lacks as a whole.
PLACES = {
    "text": r"line \d+, word \d+: ",
    "csv": r"line \d+(, cell \d+: | has no actions| is no CSV: )",
}
EMPTY = "a timetable needs at least one rank"

PIECES = [
    *"0123456789 \n\r\t,;()\"'[]{}:-", "F", "I", "B", "W", "BW", "0F0", "0B0", "0W0", "1F0", "0BW0", "1I0",
    "SEND_F", "RECV_B", "UNSHARD", "0REDUCE_GRAD", "(0F1;0B0)OVERLAP_F_B", ")OVERLAP_F_B", "2147483648",
    "99999999999999999999", "\0", "\u2028", "٣", "\ud800", "-1", "1e999",
]  # fmt: skip


def check(form: str, text: str) -> None:
    """The claim of this file, for one text."""
    write, read = FORMS[form]
    try:
        timetable = read(text)
    except PlanError as error:
        refusal = str(error)
        assert refusal == EMPTY or re.match(PLACES[form], refusal), refusal
        assert len(refusal) < 700
        return
    assert read(write(timetable)) == timetable
    assert len(timetable.rank_of) == timetable.num_stages
    assert set(timetable.rank_of) == set(range(timetable.num_ranks))


def mutated(text: str, rng: random.Random) -> str:
    """The text after a few pieces of it were dropped, doubled, moved or replaced."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 1, 2, 5, 40)))
        kept = text[start:end]
        text = text[:start] + rng.choice(["", kept + kept, rng.choice(PIECES), *PIECES[:6]]) + text[end:]
    return text


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(text=st.text())
def test_any_characters_give_a_timetable_or_a_place(form, text):
    check(form, text)


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(pieces=st.lists(st.sampled_from(PIECES)))
def test_any_pieces_of_the_grammars_give_a_timetable_or_a_place(form, pieces):
    check(form, "".join(pieces))


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_valid_texts_with_a_few_changes_give_a_timetable_or_a_place(form, seed):
    rng = random.Random(seed)
    check(form, mutated(FORMS[form][0](random_timetable(rng, most_microbatches=3)), rng))


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_a_text_of_another_form_is_never_taken_for_a_timetable(form, seed):
    """With more than one action on a rank: 0F0 alone is the same in text and in CSV."""
    rng = random.Random(seed)
    timetable = random_timetable(rng)
    for other, (write, _) in FORMS.items():
        if other != form and max(map(len, timetable.rows)) > 1:
            with pytest.raises(PlanError, match=PLACES[form]):
                FORMS[form][1](write(timetable))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["0F0 0BW0", "1F0", "", "0I0"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@EXAMPLES
@given(
    seed=st.integers(0, 2**32),
    wrong=st.sampled_from(["?", "0G0", "F0", "0F", "0f0", "0F-1", "-1F0", "x" * 40]),
)
def test_a_planted_word_is_the_one_that_is_named(seed, wrong):
    rng = random.Random(seed)
    timetable = random_timetable(rng)
    blank_lines = rng.randrange(3)
    rank = rng.randrange(timetable.num_ranks)
    position = rng.randrange(len(timetable.rows[rank]))

    def planted(text, between):
        rows = [row.split(between) for row in text.splitlines()]
        rows[rank][position] = wrong
        return rows

    line, complaint = blank_lines + rank + 1, f"{re.escape(repr(wrong))} is no action"
    rows = [" ".join(row) for row in planted(str(timetable), " ")]
    with pytest.raises(PlanError, match=rf"^line {line}, word {position + 1}: {complaint}"):
        Timetable.parse("\n" * blank_lines + "\n".join(rows))

    idle = [
        [cell for each in row for cell in [*[""] * rng.randrange(3), each]]
        for row in planted(to_csv(timetable), ",")
    ]
    cell = idle[rank].index(wrong) + 1
    with pytest.raises(PlanError, match=rf"^line {line}, cell {cell}: {complaint}"):
        from_csv("\n" * blank_lines + "\n".join(map(",".join, idle)))


@EXAMPLES
@given(
    entry=st.sampled_from(["f", "bw", "comm", "saved", "memory_unit", "about", "\x1b[2J"]),
    value=values | st.text(),
)
def test_any_value_in_any_entry_of_a_costs_file_gives_costs_or_a_refusal(tmp_path_factory, entry, value):
    path = tmp_path_factory.getbasetemp() / "costs.json"
    path.write_text(json.dumps({"f": 1, entry: value}))
    try:
        costs, about = read_costs(path)
    except PlanError as error:
        refusal = str(error)
        assert refusal.startswith(f"{path}: ")
        assert refusal.isprintable()
        return
    assert Costs(**costs.numbers).per_stage(len(value) if isinstance(value, list) else 3)
    assert about_in_words(about).isprintable()


@EXAMPLES
@given(text=st.text() | st.from_regex(r"[0-9.e+,-]{0,8} ?[kMGT]?i?B?", fullmatch=True))
def test_any_text_as_a_memory_limit_gives_a_number_or_a_refusal(text):
    for costs in (Costs(), CostsInBytes()):
        try:
            limit = read_memory_limit(text, costs)
        except PlanError as error:
            refusal = str(error)
            assert refusal.isprintable()
        else:
            assert all(each >= 0 for each in (limit if isinstance(limit, list) else [limit]))
