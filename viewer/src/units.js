// Counts as texts.

const number = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });

export const share = (part, whole) => `${whole ? ((100 * part) / whole).toFixed(2) : "0.00"}%`;
export const count = (value) => number.format(value);

// Returns the nanoseconds that one count of a kind represents, 0 if the kind does not measure time.
export const nsOf = ({ unit, period_ns: period }) => (unit === "nanoseconds" ? 1 : period);

// Returns the units in which a kind's counts can be shown.
export function unitsOf(kind) {
  const counted = kind.unit === "nanoseconds" ? [] : [["count", kind.unit || "counts"]];
  const timed = nsOf(kind) ? [["time", kind.measure === "cpu" ? "ms of CPU" : "ms"]] : [];
  return [...counted, ...timed, ["share", "%"]];
}

// Returns the wanted unit if a kind has it, otherwise its first.
export function fitting(kind, unit) {
  const units = unitsOf(kind);
  return units.find(([name]) => name === unit) ?? units[0];
}

// Formats a count of a kind in a unit, without the unit's name except for time; shares are relative to
// `all`.
export function brief(value, all, kind, unit) {
  const [chosen] = fitting(kind, unit);
  if (chosen === "share") return share(value, all);
  if (chosen === "count") return number.format(value);
  const ms = (value * nsOf(kind)) / 1e6;
  return `${ms >= 100 ? number.format(Math.round(ms)) : short.format(ms)} ms`;
}

// Like brief(), with the name of the unit.
export function format(value, all, kind, unit) {
  const text = brief(value, all, kind, unit);
  if (fitting(kind, unit)[0] !== "count") return text;
  return `${text} ${value === 1 ? kind.unit.replace(/s$/, "") : kind.unit}`;
}
