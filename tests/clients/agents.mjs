// Vercel's `ai` against an endpoint whose model thinks: node agents.mjs URL MODEL
import { createRequire } from "node:module";
import { strict as assert } from "node:assert";

const require = createRequire(`${process.cwd()}/target/node/`);
const { generateText, jsonSchema, Output, stepCountIs, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const [endpoint, id] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "remoe", baseURL: `${endpoint}/v1`, supportsStructuredOutputs: true });
const schema = jsonSchema({
  type: "object",
  properties: { word: { type: "string", enum: ["lake", "river"] } },
  required: ["word"],
  additionalProperties: false,
});
const shown = [];
const find = tool({
  description: "Finds a word.",
  inputSchema: schema,
  execute: ({ word }) => (shown.push(word), "It is a lake."),
});
// The model cannot reason: it calls a tool where it has to, and its thoughts end by a budget.
const budget = { thinking_token_budget: 16 };
const request = {
  model: provider(id),
  prompt: "What is a lake?",
  maxOutputTokens: 160,
  temperature: 0,
  maxRetries: 0,
  providerOptions: { remoe: budget },
};
const loop = {
  ...request,
  providerOptions: { remoe: { ...budget, parallel_tool_calls: false } },
  tools: { find },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

function check(steps, what) {
  assert.equal(steps.length, 2, what);
  const [called, answered] = steps;
  assert.deepEqual([called.finishReason, called.toolCalls[0].toolName], ["tool-calls", "find"], what);
  assert.equal(called.toolResults[0].output, "It is a lake.", what);
  for (const step of steps) assert.ok(step.reasoningText.length > 0, `${what}: no thought`);
  assert.ok(answered.text.length > 0, what);
}

const whole = await generateText(loop);
check(whole.steps, "a conversation");
assert.ok(shown.length > 0 && whole.steps[0].usage.reasoningTokens >= 16);

const stream = streamText(loop);
const kinds = new Set();
for await (const part of stream.fullStream) {
  if (part.type === "error") throw part.error;
  kinds.add(part.type);
}
for (const kind of ["reasoning-delta", "tool-input-delta", "tool-call", "text-delta"]) assert.ok(kinds.has(kind), kind);
check(await stream.steps, "a conversation in streams");
assert.equal(await stream.text, whole.text, "streams say the same");

const formed = await generateText({ ...request, output: Output.object({ schema }) });
assert.deepEqual(Object.keys(formed.output), ["word"]);
assert.ok(formed.reasoningText.length > 0);
