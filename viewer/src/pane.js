// One kind of samples in the selected tab: graphs and tables, and details of a box or function.

import { difference, inWords } from "./difference.js";
import { Graph } from "./graph.js";
import { fileOf, hottest, linesOf } from "./lines.js";
import { Listing } from "./listing.js";
import { isGraph } from "./state.js";
import { Table } from "./table.js";
import { Tree } from "./tree.js";
import { count, share } from "./units.js";
import { View } from "./view.js";

const KEYS =
  "Arrow keys move between frames, Enter chooses, Escape goes back. The table has the same counts.";
const NUMBERS = { own: "Self", total: "Total" };

export class Pane {
  #trees = new Map();
  view = null;

  // `events`: zoom(path), choose(function id), sort(column), tell(text, name, function id, stack), menu(place),
  // widen(change of the state), point(facts, place) with null for nothing.
  constructor(events) {
    this.events = events;
    const graph = (label, zoom) =>
      new Graph(`${label}. ${KEYS}`, {
        zoom,
        tell: (tree, box) => this.tell(tree, box),
        menu: (tree, box, place) => {
          this.tell(tree, box);
          this.events.menu(place);
        },
        point: (tree, box, place) => this.events.point(tree && this.view.facts(tree, box), place),
      });
    const zoom = (tree, box) => {
      events.zoom(tree.path(box));
      this.tell(tree, box);
    };
    const centre = (tree, box) => {
      if (box.frame >= 0) this.events.choose(this.view.idOf(box.frame));
      this.tell(tree, box);
    };
    this.graph = graph("Flame graph", zoom);
    this.above = graph("Callers of the function", centre);
    this.below = graph("Callees of the function", centre);
    const choose = (id) => events.choose(id);
    const menu = (id, place) => {
      const at = this.view.profile.functions.findIndex((one) => one.id === id);
      this.events.tell("", this.view.profile.name(this.view.profile.functions[at].frame), id);
      this.events.menu(place);
    };
    this.functions = new Table({ choose, menu, sort: events.sort });
    this.callers = new Table({ choose, menu });
    this.callees = new Table({ choose, menu });
    this.listing = new Listing();
    this.element = document.createElement("section");
    this.heading = document.createElement("h2");
    this.empty = document.createElement("div");
    this.empty.className = "empty";
    this.body = document.createElement("div");
    this.element.append(this.heading, this.empty, this.body);
  }

  // `view`: profile, kind, counts, before and after (counts, or null), recorded() and recordedBefore()
  // (counts of recorded nodes), sources, onCpu (counts of the on-CPU part of wall-clock time, or null),
  // state, search (or null), isOnly, why() (see empty.js; called if there are no samples).
  show(view) {
    if (view.counts !== this.view?.counts) this.#trees.clear();
    this.view = new View(view, this.graph);
    const { kind, counts, state, isOnly } = view;
    this.heading.classList.toggle("unseen", isOnly); // headings below it need it
    this.heading.textContent = `${kind.name} · ${this.view.amount(counts.all, counts.all)}`;
    this.empty.hidden = counts.all > 0;
    this.body.hidden = !counts.all;
    this.body.className = `body ${state.tab}`;
    if (counts.all) this[`show_${state.tab}`]();
    else this.#explain();
  }

  // Shows why there are no samples, with a button for each way to get some back.
  #explain() {
    const { text, ways } = this.view.why();
    const reason = document.createElement("p");
    reason.textContent = text;
    this.empty.replaceChildren(reason, ...ways.map(({ label, amount, change }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = `${label} · ${amount}`;
      button.addEventListener("click", () => {
        this.events.widen(change);
        this.focus();
      });
      return button;
    }));
  }

  // Focuses the graph or table, or the first button of the explanation.
  focus() {
    const { counts, state } = this.view;
    if (!counts.all) this.empty.querySelector("button")?.focus();
    else if (isGraph(state)) this.graph.element.focus();
    else this.functions.element.querySelector("tbody button")?.focus();
  }

  #attach(...elements) {
    const there = [...this.body.children];
    if (there.length !== elements.length || there.some((one, at) => one !== elements[at])) {
      this.body.replaceChildren(...elements);
    }
  }

  #tree(name, make) {
    if (!this.#trees.has(name)) this.#trees.set(name, make());
    return this.#trees.get(name);
  }

  show_flame() {
    const { profile, counts } = this.view;
    this.#attach(this.graph.element);
    this.graph.show(this.#tree("flame", () => Tree.callees(profile, counts)), this.view.look());
  }

  show_callers() {
    const { profile, counts } = this.view;
    this.#attach(this.graph.element);
    this.graph.show(this.#tree("callers", () => Tree.callers(profile, counts)), this.view.look());
  }

  show_table() {
    const found = this.#showFunctions();
    const side = this.sides ??= box("sides", this.callers.element, this.callees.element);
    this.#attach(this.functions.element, side);
    const [above, below] = this.#around(found);
    this.#showNeighbours(this.callers, above);
    this.#showNeighbours(this.callees, below);
  }

  show_sandwich() {
    const found = this.#showFunctions();
    this.headings ??= [document.createElement("h3"), document.createElement("h3")];
    const [upper, lower] = this.headings;
    const both = this.both ??= box("sides", upper, this.above.element, lower, this.below.element);
    this.#attach(this.functions.element, both);
    const [above, below] = this.#around(found);
    const name = this.view.profile.name(above.root.frame);
    upper.textContent = above.root.value > 0 ? "Callers" : `No samples of ${name} remain: choose another function.`;
    lower.textContent = "Callees";
    this.above.show(above, { ...this.view.look(), zoom: [], rootAtBottom: true });
    this.below.show(below, { ...this.view.look(), zoom: [], rootAtBottom: false });
  }

  show_source() {
    const chosen = this.#showFunctions();
    this.#attach(this.functions.element, this.listing.element);
    const { profile } = this.view;
    const recorded = this.view.recorded();
    const { file, lines } = fileOf(profile, recorded, chosen);
    const counts = file ? linesOf(profile, recorded, file) : { self: new Map(), total: new Map() };
    const before = file && this.view.before ? linesOf(profile, this.view.recordedBefore(), file) : null;
    const shown = this.view.listing(chosen, file, counts, before);
    this.listing.show({ ...shown, own: lines, hot: hottest(counts),
      at: hottest(counts, lines), key: `${chosen} ${file} ${shown.text !== null}` });
  }

  // Returns the trees of a function's callers and callees.
  #around(chosen) {
    const { profile, counts } = this.view;
    return [true, false].map((up) =>
      this.#tree(`${up} ${chosen}`, () => Tree.around(profile, counts, chosen, up)),
    );
  }

  // Fills the table of functions; returns the index of the selected one, otherwise of the first.
  #showFunctions() {
    const { profile, counts, before, after, state, search } = this.view;
    const sums = this.#tree("functions", () => profile.functionCounts(counts));
    const compared =
      before && this.#tree("compared", () => [before, after].map((one) => profile.functionCounts(one)));
    const changes = compared && Object.fromEntries(
      Object.keys(NUMBERS).map((column) => [column, this.#changes(compared, column)]),
    );
    const key = NUMBERS[state.sort] ? state.sort : "own";
    const weight = (at) => (changes ? Math.abs(changes[key][at].by) : sums[key][at]);
    let rows = [];
    profile.functions.forEach(({ frame, id }, at) => {
      if (!sums.total[at] || !profile.frames.kind[frame]) return;
      rows.push({ at, id, ...this.view.shown(frame) });
    });
    const { total } = sums;
    rows.sort((a, b) => weight(b.at) - weight(a.at) || total[b.at] - total[a.at] || a.at - b.at);
    const first = rows.find(({ at }) => state.tab !== "source" || profile.frames.file[profile.functions[at].frame]) ?? rows[0];
    if (search) rows = rows.filter(({ at }) => search.frames[profile.functions[at].frame]);
    const columns = Object.entries(NUMBERS).flatMap(([column, name]) => [
      ...this.view.amounts({ key: column, name }, rows, ({ at }) => sums[column][at], counts.all,
        compared && (({ at }) => compared[1][column][at] / (after.all || 1))),
      ...(changes ? [{
        name: "±", text: ({ at }) => inWords(changes[column][at]),
        className: ({ at }) => sign(changes[column][at]), changeOf: column,
      }] : []),
    ]);
    const chosen = rows.find(({ id }) => id === state.chosen) ?? (rows.includes(first) ? first : rows[0]) ?? first;
    const known = profile.functions.findIndex(({ id }) => id === state.chosen);
    this.functions.show({
      caption: rows.length ? `${count(rows.length)} functions · ${this.view.unit()}` : `No function matches ${state.search}`,
      columns, rows, sort: key, chosen: state.chosen || chosen?.id,
    });
    return (this.chosen = known >= 0 ? known : chosen?.at ?? 0);
  }

  #changes([before, after], column) {
    const { kind, before: { all: one }, after: { all: other } } = this.view;
    return Array.from(before[column], (value, at) =>
      difference(value, one, after[column][at], other, kind));
  }

  #showNeighbours(table, tree) {
    const { profile, search } = this.view;
    const { root } = tree;
    const { counts, before, after, kind } = this.view;
    const rows = tree.children(root).map((box) => ({
      ...this.view.shown(box.frame),
      id: profile.frames.kind[box.frame] ? this.view.idOf(box.frame) : "",
      isMatch: Boolean(search?.frames[box.frame]),
      of: (counted) => tree.amount(box, counted),
    }));
    const itself = {
      ...this.view.shown(root.frame), id: "", name: "itself", module: "",
      of: (counted) => tree.own(root, counted),
    };
    if (itself.of(counts) > 0) rows.push(itself);
    for (const row of rows) row.value = row.of(counts);
    rows.sort((a, b) => b.value - a.value);
    const change = (row) =>
      (row.change ??= difference(row.of(before), before.all, row.of(after), after.all, kind));
    table.show({
      caption: `${tree.up ? "Callers" : "Callees"} of ${profile.name(root.frame)}`,
      columns: [
        ...this.view.amounts({ name: "Total" }, rows, ({ value }) => value, root.value,
          before && ((row) => change(row).after)),
        ...(before
          ? [{ name: "±", text: (row) => inWords(change(row)), className: (row) => sign(change(row)), changeOf: "total" }]
          : []),
      ],
      rows, sort: "", chosen: "",
    });
  }

  tell(tree, box) {
    const { profile } = this.view;
    const isFunction = box.frame >= 0 && profile.frames.kind[box.frame] > 0;
    this.events.tell(this.view.describe(tree, box), profile.name(box.frame), isFunction ? this.view.idOf(box.frame) : "",
      this.view.stack(tree, box));
  }

  // Describes the focused item or the selected function.
  tellFocused() {
    const { counts } = this.view;
    if (!counts.all) this.events.tell(this.empty.firstChild.textContent, "", "");
    else if (isGraph(this.view.state)) this.tell(this.#trees.get(this.view.state.tab), this.graph.focused);
    else this.#tellFunction();
  }

  #tellFunction() {
    const { profile, counts } = this.view;
    const { id, frame } = profile.functions[this.chosen];
    const { own, total } = this.#trees.get("functions");
    const module = profile.text("module", frame);
    const parts = [profile.name(frame), ...(module ? [`in ${module}`] : [])];
    const compared = this.#trees.get("compared");
    for (const [name, column, sums] of [["self", "own", own], ["total", "total", total]]) {
      const [one, other] = compared?.map((side) => side[column][this.chosen]) ?? [];
      parts.push(compared
        ? `${name} before ${share(one, this.view.before.all)}, after ${share(other, this.view.after.all)}`
        : `${name} ${this.view.amount(sums[this.chosen], counts.all)}, ${share(sums[this.chosen], counts.all)}`);
    }
    this.events.tell(parts.join(" · "), profile.name(frame), id);
  }

  // Returns how much of the shown samples matches the search; null without a search.
  matched() {
    const { profile, counts, search, state } = this.view;
    if (!search) return null;
    const sums = profile.only(search.inside, counts);
    const { zoomed } = this.graph;
    const [part, all] = isGraph(state) && counts.all && zoomed.parent
      ? [this.#trees.get(state.tab).amount(zoomed, sums), zoomed.value]
      : [sums.all, counts.all];
    const amount = this.view.amount(part, all);
    const percent = share(part, all);
    return amount === percent ? percent : `${percent}, ${amount}`;
  }
}

const sign = ({ by, isChance }) => (isChance || !by ? "" : by > 0 ? "gain" : "loss");

function box(className, ...children) {
  const made = document.createElement("div");
  made.className = className;
  made.append(...children);
  return made;
}
