// An agent with the `openai` package of Node: `node openai_client.mjs PACKAGES chat|responses whole|stream < task.json`.
// It knows only OPENAI_BASE_URL and OPENAI_API_KEY. Prints what it saw, as JSON. PACKAGES: the directory of package.json.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [packages, api, mode] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/package.json`)("openai");
const client = new OpenAI({ maxRetries: 0 });
const question = JSON.parse(readFileSync(0, "utf8")).question;
const weather = {
  name: "get_weather",
  description: "The temperature in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } } },
};

async function chat(messages) {
  const request = { model: "policy", messages, tools: [{ type: "function", function: weather }] };
  if (mode === "whole") return (await client.chat.completions.create(request)).choices[0];
  return (await client.chat.completions.stream(request).finalChatCompletion()).choices[0];
}

async function playChat() {
  const messages = [{ role: "system", content: "Use the tool." }, { role: "user", content: question }];
  const first = await chat(messages);
  const call = first.message.tool_calls[0];
  messages.push(first.message, { role: "tool", tool_call_id: call.id, content: "21 degrees" });
  const last = await chat(messages);
  return {
    call: [call.function.name, JSON.parse(call.function.arguments)],
    reasons: [first.finish_reason, last.finish_reason],
    text: last.message.content,
  };
}

async function respond(input) {
  const request = { model: "policy", instructions: "Use the tool.", input, store: false };
  request.tools = [{ type: "function", strict: false, ...weather }];
  if (mode === "whole") return client.responses.create(request);
  return client.responses.stream(request).finalResponse();
}

async function playResponses() {
  const input = [{ role: "user", content: question }];
  const first = await respond(input);
  const call = first.output.find((item) => item.type === "function_call");
  input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "21 degrees" });
  const last = await respond(input);
  return {
    call: [call.name, JSON.parse(call.arguments)],
    reasons: [first.status, last.status],
    text: last.output_text,
  };
}

async function errorOf(baseURL, request) {
  try {
    await new OpenAI({ maxRetries: 0, baseURL }).chat.completions.create({ model: "policy", ...request });
  } catch (error) {
    return [error.constructor.name, error.status];
  }
  return null;
}

const found = await (api === "chat" ? playChat() : playResponses());
const elsewhere = process.env.OPENAI_BASE_URL.replace(/[^/]+\/v1$/, "other/v1");
found.errors = [
  await errorOf(undefined, { messages: "not a list" }),
  await errorOf(elsewhere, { messages: [{ role: "user", content: "x" }] }),
];
process.stdout.write(JSON.stringify(found));
