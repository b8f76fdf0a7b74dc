// Shows where the time of spans went, over the whole recording: a bar with a segment for each part.

import { colourOfCause } from "./causes.js";
import { count, format, share } from "./units.js";

const COLOURS = {
  "user code": "var(--user-0)", kernel: "var(--kernel-0)",
  "other spans of the trace": "var(--process-1)", "other tasks": "var(--same)", "event loop waited": "var(--line)",
};
const colourOf = (part) => COLOURS[part] ?? colourOfCause(part);

export class Spans {
  // `point`(facts, place) shows a tooltip, or hides it if given null.
  constructor(element, point) {
    this.element = element("spans");
    [this.list, this.bar, this.parts] = ["endpoint", "bar", "parts"].map(element);
    this.list.addEventListener("change", () => this.#show());
    this.bar.addEventListener("mousemove", ({ clientX: x, clientY: y }) => point(this.#facts(), { x, y }));
    this.bar.addEventListener("mouseleave", () => point(null));
  }

  // `spans`: for each group of spans, its name, number of traces, and parts (name and nanoseconds); the
  // group of all spans comes first.
  load(spans = []) {
    this.spans = spans;
    this.element.hidden = !spans.length;
    this.list.replaceChildren(...spans.map(({ name }, at) => new Option(name || "all", at)));
    if (spans.length) this.#show();
  }

  get #chosen() {
    return this.spans[this.list.value];
  }

  #show() {
    const { parts } = this.#chosen;
    const all = parts.reduce((sum, [, ns]) => sum + ns, 0);
    this.bar.replaceChildren(...parts.map(([name, ns]) => {
      const part = document.createElement("i");
      part.style.flexGrow = ns / all;
      part.style.background = colourOf(name);
      return part;
    }));
    this.parts.replaceChildren(...parts.map(([name, ns]) => {
      const item = document.createElement("li");
      item.style.setProperty("--swatch", colourOf(name));
      item.textContent = `${name} ${share(ns, all)}`;
      return item;
    }));
  }

  #facts() {
    const { name, traces, parts } = this.#chosen;
    const all = parts.reduce((sum, [, ns]) => sum + ns, 0);
    const text = (ns) => `${format(ns, all, { unit: "nanoseconds" }, "time")} · ${share(ns, all)}`;
    return {
      title: `${name || "All spans"}, whole recording`,
      rows: [["Traces", count(traces)], ...parts.map(([part, ns]) => [part, text(ns)])],
    };
  }
}
