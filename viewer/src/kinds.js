// Kinds of samples. If both CPU time and waits were recorded, their sum is a further kind: the wall-clock
// time of threads.

import { nsOf } from "./units.js";

// Returns the kinds, with wall-clock time added, whose `parts` are the indices of CPU time and waits. If
// several kinds have the same measure, our sampler's kind is used: the sum of all would count time twice.
export function addWall(kinds) {
  const parts = [["cpu", "on_cpu"], ["off_cpu", "off_cpu"]].map(([measure, usual]) => {
    const fit = [...kinds.keys()].filter((at) => kinds[at].measure === measure && nsOf(kinds[at]));
    return fit.length === 1 ? fit[0] : fit.find((at) => kinds[at].name === usual) ?? -1;
  });
  if (parts.includes(-1) || kinds.some(({ name }) => name === "wall")) return kinds;
  return [...kinds, { name: "wall", unit: "nanoseconds", period_ns: 0, measure: "wall", parts }];
}

// Returns the value of each kind's count in a kind (an index); 0 if it is not a part of that kind, or if
// `only` selects a different part.
export function weightsOf(kinds, kind, only = null) {
  const { parts } = kinds[kind] ?? {};
  if (!parts) return kinds.map((_, at) => Number(at === kind));
  return kinds.map((one, at) => (parts.includes(at) && (only ?? at) === at ? nsOf(one) : 0));
}
