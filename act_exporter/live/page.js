"use strict";
// Puts what is new in place of what was, without a reload: the scroll position, the focus and what
// is typed stay. Without this script the page reloads itself.
const SECONDS = 5;
const fresh = document.getElementById("fresh");
let answered = fresh.textContent;

function replace(page) {
  const focused = document.activeElement && document.activeElement.id;
  for (const part of page.querySelectorAll("[data-live]")) {
    const old = document.getElementById(part.id);
    // What is the same is left alone: a selection in it stays, and a screen reader says nothing.
    if (!old || old.outerHTML === part.outerHTML) continue;
    old.className = part.className;
    old.replaceChildren(...part.childNodes);
  }
  document.title = page.title;
  answered = fresh.textContent;
  const again = focused && document.getElementById(focused);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}

async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(4000) });
    if (!answer.ok) throw new Error(await answer.text());
    replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch {
    fresh.textContent = `No answer: this is ${answered}`;
  }
}

async function go() {
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000 * SECONDS));
    if (document.visibilityState === "visible") await refresh();
  }
}

if (document.body.dataset.hold === undefined) {
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") refresh();
  });
  go();
}
