"use strict";
(() => {
  const root = document.documentElement;

  // --- light and dark: what the system says, unless the reader chose ---------------------------
  const KEY = "fairvar-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  try {
    const chosen = localStorage.getItem(KEY);
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  } catch {
    // storage may be switched off; then the choice lasts as long as the page
  }

  function themeSwitch() {
    const button = document.querySelector(".theme");
    const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* see above */ }
      name();
    });
    system.addEventListener("change", name);
    name();
    button.hidden = false;
  }

  // --- sorting: up, down, back to the first order; cells without a value always last -----------
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function compare(column, numeric, sign) {
    return (a, b) => {
      const x = a.cells[column].dataset.value, y = b.cells[column].dataset.value;
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      if (numeric) return sign * (Number(x) - Number(y));
      return sign * ((x > y) - (x < y));
    };
  }

  function sortable(table) {
    const body = table.tBodies[0], first = [...body.rows];
    const headers = [...table.tHead.rows[0].cells];
    for (const header of headers) {
      header.querySelector("button").addEventListener("click", () => {
        const order = NEXT[header.getAttribute("aria-sort")];
        for (const other of headers) other.setAttribute("aria-sort", "none");
        header.setAttribute("aria-sort", order);
        const rows = [...first];
        const sign = order === "descending" ? -1 : 1;
        if (order !== "none") {
          rows.sort(compare(header.cellIndex, header.dataset.kind === "number", sign));
        }
        body.append(...rows);
        const told = order === "none" ? "first order" : `sorted by ${header.innerText.trim()}, ${order}`;
        document.getElementById("heard").textContent = told;
      });
    }
  }

  // --- numbers: one stop of the Tab key per table, arrow keys inside ---------------------------
  const STEP = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

  function navigable(table) {
    const cells = [...table.querySelectorAll("td.number")];
    const stop = (cell) => cells.forEach((c) => { c.tabIndex = c === cell ? 0 : -1; });
    if (cells.length === 0) return;
    table.setAttribute("role", "grid");
    stop(cells[0]);
    table.addEventListener("focusin", (event) => {
      if (cells.includes(event.target)) stop(event.target);
    });
    table.addEventListener("keydown", (event) => {
      const step = STEP[event.key], cell = event.target;
      if (!step || !cells.includes(cell)) return;
      event.preventDefault();
      const rows = [...table.tBodies[0].rows];
      let row = rows.indexOf(cell.parentNode), column = cell.cellIndex, next;
      do {
        row += step[0];
        column += step[1];
        next = rows[row]?.cells[column];
      } while (next && !cells.includes(next));
      next?.focus();
    });
  }

  // --- tooltips: the title of what is under the pointer or has the focus -----------------------
  function tooltips() {
    const tip = document.getElementById("tip");
    let owner = null;

    function place() {
      if (!owner) return;
      const at = owner.getBoundingClientRect(), own = tip.getBoundingClientRect(), gap = 8;
      const left = at.left + at.width / 2 - own.width / 2;
      const above = at.top - own.height - gap;
      tip.style.left = `${Math.max(gap, Math.min(left, root.clientWidth - own.width - gap))}px`;
      tip.style.top = `${above > gap ? above : at.bottom + gap}px`;
    }
    // the title is taken away while our own tooltip shows it, or the browser would show it too
    function hide() {
      if (!owner) return;
      owner.title = tip.textContent;
      owner.removeAttribute("aria-describedby");
      owner = null;
      tip.hidden = true;
    }
    function show(element) {
      if (!element || element === owner) return;
      hide();
      tip.textContent = element.title;
      element.removeAttribute("title");
      element.setAttribute("aria-describedby", "tip");
      owner = element;
      tip.hidden = false;
      place();
    }
    const titled = (node) => node.closest?.("td.number, th button") ?? null;

    document.addEventListener("mouseover", (event) => {
      const element = titled(event.target);
      if (element) show(element); else if (owner !== document.activeElement) hide();
    });
    document.addEventListener("focusin", (event) => show(titled(event.target)));
    document.addEventListener("focusout", hide);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
    addEventListener("scroll", place, { capture: true, passive: true });
    addEventListener("resize", place);
  }

  document.addEventListener("DOMContentLoaded", () => {
    themeSwitch();
    for (const table of document.querySelectorAll("table")) {
      sortable(table);
      navigable(table);
    }
    tooltips();
  });
})();
