// Python in the browser: a module worker that loads Pyodide and pipelab from the site's own files, and then calls
// functions for the page. A message { id, function, arguments } is answered with { id, result } or { id, error }.
// `function` is a name in playground.py, or "module.name" of another module beside it; arguments and results are JSON.
// Before the first answer it says { loaded: bytes } again and again, then { ready: true }, or { failed: reason }. It
// waits for a message { compiled }, the WebAssembly module, which engine.js compiles once for all its workers.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const base = new URL("./", import.meta.url);
let loaded = 0;

const compiled = new Promise((resolve) => {
  self.addEventListener("message", ({ data }) => {
    if (data.compiled) resolve(data.compiled);
  });
});
WebAssembly.instantiateStreaming = async (_, imports) => {
  const module = await compiled;
  return { module, instance: await WebAssembly.instantiate(module, imports) };
};

// What is loaded is counted.
const plainFetch = self.fetch;
self.fetch = async (address, options) => {
  const url = new URL(address instanceof Request ? address.url : address, base);
  if (url.pathname.endsWith(".wasm")) return new Response();
  const answer = await plainFetch(url, options);
  if (!answer.ok) throw new Error(`${url.pathname} cannot be loaded (${answer.status})`);
  const count = new TransformStream({
    transform(chunk, out) {
      loaded += chunk.byteLength;
      postMessage({ loaded });
      out.enqueue(chunk);
    },
  });
  const body = answer.body.pipeThrough(count);
  return new Response(body, { headers: answer.headers });
};

async function load() {
  const archive = fetch(new URL("pipelab.zip", base)).then((answer) => answer.arrayBuffer());
  const pyodide = await loadPyodide({ indexURL: new URL("pyodide/", base).href, fullStdLib: false });
  self.fetch = plainFetch;
  pyodide.setStdin({ error: true });
  pyodide.unpackArchive(await archive, "zip", { extractDir: "/pipelab" });
  return pyodide.runPython(`
import json, sys
from importlib import import_module
sys.path.insert(0, "/pipelab")

def call(function, arguments):
    module, _, name = function.rpartition(".")
    return json.dumps(getattr(import_module(module or "playground"), name)(*json.loads(arguments)))

import playground
call`);
}

const loading = load();
loading.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: error.message }),
);

self.addEventListener("message", async ({ data: { id, function: name, arguments: values } }) => {
  if (id === undefined) return;
  try {
    const call = await loading;
    postMessage({ id, result: JSON.parse(call(name, JSON.stringify(values))) });
  } catch (error) {
    // After anything but Python's own errors (no memory left, for example), this Python cannot go on.
    postMessage({ id, error: error.message, ended: error.name !== "PythonError" });
  }
});
