// Colours of frames. Kinds have the hues of page.css. Each user binary has one of the tints below,
// by its name, so that it has the same one in every profile, unless a heavier binary has taken it.

import { hash } from "./hash.js";

const SHADES = 4;
// Hues between those of the kernel (240), modules (80), BPF (345), Python (40) and search (105), each
// in two strengths: lightness on a light and on a dark page, chroma, hue (OKLCH).
const TINTS = [150, 295, 268, 192, 124, 318].flatMap((hue) => [
  [0.77, 0.38, 0.12, hue],
  [0.86, 0.45, 0.06, hue],
]);
const tints = new Map(); // of the binaries that reserved one

const preferred = (binary) => hash(binary) % TINTS.length;

// Gives different tints to the first of these binaries, as many as there are tints.
export function reserve(binaries) {
  const taken = new Set();
  for (const binary of binaries.slice(0, TINTS.length)) {
    let tint = preferred(binary);
    while (taken.has(tint)) tint = (tint + 5) % TINTS.length;
    taken.add(tint);
    tints.set(binary, tint);
  }
}

// The colour of a family, as profile.family() has it, in the shade of a function.
export function colourOf({ kind, binary }, name = "") {
  const shade = name ? (hash(name) >>> 4) % SHADES : 0;
  if (!binary) return `var(--${kind}-${shade})`;
  const [light, dark, chroma, hue] = TINTS[tints.get(binary) ?? preferred(binary)];
  const tone = (lightness) => `oklch(${(lightness + 0.02 * shade).toFixed(2)} ${chroma} ${hue})`;
  return `light-dark(${tone(light)}, ${tone(dark)})`;
}

// Colours of the style sheet as a canvas takes them, until the theme changes.
const resolved = new Map();
export function onCanvas(colour) {
  if (!resolved.has(colour)) {
    const probe = document.body.appendChild(document.createElement("span"));
    probe.style.color = colour;
    resolved.set(colour, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(colour);
}

export function forgetTheme() {
  resolved.clear();
}
