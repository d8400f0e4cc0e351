// The part of Markdown that replies use, as nodes. What is not understood stays text. Every piece of
// text keeps its place in the source, so that drafted tokens can be tinted.

import { copyButton, element } from "./dom.js";
import { appendText } from "./drafted.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(?=\S)/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^\s{0,3}>\s?/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;
const SPAN = /(`+)([^`]+)\1|\*\*(\S.*?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\][]+)\]\((https?:\/\/[^\s()]+)\)/g;
const LONGEST_LINE = 4000; // characters in which marks are looked for
const DEEPEST = 4;

/** Renders source.text from an offset on; only blocks that changed are made anew. */
export function render(node, source, from) {
  const blocks = blocksOf(source.text, from);
  const shown = [...node.children];
  blocks.forEach((block, i) => {
    const key = `${block.kind} ${block.lines.at(0).from} ${block.lines.at(-1).to}`;
    // The last two may have got their tint later than their text.
    if (shown[i]?.blockKey === key && i < blocks.length - 2) return;
    const made = BUILD[block.kind](source, block);
    made.blockKey = key;
    if (shown[i]) shown[i].replaceWith(made);
    else node.append(made);
  });
  for (const extra of shown.slice(blocks.length)) extra.remove();
}

function linesOf(text, from) {
  const lines = [];
  for (let at = from; at <= text.length; ) {
    const end = text.indexOf("\n", at);
    const to = end < 0 ? text.length : end;
    lines.push({ from: at, to, text: text.slice(at, to) });
    at = to + 1;
  }
  return lines;
}

function blocksOf(text, from) {
  const lines = linesOf(text, from);
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].text.trim()) {
      i++;
      continue;
    }
    const kind = kindOf(lines, i);
    const n = Math.max(LENGTH[kind](lines, i), 1);
    blocks.push({ kind, lines: lines.slice(i, i + n) });
    i += n;
  }
  return blocks;
}

function kindOf(lines, i) {
  const { text } = lines[i];
  if (FENCE.test(text)) return "code";
  if (HEADING.test(text)) return "heading";
  if (RULE.test(text)) return "rule";
  if (QUOTE.test(text)) return "quote";
  if (ITEM.test(text)) return "list";
  if (ROW.test(text) && DIVIDER.test(lines[i + 1]?.text ?? "")) return "table";
  return "paragraph";
}

const LENGTH = {
  code(lines, i) {
    const mark = FENCE.exec(lines[i].text)[1];
    const isEnd = (line) => line.text.trim().startsWith(mark) && !line.text.trim().replaceAll(mark[0], "");
    const end = lines.findIndex((line, j) => j > i && isEnd(line));
    return (end < 0 ? lines.length : end + 1) - i;
  },
  heading: () => 1,
  rule: () => 1,
  quote: (lines, i) => runOf(lines, i, (line) => QUOTE.test(line.text)),
  list: (lines, i) =>
    runOf(lines, i, (line, j) => {
      if (ITEM.test(line.text)) return !RULE.test(line.text);
      if (!line.text.trim()) return ITEM.test(lines[j + 1]?.text ?? "");
      return /^\s+/.test(line.text) && !FENCE.test(line.text);
    }),
  table: (lines, i) => runOf(lines, i, (line) => ROW.test(line.text)),
  paragraph: (lines, i) =>
    runOf(lines, i, (line, j) => j === i || (line.text.trim() && kindOf(lines, j) === "paragraph")),
};

function runOf(lines, from, belongs) {
  let i = from;
  while (i < lines.length && belongs(lines[i], i)) i++;
  return i - from;
}

const BUILD = {
  code(source, { lines }) {
    const language = FENCE.exec(lines[0].text)[2];
    const isClosed = lines.length > 1 && FENCE.test(lines.at(-1).text);
    const inner = lines.slice(1, isClosed ? -1 : undefined);
    const code = element("code");
    if (inner.length) appendText(code, source, inner[0].from, inner.at(-1).to);
    const head = element("div", { className: "code-head" }, element("span", {}, language || "text"));
    head.append(copyButton(() => code.textContent, "Copy code"));
    const pre = element("pre", { tabIndex: 0, role: "region" }, code);
    pre.setAttribute("aria-label", `Code${language ? `, ${language}` : ""}`);
    return element("div", { className: "code" }, head, pre);
  },
  heading(source, { lines: [line] }) {
    const [all, marks] = HEADING.exec(line.text);
    const made = element(`h${Math.min(marks.length + 2, 5)}`);
    appendSpans(made, source, line.from + all.length, line.to);
    return made;
  },
  rule: () => element("hr"),
  quote(source, { lines }) {
    const made = element("blockquote");
    appendLines(made, source, lines, QUOTE);
    return made;
  },
  paragraph(source, { lines }) {
    const made = element("p");
    appendLines(made, source, lines);
    return made;
  },
  list(source, { lines }) {
    const stack = [];
    for (const line of lines) {
      const found = ITEM.exec(line.text);
      if (!found) {
        if (line.text.trim()) appendLines(stack.at(-1).item, source, [line], /^\s+/, "\n");
        continue;
      }
      const [all, blanks, mark] = found;
      while (stack.length > 1 && stack.at(-1).indent > blanks.length) stack.pop();
      if (!stack.length || blanks.length > stack.at(-1).indent + 1) {
        const list = element(/\d/.test(mark) ? "ol" : "ul");
        if (/\d/.test(mark)) list.start = parseInt(mark, 10);
        stack.at(-1)?.item.append(list);
        stack.push({ indent: blanks.length, list, item: null });
      }
      const item = element("li");
      appendSpans(item, source, line.from + all.length, line.to);
      stack.at(-1).list.append(item);
      stack.at(-1).item = item;
    }
    return stack[0].list;
  },
  table(source, { lines }) {
    const rows = lines.filter((_, i) => i !== 1).map((line, i) => {
      const row = element("tr");
      let at = line.from + line.text.indexOf("|") + 1;
      for (const cell of line.text.trim().slice(1, -1).split("|")) {
        const made = element(i ? "td" : "th");
        const blanks = cell.length - cell.trimStart().length;
        appendSpans(made, source, at + blanks, at + Math.max(cell.trimEnd().length, blanks));
        row.append(made);
        at += cell.length + 1;
      }
      return row;
    });
    const table = element("table", {}, element("thead", {}, rows[0]), element("tbody", {}, ...rows.slice(1)));
    return element("div", { className: "table" }, table);
  },
};

function appendLines(node, source, lines, prefix = null, before = "") {
  lines.forEach((line, i) => {
    node.append(i ? "\n" : before);
    const n = prefix ? (prefix.exec(line.text)?.[0].length ?? 0) : 0;
    appendSpans(node, source, line.from + n, line.to);
  });
}

function appendSpans(node, source, from, to, depth = 0) {
  const text = source.text.slice(from, to);
  let at = from;
  const spans = depth < DEEPEST && text.length <= LONGEST_LINE ? text.matchAll(SPAN) : [];
  for (const found of spans) {
    const [all, ticks, code, bold, italic, label, address] = found;
    const begin = from + found.index;
    appendText(node, source, at, begin);
    at = begin + all.length;
    if (ticks) {
      const made = element("code");
      appendText(made, source, begin + ticks.length, at - ticks.length);
      node.append(made);
      continue;
    }
    const [tag, n, length] = bold ? ["strong", 2, bold.length] : italic ? ["em", 1, italic.length] : ["a", 1, label.length];
    const made = element(tag);
    if (tag === "a") Object.assign(made, { href: address, title: address, target: "_blank", rel: "noopener noreferrer" });
    appendSpans(made, source, begin + n, begin + n + length, depth + 1);
    node.append(made);
  }
  appendText(node, source, at, to);
}
