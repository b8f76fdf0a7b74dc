// FNV-1a, with its upper bits mixed in.
export function hash(text) {
  let found = 2166136261;
  for (let i = 0; i < text.length; i += 1) found = Math.imul(found ^ text.charCodeAt(i), 16777619);
  return (found ^ (found >>> 15)) >>> 0;
}
