// The chat: streams n answers side by side, shows each token's alternatives, and the blocks that the answers share.

import { stream } from "./api.js";
import { colour } from "./colours.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
let history = [];
let abort = null;

export function start(model) {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); send(model()); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => abort?.abort());
  $("clear").addEventListener("click", () => { abort?.abort(); history = []; log.replaceChildren(); $("prompt").focus(); });
  for (const kind of ["pointerover", "focusin"]) log.addEventListener(kind, showTip);
  for (const kind of ["pointerout", "focusout"]) log.addEventListener(kind, () => $("tip")?.remove());
  log.addEventListener("keydown", moveOverTokens);
}

function turn(kind, text = "") {
  const div = document.createElement("div");
  div.className = `turn ${kind}`;
  div.textContent = text;
  return div;
}

function number(id) {
  return $(id).value === "" ? undefined : Number($(id).value);
}

async function send(model) {
  const text = $("prompt").value.trim();
  if (!text || abort) return;
  $("prompt").value = "";
  history.push({ role: "user", content: text });
  log.append(turn("user", text));
  const n = number("n") ?? 1;
  const box = document.createElement("div");
  box.className = "answers";
  const answers = Array.from({ length: n }, () => answerBox(box));
  log.append(box);
  abort = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    const system = $("system").value;
    const body = {
      model, n, stream: true, logprobs: true, top_logprobs: 5, seed: number("seed"),
      temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"),
      messages: system ? [{ role: "system", content: system }, ...history] : history,
    };
    for await (const event of stream("v1/chat/completions", body, abort.signal)) {
      for (const choice of event.choices) answers[choice.index].take(event.id, choice);
    }
  } catch (error) {
    if (error.name !== "AbortError") log.append(turn("error", error.message));
  } finally {
    abort = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    history.push({ role: "assistant", content: answers[0].text() });
    log.scrollTop = log.scrollHeight;
  }
}

function answerBox(parent) {
  const div = turn("assistant");
  const words = document.createElement("span");
  words.className = "words";
  words.tabIndex = 0;
  words.setAttribute("role", "group");
  words.setAttribute("aria-label", "Answer. Arrow keys show what each token could have been.");
  const footer = document.createElement("footer");
  const strip = document.createElement("div");
  strip.className = "strip";
  div.append(words, footer, strip);
  parent.append(div);
  return {
    text: () => words.textContent,
    take(id, choice) {
      div.dataset.request = id;
      div.dataset.choice = choice.index;
      div.style.borderColor = colour(id);
      const shown = choice.delta.content ?? "";
      const tokens = choice.logprobs?.content ?? [];
      if (shown && tokens.length === 1) words.append(token(shown, tokens[0]));
      else if (shown) words.append(shown);
      if (choice.finish_reason) footer.textContent = `ended: ${choice.finish_reason}`;
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
      if (near) log.scrollTop = log.scrollHeight;
    },
  };
}

function token(text, entry) {
  const span = document.createElement("span");
  span.className = "token";
  span.tabIndex = -1;
  span.textContent = text;
  span.alternatives = entry;
  return span;
}

/** One stop of the Tab key for each answer; inside it the arrow keys go from token to token. */
function moveOverTokens(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const words = event.target.closest(".words");
  if (!step || !words) return;
  event.preventDefault();
  const token = event.target === words ? words.firstElementChild : event.target[step];
  token?.focus();
}

function showTip(event) {
  const entry = event.target.alternatives;
  if (!entry) return;
  $("tip")?.remove();
  const tip = document.createElement("div");
  tip.id = "tip";
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)} %`;
  const lines = entry.top_logprobs.map((t) => `${percent(t.logprob)}  ${JSON.stringify(t.token)}${t.token === entry.token ? "  ←" : ""}`);
  if (!entry.top_logprobs.some((t) => t.token === entry.token)) lines.push(`${percent(entry.logprob)}  ${JSON.stringify(entry.token)}  ←`);
  tip.textContent = lines.join("\n");
  document.body.append(tip);
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(box.left, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${box.bottom + 4}px`;
}

/** Under each answer that still runs: its blocks in order, the shared ones marked. */
export function showBlocks(sequences, holders) {
  for (const sequence of sequences) {
    const div = log.querySelector(`[data-request="${CSS.escape(sequence.request)}"][data-choice="${sequence.choice}"]`);
    if (!div) continue;
    const cells = sequence.table.map((block) => {
      const cell = document.createElement("i");
      const shared = (holders.get(block)?.length ?? 0) > 1;
      cell.className = `cell ${shared ? "shared" : "used"}`;
      cell.style.backgroundColor = colour(sequence.request);
      cell.title = `block ${block}${shared ? ", shared" : ""}`;
      return cell;
    });
    const shared = sequence.table.filter((b) => (holders.get(b)?.length ?? 0) > 1).length;
    div.querySelector(".strip").replaceChildren(...cells);
    const footer = div.querySelector("footer");
    if (!footer.textContent.startsWith("ended")) footer.textContent = `${sequence.table.length} blocks, ${shared} shared`;
  }
}
