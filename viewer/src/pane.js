// One kind of profile in the chosen tab: graphs and tables, and what they show of a box or function.

import { colourOf } from "./colours.js";
import { difference, inWords } from "./difference.js";
import { Graph } from "./graph.js";
import { svg } from "./save.js";
import { isGraph, rootOf } from "./state.js";
import { Table } from "./table.js";
import { Tree } from "./tree.js";
import { brief, count, fitting, format, share } from "./units.js";

const KEYS =
  "Arrow keys move between frames, Enter chooses, Escape goes back. The table has the same counts.";
const NUMBERS = { own: "Self", total: "Total" };

export class Pane {
  #trees = new Map();
  #view = null;

  // `events`: zoom(path), choose(function id), sort(column), tell(text, name, function id, stack), menu(place),
  // point(facts, place) with null for nothing.
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
        point: (tree, box, place) => this.events.point(tree && this.#facts(tree, box), place),
      });
    const zoom = (tree, box) => {
      events.zoom(tree.path(box));
      this.tell(tree, box);
    };
    const centre = (tree, box) => {
      if (box.frame >= 0) this.events.choose(this.#idOf(box.frame));
      this.tell(tree, box);
    };
    this.graph = graph("Flame graph", zoom);
    this.above = graph("Callers of the function", centre);
    this.below = graph("Callees of the function", centre);
    const choose = (id) => events.choose(id);
    const menu = (id, place) => {
      const at = this.#view.profile.functions.findIndex((one) => one.id === id);
      this.events.tell("", this.#view.profile.name(this.#view.profile.functions[at].frame), id);
      this.events.menu(place);
    };
    this.functions = new Table({ choose, menu, sort: events.sort });
    this.callers = new Table({ choose, menu });
    this.callees = new Table({ choose, menu });
    this.element = document.createElement("section");
    this.heading = document.createElement("h2");
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.textContent = "No samples.";
    this.body = document.createElement("div");
    this.element.append(this.heading, this.empty, this.body);
  }

  // `view`: profile, kind, counts, before and after (counts, or null), state, search (or null),
  // isOnly.
  show(view) {
    if (view.counts !== this.#view?.counts) this.#trees.clear();
    this.#view = view;
    const { kind, counts, state, isOnly } = view;
    this.heading.hidden = isOnly;
    this.heading.textContent = `${kind.name} · ${this.amount(counts.all, counts.all)}`;
    this.empty.hidden = counts.all > 0;
    this.body.hidden = !counts.all;
    this.body.className = `body ${state.tab}`;
    if (counts.all) this[`show_${state.tab}`]();
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
    const { profile, counts } = this.#view;
    this.#attach(this.graph.element);
    this.graph.show(this.#tree("flame", () => Tree.callees(profile, counts)), this.#look());
  }

  show_callers() {
    const { profile, counts } = this.#view;
    this.#attach(this.graph.element);
    this.graph.show(this.#tree("callers", () => Tree.callers(profile, counts)), this.#look());
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
    const both = this.both ??= box(
      "sides", caption("Callers"), this.above.element, caption("Callees"), this.below.element,
    );
    this.#attach(this.functions.element, both);
    const [above, below] = this.#around(found);
    this.above.show(above, { ...this.#look(), zoom: [], rootAtBottom: true });
    this.below.show(below, { ...this.#look(), zoom: [], rootAtBottom: false });
  }

  // The trees of callers and callees of a function.
  #around(chosen) {
    const { profile, counts } = this.#view;
    return [true, false].map((up) =>
      this.#tree(`${up} ${chosen}`, () => Tree.around(profile, counts, chosen, up)),
    );
  }

  // Fills the table of functions; returns the index of the chosen one, or else of the first.
  #showFunctions() {
    const { profile, counts, before, after, state, search } = this.#view;
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
      rows.push({ at, id, ...this.#shown(frame) });
    });
    const { total } = sums;
    rows.sort((a, b) => weight(b.at) - weight(a.at) || total[b.at] - total[a.at] || a.at - b.at);
    const [first] = rows;
    if (search) rows = rows.filter(({ at }) => search.frames[profile.functions[at].frame]);
    const columns = Object.entries(NUMBERS).flatMap(([column, name]) => [
      ...this.#amounts({ key: column, name }, rows, ({ at }) => sums[column][at], counts.all,
        compared && (({ at }) => compared[1][column][at] / (after.all || 1))),
      ...(changes ? [{
        name: "±", text: ({ at }) => inWords(changes[column][at]),
        className: ({ at }) => sign(changes[column][at]),
      }] : []),
    ]);
    const chosen = rows.find(({ id }) => id === state.chosen) ?? rows[0] ?? first;
    const known = profile.functions.findIndex(({ id }) => id === state.chosen);
    this.functions.show({
      caption: `${count(rows.length)} functions · ${this.#unit()}`,
      columns, rows, sort: key, chosen: state.chosen || chosen?.id,
    });
    return (this.chosen = known >= 0 ? known : chosen?.at ?? 0);
  }

  #changes([before, after], column) {
    const { kind, before: { all: one }, after: { all: other } } = this.#view;
    return Array.from(before[column], (value, at) =>
      difference(value, one, after[column][at], other, kind));
  }

  #showNeighbours(table, tree) {
    const { profile, search } = this.#view;
    const { root } = tree;
    const { counts, before, after, kind } = this.#view;
    const rows = tree.children(root).map((box) => ({
      ...this.#shown(box.frame),
      id: profile.frames.kind[box.frame] ? this.#idOf(box.frame) : "",
      isMatch: Boolean(search?.frames[box.frame]),
      of: (counted) => tree.amount(box, counted),
    }));
    const itself = {
      ...this.#shown(root.frame), id: "", name: "itself", module: "",
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
        ...this.#amounts({ name: "Total" }, rows, ({ value }) => value, root.value,
          before && ((row) => change(row).after)),
        ...(before
          ? [{ name: "±", text: (row) => inWords(change(row)), className: (row) => sign(change(row)) }]
          : []),
      ],
      rows, sort: "", chosen: "",
    });
  }

  // Columns of an amount and of its share, of all or of another number, with bars relative to the
  // largest. Where amounts are shares, one column has both; `shareOf` then replaces what is shown.
  #amounts(column, rows, valueOf, all, shareOf) {
    const { counts, kind, state } = this.#view;
    const most = rows.reduce((found, row) => Math.max(found, valueOf(row)), 0) || 1;
    const part = (row) => valueOf(row) / most;
    if (shareOf) return [{ ...column, part, text: (row) => share(shareOf(row), 1) }];
    const ofAll = { part, text: (row) => share(valueOf(row), counts.all) };
    if (fitting(kind, state.unit)[0] === "share") return [{ ...column, ...ofAll }];
    return [
      { ...column, text: (row) => this.#brief(valueOf(row)) },
      { ...column, name: `${column.name} %`, part, text: (row) => share(valueOf(row), all) },
    ];
  }

  // What tables show of a frame.
  #shown(frame) {
    const { profile } = this.#view;
    return {
      name: profile.name(frame), module: profile.text("module", frame), family: profile.family(frame),
    };
  }

  #idOf(frame) {
    const { profile } = this.#view;
    return profile.functions[profile.functionOf[frame]].id;
  }

  #unit() {
    const { kind, state, before } = this.#view;
    return before ? "%" : fitting(kind, state.unit)[1];
  }

  amount(value, all) {
    const { kind, state, before } = this.#view;
    return before ? share(value, all) : format(value, all, kind, state.unit);
  }

  #brief(value) {
    const { kind, state, before, counts } = this.#view;
    return before ? share(value, counts.all) : brief(value, counts.all, kind, state.unit);
  }

  // A value in the unit and as a share.
  #both(value) {
    const { counts } = this.#view;
    const [text, percent] = [this.#brief(value), share(value, counts.all)];
    return text === percent ? text : `${text} · ${percent}`;
  }

  #difference(tree, box) {
    const { before, after, kind } = this.#view;
    return (box.difference ??= difference(
      tree.amount(box, before), before.all, tree.amount(box, after), after.all, kind,
    ));
  }

  #look() {
    const { profile, before, state, search } = this.#view;
    return {
      zoom: state.zoom,
      rootAtBottom: rootOf(state) === "bottom",
      colour: (box, tree) => (before ? this.#difference(tree, box).colour : colourOf(profile.family(box.frame), profile.name(box.frame))),
      isHatched: (box) => box.frame >= 0 && profile.frames.reason[box.frame] > 0,
      searches: Boolean(search),
      isMatch: (box) => Boolean(search && box.frame >= 0 && search.frames[box.frame]),
      text: (box, tree) => ({
        name: profile.name(box.frame),
        amount: before ? inWords(this.#difference(tree, box)) : this.#both(box.value),
      }),
    };
  }

  // A box in words.
  describe(tree, box) {
    const { profile, counts, before, kind, state } = this.#view;
    const { frame } = box;
    const parts = [profile.name(frame)];
    if (frame >= 0) {
      const [module, reason] = ["module", "reason"].map((column) => profile.text(column, frame));
      if (module) parts.push(`in ${module}`);
      if (profile.frames.inlined[frame]) parts.push("inlined");
      if (reason) parts.push(`unresolved: ${reason}`);
    }
    if (before) {
      const found = this.#difference(tree, box);
      parts.push(`before ${share(found.before, 1)}, after ${share(found.after, 1)}: ${inWords(found)}`);
      if (found.by && found.isChance) parts.push("may be chance");
      return parts.join(" · ");
    }
    const value = tree.amount(box, counts);
    const text = format(value, counts.all, kind, state.unit);
    const percent = share(value, counts.all);
    parts.push(text === percent ? percent : `${text}, ${percent}`);
    const own = tree.own(box, counts);
    if (own && frame >= 0) parts.push(`${share(own, counts.all)} in itself`);
    const { zoomed } = this.graph;
    if (state.zoom.length && zoomed?.parent) parts.push(`${share(value, zoomed.value)} of the zoomed frame`);
    return parts.join(" · ");
  }

  // What the tooltip says of a box.
  #facts(tree, box) {
    const { profile, counts, before, kind, state } = this.#view;
    const { frame, parent } = box;
    const rows = [];
    const amount = (value) => format(value, counts.all, kind, state.unit);
    if (box.more) {
      if (!before) rows.push(["Total", amount(box.value)]);
      rows.push(["Of all", share(box.value, counts.all)], ["Width", "too narrow: zoom in"]);
      return { title: `${count(box.more)} more`, rows };
    }
    if (before) {
      const found = this.#difference(tree, box);
      rows.push(["Before", share(found.before, 1)], ["After", share(found.after, 1)], ["Change", inWords(found)]);
      if (found.by && found.isChance) rows.push(["", "may be chance"]);
    } else {
      rows.push(["Total", amount(box.value)]);
      if (!tree.up) rows.push(["Self", amount(tree.own(box, counts))]);
      rows.push(["Of all", share(box.value, counts.all)]);
      if (parent) rows.push([tree.up ? "Of callee" : "Of parent", share(box.value, parent.value)]);
    }
    const { zoomed } = this.graph;
    if (isGraph(state) && zoomed?.parent && box !== zoomed) rows.push(["Of zoomed", share(box.value, zoomed.value)]);
    if (frame >= 0) {
      const [file, module, reason] = [profile.place(frame), ...["module", "reason"].map((name) => profile.text(name, frame))];
      if (file) rows.push(["File", file]);
      if (module && module !== profile.text("file", frame)) rows.push(["Module", module]);
      if (profile.frames.inlined[frame]) rows.push(["Inlined", "into its caller"]);
      if (reason) rows.push(["No name", reason]);
    }
    return { title: profile.name(frame), rows };
  }

  tell(tree, box) {
    const { profile } = this.#view;
    const isFunction = box.frame >= 0 && profile.frames.kind[box.frame] > 0;
    this.events.tell(this.describe(tree, box), profile.name(box.frame), isFunction ? this.#idOf(box.frame) : "",
      this.#stack(tree, box));
  }

  // Names of a box and of those towards the root of all stacks, the innermost first.
  #stack({ up }, box) {
    const found = [];
    for (let at = box; at; at = at.parent) if (at.frame >= 0) found.push(this.#view.profile.name(at.frame));
    return (up ? found.reverse() : found).join("\n");
  }

  // Functions with their counts, as rows of texts and numbers below their headings.
  functionRows() {
    const { profile, counts, before, after, kind } = this.#view;
    const sides = before ? { "before ": before, "after ": after } : { "": counts };
    const sums = Object.values(sides).map((side) => profile.functionCounts(side));
    const heads = Object.keys(sides).flatMap((side) => [`${side}self`, `${side}total`]);
    const rows = profile.functions.map(({ frame }, at) => [
      profile.name(frame), profile.text("module", frame), profile.place(frame),
      ...sums.flatMap(({ own, total }) => [own[at], total[at]]), kind.unit,
    ]);
    const isShown = ({ frame }, at) => profile.frames.kind[frame] && sums.some(({ total }) => total[at] > 0);
    return [["function", "module", "file", ...heads, "unit"], ...rows.filter((_, at) => isShown(profile.functions[at], at))];
  }

  // The graph in the tab as an SVG drawing.
  svg() {
    const { shapes, ...sizes } = this.graph.drawing();
    const { counts, kind, state, before } = this.#view;
    const amount = ({ box, value }) => {
      const sum = value ?? box.value;
      return before ? share(sum, counts.all) : `${format(sum, counts.all, kind, state.unit)}, ${share(sum, counts.all)}`;
    };
    return svg(shapes.map((shape) => ({ ...shape, title: `${shape.name} · ${amount(shape)}` })), sizes);
  }

  // Says what is in focus, or which function is chosen.
  tellFocused() {
    const { counts } = this.#view;
    if (!counts.all) this.events.tell("No samples.", "", "");
    else if (isGraph(this.#view.state)) this.tell(this.#trees.get(this.#view.state.tab), this.graph.focused);
    else this.#tellFunction();
  }

  #tellFunction() {
    const { profile, counts } = this.#view;
    const { id, frame } = profile.functions[this.chosen];
    const { own, total } = this.#trees.get("functions");
    const module = profile.text("module", frame);
    const parts = [profile.name(frame), ...(module ? [`in ${module}`] : [])];
    for (const [name, sums] of [["self", own], ["total", total]]) {
      parts.push(`${name} ${this.amount(sums[this.chosen], counts.all)}, ${share(sums[this.chosen], counts.all)}`);
    }
    this.events.tell(parts.join(" · "), profile.name(frame), id);
  }

  // How much of what is shown matches the search; null without one.
  matched() {
    const { profile, counts, search, state } = this.#view;
    if (!search) return null;
    const sums = profile.only(search.inside, counts);
    const { zoomed } = this.graph;
    const [part, all] = isGraph(state) && counts.all && zoomed.parent
      ? [this.#trees.get(state.tab).amount(zoomed, sums), zoomed.value]
      : [sums.all, counts.all];
    const amount = this.amount(part, all);
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

function caption(text) {
  const made = document.createElement("h3");
  made.textContent = text;
  return made;
}
