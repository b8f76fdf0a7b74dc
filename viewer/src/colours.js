// Colours of frames. The hues of kinds are those in page.css. Each user binary gets one of the tints
// below, chosen by its name, so that it has the same tint in every profile, unless a binary with more
// samples has taken it.

import { hash } from "./hash.js";

const SHADES = 4;
// Hues between the colours of the kernel (240), modules (80), BPF (345), Python (40) and search (105),
// each in two strengths: lightness on a light and on a dark page, chroma, hue (OKLCH).
const TINTS = [150, 295, 268, 192, 124, 318].flatMap((hue) => [
  [0.77, 0.38, 0.12, hue],
  [0.86, 0.45, 0.06, hue],
]);
const tints = new Map(); // by binary, for binaries with a reserved tint

const preferred = (binary) => hash(binary) % TINTS.length;

// Assigns different tints to the first binaries, until all tints are used.
export function reserve(binaries) {
  const taken = new Set();
  for (const binary of binaries.slice(0, TINTS.length)) {
    let tint = preferred(binary);
    while (taken.has(tint)) tint = (tint + 5) % TINTS.length;
    taken.add(tint);
    tints.set(binary, tint);
  }
}

// Returns the colour of a family (see profile.family()), in the shade of a function.
export function colourOf({ kind, binary }, name = "") {
  const shade = name ? (hash(name) >>> 4) % SHADES : 0;
  if (!binary) return `var(--${kind}-${shade})`;
  const [light, dark, chroma, hue] = TINTS[tints.get(binary) ?? preferred(binary)];
  const tone = (lightness) => `oklch(${(lightness + 0.02 * shade).toFixed(2)} ${chroma} ${hue})`;
  return `light-dark(${tone(light)}, ${tone(dark)})`;
}

// The style sheet's colours in the form that a canvas needs, cached until the theme changes.
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
