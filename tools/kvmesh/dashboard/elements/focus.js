// NiceGUI makes the cells of a table anew with every update, and the browser then forgets which of
// them had the focus. An element with `data-focus` gets it back from the one that bore its name.
(() => {
  let name = null;
  document.addEventListener("focusin", (event) => {
    name = event.target.closest("[data-focus]")?.dataset.focus ?? null;
  });
  document.addEventListener("pointerdown", () => { name = null; });
  new MutationObserver(() => {
    if (name === null || document.activeElement !== document.body) return;
    for (const element of document.querySelectorAll("[data-focus]")) {
      if (element.dataset.focus === name) {
        element.focus({ preventScroll: true });
        return;
      }
    }
  }).observe(document.documentElement, { childList: true, subtree: true });
})();
