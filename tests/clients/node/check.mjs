// The official Node client against a running server: node check.mjs http://127.0.0.1:8000
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: process.env.API_KEY ?? "EMPTY", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const asked = { model, temperature: 0, max_tokens: 12, messages: [{ role: "user", content: "Say hello." }] };
const light = {
  type: "function",
  function: {
    name: "set_light",
    parameters: {
      type: "object",
      properties: { room: { enum: ["hall", "attic"] }, on: { type: "boolean" } },
      required: ["room", "on"],
      additionalProperties: false,
    },
  },
};

const checks = {
  async "a chat is the same whole and streamed"() {
    const whole = await client.chat.completions.create(asked);
    let text = "";
    for await (const part of await client.chat.completions.create({ ...asked, stream: true })) {
      text += part.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
  },
  async "a completion is the same whole and streamed"() {
    const prompt = { model, prompt: "The capital of France is", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create(prompt);
    let text = "";
    for await (const part of await client.completions.create({ ...prompt, stream: true })) text += part.choices[0]?.text ?? "";
    assert.equal(text, whole.choices[0].text);
    assert.equal(whole.usage.completion_tokens, 8);
  },
  async "a forced call parses and obeys its schema"() {
    const answer = await client.chat.completions.create({
      ...asked, max_tokens: 200, tools: [light], tool_choice: { type: "function", function: { name: "set_light" } },
    });
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "set_light");
    assert.ok(["hall", "attic"].includes(JSON.parse(call.function.arguments).room));
  },
  async "structured output parses"() {
    const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
    const answer = await client.chat.completions.parse({
      ...asked, max_tokens: 60, response_format: { type: "json_schema", json_schema: { name: "a", strict: true, schema } },
    });
    assert.equal(typeof answer.choices[0].message.parsed.ok, "boolean");
  },
  async "a response is the same whole and streamed, and can be read again"() {
    const input = { model, input: "Say hello.", temperature: 0, max_output_tokens: 12 };
    const whole = await client.responses.create(input);
    const stream = client.responses.stream(input);
    for await (const event of stream) assert.ok(event.type.startsWith("response."));
    assert.equal((await stream.finalResponse()).output_text, whole.output_text);
    assert.equal((await client.responses.retrieve(whole.id)).id, whole.id);
  },
  async "embeddings have their full width"() {
    const [short, plain] = await Promise.all([
      client.embeddings.create({ model, input: "boat" }),
      client.embeddings.create({ model, input: "boat", encoding_format: "float" }),
    ]);
    assert.equal(short.data[0].embedding.length, plain.data[0].embedding.length);
  },
  async "errors are of the client's classes"() {
    await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), OpenAI.BadRequestError);
    await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
  },
  async "a file can be uploaded where the server keeps files"() {
    const file = await toFile(Buffer.from("{}"), "in.jsonl");
    const made = await client.files.create({ file, purpose: "batch" }).catch((error) => error);
    if (made.status === 404) return; // no data directory
    assert.equal(await (await client.files.content(made.id)).text(), "{}");
    await client.files.delete(made.id);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok   ${name}`);
}
