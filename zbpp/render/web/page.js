// The page: one visible range of time for all drawings; what mouse, wheel and keys do to it.
"use strict";

const timelines = DATA.panels.map((data) => new Timeline(data));
const END = Math.max(0, ...timelines.map(({ end }) => end));
const HORIZON = (END || 1) * 1.003; // with room for the line at the end
const CLOSEST = 1e-6; // of the horizon: zooming in ends here
const marked = timelines.flatMap(({ peaks, limits }) => [...peaks, ...limits]);
const view = {
  from: 0,
  to: HORIZON,
  memory: timelines.some(({ changes }) => changes),
  highest: marked.reduce((one, other) => Math.max(one, other), 0) || 1,
  theme: {},
};
const sections = document.querySelectorAll(".panel");
const drawings = timelines.map((timeline, place) => new Drawing(timeline, sections[place], view));
const [tip, range, memory] = ["tip", "range", "memory"].map((id) => document.getElementById(id));
let chosen = null; // {drawing, rank, index}: what the tip tells about

// ---------------------------------------------------------------- the visible range

function look(from, width) {
  const shown = clamp(width, CLOSEST * HORIZON, HORIZON);
  view.from = clamp(from, 0, HORIZON - shown);
  view.to = view.from + shown;
  repaint();
}

function pan(time) {
  look(view.from + time, view.to - view.from);
}

/** Closer by a factor; the time `fixed` stays where it is. */
function zoom(factor, fixed) {
  const width = clamp((view.to - view.from) / factor, CLOSEST * HORIZON, HORIZON);
  look(fixed - ((fixed - view.from) / (view.to - view.from)) * width, width);
}

let requested = 0;
function repaint() {
  requested ||= requestAnimationFrame(paint);
}

function paint() {
  cancelAnimationFrame(requested);
  requested = 0;
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "muted", "rule", "bubble", "level", "area", "limit"]) {
    view.theme[name] = style.getPropertyValue(`--${name}`);
  }
  const family = getComputedStyle(document.body).fontFamily;
  view.theme.font = (size) => `${size}px ${family}`;
  view.theme.tallest = Number(style.getPropertyValue("--tallest-lane"));
  view.theme.sharpness = document.documentElement.classList.contains("printing") ? 3 : devicePixelRatio;
  for (const drawing of drawings) drawing.paint();
  if (chosen) chosen.drawing.frame(chosen.rank, chosen.index, chosen.inBubble);
  range.textContent = `${plain(view.from, 5)} – ${plain(Math.min(view.to, END), 5)} ms`;
}

// ---------------------------------------------------------------- pointing at an action

/** Tell about what is at a place of a drawing; x, y: where in the window. */
function choose(drawing, { rank, index, inBubble = false }, x, y) {
  chosen?.drawing.unframe();
  chosen = { drawing, rank, index, inBubble };
  drawing.frame(rank, index, inBubble);
  tip.replaceChildren(...drawing.timeline.describe(rank, index, inBubble).map((text) => {
    return Object.assign(document.createElement("div"), { textContent: text });
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${clamp(x + 14, 4, Math.max(4, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 20 + height < innerHeight ? y + 20 : Math.max(4, y - height - 12)}px`;
}

function forget() {
  chosen?.drawing.unframe();
  chosen = null;
  tip.hidden = true;
}

function point(drawing, event) {
  const found = drawing.at(event.offsetX, event.offsetY);
  if (found) choose(drawing, found, event.clientX, event.clientY);
  else forget();
}

// ---------------------------------------------------------------- keys

/** Choose an action; move the visible range to it if it lies outside. */
function goTo(drawing, rank, index) {
  const { starts, ends } = drawing.timeline.ranks[rank];
  const middle = (starts[index] + ends[index]) / 2;
  if (middle < view.from || middle > view.to) look(middle - (view.to - view.from) / 2, view.to - view.from);
  const { left, top } = drawing.canvas.getBoundingClientRect();
  choose(drawing, { rank, index }, left + drawing.x(middle), top + drawing.y(rank) + drawing.box);
}

/** Choose the action at the same time on another rank, or the next action on this rank. */
function move(drawing, ranks, actions) {
  const { rank, index } = chosen?.drawing === drawing ? chosen : { rank: 0, index: 0 };
  const { ranks: all } = drawing.timeline;
  const next = clamp(rank + ranks, 0, all.length - 1);
  const place = ranks ? firstAbove(all[next].ends, all[rank].starts[index]) : index + actions;
  goTo(drawing, next, clamp(place, 0, all[next].ends.length - 1));
}

const KEYS = {
  ArrowLeft: (drawing) => move(drawing, 0, -1),
  ArrowRight: (drawing) => move(drawing, 0, 1),
  ArrowUp: (drawing) => move(drawing, -1, 0),
  ArrowDown: (drawing) => move(drawing, 1, 0),
  "Shift+ArrowLeft": () => pan((view.from - view.to) / 8),
  "Shift+ArrowRight": () => pan((view.to - view.from) / 8),
  "+": () => zoom(1.5, attention()),
  "-": () => zoom(1 / 1.5, attention()),
  0: () => look(0, HORIZON),
  Escape: forget,
};

/** The time that zooming by keys and buttons keeps in place. */
function attention() {
  const start = chosen?.drawing.timeline.ranks[chosen.rank].starts[chosen.index];
  return start >= view.from && start <= view.to ? start : (view.from + view.to) / 2;
}

// ---------------------------------------------------------------- events

function listen(drawing) {
  const on = (name, action) => drawing.canvas.addEventListener(name, action);
  let held = null; // where the pointer was last, while it drags
  on("pointerdown", (event) => {
    held = event.offsetX;
    drawing.canvas.setPointerCapture(event.pointerId);
  });
  on("pointermove", (event) => {
    if (held === null) return point(drawing, event);
    forget();
    pan((held - event.offsetX) * drawing.msPerPixel);
    held = event.offsetX;
  });
  on("pointerup", (event) => {
    held = null;
    point(drawing, event);
  });
  on("pointercancel", () => (held = null));
  on("pointerleave", forget);
  on("blur", forget);
  on("focus", () => drawing.canvas.matches(":focus-visible") && goTo(drawing, 0, 0));
  on("dblclick", () => look(0, HORIZON));
  on("wheel", (event) => {
    // Else the page scrolls: nobody's way down the page should end in a drawing.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== drawing.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * drawing.msPerPixel);
    else zoom(2 ** (-event.deltaY / 240), drawing.time(event.offsetX));
    point(drawing, event);
  });
  on("keydown", (event) => {
    const action = KEYS[(event.shiftKey && event.key.length > 1 ? "Shift+" : "") + event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action(drawing);
  });
}

drawings.forEach(listen);
for (const button of document.querySelectorAll("[data-key]")) {
  button.addEventListener("click", () => KEYS[button.dataset.key]());
}
memory.checked = view.memory;
memory.parentNode.hidden = !view.memory;
memory.addEventListener("change", () => {
  view.memory = memory.checked;
  repaint();
});
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printing", printing); // light, and sharp enough for paper
    paint();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(repaint).observe(document.querySelector("main"));
paint();
