// Differences between two shares.

const SURE = 2; // standard deviations from which a difference is none of chance
const LEAST = 0.0005; // of all, for kinds that are no counts of samples

// How the share of something changed: `by` of 1, and the colour of that.
export function difference(one, ones, other, others, kind) {
  const before = ones ? one / ones : 0;
  const after = others ? other / others : 0;
  const by = after - before;
  const variance = (part, all) => (all ? (part * (1 - part) + 1 / all) / all : 0);
  const margin = kind.unit === "samples"
    ? SURE * Math.sqrt(variance(before, ones) + variance(after, others))
    : LEAST;
  const isChance = Math.abs(by) <= margin;
  const strength = Math.min(3, Math.ceil((3 * Math.abs(by)) / Math.max(before, after)));
  const colour = isChance ? "same" : `${by > 0 ? "gain" : "loss"}-${strength}`;
  return { before, after, by, isChance, colour: `var(--${colour})` };
}

// A change in points of a percent.
export function inWords({ by }) {
  const points = (100 * by).toFixed(2);
  return `${by > 0 ? "+" : ""}${points === "-0.00" ? "0.00" : points}`;
}
