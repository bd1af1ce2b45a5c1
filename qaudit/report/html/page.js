// Controls of the page: sort, fold, copy, and tooltips of figures. Everything is there without it.
"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, settings = {}, ...inner) => {
    const made = Object.assign(document.createElement(tag), settings);
    made.append(...inner);
    return made;
  };

  // ------------------------------------------------------------------ tables

  // A number that is given or that a cell begins with; else its text. What is not measured: null.
  const key = (cell) => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = cell.textContent.trim();
    if (text === "" || /^-( not measured)?$/.test(text)) return null;
    const number = text.match(/^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?(?=$|[\s\[%(])/i);
    return number ? Number(number[0].replaceAll(",", "")) : text;
  };

  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const sort = (table, column, descending) => {
    const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
    const known = rows.filter(([value]) => value !== null);
    known.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
    const missing = rows.filter(([value]) => value === null);
    table.tBodies[0].append(...[...known, ...missing].map(([, row]) => row));
  };

  for (const table of all("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = make("button", { type: "button" }, ...head.childNodes);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, column, descending);
      });
      head.append(button);
    });
  }

  const errors = document.getElementById("errors");
  const more = errors ? all("tr.more", errors).length : 0;
  if (more) {
    const whole = errors.tBodies[0].rows.length;
    const button = make("button", { type: "button", id: "fold" });
    const status = make("span", { className: "copied" });
    status.setAttribute("role", "status");
    const fold = (folded) => {
      errors.classList.toggle("folded", folded);
      button.setAttribute("aria-expanded", String(!folded));
      button.textContent = folded ? `Show all ${whole} subjects` : `Show ${whole - more} subjects`;
      status.textContent = folded
        ? `${whole - more} of ${whole} are shown: those that tell most`
        : `all ${whole} are shown`;
    };
    button.setAttribute("aria-controls", "errors");
    button.addEventListener("click", () => fold(!errors.classList.contains("folded")));
    errors.parentElement.before(make("p", {}, button, status));
    fold(true);
  }

  // ---------------------------------------------------------------- sections

  // A link to a section opens it; one button opens all, or folds them again.
  const sections = all("main > section > details");
  const unfold = () => {
    const section = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    const folded = section && section.querySelector(":scope > details");
    if (folded) folded.open = true;
  };
  addEventListener("hashchange", unfold);
  for (const link of all("nav a")) link.addEventListener("click", () => setTimeout(unfold));
  unfold();
  if (sections.length > 1) {
    const button = make("button", { type: "button", id: "unfold" }, "Open all sections");
    button.addEventListener("click", () => {
      const open = sections.some((folded) => !folded.open);
      sections.forEach((folded) => (folded.open = open));
      button.textContent = open ? "Fold all sections" : "Open all sections";
    });
    document.querySelector("nav").append(button);
  }

  // ---------------------------------------------------------------- commands

  for (const block of all("pre.command")) {
    const button = make("button", { type: "button" }, "Copy");
    const status = make("span", { className: "copied" });
    status.setAttribute("role", "status");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.textContent);
        status.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(block);
        status.textContent = "selected: copy it with the keyboard";
      }
    });
    block.after(make("p", {}, button, status));
  }

  // ----------------------------------------------------------------- figures

  // A drawing of a mark, which takes its colours from the group that it is in.
  const swatch = (mark) => {
    const drawing = mark.ownerSVGElement.cloneNode(false);
    drawing.removeAttribute("role");
    drawing.removeAttribute("aria-label");
    drawing.setAttribute("aria-hidden", "true");
    drawing.setAttribute("viewBox", "-6 -6 12 12");
    drawing.setAttribute("width", "16");
    drawing.setAttribute("height", "16");
    const group = mark.parentNode.closest(".series").cloneNode(false);
    group.removeAttribute("class");
    const use = mark.cloneNode(false);
    use.removeAttribute("x");
    use.removeAttribute("y");
    group.append(use);
    drawing.append(group);
    return drawing;
  };

  const NEAR = 26; // pixels from a mark at which it still answers

  for (const plot of all(".chart .plot")) {
    const svg = plot.querySelector("svg");
    const marks = all("use.mark", svg).flatMap((mark) => {
      const title = mark.querySelector("title");
      if (!title) return [];
      title.remove(); // else the browser shows a second tooltip
      const group = mark.closest(".series");
      const { series } = group.dataset;
      const place = { x: mark.x.baseVal.value, y: mark.y.baseVal.value };
      return [{ mark, group, series, ...place, lines: title.textContent.split("\n") }];
    });
    if (!marks.length) continue;
    const tip = make("p", { className: "tip" });
    tip.setAttribute("role", "status");
    plot.after(tip);
    plot.setAttribute("aria-label", `${plot.getAttribute("aria-label")}; arrow keys go from mark to mark`);
    let now = null;
    const seen = () => marks.filter(({ group }) => !group.classList.contains("off"));
    const onScreen = ({ x, y }) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());

    const hide = () => {
      now?.mark.classList.remove("now");
      now = null;
      tip.replaceChildren();
    };
    const place = () => {
      const at = onScreen(now);
      const { width, height } = tip.getBoundingClientRect();
      const left = Math.min(at.x + 14, innerWidth - width - 8);
      const top = at.y - height - 12 < 4 ? at.y + 16 : at.y - height - 12;
      tip.style.left = `${Math.max(8, left)}px`;
      tip.style.top = `${top}px`;
    };
    // What the keyboard chose stays when the page moves; the pointer is over something else then.
    const follow = () => {
      if (now && document.activeElement === plot) place();
      else hide();
    };
    const show = (found) => {
      if (found === now) return;
      hide();
      now = found;
      found.mark.classList.add("now");
      tip.replaceChildren(...found.lines.map((line) => make("span", {}, line)));
      place();
    };
    const nearest = (x, y, among = seen()) => {
      let best = null;
      let least = Infinity;
      for (const candidate of among) {
        const distance = Math.hypot(candidate.x - x, candidate.y - y);
        if (distance < least) [best, least] = [candidate, distance];
      }
      return [best, least];
    };

    const point = (event) => {
      const matrix = svg.getScreenCTM();
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const [found, distance] = nearest(at.x, at.y);
      if (found && distance * matrix.a < NEAR) show(found);
      else hide();
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    plot.addEventListener("scroll", follow);
    document.addEventListener("scroll", follow, { passive: true });
    plot.addEventListener("blur", hide);
    plot.addEventListener("focus", () => {
      if (plot.matches(":focus-visible") && seen().length) show(seen()[0]);
    });

    const step = (along) => {
      const own = seen().filter(({ series }) => series === now.series);
      return own[own.indexOf(now) + along] ?? now;
    };
    const across = (by) => {
      const others = [...new Set(seen().map(({ series }) => series))];
      const series = others[others.indexOf(now.series) + by];
      const before = seen().filter((candidate) => candidate.series === now.series);
      const own = seen().filter((candidate) => candidate.series === series);
      const same = own.length === before.length ? own[before.indexOf(now)] : null;
      return same ?? nearest(now.x, now.y, own)[0] ?? now;
    };
    const moves = {
      ArrowRight: () => step(1),
      ArrowLeft: () => step(-1),
      ArrowDown: () => across(1),
      ArrowUp: () => across(-1),
      Home: () => seen().find(({ series }) => series === now.series),
      End: () => seen().findLast(({ series }) => series === now.series),
    };
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      if (!(event.key in moves) || !seen().length) return;
      event.preventDefault();
      show(now ? moves[event.key]() : seen()[0]);
    });

    // A button for each series that has a name: a mark of it, and its name.
    const names = new Map(
      all(".series[data-name]", svg).map(({ dataset }) => [dataset.series, dataset.name]),
    );
    const buttons = [...names].map(([series, name]) => {
      const button = make("button", { type: "button", className: "key" });
      const mark = svg.querySelector(`.series[data-series="${series}"] use.mark`);
      if (mark) button.append(swatch(mark));
      button.append(name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const off = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!off));
        const groups = all(`.series[data-series="${series}"]`, svg);
        groups.forEach((group) => group.classList.toggle("off", off));
        hide();
      });
      return make("li", {}, button);
    });
    if (buttons.length > 1) plot.before(make("ul", { className: "legend" }, ...buttons));
  }

  // ------------------------------------------------------------------- print

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    opened.forEach((folded) => (folded.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((folded) => (folded.open = false)));
})();
