// Describes one kind of samples in words, numbers and colours.

import { colourOf } from "./colours.js";
import { difference, inWords } from "./difference.js";
import { svg } from "./save.js";
import { KINDS } from "./profile.js";
import { isGraph, rootOf } from "./state.js";
import { brief, count, fitting, format, share } from "./units.js";

export class View {
  // `given`: see Pane.show(); `graph`: the one in which frames can be zoomed.
  constructor(given, graph) {
    Object.assign(this, given, { graph });
  }

  // Returns the columns of an amount and its share, of all samples or of another number, with bars
  // relative to the largest. If amounts are shares, a single column has both; `shareOf` then replaces the
  // shown text.
  amounts(column, rows, valueOf, all, shareOf) {
    const { counts, kind, state } = this;
    const most = rows.reduce((found, row) => Math.max(found, valueOf(row)), 0) || 1;
    const part = (row) => valueOf(row) / most;
    if (shareOf) return [{ ...column, part, text: (row) => share(shareOf(row), 1) }];
    const ofAll = { part, text: (row) => share(valueOf(row), counts.all) };
    if (fitting(kind, state.unit)[0] === "share") return [{ ...column, ...ofAll }];
    return [
      { ...column, text: (row) => this.brief(valueOf(row)) },
      { ...column, name: `${column.name} %`, part, text: (row) => share(valueOf(row), all) },
    ];
  }

  // Returns the properties of a frame that tables show.
  shown(frame) {
    const { profile } = this;
    return {
      name: profile.name(frame), module: profile.text("module", frame), family: profile.family(frame),
    };
  }

  idOf(frame) {
    const { profile } = this;
    return profile.functions[profile.functionOf[frame]].id;
  }

  // Returns the content of a function's source view: counts beside the lines of its file, or the reason
  // why there are none.
  listing(chosen, file, { self, total }, earlier) {
    const { profile, kind, state, sources, before } = this;
    const all = (this.after ?? this.counts).all;
    const name = profile.name(profile.functions[chosen].frame);
    if (!file) return { title: name, notes: [this.#noFile(chosen)], text: null, lines: new Map(), columns: [] };
    const path = profile.strings[file];
    const content = sources.get(path);
    const isShare = before || fitting(kind, state.unit)[0] === "share";
    const sides = [["Self", self], ["Total", total]].map(([side, counts]) => [side, counts, Math.max(1, ...counts.values())]);
    const cells = (line) => sides.flatMap(([, counts, most]) => {
      const value = counts.get(line);
      if (!value) return isShare ? [null] : [null, null];
      const part = { text: share(value, all), part: value / most };
      return isShare ? [part] : [{ text: brief(value, all, kind, state.unit) }, part];
    });
    const change = (line) => {
      const found = difference(earlier.total.get(line) ?? 0, before.all, total.get(line) ?? 0, all, kind);
      return { text: inWords(found), sign: found.isChance || !found.by ? "" : found.by > 0 ? "gain" : "loss" };
    };
    const numbers = new Set([...total.keys(), ...(earlier?.total.keys() ?? [])]);
    const lines = new Map([...numbers].map((line) => [line, {
      self: self.get(line) ?? 0, total: total.get(line) ?? 0,
      amounts: [...cells(line), ...(earlier ? [change(line)] : [])],
    }]));
    return {
      title: path, text: content?.text ?? null, lines,
      columns: [...sides.flatMap(([side]) => (isShare ? [`${side} %`] : [side, `${side} %`])), ...(earlier ? ["± total"] : [])],
      notes: content ? [...notesOn(content, profile, total), ...(lines.size ? [] : [`No samples of ${path} have a line.`])] : [`Loading ${path} …`],
    };
  }

  #noFile(chosen) {
    const { profile } = this;
    const { frame } = profile.functions[chosen];
    const module = profile.text("module", frame);
    const kind = KINDS[profile.frames.kind[frame]];
    const name = profile.name(frame);
    if (kind === "wait") return `No source: ${name} is a cause of waits. Choose one of its callers.`;
    if (kind === "kernel" || kind === "module" || kind === "bpf") return `No source: samples of the kernel, such as of ${name}, have no lines.`;
    return `No source: the samples of ${name} have no lines. Record with --user-symbols lines, and with debug information of ${module || "its file"}.`;
  }

  unit() {
    const { kind, state, before } = this;
    return before ? "%" : fitting(kind, state.unit)[1];
  }

  amount(value, all) {
    const { kind, state, before } = this;
    return before ? share(value, all) : format(value, all, kind, state.unit);
  }

  brief(value) {
    const { kind, state, before, counts } = this;
    return before ? share(value, counts.all) : brief(value, counts.all, kind, state.unit);
  }

  // Formats a value in the unit and as a share.
  both(value) {
    const { counts } = this;
    const [text, percent] = [this.brief(value), share(value, counts.all)];
    return text === percent ? text : `${text} · ${percent}`;
  }

  difference(tree, box) {
    const { before, after, kind } = this;
    return (box.difference ??= difference(
      tree.amount(box, before), before.all, tree.amount(box, after), after.all, kind,
    ));
  }

  look() {
    const { profile, before, state, search } = this;
    return {
      zoom: state.zoom,
      rootAtBottom: rootOf(state) === "bottom",
      colour: (box, tree) => (before ? this.difference(tree, box).colour : colourOf(profile.family(box.frame), profile.name(box.frame))),
      isHatched: (box) => box.frame >= 0 && profile.frames.reason[box.frame] > 0,
      searches: Boolean(search),
      isMatch: (box) => Boolean(search && box.frame >= 0 && search.frames[box.frame]),
      text: (box, tree) => ({
        name: profile.name(box.frame),
        amount: before ? inWords(this.difference(tree, box)) : this.both(box.value),
      }),
    };
  }

  // Describes a box in words.
  describe(tree, box) {
    const { profile, counts, before, state } = this;
    const { frame } = box;
    const parts = [profile.name(frame)];
    if (frame >= 0) {
      const [module, reason] = ["module", "reason"].map((column) => profile.text(column, frame));
      if (module) parts.push(`in ${module}`);
      if (profile.frames.inlined[frame]) parts.push("inlined");
      if (reason) parts.push(`unresolved: ${reason}`);
    }
    if (before) {
      const found = this.difference(tree, box);
      parts.push(`before ${share(found.before, 1)}, after ${share(found.after, 1)}: ${inWords(found)}`);
      if (found.by && found.isChance) parts.push("may be chance");
      return parts.join(" · ");
    }
    const value = tree.amount(box, counts);
    const text = this.amount(value, counts.all);
    const percent = share(value, counts.all);
    parts.push(text === percent ? percent : `${text}, ${percent}`);
    if (this.onCpu && value) parts.push(`${share(tree.amount(box, this.onCpu), value)} of it on CPUs`);
    const own = tree.own(box, counts);
    if (own && frame >= 0) parts.push(`${share(own, counts.all)} in itself`);
    const { graph: { zoomed } } = this;
    if (state.zoom.length && zoomed?.parent) parts.push(`${share(value, zoomed.value)} of the zoomed frame`);
    return parts.join(" · ");
  }

  // Returns the tooltip's content for a box.
  facts(tree, box) {
    const { profile, counts, before, state } = this;
    const { frame, parent } = box;
    const rows = [];
    const amount = (value) => this.amount(value, counts.all);
    if (box.more) {
      if (!before) rows.push(["Total", amount(box.value)]);
      rows.push(["Of all", share(box.value, counts.all)], ["Width", "too narrow: zoom in"]);
      return { title: `${count(box.more)} more`, rows };
    }
    if (before) {
      const found = this.difference(tree, box);
      rows.push(["Before", share(found.before, 1)], ["After", share(found.after, 1)], ["Change", inWords(found)]);
      if (found.by && found.isChance) rows.push(["", "may be chance"]);
    } else {
      rows.push(["Total", amount(box.value)]);
      if (!tree.up) rows.push(["Self", amount(tree.own(box, counts))]);
      if (this.onCpu) {
        const ran = tree.amount(box, this.onCpu);
        rows.push(["On CPUs", amount(ran)], ["Waiting", amount(box.value - ran)]);
      }
      rows.push(["Of all", share(box.value, counts.all)]);
      if (parent) rows.push([tree.up ? "Of callee" : "Of parent", share(box.value, parent.value)]);
    }
    const { graph: { zoomed } } = this;
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

  // Returns the names of a box and of the boxes towards the root of all stacks, innermost first.
  stack({ up }, box) {
    const found = [];
    for (let at = box; at; at = at.parent) if (at.frame >= 0) found.push(this.profile.name(at.frame));
    return (up ? found.reverse() : found).join("\n");
  }

  // Returns functions with their counts, as rows of texts and numbers below their headings.
  functionRows() {
    const { profile, counts, before, after, kind } = this;
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

  // Returns the tab's graph as an SVG drawing.
  svg() {
    const { shapes, ...sizes } = this.graph.drawing();
    const { counts, before } = this;
    const amount = ({ box, value }) => {
      const sum = value ?? box.value;
      const text = this.amount(sum, counts.all);
      return before ? text : `${text}, ${share(sum, counts.all)}`;
    };
    return svg(shapes.map((shape) => ({ ...shape, title: `${shape.name} · ${amount(shape)}` })), sizes);
  }
}

// Returns reasons to doubt a source file, or the reason why it cannot be shown.
function notesOn({ error, text, modified_ms: modifiedMs, host }, profile, total) {
  if (error) return [error];
  const notes = [];
  const { hosts = [], parts } = profile;
  if (modifiedMs > parts[0].start_ms) {
    const time = new Date(modifiedMs).toISOString().slice(0, 19).replace("T", " ");
    notes.push(`The file changed at ${time} UTC, after the recording began: its lines may have moved.`);
  }
  const others = hosts.filter((one) => one !== host);
  if (others.length) notes.push(`The file comes from ${host}; the profile of ${others.slice(0, 3).join(", ")} may have run a different one.`);
  const last = Math.max(0, ...total.keys());
  const lines = text.split("\n").length;
  if (last > lines) notes.push(`Samples name line ${last}, but the file has ${lines} lines: it is not the file that ran.`);
  return notes;
}
