// Groups of wait causes, each with a colour, in the order in which thread rows stack them.

export const GROUPS = Object.entries({
  ready: "run_queue throttled",
  storage: "disk page_fault memory_reclaim",
  locks: "futex gil kernel_lock file_lock",
  peers: "socket_receive socket_send socket_accept socket_connect pipe poll epoll io_uring",
  others: "",
}).map(([name, causes]) => ({ colour: `var(--${name})`, causes: causes.split(" ") }));
const OTHERS = GROUPS.length - 1;
const PREFIX = "wait: ";

// Returns the index of the group of a frame or part such as "wait: disk".
export function groupOf(text) {
  const at = GROUPS.findIndex(({ causes }) => causes.includes(text.slice(PREFIX.length)));
  return at < 0 ? OTHERS : at;
}

export const colourOfCause = (text) => GROUPS[groupOf(text)].colour;
