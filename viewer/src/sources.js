// Source files: of the server of the page, or a reason why there are none.

const NONE = "This page contains no source files. To see them, record to a .otlp file and open it with " +
  "otel-kprofiler view on the host that has the files.";

export class Sources {
  #found = new Map();

  // `address` of the server's files, if there is one; `changed` is called when a file has come.
  constructor(address, changed) {
    Object.assign(this, { address, changed });
  }

  // Fetches all files again when they are next shown.
  forget() {
    for (const one of this.#found.values()) one.isOld = true;
  }

  // Text, modified_ms and host of a file, or `error`; null while it is on its way.
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
