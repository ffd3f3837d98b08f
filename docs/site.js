// pipelab's pages in frames: as dark as the site, as high as their content, without margins of their own.
const LOOKS = `
  body { margin: 0 !important; padding: 0 2px .3rem !important; display: flow-root; }
  header h1, #theme { display: none; }
  main { display: flex; flex-direction: column; } main > .tools { display: contents; } .layers { order: 1; }
  @media (max-width: 700px) { .layers { display: none !important; } }
  #panel { position: static !important; max-height: none !important; }
  .with-panel { padding-bottom: 0 !important; }
`;
const BELOW = ".figures, h2 small { display: none; }"; // the page around has them
const ON_HOME = ".hint, #actions { display: none; }";

function dress(frame) {
  const theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  const paper = theme === "dark" ? getComputedStyle(document.body).backgroundColor : "";
  try {
    frame.contentDocument.documentElement.style.setProperty("--paper", paper);
  } catch {
    /* as below */
  }
  frame.contentWindow?.postMessage({ pipelabTheme: theme }, "*");
}

function fit(frame) {
  let inside = null;
  try {
    inside = frame.contentDocument;
  } catch {
    /* a site opened from disk: every file is a stranger */
  }
  if (!inside?.getElementById("timelines") || inside.getElementById("looks")) return;
  const style = Object.assign(inside.createElement("style"), {
    id: "looks",
    textContent: LOOKS + (frame.matches(".home") ? ON_HOME : "") + (frame.matches(".figures-below") ? BELOW : ""),
  });
  inside.head.append(style);
  const grow = () => {
    frame.style.height = `${Math.ceil(inside.body.getBoundingClientRect().height) + 4}px`;
  };
  new ResizeObserver(grow).observe(inside.body);
  grow();
}

function frames() {
  for (const frame of document.querySelectorAll("iframe.page")) {
    const ready = () => {
      fit(frame);
      dress(frame);
    };
    frame.addEventListener("load", ready);
    ready();
  }
}

new MutationObserver(() => document.querySelectorAll("iframe.page").forEach(dress)).observe(document.body, {
  attributes: true,
  attributeFilter: ["data-md-color-scheme"],
});
// What the theme lacks: a name for its search, and the keyboard in boxes that scroll.
function reach() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "search");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset .wide")) box.tabIndex = 0;
}
document$.subscribe(reach);
document$.subscribe(frames); // after every page that the theme swaps in
