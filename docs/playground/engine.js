// Python for a page, in a worker that can be ended: `pipelabEngine.load(progress)` once, then `call(name, values)`.
// A page of the site may be left and come back without a new document, so there is one engine for all of them.
window.pipelabEngine ??= (() => {
  const base = new URL("./", document.currentScript.src);
  const waiting = new Map(); // id -> { resolve, reject, timer }
  let worker = null, ready = null, last = 0;

  class Stopped extends Error {} // it ran for too long

  function start(progress = () => {}) {
    const mine = new Worker(new URL("worker.js", base), { type: "module" });
    worker = mine;
    ready = new Promise((resolve, reject) => {
      mine.addEventListener("message", ({ data }) => {
        if ("loaded" in data) progress(data.loaded);
        else if ("ready" in data) resolve();
        else if ("failed" in data) { if (worker === mine) stop(); reject(new Error(data.failed)); }
        else answer(data);
      });
      mine.addEventListener("error", (event) => { if (worker === mine) stop(); reject(new Error(event.message || "the worker cannot be loaded")); });
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
    for (const { reject, timer } of waiting.values()) { clearTimeout(timer); reject(new Stopped("Python was started anew")); }
    waiting.clear();
  }

  return {
    Stopped,
    get loaded() { return worker !== null; },
    load(progress) { return ready ?? start(progress); },
    // Call a function of playground.py, or "module.function", with a list of values. Who takes longer than `seconds` is
    // ended, with a `Stopped`, and Python is started anew; loading does not count.
    async call(name, values, seconds = 2) {
      await (ready ?? start());
      const id = (last += 1);
      return new Promise((resolve, reject) => {
        const timer = setTimeout(() => { waiting.delete(id); reject(new Stopped(`stopped after ${seconds} s`)); restart(); }, 1000 * seconds);
        waiting.set(id, { resolve, reject, timer });
        worker.postMessage({ id, function: name, arguments: values });
      });
    },
  };
})();
