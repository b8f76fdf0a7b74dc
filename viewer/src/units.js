// Counts as texts.

const number = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });

export const share = (part, whole) => `${whole ? ((100 * part) / whole).toFixed(2) : "0.00"}%`;
export const count = (value) => number.format(value);

// Nanoseconds that a count of a kind stands for, 0 if it is no time.
export const nsOf = ({ unit, period_ns: period }) => (unit === "nanoseconds" ? 1 : period);

// The units that counts of a kind can be shown in.
export function unitsOf(kind) {
  const counted = kind.unit === "nanoseconds" ? [] : [["count", kind.unit || "counts"]];
  const timed = nsOf(kind) ? [["time", kind.measure === "cpu" ? "ms of CPU" : "ms"]] : [];
  return [...counted, ...timed, ["share", "%"]];
}

// A unit of a kind: the wanted one, or the first that fits.
export function fitting(kind, unit) {
  const units = unitsOf(kind);
  return units.find(([name]) => name === unit) ?? units[0];
}

// A count of a kind in a unit, without its name but for time; `all` is what shares are of.
export function brief(value, all, kind, unit) {
  const [chosen] = fitting(kind, unit);
  if (chosen === "share") return share(value, all);
  if (chosen === "count") return number.format(value);
  const ms = (value * nsOf(kind)) / 1e6;
  return `${ms >= 100 ? number.format(Math.round(ms)) : short.format(ms)} ms`;
}

// Likewise, with the name of the unit.
export function format(value, all, kind, unit) {
  const text = brief(value, all, kind, unit);
  if (fitting(kind, unit)[0] !== "count") return text;
  return `${text} ${value === 1 ? kind.unit.replace(/s$/, "") : kind.unit}`;
}
