// Rewrites the tree of all stacks, from which graphs, tables and counts are made.
//
// A transform is [NAME] or [NAME, id of a function]:
//
//   application        merges frames of the Python interpreter and of libc into their callers
//   focus   function   keeps stacks with the function, from its outermost frame on; drops all others
//   merge   function   merges frames of the function into their callers
//   hide    function   drops stacks with the function
//   collapse function  replaces the frames from its outermost to its innermost by one frame
//   recursion          merges consecutive frames of the same function
//
// Each stack keeps its process. Transforms are applied one after the other.

const INTERPRETER = /^(?:lib)?python\d[\d.]*[a-z]*(?:\.so[\d.]*)?$/;
const LIBC = /^(?:lib(?:c|pthread)|ld)(?:[-.][\w.-]*)?\.so[\d.]*$/;
const USER = 4; // in KINDS

export const TRANSFORMS = ["application", "focus", "merge", "hide", "collapse", "recursion"];
const TOGGLES = new Map([["application", 0], ["recursion", Infinity]]);

// Returns whether the transform needs no function.
export const isToggle = (name) => TOGGLES.has(name);

// Returns whether the transform can drop samples.
export const drops = ([name]) => name === "focus" || name === "hide";

// Returns the transforms with one added. Transforms without a function have fixed places: application
// frames first, and recursion last, so that it applies to the result of the others.
export function withTransform(transforms, [name, id]) {
  const rest = transforms.filter((one) => one[0] !== name || one[1] !== id);
  if (TOGGLES.get(name) === 0) return [[name], ...rest];
  const last = rest.filter(([of]) => TOGGLES.get(of) > 0);
  return [...rest.filter((one) => !last.includes(one)), ...(id ? [[name, id]] : [[name]]), ...last];
}

// Returns whether a module's frames do not belong to the application.
export function isRuntime(module) {
  const name = module.replace(/ \(deleted\)$/, "").replace(/.*\//, "");
  return INTERPRETER.test(name) || LIBC.test(name);
}

// Returns the tree of the same stacks after transforms; frames that differ only by line are merged.
// `nodeOf` maps each node of the recorded tree to its node in the new one, or to -1 if its samples are
// dropped.
export function transformed(recorded, transforms) {
  const { nodes: { parent, frame }, looks } = recorded;
  let tree = { parent, frame, nodeOf: Int32Array.from(parent, (_, node) => node) };
  if (looks.some((look, at) => look !== at)) tree = rewrite(recorded, tree, ({ of, above, place }) => place(above, of));
  for (const [name, id] of transforms) tree = rewrite(recorded, tree, RULES[name](recorded, functionOf(recorded, id)));
  return tree;
}

const functionOf = ({ functions }, id) => functions.findIndex((one) => one.id === id);

// Each creates a rule, which returns for a node its place in the new tree, or GONE. The rule gets `of`
// (its frame), `function`, `node` and `up` (the numbers of the node and its caller), `above` (the caller's
// place, -1 at a root), `place` (creates a frame below a place), and `drop` (drops the samples of this
// node alone).
const GONE = -2;
const RULES = {
  application({ strings, frames: { module, kind } }) {
    const hidden = strings.map(isRuntime);
    return ({ of, above, place }) => (kind[of] === USER && hidden[module[of]] ? above : place(above, of));
  },
  merge: (_, chosen) => ({ of, function: at, above, place }) => (at === chosen ? above : place(above, of)),
  hide: (_, chosen) => ({ of, function: at, above, place }) => (at === chosen ? GONE : place(above, of)),
  focus(_, chosen) {
    const inside = [];
    return ({ of, function: at, node, up, above, place, drop }) => {
      inside[node] = at === chosen || Boolean(inside[up]);
      if (inside[node]) return place(above, of);
      drop();
      return up < 0 ? place(above, of) : above; // the process
    };
  },
  collapse(_, chosen) {
    const outermost = [];
    return ({ of, function: at, node, up, above, place }) => {
      outermost[node] = outermost[up];
      if (at !== chosen) return place(above, of);
      return (outermost[node] ??= place(above, of));
    };
  },
  recursion() {
    const functions = [];
    return ({ of, function: at, node, up, above, place }) => {
      functions[node] = at;
      return functions[up] === at ? above : place(above, of);
    };
  },
};

function rewrite({ looks, functionOf: functions }, { parent, frame, nodeOf }, rule) {
  const [parents, frames, known] = [[], [], new Map()];
  const place = (above, recorded) => {
    const of = looks[recorded];
    const key = (above + 1) * looks.length + of;
    if (!known.has(key)) {
      known.set(key, parents.length);
      parents.push(above);
      frames.push(of);
    }
    return known.get(key);
  };
  const places = new Int32Array(parent.length);
  const stands = new Int32Array(parent.length);
  let isDropped = false;
  const drop = () => (isDropped = true);
  for (let node = 0; node < parent.length; node += 1) {
    const [up, of] = [parent[node], frame[node]];
    const above = up < 0 ? -1 : places[up];
    isDropped = false;
    places[node] = above === GONE ? GONE : rule({ of, function: functions[of], node, up, above, place, drop });
    stands[node] = isDropped || places[node] === GONE ? -1 : places[node];
  }
  return {
    parent: Int32Array.from(parents), frame: Uint32Array.from(frames),
    nodeOf: nodeOf.map((node) => (node < 0 ? -1 : stands[node])),
  };
}

const WORDS = {
  focus: (name) => `focus ${name}`, merge: (name) => `merged ${name}`,
  hide: (name) => `without ${name}`, collapse: (name) => `collapsed ${name}`,
};

// Describes a transform in words.
export function describe(profile, [name, id]) {
  const at = functionOf(profile, id);
  return WORDS[name](at < 0 ? "a function without samples" : profile.name(profile.functions[at].frame));
}
