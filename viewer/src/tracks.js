// A row for each thread over time: the share of each moment in which it ran, and the causes of its waits.

import { GROUPS, groupOf } from "./causes.js";
import { onCanvas } from "./colours.js";
import { threadValue } from "./filters.js";
import { KINDS } from "./profile.js";
import { format, nsOf, share } from "./units.js";

const LEAST = 3; // minimum width of a column in pixels
const PERIODS = 5; // minimum sampling periods per column
const WAIT = KINDS.indexOf("wait");

// Returns the number of rows that fit in the window.
const most = () => (innerHeight <= 480 ? 2 : innerHeight < 800 || innerWidth <= 700 ? 5 : 8);

export class Tracks {
  #rows = [];

  // `events`: choose(thread, with the value of filters.js), point(facts, place) with null for nothing.
  constructor(element, events) {
    Object.assign(this, { element, events });
    element.addEventListener("click", ({ target }) => {
      const row = this.#rowOf(target);
      if (row) events.choose(row.value);
    });
    element.addEventListener("mousemove", (event) => {
      const row = this.#rowOf(event.target);
      events.point(row ? this.#facts(row) : null, { x: event.clientX, y: event.clientY });
    });
    element.addEventListener("mouseleave", () => events.point(null));
  }

  // Loads the threads that pass a filter of profile.js, in descending order of time; the filter's kind
  // must measure time. `gutter`: pixels for names.
  load(profile, filter, gutter) {
    const { element } = this;
    element.style.setProperty("--gutter", `${gutter}px`);
    this.profile = profile;
    this.spanMs = profile.bins * profile.bin_ms;
    const width = Math.max(50, element.clientWidth - gutter);
    const period = Math.max(...profile.kinds.map(({ period_ns: ns }) => ns)) / 1e6;
    this.columns = Math.max(1, Math.floor(Math.min(profile.bins, width / LEAST, this.spanMs / (PERIODS * (period || 1)))));
    const focused = element.contains(document.activeElement) && this.#rowOf(document.activeElement)?.value;
    const rows = [...this.#sum(profile, filter).values()].sort((a, b) => b.all - a.all);
    this.#rows = rows.slice(0, most());
    this.#fill(profile, filter);
    for (const row of this.#rows) this.#add(row);
    const rest = rows.length - this.#rows.length;
    element.replaceChildren(...this.#rows.map(({ item }) => item), ...(rest ? [this.#rest(rest)] : []));
    this.#rows.find(({ value }) => value === focused)?.item.firstChild.focus();
  }

  // Visits the samples: visit(thread, nanoseconds, cause of the wait or null on CPUs, bin).
  #each(profile, filter, visit) {
    const { samples: { thread, kind, node, bin }, recorded, strings, bins, kinds: all } = profile;
    const [onCpu] = all[filter.kind].parts ?? [filter.kind];
    const { frames: { name, kind: kinds }, nodes: { frame } } = recorded;
    const factor = all[filter.kind].parts ? 1 : nsOf(all[filter.kind]);
    profile.each(filter, [0, bins], (i, _, counted) => {
      const of = frame[node[i]];
      const cause = kinds[of] === WAIT ? strings[name[of]] : "wait: other";
      visit(thread[i], counted * factor, kind[i] === onCpu ? null : cause, bin[i]);
    });
  }

  // Returns the time of each thread by state.
  #sum(profile, filter) {
    const found = new Map();
    this.#each(profile, filter, (at, value, cause) => {
      if (!found.has(at)) {
        found.set(at, { at, value: threadValue(profile, at), all: 0, ran: 0, waits: new Map() });
      }
      const row = found.get(at);
      row.all += value;
      if (cause === null) row.ran += value;
      else row.waits.set(cause, (row.waits.get(cause) ?? 0) + value);
    });
    return found;
  }

  // Adds time by state and column to the shown rows only, because there may be many threads and columns
  // are large. A wait ends at its sample's time.
  #fill(profile, filter) {
    const starts = [0]; // first bins of the intervals on the axis
    for (const { bins } of profile.parts) starts.push(starts.at(-1) + bins);
    const shown = [];
    for (const row of this.#rows) {
      row.cells = Array.from({ length: GROUPS.length + 1 }, () => new Float64Array(this.columns));
      shown[row.at] = row.cells;
    }
    const binNs = profile.bin_ms * 1e6;
    this.#each(profile, filter, (at, value, cause, bin) => {
      if (!shown[at]) return;
      const end = bin + 1;
      if (cause === null) {
        this.#spread(shown[at][0], bin, end, value);
        return;
      }
      const start = Math.max(starts.findLast((one) => one < end), end - Math.max(1, value / binNs));
      this.#spread(shown[at][1 + groupOf(cause)], start, end, value);
    });
  }

  // Distributes a value over the columns between two bins.
  #spread(cells, from, to, value) {
    const scale = this.columns / this.profile.bins;
    const [left, right] = [from * scale, Math.min(this.columns, to * scale)];
    for (let at = Math.floor(left); at < right; at += 1) {
      cells[at] += (value * (Math.min(right, at + 1) - Math.max(left, at))) / (right - left);
    }
  }

  #add(row) {
    const [tid, ...name] = row.value.split(" ");
    row.title = `${name.join(" ")} ${tid}`;
    row.item = document.createElement("li");
    const button = row.item.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = row.title;
    button.setAttribute("aria-label", `Thread ${row.title}: ${this.#facts(row).rows.map((one) => one.join(" ")).join(", ")}`);
    row.canvas = row.item.appendChild(document.createElement("canvas"));
    row.canvas.setAttribute("aria-hidden", "true");
  }

  #rest(count) {
    const item = document.createElement("li");
    item.textContent = `${count.toLocaleString("en-US")} more: choose a process or thread`;
    return item;
  }

  #rowOf(target) {
    const item = target.closest("li");
    return this.#rows.find((row) => row.item === item);
  }

  // Describes the times of a row in words.
  #facts({ title, all, ran, waits }) {
    const text = (ns) => `${format(ns, all, { unit: "nanoseconds" }, "time")} · ${share(ns, all)}`;
    const causes = [...waits].sort((a, b) => b[1] - a[1]).map(([cause, ns]) => [cause, text(ns)]);
    return { title, rows: [["on CPUs", text(ran)], ...causes] };
  }

  // Draws all rows; the part outside the range of milliseconds, unless it is null, is pale.
  show(range) {
    const colours = ["var(--heat)", ...GROUPS.map(({ colour }) => colour)].map(onCanvas);
    for (const { canvas, cells } of this.#rows) {
      const { clientWidth: width, clientHeight: height } = canvas;
      [canvas.width, canvas.height] = [width, height].map((size) => Math.round(size * devicePixelRatio));
      const pen = canvas.getContext("2d");
      pen.scale(devicePixelRatio, devicePixelRatio);
      pen.fillStyle = onCanvas("var(--plot)");
      pen.fillRect(0, 0, width, height);
      const wide = width / this.columns;
      const full = (this.spanMs * 1e6) / this.columns;
      for (let column = 0; column < this.columns; column += 1) {
        const scale = height / Math.max(full, cells.reduce((sum, one) => sum + one[column], 0));
        let top = height;
        cells.forEach((one, at) => {
          if (!one[column]) return;
          top -= one[column] * scale;
          pen.fillStyle = colours[at];
          pen.fillRect(column * wide, top, wide + 0.3, one[column] * scale);
        });
      }
      if (!range) continue;
      const [left, right] = range.map((ms) => (ms / this.spanMs) * width);
      pen.globalAlpha = 0.62;
      pen.fillStyle = onCanvas("var(--back)");
      pen.fillRect(0, 0, left, height);
      pen.fillRect(right, 0, width - right, height);
    }
  }

  // Returns the drawn data, for tests: each thread's title and the time of each state in each column.
  drawn() {
    return this.#rows.map(({ title, cells }) => ({ title, cells: cells.map((one) => [...one]) }));
  }
}
