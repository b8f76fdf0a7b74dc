// Rewrites the tree of all stacks: what the graphs, tables and counts are made of.
//
// A tree has parent (a lower index, -1 at a root) and frame of each node; `nodeOf` leads from each
// node of the recorded tree to the one that stands for it, or to NOWHERE.

export const NOWHERE = -1;

// The tree with the same stacks where frames that look the same are one: those that differ by line.
export function merged({ nodes, looks }) {
  const all = { parent: nodes.parent, frame: nodes.frame, nodeOf: Int32Array.from(nodes.parent, (_, at) => at) };
  if (looks.every((look, frame) => look === frame)) return all;
  return rebuilt(all, (node, up, add) => add(up, looks[all.frame[node]]));
}

// A tree whose nodes are placed anew, from the roots: `place` returns the node that stands for one,
// of its number, the node that stands for its parent (NOWHERE for none), and add(parent, frame).
export function rebuilt({ parent, frame, nodeOf }, place) {
  const size = parent.length;
  const [parents, frames] = [new Int32Array(size), new Uint32Array(size)];
  const most = frame.reduce((a, b) => Math.max(a, b), 0) + 1;
  const known = new Map();
  let made = 0;
  const add = (up, of) => {
    const key = (up + 1) * most + of;
    const there = known.get(key);
    if (there !== undefined) return there;
    known.set(key, made);
    [parents[made], frames[made]] = [up, of];
    return made++;
  };
  const to = new Int32Array(size);
  for (let node = 0; node < size; node += 1) {
    to[node] = place(node, parent[node] < 0 ? NOWHERE : to[parent[node]], add, parents, frames);
  }
  return {
    parent: parents.slice(0, made),
    frame: frames.slice(0, made),
    nodeOf: nodeOf.map((node) => (node < 0 ? NOWHERE : to[node])),
  };
}
