// The page of adaptive verification. What drafting's page has as well (charts, sliders, buttons) is
// drafting.js, which stands before this in the same module. Text reaches the page through
// textContent only.

const MAP_HEIGHT = 344;
const GUTTER = 44; // px left of the map, for numbers of requests
const HEAD = 7; // px above the map: half a line of text
const FOOT = 34; // px under the map, for numbers of slots
const ROW = 40; // px of a row at most
const SIGNS_FROM = 10; // px of a row in which a sign can be read
const FEW = 150; // predictions of which a reliability is not drawn yet
const GAP = 3; // s between two points of a policy that its line does not cross

function fateOf(rows, row, slot) {
  if (slot < rows.accepted[row]) return "accepted";
  return slot < rows.admitted[row] ? "rejected" : "trimmed";
}

function tall(value) {
  return value.toLocaleString("en", { maximumFractionDigits: 0 });
}

// The least round number that is not below.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * power >= value) * power;
}

// An upper end that follows at once when values rise, and only slowly when they fall.
class Ceiling {
  constructor() { this.value = 0; }

  of(value) {
    const wanted = ceiling(value * 1.02);
    if (wanted > this.value || wanted < 0.5 * this.value) this.value = wanted;
    return this.value;
  }
}

// -- survival of every slot ---------------------------------------------------------------------

class SurvivalMap {
  constructor(look) {
    Object.assign(this, { look, rows: null, order: [], chosen: null });
    this.element = make("div", "chart");
    const title = make("div", "section", "Survival of every draft");
    this.sorting = menu(["by survival", "by request"]);
    this.sorting.setAttribute("aria-label", "Order of the rows");
    this.sorting.addEventListener("change", () => this.draw());
    this.sorting.addEventListener("keydown", (event) => event.stopPropagation());
    title.append(this.sorting);
    this.canvas = document.createElement("canvas");
    this.canvas.className = "bw-adapt-map";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.readout = make("div", "small");
    this.readout.classList.add("bw-adapt-readout");
    this.element.append(title, this.keys(), this.canvas, this.readout);
    this.canvas.addEventListener("pointermove", (event) => {
      this.chosen = this.cellAt(event.offsetX, event.offsetY);
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => { this.chosen = null; this.draw(); });
    this.canvas.addEventListener("blur", () => { this.chosen = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const by = move[event.key];
      if (by && this.rows) {
        const [row, slot] = this.chosen ?? [0, -by[1]];
        const clamp = (n, most) => Math.max(0, Math.min(most - 1, n));
        this.chosen = [clamp(row + by[0], this.order.length), clamp(slot + by[1], this.slots)];
        this.draw();
        event.preventDefault();
      }
      event.stopPropagation(); // no shortcut of JupyterLab's
    });
  }

  keys() {
    const keys = make("div", "legend");
    keys.classList.add("bw-adapt-keys");
    const scale = make("span", "legend-item");
    const ramp = make("span", "swatch");
    ramp.classList.add("bw-adapt-ramp");
    scale.append(ramp, make("span", "", "survival 0 to 1"));
    const edge = make("span", "legend-item");
    const sample = make("span", "swatch");
    sample.classList.add("bw-adapt-frontier");
    edge.append(sample, make("span", "", "verified: left of it"));
    keys.append(scale, edge);
    this.signs = []; // keys for high rows, and for low ones
    this.bars = [];
    for (const [name, word] of [["accepted", "accepted"], ["rejected", "refused"]]) {
      const mark = this.look.slots[name];
      const sign = make("b", "", mark.sign);
      sign.style.color = ink(mark.color);
      const bar = make("span", "swatch");
      bar.classList.add(`bw-adapt-${name}`);
      for (const [sample, several] of [[sign, this.signs], [bar, this.bars]]) {
        const item = make("span", "legend-item");
        item.append(sample, make("span", "", word));
        several.push(item);
        keys.append(item);
      }
    }
    return keys;
  }

  get slots() {
    return this.rows?.survival[0]?.length ?? 0;
  }

  // The kernel's rows lie in columns: requests, drafted, admitted, accepted, survival.
  update(rows) {
    this.rows = rows;
    this.draw();
  }

  sort() {
    const { request, survival } = this.rows;
    const numbers = request.map((_, row) => row);
    const sums = survival.map((slots) => slots.reduce((sum, s) => sum + Math.max(0, s), 0));
    const first = this.sorting.value === "by survival"
      ? (a, b) => sums[b] - sums[a] || request[a] - request[b]
      : (a, b) => request[a] - request[b];
    this.order = numbers.sort(first);
  }

  cellAt(x, y) {
    if (!this.box) return null;
    const { cell, height } = this.box;
    const row = Math.floor((y - HEAD) / height);
    const slot = Math.floor((x - GUTTER) / cell);
    const inside = row >= 0 && row < this.order.length && slot >= 0 && slot < this.slots;
    return inside ? [row, slot] : null;
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.rows || !width || !this.slots) return;
    this.sort();
    const dots = window.devicePixelRatio || 1;
    const count = this.order.length;
    const height = Math.min(ROW, (MAP_HEIGHT - HEAD - FOOT) / count);
    const cell = (width - GUTTER - 2) / this.slots;
    this.box = { cell, height };
    const { canvas } = this;
    const tallness = Math.round(height * count) + HEAD + FOOT;
    const sizes = [Math.round(width * dots), Math.round(tallness * dots)];
    if (canvas.width !== sizes[0] || canvas.height !== sizes[1]) {
      [canvas.width, canvas.height] = sizes;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${tallness}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.clearRect(0, 0, width, tallness);
    pen.translate(0, HEAD);
    for (const item of this.signs) item.hidden = height < SIGNS_FROM;
    for (const item of this.bars) item.hidden = height >= SIGNS_FROM;
    this.paper = getComputedStyle(document.body).getPropertyValue("--jp-layout-color0") || "Canvas";
    const text = getComputedStyle(this.element).color;
    pen.font = `${this.look.small}px ${getComputedStyle(this.element).fontFamily}`;
    pen.textBaseline = "middle";
    this.drawCells(pen);
    this.drawFrontier(pen, text);
    this.drawAxes(pen, text);
    this.drawChosen(pen, text);
    const { admitted, drafted, accepted } = this.rows;
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    const requests = count === 1 ? "1 request" : `${count} requests`;
    canvas.setAttribute("aria-label", `${requests}, ${sum(drafted)} drafts: `
      + `${sum(admitted)} verified, ${sum(accepted)} accepted`);
  }

  drawCells(pen) {
    const { cell, height } = this.box;
    const gap = height > 5 ? 1 : 0;
    this.order.forEach((row, place) => {
      const y = place * height;
      for (let slot = 0; slot < this.rows.drafted[row]; slot += 1) {
        const survival = this.rows.survival[row][slot];
        const x = GUTTER + slot * cell;
        if (survival >= 0) {
          pen.globalAlpha = 0.06 + 0.8 * (survival / 1000);
          pen.fillStyle = this.look.survival;
          pen.fillRect(x, y, cell - 1, height - gap);
          pen.globalAlpha = 1;
        }
        const vain = slot > this.rows.accepted[row]; // verified behind a refused one
        this.drawFate(pen, fateOf(this.rows, row, slot), x + 4, y, height - gap, vain);
      }
    });
  }

  // A sign where a row has room for one, else a bar: whole for accepted, thin for refused.
  drawFate(pen, name, x, y, height, vain) {
    if (name === "trimmed") return;
    const mark = this.look.slots[name];
    const bar = Math.min(9, this.box.cell / 4);
    if (height >= SIGNS_FROM) {
      // On a patch of the page's own colour: green on violet could not be read.
      pen.fillStyle = this.paper;
      pen.fillRect(x - 1, y + height / 2 - 6, 13, 12);
      pen.fillStyle = mark.color;
      pen.globalAlpha = vain ? 0.5 : 1;
      pen.textAlign = "center";
      pen.font = pen.font.replace(/^(bold )?/, "bold ");
      pen.fillText(mark.sign, x + 5.5, y + height / 2 + 0.5);
      pen.font = pen.font.replace(/^bold /, "");
      pen.globalAlpha = 1;
      return;
    }
    pen.fillStyle = this.paper;
    pen.fillRect(x - 1, y, bar + 2, height);
    pen.fillStyle = mark.color;
    pen.globalAlpha = vain ? 0.5 : 1;
    if (name === "accepted") pen.fillRect(x, y, bar, Math.max(1.5, height - 0.5));
    else pen.fillRect(x, y + height / 2 - 0.75, bar, 1.5);
    pen.globalAlpha = 1;
  }

  drawFrontier(pen, text) {
    const { cell, height } = this.box;
    // Low rows that are not sorted jump too often for their ends to be joined.
    const apart = height < 5 && this.sorting.value === "by request";
    const path = () => {
      pen.beginPath();
      this.order.forEach((row, place) => {
        const x = GUTTER + this.rows.admitted[row] * cell - 0.5;
        if (place === 0 || apart) pen.moveTo(x, place * height);
        else pen.lineTo(x, place * height);
        pen.lineTo(x, (place + 1) * height);
      });
      pen.stroke();
    };
    const wide = height < 5 ? 1.25 : 2;
    pen.strokeStyle = this.paper;
    pen.lineWidth = 2 * wide;
    path();
    pen.strokeStyle = text;
    pen.lineWidth = wide;
    path();
  }

  drawAxes(pen, text) {
    const { cell, height } = this.box;
    const bottom = this.order.length * height;
    pen.fillStyle = text;
    pen.globalAlpha = 0.72;
    pen.textAlign = "right";
    const every = Math.ceil(13 / height);
    this.order.forEach((row, place) => {
      if (place % every) return;
      pen.fillText(`${this.rows.request[row]}`, GUTTER - 6, (place + 0.5) * height);
    });
    pen.textAlign = "center";
    const step = Math.ceil(20 / cell);
    for (let slot = 0; slot < this.slots; slot += step) {
      pen.fillText(`${slot + 1}`, GUTTER + (slot + 0.5) * cell, bottom + 10);
    }
    pen.fillText("slot of the block", GUTTER + (this.slots * cell) / 2, bottom + 25);
    pen.textAlign = "left";
    pen.fillText("request", 0, bottom + 10);
    pen.globalAlpha = 1;
  }

  drawChosen(pen, text) {
    const cell = this.chosen;
    if (!cell || cell[0] >= this.order.length || cell[1] >= this.slots) {
      this.readout.textContent = "Point at a draft, or move with the arrow keys.";
      return;
    }
    const [place, slot] = cell;
    const row = this.order[place];
    pen.strokeStyle = text;
    pen.lineWidth = 1;
    pen.setLineDash([2, 2]);
    pen.strokeRect(GUTTER + slot * this.box.cell + 0.5, place * this.box.height + 0.5,
                   this.box.cell - 2, this.box.height - 1);
    pen.setLineDash([]);
    this.readout.textContent = this.words(row, slot);
  }

  words(row, slot) {
    const { request, drafted, survival } = this.rows;
    const name = `request ${request[row]}, slot ${slot + 1}`;
    if (slot >= drafted[row]) return `${name}: not drafted, the request is at its end`;
    const chance = survival[row][slot];
    const fate = fateOf(this.rows, row, slot);
    let words = this.look.slots[fate].word;
    if (fate === "rejected") {
      words = slot > this.rows.accepted[row] ? "verified in vain, behind a refused one" : "refused";
    }
    return `${name}: survival ${chance < 0 ? "unknown" : (chance / 1000).toFixed(2)}, ${words}`;
  }
}

// -- charts ---------------------------------------------------------------------------------------

// A chart of drafting's with a height of its own, and words where there is nothing to draw.
class Panel extends Chart {
  constructor(title, legend, drawing, { height = 150, empty = "nothing yet" } = {}) {
    super(title, legend, drawing);
    Object.assign(this, { height, empty, words: "" }); // words: of a drawing that says none
    this.note = make("div", "small");
    this.note.classList.add("bw-adapt-note");
    this.element.append(this.note);
  }

  draw(figures) {
    if (figures !== undefined) this.figures = figures;
    const width = this.element.clientWidth;
    if (!width) return;
    const { height, svg } = this;
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    const box = { left: 38, right: width - 10, top: 16, bottom: height - 34 };
    if (this.figures) {
      this.note.textContent = this.drawing(svg, box, this.figures) ?? this.words;
      return;
    }
    const x = (box.left + box.right) / 2;
    svg.append(shape("text", { x, y: height / 2, "text-anchor": "middle" }, this.empty));
    svg.setAttribute("aria-label", this.empty);
  }
}

function axisOf(svg, box, most, format) {
  const y = (v) => box.bottom - ((box.bottom - box.top) * Math.min(v, most)) / most;
  for (const v of [0, most / 2, most]) across(svg, box, y(v), format(v));
  return y;
}

function drawObjective(look) {
  const upper = new Ceiling();
  return (svg, box, { own, drafts, chosen, curve, best, exact, after }) => {
    const most = upper.of(Math.max(...curve.map((p) => p[1]), ...after.map((p) => p[1])));
    const y = axisOf(svg, box, most, (v) => v.toLocaleString("en", { maximumFractionDigits: 1 }));
    const end = Math.max(drafts, best);
    const x = (budget) => box.left + ((box.right - box.left) * budget) / end;
    const at = (points, budget) => points.find((p) => p[0] === budget)?.[1] ?? 0;
    below(svg, box, box.left, "0", 0, "start");
    below(svg, box, box.right, `all ${tall(end)}`, 0, "end");
    below(svg, box, (box.left + box.right) / 2, "budget: drafts verified in the step", 1);
    svg.append(
      line(after.map((p) => [x(p[0]), y(p[1])]), look.hindsight, "4 3", 1.5),
      line(curve.map((p) => [x(p[0]), y(p[1])]), look.chosen, own ? "" : "1 3", 2.5),
    );
    const lines = [[best, after, look.hindsight, "diamond", "4 3"],
                   [chosen, curve, look.chosen, "circle", ""]];
    for (const [budget, points, color, symbol, dash] of lines) {
      const value = at(points, budget);
      svg.append(line([[x(budget), box.bottom], [x(budget), y(value)]], color, dash, 1));
      svg.append(point(x(budget), y(value), color, symbol));
    }
    const sure = exact ? "" : ", estimated";
    const words = `verified ${tall(chosen)} of ${tall(drafts)}; best in hindsight ${tall(best)}`
      + `${sure}`;
    svg.setAttribute("aria-label", words);
    return own ? words : `${words}; the curve is what adaptive would have weighed`;
  };
}

// Lines over the last minute of decode steps: fixed verification dashed and faint, any other policy
// in one colour. Marks say where the policy, or how many decode, changed.
function drawLine(look, column, words, format, under = null) {
  const upper = new Ceiling();
  return (svg, box, points) => {
    const known = points.filter((p) => p[column] !== null);
    const all = known.flatMap((p) => (under === null ? [p[column]] : [p[column], p[under]]));
    const most = upper.of(Math.max(...all, 0));
    const y = axisOf(svg, box, most, format);
    const span = Math.min(look.span, Math.max(5, -points[0][0]));
    const x = (t) => box.right + ((box.right - box.left) * Math.max(t, -span)) / span;
    below(svg, box, box.left, `−${Math.round(span)} s`, 0, "start");
    below(svg, box, box.right, "now", 0, "end");
    below(svg, box, (box.left + box.right) / 2, "s of decode steps", 1);
    drawChanges(svg, box, changes(points).filter(([t]) => t >= -span), x);
    if (under !== null) {
      svg.append(line(known.map((p) => [x(p[0]), y(p[under])]), look.drafted, "1 3", 2));
    }
    for (const run of runs(known)) {
      const plain = run[0][5] === "fixed";
      const drawn = line(run.map((p) => [x(p[0]), y(p[column])]),
                         plain ? look.fixed : look.policy, plain ? "5 3" : "", 2);
      drawn.append(shape("title", {}, run[0][5]));
      svg.append(drawn);
    }
    const last = known[known.length - 1];
    const end = last?.[5] === "fixed" ? look.fixed : look.policy;
    if (last) svg.append(point(x(last[0]), y(last[column]), end, "circle"));
    svg.setAttribute("aria-label", last ? `${words}: ${format(last[column])} now` : words);
  };
}

// Whether two policies may be taking turns: one of them then is fixed verification.
function alternate(policy, other) {
  return policy === other || policy === "fixed" || other === "fixed";
}

// Points of one policy and as many sequences, in one piece where it only took turns with fixed.
function runs(points) {
  const found = [];
  const open = new Map();
  for (const point of points) {
    const key = `${point[5]} ${point[6]}`;
    for (const [other, run] of open) {
      const last = run[run.length - 1];
      if (last[6] !== point[6] || !alternate(last[5], point[5])) open.delete(other);
    }
    const run = open.get(key);
    if (run && point[0] - run[run.length - 1][0] < GAP) run.push(point);
    else {
      open.set(key, [point]);
      found.push(open.get(key));
    }
  }
  return found;
}

// [seconds, words] of each change between two points. Policies that take turns change all the time:
// what came back soon is no change.
function changes(points) {
  const found = [];
  for (let n = 1; n < points.length; n += 1) {
    const [, , , , , policy, requests] = points[n];
    const [before, , , , , old, few] = points[n - 1];
    const soon = (other, at) => points.some((p) =>
      p[5] === other && p[6] === requests && at(p[0] - before) && Math.abs(p[0] - before) < GAP);
    const turns = alternate(policy, old)
      && (soon(policy, (t) => t < 0) || soon(old, (t) => t > 0.01));
    if (requests !== few) found.push([before, `${requests} together`]);
    else if (policy !== old && !turns) found.push([before, policy]);
  }
  return found;
}

// A label goes where it is not covered by the next one, and to the left of its mark at the right end.
function drawChanges(svg, box, found, x) {
  let free = box.right + 10;
  for (const [t, name] of found.reverse()) {
    svg.append(shape("line", {
      x1: x(t), x2: x(t), y1: box.top - 4, y2: box.bottom, class: "bw-adapt-change",
    }));
    const width = 6.6 * name.length;
    const before = x(t) + 3 + width > free;
    const left = before ? Math.min(x(t) - 3, free) - width - 8 : x(t) + 3;
    if (left + width > free || left < box.left - 30) continue;
    if (left + width < x(t) - 4) continue; // too far from its mark to be read with it
    const label = shape("text", { x: left, y: box.top - 6 },
                        before ? `${name} →` : name);
    label.append(shape("title", {}, `from here on ${name}`));
    svg.append(label);
    free = Math.min(left, x(t)) - 8;
  }
}

function drawReliability(look) {
  return (svg, box, { early, late, first }) => {
    const x = (v) => box.left + (box.right - box.left) * v;
    const y = axisOf(svg, box, 1, (v) => percent(v));
    for (const v of [0, 0.5, 1]) {
      below(svg, box, x(v), percent(v), 0, v === 0 ? "start" : v === 1 ? "end" : "middle");
    }
    below(svg, box, (box.left + box.right) / 2, "predicted, given that all before were accepted", 1);
    svg.append(line([[x(0), y(0)], [x(1), y(1)]], look.neutral, "1 3", 1.5));
    const said = [];
    for (const [bins, color, dash, symbol, name] of [
      [early, look.start, "5 3", "diamond", `first ${first} steps`],
      [late, look.calibrated, "", "circle", "since then"]]) {
      if (bins.count < FEW) {
        if (bins.count) said.push(`${name}: ${bins.count} predictions, too few yet`);
        continue;
      }
      svg.append(line(bins.bins.map(([p, o]) => [x(p), y(o)]), color, dash, 1.5));
      for (const [p, o, n] of bins.bins) {
        const mark = point(x(p), y(o), color, symbol);
        mark.append(shape("title", {}, `${name}: predicted ${percent(p)}, came true ${percent(o)}, `
          + `n = ${n}`));
        svg.append(mark);
      }
      said.push(`${name}: off by ${(100 * bins.error).toFixed(1)}% on average `
        + `(ECE, n = ${tall(bins.count)})`);
    }
    svg.setAttribute("aria-label", said.join("; "));
    return said.join("; ");
  };
}

const TRIMMED = "Falls where drafts are trimmed: judge by tokens/s.";

const ABOUT = {
  "tokens/s": "Tokens over the time of the decode steps with this policy and so many sequences, "
    + "the run's first step left out. Prompts are not counted.",
  "over fixed": "Both in this run, with as many sequences. Times change with what else the machine "
    + "does: let both take turns (policy) to measure them in the same minutes.",
  "over adaptive": "Both in this run, with as many sequences.",
  "a step": "Mean time of a decode step.",
  "drafts verified": "Budget: the target runs over these and never sees the others.",
  "acceptance length": "Tokens that a draft event gives. It falls when drafts are trimmed, also "
    + "where more tokens come in a second: no figure to judge a policy by.",
  "time deciding": "Confidences, the policy's decision and what the estimator learns, of the whole "
    + "step.",
};

// -- the page -------------------------------------------------------------------------------------

class AdaptiveControls {
  constructor(choices, now, later) {
    this.element = make("div", "controls");
    this.inputs = {};
    this.sizes = choices.concurrencies;
    const size = slider(this.sizes.length - 1, 0, 1, (n) => `${this.sizes[n]}`);
    const heat = slider(1.5, 0, 0.1, (t) => (t === 0 ? "0, greedy" : t.toFixed(1)));
    const count = slider(choices.drafts, 1, 1, (n) =>
      n === choices.trained ? `${n}, as trained` : `${n}`);
    const policy = menu(choices.policies);
    this.add("policy", "policy", policy, policy);
    this.add("concurrency", "sequences together", size.box, size.input, size.show);
    this.add("temperature", "temperature", heat.box, heat.input, heat.show);
    this.add("speculative_tokens", "draft tokens a step", count.box, count.input, count.show);
    const act = (event) => {
      const atOnce = [policy, size.input].includes(event.target);
      (atOnce ? now : later)();
    };
    this.element.addEventListener("change", act);
    this.element.addEventListener("keydown", (event) => event.stopPropagation());
    policy.title = size.input.title = "Acts before the next step";
    heat.input.title = count.input.title = "Counts from the next start";
  }

  add(key, label, box, input, show = () => {}) {
    this.inputs[key] = { input, show };
    this.element.append(field(label, box));
  }

  get values() {
    const { policy, concurrency, temperature, speculative_tokens: drafts } = this.inputs;
    return {
      policy: policy.input.value,
      concurrency: this.sizes[Number(concurrency.input.value)],
      temperature: Number(temperature.input.value),
      speculative_tokens: Number(drafts.input.value),
    };
  }

  set values(values) {
    for (const [key, { input, show }] of Object.entries(this.inputs)) {
      if (!(key in values)) continue;
      if (key === "concurrency" && !this.sizes.includes(values[key])) {
        this.sizes.push(values[key]);
        this.sizes.sort((a, b) => a - b);
        input.max = this.sizes.length - 1;
      }
      input.value = key === "concurrency" ? this.sizes.indexOf(values[key]) : values[key];
      show();
    }
  }
}

function drawTiles(element, tiles) {
  element.replaceChildren(...tiles.map(([label, value, note]) => {
    const tile = make("div", "tile");
    tile.append(make("div", "small", label), make("div", "value", value));
    tile.append(make("div", "small", note));
    tile.dataset.label = label;
    tile.title = ABOUT[label] ?? "";
    return tile;
  }));
}

function renderAdaptive({ model, el }) {
  const look = model.get("look");
  const root = make("div");
  root.className = "bw-draft bw-adapt";
  for (const [name, value] of [["sans", look.sans], ["mono", look.mono],
                               ["text", `${look.text}px`], ["small", `${look.small}px`],
                               ["accepted", look.slots.accepted.color],
                               ["rejected", look.slots.rejected.color],
                               ["trimmed", look.slots.trimmed.color],
                               ["survival", look.survival]]) {
    root.style.setProperty(`--bw-${name}`, value);
  }
  const start = button("Start", "Begin with the first prompts");
  const pause = button("Pause", "Hold before the next step");
  const step = button("Step", "One step, then hold");
  const stop = button("Stop", "End the run");
  const status = make("span", "status");
  status.setAttribute("role", "status");
  const bar = make("div", "bar-of-buttons");
  bar.append(start, pause, step, stop, status);
  const controls = new AdaptiveControls(
    model.get("choices"),
    () => send({ kind: "change", settings: live(controls.values) }),
    () => { news = true; onState(); },
  );

  const body = make("div");
  body.className = "bw-adapt-body";
  const reason = make("div");
  reason.className = "bw-adapt-reason";
  const tiles = make("div", "tiles");
  const map = new SurvivalMap(look);
  const objective = new Panel(
    "Expected tokens/ms by budget",
    [["", look.chosen, "circle", "weighed, and verified"],
     ["4 3", look.hindsight, "diamond", "best in hindsight"]],
    drawObjective(look), { height: 176, empty: "no drafts, or no cost table yet" });
  const trust = new Panel(
    "Are the confidences right?",
    [["5 3", look.start, "diamond", "start"], ["", look.calibrated, "circle", "calibrated"],
     ["1 3", look.neutral, null, "right"]],
    drawReliability(look), { height: 176 });
  const lines = [
    new Panel("Drafts verified a step",
      [["", look.policy, null, "not fixed"], ["5 3", look.fixed, null, "fixed"],
       ["1 3", look.drafted, null, "drafted"]],
      drawLine(look, 1, "drafts verified", tall, 2)),
    new Panel("Tokens/s, all together",
      [["", look.policy, null, "not fixed"], ["5 3", look.fixed, null, "fixed"]],
      drawLine(look, 3, "tokens a second", tall)),
    new Panel("Acceptance length",
      [["", look.policy, null, "not fixed"], ["5 3", look.fixed, null, "fixed"]],
      drawLine(look, 4, "acceptance length", (v) => v.toFixed(1))),
  ];
  const lengths = lines[lines.length - 1];
  const right = make("div", "column");
  right.className = "bw-adapt-right";
  right.append(objective.element, trust.element);
  const main = make("div");
  main.className = "bw-adapt-main";
  main.append(map.element, right);
  const row = make("div", "charts");
  row.append(...lines.map((chart) => chart.element));
  const costs = make("div");
  costs.className = "bw-adapt-costs";
  const costWords = make("span");
  const measure = button("Measure again", "Measure what steps cost anew, and begin with that");
  measure.hidden = true;
  costs.append(costWords, measure);
  body.append(reason, tiles, main, row, costs);
  root.append(controls.element, bar, body);
  el.append(root);

  let ended = false; // the kernel has: nothing sent arrives any more
  let said = model.get("status");
  let waiting = 0; // timer of what the kernel has not heard yet
  let late = false;
  let heardAt = Date.now();
  let news = false; // controls that count from the next start were changed

  const live = ({ policy, concurrency }) => ({ policy, concurrency });

  function reset() {
    body.hidden = true;
    map.rows = null;
    for (const panel of [objective, trust, ...lines]) panel.figures = null;
    costWords.textContent = "";
    measure.hidden = true;
    news = false;
    onState();
  }

  function update(message) {
    body.hidden = false;
    reason.classList.toggle("bw-draft-trouble", message.failed);
    const why = message.failed ? message.reason : `${message.policy}: ${message.reason}`;
    reason.textContent = why;
    drawTiles(tiles, message.tiles);
    map.update(message.rows);
    objective.draw(message.objective);
    lengths.words = message.verdict || TRIMMED;
    for (const chart of lines) chart.draw(message.lines.length ? message.lines : null);
    if (message.reliability) {
      const { early, late: later } = message.reliability;
      trust.draw(early.count + later.count ? message.reliability : null);
    }
    if (message.drift) {
      costWords.textContent = message.drift.sentence;
      costWords.classList.toggle("bw-draft-trouble", message.drift.alarm);
      measure.hidden = !message.drift.alarm;
    }
    if (message.status) say(message.status);
  }

  function onMessage(message) {
    heardAt = Date.now();
    if (message.kind === "heard" || message.kind === "reset") heard();
    if (message.kind === "reset") reset();
    else if (message.kind === "update") update(message);
  }

  function going() {
    return !ended && ["running", "paused"].includes(model.get("state"));
  }

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
    heardAt = Date.now();
    say(model.get("status"));
  }

  function onState() {
    say(said);
    root.dataset.state = ended ? "lost" : model.get("state");
    start.disabled = step.disabled = measure.disabled = ended;
    pause.disabled = stop.disabled = !going();
    start.textContent = going() ? "Restart" : "Start";
    start.classList.toggle("bw-draft-news", news && going());
    pause.textContent = model.get("state") === "paused" && going() ? "Resume" : "Pause";
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
      if (content.kind !== "change" && !waiting) {
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

  function onSettings() {
    controls.values = model.get("settings");
  }

  function redraw() {
    map.draw();
    for (const panel of [objective, trust, ...lines]) panel.draw();
  }

  const begin = (kind) => send({ kind, settings: controls.values });
  start.addEventListener("click", () => begin("start"));
  step.addEventListener("click", () => begin("step"));
  stop.addEventListener("click", () => send({ kind: "stop" }));
  measure.addEventListener("click", () => begin("measure"));
  pause.addEventListener("click", () =>
    send({ kind: model.get("state") === "paused" ? "resume" : "pause" }));

  const clock = setInterval(() => { if (silence()) say(said); }, 1000);
  const watch = new ResizeObserver(redraw);
  watch.observe(root);
  const theme = new MutationObserver(() => setTimeout(redraw, 100)); // once its colours are there
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name"] });
  const events = {
    "msg:custom": onMessage, "change:status": onStatus, "change:state": onState,
    "change:trouble": onStatus, "change:settings": onSettings,
    "comm:close": end, comm_live_update: onConnection,
  };
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  body.hidden = true;
  onSettings();
  onState();
  onConnection();
  send({ kind: "ready" });

  return () => {
    watch.disconnect();
    theme.disconnect();
    clearInterval(clock);
    clearTimeout(waiting);
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default { render: renderAdaptive };
