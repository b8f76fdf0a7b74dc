// Describes a box beside the pointer or the focused box. Screen readers get the same text from the line
// below the graph.

const AWAY = 14; // pixels from the pointer
const EDGE = 6; // minimum distance from the edges of the window

export class Tooltip {
  constructor(element) {
    this.element = element;
    element.setAttribute("aria-hidden", "true");
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  hide() {
    this.element.hidden = true;
  }

  // `facts`: title, and rows of a name and a text.
  show({ title, rows }, { x, y }) {
    const { element } = this;
    const head = document.createElement("strong");
    head.textContent = title;
    const list = document.createElement("dl");
    for (const [name, text] of rows) {
      const [term, value] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, value.textContent] = [name, text];
      list.append(term, value);
    }
    element.replaceChildren(head, list);
    element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = element;
    const right = x + AWAY + width + EDGE <= innerWidth;
    const below = y + AWAY + height + EDGE <= innerHeight;
    const left = right ? x + AWAY : Math.max(EDGE, Math.min(x - AWAY, innerWidth - EDGE) - width);
    const top = below ? y + AWAY : Math.max(EDGE, y - AWAY - height);
    element.style.left = `${left}px`;
    element.style.top = `${top}px`;
  }
}
