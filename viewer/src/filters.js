// The three lists to choose from: process, thread (and process id), CPU.

const LONGEST = 1000; // options in a list

function fill(list, options) {
  list.replaceChildren(...options.slice(0, LONGEST).map(([text, value]) => new Option(text, value)));
  if (options.length > LONGEST) {
    const rest = new Option(`${options.length - LONGEST} more: choose a process first`, "");
    rest.disabled = true;
    list.append(rest);
  }
}

function tally(profile, keyOf) {
  const found = new Map();
  const { thread, cpu, count } = profile.samples;
  for (let i = 0; i < count.length; i += 1) {
    const key = keyOf(thread[i], cpu[i]);
    found.set(key, (found.get(key) ?? 0) + count[i]);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

// Calls `changed` with what profile.count() takes whenever a choice is made.
export function filters(profile, element, changed) {
  const { threads, processes, strings } = profile;
  const [byProcess, byThread, byCpu] = ["process", "thread", "cpu"].map(element);
  const all = tally(profile, () => 0)[0]?.[1] ?? 0;
  const percent = (count) => `${((100 * count) / all).toFixed(1)}%`;
  const perThread = tally(profile, (thread) => thread);
  const perPid = tally(profile, (thread) => threads.process[thread]);

  fill(byProcess, [
    ["all processes", ""],
    ...tally(profile, (thread) => processes.name[threads.process[thread]]).map(
      ([name, count]) => [`${strings[name]} · ${percent(count)}`, name],
    ),
  ]);
  fill(byCpu, [
    ["all CPUs", ""],
    ...tally(profile, (_, cpu) => cpu)
      .sort((a, b) => a[0] - b[0])
      .map(([cpu, count]) => [`CPU ${cpu} · ${percent(count)}`, cpu]),
  ]);

  function fillThreads() {
    const inside = (process) =>
      byProcess.value === "" || processes.name[process] === Number(byProcess.value);
    const pids = perPid.filter(([process]) => inside(process));
    const own = perThread.filter(([thread]) => inside(threads.process[thread]));
    fill(byThread, [
      ["all threads", ""],
      ...(pids.length > 1 && byProcess.value !== ""
        ? pids.map(([process, count]) => [
            `process ${processes.pid[process] ?? "?"} · ${percent(count)}`, `p${process}`,
          ])
        : []),
      ...own.map(([thread, count]) => [
        `${strings[threads.name[thread]]} ${threads.tid[thread]} · ${percent(count)}`, thread,
      ]),
    ]);
  }

  const chosen = (list) => (list.value === "" ? null : Number(list.value));
  function tell() {
    const isPid = byThread.value.startsWith("p");
    changed({
      process: chosen(byProcess),
      pid: isPid ? Number(byThread.value.slice(1)) : null,
      thread: isPid ? null : chosen(byThread),
      cpu: chosen(byCpu),
    });
  }
  byProcess.addEventListener("change", () => {
    fillThreads();
    tell();
  });
  byThread.addEventListener("change", tell);
  byCpu.addEventListener("change", tell);
  fillThreads();
}
