// OpenAI's SDK for JavaScript against a running endpoint: node openai.mjs URL MODEL
import { createRequire } from "node:module";
import { strict as assert } from "node:assert";

const { OpenAI } = createRequire(`${process.cwd()}/target/node/`)("openai");
const [endpoint, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${endpoint}/v1`, apiKey: "none" });
const request = { model, messages: [{ role: "user", content: "What is a lake?" }], max_tokens: 24, seed: 1 };

const listed = [];
for await (const { id } of client.models.list()) listed.push(id);
assert.deepEqual(listed, [model]);

const whole = await client.chat.completions.create(request);
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

let streamed = "";
const stream = await client.chat.completions.create({ ...request, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, text, "a stream says the same");

await assert.rejects(client.chat.completions.create({ ...request, model: "another" }), { status: 404, code: "model_not_found" });
await assert.rejects(client.chat.completions.create({ ...request, temperature: 9 }), { status: 400, param: "temperature" });
