// AI SDK: node ai_sdk.mjs (compatible | openai | openai-stored | anthropic) BASE_URL
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [kind, base] = process.argv.slice(2);
const settings = { baseURL: `${base}/v1`, apiKey: "none" };
const model = {
  compatible: () => createOpenAICompatible({ name: "kvmesh", ...settings })("kvmesh-demo"),
  openai: () => createOpenAI(settings)("kvmesh-demo"),
  "openai-stored": () => createOpenAI(settings)("kvmesh-demo"),
  anthropic: () => createAnthropic(settings)("kvmesh-demo"),
}[kind]();

const weather = tool({
  description: "Forecast the weather of a city.",
  inputSchema: z.object({
    city: z.string().describe("The name of the city"),
    days: z.number().int().default(1).describe("For how many days"),
    note: z.string().describe("A note"),
  }),
  execute: async ({ city, days }) => `It rains in ${city} for ${days} days.`,
});

const messages = [];
for (const prompt of ["How is the weather?", "And tomorrow?"]) {
  messages.push({ role: "user", content: prompt });
  const result = streamText({
    model,
    instructions: "You are a careful forecaster. ".repeat(40),
    messages,
    tools: { weather },
    stopWhen: isStepCount(10),
    providerOptions: { openai: { store: kind === "openai-stored" } },
  });
  console.log(await result.text);
  for (const step of await result.steps) messages.push(...step.response.messages);
}
