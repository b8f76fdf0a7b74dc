// Typical work of scripts: compiled, interpreted and built-in functions, garbage collection.
const fib = (n) => (n < 2 ? n : fib(n - 1) + fib(n - 2));

const work = [
  () => fib(22),
  () => JSON.parse(JSON.stringify({ a: Array(200).fill({ b: 1, c: "x" }) })),
  () => [...Array(500).keys()].sort((a, b) => ((a * 7919) % 101) - ((b * 7919) % 101)),
  () => "abc".repeat(1000).replace(/b+/g, (found) => found.toUpperCase()),
  () => new Map(Array.from({ length: 500 }, (_, i) => [`key ${i}`, { i }])),
  () => Buffer.from("some text ".repeat(500)).toString("base64"),
  () => {
    try {
      null.missing();
    } catch (error) {
      return error.stack;
    }
  },
];

for (let n = 0; ; n++) work[n % work.length]();
