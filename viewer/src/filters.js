// The three lists of filters: process, thread (or process id), CPU. Their values are texts with the same
// meaning in every profile.

import { weightsOf } from "./kinds.js";

const LONGEST = 1000; // options in a list

export const threadValue = (profile, at) =>
  `${profile.threads.tid[at]} ${profile.strings[profile.threads.name[at]]}`;

function fill(list, options, value) {
  list.replaceChildren(...options.slice(0, LONGEST).map(([text, of]) => new Option(text, of)));
  if (options.length > LONGEST) {
    const rest = new Option(`${options.length - LONGEST} more: choose a process first`, "");
    rest.disabled = true;
    list.append(rest);
  }
  if (value && !options.some(([, of]) => of === value)) list.append(new Option(`${value} · 0.0%`, value));
  list.value = value;
}

function tally(size, keyOf, weightOf) {
  const found = new Map();
  for (let at = 0; at < size; at += 1) {
    if (weightOf(at)) found.set(keyOf(at), (found.get(keyOf(at)) ?? 0) + weightOf(at));
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

// Returns 1 for each thread that passes the filters, otherwise 0.
export function passing(profile, { process, thread }) {
  const { threads, processes, strings } = profile;
  return Uint8Array.from(threads.tid, (_, at) => {
    const owner = threads.process[at];
    if (process && strings[processes.name[owner]] !== process) return 0;
    if (!thread) return 1;
    return Number(thread === `pid ${processes.pid[owner]}` || thread === threadValue(profile, at));
  });
}

// Returns the selected CPU, null for all.
export const cpuOf = ({ cpu }) => (cpu === "" ? null : Number(cpu));

// Clips a range of milliseconds to the profile's time; a range outside of it becomes empty, at the
// profile's start or end. null is the whole time.
export const clip = (spanMs, range) => range?.map((ms) => Math.min(spanMs, Math.max(0, ms))) ?? null;

// Converts a range of milliseconds to a half-open range of bins, empty if it lies outside the profile's
// time; null is the whole time.
export function binsOf({ bins, bin_ms: binMs }, range) {
  if (!range) return [0, bins];
  if (range[1] <= 0 || range[0] >= bins * binMs) return [0, 0];
  const [from, to] = range.map((ms) => Math.min(bins, Math.max(0, Math.round(ms / binMs))));
  return [Math.min(from, bins - 1), Math.max(to, from + 1)];
}

// Fills the lists for a profile, and selects the values of a state.
export function fillFilters(profile, element, state) {
  const { threads, processes, strings, samples } = profile;
  const perThread = new Float64Array(threads.tid.length);
  const perCpu = new Float64Array((profile.cpus.at(-1) ?? -1) + 1);
  const weights = weightsOf(profile.kinds, profile.kindAt(state.kind));
  for (let i = 0; i < samples.count.length; i += 1) {
    const value = samples.count[i] * weights[samples.kind[i]];
    perThread[samples.thread[i]] += value;
    perCpu[samples.cpu[i]] += value;
  }
  const all = perCpu.reduce((a, b) => a + b, 0) || 1;
  const percent = (count) => `${((100 * count) / all).toFixed(1)}%`;
  const processOf = (at) => strings[processes.name[threads.process[at]]];
  const inside = (at) => (!state.process || processOf(at) === state.process ? perThread[at] : 0);
  const size = threads.tid.length;

  fill(element("process"), [
    ["all processes", ""],
    ...tally(size, processOf, (at) => perThread[at]).map(([name, count]) => [`${name} · ${percent(count)}`, name]),
  ], state.process);
  fill(element("cpu"), [
    ["all CPUs", ""],
    ...profile.cpus.map((cpu) => [`CPU ${cpu} · ${percent(perCpu[cpu])}`, String(cpu)]),
  ], state.cpu);
  const pids = tally(size, (at) => processes.pid[threads.process[at]], inside);
  fill(element("thread"), [
    ["all threads", ""],
    ...(pids.length > 1 && state.process
      ? pids.map(([pid, count]) => [`process ${pid ?? "?"} · ${percent(count)}`, `pid ${pid}`])
      : []),
    ...tally(size, (at) => threadValue(profile, at), inside).map(([value, count]) => {
      const [tid, ...name] = value.split(" ");
      return [`${name.join(" ")} ${tid} · ${percent(count)}`, value];
    }),
  ], state.thread);
}
