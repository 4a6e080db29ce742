// The page's side of the chat. Text reaches the page through textContent only, so whatever a model,
// a tool or a server writes stays text.

const NODES = 1000; // of a tree: a larger one is cut, and says so
const LETTERS = 100000; // of one text on the page: all of a long one would be laid out with each piece
const SETTLE = 3000; // ms in which a second click on "Clear" clears
// What the menu of reasoning says, and what is sent.
const REASONING = [["default", null], ["off", false], ["on", true],
                   ["low", "low"], ["medium", "medium"], ["high", "high"]];

function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = `bw-chat-${name}`;
  if (text) element.textContent = text;
  return element;
}

function button(label, title) {
  const element = make("button", "button", label);
  element.type = "button";
  element.title = title;
  return element;
}

function field(label, input) {
  const element = make("label", "field");
  element.append(make("span", "small", label), input);
  return element;
}

function numberBox(settings) {
  return Object.assign(make("input", "number"), { type: "number", ...settings });
}

// A text of any length: what is beyond LETTERS is counted and not shown.
class Passage {
  constructor(name) {
    this.element = make("div", name);
    this.length = 0;
  }

  set(text) {
    this.length = 0;
    this.more = null;
    this.element.textContent = "";
    this.add(text);
  }

  add(text) {
    const room = LETTERS - this.length;
    if (room > 0) this.element.append(text.slice(0, room));
    this.length += text.length;
    if (this.length <= LETTERS) return;
    this.more ??= make("div", "more");
    const left = (this.length - LETTERS).toLocaleString("en");
    this.more.textContent = `… ${left} letters more; board.chat.turns has them all`;
    this.element.append(this.more);
  }
}

// -- a structured answer as a tree --------------------------------------------------------------

function leaf(name, value) {
  const line = make("div", "leaf");
  if (name) line.append(make("span", "key", `${name}: `));
  line.append(make("span", `is-${value === null ? "null" : typeof value}`, JSON.stringify(value)));
  return line;
}

function tree(name, value, depth, room) {
  room.left -= 1;
  if (room.left < 0) return null;
  if (value === null || typeof value !== "object") return leaf(name, value);
  const list = Array.isArray(value);
  const parts = list ? value.map((part, n) => [`${n}`, part]) : Object.entries(value);
  const count = list ? `[${parts.length}]` : `{${parts.length}}`;
  if (!parts.length) {
    const line = make("div", "leaf");
    if (name) line.append(make("span", "key", `${name}: `));
    line.append(list ? "[]" : "{}");
    return line;
  }
  const node = make("details", "node");
  node.open = depth < 3;
  const head = make("summary");
  if (name) head.append(make("span", "key", `${name} `));
  head.append(make("span", "faint", count));
  node.append(head);
  for (const [key, part] of parts) {
    const child = tree(key, part, depth + 1, room);
    if (!child) {
      node.append(make("div", "faint", "… more than fits here; the reply's value has it all"));
      break;
    }
    node.append(child);
  }
  return node;
}

// -- blocks ---------------------------------------------------------------------------------------

// An answer: reasoning folded (open where it is all there is), text or a tree, a line below.
class Answer {
  constructor() {
    this.element = make("div", "answer");
    this.thought = make("details", "reasoning");
    this.thought.append(make("summary", "small", "reasoning"));
    this.reasoning = new Passage("thought");
    this.thought.append(this.reasoning.element);
    this.thought.hidden = true;
    this.called = false; // a tool, after it
    this.touched = false; // the reader has folded it himself
    this.thought.querySelector("summary").addEventListener("click", () => { this.touched = true; });
    this.text = new Passage("text");
    this.tree = make("div", "tree");
    this.foot = make("div", "foot");
    this.element.append(this.thought, this.text.element, this.tree, this.foot);
  }

  set(fields) {
    for (const name of ["reasoning", "text"]) if (name in fields) this[name].set(fields[name]);
    if ("foot" in fields) this.foot.textContent = fields.foot;
    if (fields.parsed) {
      this.text.element.hidden = true;
      this.tree.replaceChildren(tree("", fields.value, 0, { left: NODES }));
    }
    this.fold();
  }

  add(fields) {
    for (const [name, text] of Object.entries(fields)) this[name].add(text);
    this.fold();
  }

  fold() {
    const thinks = this.reasoning.length > 0;
    this.thought.hidden = !thinks;
    const follows = this.text.length > 0 || this.called;
    // What was only thought is all there is to read, also when it is over.
    if (!this.touched) this.thought.open = thinks && !follows;
  }

  // A tool is called after this.
  call() {
    this.called = true;
    this.fold();
  }
}

// A call of a tool: name, arguments, and what came of it.
class Call {
  constructor() {
    this.element = make("div", "card");
    this.element.setAttribute("role", "group");
    const head = make("div", "call");
    this.name = make("span", "name");
    this.arguments = make("span", "arguments");
    head.append(this.name, "(", this.arguments, ")");
    this.sign = make("span", "sign", "… ");
    this.result = make("span", "result", "running");
    const line = make("div", "came");
    line.append(this.sign, this.result);
    this.foot = make("div", "foot");
    this.element.append(head, line, this.foot);
  }

  set(fields) {
    for (const name of ["name", "arguments", "foot"]) {
      if (name in fields) this[name].textContent = fields[name];
    }
    if (fields.name) this.element.setAttribute("aria-label", `call of ${fields.name}`);
    if (!fields.done) return;
    this.result.textContent = fields.result;
    this.sign.textContent = fields.failed ? "✗ " : "→ ";
    this.element.classList.toggle("bw-chat-failed", Boolean(fields.failed));
  }

  add(fields) {
    for (const [name, text] of Object.entries(fields)) this[name].append(text);
  }
}

class Said {
  constructor(kind) {
    this.element = make("div", kind);
    if (kind === "user") this.element.append(make("div", "who", "you"));
    else this.element.append(make("span", "sign", "✗ "));
    this.text = make(kind === "user" ? "div" : "span", "text");
    this.element.append(this.text);
    if (kind === "error") this.element.setAttribute("role", "alert");
  }

  set(fields) {
    if ("text" in fields) this.text.textContent = fields.text;
  }

  add(fields) {
    this.text.append(fields.text);
  }
}

function block(kind) {
  if (kind === "answer") return new Answer();
  if (kind === "call") return new Call();
  return new Said(kind);
}

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

// -- the page -------------------------------------------------------------------------------------

function render({ model, el }) {
  const look = model.get("look");
  const root = make("div");
  root.className = "bw-chat";
  for (const [name, value] of [["sans", look.sans], ["mono", look.mono], ["user", look.user],
                               ["text", `${look.text}px`], ["small", `${look.small}px`]]) {
    root.style.setProperty(`--bw-${name}`, value);
  }
  const about = make("div", "small", model.get("about"));
  const page = make("div", "page");
  page.setAttribute("role", "log");
  page.setAttribute("aria-label", "Conversation");
  page.tabIndex = 0;

  const prompt = make("textarea", "prompt");
  // What it begins with is seen whole, as far as that is a question and no book.
  const lines = (model.get("prompt") ?? "").split("\n").length;
  Object.assign(prompt, { rows: Math.max(2, Math.min(10, lines)), spellcheck: false,
                          placeholder: "Message: Enter sends, Shift+Enter begins a line" });
  prompt.setAttribute("aria-label", "Message");
  prompt.title = "Enter sends, Shift+Enter begins a line, Escape stops";
  prompt.value = model.get("prompt");

  const send = button("Send", "Send the message (Enter)");
  const stop = button("Stop", "End the turn (Escape)");
  const undo = button("Undo", "Take the last turn back");
  const clear = button("Clear", "Begin anew: take all turns back");
  const own = { placeholder: "default", title: "Empty: what the server does by default" };
  const heat = numberBox({ min: 0, max: 2, step: 0.1, ...own });
  const limit = numberBox({ min: 1, step: 1, ...own });
  const thinking = make("select", "menu");
  thinking.append(...REASONING.map(([word], n) => new Option(word, n)));
  thinking.title = "On and off go to the chat template, the others are reasoning_effort; a server "
    + "may know neither";
  const tools = Object.assign(make("input", "check"), { type: "checkbox", checked: true });
  tools.title = "Whether the model is offered the tools";
  const toolField = field("tools", tools);
  toolField.hidden = !model.get("settings").has_tools;
  const status = make("span", "status");
  status.setAttribute("role", "status");
  const bar = make("div", "bar");
  bar.append(send, stop, undo, clear, status);
  const settings = make("div", "bar");
  settings.append(field("temperature", heat), field("max tokens", limit),
                  field("reasoning", thinking), toolField);
  const hint = make("div", "hint", "Nothing said yet. Write below and press Enter.");
  root.append(about, page, prompt, bar, settings);
  el.append(root);

  const blocks = new Map();
  let ended = false; // the kernel has: nothing sent arrives any more
  let waiting = 0; // timer of what the kernel has not heard yet
  let late = false; // and it is late
  let began = 0; // when the turn was sent, on the clock of this page
  let sure = 0; // timer of a first click on "Clear"

  const atEnd = () => page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  // A page that gets narrower has longer texts: whoever was at the end stays there.
  let following = true;
  page.addEventListener("scroll", () => { following = atEnd(); });
  const watch = new ResizeObserver(() => {
    if (following) page.scrollTop = page.scrollHeight;
  });
  watch.observe(page);
  const writing = () => !ended && model.get("state") === "writing";

  function begin({ id, kind, ...fields }) {
    const made = block(kind);
    if (kind === "call") [...blocks.values()].findLast((one) => one instanceof Answer)?.call();
    made.set(fields);
    blocks.set(id, made);
    page.append(made.element);
  }

  function onMessage(message) {
    if (message.kind === "heard" || message.kind === "reset") heard();
    const follow = atEnd() || message.kind === "reset";
    // The page grows with what is said; who writes below it keeps the box in sight.
    const inSight = document.activeElement === prompt
      && bar.getBoundingClientRect().bottom <= window.innerHeight;
    if (message.kind === "reset") {
      blocks.clear();
      page.replaceChildren();
      for (const one of message.blocks) begin(one);
    } else if (message.kind === "changes") {
      for (const change of message.changes) {
        if (change.new) begin(change.new);
        else if (change.set) blocks.get(change.id)?.set(change.set);
        else blocks.get(change.id)?.add(change.add);
      }
    } else if (message.kind === "taken") {
      prompt.value = "";
    } else if (message.kind === "returned" && !prompt.value.trim()) {
      prompt.value = message.text;
    }
    if (!blocks.size) page.replaceChildren(hint);
    else hint.remove();
    undo.disabled = clear.disabled = ended || writing() || !blocks.size;
    if (follow) page.scrollTop = page.scrollHeight;
    if (inSight) bar.scrollIntoView({ block: "nearest" });
  }

  function onStatus() {
    if (ended) status.textContent = "the kernel has ended; run the cell again";
    else if (late) status.textContent = "waiting: the kernel is busy with a cell";
    else status.textContent = `${model.get("status")}${waited()}`;
  }

  // How long nothing has come, where that is what is waited for.
  function waited() {
    const seconds = Math.floor((Date.now() - began) / 1000);
    const silent = writing() && model.get("status").startsWith("waiting");
    return silent && began && seconds >= 2 ? `, ${seconds} s` : "";
  }

  function onState() {
    root.dataset.state = ended ? "lost" : model.get("state");
    if (!writing()) began = 0;
    else if (!began) began = Date.now();
    send.disabled = ended || writing();
    undo.disabled = clear.disabled = ended || writing() || !blocks.size;
    stop.disabled = !writing();
    page.setAttribute("aria-busy", writing()); // read out when it is whole
    onStatus();
  }

  function onSettings() {
    const { temperature, max_tokens: most, reasoning, tools: offered } = model.get("settings");
    heat.value = temperature ?? "";
    limit.value = most ?? "";
    const known = REASONING.findIndex(([, value]) => value === (reasoning ?? null));
    // "none" is an effort of its own, which the menu calls off.
    thinking.value = known < 0 ? 1 : known;
    tools.checked = offered !== false;
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
    late = false;
    onStatus();
  }

  // Buttons reach the kernel between two cells; one that is not heard at once is not lost.
  function tell(content) {
    try {
      model.send(content);
      if (!waiting) waiting = setTimeout(() => { late = true; onStatus(); }, 700);
    } catch (error) {
      console.warn("the message did not reach the kernel", error);
      end();
    }
  }

  const number = (input) => (input.value.trim() === "" ? null : Number(input.value));

  function say() {
    if (ended || !prompt.value.trim()) return;
    if (writing()) {
      status.textContent = "still writing: stop it first";
      return;
    }
    const asked = { temperature: number(heat), max_tokens: number(limit) };
    const before = model.get("settings").reasoning ?? null;
    asked.reasoning = REASONING[thinking.value][1];
    if (before === "none" && asked.reasoning === false) asked.reasoning = before;
    tell({ kind: "send", text: prompt.value, settings: asked, tools: tools.checked });
  }

  function calm() {
    clearTimeout(sure);
    sure = 0;
    clear.textContent = "Clear";
  }

  // A button that is disabled while it has the focus loses it, and the next key would be a shortcut
  // of JupyterLab's: "d d" deletes the cell.
  function press(act) {
    return () => {
      act();
      prompt.focus({ preventScroll: true });
    };
  }

  send.addEventListener("click", press(say));
  stop.addEventListener("click", press(() => tell({ kind: "stop" })));
  undo.addEventListener("click", press(() => tell({ kind: "undo" })));
  clear.addEventListener("click", () => {
    if (sure) {
      calm();
      press(() => tell({ kind: "clear" }))();
    } else {
      clear.textContent = "Clear all?";
      sure = setTimeout(calm, SETTLE);
    }
  });
  prompt.addEventListener("keydown", (event) => {
    // Enter also ends the writing of a word in scripts that are composed.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      say();
    } else if (event.key === "Escape" && writing()) {
      tell({ kind: "stop" });
    }
  });
  // Keys typed here are not JupyterLab's shortcuts.
  root.addEventListener("keydown", (event) => event.stopPropagation());

  const events = {
    "msg:custom": onMessage, "change:status": onStatus, "change:state": onState,
    "change:settings": onSettings, "comm:close": end, comm_live_update: onConnection,
  };
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  page.append(hint);
  onSettings();
  onState();
  onConnection();
  tell({ kind: "ready" });
  const clock = setInterval(() => { if (waited()) onStatus(); }, 1000);
  const leave = watchKernel(model, end);

  return () => {
    leave();
    watch.disconnect();
    clearInterval(clock);
    clearTimeout(waiting);
    clearTimeout(sure);
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default { render };
