// Kinds of samples. Where CPU time and waits were recorded, both together are a kind: the wall-clock
// time of threads.

import { nsOf } from "./units.js";

// The kinds, and wall-clock time as one more with `parts`: the indices of CPU time and waits. Of
// several kinds with a measure, it is that of our sampler: the sum of all would count time twice.
export function addWall(kinds) {
  const parts = [["cpu", "on_cpu"], ["off_cpu", "off_cpu"]].map(([measure, usual]) => {
    const fit = [...kinds.keys()].filter((at) => kinds[at].measure === measure && nsOf(kinds[at]));
    return fit.length === 1 ? fit[0] : fit.find((at) => kinds[at].name === usual) ?? -1;
  });
  if (parts.includes(-1) || kinds.some(({ name }) => name === "wall")) return kinds;
  return [...kinds, { name: "wall", unit: "nanoseconds", period_ns: 0, measure: "wall", parts }];
}

// What a count of each kind is worth in a kind (an index); 0 if it is no part of that, or not the
// only part that is wanted.
export function weightsOf(kinds, kind, only = null) {
  const { parts } = kinds[kind] ?? {};
  if (!parts) return kinds.map((_, at) => Number(at === kind));
  return kinds.map((one, at) => (parts.includes(at) && (only ?? at) === at ? nsOf(one) : 0));
}
