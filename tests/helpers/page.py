"""What the HTML page paints and tells, from outside: its canvases' calls, its text, a real pointer."""

from types import SimpleNamespace

from helpers.browser import Browser

# Before a page's own scripts: `painted` gets [canvas, kind, fill, *arguments] of each call.
NOTE_WHAT_IS_PAINTED = """
  const painted = [];
  addEventListener("beforeprint", () => (painted.length = 0)); // what was painted for the screen
  const note = (pen, kind, more) => painted.push(
    [[...document.querySelectorAll("canvas")].indexOf(pen.canvas), kind, pen.fillStyle, ...more]);
  for (const kind of ["fillRect", "fillText", "arc"]) {
    const plain = CanvasRenderingContext2D.prototype[kind];
    CanvasRenderingContext2D.prototype[kind] = function (...more) {
      note(this, kind, more);
      return plain.apply(this, more);
    };
  }
  const stroke = CanvasRenderingContext2D.prototype.stroke;
  CanvasRenderingContext2D.prototype.stroke = function (path) {
    if (path?.points) note(this, "curve", path.points);
    return path ? stroke.call(this, path) : stroke.call(this);
  };
  const lineTo = Path2D.prototype.lineTo;
  Path2D.prototype.lineTo = function (x, y) {
    (this.points ??= []).push([x, y]);
    return lineTo.call(this, x, y);
  };
"""


def complaints(browser: Browser) -> list[dict[str, object]]:
    """Errors, and whatever else reached the console."""
    kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    return [event for event in browser.events if event["method"] in kinds]


def click(browser: Browser, selector: str) -> None:
    """Press a button."""
    browser.evaluate(f'document.querySelector("{selector}").click()')
    browser.settle()


def painted(browser: Browser, kind: str) -> list[SimpleNamespace]:
    """All calls of one kind that paint the page anew: panel, fill, arguments."""
    browser.evaluate("painted.length = 0; dispatchEvent(new Event('afterprint'))")
    calls = browser.evaluate("painted")
    return [SimpleNamespace(panel=c[0], fill=c[2], arguments=c[3:]) for c in calls if c[1] == kind]


def ruler(browser: Browser, panel: int = 0) -> tuple[float, float]:
    """(pixel of 0 ms, pixels per ms), from the first and the last tick's label."""
    words = [call.arguments for call in painted(browser, "fillText") if call.panel == panel]
    ticks = [(float(text.removesuffix(" ms")), x - 3.5) for text, x, y in words if y < 12]
    (first, start), (last, end) = ticks[0], ticks[-1]
    scale = (end - start) / (last - first)
    return start - first * scale, scale


def pixel(browser: Browser, panel: int, rank: int, time: float) -> tuple[float, float]:
    """Where in the window a time on a rank is, by the ruler and by the rank's name."""
    zero, scale = ruler(browser, panel)
    names = {
        call.arguments[0]: call.arguments[2] for call in painted(browser, "fillText") if call.panel == panel
    }
    bounds = f"document.querySelectorAll('canvas')[{panel}].getBoundingClientRect()"
    left, top = browser.evaluate(f"(({{left, top}}) => [left, top])({bounds})")
    return left + zero + time * scale, top + names[f"rank {rank}"]


def tip(browser: Browser) -> list[str]:
    """The lines about what is pointed at; none if that is nothing."""
    shown = browser.evaluate("(tip => tip.hidden ? '' : tip.innerText)(document.getElementById('tip'))")
    return shown.splitlines()


def hover(browser: Browser, panel: int, rank: int, time: float) -> list[str]:
    """What the page tells when the pointer is at a time on a rank."""
    browser.mouse("mouseMoved", *pixel(browser, panel, rank, time))
    return tip(browser)


def visible(browser: Browser) -> tuple[float, float]:
    """The range of time that the toolbar names."""
    start, end = (
        browser.evaluate("document.getElementById('range').textContent").removesuffix(" ms").split(" – ")
    )
    return float(start), float(end)


def press(browser: Browser, x: float, y: float, count: int = 1) -> None:
    """Press and release the mouse; count=2: as the second of a double click."""
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, x, y, button="left", clickCount=count)
