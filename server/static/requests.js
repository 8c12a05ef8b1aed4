// The list of requests, and the story of the one that is opened.

import { getJSON } from "./api.js";
import { colour } from "./colours.js";

const SHOWN = 40;
const rows = document.getElementById("rows");
const story = document.getElementById("timeline");
const drawn = new Map();  // request -> its row: a row that stays keeps the focus and what is selected
let opened = "";
let told = false;  // the opened one has ended and is shown to its end

const seconds = (s) => (s === null || s < 0 ? "–" : s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(1)} s`);

function stateOf(request) {
  if (request.finished) return Object.values(request.reasons).join(", ") || "ended";
  const states = [...new Set(request.choices.map((c) => c.status))];
  return states.join(", ") || "waiting";
}

export function show(snapshot) {
  const requests = [...snapshot.alive, ...snapshot.finished].slice(0, SHOWN);
  document.getElementById("no-requests").hidden = requests.length > 0;
  const kept = new Set(requests.map((request) => request.id));
  for (const [id, row] of drawn) if (!kept.has(id)) { row.remove(); drawn.delete(id); }
  requests.forEach((request, i) => {
    if (!drawn.has(request.id)) drawn.set(request.id, newRow(request.id));
    const row = drawn.get(request.id);
    if (rows.children[i] !== row) rows.insertBefore(row, rows.children[i] ?? null);
    fill(row, request);
  });
  if (opened && !told) refresh();
}

function newRow(id) {
  const row = document.createElement("tr");
  const name = document.createElement("td");
  const mark = document.createElement("i");
  mark.className = "cell";
  mark.style.background = colour(id);
  const button = document.createElement("button");
  button.textContent = id.length > 22 ? `${id.slice(0, 21)}…` : id;
  button.title = id;
  button.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-controls", "timeline");
  button.addEventListener("click", () => open(id));
  name.append(mark, " ", button);
  row.append(name, ...Array.from({ length: 8 }, () => document.createElement("td")));
  return row;
}

function fill(row, request) {
  const texts = [
    stateOf(request), request.prompt_tokens, request.cached_tokens, request.output_tokens,
    seconds(request.queued_s), seconds(request.ttft_s), seconds(request.total_s), request.preemptions || "",
  ];
  texts.forEach((text, i) => {
    const cell = row.children[i + 1];
    if (cell.textContent !== String(text)) cell.textContent = text;
  });
}

function open(id) {
  opened = opened === id ? "" : id;
  told = false;
  story.hidden = !opened;
  for (const [other, row] of drawn) row.querySelector("button").setAttribute("aria-expanded", String(other === opened));
  if (opened) refresh();
}

async function refresh() {
  const id = opened;
  try {
    const request = await getJSON(`debug/requests/${encodeURIComponent(id)}`);
    if (id !== opened) return;
    const place = story.querySelector("ol")?.scrollTop ?? 0;
    story.replaceChildren(...tell(request));
    story.querySelector("ol").scrollTop = place;
    told = request.finished;
  } catch (error) {
    if (id === opened) story.textContent = error.message;
  }
}

/** What a request does from an event on, by the class of its colour; what is computed again is part of decoding. */
function phase(event, begun) {
  if (event === "queued" || event === "preempted" || event === "finished") return event;
  return begun ? "decode" : "prefill";
}

/** A bar from arrival to end, a colour for what it was doing, and the events below. */
function tell(request) {
  const title = document.createElement("b");
  title.textContent = request.id;
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  const key = document.createElement("p");
  key.className = "key";
  for (const name of ["queued", "prefill", "decode", "preempted"]) key.append(swatch(name), ` ${name}  `);
  const list = document.createElement("ol");
  list.className = "events";
  const begin = request.arrival, end = begin + request.total_s, events = request.timeline;
  let begun = false;
  events.forEach(({ t, event, ...details }, i) => {
    begun ||= event === "first token";
    const kind = phase(event, begun), until = events[i + 1]?.t ?? end;
    const part = swatch(kind);
    part.style.flexGrow = Math.max(0, until - t);
    bar.append(part);
    const item = document.createElement("li");
    const name = document.createElement("b");
    name.textContent = ` +${(t - begin).toFixed(3)} s  ${event} `;
    item.append(swatch(kind), name, Object.entries(details).map(detail).filter(Boolean).join(", "));
    list.append(item);
  });
  return [title, bar, key, list];
}

function swatch(kind) {
  const mark = document.createElement("i");
  mark.className = `phase ${kind}`;
  return mark;
}

function detail([name, value]) {
  if (value === null || value === "" || value === false) return "";
  const words = name.replace(/_s$/, "").replaceAll("_", " ");
  if (value === true) return words;
  if (name.endsWith("bytes_per_s")) return `${name.replace("_bytes_per_s", "").replaceAll("_", " ")} ${(value / 1e9).toFixed(2)} GB/s`;
  if (name.endsWith("tokens_per_s")) return `${name.replace("_tokens_per_s", "").replaceAll("_", " ")} ${value.toFixed(0)} tokens/s`;
  if (name.endsWith("_s")) return `${words} ${(1000 * value).toFixed(1)} ms`;
  return `${words} ${typeof value === "number" && !Number.isInteger(value) ? value.toFixed(4) : value}`;
}
