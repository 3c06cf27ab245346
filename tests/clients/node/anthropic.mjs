// The @anthropic-ai/sdk package: accumulators, tool loops, thinking, structured output, errors.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const model = "kvmesh-demo";
const ASK = "How is the weather in Oslo?";
const City = z.object({ city: z.string() });
const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });
const tool = {
  name: "get_weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const user = (content) => ({ role: "user", content });

export default (base) => {
  const client = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
  const body = (content, more = {}) => ({
    model,
    max_tokens: 400,
    messages: [user(content)],
    tools: [tool],
    ...more,
  });
  const answer = (content, more) => client.messages.stream(body(content, more)).finalMessage();

  return {
    "messages stream": async () => await answer(ASK),
    "messages whole": async () => await client.messages.create(body(ASK)),
    "messages omitted": async () =>
      await answer(ASK, { thinking: { type: "adaptive", display: "omitted" } }),
    "messages parallel": async () => await answer("Compare two towns"),
    "messages cut in thinking": async () => await answer(ASK, { max_tokens: 4 }),
    "messages cut in a call": async () => await answer("Book a room", { max_tokens: 20 }),
    "messages stopped": async () => await answer("Go on", { stop_sequences: ["lad"] }),
    "messages loop": async () => {
      const first = await answer(ASK, { thinking: { type: "enabled", budget_tokens: 1024 } });
      const call = first.content.at(-1);
      const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
      const messages = [user(ASK), { role: "assistant", content: first.content }, user([result])];
      const counted = await client.messages.countTokens({ model, messages, tools: [tool] });
      const second = await answer("", { messages });
      const { usage } = second;
      const read = usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
      return [second.content.at(-1).text, counted.input_tokens === usage.input_tokens + read];
    },
    "messages runner": async () => {
      const run = ({ city }) => `It is sunny in ${city}.`;
      const runnable = betaZodTool({ name: "get_weather", inputSchema: City, run, description: "" });
      const runner = (stream) =>
        client.beta.messages.toolRunner({ ...body(ASK), tools: [runnable], stream });
      const last = [await runner(false), await runner(true).runUntilDone()];
      return last.map((message) => message.content.at(-1).text);
    },
    "messages parse": async () => {
      const output_config = { format: zodOutputFormat(Person) };
      const made = await client.messages.parse(body("Someone", { output_config, tools: [] }));
      return made.parsed_output;
    },
    "messages abort": async () => {
      const stream = client.messages.stream(body("Go on for long"));
      stream.on("text", () => stream.abort());
      const error = await stream.finalMessage().catch((error) => error);
      return error instanceof Anthropic.APIUserAbortError;
    },
    "messages errors": async () => {
      const found = [
        await answer("x", { model: "nope" }).catch((error) => error),
        await answer("x", { max_tokens: 10 ** 6 }).catch((error) => error),
        await answer("x", { temperature: 9 }).catch((error) => error),
      ];
      return found.map((error) => [error.constructor.name, error.status, error.type]);
    },
  };
};
