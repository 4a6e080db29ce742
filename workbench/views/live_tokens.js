// The page's side of live generation. Text reaches the page through textContent only, so whatever
// a model writes stays text.

function button(label) {
  const element = document.createElement("button");
  element.className = "bw-live-button";
  element.textContent = label;
  return element;
}

function render({ model, el }) {
  const look = model.get("look");
  const root = document.createElement("div");
  root.className = "bw-live";
  root.style.setProperty("--bw-sans", look.sans);
  root.style.setProperty("--bw-mono", look.mono);
  root.style.setProperty("--bw-text", `${look.text}px`);

  const prompt = document.createElement("textarea");
  prompt.className = "bw-live-prompt";
  prompt.rows = 2;
  prompt.spellcheck = false;
  prompt.setAttribute("aria-label", "Prompt");
  prompt.value = model.get("prompt");

  const start = button("Start");
  const stop = button("Stop");
  const status = document.createElement("span");
  status.className = "bw-live-status";
  status.setAttribute("role", "status");
  const bar = document.createElement("div");
  bar.className = "bw-live-bar";
  bar.append(start, stop, status);

  const legend = document.createElement("div");
  legend.className = "bw-live-legend";
  for (const [color, label] of look.legend) {
    const swatch = document.createElement("span");
    swatch.className = "bw-live-swatch";
    swatch.style.background = color;
    legend.append(swatch, label);
  }
  legend.append("colour: how unlikely the model found its own choice");

  const page = document.createElement("div");
  page.className = "bw-live-page";
  const given = document.createElement("span");
  given.className = "bw-live-given";
  const written = document.createElement("span");
  written.className = "bw-live-written";
  page.append(given, written);

  root.append(prompt, bar, legend, page);
  el.append(root);

  function tint(logprob) {
    const share = Math.min(1, Math.max(0, -logprob) / look.full) * look.strongest;
    return `color-mix(in srgb, ${look.tint} ${(100 * share).toFixed(0)}%, transparent)`;
  }

  function append(items) {
    const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
    const batch = document.createDocumentFragment();
    for (const [text, logprob] of items) {
      const token = document.createElement("span");
      token.textContent = text;
      token.title = `p = ${Math.exp(logprob).toFixed(2)}`;
      token.style.background = tint(logprob);
      batch.append(token);
    }
    written.append(batch);
    if (atEnd) page.scrollTop = page.scrollHeight;
  }

  function onMessage(message) {
    if (message.kind === "reset") {
      given.textContent = message.prompt;
      written.replaceChildren();
      page.scrollTop = page.scrollHeight; // what is written comes after the prompt
    } else if (message.kind === "tokens") {
      append(message.items);
    }
  }

  let ended = false; // the kernel has: nothing sent arrives any more

  function onStatus() {
    status.textContent = ended
      ? "the kernel has ended; run the cell again"
      : model.get("status");
  }

  function onRunning() {
    start.disabled = ended;
    stop.disabled = ended || !model.get("running");
    start.textContent = model.get("running") && !ended ? "Restart" : "Start";
  }

  function end() {
    ended = true;
    onStatus();
    onRunning();
  }

  function onConnection() {
    // ipywidgets marks the view of a model that has lost its kernel before it tells us.
    if (el.closest(".jupyter-widgets-disconnected")) end();
  }

  function send(content) {
    try {
      model.send(content);
    } catch (error) {
      console.warn("the message did not reach the kernel", error);
      end();
    }
  }

  function onPrompt() {
    if (prompt.value !== model.get("prompt")) prompt.value = model.get("prompt");
  }

  start.addEventListener("click", () => send({ kind: "start", prompt: prompt.value }));
  stop.addEventListener("click", () => send({ kind: "stop" }));
  // Keys typed into the box are not JupyterLab's shortcuts.
  prompt.addEventListener("keydown", (event) => event.stopPropagation());

  model.on("msg:custom", onMessage);
  model.on("change:status", onStatus);
  model.on("change:running", onRunning);
  model.on("change:prompt", onPrompt);
  model.on("comm:close", end);
  model.on("comm_live_update", onConnection);
  onStatus();
  onRunning();
  onConnection();
  send({ kind: "ready" });

  return () => {
    model.off("msg:custom", onMessage);
    model.off("change:status", onStatus);
    model.off("change:running", onRunning);
    model.off("change:prompt", onPrompt);
    model.off("comm:close", end);
    model.off("comm_live_update", onConnection);
  };
}

export default { render };
