"""The HTML page, as Chromium draws it: what reaches the screen against what the simulator knows.

A script that runs before the page's own notes whatever is painted; the page itself is asked nothing.
"""

import html
import itertools
import math
import re
from collections.abc import Callable, Iterator

import pytest

from helpers.browser import Browser, find_chromium
from helpers.page import NOTE_WHAT_IS_PAINTED, click, complaints, hover, painted, pixel, ruler, visible
from zbpp.planning import plan
from zbpp.render import render_page
from zbpp.render.style import COLOURS, REDUCTION_COLOURS
from zbpp.schedule import Action, Costs, Links, Op, Timeline, Timetable, consumes, produces, simulate

COSTS = Costs(f=18.5, b=18.1, w=9.3, comm=0.6)
LENGTHS = [1, 0.5, 0.5, 0.5, 1, 1, 1, 1, 0.5, 0.5, 1, 2]
HALVES = Costs.of_lengths(LENGTHS, Costs(f=9, b=9, w=5, comm=0.6, saved=0.5, deferred=0.25))
OWN = {"1f1b": COSTS, "zb_h1": COSTS, "zb_v": HALVES}
TIMELINES = {name: simulate(plan(name, 4, 12, costs=own), own) for name, own in OWN.items()}


@pytest.fixture(scope="module")
def chromium() -> str:
    path = find_chromium()
    if path is None:
        pytest.skip(
            "no Chromium here; on Debian `apt-get install chromium` brings one, $CHROMIUM names another"
        )
    return path


@pytest.fixture(scope="module")
def tabs(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Browser]]:
    """Shows a page; the one before is gone."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    with Browser(chromium, first=NOTE_WHAT_IS_PAINTED) as browser:

        def show(text: str) -> Browser:
            path.write_text(text)
            browser.open(path)
            return browser

        yield show


@pytest.fixture(scope="module")
def three(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page of TIMELINES."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page(TIMELINES, title="Three", notes=["a note"], costs=OWN, memory_limit=4))
    with Browser(chromium, first=NOTE_WHAT_IS_PAINTED) as browser:
        browser.open(path)
        yield browser


@pytest.fixture
def page(three: Browser) -> Iterator[Browser]:
    """The same, showing all of the time, with the pointer elsewhere. Afterwards no script has failed."""
    three.mouse("mouseMoved", 1, 1)
    click(three, "[data-key='0']")
    yield three
    assert complaints(three) == []


def boxes(browser: Browser) -> list[list[tuple[str, float, float, float]]]:
    """Per panel (fill, left, right, top) of each box, in the order of painting."""
    fills = set(itertools.chain(*COLOURS.values()))
    found: list[list[tuple[str, float, float, float]]] = [[] for _ in TIMELINES]
    for call in painted(browser, "fillRect"):
        x, y, width, _ = call.arguments
        if call.fill in fills:
            found[call.panel].append((call.fill, x, x + width, y))
    return found


def actions(timeline: Timeline) -> Iterator[tuple[int, Action, float, float]]:
    """(rank, action, start, end) rank by rank."""
    for rank, row in enumerate(timeline.timetable.rows):
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            yield rank, action, float(start), float(end)


def levels(timeline: Timeline, costs: Costs, rank: int) -> list[float]:
    """Memory after each action, F +saved, B -saved +deferred, W -deferred, BW -saved; times the length."""
    change = {
        Op.F: costs.saved,
        Op.B: costs.deferred - costs.saved,
        Op.W: -costs.deferred,
        Op.BW: -costs.saved,
    }
    lengths = costs.lengths or [1.0] * 12
    row = timeline.timetable.rows[rank]
    return list(itertools.accumulate(change[action.op] * lengths[action.microbatch] for action in row))


# ---------------------------------------------------------------- what is painted


def test_nothing_is_fetched_and_nothing_complains(page):
    requests = [event["params"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    own = [each["request"]["url"] for each in requests if each["documentURL"].startswith("file:")]
    assert [url for url in own if not url.startswith("data:")] == [page.evaluate("location.href")]


def test_every_action_is_one_box_in_the_pictures_colours(page):
    for timeline, found in zip(TIMELINES.values(), boxes(page), strict=True):
        timetable = timeline.timetable
        shades = [
            timetable.stages_of(timetable.rank_of[stage]).index(stage)
            for stage in range(timetable.num_stages)
        ]
        expected = [COLOURS[action.op][shades[action.stage]] for _, action, _, _ in actions(timeline)]
        assert [fill for fill, *_ in found] == expected


def test_reductions_are_thin_bars_below_their_ranks_boxes(tabs):
    """Between the boxes of their rank and those of the next one, in the shade of their stage."""
    timeline = simulate(plan("zb_v", 4, 8), Costs(reduce=5))
    browser = tabs(render_page({"a": timeline}, costs=COSTS))
    zero, scale = ruler(browser)
    calls = painted(browser, "fillRect")
    bars = [call for call in calls if call.fill in REDUCTION_COLOURS]
    tops = sorted({call.arguments[1] for call in calls if call.fill in COLOURS[Op.F]})
    assert len(bars) == len(timeline.reductions) == 8
    for bar, (stage, rank, start, end) in zip(bars, timeline.reductions, strict=True):
        x, y, width, height = bar.arguments
        assert bar.fill == REDUCTION_COLOURS[stage >= 4]
        assert (x, x + width) == pytest.approx((zero + start * scale, zero + end * scale), abs=2)
        assert tops[rank] < y < y + height < [*tops, math.inf][rank + 1]
    assert "stage 7 is complete" in "".join(hover(browser, 0, 0, last_end_of(timeline, 7) - 0.5))
    assert complaints(browser) == []


def test_messages_on_links_are_strips_below_the_ranks(tabs):
    """By hand: x(1,0) goes out from 10 to 25 and arrives at 45, x(1,1) from 25 to 40, and arrives at 60."""
    costs = Costs(f=10, b=10, w=10, links=Links(pairs={(0, 1): (20.0, 15.0)}))
    timeline = simulate(plan("1f1b", 2, 2), costs)
    without = tabs(render_page({"a": timeline}, costs=Costs(f=10, b=10, w=10)))
    num_boxes = len(painted(without, "fillRect"))
    browser = tabs(render_page({"a": timeline}, costs=costs))
    zero, scale = ruler(browser)
    strips = painted(browser, "fillRect")[num_boxes:]
    found = [
        (call.fill, *((x - zero) / scale for x in (call.arguments[0], sum(call.arguments[:3:2]))))
        for call in strips
    ]
    dark, light = COLOURS[Op.F]
    expected = [(light, 25, 45), (light, 40, 60), (dark, 10, 25), (dark, 25, 40)]
    for (fill, *times), (colour, *edges) in zip(found, expected, strict=True):
        assert fill == colour
        assert times == pytest.approx(edges, abs=2 / scale)
    lowest = max(call.arguments[1] for call in painted(browser, "fillRect")[:num_boxes])
    assert min(call.arguments[1] for call in strips) > lowest
    assert "0 → 1" in {call.arguments[0] for call in painted(browser, "fillText")}
    assert complaints(browser) == []


def test_a_page_without_links_says_nothing_of_them():
    timelines = {"a": simulate(plan("zb_v", 2, 4), Costs(comm=0.5))}
    pages = {render_page(timelines, costs=Costs(comm=0.5, links=links)) for links in (None, Links())}
    assert len(pages) == 1
    assert '"links"' not in pages.pop()


def last_end_of(timeline: Timeline, stage: int) -> float:
    return max(end for _, action, _, end in actions(timeline) if action.stage == stage)


def test_boxes_stand_where_the_ruler_says_that_they_ran(page):
    for panel, (timeline, found) in enumerate(zip(TIMELINES.values(), boxes(page), strict=True)):
        zero, scale = ruler(page, panel)
        for (_, left, right, _), (_, _, start, end) in zip(found, actions(timeline), strict=True):
            assert left == pytest.approx(zero + start * scale, abs=1)
            assert right == pytest.approx(
                zero + end * scale, abs=2
            )  # a box ends with a gap of a pixel at most


def test_the_curve_is_the_level_and_the_dot_its_peak(page):
    """Heights in the unit that makes the limit, which is the highest of all, 4."""
    curves, dots = painted(page, "curve"), painted(page, "arc")
    expected = [
        (panel, timeline.peak_memory[rank], levels(timeline, OWN[name], rank), timeline.ends[rank])
        for panel, (name, timeline) in enumerate(TIMELINES.items())
        for rank in range(4)
    ]
    assert max(peak for _, peak, _, _ in expected) == 4.0
    unit = max(curve.arguments[-1][1] - min(y for _, y in curve.arguments) for curve in curves) / 4.0
    for (panel, peak, after, ends), curve, dot in zip(expected, curves, dots, strict=True):
        zero, scale = ruler(page, panel)
        base = curve.arguments[-1][1]  # a step ends with nothing held
        heights = [(base - y) / unit for _, y in curve.arguments[1::2]]
        assert curve.panel == panel
        assert heights == pytest.approx(after, abs=1e-6)
        assert max(heights) == pytest.approx(peak)
        x, y = dot.arguments[:2]
        assert (base - y) / unit == pytest.approx(peak)
        assert x == pytest.approx(zero + ends[after.index(max(after))] * scale, abs=1)


# ---------------------------------------------------------------- what it tells


def test_hovering_tells_times_needs_and_memory(page):
    """By hand: 3F0 ends at 3 (F + .6) + F = 75.8, 3B0 at 93.9, 2F0 at 2 (F + .6) + F = 56.7, 2F1 at 75.2."""
    assert hover(page, 1, 2, 100.0) == [
        "2B0",
        "rank 2: 94.5 – 112.6 ms (18.1 ms)",
        "needs saved(2,0) of 2F0, there at 56.7 ms",
        "needs g(2,0) of 3B0 on rank 3, there at 94.5 ms",
        "waited 19.3 ms for g(2,0)",
        "memory after it: 1.5 activations",
    ]


@pytest.mark.parametrize("panel", range(3))
def test_arrow_keys_go_through_all_actions(page, panel):
    """Names, times, needs, levels of all of them: against data flow and simulator."""
    name, timeline = list(TIMELINES.items())[panel]
    told = page.evaluate(f"""(() => {{
      const canvas = document.querySelectorAll("canvas")[{panel}];
      const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", {{ key }}));
      const rows = {[len(row) for row in timeline.timetable.rows]};
      const told = [];
      rows.forEach((length, rank) => {{
        press("ArrowLeft");
        for (let index = 0; index < 2 * length; index++) press("ArrowLeft");
        for (let index = 0; index < length; index++) {{
          told.push(document.getElementById("tip").innerText.split("\\n"));
          press("ArrowRight");
        }}
        press("ArrowDown");
      }});
      return told;
    }})()""")
    timetable = timeline.timetable
    maker = {
        value: action
        for _, action, *_ in actions(timeline)
        for value in produces(action, timetable.num_stages)
    }
    after = itertools.chain(*(levels(timeline, OWN[name], rank) for rank in range(4)))
    for lines, (rank, action, start, end), level in zip(told, actions(timeline), after, strict=True):
        assert lines[0] == str(action)
        assert lines[1] == f"rank {rank}: {start:.6g} – {end:.6g} ms ({end - start:.6g} ms)"
        needs = {(str(value), str(maker[value])) for value in consumes(action)}
        assert set(re.findall(r"needs (\S+) of (\w+)", "\n".join(lines))) == needs
        assert lines[-1] == f"memory after it: {level:g} activations"


# ---------------------------------------------------------------- zoom


def test_the_wheel_zooms_around_the_pointer(page):
    everything = visible(page)
    x, y = pixel(page, 1, 2, 200.0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)  # Ctrl
    start, end = visible(page)
    assert end - start == pytest.approx((everything[1] - everything[0]) / 2, rel=0.01)
    assert pixel(page, 1, 2, 200.0)[0] == pytest.approx(x, abs=1.5)
    assert len({ruler(page, panel) for panel in range(3)}) == 1
    widths = [right - left for _, left, right, _ in boxes(page)[1]]
    assert max(widths) == pytest.approx(18.5 * ruler(page)[1], abs=1.5)


def test_keys_zoom_and_move(page):
    page.evaluate("document.querySelector('canvas').focus()")
    everything = visible(page)
    page.press("+")
    start, end = visible(page)
    assert end - start < everything[1] - everything[0]
    page.press("ArrowRight", modifiers=8)  # Shift
    assert visible(page)[0] == pytest.approx(start + (end - start) / 8, rel=0.01)
    page.press("0")
    assert visible(page) == everything


def test_dark_screens_get_a_dark_page_and_paper_a_light_one(page):
    def bubble() -> str:
        return painted(page, "fillRect")[0].fill

    light = bubble()
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert bubble() != light
    # This listener runs after the page's own, and `painted` was emptied before it.
    page.evaluate("addEventListener('beforeprint', () => (window.paper = painted.slice()))")
    page.call("Page.printToPDF")
    fills = [call[2] for call in page.evaluate("paper") if call[1] == "fillRect"]
    assert fills[0] == light  # for the paper
    page.call("Emulation.setEmulatedMedia", features=[])
    assert bubble() == light


# ---------------------------------------------------------------- other pages


def test_titles_and_notes_are_never_run_as_html(tabs):
    evil = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\"'&amp;"
    timelines = {evil: simulate(plan("zb_h1", 2, 3))}
    browser = tabs(render_page(timelines, title=evil, notes=[evil, f"two\n  {evil}"], costs=Costs()))
    assert browser.evaluate("window.hit") is None
    assert browser.evaluate("document.title") == evil
    for selector, text in {"h1": evil, "h2": evil, ".notes p": evil, ".notes pre": f"two\n  {evil}"}.items():
        assert browser.evaluate(f"document.querySelector('{selector}').textContent") == text
    assert (
        browser.evaluate("document.querySelectorAll('script, img').length") == 4
    )  # the data and its readers
    assert complaints(browser) == []


@pytest.mark.parametrize(
    "timelines, options",
    [
        ({}, {"notes": ["no schedule fits"]}),
        ({"no costs": simulate(plan("zb_v", 3, 5))}, {}),
        ({"no W": simulate(plan("zb_h1", 2, 2), Costs(w=0))}, {"costs": Costs(w=0)}),
        ({"one action": simulate(Timetable.parse("0F0"))}, {"costs": Costs(saved=0), "memory_limit": [7e9]}),
        ({"many": simulate(plan("zb_h1", 130, 2))}, {"costs": Costs(), "memory_limit": float("inf")}),
    ],
)
def test_pages_of_nothing_and_of_130_ranks_are_drawn(tabs, timelines, options):
    browser = tabs(render_page(timelines, **options))
    expected = sum(len(row) + 1 for each in timelines.values() for row in each.timetable.rows)
    assert len(painted(browser, "fillRect")) == expected  # the actions, and a bubble per rank
    assert complaints(browser) == []


# ---------------------------------------------------------------- the text, without a browser


def test_the_figures_are_there_without_scripts():
    text = html.unescape(render_page(TIMELINES, costs=OWN))
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", text)
    first = cells.index("zb_h1")
    timeline = TIMELINES["zb_h1"]
    times = [f"{time:.6g} ms" for time in (timeline.makespan, timeline.max_span, timeline.bubble)]
    assert cells[first : first + 7] == ["zb_h1", "1", *times, f"{100 * timeline.bubble_rate:.2f} %", "4"]


def test_the_page_has_each_reduction_with_the_action_that_completes_its_stage():
    timetable = Timetable.parse("0F0 2F0 2BW0 0BW0\n1F0 1BW0")
    timeline = simulate(timetable, Costs(f=1, bw=2, reduce=[5, 0, 7]))
    text = render_page({"a": timeline})
    assert re.findall(r'"reductions":(\[.*?\])}', text) == ["[[2,2,5,12],[0,3,12,17]]", "[]"]
    assert text.count("sum of gradients over replicas") == 1
    assert "of gradients" not in render_page({"a": simulate(timetable)})
