// The page of a server: looks at /load and /v1/batches once a second, and sends a prompt. Nothing is loaded from elsewhere.
import { ask } from "./ask.js";
import { Chart } from "./chart.js";
import { bytes, seconds, short } from "./units.js";

const LOOK_EVERY_MS = 1000;
const KEY = "zinfer-api-key";
const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };

class Refused extends Error {}

const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
};

async function get(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  return answer.ok ? answer.json() : null;
}

const chart = new Chart(at("generated-line"), at("computed-line"));
let before = null;
let hasBatches = null; // until the server's routes are known

const sum = (items, value) => items.reduce((total, each) => total + value(each), 0);

function showLoad(load) {
  const replicas = load.replicas, engines = replicas.map((each) => each.engine).filter((each) => each);
  const now = {
    at: performance.now(),
    generated: sum(engines, (each) => each.num_new_tokens), computed: sum(engines, (each) => each.num_tokens),
    passes: sum(engines, (each) => sum(each.pass_seconds.counts, (count) => count)),
    passSeconds: sum(engines, (each) => each.pass_seconds.total), passTokens: sum(engines, (each) => each.pass_tokens.total),
  };
  if (before) {
    const elapsed = (now.at - before.at) / 1000;
    const rate = (name) => Math.max(now[name] - before[name], 0) / elapsed; // a replica that is started again counts from 0
    const passes = now.passes - before.passes;
    show("generated", short(rate("generated")));
    show("computed", short(rate("computed")));
    show("pass-seconds", passes > 0 ? seconds((now.passSeconds - before.passSeconds) / passes) : "–");
    show("pass-tokens", passes > 0 ? short((now.passTokens - before.passTokens) / passes) : "–");
    show("peak", short(chart.add(rate("generated"), rate("computed"))));
  }
  before = now;
  show("running", short(sum(replicas, (each) => each.running_sequences)));
  show("waiting", short(sum(replicas, (each) => each.waiting_sequences)));
  show("background", short(sum(replicas, (each) => each.background_sequences)));
  show("outstanding", short(sum(replicas, (each) => each.outstanding_tokens)));
  const ready = replicas.filter((each) => each.is_ready).length;
  at("state").className = ready === replicas.length ? "" : "bad";
  show("state", ready === replicas.length ? "ready" : `${ready} of ${replicas.length} replicas are ready`);
  fill("replicas", replicas.map((each) => [
    `${each.replica}`, each.is_ready ? "ready" : "loading", short(each.running_sequences), short(each.waiting_sequences),
    each.engine ? bar(each.engine.num_used_pages / each.engine.num_pages) : "–", `${each.restarts}`,
  ]));
  showTiers(engines);
}

function showTiers(engines) {
  const number = engines.length;
  const total = (name, key) => sum(engines, (each) => each[name][key] ?? 0);
  const share = (path) => number ? bar(sum(engines, (each) => each.shares[path] ?? 0) / number) : "–";
  const waited = (...causes) => seconds(causes.reduce((found, cause) => found + total("stall_s", cause), 0));
  fill("tiers", [
    ["device", `${total("blocks", "DEVICE")}`, bytes(total("memory_bytes", "device")), "", waited("compute")],
    ["host", `${total("blocks", "HOST")}`, bytes(total("memory_bytes", "host")), share("link"), waited("host", "link")],
    ["disk", `${total("blocks", "DISK")}`, "", share("disk"), waited("disk")],
    ["KV cache", "", bytes(total("memory_bytes", "kv_cache")), "", ""],
  ]);
  const streamed = sum(engines, (each) => each.streamed_bytes), free = sum(engines, (each) => each.free_tokens);
  show("streamed", streamed ? `${bytes(streamed)} stream in each pass; ${short(free)} tokens of a pass are free` : "Nothing streams.");
}

function showBatches(batches) {
  at("batches-section").hidden = false;
  fill("batches", batches.map((each) => {
    const { total, completed, failed } = each.request_counts;
    const rows = `${completed} of ${total}${failed ? `, ${failed} failed` : ""}`;
    return [each.id, each.status, bar(total ? (completed + failed) / total : 0), rows];
  }));
}

function bar(share) {
  const progress = document.createElement("progress");
  progress.max = 1;
  progress.value = Math.min(share, 1);
  const whole = document.createElement("span");
  whole.append(progress, `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`);
  return whole;
}

function fill(id, rows) {
  at(id).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((each) => {
      const cell = document.createElement("td");
      cell.append(each);
      return cell;
    }));
    return row;
  }));
}

async function look() {
  try {
    if (!at("model").dataset.name) {
      const models = await get("v1/models");
      at("model").dataset.name = models.data[0].id;
      show("model", models.data[0].id);
      document.title = `${models.data[0].id} – zinfer`;
    }
    showLoad(await get("load"));
    hasBatches ??= "/v1/batches" in (await get("openapi.json")).paths;
    if (hasBatches) showBatches((await get("v1/batches?limit=20")).data);
    at("entry").hidden = true;
    at("page").hidden = false;
  } catch (error) {
    if (error instanceof Refused) {
      askForKey();
      return;
    }
    at("state").className = "bad";
    show("state", "the server does not answer");
  }
  setTimeout(look, LOOK_EVERY_MS);
}

function askForKey() {
  const wasWrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  at("page").hidden = true;
  at("entry").hidden = false;
  at("state").className = wasWrong ? "bad" : "";
  show("state", wasWrong ? "the key is wrong" : "an API key is needed");
  at("key").focus();
}

at("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  look();
});

let sending = null;
let turns = []; // the messages of the chat so far, without the system message

function showTurns() {
  at("turns").replaceChildren(...turns.map((each) => {
    const turn = document.createElement("li");
    turn.className = each.role;
    turn.append(each.content);
    return turn;
  }));
}

at("anew").addEventListener("click", () => {
  turns = [];
  showTurns();
  show("answer", "");
  show("timing", "");
  at("prompt").focus();
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  if (!at("send").disabled) at("try").requestSubmit();
});

// The number of a field; undefined, which no request has, if it is empty.
function stated(id) {
  return at(id).value === "" ? undefined : at(id).valueAsNumber;
}

at("stop").addEventListener("click", () => sending?.abort());

at("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  sending = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("answer").className = "";
  showTurns();
  show("answer", "");
  show("timing", "");
  const kind = at("kind").value, asked = { role: "user", content: at("prompt").value };
  const system = at("system").value ? [{ role: "system", content: at("system").value }] : [];
  const began = performance.now();
  let first = null;
  const elapsed = (end) => seconds((end - began) / 1000);
  try {
    const options = { temperature: stated("temperature"), max_tokens: stated("most") };
    const messages = [...system, ...turns, asked];
    const call = { kind, messages, prompt: asked.content, options, headers: headers(), signal: sending.signal };
    const numTokens = await ask(call, (text) => {
      if (text && first === null) first = performance.now();
      at("answer").append(text);
    });
    const end = performance.now();
    show("timing", `${numTokens} tokens in ${elapsed(end)}${first === null ? "" : `, the first after ${elapsed(first)}`}`);
  } catch (error) {
    if (error.name === "AbortError") {
      show("timing", `stopped after ${elapsed(performance.now())}`);
    } else {
      at("answer").className = "bad";
      at("answer").append(error.message);
    }
  }
  if (kind === "chat" && first !== null) turns = [...turns, asked, { role: "assistant", content: at("answer").textContent }];
  at("prompt").select();
  at("send").disabled = false;
  at("stop").disabled = true;
});

look();
