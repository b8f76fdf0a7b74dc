// Source files from the page's server, or the reason why there are none.

const NONE = "This page contains no source files. To see them, record to a .otlp file and open it with " +
  "otel-kprofiler view on the host that has the files.";

export class Sources {
  #found = new Map();

  // `address`: of the server's files, if there is a server; `changed` is called when a file has arrived.
  constructor(address, changed) {
    Object.assign(this, { address, changed });
  }

  // Makes all files be fetched again when they are next shown.
  forget() {
    for (const one of this.#found.values()) one.isOld = true;
  }

  // Returns text, modified_ms and host of a file, or `error`; null while it is being fetched.
  get(file) {
    if (!this.address) return { error: NONE };
    const found = this.#found.get(file);
    if (!found || found.isOld) this.#load(file, found);
    return this.#found.get(file).content;
  }

  async #load(file, before) {
    const entry = { content: before?.content ?? null, isOld: false };
    this.#found.set(file, entry);
    try {
      const answer = await fetch(`${this.address}?${new URLSearchParams({ file })}`, { cache: "no-store" });
      entry.content = await answer.json();
    } catch (error) {
      entry.content = { error: `${file} did not come from the server: ${error.message}` };
    }
    this.changed();
  }
}
