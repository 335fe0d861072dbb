// Builds the pages: `make page`. Users need neither Node nor this file: the results are committed.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

const here = import.meta.dirname;
const dashboard = join(here, "../rollbook/dashboard/static");
const playground = join(here, "../rollbook/envs/server/static");

// tests/unit/dashboard/test_dashboard_page.py computes the same digest, so that a change without a build is noticed.
function digest() {
  const files = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
  const all = [...files, ...["build.mjs", "index.html", "playground.html", "package-lock.json", "tsconfig.json"].map((name) => join(here, name))];
  const names = all.map((file) => relative(here, file).split(sep).join("/")).sort();
  const hash = createHash("sha256");
  for (const name of names) hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  return hash.digest("hex");
}

const sources = digest();
for (const [entry, page, target] of [["dashboard", "index.html", dashboard], ["playground", "playground.html", playground]]) {
  rmSync(target, { recursive: true, force: true });
  mkdirSync(target, { recursive: true });
  await build({
    entryPoints: { [entry]: join(here, `src/${entry}.tsx`) },
    outdir: target,
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
    banner: { js: `/* Built by \`make page\` from dashboard_page. Sources: sha256:${sources}. Contains Preact and uPlot (MIT licence). */` },
  });
  // The digest in the address makes browsers load a new build at once and keep it as long as it is current.
  const html = readFileSync(join(here, page), "utf8").replaceAll(/(\.(?:js|css))"/g, `$1?v=${sources.slice(0, 12)}"`);
  writeFileSync(join(target, page), html);
  cpSync(join(here, "src/icon.svg"), join(target, "icon.svg"));
}
