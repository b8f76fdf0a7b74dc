// Tasks in several threads that change their contexts at random, await, and log the times, until
// the input ends: program.mjs MODULES WRITER LOG THREADS OFFSET. MODULES is the directory with the
// packages. OFFSET is added to the monotonic clock, for times since the boot.
import { AsyncLocalStorage } from 'node:async_hooks';
import fs from 'node:fs';
import { createRequire } from 'node:module';
import { setImmediate as nextTurn, setTimeout as sleep } from 'node:timers/promises';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';

const [modules, writer, log, threads, offset] = isMainThread ? process.argv.slice(2) : workerData;
const require = createRequire(modules + '/');
const TASKS = 6;
const MOST = 60000;
const LINE_BYTES = 64;

const now = () => process.hrtime.bigint() + BigInt(offset);
const draw = (most) => Math.floor(Math.random() * most);

function work() {
  const end = now() + BigInt(draw(1_500_000));
  let text = [];
  while (now() < end) {
    text.push({ now: String(text.length) }); // garbage to collect
    if (text.length > 1000) text = [];
  }
}

const pauses = [() => nextTurn(), () => sleep(draw(3)), () => Promise.resolve()];

// An application's other storages are in the same map as the writer's.
const others = Array.from({ length: 24 }, () => new AsyncLocalStorage());

async function run(log, { ThreadContext, clearContext }, number) {
  let stop = false;
  parentPort.on('message', () => (stop = true));
  const tid = BigInt(fs.readlinkSync('/proc/thread-self').split('/').at(-1));
  let last = now();
  const segment = (trace, span) => {
    const begin = log.bytes;
    const since = now();
    work();
    const until = now();
    if (log.pending !== null) log.buffer.writeBigUInt64LE(since, log.pending + 24);
    log.pending = null;
    if (trace && begin < log.buffer.length) {
      [last, since, until, 2n ** 63n, tid].forEach((word, at) =>
        log.buffer.writeBigUInt64LE(word, begin + 8 * at),
      );
      log.buffer.set(trace, begin + 40);
      log.buffer.set(span, begin + 56);
      log.pending = begin;
      log.bytes += LINE_BYTES;
    }
    last = until;
  };
  const task = async () => {
    while (!stop) {
      if (draw(4) === 0) {
        clearContext();
        segment();
        await pauses[draw(3)]();
        continue;
      }
      const trace = crypto.getRandomValues(new Uint8Array(16));
      const span = crypto.getRandomValues(new Uint8Array(8));
      trace[8] = number;
      const hex = Buffer.from(span).toString('hex');
      const context = new ThreadContext(trace, span, ...flags(trace), [hex, hex]);
      await others[draw(others.length)].run({}, () =>
        context.run(async () => {
          segment(trace, span); // first and last: other tasks may be in the span
          for (let count = draw(4); count > 0 && !stop; count--) {
            await pauses[draw(3)]();
            segment(trace, span);
          }
        }),
      );
      segment();
    }
  };
  // The first collections move the writer's storage; until then, a reader may miss it.
  const none = new ThreadContext(new Uint8Array(16), new Uint8Array(8), ...flags([0]), ['', '']);
  none.run(() => [gc(), gc()]);
  for (const other of others.slice(0, draw(others.length))) other.enterWith({});
  await Promise.all(Array.from({ length: TASKS }, () => task()));
  clearContext();
  segment();
}

// Before version 5.20, the writer accepts no flags.
const flags = (trace) => (writer === '@datadog/pprof' ? [trace[0] & 1] : []);

if (isMainThread) {
  const { getProcessContextAttributes } = require(writer + '/out/src/otel-thread-ctx');
  const attributes = getProcessContextAttributes(['span.hex']);
  const { storeMetadata, TracerMetadata } = require('@datadog/libdatadog').load('process-discovery');
  const threadlocal = {
    attributeKeys: attributes['threadlocal.attribute_key_map'],
    schemaVersion: attributes['threadlocal.schema_version'],
    extraAttributes: Object.entries(attributes)
      .filter(([, value]) => Number.isInteger(value))
      .map(([key, intValue]) => ({ key, intValue })),
  };
  globalThis.kept = storeMetadata(
    new TracerMetadata(null, '1', 'host', 'native', null, null, null, null, threadlocal),
  );
  const workers = Array.from(
    { length: Number(threads) },
    (_, number) => new Worker(new URL(import.meta.url), {
      name: 'program', workerData: [modules, writer, log, number + 1, offset],
    }),
  );
  console.log('ready');
  process.stdin.resume();
  process.stdin.on('end', async () => {
    const parts = workers.map((worker) => new Promise((done, fail) => {
      worker.on('message', done);
      worker.on('error', fail);
      worker.postMessage('stop');
    }));
    fs.writeFileSync(log, Buffer.concat(await Promise.all(parts)));
    console.log('done');
    process.exit(0);
  });
} else {
  const lines = { buffer: Buffer.alloc(MOST * LINE_BYTES), bytes: 0, pending: null };
  await run(lines, require(writer + '/out/src/otel-thread-ctx'), Number(threads));
  parentPort.postMessage(lines.buffer.subarray(0, lines.bytes));
}
