/**
 * Builds what the wheel carries: `loader.js` (kept in every saved notebook, so it is tiny) and the
 * panel's program, `panel.js` with `panel.css`. Each begins with the hash of the sources it was
 * made from; `build_hook.py` computes the same one and builds again where they differ.
 */
import { createHash } from 'node:crypto';
import { readFileSync, readdirSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));

/** SHA-256 over path and content of everything that decides what comes out. */
function sourcesHash() {
  const sources = readdirSync(`${here}src`, { recursive: true })
    .map(path => `src/${path.replaceAll('\\', '/')}`)
    .filter(path => /\.(ts|css)$/.test(path) && !path.includes('__tests__'));
  const hash = createHash('sha256');
  for (const path of [...sources, 'build.mjs', 'package.json', 'yarn.lock'].sort()) {
    hash
      .update(`${path}\0`)
      .update(readFileSync(here + path))
      .update('\0');
  }
  return hash.digest('hex');
}

const says = `/* nbtrain ${sourcesHash()} */`;
await build({
  absWorkingDir: here,
  entryPoints: { loader: 'src/loader/index.ts', panel: 'src/widget/index.ts' },
  outdir: '../nbtrain/notebook/static',
  bundle: true,
  format: 'esm',
  target: 'es2022',
  charset: 'utf8',
  legalComments: 'none',
  minify: true,
  banner: { js: says, css: says },
  logLevel: 'info'
});
