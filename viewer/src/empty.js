// Explains why a view has no samples, and offers ways to get some back.

import { binsOf, cpuOf, passing } from "./filters.js";
import { Profile } from "./profile.js";
import { describe, drops } from "./transforms.js";
import { format } from "./units.js";

// Lists the restrictions of a view: a description, and how to remove each (label and change of the state).
function restrictions(profile, state, strip) {
  const { process, thread, cpu, range, baseline, transforms } = state;
  const found = [];
  const add = (text, label, change) => found.push({ text, label, change });
  if (process) add(`process ${process}`, "All processes", { process: "", thread: "" });
  if (thread) add(thread.startsWith("pid ") ? thread : `thread ${thread}`, "All threads", { thread: "" });
  if (cpu !== "") add(`CPU ${cpu}`, "All CPUs", { cpu: "" });
  const times = new Set([baseline, range].filter(Boolean).map((one) => `time ${strip.describe(one)}`));
  if (times.size) add([...times].join(" or "), "Whole time", { range: null, baseline: null });
  for (const one of transforms.filter(drops)) {
    const text = describe(profile, one);
    add(text, `Undo: ${text}`, { transforms: transforms.filter((other) => other !== one), zoom: [] });
  }
  return found;
}

// Counts a kind's samples in a state; in a comparison, those in both time ranges.
function samplesIn(profile, state, kind) {
  const filter = { kind, cpu: cpuOf(state), threads: passing(profile, state) };
  const ranges = state.baseline ? [state.baseline, state.range] : [state.range];
  return ranges.reduce((sum, range) => sum + profile.count(filter, binsOf(profile, range)).all, 0);
}

// Returns `text`, which says why `kind` (an index) has no samples in a state, and `ways`: for each
// restriction whose removal brings samples back, or else for all restrictions together, the label, the
// number of samples and the change of the state.
export function why(profile, state, kind, strip) {
  const { kinds } = profile;
  const nameOf = (at) => kinds[at]?.name ?? "";
  const way = (label, change, of = kind) => {
    const without = change.transforms ? new Profile(profile.recorded, change.transforms) : profile;
    const found = samplesIn(without, { ...state, ...change }, of);
    return found ? [{ label, change, amount: format(found, found, kinds[of], "count") }] : [];
  };
  const found = restrictions(profile, state, strip);
  const ways = found.flatMap(({ label, change }) => way(label, change));
  if (found.length > 1) {
    const all = Object.assign({}, ...found.map(({ change }) => change));
    if (all.transforms) all.transforms = state.transforms.filter((one) => !drops(one));
    ways.push(...way("All samples", all));
  }
  if (state.kind !== "*") {
    kinds.forEach((_, at) => at !== kind && ways.push(...way(`Show ${nameOf(at)}`, { kind: nameOf(at), zoom: [] }, at)));
  }
  if (!profile.samples.count.length) {
    return { text: "The recording has no samples: nothing to be sampled ran while it was made.", ways };
  }
  const what = nameOf(kind) && ` of ${nameOf(kind)}`;
  const text = found.length ? `No samples${what} pass: ${found.map((one) => one.text).join(", ")}.` : `The recording has no samples${what}.`;
  return { text, ways };
}
