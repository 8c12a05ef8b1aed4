// The list of requests, and the story of the one that is opened.

import { getJSON } from "./api.js";
import { colour } from "./colours.js";

const rows = document.getElementById("rows");
const story = document.getElementById("timeline");
const COLOURS = { queued: "var(--cached)", admitted: "hsl(45 80% 55%)", prefill: "hsl(45 80% 55%)", first_token: "hsl(140 50% 45%)", resumed: "hsl(140 50% 45%)", preempted: "var(--bad)", finished: "var(--free)" };
let opened = "";

const seconds = (s) => (s === null || s < 0 ? "–" : s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(1)} s`);

function stateOf(request) {
  if (request.finished) return Object.values(request.reasons).join(", ") || "ended";
  const states = [...new Set(request.choices.map((c) => c.status))];
  return states.join(", ") || "waiting";
}

export function show(snapshot) {
  rows.replaceChildren(...[...snapshot.alive, ...snapshot.finished].slice(0, 40).map(row));
  if (opened) refresh();
}

function row(request) {
  const tr = document.createElement("tr");
  const cells = [
    stateOf(request), request.prompt_tokens, request.cached_tokens,
    request.output_tokens, seconds(request.queued_s), seconds(request.ttft_s), seconds(request.total_s),
    request.preemptions || "",
  ];
  const name = document.createElement("td");
  const mark = document.createElement("i");
  mark.className = "cell";
  mark.style.background = colour(request.id);
  const button = document.createElement("button");
  button.textContent = request.id.length > 22 ? `${request.id.slice(0, 21)}…` : request.id;
  button.title = request.id;
  button.setAttribute("aria-expanded", String(opened === request.id));
  button.addEventListener("click", () => open(request.id));
  name.append(mark, " ", button);
  tr.append(name, ...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  return tr;
}

function open(id) {
  opened = opened === id ? "" : id;
  story.hidden = !opened;
  if (opened) refresh();
}

async function refresh() {
  const id = opened;
  try {
    const request = await getJSON(`debug/requests/${encodeURIComponent(id)}`);
    if (id === opened) story.replaceChildren(...tell(request));
  } catch (error) {
    if (id === opened) story.textContent = error.message;
  }
}

/** A bar from arrival to end, a colour for what it was doing, and the events below. */
function tell(request) {
  const title = document.createElement("b");
  title.textContent = request.id;
  const begin = request.arrival, length = Math.max(request.total_s, 1e-3);
  const bar = document.createElement("div");
  bar.className = "bar";
  const events = request.timeline;
  events.forEach((event, i) => {
    const until = i + 1 < events.length ? events[i + 1].t : begin + length;
    const part = document.createElement("i");
    part.style.width = `${(100 * Math.max(0, until - event.t)) / length}%`;
    part.style.background = COLOURS[event.event] ?? "var(--accent)";
    part.title = event.event;
    bar.append(part);
  });
  const list = document.createElement("ol");
  list.className = "events";
  for (const { t, event, ...details } of events) {
    const item = document.createElement("li");
    const name = document.createElement("b");
    name.textContent = `+${(t - begin).toFixed(3)} s  ${event} `;
    item.append(name, Object.entries(details).map(([k, v]) => `${k} ${typeof v === "number" && !Number.isInteger(v) ? v.toFixed(4) : v}`).join(", "));
    list.append(item);
  }
  return [title, bar, list];
}
