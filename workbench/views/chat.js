// The page's side of the chat. Text reaches the page through textContent only, so whatever a model,
// a tool or a server writes stays text.

const NODES = 1000; // of a tree: a larger one is cut, and says so

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

// An answer: reasoning folded (open while it is all there is), text or a tree, a line below.
class Answer {
  constructor() {
    this.element = make("div", "answer");
    this.thought = make("details", "reasoning");
    this.thought.append(make("summary", "small", "reasoning"));
    this.reasoning = make("div", "thought");
    this.thought.append(this.reasoning);
    this.thought.hidden = true;
    this.touched = false; // the reader has folded it himself
    this.thought.querySelector("summary").addEventListener("click", () => { this.touched = true; });
    this.text = make("div", "text");
    this.tree = make("div", "tree");
    this.foot = make("div", "foot");
    this.element.append(this.thought, this.text, this.tree, this.foot);
  }

  set(fields) {
    for (const name of ["reasoning", "text", "foot"]) {
      if (name in fields) this[name].textContent = fields[name];
    }
    if (fields.parsed) {
      this.text.hidden = true;
      this.tree.replaceChildren(tree("", fields.value, 0, { left: NODES }));
    }
    this.fold(Boolean(fields.foot));
  }

  add(fields) {
    for (const [name, text] of Object.entries(fields)) this[name].append(text);
    this.fold(false);
  }

  fold(over) {
    const thinks = this.reasoning.firstChild !== null && this.reasoning.textContent !== "";
    this.thought.hidden = !thinks;
    if (!this.touched) this.thought.open = thinks && !over && this.text.textContent === "";
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
    this.result = make("span", "result", "waiting");
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
  Object.assign(prompt, { rows: 2, spellcheck: false, placeholder: "Say something" });
  prompt.setAttribute("aria-label", "Message");
  prompt.title = "Enter sends, Shift+Enter begins a line, Escape stops";
  prompt.value = model.get("prompt");

  const send = button("Send", "Send the message (Enter)");
  const stop = button("Stop", "End the turn (Escape)");
  const undo = button("Undo", "Take the last turn back");
  const heat = numberBox({ min: 0, max: 2, step: 0.1, placeholder: "server's" });
  const limit = numberBox({ min: 1, step: 1, placeholder: "server's" });
  const status = make("span", "status");
  status.setAttribute("role", "status");
  const bar = make("div", "bar");
  bar.append(send, stop, undo, field("temperature", heat), field("max tokens", limit), status);
  root.append(about, page, prompt, bar);
  el.append(root);

  const blocks = new Map();
  let ended = false; // the kernel has: nothing sent arrives any more
  let waiting = 0; // timer of what the kernel has not heard yet
  let late = false; // and it is late

  const atEnd = () => page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  const writing = () => !ended && model.get("state") === "writing";

  function begin({ id, kind, ...fields }) {
    const made = block(kind);
    made.set(fields);
    blocks.set(id, made);
    page.append(made.element);
  }

  function onMessage(message) {
    if (message.kind === "heard" || message.kind === "reset") heard();
    const follow = atEnd() || message.kind === "reset";
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
    if (follow) page.scrollTop = page.scrollHeight;
  }

  function onStatus() {
    if (ended) status.textContent = "the kernel has ended; run the cell again";
    else if (late) status.textContent = "waiting: the kernel is busy with a cell";
    else status.textContent = model.get("status");
  }

  function onState() {
    root.dataset.state = ended ? "lost" : model.get("state");
    send.disabled = undo.disabled = ended || writing();
    stop.disabled = !writing();
    onStatus();
  }

  function onSettings() {
    const { temperature, max_tokens: most } = model.get("settings");
    heat.value = temperature ?? "";
    limit.value = most ?? "";
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
    const settings = { temperature: number(heat), max_tokens: number(limit) };
    tell({ kind: "send", text: prompt.value, settings });
  }

  send.addEventListener("click", say);
  stop.addEventListener("click", () => tell({ kind: "stop" }));
  undo.addEventListener("click", () => tell({ kind: "undo" }));
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
  onSettings();
  onState();
  onConnection();
  tell({ kind: "ready" });

  return () => {
    clearTimeout(waiting);
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default { render };
