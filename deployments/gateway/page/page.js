// Polls /tailrace/live and shows what it says. Text reaches the page as text nodes and attributes
// only: no name from outside can become markup. What did not change is not touched, so that focus,
// open details and screen readers are left alone.

const LIVE_EVERY_MS = 2000;
const SLOW_EVERY_MS = 6000;
const PATIENCE_MS = 8000;
const SLOWEST = 12;
const HISTORY = 60;
const MOST_SEGMENTS = 60;
const PHASE_NAMES = new Set([
  "tokenize", "queue", "route", "prefill_queue", "prefill", "kv_transfer", "transfer",
  "decode_queue", "decode", "stream", "client", "tool", "retrieval", "other", "recovery",
]);

const byId = (id) => document.getElementById(id);

// ---- Numbers for people

function seconds(value) {
  if (value == null) return "–";
  if (value < 0.001) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

function number(value, digits) {
  if (value == null) return "–";
  const places = digits ?? (Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0);
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function percent(ratio) {
  if (ratio == null) return "–";
  const value = ratio * 100;
  // 99.97 % must not read as 100 %, nor 0.03 % as 0 %.
  if (value > 99 && value < 100) return `${(Math.floor(value * 100) / 100).toFixed(2)} %`;
  return `${value > 0 && value < 1 ? value.toFixed(2) : Math.round(value)} %`;
}

function bytes(value) {
  if (value == null) return "–";
  const gib = value / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

function ago(unix) {
  const passed = Math.max(0, Date.now() / 1000 - unix);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return `${Math.floor(passed / 3600)} h ago`;
}

// ---- Nodes

function node(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const phaseClass = (name) => (PHASE_NAMES.has(name) ? name : "client");

// Calls `fill` only when `value` is another one than last time.
const filled = new WeakMap();
function show(target, value, fill) {
  const text = JSON.stringify(value);
  if (filled.get(target) === text) return;
  filled.set(target, text);
  fill(target, value);
}

// One child of `parent` for each item, in their order, kept from one time to the next by its key.
function keyed(parent, items, key, create, update) {
  const kept = new Map();
  for (const child of parent.children) kept.set(child.dataset.key, child);
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = kept.get(name);
    kept.delete(name);
    if (child == null) {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  for (const child of kept.values()) child.remove();
}

function bar(ratio) {
  const inside = node("span");
  inside.style.width = `${Math.max(0, Math.min(1, ratio)) * 100}%`;
  return node("span", { class: ratio >= 0.95 ? "bar full" : "bar", "aria-hidden": "true" }, inside);
}

// A cell's value: text, or {text, bad, why, bar} or a list of these.
function fillCell(target, value) {
  const parts = (Array.isArray(value) ? value : [value]).map((part) =>
    typeof part === "object" ? part : { text: part },
  );
  const made = [];
  for (const part of parts) {
    if (made.length > 0) made.push(" / ");
    if (part.bar != null) made.push(bar(part.bar));
    if (part.bad) {
      const why = node("span", { class: "out-of-sight" }, ` (${part.why})`);
      made.push(node("span", { class: "bad" }, part.text, why));
    } else made.push(part.text);
  }
  // One element around it all: on a narrow screen a cell is a row of its name and this.
  target.replaceChildren(node("span", {}, ...made));
}

// Columns: {title, value(row), number}. The first one names the row.
function table(parent, caption, columns, rows, key, empty) {
  if (rows.length === 0) {
    show(parent, empty, () => parent.replaceChildren(node("p", { class: "empty" }, empty)));
    return;
  }
  filled.delete(parent);
  let made = parent.querySelector(":scope > table");
  if (made == null) {
    // Roles by name, as the narrow layout's display: block takes them away.
    const heads = columns.map((column) =>
      node("th", { scope: "col", role: "columnheader", ...(column.number && { class: "number" }) }, column.title),
    );
    made = node("table", { role: "table" },
      node("caption", { class: "out-of-sight" }, caption),
      node("thead", { role: "rowgroup" }, node("tr", { role: "row" }, ...heads)),
      node("tbody", { role: "rowgroup" }));
    parent.replaceChildren(made);
  }
  keyed(made.tBodies[0], rows, key,
    () => node("tr", { role: "row" }, ...columns.map((column, i) =>
      i === 0
        ? node("th", { scope: "row", role: "rowheader" })
        : node("td", { role: "cell", "data-label": column.title, ...(column.number && { class: "number" }) }))),
    (row, item) => columns.forEach((column, i) => show(row.children[i], column.value(item), fillCell)));
}

// ---- Sections

function spread(found, target, quantiles = ["p50", "p95", "p99"]) {
  if (found == null) return "–";
  return quantiles.map((q) => {
    const text = (found.beyond.includes(q) ? "over " : "") + seconds(found[q]);
    return target != null && found[q] > target
      ? { text, bad: true, why: `above the target of ${seconds(target)}` }
      : { text };
  });
}

// Not for the gaps between tokens: their target is for the mean gap of a request.
const targetOf = (tier, kind) => tier.targets[kind];

function met(tier) {
  const kinds = Object.entries(tier.attainment).filter(([, a]) => a.ratio != null);
  if (kinds.length === 0) return "–";
  const [kind, worst] = kinds.reduce((a, b) => (b[1].ratio < a[1].ratio ? b : a));
  const bad = tier.objective != null && worst.ratio < tier.objective;
  const text = `${percent(worst.ratio)} ${kind}`;
  return bad ? { text, bad, why: `below the objective of ${percent(tier.objective)}` } : text;
}

const tierName = (tier) => `${tier.model} · ${tier.tier}`;

const TIER_COLUMNS = [
  { title: "Model and tier", value: tierName },
  { title: "Requests/s", number: true, value: (t) => number(t.requests_per_s) },
  { title: "First token", number: true, value: (t) => spread(t.ttft, targetOf(t, "ttft")) },
  { title: "Between tokens", number: true, value: (t) => spread(t.itl) },
  { title: "Whole answer", number: true, value: (t) => spread(t.e2e, targetOf(t, "e2e")) },
  { title: "Targets met, worst kind", number: true, value: met },
  { title: "All targets met", number: true, value: (t) => percent(t.good_ratio) },
];

const QUEUE_COLUMNS = [
  { title: "Model", value: (q) => q.model },
  { title: "Waiting", number: true, value: (q) => number(q.waiting) },
  { title: "Tokens waiting", number: true, value: (q) => number(q.tokens) },
  { title: "Oldest", number: true, value: (q) => (q.waiting ? seconds(q.oldest_age_s) : "–") },
  { title: "Wait p50 / p95 / p99", number: true, value: (q) => spread(q.wait) },
  { title: "Slots free", number: true, value: (q) => q.slots == null ? "–" : `${number(q.free_slots)} of ${number(q.slots)}` },
  { title: "Granted/s", number: true, value: (q) => number(q.granted_per_s) },
  { title: "Refused/s", number: true, value: (q) => number(q.refused_per_s) },
];

const REPLICA_COLUMNS = [
  { title: "Replica", value: (r) => r.id },
  { title: "Running", number: true, value: (r) => number(r.running) },
  { title: "Waiting", number: true, value: (r) => number(r.waiting) },
  { title: "KV in use", number: true, value: (r) => (r.kv_usage == null ? "–" : { text: percent(r.kv_usage), bar: r.kv_usage }) },
  { title: "Tokens/s", number: true, value: (r) => number(r.tokens_per_s, 0) },
  { title: "Step p50 / p99", number: true, value: (r) => spread(r.step, null, ["p50", "p99"]) },
  { title: "Memory", number: true, value: (r) => bytes(r.memory_bytes) },
];

function heldBack(gpu) {
  if (!gpu.up) return "–";
  if (gpu.throttled.length === 0) return "nothing";
  const text = gpu.throttled.join(", ").replaceAll("_", " ");
  // A busy device runs into its power cap: that is what the cap is for.
  const usual = gpu.throttled.every((reason) => reason === "power_cap");
  return usual ? text : { text, bad: true, why: "clocks are lowered" };
}

const GPU_COLUMNS = [
  { title: "GPU", value: (g) => `${g.gpu} ${g.product ?? ""}`.trim() },
  { title: "Of", value: (g) => g.replica },
  { title: "Busy", number: true, value: (g) => (g.up ? (g.busy == null ? "–" : { text: percent(g.busy), bar: g.busy }) : { text: "lost", bad: true, why: "it fell off the bus or needs a reset" }) },
  { title: "Memory", number: true, value: (g) => g.memory_used_bytes == null ? "–" : `${bytes(g.memory_used_bytes)} of ${bytes(g.memory_total_bytes)}` },
  { title: "Power", number: true, value: (g) => (g.power_w == null ? "–" : `${number(g.power_w, 0)} of ${number(g.power_limit_w, 0)} W`) },
  { title: "Temperature", number: true, value: (g) => (g.temperature_c == null ? "–" : `${number(g.temperature_c, 0)} °C`) },
  { title: "Held back by", value: heldBack },
];

const history = new Map();

function sparkline(points) {
  const top = Math.max(...points.filter((p) => p != null), 0) || 1;
  return points
    .map((p, i) => (p == null ? null : `${(i / (HISTORY - 1)) * 100},${24 - (p / top) * 22}`))
    .filter((p) => p != null)
    .join(" ");
}

function tiles(live) {
  const waiting = live.queues.reduce((sum, q) => sum + (q.waiting ?? 0), 0);
  const ratios = live.tiers.flatMap((t) => Object.values(t.attainment)).map((a) => a.ratio).filter((r) => r != null);
  const worst = ratios.length === 0 ? null : Math.min(...ratios);
  const shown = [
    ["Requests/s", live.totals.requests_per_s, number],
    ["Output tokens/s", live.totals.output_tokens_per_s, (v) => number(v, 0)],
    ["In flight", live.totals.inflight, number],
    ["Waiting", waiting, number],
    ["First token p99", live.totals.ttft?.p99, seconds],
    ["Failed/s", live.totals.failed_per_s, number],
    ["Targets met, worst", worst, percent],
  ];
  keyed(byId("tiles"), shown, ([name]) => name,
    ([name]) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", "0 0 100 26");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
      return node("div", {}, node("dt", {}, name), node("dd"), svg);
    },
    (tile, [name, value, text]) => {
      const points = history.get(name) ?? new Array(HISTORY).fill(null);
      points.push(value ?? null);
      points.shift();
      history.set(name, points);
      show(tile.querySelector("dd"), text(value), fillCell);
      tile.querySelector("polyline").setAttribute("points", sparkline(points));
    });
}

function whereTimeWent(live) {
  const rows = live.tiers.filter((tier) => Object.keys(tier.phases).length > 0);
  const target = byId("time");
  if (rows.length === 0) {
    show(target, null, () => target.replaceChildren(node("p", { class: "empty" }, "No request has ended in this minute.")));
    return;
  }
  if (filled.has(target)) target.replaceChildren();
  filled.delete(target);
  keyed(target, rows, tierName,
    (tier) => node("div", { class: "card" },
      node("h3", {}, tierName(tier)), node("div", { class: "stack", "aria-hidden": "true" }), node("ul", { class: "legend" })),
    (card, tier) => {
      const shares = Object.entries(tier.phases).filter(([, share]) => share > 0);
      keyed(card.children[1], shares, ([phase]) => phase,
        ([phase]) => node("span", { class: phaseClass(phase) }),
        (part, [, share]) => { part.style.width = `${share * 100}%`; });
      keyed(card.children[2], shares, ([phase]) => phase,
        ([phase]) => node("li", { class: phaseClass(phase) }),
        (item, [phase, share]) => show(item, `${phase.replaceAll("_", " ")} ${percent(share)}`, (t, text) => { t.textContent = text; }));
    });
}

function poolTitle(pool) {
  const up = pool.up ?? pool.replicas.length;
  const stale = pool.stale ? `, ${number(pool.stale)} silent` : "";
  return `${pool.model} · ${pool.role}: ${number(up)} up${stale}`;
}

function pools(live) {
  const target = byId("pools");
  if (live.pools.length === 0) {
    show(target, null, () => target.replaceChildren(node("p", { class: "empty" }, "No replica has reported yet.")));
    return;
  }
  if (filled.has(target)) target.replaceChildren();
  filled.delete(target);
  keyed(target, live.pools, (pool) => `${pool.model}\n${pool.role}`,
    () => node("div", { class: "card" }, node("h3"), node("div"), node("div")),
    (card, pool) => {
      const [title, replicas, gpus] = card.children;
      show(title, poolTitle(pool), (t, text) => { t.textContent = text; });
      table(replicas, `Replicas of ${pool.model}, ${pool.role}`, REPLICA_COLUMNS, pool.replicas, (r) => r.id, "None of them reports.");
      const devices = pool.replicas.flatMap((r) => r.gpus.map((g) => ({ ...g, replica: r.id })));
      gpus.hidden = devices.length === 0;
      if (devices.length > 0) {
        table(gpus, `GPUs of ${pool.model}, ${pool.role}`, GPU_COLUMNS, devices, (g) => `${g.replica}\n${g.gpu}\n${g.uuid}`, "");
      }
    });
}

function problems(live) {
  const found = [];
  for (const queue of live.queues) {
    if (queue.connected === 0) found.push(`The queue of ${queue.model} cannot be reached.`);
  }
  for (const pool of live.pools) {
    if (pool.up === 0) found.push(`No ${pool.role} replica of ${pool.model} is up.`);
    else if (pool.stale > 0) found.push(`Silent ${pool.role} replicas of ${pool.model}: ${number(pool.stale)}.`);
    for (const replica of pool.replicas) {
      for (const gpu of replica.gpus) {
        if (!gpu.up) found.push(`GPU ${gpu.gpu} of ${replica.id} is lost.`);
      }
    }
  }
  for (const tier of live.tiers) {
    for (const [kind, a] of Object.entries(tier.attainment)) {
      if (a.ratio != null && tier.objective != null && a.ratio < tier.objective) {
        found.push(`${tierName(tier)} misses its ${kind} target.`);
      }
    }
  }
  if (live.models.length === 0) found.push("No model is served yet.");
  return found;
}

function health(lines, good) {
  show(byId("health"), [lines, good], (target) => {
    const items = lines.map((line) => node("li", { class: good ? "good" : "bad" }, line));
    target.replaceChildren(node("ul", {}, ...items));
  });
}

let lastGateway = null;
let severalUntil = 0;

function about(live) {
  const parts = [`last ${Math.round(live.window_s)} s`];
  if (live.version != null) parts.unshift(`version ${live.version}`);
  if (live.revision != null) parts.unshift(`configuration revision ${number(live.revision)}`);
  if (live.gateway != null) {
    if (lastGateway != null && lastGateway !== live.gateway) severalUntil = Date.now() + 30000;
    lastGateway = live.gateway;
    parts.unshift(`gateway ${live.gateway}`);
  }
  if (Date.now() < severalUntil) parts.push("several gateways answer in turn, each with its own requests");
  show(byId("about"), parts.join(" · "), (target, text) => { target.textContent = text; });
}

function render(live) {
  about(live);
  tiles(live);
  table(byId("tiers"), "Latency by model and tier, p50, p95 and p99", TIER_COLUMNS, live.tiers, tierName, "No request yet.");
  whereTimeWent(live);
  table(byId("queues"), "Admission queues", QUEUE_COLUMNS, live.queues, (q) => q.model, "No queue has reported yet.");
  pools(live);
  const found = problems(live);
  health(found.length > 0 ? found : ["All replicas answer."], found.length === 0);
}

// ---- Slowest requests

const told = new Map();

function slowest(list) {
  const rows = list.data;
  const target = byId("slow");
  const names = new Set(rows.map((row) => row.request_id));
  for (const id of told.keys()) if (!names.has(id)) told.delete(id);
  if (rows.length === 0) {
    show(target, null, () => target.replaceChildren(node("p", { class: "empty" }, "No request has ended yet.")));
    return;
  }
  if (filled.has(target)) target.replaceChildren();
  filled.delete(target);
  keyed(target, unique(rows), (row) => row.request_id,
    (row) => {
      const made = node("details", {},
        node("summary", {}, node("span", { class: "took" }), node("span", { class: "what" })),
        node("div", { class: "story" }));
      made.addEventListener("toggle", () => { if (made.open) explain(row.request_id, made.lastElementChild); });
      return made;
    },
    (made, row) => {
      const [took, rest] = made.firstElementChild.children;
      show(took, seconds(row.duration_s), (t, text) => { t.textContent = text; });
      const parts = [
        `${row.model ?? "no model"} · ${row.tier}`,
        row.outcome + (row.status && row.status !== 200 ? ` ${row.status}` : ""),
        row.dominant_phase == null ? null : `mostly ${row.dominant_phase}`,
        row.ttft_s == null ? null : `first token ${seconds(row.ttft_s)}`,
        `${number(row.prompt_tokens)} + ${number(row.completion_tokens)} tokens`,
        ago(row.received_at),
      ].filter((part) => part != null);
      show(rest, ` ${parts.join(" · ")}`, (t, text) => { t.textContent = text; });
    });
}

function unique(rows) {
  const seen = new Set();
  return rows.filter((row) => !seen.has(row.request_id) && seen.add(row.request_id));
}

async function explain(id, target) {
  if (!told.has(id)) {
    target.replaceChildren(node("p", { class: "hint" }, "Asking the replicas …"));
    try {
      told.set(id, await ask(`tailrace/explain/${encodeURIComponent(id)}`));
    } catch (error) {
      target.replaceChildren(node("p", { class: "bad" }, `No explanation: ${error.message}`));
      return;
    }
  }
  story(target, told.get(id));
}

function story(target, told) {
  const facts = [`Request ${told.request_id}`];
  if (told.usage != null) facts.push(`${number(told.usage.cached_tokens)} of ${number(told.usage.prompt_tokens)} prompt tokens cached`);
  if (told.idle?.slowdown != null) {
    facts.push(`on an idle cluster ${seconds(told.idle.total_s)}, so ${number(told.idle.slowdown, 1)} times as long`);
  }
  if (told.most_delayed_phase != null) facts.push(`most delayed in ${told.most_delayed_phase} (${seconds(told.most_delayed_s)})`);
  let segments = told.segments ?? [];
  const left = segments.length - MOST_SEGMENTS;
  if (left > 0) {
    const least = [...segments].sort((a, b) => b.duration_s - a.duration_s)[MOST_SEGMENTS - 1].duration_s;
    segments = segments.filter((s) => s.duration_s >= least);
  }
  const start = Math.min(0, ...segments.map((s) => s.start_s));
  const length = Math.max(told.duration_s - start, 1e-9);
  const lanes = segments.map((segment) => {
    const inside = node("span");
    inside.style.left = `${((segment.start_s - start) / length) * 100}%`;
    inside.style.width = `${(segment.duration_s / length) * 100}%`;
    return node("li", { class: phaseClass(segment.phase) },
      node("span", {}, `${segment.name.replaceAll("_", " ")} `, node("span", { class: "where" }, segment.where)),
      node("span", { class: "lane", "aria-hidden": "true" }, inside),
      node("span", { class: "long" }, seconds(segment.duration_s)));
  });
  target.replaceChildren(
    node("p", { class: "hint" }, facts.join(" · ")),
    node("ol", { class: "waterfall", "aria-label": "Where the time went, in order" }, ...lanes));
  if (left > 0) target.append(node("p", { class: "hint" }, `The ${left} shortest are left out.`));
}

// ---- Asking

class Refused extends Error {}

const KEY = "tailrace.key";

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(new URL(path, document.baseURI), {
    headers: key == null ? {} : { authorization: `Bearer ${key}` },
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (answer.status === 401 || answer.status === 403) throw new Refused(await why(answer));
  if (!answer.ok) throw new Error(await why(answer));
  return answer.json();
}

async function why(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `status ${answer.status}`;
  }
}

let paused = false;
let slowAt = 0;
let lastAnswer = null;
let timer = null;
let asking = false;

async function look() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    render(await ask("tailrace/live"));
    lastAnswer = new Date();
    byId("ask").hidden = true;
    byId("main").classList.remove("old");
    if (Date.now() - slowAt >= SLOW_EVERY_MS) {
      slowAt = Date.now();
      await lookAtSlowest();
    }
  } catch (error) {
    failed(error);
  } finally {
    asking = false;
  }
  if (!paused && !document.hidden && byId("ask").hidden) timer = setTimeout(look, LIVE_EVERY_MS);
}

async function lookAtSlowest() {
  let hint = "Open one to see where its time went.";
  try {
    slowest(await ask(`tailrace/requests?limit=${SLOWEST}`));
  } catch (error) {
    hint = `They cannot be listed: ${error.message}`;
  }
  show(byId("slow-hint"), hint, (target, text) => { target.textContent = text; });
}

function failed(error) {
  byId("main").classList.add("old");
  if (error instanceof Refused) {
    const form = byId("ask");
    const tried = sessionStorage.getItem(KEY) != null;
    sessionStorage.removeItem(KEY);
    health(["A key is needed."], false);
    byId("refused").textContent = tried ? error.message : "";
    if (form.hidden) {
      form.hidden = false;
      byId("key").focus();
    }
    return;
  }
  const since = lastAnswer == null ? "" : ` since ${lastAnswer.toLocaleTimeString("en-GB")}`;
  health([`The gateway has not answered${since}; trying again.`], false);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  look();
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) clearTimeout(timer);
  else look();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) look();
});

look();
