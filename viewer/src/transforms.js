// Rewrites the tree of all stacks: what the graphs, tables and counts are made of.

// The tree with the same stacks where frames that look the same are one: those that differ by line.
// `nodeOf` leads from each node of the recorded tree to the one that stands for it.
export function merged({ nodes: { parent, frame }, looks }) {
  const nodeOf = Int32Array.from(parent, (_, node) => node);
  if (looks.every((look, at) => look === at)) return { parent, frame, nodeOf };
  const [parents, frames, known] = [[], [], new Map()];
  frame.forEach((recorded, node) => {
    const up = parent[node] < 0 ? -1 : nodeOf[parent[node]];
    const key = (up + 1) * looks.length + looks[recorded];
    if (!known.has(key)) {
      known.set(key, parents.length);
      parents.push(up);
      frames.push(looks[recorded]);
    }
    nodeOf[node] = known.get(key);
  });
  return { parent: Int32Array.from(parents), frame: Uint32Array.from(frames), nodeOf };
}
