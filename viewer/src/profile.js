// The recorded data: columns of numbers that point into each other and into one list of strings.
//
//   kinds                 name, unit (of counts), period_ns (time of one, 0 if it has none), measure
//   start_ms, bin_ms      Unix time of the first bin, and the width of all
//   bins                  their number; parts, if there are several: name, start_ms, bins
//   strings               every text once
//   frames                name, module, reason (indices of strings), kind (index of KINDS), inlined
//   nodes                 the tree of all stacks: parent (a lower index, -1 at a root) and frame
//   processes             name, pid
//   threads               name, tid, process
//   samples               node (of the leaf), thread, cpu, kind, bin, count: equal samples are one
//                         entry; in the order of their bins

export const KINDS = ["process", "kernel", "module", "bpf", "user", "python"];

const ARRAYS = { B: Uint8Array, H: Uint16Array, I: Uint32Array, i: Int32Array, d: Float64Array };

function bytes(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}

// Columns of numbers from "TYPE:BASE64".
function unpack(columns) {
  const read = (text) => new ARRAYS[text[0]](bytes(text.slice(2)).buffer);
  return Object.fromEntries(Object.entries(columns).map(([name, text]) => [name, read(text)]));
}

export class Profile {
  constructor(data) {
    Object.assign(this, data, { nodes: unpack(data.nodes), samples: unpack(data.samples) });
    this.size = data.nodes.parent.length;
    this.#indexChildren();
  }

  #indexChildren() {
    const { parent } = this.nodes;
    this.first = new Int32Array(this.size + 2);
    for (const node of parent) this.first[node + 2] += 1;
    for (let i = 1; i < this.first.length; i += 1) this.first[i] += this.first[i - 1];
    const next = this.first.slice();
    this.order = new Int32Array(this.size);
    for (let node = 0; node < this.size; node += 1) {
      this.order[next[parent[node] + 1]++] = node;
    }
  }

  // Children of a node (-1: the roots).
  children(node) {
    return this.order.subarray(this.first[node + 1], this.first[node + 2]);
  }

  text(column, node) {
    return this.strings[this.frames[column][this.nodes.frame[node]]];
  }

  name(node) {
    return node < 0 ? "all" : this.text("name", node);
  }

  kind(node) {
    return node < 0 ? "process" : KINDS[this.frames.kind[this.nodes.frame[node]]];
  }

  // What a node's colour stands for: its kind, and in user code its binary.
  family(node) {
    const kind = this.kind(node);
    return { kind, binary: kind === "user" ? this.text("module", node) : "" };
  }

  // User binaries, those that take up the largest area first.
  binaries({ total }) {
    const found = new Map();
    for (let node = 0; node < this.size; node += 1) {
      const { binary } = total[node] ? this.family(node) : {};
      if (binary) found.set(binary, (found.get(binary) ?? 0) + total[node]);
    }
    return [...found].sort((a, b) => b[1] - a[1]).map(([binary]) => binary);
  }

  get unit() {
    return this.kinds[0]?.unit ?? "samples";
  }

  // Nodes from the outermost to this one, without -1.
  path(node) {
    const found = [];
    for (let at = node; at >= 0; at = this.nodes.parent[at]) found.unshift(at);
    return found;
  }

  // Samples in each node itself, and in it and all below it, of what passes the filter.
  count({ kind = 0, process = null, pid = null, thread = null, cpu = null } = {}) {
    const own = new Float64Array(this.size);
    const { node, thread: threads, cpu: cpus, kind: kinds, count } = this.samples;
    for (let i = 0; i < count.length; i += 1) {
      const owner = this.threads.process[threads[i]];
      if (
        kinds[i] === kind &&
        (cpu === null || cpus[i] === cpu) &&
        (thread === null || threads[i] === thread) &&
        (pid === null || owner === pid) &&
        (process === null || this.processes.name[owner] === process)
      ) {
        own[node[i]] += count[i];
      }
    }
    const total = own.slice();
    let all = 0;
    for (let at = this.size - 1; at >= 0; at -= 1) {
      const parent = this.nodes.parent[at];
      if (parent >= 0) total[parent] += total[at];
      else all += total[at];
    }
    return { own, total, all };
  }

  // Nodes whose function or module matches, and how many samples have such a node in their stack.
  search(pattern, own) {
    const hits = this.frames.name.map(
      (name, i) =>
        pattern.test(this.strings[name]) || pattern.test(this.strings[this.frames.module[i]]),
    );
    const inside = new Uint8Array(this.size);
    let sum = 0;
    for (let node = 0; node < this.size; node += 1) {
      const parent = this.nodes.parent[node];
      inside[node] = hits[this.nodes.frame[node]] || (parent >= 0 && inside[parent]) ? 1 : 0;
      if (inside[node]) sum += own[node];
    }
    return { matches: (node) => node >= 0 && hits[this.nodes.frame[node]], sum };
  }

  // What is drawn: the zoomed node below its ancestors, without whatever has fewer samples
  // than `least`. The ancestors are as wide as the node, and `fade`d.
  tree({ total, all }, zoomed, least) {
    const value = (node) => (node < 0 ? all : total[node]);
    const grow = (node) => ({
      node,
      name: this.name(node),
      value: value(node),
      children: [...this.children(node)]
        .filter((child) => total[child] >= least && total[child] > 0)
        .map(grow)
        .sort((a, b) => (a.name < b.name ? -1 : 1)),
    });
    const outer = zoomed < 0 ? [] : [-1, ...this.path(zoomed).slice(0, -1)];
    return outer.reduceRight(
      (inner, node) => ({
        node, name: this.name(node), value: value(node), fade: true, children: [inner],
      }),
      grow(zoomed),
    );
  }
}

// A regular expression, or the text itself where it is none; ignores case.
export function pattern(text) {
  try {
    return new RegExp(text, "i");
  } catch {
    return new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
  }
}
