// Runs every case against the mesh at BASE_URL; prints one JSON line for each: node main.mjs BASE_URL
import ai from "./ai_sdk.mjs";
import anthropic from "./anthropic.mjs";
import openai from "./openai.mjs";

const [base] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const cases = { ...openai(base), ...anthropic(base), ...ai(base) };
await Promise.all(
  Object.entries(cases).map(async ([name, run]) => {
    const ended = await run().then(
      (result) => ({ result }),
      (error) => ({ error: String(error?.stack ?? error) }),
    );
    console.log(JSON.stringify({ name, ...ended }));
  }),
);
