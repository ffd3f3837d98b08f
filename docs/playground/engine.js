// Python for a page, in a worker that can be ended: `pipelabEngine.load(progress)` once, then `call(name, values)`.
// A page of the site may be left and come back without a new document, so there is one engine for all of them.
window.pipelabEngine ??= (() => {
  const base = new URL("./", document.currentScript.src);
  const waiting = new Map(); // id -> { resolve, reject, timer }
  let worker = null,
    ready = null,
    last = 0,
    module = null;

  class Stopped extends Error {} // it ran for too long

  // Compile Python once for all workers. The file is stored compressed, as not every server compresses what it sends.
  async function compile(progress) {
    const answer = await fetch(new URL("pyodide/pyodide.asm.wasm.deflate", base));
    if (!answer.ok) throw new Error(`${answer.url} cannot be loaded (${answer.status})`);
    let loaded = 0;
    const count = new TransformStream({
      transform(chunk, out) {
        progress((loaded += chunk.byteLength));
        out.enqueue(chunk);
      },
    });
    const body = answer.body.pipeThrough(count).pipeThrough(new DecompressionStream("deflate"));
    return WebAssembly.compileStreaming(new Response(body, { headers: { "Content-Type": "application/wasm" } }));
  }

  function start(progress = () => {}) {
    const mine = new Worker(new URL("worker.js", base), { type: "module" }),
      loaded = [0, 0];
    const add = (part, bytes) => {
      loaded[part] = bytes;
      progress(loaded[0] + loaded[1]);
    };
    worker = mine;
    module ??= compile((bytes) => add(0, bytes));
    ready = new Promise((resolve, reject) => {
      module.then(
        (compiled) => mine.postMessage({ compiled }),
        (error) => {
          module = null;
          if (worker === mine) stop();
          reject(error);
        },
      );
      mine.addEventListener("message", ({ data }) => {
        if ("loaded" in data) add(1, data.loaded);
        else if ("ready" in data) resolve();
        else if ("failed" in data) {
          if (worker === mine) stop();
          reject(new Error(data.failed));
        } else answer(data);
      });
      mine.addEventListener("error", (event) => {
        if (worker === mine) stop();
        reject(new Error(event.message || "the worker cannot be loaded"));
      });
    });
    return ready;
  }

  function stop() {
    worker?.terminate();
    worker = ready = null;
  }

  function answer({ id, result, error, ended }) {
    const { resolve, reject, timer } = waiting.get(id) ?? {};
    waiting.delete(id);
    clearTimeout(timer);
    if (ended) restart();
    if (error === undefined) resolve?.(result);
    else reject?.(new Error(error));
  }

  function restart() {
    stop();
    start().catch(() => {}); // whoever calls next is told
    for (const { reject, timer } of waiting.values()) {
      clearTimeout(timer);
      reject(new Stopped("Python was started anew"));
    }
    waiting.clear();
  }

  return {
    Stopped,
    get loaded() {
      return worker !== null;
    },
    load(progress) {
      return ready ?? start(progress);
    },
    // Call a function of playground.py, or "module.function", with a list of values. Who takes longer than `seconds` is
    // ended, with a `Stopped`, and Python is started anew; loading does not count.
    async call(name, values, seconds = 2) {
      await (ready ?? start());
      const id = (last += 1);
      return new Promise((resolve, reject) => {
        const timer = setTimeout(() => {
          waiting.delete(id);
          reject(new Stopped(`stopped after ${seconds} s`));
          restart();
        }, 1000 * seconds);
        waiting.set(id, { resolve, reject, timer });
        worker.postMessage({ id, function: name, arguments: values });
      });
    },
  };
})();
