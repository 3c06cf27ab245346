#!/bin/sh
# A tool of the AI SDK 7.0.173 returns an image as a file part. @ai-sdk/openai-compatible 3.0.92 writes it into the tool's message as JSON
# text, base64 included: a screenshot of 200 KB is 267,000 characters of prompt, which no model can see as a picture and which stay
# in every later turn. @ai-sdk/anthropic 4.0.105 sends the same result as an image.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --prefix . ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105 zod@4.6.7
cat > program.mjs <<'EOF'
import http from "node:http";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const IMAGE = Buffer.alloc(200_000, 7).toString("base64");
let last;
const chat = (done) => {
  const call = { id: "call_1", type: "function", function: { name: "shot", arguments: "{}" } };
  const message = done ? { role: "assistant", content: "Done." } : { role: "assistant", content: null, tool_calls: [call] };
  return { id: "c", object: "chat.completion", created: 1, model: "m", choices: [{ index: 0, message, finish_reason: done ? "stop" : "tool_calls" }] };
};
const messages = (done) => ({
  id: "msg_1", type: "message", role: "assistant", model: "m", usage: { input_tokens: 1, output_tokens: 1 },
  content: [done ? { type: "text", text: "Done." } : { type: "tool_use", id: "toolu_1", name: "shot", input: {} }],
  stop_reason: done ? "end_turn" : "tool_use",
});
const server = http.createServer(async (request, response) => {
  let text = "";
  for await (const part of request) text += part;
  last = JSON.parse(text).messages;
  response.writeHead(200, { "content-type": "application/json" });
  response.end(JSON.stringify((request.url.endsWith("/messages") ? messages : chat)(last.length > 1)));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const settings = { baseURL: `http://127.0.0.1:${server.address().port}/v1`, apiKey: "none", name: "x" };
const shot = tool({
  inputSchema: z.object({}),
  execute: async () => "shot",
  toModelOutput: () => ({ type: "content", value: [{ type: "file", mediaType: "image/png", data: { type: "data", data: IMAGE } }] }),
});
const ask = async (model) => {
  await generateText({ model, prompt: "Go", tools: { shot }, stopWhen: stepCountIs(2) });
  return last.at(-1).content;
};
const compatible = await ask(createOpenAICompatible(settings)("m"));
const anthropic = (await ask(createAnthropic(settings)("m")))[0].content[0];
console.log(`openai-compatible: the tool's message is a ${typeof compatible} of ${compatible.length} characters: ${compatible.slice(0, 60)}…`);
console.log(`anthropic: the tool's result is a block of type ${anthropic.type}`);
const same = typeof compatible === "string" && compatible.includes(IMAGE) && anthropic.type === "image";
console.log(same ? "as observed" : "CHANGED");
process.exit(same ? 0 : 1);
EOF
node program.mjs
