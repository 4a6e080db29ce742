// The page's side of the drafting dashboard. Text reaches the page through textContent only, so
// whatever a model writes stays text.

const SVG = "http://www.w3.org/2000/svg";
const PROMPT = -1;

function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = `bw-draft-${name}`;
  if (text) element.textContent = text;
  return element;
}

function shape(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

// A mark's colour for words: drawn towards the page's own ink, to be read on either theme.
const ink = (color) => `color-mix(in srgb, ${color} 68%, var(--jp-ui-font-color0, currentcolor))`;
const percent = (value) => `${Math.round(100 * value)}%`;
// A score may be no number: JSON has no such thing, so it comes as a word.
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : `${value}`);

// -- text -------------------------------------------------------------------------------------

// A token as it looks in the text: its mark, its sign where it has one, line breaks made visible.
function dress(span, text, mark, stands) {
  span.style.cssText = mark.css;
  if (mark.kind === "corrected" || mark.kind === "bonus") {
    const sign = make("span", "sign", mark.sign);
    sign.style.color = ink(mark.color);
    span.append(sign);
    // In one piece: a frame that is broken at the end of a line is read as two tokens.
    if (!text.includes("\n")) span.style.whiteSpace = "pre";
  }
  if (stands) span.classList.add("bw-draft-faint");
  const lines = text.split("\n");
  lines.forEach((line, number) => {
    if (number > 0) span.append(make("span", "faint", "⏎"), "\n");
    span.append(line);
  });
}

function tokenWords(look, [, kind, step, slot, sure]) {
  const words = [`step ${step}`, look.kinds[kind].word];
  if (slot >= 0) words.push(`slot ${slot + 1}`);
  if (sure >= 0) words.push(`confidence ${sure.toFixed(2)}`);
  return `${words.join(", ")}; a click shows its block`;
}

class TextPane {
  constructor(look, pick) {
    this.look = look;
    this.element = make("div", "page");
    this.element.addEventListener("click", (event) => {
      const token = event.target.closest(".bw-draft-token");
      if (!token || !pick || !window.getSelection().isCollapsed) return; // text is being marked
      pick({ step: Number(token.dataset.step), request: Number(token.dataset.request) });
    });
    this.element.tabIndex = 0; // scrolls with the keyboard
    this.element.setAttribute("role", "log");
    this.element.setAttribute("aria-live", "off");
    this.element.setAttribute("aria-label", "Text as it is written");
  }

  append(pieces) {
    const page = this.element;
    const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
    const batch = document.createDocumentFragment();
    for (const piece of pieces) {
      const span = make("span", piece[1] === PROMPT ? "given" : "token");
      if (piece[1] === PROMPT) {
        span.textContent = piece[0];
      } else {
        const mark = this.look.kinds[piece[1]];
        span.dataset.kind = mark.kind;
        span.dataset.step = piece[2];
        span.dataset.request = piece[6];
        span.title = tokenWords(this.look, piece);
        dress(span, piece[0], mark, piece[5]);
      }
      if (span.style.whiteSpace) batch.append(document.createElement("wbr"));
      batch.append(span);
    }
    page.append(batch);
    while (page.childElementCount > 2 * this.look.most) page.firstElementChild.remove();
    if (atEnd) page.scrollTop = page.scrollHeight;
  }

  // The tokens of the pinned block.
  point(block) {
    const name = "bw-draft-pointed";
    for (const span of this.element.querySelectorAll(`.${name}`)) span.classList.remove(name);
    if (!block) return;
    const its = `[data-step="${block.step}"][data-request="${block.request}"]`;
    for (const span of this.element.querySelectorAll(its)) span.classList.add(name);
  }
}

// -- blocks -----------------------------------------------------------------------------------

function fate(block, slot) {
  if (slot < block.accepted) return "accepted";
  return slot < block.admitted ? "rejected" : "trimmed";
}

function fateWords(look, block, slot) {
  const name = fate(block, slot);
  let words = look.slots[name].word;
  if (name === "rejected" && slot > block.accepted) words += ", behind a refused slot";
  if (name === "accepted" && slot >= block.kept) words += ", then cut away at the end";
  return words;
}

function blockWords(look, block) {
  const own = block.kind < 0 ? "" : `, then ${look.kinds[block.kind].kind}: ${block.token}`;
  if (!block.slots.length) return `step ${block.step}: nothing drafted${own}`;
  const left = block.slots.length - block.admitted;
  const trimmed = left ? ` and ${left} trimmed` : "";
  return `step ${block.step}: ${block.accepted} of ${block.slots.length} drafts accepted`
    + `${trimmed}${own}`;
}

class Blocks {
  constructor(look, slots, ask, point) {
    Object.assign(this, { look, slots, ask, point, blocks: [], held: false });
    this.pinned = this.shown = this.wanted = null;
    this.element = make("div", "blocks");
    this.strip = make("div", "strip");
    this.strip.setAttribute("role", "group");
    this.strip.setAttribute("aria-label", "Blocks of the last steps, newest at the right");
    this.inside = make("div", "inside");
    this.heading = make("div", "inside-heading");
    this.words = make("span", "inside-words");
    this.release = make("button", "release", "Unpin");
    this.release.type = "button";
    this.release.title = "Follow the newest block again";
    this.release.hidden = true;
    this.release.addEventListener("click", () => {
      this.pin(null);
      this.draw();
    });
    this.heading.append(this.words, this.release);
    this.columns = make("div", "columns");
    this.columns.style.gridTemplateColumns = `repeat(${slots + 2}, minmax(78px, 1fr))`;
    this.inside.append(this.heading, this.columns);
    this.element.append(this.strip, this.inside);
    // What is looked at must not slide away.
    this.strip.addEventListener("pointerenter", () => this.hold(true));
    this.strip.addEventListener("pointerleave", () => this.hold(false));
    this.strip.addEventListener("focusout", (event) => {
      if (!this.strip.contains(event.relatedTarget)) this.hold(false);
    });
    this.strip.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const next = step === 1 ? "nextElementSibling" : "previousElementSibling";
      if (step) document.activeElement[next]?.focus();
      if (event.key === "Escape" && this.pinned) this.release.click();
      event.stopPropagation(); // no shortcut of JupyterLab's
    });
  }

  hold(held) {
    this.held = held;
    if (!held) this.draw();
  }

  update(blocks) {
    this.blocks = blocks;
    if (!this.held) this.draw();
  }

  // A token in the text was clicked: pin its block, which may have left the strip long ago.
  pick(place) {
    const known = this.blocks.find((b) => same(b, place));
    if (known) {
      this.pin(known);
      return;
    }
    this.wanted = place;
    this.ask(place);
  }

  // The kernel's answer: the block with its candidates, or none.
  answer(block, step) {
    const wanted = this.wanted;
    if (!block) {
      if (wanted?.step === step) this.words.textContent = `step ${step} is no longer kept`;
      return;
    }
    if (same(wanted, block)) {
      this.wanted = null;
      this.pin(block);
    }
    this.blocks = this.blocks.map((b) => (same(b, block) ? block : b));
    if (same(this.pinned, block)) this.pinned = block;
    if (same(this.shown, block)) this.look_inside(block);
  }

  draw() {
    const cell = this.slots > 8 ? 8 : 11;
    const room = this.strip.clientWidth || 900;
    const fits = Math.max(1, Math.floor((room + 12) / (cell * (this.slots + 1) + 4 + 12)));
    this.strip.style.setProperty("--bw-cell", `${cell}px`);
    this.strip.replaceChildren(...this.blocks.slice(-fits).map((block) => this.drawBlock(block)));
    const last = this.blocks[this.blocks.length - 1];
    const block = this.pinned ?? last;
    if (block) this.look_inside(block);
    else this.columns.replaceChildren();
  }

  drawBlock(block) {
    const element = make("button", "block");
    element.type = "button";
    const words = blockWords(this.look, block);
    element.setAttribute("aria-label", words);
    element.title = words;
    element.dataset.step = block.step;
    if (same(block, this.pinned)) element.classList.add("bw-draft-pinned");
    const cells = make("span", "cells");
    block.slots.forEach(([, sure], slot) => {
      const track = make("span", "track");
      const bar = make("span", `bar bw-draft-${fate(block, slot)}`);
      bar.style.height = sure < 0 ? "0" : `${Math.max(3, 100 * sure)}%`;
      if (fate(block, slot) === "rejected" && slot > block.accepted) bar.style.opacity = 0.45;
      track.append(bar);
      cells.append(track);
    });
    const own = make("span", "own");
    if (block.kind >= 0) {
      const mark = this.look.kinds[block.kind];
      own.textContent = mark.sign;
      own.style.color = ink(mark.color);
    }
    cells.append(own);
    element.append(cells, make("span", "number", `${block.step}`));
    element.addEventListener("pointerenter", () => this.visit(block));
    element.addEventListener("focus", () => {
      this.hold(true);
      this.visit(block);
    });
    element.addEventListener("click", () => this.pin(same(block, this.pinned) ? null : block));
    return element;
  }

  visit(block) {
    const known = this.blocks.find((b) => same(b, block)) ?? block;
    this.look_inside(known);
    if (known.slots.length && !known.candidates) this.ask(known);
  }

  pin(block) {
    this.pinned = block;
    this.release.hidden = !block;
    this.point(block);
    for (const element of this.strip.children) {
      const here = block !== null && Number(element.dataset.step) === block.step;
      element.classList.toggle("bw-draft-pinned", here);
    }
    if (block) this.visit(block);
  }

  look_inside(block) {
    this.shown = block;
    const pinned = same(block, this.pinned) ? "pinned · " : "";
    const rank = block.rank ? `, ${block.rank}` : "";
    this.words.textContent = `${pinned}${blockWords(this.look, block)}${rank}`;
    this.words.title = this.words.textContent;
    const anchor = make("div", "column");
    anchor.append(make("div", "small", "anchor"), make("div", "label", block.anchor || "–"));
    const columns = [anchor];
    block.slots.forEach(([label, sure], slot) => {
      const column = make("div", "column");
      const name = fate(block, slot);
      column.title = fateWords(this.look, block, slot);
      const head = make("div", "small", `${this.look.slots[name].sign} slot ${slot + 1}`);
      head.style.color = ink(this.look.slots[name].color);
      const token = make("div", `label bw-draft-edge-${name}`, label);
      const meter = make("div", "meter");
      const fill = make("span", `fill bw-draft-${name}`);
      fill.style.width = `${100 * Math.max(0, sure)}%`;
      meter.append(fill);
      const value = make("div", "small", sure < 0 ? "not recorded" : fixed(sure, 2));
      column.append(head, token, meter, value);
      for (const [other, unary, score, mark] of block.candidates?.[slot] ?? []) {
        const row = make("div", "candidate" + ["", " bw-draft-taken", " bw-draft-right"][mark]);
        row.append(make("span", "arrow", ["", "▸", "≠"][mark]), make("span", "name", other));
        row.append(make("span", "score", fixed(score, 1)));
        const own = unary === null ? "" : `unary logit ${fixed(unary, 1)}, `;
        const why = ["", ", drafted", ", what the target wrote"][mark];
        row.title = `${other}: ${own}realized score ${fixed(score, 1)}${why}`;
        column.append(row);
      }
      columns.push(column);
    });
    const own = make("div", "column");
    if (block.kind >= 0) {
      const mark = this.look.kinds[block.kind];
      const head = make("div", "small", `${mark.sign} ${mark.kind}`);
      head.style.color = ink(mark.color);
      own.title = mark.word;
      own.append(head, make("div", "label bw-draft-edge-own", block.token));
      own.lastChild.style.borderColor = mark.color;
    } else {
      own.append(make("div", "small", block.finished ? `ended: ${block.finished}` : "cut here"));
    }
    columns.push(own);
    this.columns.replaceChildren(...columns);
  }
}

function same(a, b) {
  return !!a && !!b && a.step === b.step && a.request === b.request;
}

// -- charts -----------------------------------------------------------------------------------

class Chart {
  constructor(title, legend, draw) {
    this.element = make("div", "chart");
    this.element.append(make("div", "chart-title", title));
    const keys = make("div", "chart-legend");
    for (const [dash, color, symbol, words] of legend) {
      const wide = dash === null && !symbol ? 0 : 26;
      const sample = shape("svg", { width: wide, height: 10, "aria-hidden": "true" });
      if (dash !== null) sample.append(line([[1, 5], [25, 5]], color, dash, 2));
      if (symbol) sample.append(point(13, 5, color, symbol));
      keys.append(sample, make("span", "", words));
    }
    this.svg = shape("svg", { role: "img" });
    this.element.append(keys, this.svg);
    this.drawing = draw;
  }

  draw(figures) {
    this.figures = figures ?? this.figures;
    const width = this.element.clientWidth;
    if (!this.figures || !width) return;
    const height = 150;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const box = { left: 34, right: width - 8, top: 14, bottom: height - 34 };
    if (this.figures.events) {
      this.drawing(this.svg, box, this.figures);
    } else {
      const x = (box.left + box.right) / 2;
      const words = "undefined: nothing was drafted";
      this.svg.append(shape("text", { x, y: height / 2, "text-anchor": "middle" }, words));
      this.svg.setAttribute("aria-label", words);
    }
  }
}

function line(points, color, dash, width) {
  return shape("polyline", {
    points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "),
    fill: "none", stroke: color, "stroke-width": width, "stroke-dasharray": dash,
  });
}

function point(x, y, color, symbol) {
  if (symbol === "circle") return shape("circle", { cx: x, cy: y, r: 3.5, fill: color });
  const d = `M${x} ${y - 5.5}L${x + 5.5} ${y}L${x} ${y + 5.5}L${x - 5.5} ${y}Z`;
  return shape("path", { d, fill: color });
}

function across(svg, box, y, text) {
  svg.append(
    shape("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: "bw-draft-grid" }),
    shape("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, text),
  );
}

function below(svg, box, x, text, row = 0, anchor = "middle") {
  svg.append(shape("text", { x, y: box.bottom + 14 + 14 * row, "text-anchor": anchor }, text));
}

// Every how many of these words fit under an axis with so much room for each.
function spacing(words, room) {
  return Math.ceil((7 * Math.max(...words.map((word) => `${word}`.length)) + 6) / room);
}

function drawRun(look) {
  return (svg, box, { line: points, events }) => {
    const most = Math.max(2, Math.ceil(Math.max(...points.map((p) => Math.max(p[1], p[2])))));
    const tokens = points[points.length - 1][0];
    const x = (t) => box.left + ((box.right - box.left) * t) / tokens;
    const y = (v) => box.bottom - ((box.bottom - box.top) * (v - 1)) / (most - 1);
    for (let v = 1; v <= most; v += 1) across(svg, box, y(v), `${v}`);
    below(svg, box, box.left, "0", 0, "start");
    below(svg, box, box.right, `${tokens.toLocaleString("en")} tokens`, 0, "end");
    svg.append(
      line(points.map((p) => [x(p[0]), y(p[2])]), look.recent, "2 3", 1.5),
      line(points.map((p) => [x(p[0]), y(p[1])]), look.pooled, "", 2.5),
    );
    const last = points[points.length - 1];
    svg.append(point(x(last[0]), y(last[1]), look.pooled, "circle"));
    const words = `acceptance length ${last[1].toFixed(2)} after ${events} draft events`;
    svg.setAttribute("aria-label", words);
  };
}

function drawHistogram(look) {
  return (svg, box, { histogram, events }) => {
    const most = Math.max(...histogram);
    const step = (box.right - box.left) / histogram.length;
    const every = spacing([histogram.length - 1], step);
    svg.append(shape("line", {
      x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "bw-draft-grid",
    }));
    histogram.forEach((count, run) => {
      const height = ((box.bottom - box.top) * count) / most;
      const x = box.left + step * run;
      const bar = shape("rect", {
        x: x + 2, width: Math.max(1, step - 4), y: box.bottom - height, height,
        fill: look.slots.accepted.color, "fill-opacity": 0.75, "data-count": count,
      });
      bar.append(shape("title", {}, `${run} accepted: ${count} of ${events} events`));
      svg.append(bar);
      if (step > 22 && count) {
        const y = box.bottom - height - 4;
        const share = percent(count / events);
        svg.append(shape("text", { x: x + step / 2, y, "text-anchor": "middle" }, share));
      }
      if (run % every === 0) below(svg, box, x + step / 2, `${run}`);
    });
    if (step <= 22) across(svg, box, box.top, percent(most / events));
    below(svg, box, (box.left + box.right) / 2, "accepted drafts of a block", 1);
    svg.setAttribute("aria-label", histogram.map((n, run) => `${run} accepted: ${n}`).join(", "));
  };
}

function drawCurves(look) {
  return (svg, box, { survival, conditional }) => {
    const step = (box.right - box.left) / survival.length;
    const x = (slot) => box.left + step * (slot + 0.5);
    const y = (v) => box.bottom - (box.bottom - box.top) * v;
    for (const v of [0, 0.5, 1]) across(svg, box, y(v), percent(v));
    const said = [];
    // Survival last: in slot 1 both are the same, and the smaller circle lies on the diamond.
    const curves = [["conditional", conditional, look.conditional, "5 3", "diamond"],
                    ["survival", survival, look.survival, "", "circle"]];
    for (const [name, rates, color, dash, symbol] of curves) {
      const known = rates.map((r, slot) => [slot, ...r]).filter((r) => r[1] !== null);
      const edge = known.map((r) => [x(r[0]), y(r[3])])
        .concat(known.map((r) => [x(r[0]), y(r[2])]).reverse());
      svg.append(shape("polygon", {
        points: edge.map((p) => p.join(",")).join(" "), fill: color, "fill-opacity": 0.15,
      }));
      svg.append(line(known.map((r) => [x(r[0]), y(r[1])]), color, dash, 2));
      for (const [slot, value, low, high, n] of known) {
        const mark = point(x(slot), y(value), color, symbol);
        const words = `slot ${slot + 1}, ${name}: ${percent(value)} `
          + `(${percent(low)} to ${percent(high)}), n = ${n}`;
        mark.append(shape("title", {}, words));
        svg.append(mark);
        said.push([name, words]);
      }
    }
    // Where there is no room for all of them every second or third slot has its number and its n.
    const every = spacing([survival.length, ...conditional.map((r) => r[3])], step);
    below(svg, box, box.left - 6, "n", 1, "end");
    conditional.forEach((r, slot) => {
      if (slot % every) return;
      below(svg, box, x(slot), `${slot + 1}`);
      below(svg, box, x(slot), `${r[3]}`, 1);
    });
    const first = said.filter(([name]) => name === "survival").concat(
      said.filter(([name]) => name !== "survival"));
    svg.setAttribute("aria-label", first.map(([, words]) => words).join("; "));
  };
}

// What a newcomer takes for something else.
const MEANING = {
  "tokens/s": "Tokens over the time of the decode steps, the first one left out.",
  "a step": "Mean time of a decode step: drafting, verifying, and the rest.",
  "acceptance length": "Tokens that a draft event gives: its accepted drafts and the one that is "
    + "the target's own. No rate: it says how many steps are saved.",
  "drafts accepted": "Of all drafts. Falls when more are drafted, also where the acceptance length "
    + "rises. Rejected: verified and refused, or behind a refused one. Trimmed: not verified at "
    + "all, so neither for nor against the drafter.",
  "target's token among the": "At the first refused slot. Where it was one, the selector "
    + "chose another; where it was none, no selector could have been right "
    + "(a recording may have kept only the best of them).",
};

// -- a lane -----------------------------------------------------------------------------------

class Lane {
  constructor(look, { name, slots }, several, ask) {
    this.column = make("div", "lane");
    if (several) this.column.append(make("div", "lane-name", name));
    this.tiles = make("div", "tiles");
    this.text = new TextPane(look, slots ? (place) => this.blocks.pick(place) : null);
    this.column.append(this.tiles, this.text.element);
    this.charts = [];
    if (!slots) return;
    this.below = make("div", "below");
    const of = several ? ` of ${name}` : "";
    const heading = make("div", "section", `Blocks${of}, newest at the right`);
    const hint = make("span", "hint", "height: confidence; click it or a token to pin");
    hint.title = "The drafter's own confidence, not calibrated. A pinned block stays below.";
    heading.append(hint);
    heading.append(slotLegend(look));
    this.blocks = new Blocks(look, slots, ask, (block) => this.text.point(block));
    const row = make("div", "charts");
    this.charts = [
      new Chart("Acceptance length over the run",
        [["", look.pooled, null, "all so far"],
         ["2 3", look.recent, null, "last 64 events"]],
        drawRun(look)),
      new Chart("Accepted drafts of a block",
        [[null, "", null, "share of all draft events"]], drawHistogram(look)),
      new Chart("Acceptance by slot",
        [["", look.survival, "circle", "survival"],
         ["5 3", look.conditional, "diamond", "conditional, its n below"]],
        drawCurves(look)),
    ];
    row.append(...this.charts.map((chart) => chart.element));
    this.below.append(heading, this.blocks.element, row);
  }

  update(item) {
    this.text.append(item.pieces);
    this.tiles.replaceChildren(...item.tiles.map(([label, value, note]) => {
      const tile = make("div", "tile");
      tile.append(make("div", "small", label), make("div", "value", value));
      tile.append(make("div", "small", note));
      tile.dataset.label = label;
      tile.title = MEANING[label.replace(/ \d+( kept)?$/, "")] ?? "";
      return tile;
    }));
    if (item.blocks) this.blocks.update(item.blocks);
    for (const chart of this.charts) chart.draw(item);
  }

  resize() {
    for (const chart of this.charts) chart.draw();
    if (this.blocks && !this.blocks.held) this.blocks.draw();
  }
}

// -- controls ---------------------------------------------------------------------------------

function field(label, input) {
  const element = make("label", "field");
  element.append(make("span", "small", label), input);
  return element;
}

function slider(most, least, step, format) {
  const box = make("span", "slider");
  const input = make("input");
  Object.assign(input, { type: "range", min: least, max: most, step });
  const value = make("output", "slider-value");
  const show = () => { value.textContent = format(Number(input.value)); };
  input.addEventListener("input", show);
  box.append(input, value);
  return { box, input, show };
}

function menu(options) {
  const input = make("select", "menu");
  for (const word of options) input.append(new Option(word, word));
  return input;
}

class Controls {
  constructor(choices, changed) {
    this.element = make("div", "controls");
    this.inputs = {};
    if (choices.live) {
      const count = slider(choices.most, 1, 1, (n) =>
        n === choices.trained ? `${n}, as trained` : `${n}`);
      const heat = slider(1.5, 0, 0.1, (t) => (t === 0 ? "0, greedy" : t.toFixed(1)));
      this.add("speculative_tokens", "draft tokens a step", count.box, count.input, count.show);
      this.add("temperature", "temperature", heat.box, heat.input, heat.show);
      for (const [key, label, words] of [["method", "verification", choices.methods],
                                         ["proposals", "proposals", choices.proposals],
                                         ["beside", "beside it", choices.beside],
                                         ["prompts", "prompts", choices.prompts]]) {
        if (!words?.length) continue;
        const input = menu(words);
        this.add(key, label, input, input);
      }
    } else {
      const speed = menu([0.1, 0.25, 0.5, 1, 2, 5, 20]);
      for (const option of speed.options) option.text = `${option.value} ×`;
      this.add("speed", "speed", speed, speed);
    }
    this.element.addEventListener("change", () => { this.unused(); changed(); });
    this.element.addEventListener("input", () => this.unused());
    this.element.addEventListener("keydown", (event) => event.stopPropagation());
  }

  add(key, label, box, input, show = () => {}) {
    this.inputs[key] = { input, show };
    this.element.append(field(label, box));
  }

  get values() {
    return Object.fromEntries(Object.entries(this.inputs).map(([key, { input }]) => {
      const number = input.type === "range" || key === "speed";
      return [key, number ? Number(input.value) : input.value];
    }));
  }

  set values(values) {
    for (const [key, { input, show }] of Object.entries(this.inputs)) {
      if (!(key in values)) continue;
      if (key === "speed" && ![...input.options].some((o) => Number(o.value) === values[key])) {
        input.append(new Option(`${values[key]} ×`, values[key]));
      }
      input.value = values[key];
      show();
    }
    this.unused();
  }

  // Both play a part above temperature 0 only.
  unused() {
    const greedy = Number(this.inputs.temperature?.input.value) === 0;
    for (const key of ["method", "proposals"]) {
      if (!this.inputs[key]) continue;
      const { input } = this.inputs[key];
      input.disabled = greedy;
      input.parentElement.title = greedy ? "Plays a part above temperature 0 only" : "";
    }
  }
}

// -- the page ---------------------------------------------------------------------------------

function button(label, title) {
  const element = make("button", "button", label);
  element.type = "button";
  element.title = title;
  return element;
}

function legend(look) {
  const element = make("div", "legend");
  for (const mark of look.kinds) {
    const item = make("span", "legend-item");
    const sample = make("span", "token");
    dress(sample, "token", mark, 0);
    item.append(sample, make("span", "", mark.word));
    element.append(item);
  }
  return element;
}

function slotLegend(look) {
  const element = make("div", "legend");
  for (const [name, mark] of Object.entries(look.slots)) {
    const item = make("span", "legend-item");
    item.append(make("span", `swatch bw-draft-${name}`), make("span", "", mark.word));
    element.append(item);
  }
  return element;
}

function render({ model, el }) {
  const look = model.get("look");
  const choices = model.get("choices");
  const root = make("div");
  root.className = "bw-draft";
  for (const [name, value] of [["sans", look.sans], ["mono", look.mono],
                               ["text", `${look.text}px`], ["small", `${look.small}px`],
                               ["accepted", look.slots.accepted.color],
                               ["rejected", look.slots.rejected.color],
                               ["trimmed", look.slots.trimmed.color]]) {
    root.style.setProperty(`--bw-${name}`, value);
  }

  const prompt = make("textarea", "prompt");
  Object.assign(prompt, { rows: 2, spellcheck: false });
  prompt.setAttribute("aria-label", "Prompt");
  prompt.title = "Ctrl-Enter starts";
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      begin("start");
    }
    event.stopPropagation();
  });
  const controls = new Controls(choices, () => changed());

  const start = button("Start", "Decode the prompt from its beginning");
  const pause = button("Pause", "Hold before the next step");
  const step = button("Step", "One step, then hold");
  const stop = button("Stop", "End the run");
  const status = make("span", "status");
  status.setAttribute("role", "status");
  const bar = make("div", "bar-of-buttons");
  bar.append(start, pause, step, stop, status);

  const columns = make("div", "lanes");
  const under = make("div", "under");
  const legends = make("div", "legends");
  legends.append(legend(look));
  if (choices.live) root.append(prompt);
  else root.append(make("div", "source", choices.source));
  root.append(controls.element, bar, columns, legends, under);
  el.append(root);

  let lanes = [];
  let ended = false; // the kernel has: nothing sent arrives any more
  let said = model.get("status"); // the newest of the model's and the updates'
  let waiting = 0; // timer of what the kernel has not heard yet
  let late = false; // and it is late
  let heardAt = Date.now(); // when the last message came
  let news = false; // controls were changed since the start

  function reset(message) {
    const several = message.lanes.length > 1;
    lanes = message.lanes.map((lane, number) =>
      new Lane(look, lane, several, (block) =>
        send({ kind: "block", lane: number, step: block.step, request: block.request })));
    columns.replaceChildren(...lanes.map((lane) => lane.column));
    columns.classList.toggle("bw-draft-several", several);
    under.replaceChildren(...lanes.filter((lane) => lane.below).map((lane) => lane.below));
    legends.hidden = !lanes.length;
    news = false;
    onState();
  }

  function onMessage(message) {
    heardAt = Date.now();
    if (message.kind === "heard" || message.kind === "reset") heard();
    if (message.kind === "reset") reset(message);
    else if (message.kind === "update") {
      message.lanes.forEach((item, number) => lanes[number]?.update(item));
      if (message.status) say(message.status);
    } else if (message.kind === "block") {
      lanes[message.lane]?.blocks?.answer(message.block, message.step);
    }
  }

  function going() {
    return !ended && ["running", "paused"].includes(model.get("state"));
  }

  // s since the last message of a run that goes on, where that is worth a word: a long step, or a
  // kernel that has gone without telling.
  function silence() {
    const seconds = Math.round((Date.now() - heardAt) / 1000);
    return model.get("state") === "running" && !ended && seconds >= 5 ? seconds : 0;
  }

  function say(words) {
    said = words;
    const wrong = ended || (model.get("trouble") && words === model.get("status"));
    status.classList.toggle("bw-draft-trouble", wrong);
    if (ended) status.textContent = "the kernel has ended; run the cell again";
    else if (silence()) status.textContent = `${words} · nothing new for ${silence()} s`;
    else if (late) status.textContent = "waiting: the kernel is busy with a cell";
    else status.textContent = news && going() ? `${words} · changes wait for Restart` : words;
  }

  function onStatus() {
    say(model.get("status"));
  }

  function onState() {
    say(said);
    root.dataset.state = ended ? "lost" : model.get("state");
    start.disabled = step.disabled = ended;
    pause.disabled = stop.disabled = !going();
    start.textContent = going() ? "Restart" : "Start";
    start.classList.toggle("bw-draft-news", news && going());
    pause.textContent = model.get("state") === "paused" && going() ? "Resume" : "Pause";
  }

  function changed() {
    news = true;
    onState();
  }

  function end() {
    ended = true;
    heard();
    onState();
  }

  function onConnection() {
    // ipywidgets marks the view of a model that has lost its kernel before it tells us.
    if (el.closest(".jupyter-widgets-disconnected")) end();
  }

  function heard() {
    clearTimeout(waiting);
    waiting = 0;
    if (late) {
      late = false;
      say(said);
    }
  }

  // Buttons reach the kernel between two cells; one that is not heard at once is not lost.
  function send(content) {
    try {
      model.send(content);
      if (content.kind !== "block" && !waiting) {
        waiting = setTimeout(() => {
          late = true;
          say(said);
        }, 700);
      }
    } catch (error) {
      console.warn("the message did not reach the kernel", error);
      end();
    }
  }

  function onPrompt() {
    if (prompt.value !== model.get("prompt")) prompt.value = model.get("prompt");
  }

  function onSettings() {
    controls.values = model.get("settings");
  }

  const begin = (kind) => send({ kind, prompt: prompt.value, settings: controls.values });
  start.addEventListener("click", () => begin("start"));
  step.addEventListener("click", () => begin("step"));
  stop.addEventListener("click", () => send({ kind: "stop" }));
  pause.addEventListener("click", () =>
    send({ kind: model.get("state") === "paused" ? "resume" : "pause" }));
  prompt.addEventListener("input", changed);

  const clock = setInterval(() => { if (silence()) say(said); }, 1000);
  const watch = new ResizeObserver(() => lanes.forEach((lane) => lane.resize()));
  watch.observe(root);
  const events = {
    "msg:custom": onMessage, "change:status": onStatus, "change:state": onState,
    "change:trouble": onStatus, "change:prompt": onPrompt, "change:settings": onSettings,
    "comm:close": end, comm_live_update: onConnection,
  };
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  legends.hidden = true;
  onPrompt();
  onSettings();
  onState();
  onConnection();
  send({ kind: "ready" });

  return () => {
    watch.disconnect();
    clearInterval(clock);
    clearTimeout(waiting);
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default { render };
