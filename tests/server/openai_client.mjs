// OpenAI's own JavaScript client drives every route of OpenAI's that the server has. CHAIN's text is known exactly.
// test_openai_client_js.py starts the servers and gives their addresses: one open, one with the key "right", one that
// runs one request and lets one wait.
import assert from "node:assert/strict";
import {test} from "node:test";
import OpenAI from "openai";

const {SERVER, LOCKED_SERVER, NARROW_SERVER} = process.env;
const clientOf = (url, options = {}) => new OpenAI({baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, ...options});
const client = clientOf(SERVER);
const model = (await client.models.list()).data[0].id;
const say = (content) => [{role: "user", content}];
const fails = async (kind, call) => {
  let error;
  await assert.rejects(call, (e) => { error = e; return e instanceof kind; });
  return error;
};
const metric = async (url, name) => {
  const line = (await (await fetch(`${url}/metrics`)).text()).split("\n").find((l) => l.startsWith(name));
  return Number(line.split(" ").pop());
};
const idle = async (url) => {
  for (let i = 0; i < 6000; i++) {
    if (await metric(url, "pagedkv_requests_running") + await metric(url, "pagedkv_requests_waiting") === 0) return;
    await new Promise((done) => setTimeout(done, 10));
  }
  assert.fail("requests go on");
};

test("models are listed and retrieved", async () => {
  assert.equal((await client.models.retrieve(model)).id, model);
  assert.equal((await fails(OpenAI.NotFoundError, client.models.retrieve("other"))).code, "model_not_found");
});

test("chat answers, and streams the same", async () => {
  const request = {model, messages: say("ABC"), max_tokens: 7, temperature: 0};
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.object, "chat.completion");
  assert.deepEqual(answer.choices[0].message, {role: "assistant", content: "DEFGHIJ", refusal: null});
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.total_tokens, 10);
  let text = "", usage;
  for await (const chunk of await client.chat.completions.create({...request, stream: true, stream_options: {include_usage: true}})) {
    assert.equal(chunk.object, "chat.completion.chunk");
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage;
  }
  assert.equal(text, "DEFGHIJ");
  assert.equal(usage.total_tokens, 10);
  assert.equal(typeof usage.prompt_tokens_details.cached_tokens, "number");
});

test("the client's stream helper accumulates", async () => {
  const stream = client.chat.completions.stream({model, messages: say("x"), temperature: 0});
  assert.equal(await stream.finalContent(), "yz.");
  assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
});

test("characters of several tokens arrive whole", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({model, messages: say("🦙"), max_tokens: 8, temperature: 0, stream: true})) {
    text += chunk.choices[0].delta.content ?? "";
  }
  assert.equal(text, "🦙🦙");
});

test("n, seed, stop, logprobs and nulls", async () => {
  const request = {model, messages: say("p"), n: 2, seed: 7, temperature: 1, max_tokens: 16, stop: null, logit_bias: null};
  const texts = async () => (await client.chat.completions.create(request)).choices.map((choice) => choice.message.content);
  const first = await texts();
  assert.notEqual(first[0], first[1]);
  assert.deepEqual(await texts(), first);
  const stopped = await client.chat.completions.create({model, messages: say("ABC"), stop: ["GHI"], temperature: 0, logprobs: true, top_logprobs: 1});
  assert.equal(stopped.choices[0].message.content, "DEF");
  assert.equal(stopped.choices[0].finish_reason, "stop");
  assert.equal(stopped.choices[0].logprobs.content[0].token, "D");
  assert.equal(stopped.choices[0].logprobs.content[0].top_logprobs[0].token, "D");
});

test("completions: several prompts, tokens, echo with log-probabilities, stream", async () => {
  const several = await client.completions.create({model, prompt: ["AB", "12"], max_tokens: 3, temperature: 0});
  assert.deepEqual(several.choices.map((choice) => choice.text), ["CDE", "345"]);
  const tokens = await client.completions.create({model, prompt: [65, 66], max_tokens: 3, temperature: 0});
  assert.equal(tokens.choices[0].text, "CDE");
  const scored = await client.completions.create({model, prompt: "ABC", echo: true, logprobs: 1, max_tokens: 0});
  assert.equal(scored.choices[0].text, "ABC");
  assert.equal(scored.choices[0].logprobs.token_logprobs[0], null);
  assert.ok(scored.choices[0].logprobs.token_logprobs[1] > -0.001);
  let text = "";
  for await (const chunk of await client.completions.create({model, prompt: "ABC", max_tokens: 7, temperature: 0, stream: true})) text += chunk.choices[0].text;
  assert.equal(text, "DEFGHIJ");
});

test("errors are of the right class", async () => {
  await fails(OpenAI.NotFoundError, client.chat.completions.create({model: "other", messages: say("A")}));
  await fails(OpenAI.NotFoundError, client.embeddings.create({model, input: "A"}));
  await fails(OpenAI.NotFoundError, client.responses.create({model, input: "A"}));
  assert.equal((await fails(OpenAI.BadRequestError, client.chat.completions.create({model, messages: say("A"), temperature: 3}))).param, "temperature");
  const long = await fails(OpenAI.BadRequestError, client.chat.completions.create({model, messages: say("A".repeat(9000))}));
  assert.equal(long.code, "context_length_exceeded");
  assert.ok(long.requestID);
  await fails(OpenAI.AuthenticationError, clientOf(LOCKED_SERVER, {apiKey: "wrong"}).models.list());
  assert.equal((await clientOf(LOCKED_SERVER, {apiKey: "right"}).models.list()).data[0].id, model);
});

test("a full queue is a rate limit, and retries get through once there is room", async () => {
  const request = {model, messages: say("ABC"), temperature: 0};
  const held = [];
  for (let i = 0; i < 2; i++) held.push(await clientOf(NARROW_SERVER).chat.completions.create({...request, max_tokens: 8000, stream: true}));
  const error = await fails(OpenAI.RateLimitError, clientOf(NARROW_SERVER).chat.completions.create({...request, max_tokens: 1}));
  assert.equal(error.code, "queue_full");
  for (const stream of held) stream.controller.abort();
  const answer = await clientOf(NARROW_SERVER, {maxRetries: 20}).chat.completions.create({...request, max_tokens: 3});
  assert.equal(answer.choices[0].message.content, "DEF");
});

test("time-outs, aborts and broken-off streams end the request", async () => {
  const request = {model, messages: say("ABC"), max_tokens: 8000, temperature: 0};
  await fails(OpenAI.APIConnectionTimeoutError, client.chat.completions.create(request, {timeout: 200}));
  await idle(SERVER);
  for await (const chunk of await client.chat.completions.create({...request, stream: true})) {
    if (chunk.choices[0].delta.content) break;
  }
  await idle(SERVER);
});
