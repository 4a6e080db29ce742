// The dashboard's command with its copy button, and the export of CSV files. What comes from the
// kernel reaches the page through textContent and a file's own bytes only, never as HTML.

function button(label) {
  const element = document.createElement("button");
  element.type = "button";
  element.className = "bw-kv-button";
  element.textContent = label;
  return element;
}

function select(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const selection = getSelection();
  selection.removeAllRanges();
  selection.addRange(range);
  return document.execCommand("copy");
}

async function copy(node) {
  // A page that was not served from this machine or over HTTPS has no clipboard.
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    return select(node);
  }
}

function render({ model, el }) {
  const look = model.get("look");
  const root = document.createElement("div");
  root.className = "bw-kv-command";
  root.style.setProperty("--bw-sans", look.sans);
  root.style.setProperty("--bw-mono", look.mono);
  root.style.setProperty("--bw-text", `${look.text}px`);

  const bar = document.createElement("div");
  bar.className = "bw-kv-bar";
  const title = document.createElement("span");
  title.className = "bw-kv-title";
  const copier = button("Copy command");
  const layers = button("Export layers (CSV)");
  const plans = button("Export plans (CSV)");
  const said = document.createElement("span");
  said.className = "bw-kv-said";
  said.setAttribute("role", "status");
  bar.append(copier, layers, plans, said);
  const text = document.createElement("pre");
  text.className = "bw-kv-text";
  root.append(title, text, bar);
  el.append(root);

  function onCommand() {
    title.textContent = model.get("title");
    text.textContent = model.get("command");
    said.replaceChildren(); // what was exported belongs to the settings before
  }

  function end() {
    layers.disabled = plans.disabled = true;
    said.textContent = "the kernel has ended; run the cell again";
  }

  function ask(which) {
    try {
      model.send({ kind: "export", which });
    } catch (error) {
      console.warn("the message did not reach the kernel", error);
      end();
    }
  }

  function onMessage(message) {
    if (message.kind !== "file") return;
    const link = document.createElement("a");
    link.className = "bw-kv-link";
    link.download = message.name;
    link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(message.text)}`;
    link.textContent = `Download ${message.name}`;
    // Here, since JupyterLab's own rules for links in outputs come before a style sheet's.
    link.style.cssText = "color:var(--jp-content-link-color,inherit);text-decoration:underline";
    said.replaceChildren(link, `, ${message.note}`);
  }

  copier.addEventListener("click", async () => {
    said.textContent = (await copy(text)) ? "copied" : "selected: copy it with the keyboard";
  });
  layers.addEventListener("click", () => ask("layers"));
  plans.addEventListener("click", () => ask("plans"));
  model.on("change:command", onCommand);
  model.on("change:title", onCommand);
  model.on("msg:custom", onMessage);
  model.on("comm:close", end);
  onCommand();

  return () => {
    model.off("change:command", onCommand);
    model.off("change:title", onCommand);
    model.off("msg:custom", onMessage);
    model.off("comm:close", end);
  };
}

export default { render };
