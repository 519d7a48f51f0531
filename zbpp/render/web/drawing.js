// One timeline on a canvas: a lane per rank with its actions as boxes and, below them, its reductions as thin bars
// and its memory level. Below all ranks a strip per link on which messages take time.
"use strict";

const PLOT = { left: 54, top: 20, right: 6, bottom: 4 }; // px around the lanes; the ruler is on top
const LINKS_GAP = 5; // px between the ranks and the strips of links
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** The least of 1, 2, 5 times a power of ten that is not below `least`: the step between ticks. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least) ?? 10);
}

class Drawing {
  /** view: {from, to, memory, theme, highest}, shared by all drawings of the page. */
  constructor(timeline, section, view) {
    Object.assign(this, { timeline, view });
    const find = (name) => section.querySelector(name);
    [this.canvas, this.overlay, this.table] = [find("canvas"), find("svg"), find("table")];
  }

  // ---------------------------------------------------------------- where things are

  /** Fit the lanes to the number of ranks, the canvas to its place on the page. */
  measure() {
    const { ranks, changes } = this.timeline;
    const least = clamp(1800 / ranks.length, 4, 14);
    const tall = Math.round(clamp(440 / ranks.length, least, this.view.theme.tallest));
    const memory = this.view.memory && changes && tall >= 10;
    this.box = Math.ceil(0.48 * tall);
    this.bar = Math.max(1, Math.floor(0.06 * tall)); // of a reduction, in the gap below the box
    this.strip = memory ? Math.floor(0.36 * tall) : 0;
    this.lane = memory ? tall : Math.ceil(0.58 * tall);
    this.links = this.timeline.links ?? [];
    this.way = clamp(Math.round(220 / Math.max(this.links.length, 1)), 4, 15); // the height of a link's strip
    this.width = this.canvas.clientWidth;
    const strips = this.links.length ? LINKS_GAP + this.way * this.links.length : 0;
    this.height = PLOT.top + this.lane * ranks.length + strips + PLOT.bottom;
    this.plot = this.width - PLOT.left - PLOT.right;
  }

  get msPerPixel() { return (this.view.to - this.view.from) / this.plot; }
  x(time) { return PLOT.left + (time - this.view.from) / this.msPerPixel; }
  y(rank) { return PLOT.top + rank * this.lane; }
  /** The height of a memory level. */
  level(rank, level) {
    return this.y(rank) + Math.round(0.92 * this.lane) - (level / this.view.highest) * this.strip;
  }
  linkTop(place) { return this.y(this.timeline.ranks.length) + LINKS_GAP + this.way * place; }
  middle(rank) { return this.y(rank) + this.box / 2; }
  time(x) { return this.view.from + (x - PLOT.left) * this.msPerPixel; }

  /** What is at a pixel: {rank, index, inBubble}, in a bubble the action after it; null outside of spans. */
  at(x, y) {
    const rank = Math.floor((y - PLOT.top) / this.lane);
    const { starts, ends } = this.timeline.ranks[rank] ?? { starts: [Infinity], ends: [] };
    const time = this.time(clamp(x, PLOT.left, this.width - PLOT.right));
    const index = firstAbove(ends, time);
    return time < starts[0] || index === ends.length ? null : { rank, index, inBubble: time < starts[index] };
  }

  // ---------------------------------------------------------------- painting

  paint() {
    this.measure();
    const { theme } = this.view;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * theme.sharpness);
    this.canvas.height = Math.round(this.height * theme.sharpness);
    this.table.style.setProperty("--lane", `${this.lane}px`);
    this.table.style.setProperty("--box", `${this.box}px`);
    this.table.classList.toggle("crowded", this.lane < 13);
    const pen = this.canvas.getContext("2d");
    pen.scale(theme.sharpness, theme.sharpness);
    pen.textBaseline = "middle";
    this.paintRanks(pen);
    this.paintLinkNames(pen);
    this.paintRuler(pen);
    pen.beginPath();
    pen.rect(PLOT.left, 0, this.plot, this.height);
    pen.clip();
    this.timeline.ranks.forEach((_, rank) => this.paintLane(pen, rank));
    this.links.forEach((_, place) => this.paintLink(pen, place));
    this.paintEnd(pen);
  }

  paintRanks(pen) {
    const every = Math.ceil(13 / this.lane); // with room for a name
    const { theme } = this.view;
    Object.assign(pen, { font: theme.font(11), fillStyle: theme.muted, textAlign: "right" });
    for (let rank = 0; rank < this.timeline.ranks.length; rank += every) {
      pen.fillText(`rank ${rank}`, PLOT.left - 8, this.middle(rank) + 1);
    }
    if (this.strip >= 8) this.timeline.ranks.forEach((_, rank) => this.paintScale(pen, rank));
  }

  paintLinkNames(pen) {
    const every = Math.ceil(11 / this.way);
    Object.assign(pen, { font: this.view.theme.font(9), fillStyle: this.view.theme.muted, textAlign: "right" });
    for (let place = 0; place < this.links.length; place += every) {
      const [sender, receiver] = this.links[place];
      pen.fillText(`${sender} → ${receiver}`, PLOT.left - 8, this.linkTop(place) + this.way / 2);
    }
  }

  /** What the top of a memory strip stands for, and its bottom: the same on all of the page. */
  paintScale(pen, rank) {
    const { font, muted } = this.view.theme;
    Object.assign(pen, { font: font(8), fillStyle: muted, textAlign: "right" });
    const marks = this.strip >= 15 ? [0, this.view.highest] : [this.view.highest];
    for (const level of marks) {
      const y = this.level(rank, level) + (level ? 3 : -3);
      pen.fillText(quantity(level, this.timeline.inBytes), PLOT.left - 3, y);
    }
  }

  paintRuler(pen) {
    const step = roundStep(80 * this.msPerPixel);
    const { font, muted, rule } = this.view.theme;
    Object.assign(pen, { font: font(11), fillStyle: muted, textAlign: "left" });
    Object.assign(pen, { strokeStyle: rule, lineWidth: 1 });
    pen.beginPath();
    for (let tick = Math.ceil(this.view.from / step); tick * step <= this.view.to; tick++) {
      const x = Math.round(this.x(tick * step)) + 0.5;
      const label = plain(tick * step, 12) + (tick ? "" : " ms");
      if (x + 3 + pen.measureText(label).width <= this.width) pen.fillText(label, x + 3, 9);
      pen.moveTo(x, 2);
      pen.lineTo(x, this.height);
    }
    pen.stroke();
  }

  paintLane(pen, rank) {
    const { starts, ends } = this.timeline.ranks[rank];
    const visible = [firstAbove(ends, this.view.from), firstAbove(starts, this.view.to)];
    const left = this.x(starts[0]);
    pen.fillStyle = this.view.theme.bubble;
    pen.fillRect(left, this.y(rank), this.x(ends.at(-1)) - left, this.box);
    this.paintBoxes(pen, rank, ...visible);
    this.paintReductions(pen, rank);
    if (this.strip) this.paintMemory(pen, rank, ...visible);
  }

  /** A box per action; boxes wide enough get a gap to the next one and their microbatch. */
  paintBoxes(pen, rank, first, end) {
    const { fills, inks, units: count } = this.timeline;
    const { kinds, units, starts, ends } = this.timeline.ranks[rank];
    const [top, digits] = [this.y(rank), this.timeline.unitName(count - 1).length];
    pen.textAlign = "center";
    let written = 0; // px, the font's size
    for (let index = first; index < end; index++) {
      const [left, right] = [this.x(starts[index]), this.x(ends[index])];
      const gap = clamp(0.15 * (right - left) - 0.4, 0, 1);
      pen.fillStyle = fills[kinds[index]];
      pen.fillRect(left, top, right - left - gap, this.box);
      const [from, to] = [Math.max(left, PLOT.left), Math.min(right - gap, this.width - PLOT.right)];
      const size = Math.floor(Math.min((to - from - 2) / (0.6 * digits), this.box - 4, 10));
      if (size < 7) continue;
      if (size !== written) pen.font = this.view.theme.font((written = size));
      pen.fillStyle = inks[kinds[index]];
      pen.fillText(this.timeline.unitName(units[index]), (from + to) / 2, this.middle(rank) + 0.5);
    }
  }

  /** A message's box while it occupies the link; a bar of half its height while the message is on its way. */
  paintLink(pen, place) {
    const [top, height] = [this.linkTop(place), Math.max(2, this.way - 3)];
    const messages = this.links[place][2];
    for (const [, , colour, , gone, arrived] of messages) {
      pen.fillStyle = colour;
      pen.fillRect(this.x(gone), top + height / 2, this.x(arrived) - this.x(gone), height / 2);
    }
    for (const [name, colour, , start, gone] of messages) {
      const [left, right] = [this.x(start), this.x(gone)];
      if (right < PLOT.left || left > this.width) continue;
      pen.fillStyle = colour;
      pen.fillRect(left, top, right - left - clamp(0.15 * (right - left) - 0.4, 0, 1), height);
      if (height < 9 || right - left < 6 * name.length) continue;
      Object.assign(pen, { font: this.view.theme.font(9), fillStyle: "#fff", textAlign: "center" });
      pen.fillText(name, (left + right) / 2, top + height / 2 + 0.5);
    }
  }

  paintReductions(pen, rank) {
    const top = this.y(rank) + Math.min(this.box + 1, this.lane - this.bar);
    for (const [stage, , start, end] of this.timeline.ranks[rank].reductions) {
      const [left, right] = [this.x(start), this.x(end)];
      pen.fillStyle = this.timeline.reductionFills[stage];
      pen.fillRect(left, top, right - left - clamp(right - left - 1, 0, 1), this.bar);
    }
  }

  /** The level from each action's end to the next one's, the peak as a dot, the limit as a dashed line. */
  paintMemory(pen, rank, from, to) {
    const { peaks, limits } = this.timeline;
    const { theme } = this.view;
    const { starts, ends, levels, highest, static: least } = this.timeline.ranks[rank];
    const y = (level) => this.level(rank, level);
    const base = y(0);
    const left = this.x(from ? ends[from - 1] : starts[0]);
    let [x, level] = [left, from ? levels[from - 1] : least];
    const curve = new Path2D();
    curve.moveTo(x, y(level));
    const last = Math.min(to, ends.length - 1); // one beyond the right edge, if there is one
    for (let index = from; index <= last; index++) {
      const end = this.x(ends[index]);
      if (end - x < 0.5 && levels[index] <= level && index < last) continue; // a pixel shows its highest
      x = end;
      curve.lineTo(x, y(level));
      curve.lineTo(x, y((level = levels[index])));
    }
    const area = new Path2D(curve);
    area.lineTo(x, base);
    area.lineTo(left, base);
    Object.assign(pen, { fillStyle: theme.area, strokeStyle: theme.level, lineWidth: 1 });
    pen.fill(area);
    pen.stroke(curve);
    if (limits[rank] !== null) this.paintLimit(pen, y(limits[rank]));
    this.paintPeak(pen, this.x(ends[highest]), y(peaks[rank]));
  }

  paintLimit(pen, y) {
    Object.assign(pen, { strokeStyle: this.view.theme.limit, lineWidth: 1 });
    pen.setLineDash([2, 3]);
    pen.stroke(new Path2D(`M${PLOT.left} ${y}H${this.width - PLOT.right}`));
    pen.setLineDash([]);
  }

  paintPeak(pen, x, y) {
    pen.fillStyle = this.view.theme.ink;
    pen.beginPath();
    pen.arc(x, y, 2, 0, 2 * Math.PI);
    pen.fill();
  }

  /** The makespan. */
  paintEnd(pen) {
    Object.assign(pen, { strokeStyle: this.view.theme.muted, lineWidth: 1 });
    pen.setLineDash([4, 3]);
    const x = Math.round(this.x(this.timeline.end)) + 0.5;
    pen.stroke(new Path2D(`M${x} ${PLOT.top}V${this.height}`));
    pen.setLineDash([]);
  }

  // ---------------------------------------------------------------- the overlay

  /** Frame an action or the bubble before it, and the actions whose values it needs. */
  frame(rank, index, inBubble) {
    const { starts } = this.timeline.ranks[rank];
    const [free, start] = [this.timeline.free(rank, index), starts[index]];
    const box = inBubble ? this.outline(rank, free, start) : this.outlineOf(rank, index);
    const makers = this.timeline.needs(rank, index).map((need) => {
      const end = this.timeline.ranks[need.rank].ends[need.index];
      const link = `M${this.x(end)} ${this.middle(need.rank)}L${this.x(start)} ${this.middle(rank)}`;
      return this.outlineOf(need.rank, need.index) + (need.rank === rank ? "" : link);
    });
    const [framed, needed] = this.overlay.children;
    framed.setAttribute("d", box);
    needed.setAttribute("d", makers.join(""));
    this.overlay.style.visibility = "visible";
  }

  outlineOf(rank, index) {
    const { starts, ends } = this.timeline.ranks[rank];
    return this.outline(rank, starts[index], ends[index]);
  }

  outline(rank, from, to) {
    return `M${this.x(from)} ${this.y(rank)}H${this.x(to)}v${this.box}H${this.x(from)}z`;
  }

  unframe() {
    this.overlay.style.visibility = "hidden";
  }
}
