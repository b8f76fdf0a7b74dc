// Time × CPU as a heat map, on which a time range can be selected for the whole page.

import { onCanvas } from "./colours.js";
import { clip } from "./filters.js";

const AXIS = 16; // pixels for the times below the map
const HIGHEST = 96; // pixels for all CPUs
const LEAST = 28; // the same in a low window
const LOW = 480; // pixels; a low window is this high or less, as in page.css
const GRIP = 5; // pixels around an edge of the range that move it
const PERIODS = 5; // minimum sampling periods per column
const COLUMN = 2; // minimum width of a column in pixels

// Returns the height in pixels of all CPUs together, for the window's height.
export const highest = () => (innerHeight <= LOW ? LEAST : HIGHEST);

export class Strip {
  #profile;
  #image = null;
  #range = null;
  #baseline = null;
  #drag = null;

  // `events`: drag(range) while the user drags, choose(range, isByKey) at the end; null is the whole time.
  constructor(element, events) {
    Object.assign(this, { element, events });
    this.canvas = element.querySelector("canvas");
    this.#listen();
  }

  // Draws the counts of profile.grid(), by CPU and bin. If there are enough, a column covers several
  // periods, so that it shows more than whether a sample was taken. `gutter`: pixels for names.
  load(profile, grid, periodMs, gutter) {
    this.#profile = profile;
    this.gutter = gutter;
    this.spanMs = profile.bins * profile.bin_ms;
    const { cpus, bins } = profile;
    this.rowHeight = Math.max(1, Math.min(14, Math.floor(highest() / Math.max(1, cpus.length))));
    this.rows = Math.min(cpus.length, highest());
    const most = periodMs ? this.spanMs / (PERIODS * periodMs) : bins;
    this.columns = Math.max(1, Math.floor(Math.min(bins, this.#width() / COLUMN, most)));
    this.cells = new Float64Array(this.columns * this.rows);
    this.widths = new Float64Array(this.columns); // in bins
    for (let bin = 0; bin < bins; bin += 1) this.widths[Math.floor((bin * this.columns) / bins)] += 1;
    for (let row = 0; row < cpus.length; row += 1) {
      const drawn = Math.floor((row * this.rows) / cpus.length) * this.columns;
      for (let bin = 0; bin < bins; bin += 1) {
        this.cells[drawn + Math.floor((bin * this.columns) / bins)] += grid[row * bins + bin];
      }
    }
    this.#paint();
  }

  #width() {
    return Math.max(50, this.canvas.clientWidth - this.gutter - 1);
  }

  #paint() {
    if (!this.rows) return;
    const image = document.createElement("canvas");
    [image.width, image.height] = [this.columns, this.rows];
    const pen = image.getContext("2d");
    const pixels = pen.createImageData(this.columns, this.rows);
    const [red, green, blue] = onCanvas("var(--heat)").match(/\d+/g).map(Number);
    const densities = this.cells.map((value, at) => value / this.widths[at % this.columns]);
    const most = densities.reduce((a, b) => Math.max(a, b), 0) || 1;
    densities.forEach((value, at) => {
      pixels.data.set([red, green, blue, value ? 40 + 215 * (value / most) ** 0.7 : 0], 4 * at);
    });
    pen.putImageData(pixels, 0, 0);
    this.#image = image;
  }

  // Marks the shown range and the one it is compared with, in milliseconds; each may be null.
  show(range, baseline) {
    this.#range = clip(this.spanMs, range);
    this.#baseline = clip(this.spanMs, baseline);
    this.draw();
  }

  repaint() {
    this.#paint();
    this.draw();
  }

  #x(ms) {
    return this.gutter + (ms / this.spanMs) * this.#width();
  }

  #ms(x) {
    const at = ((x - this.gutter) / this.#width()) * this.spanMs;
    const step = this.#profile.bin_ms;
    return Math.min(this.spanMs, Math.max(0, Math.round(at / step) * step));
  }

  draw() {
    const width = this.canvas.clientWidth;
    const plot = this.rows * this.rowHeight;
    const ratio = devicePixelRatio;
    this.canvas.style.height = `${plot + AXIS}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round((plot + AXIS) * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11px ${getComputedStyle(this.element).fontFamily}`;
    pen.imageSmoothingEnabled = false;
    pen.fillStyle = onCanvas("var(--plot)");
    pen.fillRect(this.gutter, 0, this.#width(), plot);
    if (this.#image) pen.drawImage(this.#image, this.gutter, 0, this.#width(), plot);
    this.#names(pen);
    this.#times(pen, plot);
    this.#mark(pen, this.#baseline, plot, "var(--loss)");
    this.#mark(pen, this.#range, plot, this.#baseline ? "var(--gain)" : "var(--focus)");
    const shown = this.#range ?? [0, this.spanMs];
    this.element.setAttribute("aria-valuetext", this.describe(shown));
    this.element.setAttribute("aria-valuenow", Math.round(shown[0]));
    this.element.setAttribute("aria-valuemax", Math.round(this.spanMs));
  }

  #names(pen) {
    const { cpus } = this.#profile;
    pen.fillStyle = onCanvas("var(--dim)");
    pen.textBaseline = "middle";
    const every = Math.ceil(12 / this.rowHeight);
    for (let row = 0; row < this.rows; row += every) {
      const cpu = cpus[Math.floor((row * cpus.length) / this.rows)];
      pen.fillText(`CPU ${cpu}`, 0, (row + Math.min(every, this.rows - row) / 2) * this.rowHeight);
    }
  }

  #times(pen, plot) {
    const { parts, bin_ms: binMs } = this.#profile;
    const labelled = this.#label();
    pen.textBaseline = "bottom";
    let from = 0;
    for (const { name, bins } of parts) {
      const span = bins * binMs;
      const least = (70 / this.#width()) * this.spanMs;
      const decade = 10 ** Math.floor(Math.log10(least));
      const step = decade * ([1, 2, 5].find((times) => times * decade >= least) ?? 10);
      for (let ms = 0; ms <= span; ms += step) {
        const x = this.#x(from + ms);
        const text = ms === 0 && name ? name : labelled(ms, step);
        if (ms && x + pen.measureText(text).width + 3 > this.#x(from + span)) break;
        pen.fillStyle = onCanvas("var(--line)");
        pen.fillRect(x, plot, 1, 4);
        pen.fillStyle = onCanvas("var(--dim)");
        pen.fillText(text, x + 3, plot + AXIS);
      }
      if (from) {
        pen.fillStyle = onCanvas("var(--text)");
        pen.fillRect(this.#x(from), 0, 1, plot + 4);
      }
      from += span;
    }
  }

  #mark(pen, range, plot, colour) {
    if (!range) return;
    const [left, right] = range.map((ms) => this.#x(ms));
    if (range === this.#range && !this.#baseline) {
      pen.globalAlpha = 0.62;
      pen.fillStyle = onCanvas("var(--back)");
      pen.fillRect(this.gutter, 0, left - this.gutter, plot);
      pen.fillRect(right, 0, this.gutter + this.#width() - right, plot);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = onCanvas(colour);
    pen.lineWidth = 2;
    pen.strokeRect(left, 1, Math.max(2, right - left), plot - 2);
  }

  // Describes a range in words.
  describe(range) {
    const [from, to] = clip(this.spanMs, range);
    if (from === to) return "outside of the recording";
    const { parts, bin_ms: binMs } = this.#profile;
    let start = 0;
    const part = parts.find(({ bins }) => {
      if (from < start + bins * binMs) return true;
      start += bins * binMs;
      return false;
    }) ?? parts[0];
    const name = part.name ? `${part.name}: ` : "";
    if (name && from === start && to === start + part.bins * binMs) return part.name;
    const labelled = this.#label();
    return `${name}${labelled(from - start, binMs)} – ${labelled(to - start, binMs)}`;
  }

  // Returns how times are labelled: for a running host the time of day in UTC, otherwise the time since
  // the start.
  #label() {
    const { live, start_ms: startMs } = this.#profile;
    return live ? (ms, step) => new Date(startMs + ms).toISOString().slice(11, step < 1000 ? 23 : 19) : seconds;
  }

  #cell(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - bounds.y) / this.rowHeight);
    const at = Math.floor(((event.clientX - bounds.x - this.gutter) / this.#width()) * this.columns);
    if (row < 0 || row >= this.rows || at < 0 || at >= this.columns) return null;
    const { cpus } = this.#profile;
    const width = this.spanMs / this.columns;
    return {
      cpu: cpus[Math.floor((row * cpus.length) / this.rows)],
      from: at * width, to: (at + 1) * width, value: this.cells[row * this.columns + at],
    };
  }

  #listen() {
    const { element, canvas } = this;
    const at = (event) => event.clientX - canvas.getBoundingClientRect().x;
    const edge = (x) => this.#range?.findIndex((ms) => Math.abs(this.#x(ms) - x) <= GRIP) ?? -1;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      const held = edge(at(event));
      this.#drag = { start: held < 0 ? this.#ms(at(event)) : this.#range[1 - held], x: at(event), moved: held >= 0 };
    });
    canvas.addEventListener("pointermove", (event) => {
      canvas.style.cursor = edge(at(event)) >= 0 ? "ew-resize" : "crosshair";
      if (!this.#drag) {
        this.hover?.(this.#cell(event));
        return;
      }
      this.#drag.moved ||= Math.abs(at(event) - this.#drag.x) > 2;
      if (!this.#drag.moved) return;
      this.#drag.range = this.#between(this.#drag.start, this.#ms(at(event)));
      this.events.drag(this.#drag.range);
    });
    const end = () => {
      if (!this.#drag) return;
      const { moved, range } = this.#drag;
      this.#drag = null;
      if (!moved) this.events.choose(null, false);
      else if (range) this.events.choose(range, false);
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) this.#move(by, event.shiftKey);
      else if (event.key === "Escape") this.events.choose(null, true);
      else return;
      event.preventDefault();
    });
  }

  #between(one, other) {
    const [from, to] = [Math.min(one, other), Math.max(one, other)];
    return [Math.min(from, this.spanMs - this.#profile.bin_ms), Math.max(to, from + this.#profile.bin_ms)];
  }

  // Moves the range, or only its end, by a fiftieth of the time.
  #move(by, isEnd) {
    const step = Math.max(1, Math.round(this.#profile.bins / 50)) * this.#profile.bin_ms;
    if (!this.#range || this.#range[0] === this.#range[1]) {
      this.events.choose([0, Math.min(this.spanMs, 5 * step)], true);
      return;
    }
    let [from, to] = this.#range;
    const moved = by * step;
    if (isEnd) to = Math.min(this.spanMs, Math.max(from + step, to + moved));
    else if (from + moved >= 0 && to + moved <= this.spanMs) [from, to] = [from + moved, to + moved];
    this.events.choose([from, to], true);
  }
}

function seconds(ms, step) {
  const digits = step < 1000 ? Math.min(3, Math.ceil(-Math.log10(step / 1000) - 1e-9)) : 0;
  if (ms < 120_000 || step < 1000) return `${(ms / 1000).toFixed(digits)} s`;
  const all = Math.round(ms / 1000);
  const [hours, minutes] = [Math.floor(all / 3600), Math.floor((all % 3600) / 60)];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}
