// The server's page: asks for the state every two seconds and shows it. Text from the server is only ever put in as text.
"use strict";

const REFRESH_MS = 2000;
const WINDOW_SECONDS = 60; // phases and rates are of about the last minute
const HEADERS = { "X-Requested-With": "locojax-page" };
const PHASES = ["prefill", "decode", "pack", "train", "optim", "publish", "save", "load", "warm_up", "other", "idle"];

const past = []; // {time, seconds, totals} of past refreshes, oldest first
let pageSize = 20;

const byId = (id) => document.getElementById(id);

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

async function ask(path, options = {}) {
  const response = await fetch(path, { headers: HEADERS, cache: "no-store", ...options });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.detail || `the server answered ${response.status}`);
  return body;
}

function number(value, digits = 0) {
  return Number(value ?? 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d`;
}

function epoch(time) { // seconds, of a number or an ISO text
  return typeof time === "number" ? time : Date.parse(time) / 1000;
}

function ago(time, now) {
  return time === null || time === undefined ? "" : `${duration(now - epoch(time))} ago`;
}

function rate(name) { // per second, over the window
  if (past.length < 2) return 0;
  const [first, last] = [past[0], past[past.length - 1]];
  const passed = last.time - first.time;
  return passed > 0 ? Math.max(0, (last.totals[name] ?? 0) - (first.totals[name] ?? 0)) / passed : 0;
}

function remember(status) {
  const engine = status.engine;
  const last = past[past.length - 1];
  // A new engine process counts from zero.
  if (last && last.starts !== engine.num_restarts) past.length = 0;
  past.push({ time: status.server.now, seconds: engine.seconds, totals: engine.totals, starts: engine.num_restarts });
  while (past.length > 2 && past[0].time < status.server.now - WINDOW_SECONDS) past.shift();
}

function showFigures(status) {
  const { engine, futures } = status;
  const gauges = engine.gauges;
  const figures = [
    ["sampled tokens/s", number(rate("sampled_tokens"))],
    ["trained tokens/s", number(rate("trained_tokens"))],
    ["running samples", number(gauges.num_running_samples)],
    ["waiting samples", number(gauges.num_waiting_samples)],
    ["queued operations", number(gauges.num_queued_operations)],
    ["open futures", number(futures.pending)],
    ["samplers", number(status.samplers.length)],
    ["engine restarts", number(engine.num_restarts)],
  ];
  byId("figures").replaceChildren(...figures.map(([label, value]) => {
    const cell = element("div");
    cell.append(element("b", value), element("span", label));
    return cell;
  }));
}

function showPhases() {
  const [first, last] = [past[0], past[past.length - 1]];
  const since = past.length > 1 ? first.seconds : {};
  const spent = Object.fromEntries(
    Object.entries(last.seconds).map(([name, value]) => [name, Math.max(0, value - (since[name] ?? 0))]));
  const names = [...PHASES.filter((name) => name in spent), ...Object.keys(spent).filter((n) => !PHASES.includes(n))];
  const total = names.reduce((sum, name) => sum + spent[name], 0);
  const bars = [];
  const legend = [];
  for (const name of names) {
    if (total === 0 || spent[name] / total < 0.0005) continue;
    const share = `${number((100 * spent[name]) / total, 1)} %`;
    const kind = PHASES.includes(name) ? name : "other";
    const bar = element("i", null, { "data-phase": kind, title: `${name} ${share}` });
    bar.style.flexGrow = spent[name];
    bars.push(bar);
    const entry = element("li");
    entry.append(element("i", null, { "data-phase": kind }), `${name} ${share}`);
    legend.push(entry);
  }
  byId("phases").replaceChildren(...bars);
  byId("phases").setAttribute("aria-label", legend.map((entry) => entry.textContent).join(", ") || "nothing yet");
  byId("phase-legend").replaceChildren(...legend);
}

// columns: [title, (row) => text or nodes, class]
function showTable(id, columns, rows, none) {
  const head = element("tr");
  for (const [title, , kind] of columns) head.append(element("th", title, { scope: "col", class: kind ?? "" }));
  const lines = rows.map((row) => {
    const line = element("tr");
    for (const [, content, kind] of columns) {
      const cell = element("td", null, { class: kind ?? "" });
      const made = content(row);
      cell.append(...(Array.isArray(made) ? made : [String(made ?? "")]));
      line.append(cell);
    }
    return line;
  });
  if (lines.length === 0) {
    const line = element("tr");
    line.append(element("td", none, { class: "empty", colspan: String(columns.length) }));
    lines.push(line);
  }
  const [thead, tbody] = [element("thead"), element("tbody")];
  thead.append(head);
  tbody.append(...lines);
  byId(id).replaceChildren(thead, tbody);
}

function showModels(status) {
  showTable("models", [
    ["model", (m) => m.model_id, "path"],
    ["rank", (m) => m.rank, "number"],
    ["state", (m) => m.state],
    ["operations so far", (m) => number(m.next_seq - 1), "number"],
    ["unfinished", (m) => number(m.num_unfinished), "number"],
    ["waiting for earlier ones", (m) => number(m.num_waiting), "number"],
    ["last request", (m) => ago(m.last_request, status.server.now)],
  ], status.models, "No model is being trained.");
}

function showSessions(status) {
  const count = (id) => status.models.filter((model) => model.session_id === id).length;
  showTable("sessions", [
    ["session", (s) => s.session_id, "path"],
    ["name", (s) => s.display_name],
    ["models", (s) => number(count(s.session_id)), "number"],
    ["client", (s) => s.sdk_version],
    ["begun", (s) => ago(s.created_at, status.server.now)],
    ["last heartbeat", (s) => `${duration(s.seconds_since_heartbeat)} ago`],
  ], status.sessions, "No client is connected.");
}

function showErrors(status) {
  const list = byId("errors");
  const errors = [...status.errors].reverse(); // newest first
  list.classList.toggle("empty", errors.length === 0);
  list.replaceChildren(...(errors.length === 0 ? [element("li", "None.")] : errors.map((error) => {
    const line = element("li", error.error);
    line.prepend(element("span", `${ago(error.time, status.server.now)}, ${error.kind}: `, { class: "faint" }));
    return line;
  })));
}

function split(path) { // tinker://<run>/<kind>/<name>
  const [run, kind, name] = path.replace("tinker://", "").split("/");
  return { run, id: `${kind}/${name}` };
}

async function download(path) {
  const { run, id } = split(path);
  const query = new URLSearchParams({ run_id: run, checkpoint_id: id });
  window.location.assign((await ask(`/api/v1/_archive?${query}`)).url);
}

async function remove(path) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = `Delete ${path}? Its files are gone then.`;
  dialog.returnValue = "cancel";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  if (dialog.returnValue !== "delete") return;
  const { run, id } = split(path);
  const where = `/api/v1/training_runs/${encodeURIComponent(run)}/checkpoints/`;
  await ask(where + id.split("/").map(encodeURIComponent).join("/"), { method: "DELETE" });
  await refresh();
}

function button(text, path, action, kind) {
  const made = element("button", text, { type: "button", class: kind ?? "", "data-path": path });
  made.addEventListener("click", () => action(path).catch(tell));
  return made;
}

function showCheckpoints(found, now) {
  // Rows stay as they are while nothing has changed, so that a button is not replaced under a finger.
  const key = JSON.stringify(found.checkpoints.map((c) => [c.tinker_path, c.size_bytes, c.public, c.expires_at]));
  const table = byId("checkpoints");
  byId("more").hidden = found.checkpoints.length >= (found.cursor?.total_count ?? 0);
  if (table.dataset.key === key) return;
  table.dataset.key = key;
  showTable("checkpoints", [
    ["checkpoint", (c) => c.tinker_path, "path"],
    ["kind", (c) => c.checkpoint_type + (c.public ? ", public" : "")],
    ["size", (c) => size(c.size_bytes), "number"],
    ["saved", (c) => new Date(c.time).toLocaleString()],
    ["kept", (c) => (c.expires_at ? `for ${duration(epoch(c.expires_at) - now)}` : "for good")],
    ["", (c) => [button("Download", c.tinker_path, download), button("Delete", c.tinker_path, remove, "danger")]],
  ], found.checkpoints, "Nothing has been saved.");
}

function tell(error) {
  const state = byId("state");
  state.dataset.state = "lost";
  state.textContent = error.message;
}

function showState(status) {
  const { engine } = status;
  const state = byId("state");
  state.dataset.state = engine.state === "ready" ? "ready" : "starting";
  state.textContent = engine.state === "ready" ? "ready" : engine.doing || engine.state;
  const info = engine.info;
  byId("model").textContent = info.model_name ?? "";
  const facts = [`version ${status.server.version}`, `up ${duration(status.server.now - status.server.started)}`];
  if (info.model_name) facts.push(`${info.max_adapters} adapters of rank ${info.max_rank} at most`, `context ${number(info.max_context)} tokens`);
  byId("footer").textContent = facts.join(" · ");
}

async function refresh() {
  try {
    const [status, checkpoints] = await Promise.all([
      ask("/api/v1/_status"), ask(`/api/v1/checkpoints?limit=${pageSize}`)]);
    remember(status);
    showState(status);
    showFigures(status);
    showPhases();
    showModels(status);
    showSessions(status);
    showCheckpoints(checkpoints, status.server.now);
    showErrors(status);
  } catch (error) {
    tell(error instanceof TypeError ? new Error("the server does not answer") : error);
  }
}

byId("more").addEventListener("click", () => { pageSize = Math.min(pageSize * 2, 1000); refresh(); });

async function run() {
  for (;;) {
    if (!document.hidden || past.length === 0) await refresh();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

run();
