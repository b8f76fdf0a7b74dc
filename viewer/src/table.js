// A table of functions.

import { colourOf } from "./colours.js";

const FIRST = 200; // rows shown at once

export class Table {
  #limit = FIRST;
  #shown = null;

  // `events`: choose(id), menu(id, place in the window), sort(column); sort may be missing.
  constructor(events) {
    this.events = events;
    this.element = document.createElement("div");
    this.element.className = "table";
    this.table = this.element.appendChild(document.createElement("table"));
    this.caption = this.table.createCaption();
    this.head = this.table.createTHead().insertRow();
    this.body = this.table.createTBody();
    this.more = this.element.appendChild(document.createElement("button"));
    this.more.type = "button";
    this.more.className = "more";
    this.more.addEventListener("click", () => {
      this.#limit += 5 * FIRST;
      this.#draw();
    });
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row?.dataset.id) events.choose(row.dataset.id);
    });
    this.body.addEventListener("contextmenu", (event) => {
      const row = event.target.closest("tr");
      if (!row?.dataset.id) return;
      event.preventDefault();
      const { left, bottom } = row.getBoundingClientRect();
      const byMouse = event.button === 2;
      events.menu(row.dataset.id, byMouse ? { x: event.clientX, y: event.clientY } : { x: left + 20, y: bottom });
    });
    this.body.addEventListener("keydown", (event) => {
      const to = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      const button = event.target.closest("tr")?.[to]?.querySelector("button");
      if (!button) return;
      event.preventDefault();
      button.focus();
    });
  }

  // `caption`; `columns`: name, text(row), part(row) of 1 for a bar, changeOf (key of another column);
  // `rows`: id ("" for none), name, module, family, isMatch.
  show({ caption, columns, rows, sort, chosen }) {
    if (this.#shown?.sort !== sort) this.#limit = FIRST;
    this.#shown = { caption, columns, rows, sort, chosen };
    this.#draw();
  }

  #draw() {
    const { caption, columns, rows, sort, chosen } = this.#shown;
    this.caption.textContent = caption;
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    const holds = this.body.contains(document.activeElement);
    this.head.replaceChildren(header("Function"), ...columns.map((column) => {
      const { name, key, part } = column;
      const cell = header(this.events.sort && key ? "" : name);
      cell.className = classOf(column, sort);
      if (!this.events.sort || !key) return cell;
      const button = cell.appendChild(document.createElement("button"));
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", () => this.events.sort(key));
      if (sort === key && part) cell.setAttribute("aria-sort", "descending");
      return cell;
    }));
    this.body.replaceChildren(...rows.slice(0, this.#limit).map((row) => {
      const line = document.createElement("tr");
      line.dataset.id = row.id;
      if (row.id && row.id === chosen) line.setAttribute("aria-current", "true");
      line.classList.toggle("matched", Boolean(row.isMatch));
      line.append(nameCell(row), ...columns.map((column) => numberCell(column, row, sort)));
      return line;
    }));
    this.more.hidden = rows.length <= this.#limit;
    this.more.textContent = `${(rows.length - this.#limit).toLocaleString("en-US")} more`;
    if (!holds || focused === undefined) return;
    [...this.body.rows].find((row) => row.dataset.id === focused)?.querySelector("button")?.focus();
  }
}

function header(text) {
  const cell = document.createElement("th");
  cell.scope = "col";
  cell.textContent = text;
  return cell;
}

function nameCell({ id, name, module, family }) {
  const cell = document.createElement("td");
  cell.className = "name";
  const line = cell.appendChild(document.createElement("div"));
  const swatch = line.appendChild(document.createElement("i"));
  swatch.style.setProperty("--swatch", colourOf(family, name));
  const text = line.appendChild(document.createElement(id ? "button" : "span"));
  text.textContent = name;
  if (id) text.type = "button";
  if (module) {
    const place = line.appendChild(document.createElement("small"));
    place.textContent = module;
  }
  cell.title = module ? `${name} in ${module}` : name;
  return cell;
}

// Narrow tables of a comparison omit the change of the `unsorted` column.
function classOf({ part, key, changeOf }, sort) {
  const of = changeOf ?? key;
  return `number ${part ? "share" : changeOf ? "change" : ""} ${sort && of !== sort ? "unsorted" : ""}`;
}

function numberCell(column, row, sort) {
  const { text, part, className } = column;
  const cell = document.createElement("td");
  cell.className = `${classOf(column, sort)} ${className?.(row) ?? ""}`;
  cell.textContent = text(row);
  if (part) cell.style.setProperty("--part", `${(100 * part(row)).toFixed(1)}%`);
  return cell;
}
