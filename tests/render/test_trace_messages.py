"""A trace shows the messages between ranks, in lanes of the sender and of the receiver."""

from helpers.timetables import away, with_offload
from zbpp.render import chrome_trace
from zbpp.schedule import Costs, Links, Timetable, Value, simulate


def lanes(trace):
    """{(process, lane): [(name, start, duration)]} in ms, the actions left out."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] > 0:
            lane = event["pid"], names[event["pid"], event["tid"]]
            found.setdefault(lane, []).append((event["name"], event["ts"] / 1e3, event["dur"] / 1e3))
    return found


def test_a_trace_shows_each_message_with_its_sender_and_its_receiver():
    """x(1,1) is sent while x(1,0) is on its way, and a link delivers in order."""
    timetable = Timetable.parse("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1")
    found = lanes(chrome_trace({"a": simulate(timetable, Costs(f=2, bw=5, comm=3))}))
    there = [("x(1,0)", 2.0, 3.0), ("x(1,1)", 5.0, 2.0)]
    back = [("g(0,0)", 12.0, 3.0), ("g(0,1)", 19.0, 3.0)]
    assert found == {
        (0, "send to 1"): there,
        (1, "receive from 0"): there,
        (1, "send to 0"): back,
        (0, "receive from 1"): back,
    }


def test_a_trace_shows_for_how_long_messages_occupy_a_link():
    """x(1,1) is made at 4 and waits until x(1,0) has gone out at 7; each is then on its way for 4."""
    timetable = Timetable.parse("0F0 0F1 0BW0 0BW1\n1F0 1F1 1BW0 1BW1")
    costs = Costs(f=2, bw=5, links=Links(pairs={(0, 1): (4.0, 5.0), (1, 0): (1.0, 0.0)}))
    timeline = simulate(timetable, costs)
    trace = chrome_trace({"a": timeline}, costs)
    found = {lane: slices for lane, slices in lanes(trace).items() if lane[1].startswith("link")}
    assert found == {
        (0, "link to 1"): [("x(1,0)", 2.0, 5.0), ("x(1,1)", 7.0, 5.0)],
        (1, "link to 0"): [("g(0,0)", 23.0, 0.0), ("g(0,1)", 28.0, 0.0)],
    }
    arrivals = [event["args"]["arrives_ms"] for event in trace["traceEvents"] if event.get("cat") == "link"]
    assert arrivals == [11.0, 16.0, 24.0, 29.0]
    without = [event for event in trace["traceEvents"] if "link to" not in str(event)]
    without = [event for event in without if event.get("cat") != "link"]
    assert without == chrome_trace({"a": timeline})["traceEvents"]
    assert chrome_trace({"a": timeline}, Costs(comm=3.0)) == chrome_trace({"a": timeline})


def test_a_trace_shows_each_reduction_in_a_lane_of_its_rank():
    """The two stages of rank 0 are reduced one after the other."""
    timetable = Timetable.parse("0F0 2F0 2BW0 0BW0\n1F0 1BW0")
    timeline = simulate(timetable, Costs(f=1, bw=2, reduce=[5, 4, 7]))
    assert lanes_of_reductions(timeline) == {
        (0, "reductions"): [("Reduce 2", 5.0, 7.0), ("Reduce 0", 12.0, 5.0)],
        (1, "reductions"): [("Reduce 1", 7.0, 4.0)],
    }


def lanes_of_reductions(timeline):
    """Lane by lane; no message's lane may have the same number."""
    found = lanes(chrome_trace({"a": timeline}))
    return {lane: slices for lane, slices in found.items() if lane[1] == "reductions"}


def test_a_trace_shows_copies_in_a_lane_of_the_rank_that_offloads():
    """One value leaves when its F ends (1 ms). 0F1 waits for the copy, ends at 2.5 ms: it comes back."""
    timetable = Timetable.parse("0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2")
    offload = [away(Value("saved", 0, 0), made=0, dropped=1, fetched=2, used=3)]
    found = lanes(chrome_trace({"a": with_offload(timetable, Costs(host=0.5), offload)}))
    assert found == {(0, "offload"): [("Offload saved(0,0)", 1.0, 0.5), ("Fetch saved(0,0)", 2.5, 0.5)]}
    assert lanes(chrome_trace({"a": simulate(timetable, Costs(host=0.5))})) == {}
