// The official JavaScript client: forms and tools of a running Remoe endpoint.
//
//     node structured.mjs http://127.0.0.1:PORT MODEL
//
// Ends with 0 when every check holds.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about the weather." }];
const schema = {
  type: "object",
  properties: { kind: { enum: ["sun", "rain"] }, degrees: { type: "integer", minimum: -50, maximum: 50 } },
  required: ["kind", "degrees"],
  additionalProperties: false,
};

const right = (text) => {
  const { kind, degrees } = JSON.parse(text);
  assert.ok(["sun", "rain"].includes(kind) && Number.isInteger(degrees), text);
};

const form = { type: "json_schema", json_schema: { name: "weather", strict: true, schema } };
const answer = await client.chat.completions.create({ model, messages, response_format: form });
assert.equal(answer.choices[0].finish_reason, "stop");
right(answer.choices[0].message.content);

const tools = [{ type: "function", function: { name: "report", parameters: schema } }];
const choice = { type: "function", function: { name: "report" } };
const stream = client.chat.completions.stream({ model, messages, tools, tool_choice: choice });
let parts = 0;
stream.on("tool_calls.function.arguments.delta", () => (parts += 1));
const message = await stream.finalMessage();
right(message.tool_calls[0].function.arguments);
assert.ok(parts > 1, "the arguments come in parts");

// The client calls the function itself and sends what it says.
const called = [];
const runner = client.chat.completions.runTools(
  {
    model,
    messages,
    max_tokens: 200,
    tool_choice: choice,
    tools: [
      {
        type: "function",
        function: { name: "report", parameters: schema, parse: JSON.parse, function: (given) => called.push(given) && "noted" },
      },
    ],
  },
  { maxChatCompletions: 2 },
);
await runner.done();
assert.equal(called.length, 1);
console.log("everything holds");
