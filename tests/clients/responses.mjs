// OpenAI's SDK for JavaScript and the Responses API of a running endpoint: node responses.mjs URL MODEL
import { createRequire } from "node:module";
import { strict as assert } from "node:assert";

const { OpenAI } = createRequire(`${process.cwd()}/target/node/`)("openai");
const [endpoint, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${endpoint}/v1`, apiKey: "none" });
const request = { model, input: "What is a lake?", max_output_tokens: 8, temperature: 0 };
const schema = {
  type: "object",
  properties: { word: { type: "string", enum: ["lake", "river"] } },
  required: ["word"],
  additionalProperties: false,
};

const whole = await client.responses.create(request);
assert.ok(whole.output_text.length > 0);
assert.equal(whole.status, "incomplete");

let streamed = "";
const stream = await client.responses.create({ ...request, stream: true });
for await (const event of stream) if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, whole.output_text, "a stream says the same");
const final = await client.responses.stream(request).finalResponse();
assert.equal(final.output_text, whole.output_text, "its last response says the same");

const on = await client.responses.create({ ...request, input: "Why?", previous_response_id: whole.id });
assert.equal(on.previous_response_id, whole.id);
assert.ok(on.usage.input_tokens > whole.usage.input_tokens, "earlier items are part of it");

const tool = { type: "function", name: "find", strict: true, parameters: schema };
const called = await client.responses.create({ ...request, max_output_tokens: 200, tools: [tool], tool_choice: "required" });
const call = called.output.find(({ type }) => type === "function_call");
assert.deepEqual([call.name, Object.keys(JSON.parse(call.arguments))], ["find", ["word"]]);

const format = { type: "json_schema", name: "word", strict: true, schema };
const formed = await client.responses.parse({ ...request, max_output_tokens: 200, text: { format } });
assert.deepEqual(Object.keys(JSON.parse(formed.output_text)), ["word"]);

await assert.rejects(client.responses.create({ ...request, previous_response_id: "resp_none" }), { status: 404 });
await assert.rejects(client.responses.create({ ...request, truncation: "auto" }), { status: 400, param: "truncation" });
