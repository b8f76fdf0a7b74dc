// Menus: actions for the focused function, and the formats to save.

export const FUNCTION = [
  ["focus", "Focus the function", "f"],
  ["merge", "Merge it into its callers", "m"],
  ["hide", "Hide stacks with it", "h"],
  ["collapse", "Collapse its recursion", "o"],
  ["around", "Callers and callees", "s"],
  ["lines", "Source lines", "v"],
  ["copyName", "Copy the name", "c"],
  ["copyStack", "Copy the stack", "y"],
];
const TABLE = [["saveCsv", "Functions as CSV", "c"]];
export const savings = (isGraph) =>
  isGraph ? [["saveSvg", "Graph as SVG", "s"], ["savePng", "Graph as PNG", "p"], ...TABLE] : TABLE;
const EDGE = 6; // minimum distance from the edges of the window

export class Menu {
  #from = null;

  // `act` is called with the name of an item.
  constructor(element, act) {
    Object.assign(this, { element, act });
    element.addEventListener("keydown", (event) => this.#press(event));
    element.addEventListener("click", ({ target }) => this.#choose(target.closest("button")));
    element.addEventListener("focusout", ({ relatedTarget }) => {
      if (!element.contains(relatedTarget)) element.hidden = true;
    });
  }

  // `items`: action, text and key of each item.
  open({ x, y }, title, items) {
    const { element } = this;
    if (!element.contains(document.activeElement)) this.#from = document.activeElement;
    const head = document.createElement("strong");
    head.textContent = title;
    element.setAttribute("aria-label", title);
    element.replaceChildren(head, ...items.map(([action, text, key]) => {
      const item = document.createElement("button");
      Object.assign(item, { type: "button", role: "menuitem", tabIndex: -1 });
      item.dataset.action = action;
      item.dataset.key = key;
      const mark = document.createElement("kbd");
      mark.textContent = key;
      item.append(text, mark);
      item.setAttribute("aria-keyshortcuts", key);
      return item;
    }));
    element.hidden = false;
    element.style.left = `${Math.max(EDGE, Math.min(x, innerWidth - EDGE - element.offsetWidth))}px`;
    element.style.top = `${Math.max(EDGE, Math.min(y, innerHeight - EDGE - element.offsetHeight))}px`;
    element.querySelector("button").focus();
  }

  #close() {
    this.element.hidden = true;
    this.#from?.focus();
  }

  #choose(item) {
    if (!item) return;
    this.#close();
    this.act(item.dataset.action);
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const items = [...this.element.querySelectorAll("button")];
    const here = items.indexOf(document.activeElement);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1 + items.length, Home: 0, End: items.length - 1 }[event.key];
    const chosen = items.find((item) => item.dataset.key === event.key);
    if (to !== undefined) items[to % items.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") this.#close();
    else if (chosen) this.#choose(chosen);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
