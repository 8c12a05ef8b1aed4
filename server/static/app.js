// The page: one snapshot of the engine twice a second, given to the map, the charts and the list.

import { getJSON } from "./api.js";
import * as charts from "./charts.js";
import * as chat from "./chat.js";
import * as memory from "./memory.js";
import * as requests from "./requests.js";

const PERIOD_MS = 500;
const state = document.getElementById("state");
const events = document.getElementById("events");
let model = "";
let last = null;
const told = new Set();  // finished requests that are in the charts

function say(text) {
  const item = document.createElement("li");
  const time = document.createElement("b");
  time.textContent = `${new Date().toLocaleTimeString()} `;
  item.append(time, text);
  events.prepend(item);
  while (events.children.length > 30) events.lastChild.remove();
}

const COUNTED = [
  ["cow_copies", (n) => `copy-on-write: ${n} block${n > 1 ? "s" : ""} copied`],
  ["preemptions_swap", (n, s) => `preempted ${n} by swap: ${cost(s)}`],
  ["preemptions_recompute", (n, s) => `preempted ${n} by recompute: ${cost(s)}`],
  ["swap_in_blocks", (n) => `${n} blocks came back from the host`],
];
const cost = (s) => `swap would cost ${(1e3 * s.cost_swap_s).toFixed(1)} ms, recomputing ${(1e3 * s.cost_recompute_s).toFixed(1)} ms`;

function follow(live) {
  const stats = live.stats;
  if (last && stats.step >= last.stats.step) {
    const passed = live.time - last.time;
    if (passed > 0) charts.add("tokens", (stats.generation_tokens - last.stats.generation_tokens) / passed);
    for (const [name, text] of COUNTED) {
      const more = stats[name] - last.stats[name];
      if (more > 0) say(text(more, stats));
    }
  }
  charts.add("pool", (100 * (live.total - live.free)) / live.total);
  charts.add("queue", stats.waiting);
  for (const request of [...live.finished].reverse()) {
    if (told.has(request.id)) continue;
    told.add(request.id);
    if (request.ttft_s === null) continue;
    charts.add("ttft", 1e3 * request.ttft_s);
    const more = request.output_tokens / request.choices_total - 1;
    if (more > 0) charts.add("tpot", (1e3 * (request.total_s - request.ttft_s)) / more, ((1e3 * (request.total_s - request.ttft_s)) / more).toFixed(1));
  }
  last = live;
}

async function tick() {
  if (!document.hidden) {
    try {
      const live = await getJSON("debug/live");
      state.textContent = live.status;
      state.className = `pill ${live.status === "ready" ? "ready" : "bad"}`;
      memory.show(live);
      follow(live);
      requests.show(live);
      chat.showBlocks(live.sequences, memory.holdersOf());
    } catch (error) {
      state.textContent = error.message.slice(0, 60);
      state.className = "pill bad";
    }
  }
  setTimeout(tick, PERIOD_MS);
}

async function begin() {
  chat.start(() => model);
  for (;;) {
    try {
      model = (await getJSON("v1/models")).data[0].id;
      document.getElementById("model").textContent = model;
      break;
    } catch (error) {
      state.textContent = error.message.slice(0, 60);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  tick();
}

begin();
