// Bundles src/ into one page without external references.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const bundle = async (entry, options) => {
  const { outputFiles } = await build({
    entryPoints: [entry], bundle: true, minify: true, charset: "utf8", write: false, ...options,
  });
  return outputFiles[0].text.trim();
};
const style = await bundle("src/page.css", {});
const script = (await bundle("src/main.js", { format: "iife", target: "es2022", legalComments: "none" }))
  .replaceAll("</script", "<\\/script");

// A test without Node verifies by this hash that the page was built from these sources.
const sources = createHash("sha256");
for (const path of ["package-lock.json", ...readdirSync("src").sort().map((name) => `src/${name}`)]) {
  sources.update(readFileSync(path));
}

const policy = (text) => `sha256-${createHash("sha256").update(text).digest("base64")}`;
const values = {
  "/*SOURCES*/": sources.digest("hex"),
  "/*STYLE*/": style,
  "/*STYLE-HASH*/": policy(style),
  "/*SCRIPT*/": script,
  "/*SCRIPT-HASH*/": policy(script),
};
const page = Object.entries(values).reduce(
  (text, [place, value]) => text.replace(place, () => value),
  readFileSync("src/page.html", "utf8"),
);
writeFileSync(new URL("../otel_kprofiler/formats/assets/flamegraph.html", import.meta.url), page);
