// Bundles src/ into one page without outside references, and collects the licences of what is in it.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const ASSETS = new URL("../otel_kprofiler/formats/assets/", import.meta.url);

const bundled = await build({
  entryPoints: ["src/main.js"],
  bundle: true,
  minify: true,
  keepNames: true, // d3-flame-graph knows its nodes by the name of their class
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  loader: { ".css": "empty" }, // the library's style is replaced by src/page.css
  metafile: true,
  preserveSymlinks: true, // node_modules may be a link
  write: false,
});
const style = await build({
  entryPoints: ["src/page.css"],
  minify: true,
  charset: "utf8",
  write: false,
});

// By this a test sees, without Node, whether the page was built from these sources.
const sources = createHash("sha256");
for (const path of ["package-lock.json", ...readdirSync("src").sort().map((name) => `src/${name}`)]) {
  sources.update(readFileSync(path));
}

const script = bundled.outputFiles[0].text.trim().replaceAll("</script", "<\\/script");
const page = readFileSync("src/page.html", "utf8")
  .replace("/*SOURCES*/", sources.digest("hex"))
  .replace("/*STYLE*/", () => style.outputFiles[0].text.trim())
  .replace("/*SCRIPT*/", () => script);
writeFileSync(new URL("flamegraph.html", ASSETS), page);

const packages = new Set(
  Object.keys(bundled.metafile.inputs)
    .filter((path) => path.startsWith("node_modules/"))
    .map((path) => path.split("/")[1]),
);
const licences = [...packages].sort().map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  const text = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});
const heading = "Software that is part of flamegraph.html, with its licences.\n";
writeFileSync(new URL("LICENSES.txt", ASSETS), [heading, ...licences].join(`\n${"-".repeat(72)}\n\n`));
