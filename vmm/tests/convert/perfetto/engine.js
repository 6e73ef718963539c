// Runs the worker in which Perfetto's user interface has trace_processor: node engine.js ENGINE_BUNDLE QUESTION ANSWER.
// QUESTION is a stream of requests; pieces of the answer are appended to ANSWER, a line on standard output each. Ends
// with standard input.
const fs = require('fs'), path = require('path'), vm = require('vm');
const {MessageChannel} = require('worker_threads');
const [bundle, question, answer] = process.argv.slice(2);
const place = path.dirname(path.resolve(bundle));
const file = (url) => fs.readFileSync(path.join(place, path.basename(String(url))));

const {port1, port2} = new MessageChannel();
port1.on('message', (piece) => {
  if (!(piece instanceof Uint8Array)) return;
  fs.appendFileSync(answer, piece);
  console.log(piece.length);
});
// A browser's ports hand over events.
const port = {
  postMessage: (data) => port2.postMessage(data),
  set onmessage(hear) { port2.on('message', (data) => hear({data})); },
};

// What the worker finds in a browser.
const self = {location: {href: 'file://' + bundle, pathname: place + '/'}, importScripts() {}};
const globals = {
  self, WebAssembly, TextDecoder, TextEncoder, URL, Response, performance, setTimeout, clearTimeout, queueMicrotask,
  crypto: globalThis.crypto, importScripts: self.importScripts, location: self.location, WorkerGlobalScope() {},
  console: {log: console.error, warn: console.error, error: console.error},
  async fetch(url) { return new Response(file(url), {headers: {'Content-Type': 'application/wasm'}}); },
  XMLHttpRequest: class {
    open(_, url) { this.url = url; }
    setRequestHeader() {}
    send() {
      this.response = new Uint8Array(file(this.url)).buffer;
      this.status = 200;
      this.onload?.();
    }
  },
};
globals.globalThis = globals;
for (const name of ['Object', 'Array', 'Function', 'Error', 'TypeError', 'RangeError', 'Promise', 'Math', 'Date', 'BigInt',
  'ArrayBuffer', 'SharedArrayBuffer', 'DataView', 'Uint8Array', 'Int8Array', 'Uint16Array', 'Int16Array', 'Uint32Array',
  'Int32Array', 'Float32Array', 'Float64Array', 'BigInt64Array', 'BigUint64Array']) {
  globals[name] = globalThis[name];
}
vm.createContext(globals);
vm.runInContext(fs.readFileSync(bundle, 'utf8'), globals);
(self.onmessage ?? globals.onmessage)({data: port, ports: [port]});
port1.postMessage(new Uint8Array(fs.readFileSync(question)));
process.stdin.on('end', () => process.exit(0)).resume();
