// Counts for the lines of source files.

import { KINDS, sumUp } from "./profile.js";

const PYTHON = KINDS.indexOf("python");

// Counts the nodes of the recorded tree, for samples that pass a filter and that no transform drops.
export function countRecorded(profile, filter, range) {
  const { parent } = profile.recorded.nodes;
  const own = new Float64Array(parent.length);
  const { node } = profile.samples;
  profile.each(filter, range, (i, _, value) => (own[node[i]] += value));
  return sumUp(parent, own);
}

// Returns `self` and `total` of each line of a file (maps), and their maxima. A line's total counts a
// stack once, even if the line occurs in it several times. The self value of a Python line includes the
// native and kernel code that it runs, because stacks with such code never end in the Python line.
export function linesOf(profile, { own, total: sums }, file) {
  const { nodes: { parent, frame }, frames, looks } = profile.recorded;
  const { nodeOf, nodes: { frame: shown } } = profile;
  const [self, total] = [new Map(), new Map()];
  const isOf = (node) => frames.file[frame[node]] === file && frames.line[frame[node]] > 0;
  const add = (map, node, value) => {
    const line = frames.line[frame[node]];
    if (value) map.set(line, (map.get(line) ?? 0) + value);
  };
  for (let node = own.length - 1; node >= 0; node -= 1) {
    if (!own[node]) continue;
    let at = node; // samples merged into a caller count there
    while (parent[at] >= 0 && looks[frame[at]] !== shown[nodeOf[node]]) at = parent[at];
    if (isOf(at) && frames.kind[frame[at]] !== PYTHON) add(self, at, own[node]);
    while (at >= 0 && frames.kind[frame[at]] !== PYTHON) at = parent[at];
    if (at >= 0 && isOf(at)) add(self, at, own[node]);
  }
  for (let node = 0; node < own.length; node += 1) {
    if (!isOf(node)) continue;
    const line = frames.line[frame[node]];
    let at = parent[node];
    while (at >= 0 && !(isOf(at) && frames.line[frame[at]] === line)) at = parent[at];
    if (at < 0) add(total, node, sums[node]);
  }
  return { self, total };
}

// Returns a function's source file (an index of strings, 0 for none), the one with the most samples if
// there are several; `lines` are the lines of the function's frames in it.
export function fileOf(profile, { total: sums }, chosen) {
  const { nodes: { frame }, frames, functionOf } = profile.recorded;
  const amounts = new Map();
  for (let node = sums.length - 1; node >= 0; node -= 1) {
    const file = frames.file[frame[node]];
    if (functionOf[frame[node]] === chosen && file) amounts.set(file, (amounts.get(file) ?? 0) + sums[node]);
  }
  const [[file] = [0]] = [...amounts].sort((a, b) => b[1] - a[1]);
  const lines = new Set();
  functionOf.forEach((of, at) => of === chosen && frames.file[at] === file && frames.line[at] && lines.add(frames.line[at]));
  return { file, lines };
}

// Returns the line with the highest self count, or the highest total if no line has a self count; `of`
// limits the lines.
export function hottest({ self, total }, of = null) {
  for (const counts of [self, total]) {
    const found = [...counts].filter(([line]) => of?.has(line) ?? true).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    if (found.length) return found[0][0];
  }
  return 0;
}
