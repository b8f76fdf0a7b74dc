// Trees of boxes, created on demand.
//
// A box represents all nodes of the profile at its place in the tree. Towards callees, the children of a
// box are the callees of its nodes; towards callers, their callers. The amount of a box is counted from
// its origins: the nodes where the walk began, or, towards callees, its nodes themselves.

export class Tree {
  // All stacks, from their first function.
  static callees(profile, counts) {
    return new Tree(profile, counts, null, { weight: "total" });
  }

  // All stacks, from their leaf.
  static callers(profile, counts) {
    const leaves = [];
    for (let node = 0; node < profile.size; node += 1) if (counts.own[node] > 0) leaves.push(node);
    return new Tree(profile, counts, leaves, { weight: "own", up: true });
  }

  // The stacks that contain a function, from that function on.
  static around(profile, counts, chosen, up) {
    const nodes = profile.nodesOf(chosen).filter((node) => counts.total[node] > 0);
    return new Tree(profile, counts, nodes, { weight: "total", up, of: profile.functions[chosen].frame });
  }

  constructor(profile, counts, nodes, { weight, up = false, of = -1 }) {
    Object.assign(this, { profile, counts, weight, up });
    this.slots = new Int32Array(profile.frames.name.length).fill(-1);
    this.root = { frame: of, parent: null, nodes, origins: nodes, value: counts.all, children: null };
    this.startsAtFrames = up && of < 0;
    if (nodes && !this.startsAtFrames) this.root.value = this.amount(this.root, counts);
  }

  // Returns the amount of a box in given counts of the same profile.
  amount(box, counts) {
    if (!box.origins) return counts.all;
    const column = counts[this.weight];
    let sum = 0;
    for (const node of box.origins) sum += column[node];
    return sum;
  }

  // Returns the self amount of the functions of a box.
  own(box, { own }) {
    if (this.up || !box.nodes) return 0;
    return box.nodes.reduce((sum, node) => sum + own[node], 0);
  }

  // Returns the children with counts, in descending order of counts or by name.
  children(box) {
    return (box.children ??= this.up || (box.nodes && box.nodes.length > 1) ? this.#merge(box) : this.#plain(box));
  }

  #plain(box) {
    const { profile, counts: { total } } = this;
    const found = [];
    for (const node of profile.children(box.nodes ? box.nodes[0] : -1)) {
      if (total[node] <= 0) continue;
      const nodes = [node];
      const frame = profile.nodes.frame[node];
      found.push({ frame, parent: box, nodes, origins: nodes, value: total[node], children: null });
    }
    return found;
  }

  #merge(box) {
    const { slots, profile, counts } = this;
    const { parent, frame } = profile.nodes;
    const weights = counts[this.weight];
    const found = [];
    const add = (node, origin) => {
      const of = frame[node];
      if (slots[of] < 0) {
        slots[of] = found.length;
        found.push({ frame: of, parent: box, nodes: [], origins: [], value: 0, children: null });
      }
      const child = found[slots[of]];
      child.nodes.push(node);
      child.origins.push(origin);
      child.value += weights[origin];
    };
    box.nodes.forEach((node, at) => {
      if (!this.up) {
        for (const child of profile.children(node)) if (weights[child] > 0) add(child, child);
      } else if (this.startsAtFrames && box === this.root) add(node, node);
      else if (parent[node] >= 0) add(parent[node], box.origins[at]);
    });
    for (const { frame: of } of found) slots[of] = -1;
    return found.sort((a, b) => b.value - a.value || a.frame - b.frame);
  }

  // Returns the hashes of the frames from below the root to a box; they are the same in every profile.
  path(box) {
    const found = [];
    for (let at = box; at.parent; at = at.parent) found.unshift(this.profile.hashes[at.frame].toString(36));
    return found;
  }

  // Returns the box with a path, null if there is none.
  find(path) {
    return path.reduce(
      (box, step) =>
        box && this.children(box).find((child) => this.profile.hashes[child.frame].toString(36) === step),
      this.root,
    ) ?? null;
  }

  // Returns rows of the boxes that are at least `least` wide, below a zoomed box, which fills the width
  // like all boxes above it. Adjacent narrower boxes are merged into one place with their number (`more`),
  // value and caller (`box`).
  layout(zoomed, width, least) {
    const rows = [];
    const outer = [];
    for (let at = zoomed.parent; at; at = at.parent) outer.unshift(at);
    outer.forEach((box) => rows.push([{ box, x: 0, width, isOuter: true }]));
    const scale = width / zoomed.value;
    const place = (box, x, row) => {
      (rows[row] ??= []).push({ box, x, width: box.value * scale, isOuter: false });
      let at = x;
      let rest = { more: 0, value: 0 };
      const placeRest = () => {
        const wide = rest.value * scale;
        if (wide >= least) (rows[row + 1] ??= []).push({ box, x: at - wide, width: wide, isOuter: false, ...rest });
        rest = { more: 0, value: 0 };
      };
      for (const child of this.children(box)) {
        const wide = child.value * scale;
        if (wide >= least) {
          placeRest();
          place(child, at, row + 1);
        } else rest = { more: rest.more + 1, value: rest.value + child.value };
        at += wide;
      }
      placeRest();
    };
    place(zoomed, 0, outer.length);
    return rows;
  }
}
