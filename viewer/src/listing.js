// Shows a function's source with counts beside its lines.

const SELF = "Lines of Python include the native code and the kernel that they run.";
const FIRST = 1000; // lines shown at once, around the selected line

export class Listing {
  #shown = null;
  #range = [0, 0];
  #at = 0; // index among the lines, in descending order of samples

  constructor() {
    this.element = document.createElement("div");
    this.element.className = "listing";
    this.heading = document.createElement("h3");
    this.notes = document.createElement("div");
    this.notes.className = "notes";
    this.scroll = document.createElement("div");
    Object.assign(this.scroll, { className: "lines", tabIndex: 0 });
    this.scroll.setAttribute("role", "region");
    this.table = document.createElement("table");
    this.head = this.table.createTHead().insertRow();
    this.body = this.table.createTBody();
    this.earlier = this.#button(-1);
    this.later = this.#button(1);
    this.scroll.append(this.earlier, this.table, this.later);
    this.element.append(this.heading, this.notes, this.scroll);
  }

  #button(by) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "more" });
    button.addEventListener("click", () => {
      this.#range[by < 0 ? 0 : 1] += by * 5 * FIRST;
      this.#draw();
    });
    return button;
  }

  // `title`; `notes` (texts); `text` of the file or null; `lines`: by line number, self, total and amounts
  // (texts, and parts of 1 for bars or signs of changes, null for nothing); `columns` (names); `own` (set
  // of the function's lines); `hot` (line with the most samples); `at` (line to show); `key` of the
  // content: when it changes, `at` is scrolled into view.
  show(shown) {
    const isNew = shown.key !== this.#shown?.key;
    this.#shown = shown;
    const { title, notes, lines, text, at } = shown;
    this.heading.textContent = title;
    this.scroll.setAttribute("aria-label", `${title}. Arrow keys scroll; N goes to the next line with the most samples.`);
    this.notes.replaceChildren(...notes.map((note) => Object.assign(document.createElement("p"), { textContent: note })));
    this.scroll.hidden = !lines.size;
    this.source = text?.split("\n") ?? null;
    if (isNew) {
      this.#range = [at - FIRST / 2, at + FIRST / 2];
      this.#at = 0;
    }
    this.#draw();
    if (isNew) this.#reveal(at);
  }

  focus() {
    this.scroll.focus({ preventScroll: true });
  }

  // Scrolls to the line with the next most samples; returns the line and its rank.
  step(by) {
    const order = [...this.#shown.lines].sort(([a, one], [b, other]) => other.self - one.self || other.total - one.total || a - b);
    if (!order.length) return null;
    this.#at = (this.#at + by + order.length) % order.length;
    const [line] = order[this.#at];
    this.#range = [Math.min(this.#range[0], line - FIRST / 2), Math.max(this.#range[1], line + FIRST / 2)];
    this.#draw();
    this.#reveal(line);
    return { line, place: this.#at + 1, of: order.length };
  }

  #reveal(line) {
    const row = this.body.querySelector(`[data-line="${line}"]`);
    this.body.querySelector(".at")?.classList.remove("at");
    if (!row) return;
    row.classList.add("at");
    const { scroll } = this;
    scroll.scrollTop += row.getBoundingClientRect().top - scroll.getBoundingClientRect().top - scroll.clientHeight / 3;
  }

  #draw() {
    const { lines, columns, own, hot } = this.#shown;
    const { source } = this;
    const all = source ? source.map((_, at) => at + 1) : [...lines.keys()].sort((a, b) => a - b);
    const [from, to] = this.#range;
    const within = source ? all.filter((line) => line >= from && line <= to) : all;
    this.head.replaceChildren(...["Line", ...columns, "Source"].map((name, at) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      if (name.startsWith("Self")) cell.title = SELF;
      cell.className = at === 0 ? "line" : at <= columns.length ? classOf(name) : "code";
      return cell;
    }));
    const { scrollTop } = this.scroll;
    this.body.replaceChildren(...within.map((line) => {
      const row = document.createElement("tr");
      row.dataset.line = line;
      row.classList.toggle("hot", line === hot);
      if (own.has(line)) row.setAttribute("aria-current", "true");
      const number = document.createElement("th");
      Object.assign(number, { scope: "row", className: "line", textContent: line });
      if (line === hot) {
        const mark = Object.assign(document.createElement("span"), { className: "unseen", textContent: " most samples" });
        number.append(mark);
      }
      const amounts = lines.get(line)?.amounts ?? columns.map(() => null);
      const code = document.createElement("td");
      code.className = "code";
      code.textContent = source ? source[line - 1] : "";
      row.append(number, ...amounts.map((amount, at) => amountCell(columns[at], amount)), code);
      return row;
    }));
    this.scroll.scrollTop = scrollTop;
    const count = (number) => number.toLocaleString("en-US");
    const [first, last] = [within[0] - 1, (source?.length ?? 0) - within.at(-1)];
    this.earlier.hidden = !(source && first > 0);
    this.later.hidden = !(source && last > 0);
    this.earlier.textContent = `${count(first)} lines before`;
    this.later.textContent = `${count(last)} lines after`;
  }
}

const classOf = (column) => `number ${column.endsWith("%") ? "share" : column.startsWith("±") ? "change" : ""}`;

function amountCell(column, amount) {
  const cell = document.createElement("td");
  cell.className = classOf(column);
  if (!amount) return cell;
  cell.textContent = amount.text;
  if (amount.sign) cell.classList.add(amount.sign);
  if (amount.part !== undefined) cell.style.setProperty("--part", `${(100 * amount.part).toFixed(1)}%`);
  return cell;
}
