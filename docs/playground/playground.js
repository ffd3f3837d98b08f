// The playground's page: an editor and sliders.
// engine.js runs the code, and the tracer's page in a frame shows what it says.
// Nothing that code, links or Python bring becomes markup: it is text, attributes, or data for the frame.
(() => {
  const root = document.getElementById("pg");
  if (!root) return;
  const base = new URL("./", document.currentScript.src),
    engine = window.pipelabEngine;
  const WAIT = 150,
    SECONDS = 2,
    MOST_LINK = 8192,
    MOST_CODE = 200_000,
    FILE = "schedule.py";
  const find = (selector) => root.querySelector(selector);
  const [menu, state, frame, fault, form] = [
    "#pg-schedule",
    "#pg-state",
    ".pg-frame",
    ".pg-fault",
    "form",
  ].map(find);
  const inputs = [...form.elements].filter((each) => each.name),
    EDITED = "edited"; // the menu's entry for other code
  const asked = { timer: 0, running: false, again: false };
  let schedules = {},
    view = "",
    pictured = false,
    restored = false;

  const say = (text) => {
    state.value = text;
  };
  const tag = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  // The editor, which marks the line that a fault names; without CodeMirror, the textarea.
  const code =
    window.pipelabEditor?.(find("#pg-code"), edited) ??
    Object.assign(find("#pg-code"), { mark() {}, oninput: edited });

  function edited() {
    code.mark(null);
    menu.value = Object.keys(schedules).find((name) => schedules[name].code === code.value) ?? EDITED;
    later(WAIT);
  }

  // The sliders.
  function settings() {
    const value = (name) => {
      const input = form.elements[name];
      return input.dataset.zero && Number(input.value) === 0 ? undefined : Number(input.value);
    };
    const cost = Object.fromEntries(
      ["forward", "backward", "input_grad", "weight_grad", "all_reduce", "latency"]
        .map((name) => [name, value(name)])
        .filter(([name, each]) => each !== undefined && !(name === "all_reduce" && !each)),
    );
    return { ranks: value("ranks"), microbatches: value("microbatches"), cap: value("cap"), cost };
  }

  function labelled() {
    for (const each of inputs)
      each.parentElement.querySelector("output").value = (Number(each.value) === 0 && each.dataset.zero) || each.value;
  }

  // Which sliders the code leaves open, and which kinds of actions there are.
  function opened(sets, kinds) {
    const sizes = ["ranks", "microbatches"];
    for (const each of inputs)
      each.disabled = sets === "all" ? each.name !== "cap" : sets === "sizes" && sizes.includes(each.name);
    const note = find(".pg-note");
    note.hidden = sets === "nothing";
    note.textContent =
      sets === "all" ? "The code sets the sizes and the times itself." : "The code sets the sizes itself.";
    if (kinds) for (const each of form.querySelectorAll("[data-kind]")) each.hidden = !(each.dataset.kind in kinds);
  }

  form.addEventListener("input", () => {
    labelled();
    later(20);
  });
  form.addEventListener("submit", (event) => event.preventDefault());

  // Running the code: one run at a time, and of the edits meanwhile only the last.
  function later(wait) {
    clearTimeout(asked.timer);
    asked.timer = setTimeout(run, wait);
  }

  async function run() {
    if (!root.isConnected || !engine.loaded) return showGiven();
    if (asked.running) {
      asked.again = true;
      return;
    }
    Object.assign(asked, { running: true, again: false });
    const slow = setTimeout(() => say("running …"), 300);
    performance.mark("pipelab-asked");
    try {
      await engine.load();
      show(await engine.call("draw", [code.value, settings()], SECONDS));
      say("");
      kept();
    } catch (error) {
      const stopped = error instanceof engine.Stopped;
      show({
        fault: stopped
          ? `${FILE} was stopped after ${SECONDS} s\n` +
            "  try: does a loop never end? Otherwise, fewer ranks or micro-batches"
          : error.message,
        line: null,
        pictures: [],
        printed: "",
        sets: "nothing",
      });
      say(stopped ? "starting Python anew …" : "");
      if (stopped)
        engine.load().then(
          () => say(""),
          (reason) => say(reason.message),
        );
    }
    clearTimeout(slow);
    asked.running = false;
    if (asked.again) run();
  }

  function show(answer) {
    opened(answer.sets, answer.content?.data.kinds);
    const printed = find(".pg-printed");
    printed.hidden = !answer.printed;
    printed.querySelector("pre").textContent = answer.printed;
    // Under a fault, the last picture without one stays.
    pictured ||= Boolean(answer.content);
    frame.hidden = !pictured;
    frame.inert = !answer.content;
    fault.hidden = Boolean(answer.content);
    code.mark(answer.line ?? null);
    if (answer.content) return draw(answer.content, answer.other);
    const said = ({ fault: words, pictures }) => [
      Object.assign(tag("pre", words), { tabIndex: 0 }), // long lines scroll
      ...pictures.map((each) => {
        const made = window.pipelabOrder(each);
        if (words.startsWith(each.title)) made.querySelector("h3").remove(); // the words say it
        return made;
      }),
    ];
    fault.replaceChildren(...said(answer));
    if (answer.more) {
      const more = tag("details", "");
      more.append(tag("summary", answer.more.title), ...said(answer.more));
      fault.append(more);
    }
    performance.mark("pipelab-shown");
  }

  // The frame: data go in, its height and its colours follow.
  const framed = new Promise((resolve) => {
    const ready = () =>
      frame.contentDocument?.readyState === "complete" &&
      frame.contentWindow.location.href !== "about:blank" &&
      typeof frame.contentWindow.replace === "function";
    if (ready()) resolve();
    else frame.addEventListener("load", resolve, { once: true });
  });

  async function draw(content, other = false) {
    await framed;
    if (!root.isConnected) return;
    frame.contentWindow.replace(content);
    if (!restored && !other && view) frame.contentWindow.restore(`#${view}`);
    restored ||= !other;
    performance.mark("pipelab-shown");
  }

  const dark = () =>
    (document.body.dataset.mdColorScheme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "slate" : "default")) === "slate";
  const coloured = () =>
    framed.then(() => {
      const paper = dark() ? getComputedStyle(document.body).backgroundColor : "";
      frame.contentDocument?.documentElement.style.setProperty("--paper", paper);
      frame.contentWindow?.theme(dark() ? "dark" : "light");
    });
  framed.then(() => {
    const { body } = frame.contentDocument;
    new frame.contentWindow.ResizeObserver(() => {
      if (!frame.hidden)
        frame.style.height = `${Math.ceil(body.getBoundingClientRect().bottom + frame.contentWindow.scrollY) + 8}px`;
    }).observe(body);
    coloured();
  });
  new MutationObserver(coloured).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });

  // Before Python is there: the pictures that the site brings, of schedules as they are.
  function showGiven() {
    labelled();
    const other = menu.value === EDITED,
      given = schedules[other ? "" : menu.value];
    if (given) show({ content: structuredClone(given.content), printed: "", sets: "nothing", other });
    const moved = inputs.some((each) => each.value !== each.defaultValue);
    say(
      other
        ? "the picture is 1F1B's until this code runs"
        : moved
          ? "the picture follows the sliders once Python runs"
          : "",
    );
  }

  function choose(name) {
    menu.value = name;
    code.value = schedules[name].code;
    run();
  }
  menu.addEventListener("change", () => choose(menu.value));
  find("#pg-reset").addEventListener("click", () => {
    form.reset();
    labelled();
    choose(menu.value === EDITED ? "" : menu.value);
  });

  // Loading Python, when the reader asks for it.
  async function offer() {
    const about = await (await fetch(new URL("engine.json", base))).json(),
      button = find("#pg-load"),
      progress = find("#pg-progress");
    const mega = (bytes) => (bytes / 1e6).toFixed(1);
    if (engine.loaded) return run();
    find(".pg-start").hidden = false;
    if (about.reason) {
      button.disabled = true;
      button.textContent = "this site was built without Python for the browser";
      return say(about.reason);
    }
    button.textContent = `run this in the browser (${mega(about.bytes)} MB, once)`;
    button.addEventListener("click", async () => {
      button.disabled = true;
      Object.assign(progress, { hidden: false, max: about.counted, value: 0 });
      try {
        await engine.load((loaded) => {
          progress.value = loaded;
          say(
            loaded < about.counted
              ? `loading Python: ${mega(loaded)} of ${mega(about.counted)} MB`
              : "starting Python …",
          );
        });
        find(".pg-start").hidden = true;
        if (matchMedia("(pointer: fine)").matches) code.focus({ preventScroll: true });
        await run();
      } catch (error) {
        progress.hidden = true;
        button.disabled = false;
        say(`Python could not be loaded: ${error.message}`);
      }
    });
  }

  // Links: the code or the schedule's name, the sliders, and what the frame shows.
  const through = async (bytes, stream) =>
    new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

  async function packed(text) {
    const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))
      .replaceAll("+", "-")
      .replaceAll("/", "_")
      .replaceAll("=", "");
  }

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) =>
      letter.charCodeAt(0),
    );
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader(),
      parts = [];
    for (let size = 0, part; !(part = await reader.read()).done; parts.push(part.value)) {
      if ((size += part.value.length) > MOST_CODE) throw new Error("it is too long");
    }
    return new TextDecoder("utf-8", { fatal: true }).decode(await new Blob(parts).arrayBuffer());
  }

  async function hash() {
    const parts =
      menu.value === EDITED ? [`code=${await packed(code.value)}`] : menu.value ? [`schedule=${menu.value}`] : [];
    for (const each of inputs) if (each.value !== each.defaultValue) parts.push(`${each.name}=${each.value}`);
    const shown = frame.hidden ? "" : (frame.contentWindow.hashOf?.().slice(1) ?? "");
    if (shown) parts.push(shown);
    return `#${parts.join("&")}`;
  }

  const tooLong = (link) =>
    link.length > MOST_LINK
      ? `no link: this code makes ${(link.length / 1024).toFixed(1)} kB, ` +
        "and mail and chat cut links above 8 kB; share the file instead"
      : "";

  async function kept() {
    const link = await hash();
    if (root.isConnected)
      history.replaceState(history.state, "", tooLong(link) ? location.pathname + location.search : link);
  }

  find("#pg-share").addEventListener("click", async () => {
    const link = await hash(),
      refusal = tooLong(link);
    if (refusal) return say(refusal);
    history.replaceState(history.state, "", link);
    try {
      await navigator.clipboard.writeText(location.href);
      say("link copied");
    } catch {
      say("the link is in the address bar");
    }
  });

  async function restore() {
    const parts = new Map(
      location.hash
        .slice(1)
        .split("&")
        .map((each) => each.split("=", 2)),
    );
    form.reset();
    for (const each of inputs) if (/^[\d.]+$/.test(parts.get(each.name) ?? "")) each.value = parts.get(each.name);
    labelled();
    [view, restored] = [
      ["v", "z", "s", "l", "k"]
        .filter((name) => parts.has(name))
        .map((name) => `${name}=${parts.get(name)}`)
        .join("&"),
      false,
    ];
    const name = parts.get("schedule") ?? "";
    if (!parts.has("code")) return choose(Object.hasOwn(schedules, name) ? name : "");
    try {
      code.value = await unpacked(parts.get("code"));
      menu.value = EDITED;
      run();
    } catch {
      choose("");
      say("the code in this link cannot be read: was the link cut?");
    }
  }

  async function start() {
    schedules = await (await fetch(new URL("schedules.json", base))).json();
    for (const name of ["share", "reset"]) find(`#pg-${name}`).disabled = false;
    await restore();
    await offer();
  }
  const followed = () => (root.isConnected ? restore() : removeEventListener("hashchange", followed));
  addEventListener("hashchange", followed);
  start().catch((error) => say(`the playground could not start: ${error.message}`));
})();
