// Rows and tiles, of jobs and of pools.

import { element } from "./charts.js";

export function rows(body, lines) {
  body.replaceChildren();
  for (const cells of lines) {
    const row = element(body, "tr");
    for (const cell of cells) {
      const at = element(row, "td", cell.bad ? { class: "bad" } : {});
      if (cell.href) element(at, "a", { href: cell.href }, cell.text);
      else at.textContent = cell.text ?? cell;
      if (cell.note) element(at, "small", {}, cell.note);
    }
  }
}

export function tile(parent, name, value, bad = false) {
  const made = element(parent, "div", { class: "tile" });
  element(made, "span", {}, name);
  element(made, "b", bad ? { class: "bad" } : {}, value);
}

export function showConditions(conditions) {
  rows(document.querySelector("#conditions tbody"), conditions.map((c) => [
    c.type, { text: c.status, bad: c.type === "Ready" && c.status === "False" }, c.reason, c.message,
  ]));
}

export function ready(line, reason) {
  return { text: line.ready === "True" ? "yes" : reason || "unknown", bad: line.ready === "False" };
}
