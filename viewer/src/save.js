// Saves the shown data: functions as CSV, a graph as SVG or PNG.

// Saves a file as a download.
export function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Formats rows as RFC 4180. Spreadsheets evaluate texts that start like a formula; such texts are prefixed
// with an apostrophe, so that they are shown as text (OWASP, "CSV Injection"). Numbers are not changed.
export function csv(rows) {
  const inert = (value) => (typeof value === "string" && /^[=+\-@\t\r\n]/.test(value) ? `'${value}` : String(value));
  const cell = (value) => {
    const text = inert(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

const escape = (text) => text.replace(/[<>&"]/g, (char) => `&#${char.charCodeAt(0)};`);

// `shapes`: x, y, width and height in pixels, colour, name, and title (shown at the pointer).
export function svg(shapes, { width, height, back, text }) {
  const letter = 7; // pixels, about
  const drawn = shapes.map((shape) => {
    const room = Math.floor((shape.width - 8) / letter);
    const name = shape.name.length > room ? `${shape.name.slice(0, Math.max(0, room - 1))}…` : shape.name;
    const label = room > 2 ? `<text x="${(shape.x + 4).toFixed(1)}" y="${shape.y + 13}">${escape(name)}</text>` : "";
    const place = `x="${shape.x.toFixed(2)}" y="${shape.y}" width="${Math.max(0.4, shape.width - 0.5).toFixed(2)}"`;
    return `<g><title>${escape(shape.title)}</title>` +
      `<rect ${place} height="${shape.height - 1}" fill="${shape.colour}"/>${label}</g>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
    `font-family="sans-serif" font-size="12" fill="${text}">` +
    `<rect width="100%" height="100%" fill="${back}"/>${drawn.join("\n")}</svg>\n`;
}
