// Which job and point, or which pool, is in the address (#namespace/name/point, #pool:namespace/name), so that a view can
// be passed on. Reads only.

import { drawFrontier, drawLegend, drawPipeline, element, nameOf } from "./charts.js";
import { showPool, showPools } from "./pools.js";
import { ready, rows, showConditions, tile } from "./tables.js";

const REFRESH_MS = 3000;
const POOL = "pool:";
const byId = (id) => document.getElementById(id);
const plans = new Map(); // of the frontier shown; the slider asks for the same ones again and again
let shown = null; // the job document on the page
let requests = 0; // only the answer to the latest request is shown

function address() {
  const [first, name, point] = decodeURIComponent(location.hash.slice(1)).split("/");
  const isPool = first.startsWith(POOL);
  const namespace = isPool ? first.slice(POOL.length) : first;
  return { namespace, name, isPool, point: point === undefined || point === "" ? null : Number(point) };
}

// Where the page needs a login, and no proxy in front of it adds the token.
async function get(path) {
  const token = sessionStorage.getItem("token");
  const answer = await fetch(path, token ? { headers: { Authorization: `Bearer ${token}` } } : {});
  const document = await answer.json();
  byId("login").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(document.error);
  return document;
}

function percent(ratio) {
  const text = (100 * ratio).toFixed(2);
  return `${text === "-0.00" ? "0.00" : text}%`;
}

const amount = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });

function showJobs(jobs) {
  byId("training").hidden = jobs.length === 0;
  rows(document.querySelector("#jobs tbody"), jobs.map((job) => [
    { text: `${job.namespace}/${job.name}`, href: `#${job.namespace}/${job.name}` },
    ready(job, job.reason),
    job.objective,
    { text: job.savings?.energy ?? "not measured", note: job.unmeasured },
    job.savings?.slowdown ?? "not measured",
    { text: String(job.stragglerCount), bad: job.stragglerCount > 0 },
  ]));
}

function showState(job) {
  const state = byId("state");
  state.replaceChildren();
  const tiles = element(state, "div", { class: "tiles" });
  tile(tiles, "ready", job.ready === "True" ? "yes" : job.reason || "unknown", job.ready === "False");
  tile(tiles, "objective", job.objective || "–");
  tile(tiles, "plan in force", job.plan ? `point ${job.plan.point}` : "none");
  tile(tiles, "planned slowdown", job.plan?.plannedSlowdown ?? "–");
  tile(tiles, "energy saved, measured", job.savings?.energy ?? "not measured");
  tile(tiles, "slowdown, measured", job.savings?.slowdown ?? "not measured");
  if (job.plan?.grain) tile(tiles, "a clock for each", job.plan.grain.toLowerCase());
  if (job.hardware) {
    const milliseconds = (us) => `${Number((us / 1e3).toPrecision(3))} ms`;
    const { switchLatencyMedianMicroseconds: median, switchLatencyP99Microseconds: worst } = job.hardware;
    tile(tiles, `clock changes take, ${job.hardware.figures.toLowerCase()}`, `${milliseconds(median)}, 99% ${milliseconds(worst)}`);
  }
  if (job.unmeasured) element(state, "p", { class: "note", id: "unmeasured" }, `Savings are not measured: ${job.unmeasured}`);
  if (job.plan?.reason) element(state, "p", { class: "note" }, job.plan.reason);
  const stragglers = byId("stragglers");
  stragglers.replaceChildren();
  element(stragglers, "h2", {}, "Stragglers");
  if (job.stragglers.length === 0) element(stragglers, "p", {}, "No pipeline is slower than the others.");
  for (const one of job.stragglers) {
    element(stragglers, "p", { class: "bad" }, `Pipeline ${one.dataParallelRank} is ${one.slowdown} slower`
      + ` (${one.source.toLowerCase()}); it runs point ${one.point}.`);
  }
  showConditions(job.conditions);
}

function figure(list, name, value, title = "") {
  const made = element(list, "div", title ? { title } : {});
  element(made, "dt", {}, name);
  element(made, "dd", {}, value);
}

function showPoint(job, point) {
  const { seconds, joules, gaps, rehearsed, highestClocks, gpus } = job.frontier;
  byId("point").max = seconds.length - 1;
  byId("point").value = point;
  byId("time").textContent = `${seconds[point].toPrecision(4)} s`;
  const list = byId("answer"), days = 86400 / seconds[point];
  list.replaceChildren();
  figure(list, "slower than T_min", percent(seconds[point] / seconds[0] - 1));
  figure(list, "energy saved", percent(1 - joules[point] / highestClocks.joules), "against every GPU at its highest clock, predicted");
  figure(list, "of one iteration", `${amount(joules[point], 5)} J`);
  figure(list, `mean power of ${gpus} GPUs`, `${Math.round(joules[point] / seconds[point]).toLocaleString("en")} W`);
  figure(list, "saved in a day of iterations", `${amount(((highestClocks.joules - joules[point]) * days) / 3.6e6, 3)} kWh`);
  const bound = "against the proven bound of clocks that change at once";
  const costs = rehearsed ? ", which this hardware cannot reach: what it costs is in this figure" : "";
  figure(list, "certified to the optimum within", percent(gaps[point]), bound + costs);
  const marks = [{ label: "highest clocks", colour: "var(--soft)", ...highestClocks }];
  for (const [key, label, colour] of [["baseline", "default clocks, measured", "var(--ink)"], ["measured", "measured now", "var(--bad)"]]) {
    const found = job[key];
    if (found?.energyMillijoules) {
      const at = { seconds: found.iterationTimeMicroseconds / 1e6, joules: found.energyMillijoules / 1e3 };
      marks.push({ label, colour, ...at });
    }
  }
  drawFrontier(byId("frontier"), seconds.map((s, k) => [s, joules[k]]), marks, point);
  table("points", job.frontier.digest, () => seconds.map((s, k) => [
    k, s.toPrecision(5), percent(s / seconds[0] - 1), joules[k].toPrecision(6), percent(1 - joules[k] / highestClocks.joules), percent(gaps[k]),
  ]));
}

// Filled when it is open, and again when its key changes: a plan has thousands of instructions.
function table(id, key, lines) {
  const body = document.querySelector(`#${id} tbody`), details = body.closest("details");
  details.ontoggle = () => {
    if (!details.open || body.dataset.key === key) return;
    rows(body, lines().map((cells) => cells.map(String)));
    body.dataset.key = key;
  };
  details.ontoggle();
}

async function showPlan(job, point) {
  const turn = ++requests, key = `${job.frontier.digest}/${point}`;
  try {
    if (!plans.has(key)) plans.set(key, await get(`api/jobs/${job.namespace}/${job.name}/plans/${point}`));
    if (turn !== requests) return;
    const plan = plans.get(key);
    const [low, high] = drawPipeline(byId("pipeline"), plan);
    drawLegend(byId("legend"), low, high);
    byId("pipeline").dataset.point = String(plan.point);
    table("instructions", key, () => plan.stages.flatMap((instructions, stage) => instructions.map(
      ([kind, microbatch, chunk, start, time, mhz, power]) => [
        stage, nameOf(kind, microbatch, chunk), start.toFixed(4), (1000 * time).toFixed(1), mhz || "–", power.toFixed(0),
      ],
    )));
  } catch (error) {
    if (turn === requests) {
      byId("pipeline").replaceChildren();
      byId("legend").textContent = error.message;
    }
  }
}

function inForce(job) {
  return Math.min(job.plan?.point ?? 0, job.frontier.seconds.length - 1);
}

function showJob(job) {
  if (job.frontier && shown?.frontier?.digest !== job.frontier.digest) plans.clear();
  shown = job;
  showState(job);
  byId("solved").hidden = !job.frontier;
  byId("waiting").hidden = Boolean(job.frontier);
  const clock = job.spec?.objective.clockMegahertz;
  byId("waiting").textContent = clock
    ? `All GPUs of the job shall run at ${clock} MHz, without a plan. The conditions below say whether they do.`
    : "There is no frontier yet. The conditions below give the reason.";
  if (!job.frontier) return;
  const wanted = address().point;
  const point = Number.isInteger(wanted) ? Math.min(Math.max(0, wanted), job.frontier.seconds.length - 1) : inForce(job);
  showPoint(job, point);
  showPlan(job, point);
}

async function showAll() {
  const { jobs } = await get("api/jobs");
  const { pools } = await get("api/pools");
  showJobs(jobs);
  showPools(pools);
  byId("none").hidden = jobs.length + pools.length > 0;
}

async function refresh() {
  const { namespace, name, isPool } = address();
  const one = `${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
  try {
    if (name && isPool) showPool(await get(`api/pools/${one}`));
    else if (name) showJob(await get(`api/jobs/${one}`));
    else await showAll();
    byId("error").hidden = true;
  } catch (error) {
    byId("error").textContent = `The page could not be updated: ${error.message}`;
    byId("error").hidden = false;
  }
  byId("where").textContent = name ? `${namespace}/${name}` : "";
  const login = !byId("login").hidden;
  byId("jobs").hidden = login || Boolean(name);
  byId("job").hidden = login || !name || isPool;
  byId("pool").hidden = login || !name || !isPool;
  byId("states").hidden = login || !name;
}

function choose(point) {
  const { namespace, name } = address();
  history.replaceState(null, "", `#${namespace}/${name}/${point}`);
  if (shown?.frontier) {
    showPoint(shown, point);
    showPlan(shown, point);
  }
}

byId("point").addEventListener("input", (event) => choose(Number(event.target.value)));
byId("current").addEventListener("click", () => shown?.frontier && choose(inForce(shown)));
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("token").value = "";
  refresh();
});
addEventListener("hashchange", refresh);
setInterval(() => document.hidden || refresh(), REFRESH_MS);
refresh();
