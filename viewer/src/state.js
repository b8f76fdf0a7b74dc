// The state of the page, and its form in the address, so that views can be linked to.

import { isToggle, TRANSFORMS } from "./transforms.js";

export const TABS = ["flame", "callers", "table", "sandwich", "source"];

// All are texts except `zoom` (a path of tree.js), `transforms` (see transforms.js), and two ranges of
// milliseconds: `range` (the time shown) and `baseline` (the time it is compared with).
const DEFAULTS = {
  tab: "flame",
  kind: "",
  range: null,
  baseline: null,
  process: "",
  thread: "",
  cpu: "",
  tracks: "", // thread rows: "on" or "off"
  search: "",
  transforms: [],
  unit: "",
  root: "",
  chosen: "",
  sort: "own",
  zoom: [],
};

// Returns whether the tab is a single graph.
export const isGraph = ({ tab }) => tab === "flame" || tab === "callers";

// Returns the position of the graph's root.
export const rootOf = ({ root, tab }) => root || (tab === "callers" ? "top" : "bottom");

const isRange = (name) => name === "range" || name === "baseline";

function asText(name, value) {
  if (name === "zoom") return value.join(".");
  if (name === "transforms") return value.map((one) => one.join("-")).join(".");
  return isRange(name) ? value?.map((ms) => Math.round(ms)).join("-") ?? "" : value;
}

function asValue(name, text) {
  if (name === "zoom") return text ? text.split(".") : [];
  if (name === "transforms") {
    return text.split(".").map((one) => one.split("-")).filter(([of, id]) =>
      TRANSFORMS.includes(of) && isToggle(of) !== Boolean(id));
  }
  if (!isRange(name)) return text;
  const range = text.split("-").map(Number);
  return range.length === 2 && range[0] < range[1] ? range : null;
}

export function read(address) {
  const given = new URLSearchParams(address.replace(/^#/, ""));
  const found = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given.has(name)) found[name] = asValue(name, given.get(name));
  if (!TABS.includes(found.tab)) found.tab = DEFAULTS.tab;
  return found;
}

// Returns the part of the address after "#": only values that differ from the defaults.
export function write(state) {
  const given = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    const text = asText(name, state[name]);
    if (text !== asText(name, DEFAULTS[name])) given.set(name, text);
  }
  return given.toString();
}
