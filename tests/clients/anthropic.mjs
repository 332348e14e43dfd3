// Anthropic's SDK for JavaScript against a running endpoint: node anthropic.mjs URL MODEL
import { createRequire } from "node:module";
import { strict as assert } from "node:assert";

const { Anthropic } = createRequire(`${process.cwd()}/target/node/`)("@anthropic-ai/sdk");
const [endpoint, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: endpoint, apiKey: "none" });
const messages = [{ role: "user", content: "What is a lake?" }];
const request = { model, messages, max_tokens: 8, temperature: 0 };

const whole = await client.messages.create({ ...request, thinking: { type: "disabled" } });
const text = whole.content[0].text;
assert.ok(text.length > 0);
assert.equal(whole.stop_reason, "max_tokens");

const stream = client.messages.stream(request);
let streamed = "";
stream.on("text", (delta) => (streamed += delta));
const final = await stream.finalMessage();
assert.deepEqual([streamed, final.content[0].text, final.stop_reason], [text, text, "max_tokens"]);

const { input_tokens } = await client.messages.countTokens({ model, messages });
assert.equal(input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

const properties = { word: { type: "string", enum: ["lake", "river"] } };
const tool = { name: "find", input_schema: { type: "object", properties, required: ["word"], additionalProperties: false } };
const called = await client.messages
  .stream({ ...request, max_tokens: 200, tools: [tool], tool_choice: { type: "tool", name: "find" } })
  .finalMessage();
const use = called.content.find(({ type }) => type === "tool_use");
assert.deepEqual([called.stop_reason, use.name, Object.keys(use.input)], ["tool_use", "find", ["word"]]);
const result = { type: "tool_result", tool_use_id: use.id, content: "It is a lake." };
const turns = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
assert.equal((await client.messages.create({ ...request, messages: turns, tools: [tool] })).role, "assistant");

await assert.rejects(client.messages.create({ ...request, model: "another" }), { status: 404 });
await assert.rejects(client.messages.create({ ...request, messages: [...messages, { role: "assistant", content: "A" }] }), { status: 400 });
await assert.rejects(client.messages.create({ ...request, thinking: { type: "enabled", budget_tokens: 1024 } }), { status: 400 });
