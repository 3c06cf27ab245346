// The openai package: accumulators, tool loops, stored responses, structured output, errors.
import OpenAI from "openai";
import { zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "kvmesh-demo";
const ASK = "How is the weather in Oslo?";
const CITY = z.object({ city: z.string() });
const Person = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()) });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const weather = ({ city }) => `It is sunny in ${city}.`;
const responsesTool = { type: "function", name: "get_weather", parameters, strict: false };
const chatTool = { type: "function", function: { name: "get_weather", parameters } };
const user = (content) => [{ role: "user", content }];
const outputs = (response) =>
  response.output
    .filter((item) => item.type === "function_call")
    .map((item) => ({
      type: "function_call_output",
      call_id: item.call_id,
      output: weather(JSON.parse(item.arguments)),
    }));

export default (base) => {
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
  const { responses } = client;
  const respond = (input, more = {}) =>
    responses.stream({ model, input, tools: [responsesTool], ...more }).finalResponse();
  const complete = (content, more = {}) =>
    client.chat.completions.stream({ model, messages: user(content), ...more }).finalChatCompletion();

  return {
    "responses stream": async () => await respond(ASK),
    "responses whole": async () =>
      await responses.create({ model, input: ASK, tools: [responsesTool] }),
    "responses summary": async () => await respond(ASK, { reasoning: { summary: "auto" } }),
    "responses events": async () => {
      const seen = [];
      const stream = responses.stream({ model, input: ASK, tools: [responsesTool] });
      for await (const event of stream) seen.push(event.type);
      return seen;
    },
    "responses parallel": async () => await respond("Compare two towns"),
    "responses custom": async () =>
      await respond("Patch the file", { tools: [{ type: "custom", name: "apply_patch" }] }),
    "responses cut in thinking": async () => await respond(ASK, { max_output_tokens: 4 }),
    "responses cut in a call": async () => await respond("Book a room", { max_output_tokens: 20 }),
    "responses loop, referring": async () => {
      const first = await respond(ASK);
      const second = await respond(outputs(first), { previous_response_id: first.id });
      return second.output_text;
    },
    "responses loop, replaying": async () => {
      const first = await respond(ASK, { store: false });
      const input = [...user(ASK), ...first.output, ...outputs(first)];
      return (await respond(input, { store: false })).output_text;
    },
    "responses parse": async () => {
      const text = { format: zodTextFormat(Person, "person") };
      return (await responses.parse({ model, input: "Someone", text })).output_parsed;
    },
    "responses parse a call": async () => {
      const tool = zodResponsesFunction({ name: "get_weather", parameters: CITY });
      const made = await responses.parse({ model, input: ASK, tools: [tool] });
      return made.output.at(-1).parsed_arguments;
    },
    "stored input": async () => {
      const first = await respond(ASK);
      const second = await respond(outputs(first), { previous_response_id: first.id });
      const items = [];
      for await (const item of responses.inputItems.list(second.id, { limit: 2, order: "asc" }))
        items.push(item);
      const counted = await responses.inputTokens.count({
        model,
        input: outputs(first),
        previous_response_id: first.id,
        tools: [responsesTool],
      });
      const read = await responses.retrieve(second.id);
      await responses.delete(second.id);
      const gone = await responses.retrieve(second.id).catch((error) => error.status);
      return {
        items,
        gone,
        same: read.output_text === second.output_text,
        counted: counted.input_tokens === second.usage.input_tokens,
      };
    },
    "responses abort": async () => {
      const stream = responses.stream({ model, input: "Go on for long" });
      stream.on("response.output_text.delta", () => stream.abort());
      const error = await stream.finalResponse().catch((error) => error);
      return error instanceof OpenAI.APIUserAbortError;
    },
    "chat stream": async () => await complete(ASK, { tools: [chatTool] }),
    "chat whole": async () =>
      await client.chat.completions.create({ model, messages: user(ASK), tools: [chatTool] }),
    "chat parallel": async () => await complete("Compare two towns", { tools: [chatTool] }),
    "chat custom": async () =>
      await complete("Patch the file", {
        tools: [{ type: "custom", custom: { name: "apply_patch" } }],
      }),
    "chat loop": async () => {
      const runner = (stream) =>
        client.chat.completions.runTools({
          model,
          messages: user(ASK),
          stream,
          tools: [
            {
              type: "function",
              function: { ...chatTool.function, function: weather, parse: JSON.parse },
            },
          ],
        });
      return [await runner(false).finalContent(), await runner(true).finalContent()];
    },
    "chat parse": async () => {
      const format = zodResponseFormat(Person, "person");
      const made = await complete("Someone", { response_format: format });
      return made.choices[0].message.parsed;
    },
    "chat usage": async () => {
      const chunks = await client.chat.completions.create({
        model,
        messages: user("Go on"),
        stream: true,
        stream_options: { include_usage: true },
      });
      let usage;
      for await (const chunk of chunks) usage = chunk.usage ?? usage;
      return usage;
    },
    errors: async () => {
      const found = [
        await responses.create({ model: "nope", input: "x" }).catch((error) => error),
        await respond("x", { max_output_tokens: 10 ** 6 }).catch((error) => error),
        await complete("x", { temperature: 9 }).catch((error) => error),
        await respond([{ type: "item_reference", id: "rs_none" }]).catch((error) => error),
      ];
      return found.map((error) => [error.constructor.name, error.status, error.code, error.param]);
    },
  };
};
