// Assembles the page: one state, from which everything is drawn.

import { colourOf, forgetTheme, reserve } from "./colours.js";
import { why } from "./empty.js";
import { binsOf, clip, cpuOf, fillFilters, passing } from "./filters.js";
import { listen } from "./keys.js";
import { countRecorded } from "./lines.js";
import { FUNCTION, Menu, savings } from "./menu.js";
import { Pane } from "./pane.js";
import { KINDS, pattern, Profile, read as readProfile } from "./profile.js";
import { csv, save } from "./save.js";
import { follow } from "./source.js";
import { Sources } from "./sources.js";
import { Spans } from "./spans.js";
import { isGraph, read, rootOf, write } from "./state.js";
import { highest, Strip } from "./strip.js";
import { Tooltip } from "./tooltip.js";
import { Tracks } from "./tracks.js";
import { describe, isToggle, TRANSFORMS, withTransform } from "./transforms.js";
import { count, fitting, format, nsOf, unitsOf } from "./units.js";

const LISTED = 8; // binaries in the legend

const element = (id) => document.getElementById(id);
let recorded = null;
let profile = null; // the recorded profile after transforms
let state = read(location.hash);
let told = { name: "", chosen: "", stack: "" }; // names of the last focused box or function
let pending = 0;
const panes = [];

// Returns the value last made, if the inputs are the same, otherwise a new one.
const made = new Map();
function once(name, inputs, make) {
  const last = made.get(name);
  if (last && inputs.every((input, at) => Object.is(input, last.inputs[at]))) return last.value;
  const value = make();
  made.set(name, { inputs, value });
  return value;
}

// Changes the state. Adds an entry to the history unless `replaces` is set.
function go(change, replaces = false) {
  if (!recorded) return;
  Object.assign(state, change);
  const address = `#${write(moved(state, origin(recorded)))}`;
  if (address !== (location.hash || "#")) {
    history[replaces ? "replaceState" : "pushState"](null, "", address);
  }
  render();
}

// Times in addresses are Unix times in whole milliseconds; times in the state count from the start of the
// profile. If there are several intervals, both count from the start of the first.
const origin = ({ parts, start_ms: startMs }) => (parts.length > 1 ? 0 : Math.floor(startMs));

function moved(from, by) {
  const move = (range) => range?.map((ms) => ms + by) ?? null;
  return { ...from, range: move(from.range), baseline: move(from.baseline) };
}

function shownKinds() {
  const { kinds } = profile;
  if (state.kind === "*") return [...kinds.keys()].filter((at) => !kinds[at].parts);
  return [profile.kindAt(state.kind)];
}

// Returns the counts of a kind, for pane.show().
function countsOf(kind) {
  const { process, thread, range, baseline } = state;
  const cpu = cpuOf(state);
  const threads = once("threads", [profile, process, thread], () => passing(profile, state));
  const filter = { kind, threads, cpu };
  const narrowed = (name, of) =>
    once(`${name} ${kind}`, [threads, cpu, ...binsOf(profile, of)], () => profile.count(filter, binsOf(profile, of)));
  const after = narrowed("after", range);
  const cpuTime = profile.kinds[kind]?.parts?.[0];
  const onCpu = cpuTime === undefined || baseline ? null : once("on CPU", [after], () =>
    profile.count({ ...filter, only: cpuTime }, binsOf(profile, range)));
  if (!baseline) return { filter, onCpu, counts: after, before: null, after: null };
  const before = narrowed("before", baseline);
  return { filter, before, after, counts: once(`both ${kind}`, [before, after], () => mean(before, after)) };
}

// Counts the recorded nodes in a range, for lines.
const recordedOf = (name, filter, range) =>
  once(`recorded ${name}`, [profile, filter.threads, filter.cpu, ...binsOf(profile, range)], () =>
    countRecorded(profile, filter, binsOf(profile, range)));

// Returns the mean of both shares, so that functions that disappeared are drawn as well as new ones.
function mean(before, after) {
  const sides = [before, after].filter(({ all }) => all > 0);
  const own = new Float64Array(profile.size);
  for (const side of sides) {
    const scale = 1 / side.all / sides.length;
    for (let node = 0; node < own.length; node += 1) own[node] += side.own[node] * scale;
  }
  return profile.sum(own);
}

const transformed = () => once("profile", [recorded, JSON.stringify(state.transforms)], () =>
  new Profile(recorded, state.transforms));

// Draws everything, and describes the focused item.
function render() {
  draw();
  panes[0]?.tellFocused();
}

function draw() {
  tooltip.hide();
  cancelAnimationFrame(pending);
  pending = 0;
  if (!recorded) return;
  profile = transformed();
  const kinds = shownKinds();
  while (panes.length < kinds.length) panes.push(addPane());
  panes.splice(kinds.length).forEach((pane) => pane.element.remove());
  const search = state.search
    ? once("search", [profile, state.search], () => profile.search(pattern(state.search)))
    : null;
  showControls(kinds);
  kinds.forEach((kind, at) => {
    const { filter, ...counts } = countsOf(kind);
    if (at === 0) showStrip(filter, counts);
    panes[at].show({ profile, kind: profile.kinds[kind] ?? NO_KIND, state, search, isOnly: kinds.length < 2,
      sources, recorded: () => recordedOf(kind, filter, state.range),
      recordedBefore: () => recordedOf(`before ${kind}`, filter, state.baseline),
      why: () => once(`why ${kind}`, [profile, write(state), kind], () => why(profile, state, kind, strip)), ...counts });
  });
  showMatches();
}

const NO_KIND = { name: "", unit: "samples", period_ns: 0, measure: "" };

function addPane() {
  const pane = new Pane({
    zoom: (path) => go({ zoom: path }),
    choose: (chosen) => go({ chosen }),
    sort: (sort) => go({ sort }, true),
    widen: go,
    tell: (text, name, chosen, stack = "") => {
      told = { name, chosen, stack };
      element("details").textContent = text;
      element("copy").disabled = !name;
      element("around").disabled = element("more").disabled = !chosen;
    },
    menu: (place) => told.chosen && menu.open(place, told.name, FUNCTION),
    point: (facts, place) => (facts ? tooltip.show(facts, place) : tooltip.hide()),
  });
  element("panes").append(pane.element);
  return pane;
}

const GUTTER = 46; // pixels for the names of CPUs
const TRACK_GUTTER = { wide: 130, narrow: 84 }; // pixels for the names of threads

const wallOr = (kind) => (profile.kinds.at(-1)?.parts ? profile.kinds.length - 1 : kind);

// Returns whether thread rows are shown: by default if waits were recorded.
function hasTracks(kind) {
  if (!nsOf(kind)) return false;
  return state.tracks ? state.tracks === "on" : Boolean(profile.kinds.at(-1)?.parts);
}

function showStrip(filter, { counts, before, after }) {
  const kind = profile.kinds[filter.kind] ?? NO_KIND;
  const onCpus = { ...filter, kind: kind.parts?.[0] ?? filter.kind }; // waits are on no CPU
  const inputs = [profile, filter.threads, filter.cpu, kind, strip.canvas.clientWidth, highest()];
  const isTracked = hasTracks(kind);
  const gutter = isTracked ? TRACK_GUTTER[innerWidth <= 700 ? "narrow" : "wide"] : GUTTER;
  once("strip", [...inputs, gutter], () =>
    strip.load(profile, profile.grid(onCpus), profile.kinds[onCpus.kind]?.period_ns / 1e6, gutter));
  strip.show(state.range, state.baseline);
  element("tracks").hidden = element("states").hidden = !isTracked;
  element("tracked").setAttribute("aria-pressed", isTracked);
  element("tracked").hidden = !nsOf(kind);
  if (isTracked) {
    once("tracks", [...inputs, gutter], () => tracks.load(profile, { ...filter, kind: wallOr(filter.kind) }, gutter));
    tracks.show(clip(strip.spanMs, state.range));
  }
  const amount = (of) => format(of.all, of.all, kind, state.unit === "share" ? "count" : state.unit);
  element("brushed").textContent = before
    ? `${strip.describe(state.range ?? [0, strip.spanMs])} · ${amount(after)}, ` +
      `against ${strip.describe(state.baseline)} · ${amount(before)}`
    : state.range ? `${strip.describe(state.range)} · ${amount(counts)}` : "whole time: drag to choose a part";
  element("whole").hidden = !state.range || Boolean(state.baseline);
  element("compare").disabled = !state.range && !state.baseline;
  element("compare").textContent = state.baseline ? "End comparison" : "Compare with …";
}

function showControls(kinds) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isChosen = tab.dataset.tab === state.tab;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
  }
  const list = element("kind");
  const { kinds: all } = profile;
  once("kinds", [profile], () => list.replaceChildren(
    ...[...all].sort((a, b) => Boolean(b.parts) - Boolean(a.parts)).map(({ name }) => new Option(name, name)),
    new Option("side by side", "*"),
  ));
  list.value = state.kind || (all[kinds[0]]?.name ?? "");
  list.title = all[kinds[0]]?.parts?.map((at) => all[at].name).join(" + ") ?? "";
  list.parentElement.hidden = all.length < 2;
  const kind = all[kinds[0]] ?? NO_KIND;
  const unit = element("unit");
  once("units", [kind], () => unit.replaceChildren(...unitsOf(kind).map(([name, text]) => new Option(text, name))));
  [unit.value] = fitting(kind, state.unit);
  unit.parentElement.hidden = Boolean(state.baseline); // only shares are compared
  element("invert").hidden = !isGraph(state);
  element("reset").hidden = !state.zoom.length;
  showTransforms();
  if (element("search").value !== state.search) element("search").value = state.search;
  once("lists", [profile, state.process, state.thread, state.cpu, state.kind], () =>
    fillFilters(profile, element, state));
  document.body.classList.toggle("compares", Boolean(state.baseline));
}

function showTransforms() {
  for (const id of ["application", "recursion"]) {
    element(id).setAttribute("aria-pressed", state.transforms.some(([name]) => name === id));
  }
  once("transforms", [profile], () => {
    const shown = state.transforms.filter(([name]) => !isToggle(name));
    element("transforms").replaceChildren(...shown.map((one, at) => {
      const item = document.createElement("li");
      const button = item.appendChild(document.createElement("button"));
      button.type = "button";
      button.textContent = `${describe(profile, one)} ✕`;
      button.setAttribute("aria-label", `Undo: ${describe(profile, one)}`);
      button.addEventListener("click", () => {
        transform(state.transforms.filter((other) => other !== one));
        (element("transforms").querySelectorAll("button")[at] ?? element("application")).focus();
      });
      return item;
    }));
    element("transforms").hidden = !shown.length;
  });
}

const transform = (transforms) => go({ transforms, zoom: [] });

// Adds a transform of the focused function; switches transforms without a function on or off.
function toggle(name) {
  if (!isToggle(name)) {
    if (told.chosen) transform(withTransform(state.transforms, [name, told.chosen]));
    return;
  }
  const rest = state.transforms.filter(([of]) => of !== name);
  transform(rest.length < state.transforms.length ? rest : withTransform(state.transforms, [name]));
}

function showMatches(at = 0) {
  const found = panes[0].matched();
  const frames = found && isGraph(state) ? panes[0].graph.matches().length : 0;
  const place = at ? `${at} of ` : "";
  const shown = frames ? ` · ${place}${count(frames)} ${frames === 1 ? "frame" : "frames"}` : "";
  element("matched").textContent = found ? `matched ${found}${shown}` : "";
  element("next").disabled = element("previous").disabled = !frames;
}

function step(by) {
  if (state.tab === "source") {
    const found = panes[0].listing.step(by);
    if (found) element("details").textContent = `Line ${found.line} · ${found.place} of ${found.of} lines with samples`;
    return;
  }
  if (!element("next").disabled) showMatches(panes[0].graph.step(by));
}

function listBinaries() {
  const found = profile.binaries(profile.count({ kind: profile.kindAt(""), cpu: null, threads: passing(profile, {}) }));
  reserve(found);
  const items = found.slice(0, LISTED).map((binary) => {
    const item = document.createElement("li");
    item.className = "binary";
    item.textContent = binary;
    item.style.setProperty("--swatch", colourOf({ kind: "user", binary }));
    return item;
  });
  const list = element("binaries");
  list.replaceChildren(...items);
  if (found.length > LISTED) {
    const rest = Object.assign(document.createElement("li"), { className: "rest", textContent: `+ ${found.length - LISTED} more` });
    list.append(rest);
  }
  list.hidden = !found.length;
  document.querySelector("#legend .wait").hidden = !profile.frames.kind.includes(KINDS.indexOf("wait"));
}

function load(data) {
  const before = recorded;
  recorded = readProfile(data);
  document.title = element("title").textContent = data.title;
  element("summary").textContent = data.summary;
  document.body.classList.remove("waiting");
  made.clear();
  sources.forget();
  profile = transformed();
  state = moved(state, (before ? origin(before) : 0) - origin(recorded));
  if (profile.parts.length === 2 && !location.hash) {
    const middle = profile.parts[0].bins * profile.bin_ms;
    Object.assign(state, { baseline: [0, middle], range: [middle, profile.bins * profile.bin_ms] });
  }
  listBinaries();
  spans.load(data.spans);
  go({}, true);
}

async function copy(text, what) {
  try {
    if (!navigator.clipboard) throw new Error("browsers let only pages of https and this host do that");
    await navigator.clipboard.writeText(text);
    element("details").textContent = `Copied ${what}.`;
  } catch (error) {
    element("details").textContent = `Cannot copy: ${error.message}`;
  }
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  repaint();
}

function repaint() {
  forgetTheme();
  if (!profile) return;
  strip.repaint();
  draw();
}

const menu = new Menu(element("menu"), (action) => (TRANSFORMS.includes(action) ? toggle : (name) => actions[name]())(action));
const tooltip = new Tooltip(element("tooltip"));
const spans = new Spans(element, (facts, place) => (facts ? tooltip.show(facts, place) : tooltip.hide()));
const strip = new Strip(element("strip"), {
  drag: (range) => {
    state.range = range;
    pending ||= requestAnimationFrame(render);
  },
  choose: (range, replaces) => go({ range }, replaces),
});
const tracks = new Tracks(element("tracks"), {
  choose: (thread) => go({ thread: state.thread === thread ? "" : thread }),
  point: (facts, place) => (facts ? tooltip.show(facts, place) : tooltip.hide()),
});
strip.hover = (cell) => {
  if (!cell) return;
  const { kinds } = profile;
  const shown = kinds[shownKinds()[0]] ?? NO_KIND;
  const kind = kinds[shown.parts?.[0]] ?? shown;
  element("details").textContent =
    `CPU ${cell.cpu} · ${strip.describe([cell.from, cell.to])} · ${format(cell.value, cell.value, kind, "count")}`;
};

const actions = {
  tab: (tab) => go({ tab, zoom: [] }),
  kind: (kind) => go({ kind, zoom: [] }),
  unit: (unit) => go({ unit }, true),
  nextUnit: () => {
    const names = [...element("unit").options].map(({ value }) => value);
    go({ unit: names[(names.indexOf(element("unit").value) + 1) % names.length] }, true);
  },
  filter: (change) => go("process" in change ? { ...change, thread: "" } : change),
  search: (text) => go({ search: text }, true),
  next: () => step(1),
  previous: () => step(-1),
  invert: () => go({ root: rootOf(state) === "top" ? "bottom" : "top" }, true),
  reset: () => go({ zoom: [] }),
  theme: toggleTheme,
  whole: () => go({ range: null, baseline: null }),
  compare: () => {
    if (state.baseline) go({ baseline: null });
    else if (state.range) go({ baseline: state.range, range: null });
  },
  copyName: () => told.name && copy(told.name, "the name"),
  copyLink: () => copy(location.href, "the link to this view"),
  around: () => told.chosen && go({ tab: "sandwich", chosen: told.chosen, zoom: [] }),
  lines: () => {
    if (told.chosen) go({ tab: "source", chosen: told.chosen, zoom: [] });
    if (state.tab === "source") panes[0]?.listing.focus();
  },
  tracks: () => go({ tracks: element("tracks").hidden ? "on" : "off" }, true),
  focus: () => panes[0]?.focus(),
  transform: toggle,
  undo: () => state.transforms.length && transform(state.transforms.slice(0, -1)),
  more: () => {
    const { left, top } = element("more").getBoundingClientRect();
    menu.open({ x: left, y: top }, told.name, FUNCTION);
  },
  copyStack: () => (told.stack || told.name) && copy(told.stack || told.name, "the stack"),
  save: () => {
    const { left, bottom } = element("save").getBoundingClientRect();
    menu.open({ x: left, y: bottom }, "Save what is shown", savings(isGraph(state)));
  },
  saveCsv: () => save("functions.csv", new Blob([csv(panes[0].view.functionRows())], { type: "text/csv" })),
  saveSvg: () => save("graph.svg", new Blob([panes[0].view.svg()], { type: "image/svg+xml" })),
  savePng: async () => save("graph.png", await panes[0].graph.png()),
};
listen(element, actions);

addEventListener("popstate", () => {
  if (!profile) return;
  state = moved(read(location.hash), -origin(profile));
  render();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
const size = () => `${element("panes").clientWidth} ${highest()}`;
let drawnAt = size();
new ResizeObserver(() => {
  if (size() === drawnAt) return;
  drawnAt = size();
  draw();
}).observe(element("panes"));

// The drawn objects, for tests and for the console.
window.viewer = { panes, strip, tracks, brush: (range) => go({ range }), profile: () => profile };

const given = JSON.parse(element("profile").textContent);
const sources = new Sources(given.files, draw);
if (given.source) {
  document.body.classList.add("waiting");
  follow(given.source, element, load);
} else load(given);
document.documentElement.dataset.openedMs = Math.round(performance.now());
