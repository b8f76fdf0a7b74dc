// Differences between two shares.

const SURE = 2; // standard deviations; larger differences are not due to chance
const LEAST = 0.0005; // part of all, for kinds whose values vary from sample to sample

// Returns how a share changed: the difference in `by`, as a part of 1, and its colour.
export function difference(one, ones, other, others, kind) {
  const before = ones ? one / ones : 0;
  const after = others ? other / others : 0;
  const by = after - before;
  const variance = (part, all) => (all ? (part * (1 - part) + 1 / all) / all : 0);
  const size = kind.unit === "samples" ? 1 : kind.longest_ns;
  const margin = size
    ? SURE * Math.sqrt(variance(before, ones / size) + variance(after, others / size))
    : LEAST;
  const isChance = Math.abs(by) <= margin;
  const strength = Math.min(3, Math.ceil((3 * Math.abs(by)) / Math.max(before, after)));
  const colour = isChance ? "same" : `${by > 0 ? "gain" : "loss"}-${strength}`;
  return { before, after, by, isChance, colour: `var(--${colour})` };
}

// Formats a change in percentage points.
export function inWords({ by }) {
  const points = (100 * by).toFixed(2);
  return `${by > 0 ? "+" : ""}${points === "-0.00" ? "0.00" : points}`;
}
