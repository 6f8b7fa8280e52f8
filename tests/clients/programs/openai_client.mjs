// The openai package for JavaScript against the server at TWINPOOL_URL. Prints what it found as one JSON object.
import { createRequire } from "node:module";

const require = createRequire(process.env.CLIENT_HOME + "/package.json");
const OpenAI = require("openai");
const model = process.env.TWINPOOL_MODEL;
const client = new OpenAI({ baseURL: process.env.TWINPOOL_URL + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const found = {};

const whole = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 30 });
found.whole = { text: whole.choices[0].message.content, finish: whole.choices[0].finish_reason, usage: whole.usage };

const stream = await client.chat.completions.create({
  model, messages, temperature: 0, max_completion_tokens: 30, stream: true, stream_options: { include_usage: true },
});
found.streamed = { text: "", role: null, finish: null, usage: null };
for await (const chunk of stream) {
  found.streamed.usage = chunk.usage ?? found.streamed.usage;
  for (const choice of chunk.choices) {
    found.streamed.role ??= choice.delta.role;
    found.streamed.text += choice.delta.content ?? "";
    found.streamed.finish = choice.finish_reason ?? found.streamed.finish;
  }
}

const helper = client.chat.completions.stream({ model, messages, temperature: 0, max_completion_tokens: 30 });
const last = await helper.finalChatCompletion();
found.helper = { text: last.choices[0].message.content, finish: last.choices[0].finish_reason };

const several = await client.completions.create({
  model, prompt: ["1, 2, 3, 4,", "a, b, c, d,"], max_tokens: 6, n: 2, temperature: 0, logprobs: 2,
});
found.several = several.choices.map((choice) => ({
  index: choice.index, text: choice.text, tokens: choice.logprobs.tokens.length,
}));

const described = { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } };
const called = await client.chat.completions.create({
  model, messages: [{ role: "user", content: "What is the weather in Paris?" }], temperature: 0, max_completion_tokens: 100,
  tools: [{ type: "function", function: described }], tool_choice: { type: "function", function: { name: "weather" } },
});
found.tool = called.choices[0].message.tool_calls.map((call) => ({
  name: call.function.name, arguments: JSON.parse(call.function.arguments), finish: called.choices[0].finish_reason,
}));

const response = await client.responses.create({
  model, instructions: "Answer in one sentence.", input: "What is the capital of France?", temperature: 0, max_output_tokens: 30,
});
found.response = { text: response.output_text, status: response.status };
found.events = [];
for await (const event of await client.responses.create({
  model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 30, stream: true,
})) {
  if (found.events.at(-1) !== event.type) found.events.push(event.type);
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code };
  }
  return null;
}
found.too_long = await failure(client.completions.create({ model, prompt: "word ".repeat(9000), max_tokens: 10 }));
found.no_model = await failure(client.chat.completions.create({ model: "no-such-model", messages }));
found.wrong = await failure(client.chat.completions.create({ model, messages, temperature: -1 }));
found.models = [];
for await (const card of client.models.list()) found.models.push(card.id);

const leaving = await client.chat.completions.create({ model, messages, stream: true, max_completion_tokens: 500 });
for await (const _ of leaving) break; // leaves the stream

console.log(JSON.stringify(found));
