// The AI SDK with its providers for OpenAI, Anthropic and compatible servers, as they are by default.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const ASK = "How is the weather in Oslo?";
const MODEL = "kvmesh-demo";
const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });
const get_weather = tool({
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const loop = { tools: { get_weather }, stopWhen: isStepCount(3) };
const shown = ({ text, reasoningText, toolCalls, toolResults, finishReason }) => ({
  text,
  reasoning: reasoningText ?? "",
  calls: toolCalls.map(({ toolName, input }) => [toolName, input]),
  results: toolResults.map(({ output }) => output),
  finish: finishReason,
});

export default (base) => {
  const settings = { baseURL: `${base}/v1`, apiKey: "none" };
  const openai = createOpenAI(settings);
  const providers = {
    openai: openai(MODEL),
    "openai.responses": openai.responses(MODEL),
    "openai.chat": openai.chat(MODEL),
    anthropic: createAnthropic(settings)(MODEL),
    compatible: createOpenAICompatible({ name: "kvmesh", supportsStructuredOutputs: true, ...settings })(MODEL),
  };
  const plain = { maxRetries: 0, onError: () => {} };
  const whole = (more) => generateText({ prompt: ASK, maxRetries: 0, ...more });
  const streamed = async (more) => {
    const result = streamText({ prompt: ASK, ...plain, ...more });
    const parts = [];
    for await (const part of result.fullStream) parts.push(part.type);
    return { steps: await result.steps, parts };
  };
  const cases = {};
  for (const [name, model] of Object.entries(providers)) {
    cases[`ai ${name} whole`] = async () => (await whole({ model, ...loop })).steps.map(shown);
    cases[`ai ${name} stream`] = async () =>
      (await streamed({ model, ...loop })).steps.map(shown);
    cases[`ai ${name} parallel`] = async () =>
      (await streamed({ model, ...loop, prompt: "Compare two towns" })).steps.map(shown);
    cases[`ai ${name} turns`] = async () => {
      const first = await whole({ model, ...loop });
      const messages = [{ role: "user", content: ASK }];
      for (const step of first.steps) messages.push(...step.response.messages);
      messages.push({ role: "user", content: "Go on" });
      const { prompt, ...more } = { model, ...loop, messages };
      return (await generateText({ maxRetries: 0, ...more })).text;
    };
    cases[`ai ${name} object`] = async () =>
      (await whole({ model, prompt: "Someone", output: Output.object({ schema: Person }) })).output;
    cases[`ai ${name} abort`] = async () => {
      const controller = new AbortController();
      const abortSignal = controller.signal;
      const result = streamText({ model, prompt: "Go on for long", abortSignal, ...plain });
      const parts = [];
      for await (const part of result.fullStream) {
        parts.push(part.type);
        if (part.type === "text-delta") controller.abort();
      }
      return parts.at(-1);
    };
    cases[`ai ${name} error`] = async () => {
      const error = await whole({ model, prompt: "x", maxOutputTokens: 10 ** 6 }).catch((e) => e);
      return [APICallError.isInstance(error), error.statusCode, error.isRetryable];
    };
  }
  const reasons = { reasoningSummary: "auto", forceReasoning: true };
  for (const store of [true, false]) {
    const asked = { model: openai(MODEL), providerOptions: { openai: { ...reasons, store } }, ...loop };
    cases[`ai summary ${store ? "stored" : "sealed"} whole`] = async () =>
      (await whole(asked)).steps.map(shown);
    cases[`ai summary ${store ? "stored" : "sealed"} stream`] = async () =>
      (await streamed(asked)).steps.map(shown);
  }
  return cases;
};
