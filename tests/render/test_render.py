"""Timelines as text, picture, table and trace."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from helpers.timetables import choose_offload, with_offload
from zbpp.planning import compare, plan
from zbpp.render import chrome_trace, render_figures, render_picture, render_table, render_text
from zbpp.schedule import Costs, Links, PlanError, Timetable, simulate

LEGEND = "F forward, B input gradient, W weight gradient, each with its microbatch"


def drawing(timeline, **options):
    """The ruler and the ranks, without the legend."""
    return render_text(timeline, **options).split("\n\n")[0]


def rows(timeline, **options):
    """The ranks alone, from the first column of time 0."""
    return [line[len("rank 0  ") :] for line in drawing(timeline, **options).splitlines()[1:]]


def test_the_staircase_of_zb_h1_reads_as_written_here():
    assert render_text(simulate(plan("zb_h1", 3, 4))).splitlines() == [
        "ms      0              5              10",
        "rank 0  F0 F1 F2 ..... B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "rank 1     F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "rank 2        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
        "",
        f"{LEGEND}; dots: bubble",
    ]


def test_the_second_stage_of_a_rank_is_in_lower_case():
    text = render_text(simulate(plan("zb_v", 2, 2)))
    assert text.splitlines()[1].startswith("rank 0  F0 F1 .. f0 b0 w0 f1 b1 w1 B0 W0 .. B1 W1")
    assert text.endswith("; lower case: the rank's second stage; dots: bubble")


def test_more_than_two_stages_on_a_rank_are_named():
    text = render_text(simulate(Timetable.parse("0F0 1F0 2F0 2BW0 1BW0 0BW0")))
    assert text.splitlines()[1] == "rank 0  0F0 1F0 2F0 2BW0--- 1BW0--- 0BW0---"
    assert "; stage before the letter; dots: bubble" in text


def test_actions_are_drawn_to_scale():
    """The shortest op decides: W0 gets three columns, F and B twice as many."""
    timeline = simulate(Timetable.parse("0F0 0B0 0W0 0F1 0B1 0W1"), Costs(f=10, b=10, w=5))
    assert rows(timeline) == ["F0--- B0--- W0 F1--- B1--- W1"]


def test_a_measured_clock_may_begin_anywhere():
    timeline = simulate(plan("zb_h1", 3, 4))
    later = replace(
        timeline,
        starts=tuple(start + 1234.5 for start in timeline.starts),
        ends=tuple(end + 1234.5 for end in timeline.ends),
    )
    assert render_text(later) == render_text(timeline)
    assert chrome_trace({"a": later}) == chrome_trace({"a": timeline})


@pytest.mark.parametrize("width", [1, 20, 40, 80, 1000])
def test_no_line_is_longer_than_the_width(width):
    timeline = simulate(plan("zb_v", 4, 16), Costs(f=3, b=2, w=1, comm=0.1))
    assert all(len(line) <= max(width, 9) for line in rows(timeline, width=width))


def test_a_narrow_b_beside_a_narrow_w_does_not_read_as_a_whole_backward():
    """`BW0` stood for B1 and W0."""
    text = render_text(simulate(plan("zb_h1", 4, 8), Costs(f=[10, 12, 12, 9])))
    assert "BW" not in text
    assert "|W0" in text
    assert "; without a number: too narrow for it; | : a narrow B before a W; dots: bubble" in text
    whole = render_text(simulate(plan("1f1b", 4, 4), Costs(f=10)), width=90)
    assert "BW" in whole.partition("\n\n")[0]
    assert "|" not in whole


def test_table_shows_figures_or_the_reason():
    outcomes = compare(["1f1b", "zb_h2", "zb_v"], 4, 4)
    assert render_table(outcomes).splitlines() == [
        "schedule  stages/rank  makespan  max span  bubble  bubble rate  peak activations",
        "1f1b                1        21        21       9      42.86 %                 4",
        f"zb_h2{' ' * 77}{outcomes['zb_h2']}",
        "zb_v                2        15        15       3      20.00 %                 4",
    ]
    assert isinstance(outcomes["zb_h2"], PlanError)


def test_figures_are_per_rank_and_largest():
    costs = Costs(saved=3 * 2**30, deferred=2**30, memory_unit="bytes")
    assert render_figures(simulate(plan("zb_h1", 2, 4), costs)).splitlines() == [
        "         span  bubble  bubble rate  peak memory",
        "rank 0     13       1       7.69 %        6 GiB",
        "rank 1     12       0       0.00 %        4 GiB",
        "largest    13       1       7.69 %        6 GiB",
        "makespan 13 ms",
    ]


def test_figures_and_trace_show_the_exposed_exchange():
    """On rank 0 half of W0 runs in F1."""
    timetable = Timetable.parse("0F0 0B0 0F1 0W0 0B1 0W1\n1F0 1B0 1W0 1F1 1B1 1W1")
    timeline = simulate(timetable, Costs(f=3, b=3, w=2, exchange=1))
    assert render_figures(timeline).splitlines() == [
        "         span  bubble  bubble rate  exposed exchange  peak activations",
        "rank 0     26      11      42.31 %                 3               1.5",
        "rank 1     20       4      20.00 %                 4                 1",
        "largest    26      11      42.31 %                 4               1.5",
        "makespan 26 ms",
    ]
    assert "exposed exchange  peak activations" in render_table({"a": timeline, "b": PlanError("no")})
    assert "W: what exchanges have not hidden of it" in render_text(timeline)
    events = chrome_trace({"a": timeline})["traceEvents"]
    exposed = {each["name"]: each["args"].get("exposed_exchange_ms") for each in events}
    assert (exposed["0F0"], exposed["0B0"], exposed["0F1"], exposed["0B1"]) == (1, 1, 0, 1)


def test_trace_is_json_with_one_slice_per_action():
    timeline = simulate(plan("zb_v", 2, 3), Costs(f=0.5, b=1, w=2, comm=0.25))
    events = json.loads(json.dumps(chrome_trace({"zb_v": timeline})))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(slices) == 2 * 2 * 3 * 3
    assert slices[0] == {
        "ph": "X", "name": "0F0", "cat": "F", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500.0,
        "args": {"stage": 0, "op": "F", "microbatch": 0},
    }  # fmt: skip
    for rank, row in enumerate(timeline.timetable.rows):
        own = [event for event in slices if event["pid"] == rank]
        assert [event["name"] for event in own] == list(map(str, row))
        assert [event["ts"] for event in own] == (1000 * timeline.starts[rank]).tolist()


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[..., :3]


def test_picture_shows_every_op_in_its_colour(tmp_path):
    path = tmp_path / "a.png"
    render_picture({"zb_v": simulate(plan("zb_v", 2, 4)), "1f1b": simulate(plan("1f1b", 2, 4))}, path)
    colours = set(map(tuple, (255 * pixels(path)[::3, ::3].reshape(-1, 3)).round().astype(int).tolist()))
    shown = ("2c6fb3", "a9cdf0", "c2570c", "fbc592", "38895a", "b4dfbf", "87479b", "e6e6ea")
    assert colours >= {tuple(bytes.fromhex(colour)) for colour in shown}


def test_a_picture_shows_reductions_below_their_rank(tmp_path):
    """Dark for a rank's first stage, light for its second; none without reductions, in the legend neither."""
    dark, light = "3f4451", "9aa1b0"
    with_them = {"zb_v": simulate(plan("zb_v", 2, 4), Costs(reduce=3))}
    words = words_of(with_them, tmp_path / "with.svg")
    assert "sum of gradients over replicas" in words
    assert "makespan 30 ms (5 ms of reductions at its end), largest bubble rate" in " ".join(words)
    drawn = (tmp_path / "with.svg").read_text()
    # Two of the bars stand in the legend.
    assert [drawn.count(f"fill: #{colour}") for colour in (dark, light)] == [2 + 1, 2 + 1]
    assert "replicas" not in " ".join(words_of({"zb_v": simulate(plan("zb_v", 2, 4))}, tmp_path / "a.svg"))
    assert dark not in (tmp_path / "a.svg").read_text()


def test_a_picture_shows_copies_below_their_rank(tmp_path):
    """One colour for copies out of the device, one for copies back; none of both without offload."""
    timetable, costs = plan("gpipe", 1, 4), Costs(host=0.3)
    offload = choose_offload(simulate(timetable, costs), costs)
    num_trips = len(offload[0]) // 4  # a round trip is four instructions
    assert num_trips >= 2
    words = " ".join(words_of({"a": with_offload(timetable, costs, offload)}, tmp_path / "with.svg"))
    assert "copy out of device memory" in words
    assert "copy back" in words
    drawn = (tmp_path / "with.svg").read_text()
    assert [drawn.count(f"fill: #{colour}") for colour in ("8c5a9e", "c9a3d6")] == [num_trips + 1] * 2
    assert "copy" not in " ".join(words_of({"a": simulate(timetable, costs)}, tmp_path / "a.svg"))


def test_a_picture_shows_messages_on_links_below_the_ranks(tmp_path):
    """x in the two shades of F, g in those of B: while a link is occupied, and on the way."""
    shades = ("2c6fb3", "a9cdf0", "c2570c", "fbc592")
    costs = Costs(links=Links(pairs={(0, 1): (2.0, 1.5)}))
    timelines = {"a": simulate(plan("1f1b", 3, 4), costs)}
    words = words_of(timelines, tmp_path / "with.svg", costs=costs)
    assert {"0 → 1", "rank, link", "activations on a link: sent, on their way"} <= {*words}
    assert "1 → 0" not in words
    words = words_of(timelines, tmp_path / "without.svg", costs=Costs())
    assert not any("→" in each or "link" in each for each in words)
    drawn, without = ((tmp_path / name).read_text() for name in ("with.svg", "without.svg"))
    more = [drawn.count(f"fill: #{each}") - without.count(f"fill: #{each}") for each in shades]
    assert more == [4 + 1, 4 + 1, 1, 1]  # four x's, and what stands in the legend


def test_a_picture_without_links_does_not_change_by_a_byte(tmp_path):
    timelines = {"a": simulate(plan("zb_v", 2, 4), Costs(comm=0.5))}
    drawn = []
    for costs in (None, Costs(comm=0.5), Costs(links=Links()), {}):
        render_picture(timelines, tmp_path / "a.png", costs=costs)
        drawn.append((tmp_path / "a.png").read_bytes())
    assert len({*drawn}) == 1


def test_figures_say_how_long_reductions_take_at_the_end():
    timeline = simulate(plan("zb_h1", 2, 4), Costs(reduce=[1, 2.5]))
    assert render_figures(timeline).endswith("makespan 15.5 ms (2.5 ms of reductions at its end)")
    assert "reduc" not in render_figures(simulate(plan("zb_h1", 2, 4)))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written_as_png_svg_and_pdf(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    render_picture([("one rank", simulate(plan("zb_h1", 1, 2)))], path)
    assert path.stat().st_size > 1000


def words_of(timelines, path, **options):
    """What is written in a picture."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        render_picture(timelines, path, **options)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_picture_says_whose_figures_it_has_and_leaves_out_the_memory_of_processes(tmp_path):
    """All measured panels showed the same memory, that of the process, beside predicted activations."""
    predicted = simulate(plan("zb_h1", 2, 4))
    measured = replace(predicted, peak_memory=(2**29, 2**30), memory_unit="bytes", measured=True)
    words = words_of({"predicted": predicted, "measured": measured}, tmp_path / "a.svg")
    assert "makespan 13 ms, largest bubble rate 7.7 % (rank 0), peak activations 2 (rank 0)" in words
    assert "makespan 13 ms, largest bubble rate 7.7 % (rank 0)" in words


def test_pictures_use_no_pyplot_and_texts_no_matplotlib(tmp_path):
    """pyplot holds global state and may want a display."""
    code = (
        "import sys\nfrom zbpp.planning import plan\nfrom zbpp.schedule import simulate\n"
        "from zbpp.render import chrome_trace, render_picture, render_text\n"
        "timeline = simulate(plan('1f1b', 2, 2)); render_text(timeline); chrome_trace({'a': timeline})\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"render_picture({{'a': timeline}}, {str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
