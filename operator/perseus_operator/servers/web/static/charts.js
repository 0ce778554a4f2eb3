// Two pictures as SVG: the frontier, and one plan as a timetable coloured by power. No state; all text is set as text.

const SVG = "http://www.w3.org/2000/svg";
// Light to dark in one hue: more power is darker.
const SHADES = [[253, 236, 214], [250, 190, 130], [236, 130, 60], [190, 78, 22], [112, 36, 8]];

export function element(parent, name, attributes = {}, text = null) {
  const made = parent.namespaceURI === SVG || name === "svg"
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

export function shade(share) {
  const at = Math.min(1, Math.max(0, share)) * (SHADES.length - 1);
  const low = Math.min(SHADES.length - 2, Math.floor(at));
  const mixed = SHADES[low].map((c, i) => Math.round(c + (SHADES[low + 1][i] - c) * (at - low)));
  return `rgb(${mixed.join(",")})`;
}

// Round values inside [low, high], five to ten of them.
export function ticks(low, high) {
  const rough = (high - low) / 10 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

export function nameOf(kind, microbatch, chunk) {
  return `${kind.replace("_", " ")} of microbatch ${microbatch}${chunk ? `, chunk ${chunk}` : ""}`;
}

function scale(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values);
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const domain = [low - pad, high + pad];
  return { domain, at: (v) => from + ((v - domain[0]) / (domain[1] - domain[0])) * (to - from) };
}

// points: [seconds, joules]; marks: {label, seconds, joules, colour}; chosen: index.
export function drawFrontier(svg, points, marks, chosen) {
  const width = 1100, height = 360, left = 70, bottom = 44;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const all = [...points, ...marks.map((m) => [m.seconds, m.joules])];
  const x = scale(all.map((p) => p[0]), left, width - 130), y = scale(all.map((p) => p[1]), height - bottom, 14);
  for (const value of ticks(...x.domain)) {
    element(svg, "line", { x1: x.at(value), x2: x.at(value), y1: 14, y2: height - bottom, stroke: "var(--line)" });
    element(svg, "text", { x: x.at(value), y: height - bottom + 17, "text-anchor": "middle" }, String(value));
  }
  for (const value of ticks(...y.domain)) {
    element(svg, "line", { x1: left, x2: width - 130, y1: y.at(value), y2: y.at(value), stroke: "var(--line)" });
    element(svg, "text", { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, String(value));
  }
  element(svg, "text", { x: (left + width - 130) / 2, y: height - 6, "text-anchor": "middle" }, "iteration time, s");
  const title = { x: 16, y: height / 2 - 20, transform: `rotate(-90 16 ${height / 2 - 20})`, "text-anchor": "middle" };
  element(svg, "text", title, "energy of an iteration, J");
  const path = points.map((p) => `${x.at(p[0])},${y.at(p[1])}`).join(" ");
  element(svg, "polyline", { points: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2 });
  for (const [k, p] of points.entries()) {
    const dot = element(svg, "circle", { cx: x.at(p[0]), cy: y.at(p[1]), r: 2.5, fill: "var(--accent)" });
    element(dot, "title", {}, `point ${k}: ${p[0].toPrecision(5)} s, ${p[1].toPrecision(6)} J`);
  }
  const [s, j] = points[chosen];
  for (const end of [{ x2: x.at(s), y2: height - bottom }, { x2: left, y2: y.at(j) }]) {
    element(svg, "line", { x1: x.at(s), y1: y.at(j), ...end, stroke: "var(--accent)", "stroke-dasharray": "4 4" });
  }
  element(svg, "circle", { id: "chosen", cx: x.at(s), cy: y.at(j), r: 8, fill: "none", stroke: "var(--accent)", "stroke-width": 2.5 });
  let lowest = -Infinity;
  for (const mark of [...marks].sort((a, b) => b.joules - a.joules)) {
    const at = { x: x.at(mark.seconds), y: y.at(mark.joules) };
    lowest = Math.max(at.y + 4, lowest + 15); // names stand below each other where marks are close
    element(svg, "rect", {
      x: at.x - 5, y: at.y - 5, width: 10, height: 10, fill: mark.colour, stroke: "var(--paper)",
      transform: `rotate(45 ${at.x} ${at.y})`,
    });
    // Where the curve runs below the name a border in the colour of the paper keeps it readable.
    const halo = { stroke: "var(--paper)", "stroke-width": 4, "paint-order": "stroke" };
    element(svg, "text", { x: at.x + 12, y: lowest, ...halo }, mark.label);
  }
}

// plan: as /plans/<point> answers. Returns the range of power, [low, high] in watts.
export function drawPipeline(svg, plan) {
  const width = 1100, left = 60, right = 10, row = 30, gap = 4;
  const height = plan.stages.length * (row + gap) + 34;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const low = plan.blockingWatts, high = Math.max(low + 1, plan.highestWatts);
  const x = (s) => left + (s / plan.iterationSeconds) * (width - left - right);
  for (const [stage, instructions] of plan.stages.entries()) {
    const top = stage * (row + gap);
    element(svg, "text", { x: 0, y: top + row / 2 + 4 }, `stage ${stage}`);
    const end = x(plan.iterationSeconds) - left;
    element(svg, "rect", { class: "wait", x: left, y: top, width: end, height: row, fill: "#f4efe9" });
    for (const [kind, microbatch, chunk, start, time, mhz, power] of instructions) {
      const share = (power - low) / (high - low), w = Math.max(0.5, x(start + time) - x(start) - 0.6);
      const box = element(svg, "rect", { class: "instruction", x: x(start), y: top, width: w, height: row, fill: shade(share) });
      const named = nameOf(kind, microbatch, chunk);
      const figures = `${mhz ? `${mhz} MHz, ` : ""}${power.toFixed(0)} W, ${(1000 * time).toFixed(1)} ms`;
      element(box, "title", {}, `${named}: ${figures}`);
      if (w > 24) {
        const ink = share > 0.55 ? "#ffffff" : "#3b2a1c";
        const label = element(svg, "text", { x: x(start) + w / 2, y: top + row / 2 + 4, "text-anchor": "middle" }, `${kind[0].toUpperCase()}${microbatch}`);
        label.style.fill = ink;
        label.style.pointerEvents = "none";
      }
    }
  }
  const base = plan.stages.length * (row + gap);
  for (const value of ticks(0, plan.iterationSeconds)) {
    element(svg, "line", { x1: x(value), x2: x(value), y1: base, y2: base + 5, stroke: "var(--soft)" });
    element(svg, "text", { x: x(value), y: base + 19, "text-anchor": "middle" }, `${value} s`);
  }
  return [low, high];
}

export function drawLegend(parent, low, high) {
  parent.replaceChildren();
  element(parent, "span", {}, `${low.toFixed(0)} W (waiting) `);
  const bar = document.createElementNS(SVG, "svg");
  bar.setAttribute("viewBox", "0 0 160 12");
  bar.style.cssText = "display:inline-block;width:160px;height:12px;vertical-align:middle";
  for (let k = 0; k < 40; k += 1) element(bar, "rect", { x: 4 * k, y: 0, width: 4.2, height: 12, fill: shade(k / 39) });
  parent.append(bar);
  element(parent, "span", {}, ` ${high.toFixed(0)} W`);
}
