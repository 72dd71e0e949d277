// The chat page in Chromium. test_chat_page.py starts the servers, with the model CHAIN, and gives their addresses: one
// open, one with the key "right", one that takes 20 ms for a token. CHAIN's template renders the last message alone, so a message sent twice is cached.
import assert from "node:assert/strict";
import {readFileSync} from "node:fs";
import {after, before, test} from "node:test";
import {chromium} from "playwright-core";

const {SERVER, LOCKED_SERVER, SLOW_SERVER, CHROMIUM} = process.env;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const MESSAGE = LETTERS.repeat(3).slice(0, 64);
const NEXT = LETTERS.repeat(6).slice(64, 104);
const axe = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");

let browser;
before(async () => { browser = await chromium.launch({executablePath: CHROMIUM, args: ["--no-sandbox"]}); });
after(async () => { await browser?.close(); });

// A page, and what it must not have done: errors in the console, requests to others.
async function open(url, options = {}) {
  const page = await browser.newPage(options);
  page.setDefaultTimeout(30_000);
  page.faults = [];
  page.on("console", (message) => { if (message.type() === "error") page.faults.push(message.text()); });
  page.on("pageerror", (error) => page.faults.push(error.message));
  page.on("request", (request) => { if (!request.url().startsWith(`${url}/`) && !request.url().startsWith("data:")) page.faults.push(request.url()); });
  const response = await page.goto(`${url}/`);
  assert.match(response.headers()["content-security-policy"], /default-src 'none'; script-src 'sha256-[^' ]+'; style-src 'sha256-/);
  return page;
}
const settle = async (page, {tokens = 40, temperature = 0} = {}) => {
  if (!await page.locator("#settings").evaluate((details) => details.open)) await page.click("summary");
  await page.fill("#temperature", String(temperature));
  await page.fill("#max-tokens", String(tokens));
};
const say = async (page, text) => {
  await page.focus("#message");
  await page.keyboard.insertText(text);
  await page.keyboard.press("Enter");
};
const answers = (page) => page.locator("article.assistant");
const answered = (page, i) => answers(page).nth(i).and(page.locator("[aria-busy=false]")).waitFor();
const factsOf = async (page, i, name) => (await answers(page).nth(i).locator(`.${name}`).textContent());

test("an answer streams, the same message again is cached, and the strip shows it", async () => {
  const page = await open(SERVER);
  await page.locator("#model", {hasText: "chain"}).waitFor();
  const strip = page.locator(".strip").first();
  const idle = await strip.getAttribute("aria-label");
  assert.match(idle, /held.*cached.*free/);
  await settle(page);
  for (const [i, cached] of [[0, 0], [1, 63]]) {
    await say(page, MESSAGE);
    await answered(page, i);
    assert.equal(await answers(page).nth(i).locator(".text").textContent(), NEXT);
    assert.equal(await factsOf(page, i, "cache"), `${cached} of 64 prompt tokens from the cache.`);
    assert.match(await factsOf(page, i, "speed"), /first token after [\d.]+ s · 40 tokens( · [\d.]+ tokens\/s)? · cut at the limit/);
    if (i === 0) assert.notEqual(await factsOf(page, i, "why"), "");
    await answers(page).nth(i).locator(".next").waitFor();
  }
  await page.waitForFunction((old) => document.querySelector(".strip").getAttribute("aria-label") !== old, idle);
  await page.waitForFunction(() => !document.querySelector(".legend .cached").textContent.startsWith("0 "));
  assert.deepEqual(page.faults, []);
  await page.close();
});

test("an answer is stopped, made again, and a new chat begins empty", async () => {
  const page = await open(SLOW_SERVER);
  await settle(page, {tokens: 8000});
  await say(page, "ABC");
  await page.waitForFunction(() => document.querySelector("article.assistant .text")?.textContent.length > 10);
  await page.click("#stop");
  await answered(page, 0);
  assert.match(await factsOf(page, 0, "speed"), /stopped by you/);
  assert.ok(LETTERS.repeat(320).slice(3).startsWith(await answers(page).locator(".text").textContent()));
  await settle(page, {tokens: 3});
  await page.click("#again");
  await page.waitForFunction(() => document.querySelector("article.assistant .text")?.textContent === "DEF");
  await answered(page, 0);
  assert.equal(await answers(page).count(), 1);
  await say(page, "012");
  await answered(page, 1);
  assert.equal(await answers(page).nth(1).locator(".text").textContent(), "345");
  await page.click("#new");
  assert.equal(await page.locator("article").count(), 0);
  assert.deepEqual(page.faults, []);
  await page.close();
});

test("what is written is text, never markup", async () => {
  const page = await open(SERVER);
  const text = `<img src=x onerror="document.title='run'"><b>x`;
  await settle(page);
  await say(page, text);
  await answered(page, 0);
  assert.equal(await page.locator("article.user .text").textContent(), text);
  assert.equal(await answers(page).locator(".text").textContent(), "yz.");
  assert.equal(await page.locator("article img, article b").count(), 0);
  assert.equal(await page.title(), "pagedkv");
  assert.deepEqual(page.faults, []);
  await page.close();
});

test("a refusal of the server is shown, and the next message works", async () => {
  const page = await open(SERVER);
  await settle(page);
  await say(page, "A".repeat(9000));
  await page.locator("#alert", {hasText: "9000"}).waitFor();
  await say(page, "x");
  await answered(page, 0);
  assert.equal(await answers(page).locator(".text").textContent(), "yz.");
  assert.ok(await page.locator("#alert").isHidden());
  await page.close();
});

test("a server with a key asks for it, says when it is wrong, and works with the right one", async () => {
  const page = await open(LOCKED_SERVER);
  await page.locator("#alert", {hasText: "wants an API key"}).waitFor();
  await page.fill("#key", "wrong");
  await page.keyboard.press("Enter");
  await page.locator("#alert", {hasText: "does not take this key"}).waitFor();
  await page.fill("#key", "right");
  await page.keyboard.press("Enter");
  await page.locator("#model", {hasText: "chain"}).waitFor();
  assert.ok(await page.locator("#key-form").isHidden());
  await settle(page);
  await say(page, "x");
  await answered(page, 0);
  assert.equal(await answers(page).locator(".text").textContent(), "yz.");
  assert.deepEqual(page.faults.filter((fault) => !/401/.test(fault)), []);
  await page.close();
});

for (const [width, colorScheme] of [[1280, "light"], [360, "dark"], [360, "light"]]) {
  test(`${width} px, ${colorScheme}: no barrier that axe-core finds, nothing beside the screen`, async () => {
    const page = await open(SERVER, {viewport: {width, height: 740}, colorScheme});
    await settle(page);
    await say(page, MESSAGE);
    await answered(page, 0);
    await answers(page).locator(".next").waitFor();
    await page.evaluate(axe);
    const {violations} = await page.evaluate(() => globalThis.axe.run());
    assert.deepEqual(violations.map(({id, impact, nodes}) => ({id, impact, at: nodes.map((node) => node.html)})), []);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth) <= width);
    assert.ok(await page.locator("#send").isVisible());
    await page.close();
  });
}
