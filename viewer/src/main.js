import flamegraph from "d3-flame-graph";
import { select } from "d3-selection";
import { colourOf, reserve } from "./colours.js";
import { filters } from "./filters.js";
import { fetchProfile } from "./source.js";
import { pattern, Profile } from "./profile.js";

const ROW = 18; // pixels
const LEAST_WIDTH = 0.6; // pixels; narrower frames are not drawn until they are zoomed into
const LISTED = 8; // binaries in the legend

const element = (id) => document.getElementById(id);
const chartBox = element("chart");
let profile;
let state;
const number = new Intl.NumberFormat("en-US");
const share = (part, whole) => `${whole ? ((100 * part) / whole).toFixed(2) : "0.00"}%`;

// The pattern of frames without a name, made when the first one of its family is drawn.
const hatches = new Map();
function hatch(family) {
  const key = `${family.kind} ${family.binary}`;
  if (!hatches.has(key)) {
    const id = family.binary ? `hatch-${family.kind}-${hatches.size}` : `hatch-${family.kind}`;
    const made = select("#hatches")
      .append("pattern")
      .attr("id", id)
      .attr("width", 6)
      .attr("height", 6)
      .attr("patternUnits", "userSpaceOnUse")
      .attr("patternTransform", "rotate(45)");
    made.append("rect").attr("width", 6).attr("height", 6).style("fill", colourOf(family));
    made.append("rect").attr("width", 2).attr("height", 6).style("fill", "var(--hatch)");
    hatches.set(key, id);
  }
  return `url(#${hatches.get(key)})`;
}

function colour(node) {
  if (state.search?.matches(node)) return "var(--match)";
  const family = profile.family(node);
  if (node >= 0 && profile.text("reason", node)) return hatch(family);
  return colourOf(family, profile.name(node));
}

function listBinaries() {
  const found = profile.binaries(state.counts);
  const items = found.slice(0, LISTED).map((binary) => {
    const item = document.createElement("li");
    item.className = "binary";
    item.textContent = binary;
    item.style.setProperty("--swatch", colourOf({ kind: "user", binary }));
    return item;
  });
  const list = element("binaries");
  list.replaceChildren("User code by file:", ...items);
  if (found.length > LISTED) list.append(`+ ${found.length - LISTED} more`);
  list.hidden = !found.length;
}

// One line per frame: function, module, why it has no name, and its samples.
function describe(node) {
  const { own, total, all } = state.counts;
  const value = node < 0 ? all : total[node];
  const parts = [profile.name(node)];
  if (node >= 0) {
    const module = profile.text("module", node);
    const reason = profile.text("reason", node);
    if (module) parts.push(`in ${module}`);
    if (profile.frames.inlined[profile.nodes.frame[node]]) parts.push("inlined");
    if (reason) parts.push(`unresolved: ${reason}`);
  }
  parts.push(`${number.format(value)} ${profile.unit}, ${share(value, all)}`);
  if (node >= 0 && own[node]) parts.push(`${share(own[node], all)} in itself`);
  if (state.zoomed >= 0) parts.push(`${share(value, total[state.zoomed])} of the zoomed frame`);
  return parts.join(" · ");
}

// Draws from scratch: what is visible is some thousand frames at most, however large the profile.
function draw() {
  const width = chartBox.clientWidth;
  const whole = state.zoomed < 0 ? state.counts.all : state.counts.total[state.zoomed];
  if (!whole && state.zoomed >= 0) {
    state.zoomed = -1; // a filter left nothing of the zoomed frame
    draw();
    return;
  }
  chartBox.replaceChildren();
  element("empty").hidden = whole > 0;
  if (!whole) return;
  const chart = flamegraph()
    .width(width)
    .cellHeight(ROW)
    .minFrameSize(LEAST_WIDTH)
    .transitionDuration(0)
    .inverted(state.inverted)
    .setLabelHandler((d) => describe(d.data.node))
    .setDetailsElement(null)
    .setColorMapper((d) => colour(d.data.node));
  const least = (whole * LEAST_WIDTH) / width;
  const box = select(chartBox);
  box.datum(profile.tree(state.counts, state.zoomed, least)).call(chart);
  const frames = box.selectAll("g.frame").attr("id", (d) => `frame${d.data.node}`);
  // The library lets new frames grow for a while whatever the duration; end that at once.
  frames.select("rect").interrupt().attr("width", (d) => width * (d.x1 - d.x0));
  frames.select("div").interrupt().text((d) => d.data.name);
  focus(frame(state.focused) ? state.focused : state.zoomed, false);
  frame(state.zoomed).scrollIntoView({ block: "nearest" });
}

const frame = (node) => document.getElementById(`frame${node}`);

function focus(node, speak = true) {
  frame(state.focused)?.classList.remove("focused");
  state.focused = node;
  const found = frame(node);
  if (!found) return;
  found.classList.add("focused");
  chartBox.setAttribute("aria-activedescendant", found.id);
  if (speak) {
    tell(node);
    found.scrollIntoView({ block: "nearest" });
  }
}

function tell(node) {
  element("details").textContent = describe(node);
}

function zoom(node) {
  state.zoomed = node;
  state.focused = node;
  draw();
  tell(node);
}

function searchFor(text) {
  state.search = text ? profile.search(pattern(text), state.counts.own) : null;
  const { all } = state.counts;
  element("matched").textContent = state.search
    ? `matched ${share(state.search.sum, all)}, ${number.format(state.search.sum)} ${profile.unit}`
    : "";
}

// Neighbours of the focused frame as they are drawn.
function neighbour(towards) {
  const shown = [...chartBox.querySelectorAll("g.frame")].map((group) => group.__data__);
  const here = shown.find((d) => d.data.node === state.focused);
  if (!here) return null;
  if (towards === "parent") return here.parent;
  if (towards === "child") {
    const children = shown.filter((d) => d.parent === here);
    return children.sort((a, b) => b.value - a.value)[0];
  }
  const row = shown.filter((d) => d.depth === here.depth).sort((a, b) => a.x0 - b.x0);
  return row[row.indexOf(here) + (towards === "right" ? 1 : -1)];
}

const KEYS = {
  ArrowLeft: () => neighbour("left"),
  ArrowRight: () => neighbour("right"),
  ArrowUp: () => neighbour(state.inverted ? "parent" : "child"),
  ArrowDown: () => neighbour(state.inverted ? "child" : "parent"),
};

function invert() {
  state.inverted = !state.inverted;
  element("invert").setAttribute("aria-pressed", state.inverted);
  draw();
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function listen() {
  const nodeOf = (event) => event.target.closest?.("g.frame")?.__data__?.data.node;
  // Before the library's own handlers, which zoom inside of what is drawn already.
  chartBox.addEventListener(
    "click",
    (event) => {
      event.stopPropagation();
      const node = nodeOf(event);
      if (node !== undefined) zoom(node);
    },
    true,
  );
  chartBox.addEventListener("mouseover", (event) => {
    const node = nodeOf(event);
    if (node !== undefined) tell(node);
  });
  chartBox.addEventListener("keydown", (event) => {
    if (event.key in KEYS) {
      const found = KEYS[event.key]();
      if (found) focus(found.data.node);
    } else if (event.key === "Enter" || event.key === " ") zoom(state.focused);
    else if (event.key === "Escape" || event.key === "Home") zoom(-1);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape") chartBox.focus();
      return;
    }
    const action = { "/": () => element("search").focus(), i: invert, t: toggleTheme, r: () => zoom(-1) };
    if (!action[event.key]) return;
    event.preventDefault();
    action[event.key]();
  });
  element("search").addEventListener("input", (event) => {
    searchFor(event.target.value);
    for (const group of chartBox.querySelectorAll("g.frame")) {
      group.querySelector("rect").setAttribute("fill", colour(group.__data__.data.node));
    }
  });
  element("invert").addEventListener("click", invert);
  element("theme").addEventListener("click", toggleTheme);
  element("reset").addEventListener("click", () => zoom(-1));
  let width = chartBox.clientWidth;
  new ResizeObserver(() => {
    if (chartBox.clientWidth === width) return;
    width = chartBox.clientWidth;
    draw();
  }).observe(chartBox);
}

function start(data) {
  profile = new Profile(data);
  state = { zoomed: -1, focused: -1, inverted: false, counts: profile.count(), search: null };
  filters(profile, element, (filter) => {
    state.counts = profile.count(filter);
    searchFor(element("search").value);
    listBinaries();
    draw();
    tell(state.zoomed);
  });
  reserve(profile.binaries(state.counts));
  listBinaries();
  draw();
  tell(-1);
  listen();
  document.documentElement.dataset.openedMs = Math.round(performance.now());
}

const given = JSON.parse(element("profile").textContent);
if (given.source) {
  fetchProfile(given.source).then((data) => {
    document.title = data.title;
    document.querySelector("h1").textContent = data.title;
    element("summary").textContent = data.summary;
    start(data);
  }, (error) => {
    element("summary").textContent = error.message;
  });
} else start(given);
