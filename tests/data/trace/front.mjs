// Calls the next service: front.mjs MODULES PORT NEXT. Responds with the spans' measurements.
import { randomBytes } from 'node:crypto';
import fs from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';

const [modules, port, next] = process.argv.slice(2);
const require = createRequire(modules + '/');
const { ThreadContext, getProcessContextAttributes } = require('@datadog/pprof').otelThreadCtx;
const { storeMetadata, TracerMetadata } = require('@datadog/libdatadog').load('process-discovery');
const attributes = getProcessContextAttributes(['http.request.method', 'http.route']);
// libdatadog puts datadog.local_root_span_id before these names.
const threadlocal = {
  attributeKeys: attributes['threadlocal.attribute_key_map'],
  schemaVersion: attributes['threadlocal.schema_version'],
  extraAttributes: Object.entries(attributes)
    .filter(([, value]) => Number.isInteger(value))
    .map(([key, intValue]) => ({ key, intValue })),
};
const metadata = [null, '1', 'host', 'front', null, null, null, null, threadlocal];
globalThis.kept = storeMetadata(new TracerMetadata(...metadata));

const zero = fs.openSync('/dev/zero');
const buffer = Buffer.alloc(1 << 20);
const kernel = () => fs.readSync(zero, buffer);
function user() {
  for (let turn = 0, sum = 0; turn < 200_000; turn++) sum = (sum * 31 + turn) | 0;
}
const cpuNs = () => {
  const { user, system } = process.threadCpuUsage();
  return 1000 * (user + system);
};

function work(ms, action) {
  const start = cpuNs();
  while (cpuNs() < start + ms * 1e6) action();
  return cpuNs() - start;
}

// A kept-alive connection's timer runs in the span that used it, seconds after that span ended.
const ask = (headers) =>
  new Promise((done, fail) => {
    const options = { host: '127.0.0.1', port: next, headers, agent: false };
    const request = http.get(options, async (answer) => {
      let text = '';
      for await (const part of answer) text += part;
      done(JSON.parse(text));
    });
    request.on('error', fail);
  });

async function handle(request) {
  const [, trace] = request.headers.traceparent.split('-');
  const ms = Number(request.headers.ms);
  const span = randomBytes(8);
  const values = [span.toString('hex'), request.method, '/checkout'];
  return new ThreadContext(Buffer.from(trace, 'hex'), span, 1, values).run(async () => {
    const start = [process.hrtime.bigint(), cpuNs()];
    const used = [work(ms, user), work(ms, kernel)];
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
    const traceparent = `00-${trace}-${span.toString('hex')}-01`;
    const others = await ask({ traceparent, ms });
    used[0] += work(ms / 8, user); // the span is current again
    const waited = Number(process.hrtime.bigint() - start[0]) - (cpuNs() - start[1]);
    return [{ service: 'front', span: span.toString('hex'), used, waited }, ...others];
  });
}

globalThis.gc(); // the first collections move the writer's storage
globalThis.gc();
http
  .createServer(async (request, response) => {
    response.end(JSON.stringify(await handle(request)));
  })
  .listen(port, '127.0.0.1');
