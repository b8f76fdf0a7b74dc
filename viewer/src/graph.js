// Draws a tree on a canvas, and lets the user navigate it with mouse and keys.
//
// Only visible rows are drawn: the canvas stays in place while its container is scrolled.

import { onCanvas } from "./colours.js";
import { count } from "./units.js";

const ROW = 18; // pixels
const LEAST_WIDTH = 0.6; // pixels; narrower boxes are not drawn until they are zoomed into
const LEAST_TEXT = 24; // pixels; narrower boxes have no text
const PAD = 4;
const DIM = 0.35; // opacity of frames that do not match the search

export class Graph {
  #rows = [];
  #tree = null;
  #look = {};
  #size = [0, 0];
  #view = "";
  #distance = 0; // from the root's end, in pixels: it stays when the size changes
  #focused = null;
  #hovered = null;
  #widths = new Map();

  // `events`: zoom(path), tell(tree, box), menu(tree, box, place), and point(tree, box, place) with a
  // place in the window, or point(null) when the pointer leaves. All are called on actions of the user.
  constructor(label, events) {
    this.events = events;
    this.element = document.createElement("div");
    this.element.className = "graph";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "application");
    this.element.setAttribute("aria-label", label);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.space = document.createElement("div");
    this.element.append(this.canvas, this.space);
    this.#listen();
    new ResizeObserver(() => {
      const { clientWidth, clientHeight } = this.element;
      if (clientWidth && (clientWidth !== this.#size[0] || clientHeight !== this.#size[1])) {
        this.show(this.#tree, this.#look);
      }
    }).observe(this.element);
  }

  // `look`: zoom (a path), rootAtBottom, isHatched(box), isMatch(box), searches, and for a box and its
  // tree: colour, text (name and amount).
  show(tree, look) {
    const focus = this.#focused && this.#tree ? this.#tree.path(this.#focused) : null;
    const wasInSight = focus && this.#isInSight(this.#focused);
    this.#tree = tree;
    this.#look = look;
    this.zoomed = tree.find(look.zoom);
    if (!this.zoomed || !(this.zoomed.value > 0)) this.zoomed = tree.root;
    const { clientWidth: width, clientHeight: height } = this.element;
    this.#size = [width, height];
    this.#rows = tree.root.value > 0 && width ? tree.layout(this.zoomed, width, LEAST_WIDTH) : [];
    this.#focused = (focus && tree.find(focus)) || this.zoomed;
    if (!this.#placeOf(this.#focused)) this.#focused = this.zoomed;
    this.#hovered = null;
    this.canvas.style.height = `${height}px`;
    this.space.style.height = `${Math.max(0, this.#rows.length * ROW - height)}px`;
    const view = `${look.rootAtBottom} ${look.zoom}`;
    const isNew = view !== this.#view;
    if (isNew) this.#distance = 0;
    this.#view = view;
    this.element.scrollTop = look.rootAtBottom ? this.#furthest() - this.#distance : this.#distance;
    if (isNew) this.#reveal(this.zoomed);
    else if (wasInSight) this.#reveal(this.#focused); // the graph may have lost height
    this.draw();
  }

  get focused() {
    return this.#focused;
  }

  #placeOf(box) {
    const row = this.#rows.findIndex((places) => places.some((place) => place.box === box));
    return row < 0 ? null : { row, place: this.#rows[row].find((one) => one.box === box) };
  }

  #furthest() {
    return Math.max(0, this.#rows.length * ROW - this.element.clientHeight);
  }

  // Scrolls as far as needed to show a box.
  #reveal(box) {
    const found = this.#placeOf(box);
    if (!found) return;
    const top = this.#top(found.row);
    const over = top + ROW - this.element.clientHeight;
    if (top < 0) this.element.scrollTop += top;
    else if (over > 0) this.element.scrollTop += over;
    this.#keepDistance();
  }

  // Returns whether a row was visible at the last drawing, with the height of that time.
  #isInSight(box) {
    const found = this.#placeOf(box);
    const top = found && this.#top(found.row);
    return found && top >= 0 && top + ROW <= this.#size[1];
  }

  #keepDistance() {
    const { scrollTop } = this.element;
    this.#distance = this.#look.rootAtBottom ? this.#furthest() - scrollTop : scrollTop;
  }

  // Returns the distance of a row from the top of the container, at the current scroll position.
  #top(row) {
    const { clientHeight, scrollTop } = this.element;
    const content = this.#rows.length * ROW;
    if (!this.#look.rootAtBottom) return row * ROW - scrollTop;
    return Math.max(content, clientHeight) - (row + 1) * ROW - scrollTop;
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `12px ${getComputedStyle(this.element).fontFamily}`;
    pen.textBaseline = "middle";
    const text = onCanvas("var(--text)");
    const hatch = this.#hatch(pen);
    this.#rows.forEach((places, row) => {
      const top = this.#top(row);
      if (top > height || top + ROW < 0) return;
      for (const { box, x, width: wide, isOuter, more } of places) {
        const isDim = this.#look.searches && (more || !this.#look.isMatch(box));
        pen.globalAlpha = isDim ? DIM : isOuter ? 0.55 : 1;
        const drawn = Math.max(wide - (wide > 3 ? 0.8 : 0), 0.4);
        pen.fillStyle = this.#fill(box, more);
        pen.fillRect(x, top, drawn, ROW - 1);
        if (wide > 3 && !more && this.#look.isHatched(box)) {
          pen.fillStyle = hatch;
          pen.fillRect(x, top, drawn, ROW - 1);
        }
        pen.globalAlpha = 1;
        if (wide < LEAST_TEXT) continue;
        pen.fillStyle = text;
        const shown = more ? { name: `${count(more)} more`, amount: "" } : this.#look.text(box, this.#tree);
        this.#write(pen, shown, x + PAD, top + ROW / 2, wide - 2 * PAD);
      }
    });
    if (this.#hovered) this.#frame(pen, this.#hovered, 1);
    if (this.#focused && document.activeElement === this.element) this.#frame(pen, this.#focused, 2.5);
  }

  #fill(box, more) {
    if (more) return onCanvas("var(--same)");
    return onCanvas(this.#look.isMatch(box) ? "var(--match)" : this.#look.colour(box, this.#tree));
  }

  #frame(pen, box, line) {
    const found = this.#placeOf(box);
    if (!found) return;
    pen.strokeStyle = onCanvas("var(--focus)");
    pen.lineWidth = line;
    const { x, width } = found.place;
    pen.strokeRect(x + line / 2, this.#top(found.row) + line / 2, Math.max(1, width - line), ROW - 1 - line);
  }

  // Writes the name, shortened if it is too long, and then the amount if there is room.
  #write(pen, { name, amount }, x, y, room) {
    const wide = this.#measure(pen, name);
    if (wide > room) {
      const kept = Math.floor((name.length * (room - 10)) / wide);
      if (kept > 1) pen.fillText(`${name.slice(0, kept)}…`, x, y, room);
      return;
    }
    pen.fillText(name, x, y);
    const behind = wide + 10 + this.#measure(pen, amount);
    if (behind > room) return;
    pen.globalAlpha = 0.75;
    pen.fillText(amount, x + wide + 10, y);
    pen.globalAlpha = 1;
  }

  #measure(pen, text) {
    let wide = this.#widths.get(text);
    if (wide === undefined) {
      if (this.#widths.size > 20000) this.#widths.clear();
      this.#widths.set(text, (wide = pen.measureText(text).width));
    }
    return wide;
  }

  #hatch(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const line = tile.getContext("2d");
    line.strokeStyle = onCanvas("var(--hatch)");
    line.lineWidth = 2;
    line.beginPath();
    for (const at of [-6, 0, 6]) {
      line.moveTo(at - 1, 7);
      line.lineTo(at + 7, -1);
    }
    line.stroke();
    return pen.createPattern(tile, "repeat");
  }

  // Returns the groups of narrow boxes: number, value, and x and width in pixels.
  groups() {
    return this.#rows.flatMap((places, row) => places.filter(({ more }) => more).map((place) => ({ ...place, row })));
  }

  // Returns every box, including boxes scrolled out of view.
  boxes() {
    return this.#rows.flatMap((places, row) =>
      places.filter(({ more }) => !more).map(({ box, x, width, isOuter }) => ({
        box, x, width, isOuter, row, y: this.#top(row), height: ROW,
        name: this.#look.text(box, this.#tree).name,
        colour: this.#fill(box),
        isHatched: this.#look.isHatched(box), isMatch: this.#look.isMatch(box),
      })),
    );
  }

  // Returns every box with the size of the whole drawing, including boxes scrolled out of view.
  drawing() {
    const height = this.#rows.length * ROW;
    const move = this.#look.rootAtBottom ? (row) => height - (row + 1) * ROW : (row) => row * ROW;
    const groups = this.groups().map((group) => ({ ...group, height: ROW, name: `${count(group.more)} more`, colour: this.#fill(null, group.more) }));
    return {
      shapes: [...this.boxes(), ...groups].map((shape) => ({ ...shape, y: move(shape.row) })),
      width: this.#size[0], height, back: onCanvas("var(--back)"), text: onCanvas("var(--text)"),
    };
  }

  // Returns the visible part as a PNG.
  png() {
    const picture = document.createElement("canvas");
    [picture.width, picture.height] = [this.canvas.width, this.canvas.height];
    const pen = picture.getContext("2d");
    pen.fillStyle = onCanvas("var(--back)");
    pen.fillRect(0, 0, picture.width, picture.height);
    pen.drawImage(this.canvas, 0, 0);
    return new Promise((done) => picture.toBlob(done, "image/png"));
  }

  focus(box) {
    this.#focused = box;
    this.#reveal(box);
    this.draw();
    this.events.tell(this.#tree, box);
    if (this.#placeOf(box) && document.activeElement === this.element) {
      this.events.point(this.#tree, box, this.#middle(box));
    }
  }

  // Returns the position of a box in the window.
  #middle(box) {
    const { row, place } = this.#placeOf(box);
    const bounds = this.element.getBoundingClientRect();
    const x = bounds.x + place.x + Math.min(place.width / 2, 200);
    return { x, y: bounds.y + this.#top(row) + ROW / 2 };
  }

  // Focuses the next or previous match of the search; returns its number among all matches, from 1.
  step(by) {
    const matches = this.matches();
    if (!matches.length) return 0;
    const here = matches.indexOf(this.#focused);
    const next = here < 0 ? (by > 0 ? 0 : matches.length - 1) : (here + by + matches.length) % matches.length;
    this.focus(matches[next]);
    this.element.scrollIntoView({ block: "nearest" });
    return next + 1;
  }

  matches() {
    return this.#rows.flatMap((places) => places.filter(({ box, more }) => !more && this.#look.isMatch(box)).map(({ box }) => box));
  }

  #neighbour(towards) {
    const box = this.#focused;
    const found = this.#placeOf(box);
    if (!found) return null;
    if (towards === "parent") return box.parent;
    if (towards === "child") {
      const below = (this.#rows[found.row + 1] ?? []).filter((place) => place.box.parent === box);
      return below.sort((a, b) => b.width - a.width)[0]?.box;
    }
    const places = this.#rows[found.row].filter(({ more }) => !more);
    return places[places.indexOf(found.place) + (towards === "right" ? 1 : -1)]?.box;
  }

  #at(event) {
    const bounds = this.element.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.x, event.clientY - bounds.y];
    const row = this.#rows.findIndex((_, at) => y >= this.#top(at) && y < this.#top(at) + ROW);
    const place = this.#rows[row]?.find(({ x: left, width }) => x >= left && x < left + Math.max(1, width));
    return place?.more ? { ...place, frame: -1, parent: place.box } : place?.box;
  }

  #listen() {
    const { element } = this;
    element.addEventListener("click", (event) => {
      const at = this.#at(event);
      if (!at) return;
      const box = at.more ? at.parent : at;
      this.#focused = box;
      this.events.point(null);
      this.events.zoom(this.#tree, box);
    });
    element.addEventListener("contextmenu", (event) => {
      const byMouse = event.pointerType !== "" && event.button === 2;
      const box = byMouse ? this.#at(event) : this.#focused;
      if (!box || box.more || !this.#placeOf(box)) return;
      event.preventDefault();
      this.focus(box);
      this.events.point(null);
      this.events.menu(this.#tree, box, byMouse ? { x: event.clientX, y: event.clientY } : this.#middle(box));
    });
    element.addEventListener("mousemove", (event) => {
      const box = this.#at(event) ?? null;
      element.style.cursor = box ? "pointer" : "";
      this.events.point(box && this.#tree, box, { x: event.clientX, y: event.clientY });
      const hovered = box?.more ? null : box;
      if (hovered === this.#hovered) return;
      this.#hovered = hovered;
      this.draw();
      if (hovered) this.events.tell(this.#tree, box);
    });
    element.addEventListener("mouseleave", () => {
      this.#hovered = null;
      this.events.point(null);
      this.draw();
    });
    element.addEventListener("scroll", () => {
      if (element.clientHeight !== this.#size[1]) return; // the size changed, the user did not scroll
      this.#keepDistance();
      this.draw();
    });
    element.addEventListener("focus", () => this.draw());
    element.addEventListener("blur", () => {
      this.events.point(null);
      this.draw();
    });
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const up = this.#look.rootAtBottom ? "child" : "parent";
      const towards = {
        ArrowLeft: "left", ArrowRight: "right", ArrowUp: up, ArrowDown: up === "child" ? "parent" : "child",
      }[event.key];
      if (towards) {
        const box = this.#neighbour(towards);
        if (box) this.focus(box);
      } else {
        const { root } = this.#tree;
        const box = {
          Enter: this.#focused, " ": this.#focused,
          Escape: root, Home: root, Backspace: this.zoomed.parent ?? root,
        }[event.key];
        if (!box) return;
        this.#focused = box;
        this.events.point(null);
        this.events.zoom(this.#tree, box);
      }
      event.preventDefault();
    });
  }
}
