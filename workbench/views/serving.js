// The page of a running engine. What drafting's page has as well (charts by slot, menus, buttons) is
// drafting.js, which stands before this in the same module. Text reaches the page through
// textContent only, whatever a server calls its model or its engines.

const STALE_HERTZ = 1; // times a second that the age of what is shown is told anew

// The least round number that is not below.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * power >= value * 0.999999) * power;
}

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const three = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

// Before the latest sample, which is older than now where a server is silent or was recorded.
function ago(seconds) {
  if (seconds < 0.05) return "latest";
  return seconds < 100 ? `−${three(seconds)} s` : `−${three(seconds / 60)} min`;
}

// Lines over time, newest at the right. Rows are [seconds before the end (negative), values …]; an
// empty row is a gap.
class TimeChart {
  constructor(title, series, { floor = 0, least = 0, form = whole, empty = "nothing came",
                                orders = Infinity } = {}) {
    Object.assign(this, { series, floor, least, form, empty, orders, rows: null, span: 0,
                          at: null });
    this.element = make("div", "chart");
    this.element.classList.add("bw-serve-chart");
    this.element.tabIndex = 0;
    this.element.append(make("div", "chart-title", title));
    const keys = make("div", "chart-legend");
    for (const { name, color, dash } of series) {
      const sample = shape("svg", { width: 26, height: 10, "aria-hidden": "true" });
      sample.append(line([[1, 5], [25, 5]], color, dash, 2));
      keys.append(sample, make("span", "", name));
    }
    this.svg = shape("svg", { role: "img" });
    this.readout = make("div", "small");
    this.readout.classList.add("bw-serve-readout");
    this.element.append(keys, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.look(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.look(null));
    this.element.addEventListener("blur", () => this.look(null));
    this.element.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const known = (this.rows ?? []).filter((row) => row.length);
      if (!by || !known.length) return;
      const now = known.findIndex((row) => row[0] === this.at);
      const next = now < 0 ? known.length - 1 : Math.max(0, Math.min(known.length - 1, now + by));
      this.at = known[next][0];
      this.draw();
      event.preventDefault();
      event.stopPropagation(); // no shortcut of JupyterLab's
    });
  }

  // The point nearest to the pointer.
  look(x) {
    this.at = null;
    if (x !== null && this.box) {
      const { left, right } = this.box;
      const t = -this.span + (this.span * (x - left)) / (right - left);
      for (const row of this.rows) {
        if (row.length && (this.at === null || Math.abs(row[0] - t) < Math.abs(this.at - t))) {
          [this.at] = row;
        }
      }
    }
    this.draw();
  }

  update(rows, span) {
    this.rows = rows ?? [];
    this.span = span || Math.max(1, ...this.rows.filter((r) => r.length).map((r) => -r[0]));
    if (!this.rows.some((row) => row.length && row[0] === this.at)) this.at = null;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.rows || !width) return;
    const height = 132;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const box = { left: 52, right: width - 8, top: 10, bottom: height - 20 };
    this.box = box;
    const values = this.rows.flatMap((row) => row.slice(1)).filter((v) => v !== null);
    if (!values.length) {
      const x = (box.left + box.right) / 2;
      this.svg.append(shape("text", { x, y: height / 2, "text-anchor": "middle" }, this.empty));
      this.svg.setAttribute("aria-label", this.empty);
      this.readout.textContent = "";
      return;
    }
    // Of values of several orders the scale is logarithmic, from one power of ten to another.
    const least = Math.min(...values.filter((v) => v > 0));
    const log = Math.max(...values) > this.orders * least;
    const power = (v, round) => 10 ** round(Math.log10(v));
    const low = log ? power(least, Math.floor) : this.floor;
    const top = log ? power(Math.max(...values), Math.ceil) : Math.max(this.least, this.floor + roundUp(Math.max(...values) - this.floor));
    const x = (t) => box.right + ((box.right - box.left) * t) / this.span;
    const y = (v) => {
      const share = log ? Math.log(Math.max(v, low) / low) / Math.log(top / low)
        : (v - low) / (top - low);
      return box.bottom - (box.bottom - box.top) * Math.max(0, share);
    };
    const marks = log ? [] : [0, 0.5, 1].map((share) => low + share * (top - low));
    if (log) for (let v = low; v < top * 1.001; v *= 10) marks.push(v);
    for (const value of marks) across(this.svg, box, y(value), this.form(value));
    below(this.svg, box, box.left, ago(this.span), 0, "start");
    below(this.svg, box, box.right, "latest", 0, "end");
    const clip = (t) => Math.max(box.left, x(t));
    this.series.forEach(({ color, dash }, number) => {
      for (const part of this.parts(number + 1)) {
        const points = part.map(([t, v]) => [clip(t), y(v)]);
        if (points.length > 1) this.svg.append(line(points, color, dash, 2));
        // A lone point between two gaps has no line.
        else this.svg.append(shape("circle", { cx: points[0][0], cy: points[0][1], r: 2.5,
                                               fill: color }));
      }
    });
    this.say(x, box);
  }

  // Unbroken pieces of one line: [seconds, value] pairs.
  parts(column) {
    const found = [[]];
    for (const row of this.rows) {
      const value = row.length ? row[column] : null;
      if (value === null || value === undefined) found.push([]);
      else found[found.length - 1].push([row[0], value]);
    }
    return found.filter((part) => part.length);
  }

  say(x, box) {
    const known = this.rows.filter((row) => row.length);
    const row = known.find((r) => r[0] === this.at) ?? known[known.length - 1];
    const words = this.series
      .map(({ name }, n) => (row[n + 1] === null ? "" : `${name} ${this.form(row[n + 1])}`))
      .filter((word) => word);
    const text = `${ago(-row[0])}: ${words.join(", ") || this.empty}`;
    this.readout.textContent = text;
    this.svg.setAttribute("aria-label", text);
    if (this.at !== null) {
      const at = Math.max(box.left, x(row[0]));
      this.svg.append(shape("line", {
        x1: at, x2: at, y1: box.top, y2: box.bottom, class: "bw-serve-cursor",
      }));
    }
  }
}

const WORDS = {
  "prefill tokens/s": "Prompt tokens a second, as the engine counts them.",
  running: "Requests that are computed, and such that wait for room, at the latest sample.",
  "prefix cache hits": "Prompt tokens found in the prefix cache, of those looked up.",
  "tokens/s": "Tokens given out a second, all requests together, in the chosen window.",
  "acceptance length": "Tokens that a draft event gives, bonus included. Per scheduled draft: an "
    + "engine with adaptive verification counts drafts that it never verified as drafted.",
  "TTFT p50": "Arrival of a request to its first token; interpolated within the engine's buckets.",
  "TPOT p50": "Mean time of a token after the first, of each request that ended; percentiles are "
    + "interpolated within the engine's buckets, the mean is exact.",
  "ITL p50": "Time between two outputs of a request, however many tokens one brings; interpolated.",
  "KV cache in use": "At the latest sample; of several engines together the mean.",
  preemptions: "Requests that lost their KV cache to others and have to be computed again.",
};

// A kernel that is started anew tells widgets nothing; what the page knows of it does. Returned is
// what ends the watch.
function watchKernel(model, lost) {
  const changed = model.widget_manager?.kernel?.statusChanged;
  if (!changed) return () => {};
  const hear = (_, status) => {
    if (["restarting", "autorestarting", "terminating", "dead"].includes(status)) lost();
  };
  changed.connect(hear);
  return () => changed.disconnect(hear);
}

function renderServing({ model, el }) {
  const look = model.get("look");
  const root = make("div");
  root.className = "bw-draft bw-serve";
  for (const [name, value] of [["sans", look.sans], ["mono", look.mono],
                               ["text", `${look.text}px`], ["small", `${look.small}px`],
                               ["accepted", look.slots.accepted.color],
                               ["rejected", look.slots.rejected.color],
                               ["trimmed", look.slots.trimmed.color]]) {
    root.style.setProperty(`--bw-${name}`, value);
  }
  const start = button("Start", "Watch the engine");
  const pause = button("Pause", "Hold the page; watching goes on");
  const record = button("Record", "Write every sample to a file beside the notebook");
  const status = make("span", "status");
  status.setAttribute("role", "status");
  const bar = make("div", "bar-of-buttons");
  bar.append(start, pause, record, status);
  const windows = menu(model.get("choices").windows);
  const engines = menu(model.get("choices").engines);
  const controls = make("div", "controls");
  windows.title = "Figures and lines are of the samples of so long a time";
  engines.title = "One data-parallel engine of the server, or all";
  controls.append(field("window", windows), field("engine", engines));
  const title = make("div", "section");
  title.classList.add("bw-serve-title");
  title.textContent = model.get("choices").title;
  for (const input of [windows, engines]) {
    input.addEventListener("change", () =>
      send({ kind: "settings", settings: { window: windows.value, engine: engines.value } }));
    input.addEventListener("keydown", (event) => event.stopPropagation());
  }

  const stale = make("div");
  stale.className = "bw-serve-stale";
  stale.hidden = true;
  stale.setAttribute("role", "alert");
  const body = make("div");
  const tiles = make("div", "tiles");
  const median = () => [{ name: "p50", color: look.median, dash: "" },
                            { name: "p99", color: look.tail, dash: "5 3" },
                            { name: "mean", color: look.mean, dash: "2 2" }];
  const ms = (value) => (value < 1000 ? `${three(value)} ms` : `${three(value / 1000)} s`);
  const charts = {
    speed: new TimeChart("Tokens/s: what counts",
      [{ name: "given out", color: look.speed, dash: "" }]),
    prompt: new TimeChart("Prefill, tokens/s",
      [{ name: "prompt tokens", color: look.prompt, dash: "" }]),
    length: new TimeChart("Acceptance length",
      [{ name: "tokens per draft event", color: look.length, dash: "5 3" }],
      { floor: 1, least: 2, form: (v) => v.toFixed(2), empty: "nothing was drafted" }),
    ttft: new TimeChart("TTFT", median(), { form: ms, orders: 30, empty: "no request got its first token" }),
    tpot: new TimeChart("TPOT, mean of each finished request", median(),
      { form: ms, orders: 30, empty: "no request ended" }),
    itl: new TimeChart("ITL, between two outputs", median(), { form: ms, orders: 30 }),
    load: new TimeChart("Requests",
      [{ name: "running", color: look.running, dash: "" },
       { name: "waiting", color: look.waiting, dash: "5 3" }]),
    cache: new TimeChart("KV cache in use",
      [{ name: "share", color: look.cache, dash: "" }],
      { form: (v) => `${three(100 * v)}%`, empty: "the engine does not say" }),
  };
  const slots = new Chart("Acceptance by slot",
    [["", look.survival, "circle", "survival"],
     ["5 3", look.conditional, "diamond", "conditional, its n below"]],
    drawCurves(look));
  const grid = make("div");
  grid.className = "bw-serve-charts";
  const { speed, prompt, length, ttft, tpot, itl, load, cache } = charts;
  for (const chart of [speed, tpot, ttft, length, slots, load, cache, prompt, itl]) {
    grid.append(chart.element);
  }
  const note = make("div", "small");
  note.classList.add("bw-serve-note");
  body.append(tiles, grid, note);
  body.hidden = true;
  root.append(title, controls, bar, stale, body);
  el.append(root);

  let ended = false; // the kernel has: nothing sent arrives any more
  let said = model.get("status");
  let waiting = 0; // timer of what the kernel has not heard yet
  let late = false;
  let live = false;
  let since = null; // seconds since 1970 from which on nothing new is known
  let why = "";

  function update(message) {
    live = message.live;
    since = message.stale;
    why = message.why;
    title.textContent = message.title;
    record.textContent = message.recording ? "Stop recording" : "Record";
    record.classList.toggle("bw-serve-recording", message.recording);
    body.hidden = !message.tiles.length;
    tiles.replaceChildren(...message.tiles.map(([label, value, words]) => {
      const tile = make("div", "tile");
      tile.append(make("div", "small", label), make("div", "value", value));
      const told = make("div", "small");
      // A line of a narrow tile ends between two facts, not within "n = 1".
      words.split(" · ").forEach((word, number) => {
        if (number) told.append(" · ");
        told.append(make("span", "fact", word));
      });
      tile.append(told);
      tile.dataset.label = label;
      tile.title = WORDS[label] ?? "";
      return tile;
    }));
    for (const [name, chart] of Object.entries(charts)) {
      chart.update(message.lines[name], message.window);
    }
    slots.draw(message.acceptance ?? { events: 0 });
    note.textContent = message.note;
    if (model.get("state") !== "ended" && !model.get("trouble")) say(message.status);
    onState();
  }

  function age() {
    stale.hidden = since === null || ended;
    body.classList.toggle("bw-serve-old", !stale.hidden);
    if (stale.hidden) return;
    const clock = new Date(1000 * since).toLocaleTimeString();
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - since));
    const long = seconds < 120 ? `${seconds} s` : `${Math.floor(seconds / 60)} min`;
    const what = body.hidden ? "nothing came since" : "stale since";
    const again = going() ? " · it is asked again by itself" : "";
    stale.textContent = `${what} ${clock} (${long}): ${why || "the next page is late"}${again}`;
  }

  function onMessage(message) {
    heard();
    if (message.kind === "update") update(message);
  }

  function going() {
    return !ended && ["running", "paused"].includes(model.get("state"));
  }

  function say(words) {
    said = words;
    status.classList.toggle("bw-draft-trouble", ended || model.get("trouble"));
    if (ended) status.textContent = "the kernel has ended; run the cell again";
    else if (late) status.textContent = "waiting: the kernel is busy with a cell";
    else status.textContent = words;
  }

  function onStatus() {
    say(model.get("status"));
  }

  function onState() {
    say(said);
    root.dataset.state = ended ? "lost" : model.get("state");
    start.disabled = ended;
    pause.disabled = !going();
    record.disabled = !going() || !live;
    start.textContent = going() ? "Stop" : model.get("choices").start;
    pause.textContent = model.get("state") === "paused" && going() ? "Resume" : "Pause";
    age();
  }

  function onChoices() {
    const now = model.get("choices").engines;
    engines.replaceChildren(...now.map((name) => new Option(name, name)));
    onSettings();
  }

  function onSettings() {
    const { window, engine } = model.get("settings");
    windows.value = window;
    engines.value = engine;
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
      if (!["settings", "ready"].includes(content.kind) && !waiting) {
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

  start.addEventListener("click", () => send({ kind: going() ? "stop" : "start" }));
  record.addEventListener("click", () => send({ kind: "record" }));
  pause.addEventListener("click", () =>
    send({ kind: model.get("state") === "paused" ? "resume" : "pause" }));

  const clock = setInterval(age, 1000 / STALE_HERTZ);
  const leave = watchKernel(model, end);
  const redraw = () => {
    for (const chart of Object.values(charts)) chart.draw();
    slots.draw();
  };
  const watch = new ResizeObserver(redraw);
  watch.observe(root);
  const events = {
    "msg:custom": onMessage, "change:status": onStatus, "change:state": onState,
    "change:trouble": onStatus, "change:settings": onSettings, "change:choices": onChoices,
    "comm:close": end, comm_live_update: onConnection,
  };
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  onChoices();
  onState();
  onConnection();
  send({ kind: "ready" });

  return () => {
    leave();
    watch.disconnect();
    clearInterval(clock);
    clearTimeout(waiting);
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default { render: renderServing };
