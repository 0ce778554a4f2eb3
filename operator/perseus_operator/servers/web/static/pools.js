// Pools that serve: the list, and one pool. The address of one is #pool:namespace/name.

import { element } from "./charts.js";
import { ready, rows, showConditions, tile } from "./tables.js";

const TIMES = { timeToFirstToken: "first token", timePerOutputToken: "per token" };
const megahertz = (clock) => (clock === undefined ? "not known" : `${clock.toLocaleString("en")} MHz`);

function saved(pool) {
  const { energy, low, high } = pool.savings ?? {};
  return { text: energy ? `${energy} (${low} to ${high})` : "not measured", note: pool.unmeasured };
}

// What was promised of a time and how much of it was kept, or what is proposed.
function kept(pool, field) {
  const limit = pool.limits[field];
  if (limit) {
    const missed = limit.kept !== undefined && parseFloat(limit.kept) < parseFloat(limit.attainment);
    return { text: `${limit.kept ?? "not counted"} (${limit.attainment} in ${limit.limit})`, bad: missed };
  }
  const proposed = pool.proposedLimits?.[field];
  return { text: proposed && Object.keys(pool.limits).length === 0 ? `proposed: ${proposed}` : "–" };
}

export function showPools(pools) {
  document.getElementById("pools").hidden = pools.length === 0;
  rows(document.querySelector("#pools tbody"), pools.map((pool) => [
    { text: `${pool.namespace}/${pool.name}`, href: `#pool:${pool.namespace}/${pool.name}` },
    ready(pool, pool.state),
    pool.mode,
    String(pool.replicas),
    megahertz(pool.clockMegahertz),
    ...Object.keys(TIMES).map((field) => kept(pool, field)),
    saved(pool),
  ]));
}

export function showPool(pool) {
  const line = pool.summary, state = document.getElementById("pool-state");
  state.replaceChildren();
  const tiles = element(state, "div", { class: "tiles" });
  const isReady = ready(line, line.state);
  tile(tiles, "ready", isReady.text, isReady.bad);
  tile(tiles, "mode", line.mode);
  tile(tiles, "replicas", String(line.replicas));
  tile(tiles, "mean clock", megahertz(line.clockMegahertz));
  for (const [field, words] of Object.entries(TIMES)) {
    const found = kept(line, field);
    tile(tiles, `${words}, kept (promised)`, found.text, found.bad);
  }
  tile(tiles, "saved of a token's energy, with 95% confidence", saved(line).text);
  if (line.unmeasured) element(state, "p", { class: "note" }, `Savings are not measured: ${line.unmeasured}`);
  rows(document.querySelector("#why tbody"), pool.why.map((row) => [row.what, row.says]));
  rows(document.querySelector("#replicas tbody"), pool.replicas.map((one) => [
    one.pod, megahertz(one.clockMegahertz), one.attainment ?? "–", one.limitedBy ?? "–", one.why ?? "–",
  ]));
  const hidden = line.replicas - pool.replicas.length;
  document.getElementById("more").textContent = hidden > 0 ? `${hidden} more keep the limits better.` : "";
  document.getElementById("next").textContent = pool.next.says;
  document.getElementById("command").textContent = pool.next.do ?? "";
  showConditions(pool.conditions);
}
