// Talking to the server: JSON and streams, with the key where one is needed.

const KEY = "octavo-key";
let asking = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Ask for the key once, however many requests want it. */
function askForKey() {
  if (!asking) {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    asking = new Promise((resolve) => {
      dialog.addEventListener("close", () => {
        if (input.value) sessionStorage.setItem(KEY, input.value);
        input.value = "";
        asking = null;
        resolve();
      }, { once: true });
      dialog.showModal();
    });
  }
  return asking;
}

async function request(path, options = {}) {
  for (;;) {
    const answer = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
    if (answer.status !== 401) return answer;
    await askForKey();
  }
}

export async function getJSON(path) {
  const answer = await request(path);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/** POST and yield the JSON of every server-sent event until [DONE]. Throws on an error event. */
export async function* stream(path, body, signal) {
  const answer = await request(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  });
  if (!answer.ok) throw new Error(await reason(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
