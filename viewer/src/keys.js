// Controls and keys: each calls one action.

import { TABS } from "./state.js";

export function listen(element, actions) {
  const on = (id, event, act) => element(id).addEventListener(event, act);
  for (const id of ["process", "thread", "cpu"]) {
    on(id, "change", ({ target }) => actions.filter({ [id]: target.value }));
  }
  on("kind", "change", ({ target }) => actions.kind(target.value));
  on("unit", "change", ({ target }) => actions.unit(target.value));
  on("search", "input", ({ target }) => actions.search(target.value));
  on("search", "keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    actions[event.shiftKey ? "previous" : "next"]();
  });
  for (const [id, name] of Object.entries({
    next: "next", previous: "previous", reset: "reset", invert: "invert", theme: "theme",
    more: "more", save: "save", whole: "whole", compare: "compare", tracked: "tracks", copy: "copyName", link: "copyLink", around: "around",
  })) on(id, "click", () => actions[name]());
  for (const id of ["application", "recursion"]) on(id, "click", () => actions.transform(id));
  on("help", "click", () => element("keys").showModal());
  on("close", "click", () => element("keys").close());
  element("controls").addEventListener("submit", (event) => event.preventDefault());

  // In small windows, rows scroll, and browsers may leave a focused control partly out of view.
  document.querySelector("header").addEventListener("focusin", ({ target }) => {
    if (target.matches(":focus-visible")) target.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  const tabs = element("tabs");
  tabs.addEventListener("click", ({ target }) => target.dataset.tab && actions.tab(target.dataset.tab));
  tabs.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const all = [...tabs.children];
    const next = all[(all.indexOf(event.target) + by + all.length) % all.length];
    actions.tab(next.dataset.tab);
    next.focus();
  });

  const keys = {
    "/": () => element("search").focus(),
    "?": () => element("keys").showModal(),
    n: actions.next, N: actions.previous, i: actions.invert, t: actions.theme, r: actions.reset,
    u: actions.nextUnit, c: actions.copyName, y: actions.copyStack, x: actions.save, l: actions.copyLink, s: actions.around, v: actions.lines,
    a: () => actions.transform("application"), e: () => actions.transform("recursion"), z: actions.undo, k: actions.tracks,
    f: () => actions.transform("focus"), m: () => actions.transform("merge"),
    h: () => actions.transform("hide"), o: () => actions.transform("collapse"),
    d: actions.compare, w: actions.whole, g: actions.focus, b: () => element("strip").focus(),
  };
  TABS.forEach((tab, at) => (keys[at + 1] = () => actions.tab(tab)));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || element("keys").open || !element("menu").hidden) return;
    if (event.target.matches("input, select")) {
      if (event.key !== "Escape") return;
      event.preventDefault(); // keep the search
      actions.focus();
      return;
    }
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}
