// What is known of the actions of one timeline: their names, what they need, the memory they leave.
// Times in ms from 0. kind: stage * number of ops + op. value: its number, as zbpp.schedule.dataflow_arrays counts.
"use strict";

const DATA = JSON.parse(document.getElementById("timelines").textContent);
const NUM_OPS = DATA.ops.length;

/** A number as a person writes it: 14.5, not 14.500000000000002. */
const plain = (value, digits = 6) => String(Number(value.toPrecision(digits)));

/** At most four digits: bytes as `5.59 GiB`, activations with k, M, G, T if they are many. */
function quantity(value, inBytes) {
  const [base, least] = inBytes ? [1024, 1024] : [1000, 1e4];
  const power = value < least ? 0 : Math.min(Math.floor(Math.log(value) / Math.log(base)), 4);
  const units = inBytes ? [" B", " KiB", " MiB", " GiB", " TiB"] : ["", " k", " M", " G", " T"];
  const number = value / base ** power;
  return plain(number, inBytes && number < 999.5 ? 3 : 4) + units[power];
}

/** The first index of an ascending list whose entry is above `value`. */
function firstAbove(list, value) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

class Timeline {
  constructor(data) {
    Object.assign(this, data);
    this.end = Math.max(...this.ranks.flatMap(({ ends, reductions }) => [
      ends.at(-1), ...reductions.map(([, , , end]) => end),
    ]));
    if (this.changes) this.ranks.forEach((rank, index) => this.addLevels(rank, this.static[index]));
  }

  /** Memory as text. */
  amount(memory) {
    return quantity(memory, this.inBytes) + (this.inBytes ? "" : " activations");
  }

  /** The memory level after each action, and the index of the highest. static: what is held all the time. */
  addLevels(rank, level) {
    rank.static = level;
    const change = (kind, index) => {
      const unit = rank.units[index];
      return this.changes[kind] * this.lengths[unit] + (this.past ? this.pastChange(kind, unit) : 0);
    };
    rank.levels = Float64Array.from(rank.kinds, (kind, index) => (level += change(kind, index)));
    rank.highest = rank.levels.indexOf(rank.levels.reduce((one, other) => Math.max(one, other)));
  }

  /** What an action changes of what the slices of its microbatch share: see _Past in row_costs.py. */
  pastChange(kind, unit) {
    const [stage, op, slice] = [Math.floor(kind / NUM_OPS), DATA.ops[kind % NUM_OPS], unit % this.slices];
    const isB = op === "B" || op === "BW";
    const whole = this.lengths.slice(unit - slice, unit - slice + this.slices).reduce((one, other) => one + other);
    const keys = slice === 0 ? (op === "F") - isB : 0;
    const grads = isB ? (slice === this.slices - 1) - (slice === 0) : 0;
    return (this.past[stage] * keys + this.pastGradients[stage] * grads) * whole;
  }

  /** value -> [rank, index] of the action that produces it. Made when first asked for. */
  get producers() {
    const producers = new Map();
    this.ranks.forEach(({ kinds, units }, rank) => kinds.forEach((kind, index) => {
      for (const value of this.produced[kind]) producers.set(value + units[index], [rank, index]);
    }));
    Object.defineProperty(this, "producers", { value: producers });
    return producers;
  }

  stage(rank, index) {
    return Math.floor(this.ranks[rank].kinds[index] / NUM_OPS);
  }

  /** A unit as text: its microbatch `5`, or its microbatch and slice `5.3`. */
  unitName(unit) {
    return this.slices === 1 ? `${unit}` : `${Math.floor(unit / this.slices)}.${unit % this.slices}`;
  }

  /** An action as text, `2F5`. */
  name(rank, index) {
    const { kinds, units } = this.ranks[rank];
    return `${this.stage(rank, index)}${DATA.ops[kinds[index] % NUM_OPS]}${this.unitName(units[index])}`;
  }

  /** A value as text, `x(2,5)`. */
  valueName(value) {
    const kindAndStage = Math.floor(value / this.units);
    const [kind, stage] = [Math.floor(kindAndStage / this.stages), kindAndStage % this.stages];
    return `${DATA.values[kind]}(${stage},${this.unitName(value % this.units)})`;
  }

  /** When an action could have started at the earliest: the end of the one before it on its rank. */
  free(rank, index) {
    return index ? this.ranks[rank].ends[index - 1] : 0;
  }

  /** What an action consumes, the latest arrival last: {value, rank, index, arrival} of its producer. */
  needs(receiver, place) {
    const { kinds, units } = this.ranks[receiver];
    const values = this.consumed[kinds[place]].map((value) => value + units[place]);
    return values.map((value) => {
      const [rank, index] = this.producers.get(value);
      const message = rank === receiver ? 0 : this.ranks[rank].delays[index];
      return { value, rank, index, arrival: this.ranks[rank].ends[index] + message };
    }).sort((one, other) => one.arrival - other.arrival);
  }

  /** Lines about an action, or about the bubble before it. */
  describe(rank, index, inBubble) {
    const { starts, ends, levels, reductions } = this.ranks[rank];
    const [start, end, wait] = [starts[index], ends[index], starts[index] - this.free(rank, index)];
    const needs = this.needs(rank, index);
    const lines = [(inBubble ? "bubble before " : "") + this.name(rank, index)];
    lines.push(`rank ${rank}: ${plain(start)} – ${plain(end)} ms (${plain(end - start)} ms)`);
    for (const { value, rank: maker, index: place, arrival } of needs) {
      const from = this.name(maker, place) + (maker === rank ? "" : ` on rank ${maker}`);
      lines.push(`needs ${this.valueName(value)} of ${from}, there at ${plain(arrival)} ms`);
    }
    const last = needs.length ? ` for ${this.valueName(needs.at(-1).value)}` : "";
    if (wait > 1e-9 * this.end) lines.push(`waited ${plain(wait)} ms${last}`);
    for (const [stage, last, from, to] of inBubble ? [] : reductions) {
      if (last === index) lines.push(`stage ${stage} is complete, reduced ${plain(from)} – ${plain(to)} ms`);
    }
    if (levels) lines.push(`memory after it: ${this.amount(levels[index])}`);
    return lines;
  }
}
