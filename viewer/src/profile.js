// The recorded data: columns of numbers, which refer to each other and to one list of strings.
//
//   kinds                 name, unit (of counts), period_ns (time of one count, 0 if none), measure;
//                         longest_ns, the longest period, if counts are times because periods differ
//   start_ms, bin_ms      Unix time of the first bin, and the width of each
//   bins                  number of bins; parts, if there are several: name, start_ms, bins
//   strings               each distinct text once
//   frames                name, module, reason, file (indices of strings), kind (index of KINDS),
//                         inlined, line (0 if unknown)
//   nodes                 the tree of all stacks: parent (a lower index, -1 at a root) and frame
//   processes             name, pid
//   threads               name, tid, process
//   samples               node (of the leaf), thread, cpu, kind, bin, count: equal samples are one
//                         entry; in the order of their bins

import { hash } from "./hash.js";
import { addWall, weightsOf } from "./kinds.js";
import { transformed } from "./transforms.js";

export const KINDS = ["process", "kernel", "module", "bpf", "user", "python", "wait"];

const ARRAYS = { B: Uint8Array, H: Uint16Array, I: Uint32Array, i: Int32Array, d: Float64Array };

function bytes(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

// Decodes columns of numbers from "TYPE:BASE64".
function unpack(columns) {
  const read = (text) => new ARRAYS[text[0]](bytes(text.slice(2)).buffer);
  return Object.fromEntries(Object.entries(columns).map(([name, text]) => [name, read(text)]));
}

// Decodes the recorded data, and adds values that are the same in every view of it.
export function read(data) {
  const found = { ...data, nodes: unpack(data.nodes), samples: unpack(data.samples) };
  found.parts ??= [{ name: "", start_ms: data.start_ms, bins: data.bins }];
  found.cpus = [...new Set(found.samples.cpu)].sort((a, b) => a - b);
  found.kinds = addWall(found.kinds);
  nameFrames(found);
  findBins(found);
  return found;
}

// Adds for each frame: a hash of its visible properties, the same in every profile; the first frame that
// looks the same except for its line (`looks`); and its function.
function nameFrames(found) {
  const { strings, frames: { name, module, kind, reason, inlined } } = found;
  const [functions, shapes] = [new Map(), new Map()];
  found.hashes = new Uint32Array(name.length);
  found.looks = new Uint32Array(name.length);
  found.functionOf = new Uint32Array(name.length);
  for (let frame = 0; frame < name.length; frame += 1) {
    const shown = `${strings[name[frame]]}\t${strings[module[frame]]}\t${kind[frame]}`;
    const shape = `${shown}\t${strings[reason[frame]]}\t${inlined[frame]}`;
    found.hashes[frame] = hash(shape);
    if (!shapes.has(shape)) shapes.set(shape, frame);
    found.looks[frame] = shapes.get(shape);
    if (!functions.has(shown)) functions.set(shown, functions.size);
    found.functionOf[frame] = functions.get(shown);
  }
  found.functions = [...functions.keys()].map((shown) => ({ id: hash(shown).toString(36) }));
  found.functionOf.forEach((at, frame) => (found.functions[at].frame ??= frame));
}

// Returns the index of the first sample in each bin, and of the end.
function findBins(found) {
  const { bins, samples: { bin } } = found;
  found.binStart = new Uint32Array(bins + 1);
  for (const at of bin) found.binStart[at + 1] += 1;
  for (let at = 0; at < bins; at += 1) found.binStart[at + 1] += found.binStart[at];
}

// Returns each node's own count, and its total with all nodes below it; parents come before their
// children.
export function sumUp(parent, own) {
  const total = own.slice();
  let all = 0;
  for (let at = own.length - 1; at >= 0; at -= 1) {
    if (parent[at] >= 0) total[parent[at]] += total[at];
    else all += total[at];
  }
  return { own, total, all };
}

export class Profile {
  #outermost = null;
  #lines = null;

  // `recorded`: the result of read(); `transforms`: see transforms.js.
  constructor(recorded, transforms = []) {
    Object.assign(this, recorded);
    this.recorded = recorded;
    const { parent, frame, nodeOf } = transformed(recorded, transforms);
    this.nodes = { parent, frame };
    this.nodeOf = nodeOf;
    this.size = parent.length;
    this.#sortChildren();
  }

  // Sorts the children of each node by name.
  #sortChildren() {
    const { parent, frame } = this.nodes;
    const { strings, frames } = this;
    const ranks = new Uint32Array(frames.name.length);
    [...ranks.keys()]
      .sort((a, b) => {
        const [one, other] = [strings[frames.name[a]], strings[frames.name[b]]];
        return one < other ? -1 : Number(one > other);
      })
      .forEach((at, rank) => (ranks[at] = rank));
    const byName = bucket(ranks.length, this.size, (node) => ranks[frame[node]]).order;
    const { first, order } = bucket(this.size + 1, this.size, (at) => parent[byName[at]] + 1);
    this.first = first;
    this.order = order.map((at) => byName[at]);
  }

  // Returns the children of a node (-1: the roots).
  children(node) {
    return this.order.subarray(this.first[node + 1], this.first[node + 2]);
  }

  text(column, frame) {
    return this.strings[this.frames[column][frame]];
  }

  // Returns the name of a frame (-1: the root of all).
  name(frame) {
    return frame < 0 ? "all" : this.text("name", frame);
  }

  // Returns file and lines of the frames that look like a frame: their line, or the first and last of
  // them.
  place(frame) {
    if (!this.#lines) {
      this.#lines = new Map();
      this.frames.line.forEach((line, at) => {
        if (!line) return;
        const seen = this.#lines.get(this.looks[at]);
        if (!seen) this.#lines.set(this.looks[at], [line, line]);
        else seen.splice(0, 2, Math.min(seen[0], line), Math.max(seen[1], line));
      });
    }
    const [first, last] = this.#lines.get(this.looks[frame]) ?? [];
    const lines = first && (first === last ? `:${first}` : `:${first}–${last}`);
    return this.text("file", frame) && `${this.text("file", frame)}${lines ?? ""}`;
  }

  // Returns what determines a frame's colour: its kind, and for user code its binary.
  family(frame) {
    const kind = frame < 0 ? "process" : KINDS[this.frames.kind[frame]];
    return { kind, binary: kind === "user" ? this.text("module", frame) : "" };
  }

  // Returns the user binaries, in descending order of drawn area.
  binaries({ total }) {
    const areas = new Float64Array(this.frames.name.length);
    for (let node = 0; node < this.size; node += 1) areas[this.nodes.frame[node]] += total[node];
    const found = new Map();
    areas.forEach((area, frame) => {
      const { binary } = area ? this.family(frame) : {};
      if (binary) found.set(binary, (found.get(binary) ?? 0) + area);
    });
    return [...found].sort((a, b) => b[1] - a[1]).map(([binary]) => binary);
  }

  // Returns the index of the kind with a name, or of the kind to show first: in a comparison a kind
  // without parts, because only counts of samples have a known error.
  kindAt(name) {
    const { kinds, parts: intervals } = this;
    const at = kinds.findIndex((kind) => kind.name === name);
    if (at < 0 && intervals.length > 1) return 0;
    return at >= 0 ? at : Math.max(0, kinds.findIndex(({ parts }) => parts));
  }

  // Calls `visit` with the index, node and value of each sample that passes a filter and that no transform
  // drops, in time order.
  //
  // The filter has kind (an index), only (the index of a part, to count only that part), cpu (a number or
  // null) and threads (1 for each thread that passes); the range is half-open, in bins.
  each({ kind, cpu, threads, only }, [from, to], visit) {
    const { nodeOf, samples: { node, thread, cpu: cpus, kind: kinds, count } } = this;
    const weights = weightsOf(this.kinds, kind, only);
    const end = this.binStart[to];
    for (let i = this.binStart[from]; i < end; i += 1) {
      const weight = weights[kinds[i]];
      if (!weight || !threads[thread[i]] || (cpu !== null && cpus[i] !== cpu)) continue;
      if (nodeOf[node[i]] >= 0) visit(i, nodeOf[node[i]], count[i] * weight);
    }
  }

  // Returns each node's own count and total for samples that pass the filter.
  count(filter, range = [0, this.bins]) {
    const own = new Float64Array(this.size);
    this.each(filter, range, (_, node, value) => (own[node] += value));
    return this.sum(own);
  }

  sum(own) {
    return sumUp(this.nodes.parent, own);
  }

  // Returns counts by CPU (a row for each of `cpus`) and bin.
  grid(filter) {
    const found = new Float64Array(this.cpus.length * this.bins);
    const { cpu, bin } = this.samples;
    const rows = [];
    this.cpus.forEach((number, row) => (rows[number] = row * this.bins));
    this.each(filter, [0, this.bins], (i, _, value) => (found[rows[cpu[i]] + bin[i]] += value));
    return found;
  }

  // 1 for each node without a caller of the same function, so that recursion counts once.
  get outermost() {
    if (this.#outermost) return this.#outermost;
    const { parent, frame } = this.nodes;
    const found = new Uint8Array(this.size);
    for (let node = 0; node < this.size; node += 1) {
      const of = this.functionOf[frame[node]];
      let at = parent[node];
      while (at >= 0 && this.functionOf[frame[at]] !== of) at = parent[at];
      found[node] = at < 0 ? 1 : 0;
    }
    return (this.#outermost = found);
  }

  // Returns each function's own count, and the count of all stacks that contain it.
  functionCounts({ own, total }) {
    const { frame } = this.nodes;
    const found = {
      own: new Float64Array(this.functions.length),
      total: new Float64Array(this.functions.length),
    };
    const { outermost, functionOf } = this;
    for (let node = 0; node < this.size; node += 1) {
      const at = functionOf[frame[node]];
      found.own[at] += own[node];
      if (outermost[node]) found.total[at] += total[node];
    }
    return found;
  }

  // Returns the outermost nodes of a function.
  nodesOf(chosen) {
    const { outermost, functionOf, nodes: { frame } } = this;
    const found = [];
    for (let node = 0; node < this.size; node += 1) {
      if (functionOf[frame[node]] === chosen && outermost[node]) found.push(node);
    }
    return found;
  }

  // Returns counts of the nodes marked with 1.
  only(marks, { own }) {
    const found = own.slice();
    for (let node = 0; node < this.size; node += 1) if (!marks[node]) found[node] = 0;
    return this.sum(found);
  }

  // Returns which frames match a pattern by function or module, and which nodes are in or below a match.
  search(pattern) {
    const { name, module } = this.frames;
    const matched = this.strings.map((text) => pattern.test(text));
    const frames = Uint8Array.from(name, (text, at) => matched[text] || matched[module[at]]);
    const inside = new Uint8Array(this.size);
    const { parent, frame } = this.nodes;
    for (let node = 0; node < this.size; node += 1) {
      inside[node] = frames[frame[node]] | (parent[node] >= 0 ? inside[parent[node]] : 0);
    }
    return { frames, inside };
  }
}

// Returns the numbers below `size`, sorted by their keys (below `keys`), and the start of each key.
function bucket(keys, size, keyOf) {
  const first = new Uint32Array(keys + 1);
  for (let at = 0; at < size; at += 1) first[keyOf(at) + 1] += 1;
  for (let key = 0; key < keys; key += 1) first[key + 1] += first[key];
  const next = first.slice();
  const order = new Uint32Array(size);
  for (let at = 0; at < size; at += 1) order[next[keyOf(at)]++] = at;
  return { first, order };
}

// Returns a case-insensitive regular expression for a search; invalid expressions match as plain text.
export function pattern(text) {
  try {
    return new RegExp(text, "i");
  } catch {
    return new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
  }
}
