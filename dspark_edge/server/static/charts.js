// Small pictures of numbers, as SVG. Each says in words what it shows.

import { shape } from "./dom.js";

/** Curves over time: values and plain are arrays of numbers, null where there was nothing. */
export function curves(svg, values, plain, top, label) {
  const [width, height] = sizeOf(svg);
  const x = (i) => (i / Math.max(values.length - 1, 1)) * width;
  const y = (value) => height - 1 - (Math.min(value, top) / top) * (height - 4);
  const parts = [shape("path", { class: "base", d: `M0 ${height - 0.5}H${width}` })];
  for (const run of runsOf(values)) {
    const path = run.map(([i, value]) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    const [first, last] = [x(run[0][0]), x(run.at(-1)[0])];
    parts.push(shape("path", { class: "area", d: `M${first} ${height}L${path}L${last} ${height}Z` }));
    parts.push(shape("path", { class: "now", d: `M${path}${dashOf(run)}` }));
  }
  for (const run of runsOf(plain)) {
    const path = run.map(([i, value]) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    parts.push(shape("path", { class: "plain", d: `M${path}${dashOf(run)}` }));
  }
  show(svg, width, height, parts, label);
}

/** One column for each round: what was verified as an outline, what was accepted filled. top: the
 * most that a column can show. */
export function columns(svg, rounds, n, top, label) {
  const [width, height] = sizeOf(svg);
  const step = width / n;
  const unit = (height - 3) / top;
  const parts = [shape("path", { class: "base", d: `M0 ${height - 0.5}H${width}` })];
  rounds.forEach(({ n_verified, n_accepted }, i) => {
    const x = width - (rounds.length - i) * step;
    const column = (name, from, count) => {
      if (count <= 0) return;
      const y = height - 1 - (from + count) * unit;
      const size = { width: Math.max(step - 2, 1), height: Math.max(count * unit - 1, 1) };
      parts.push(shape("rect", { class: name, x: x + 1, y, rx: 1.5, ...size }));
    };
    column("accepted", 0, n_accepted);
    column("verified", n_accepted, n_verified - n_accepted);
    if (!n_verified) parts.push(shape("rect", { class: "bonus", x: x + 1, y: height - 3, width: Math.max(step - 2, 1), height: 2 }));
  });
  show(svg, width, height, parts, label);
}

/** Parts of a whole: [[class, amount]...]. */
export function gauge(svg, parts, total, label) {
  const [width, height] = sizeOf(svg);
  let x = 0;
  const bars = parts.map(([name, amount]) => {
    const share = (amount / total) * width;
    // A gap, since neighbours may look the same to who sees no colours.
    const bar = shape("rect", { class: name, x, y: 0, width: Math.max(share - 1, 0.5), height });
    x += share;
    return bar;
  });
  show(svg, width, height, bars, label);
}

function runsOf(values) {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (runs.at(-1)?.at(-1)[0] === i - 1) runs.at(-1).push([i, value]);
    else runs.push([[i, value]]);
  });
  return runs;
}

/** What makes a single point visible, within the picture. */
function dashOf(run) {
  if (run.length > 1) return "";
  return run[0][0] ? "h-3" : "h3";
}

function sizeOf(svg) {
  return [svg.clientWidth || 300, svg.clientHeight || 72];
}

function show(svg, width, height, parts, label) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(...parts);
}
