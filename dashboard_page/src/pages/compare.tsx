// Up to eight runs on the same charts, over steps, time or trained tokens, and the settings in which they differ.
import { align } from "../align";
import { type Compare, type Runs, type SeriesAnswer, apiPath, useResource } from "../api";
import { duration, number, plural } from "../format";
import { useTick } from "../live";
import { Empty, Loaded, Page, Panel, Segmented, State } from "../parts/basic";
import { Chart } from "../parts/chart";
import { href, setFilters, useRoute } from "../router";
import { toggled } from "../filters";
import { visible } from "../text";

type Axis = "step" | "time" | "tokens";
const LIMIT = 8;
const STANDARD = ["rollout/reward", "rollout/accuracy", "train/entropy", "rollout/response_len"];

export function ComparePage({ runs }: { runs: Runs }) {
  const { query } = useRoute();
  const readable = runs.runs.filter((run) => run.state !== "unreadable");
  const chosen = query.get("runs")?.split(",") ?? readable.slice(0, LIMIT).map((run) => run.key);
  const metrics = query.get("metrics")?.split(",") ?? STANDARD;
  const x = (query.get("x") as Axis | null) ?? "step";
  const catalogue = useResource<SeriesAnswer>(apiPath("series"));
  const answer = useResource<Compare>(chosen.length ? apiPath("compare", { runs: chosen.join(","), metrics: metrics.join(","), x }) : null, useTick(5000));
  return (
    <Page title="Compare" about={`Up to eight runs of ${runs.target}.`}>
      <div class="grid">
        <Panel span={8} title="Runs" flush>
          <div class="table-box" tabIndex={0}>
            <table>
              <tbody>
                {runs.runs.map((run) => (
                  <tr key={run.key}>
                    <td>
                      <label class="row">
                        <input type="checkbox" checked={chosen.includes(run.key)} disabled={run.state === "unreadable" || (chosen.length >= LIMIT && !chosen.includes(run.key))} onChange={() => setFilters({ runs: toggled(chosen.join(","), run.key) }, { replace: true })} />
                        <b>{visible(run.key)}</b> <span class="muted">{visible(run.name)}</span>
                      </label>
                    </td>
                    <td>
                      <State state={run.state} /> {run.problem ? <span class="small warn">{run.problem}</span> : null}
                    </td>
                    <td class="num">
                      step {number(run.last_step)}
                      {run.total_steps ? ` of ${run.total_steps}` : ""}
                    </td>
                    <td class="num">reward {number(run.reward)}</td>
                    <td>
                      <a href={href("overview", [], { run: run.key })}>Open</a>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Panel>
        <Panel span={4} title="Charts">
          <div class="stack">
            <Segmented label="Horizontal axis" value={x} options={[["step", "Steps"], ["time", "Time"], ["tokens", "Tokens"]]} onChange={(value) => setFilters({ x: value === "step" ? null : value }, { replace: true })} />
            <label class="field">
              Add a metric
              <select value="" onChange={(event) => setFilters({ metrics: toggled(metrics.join(","), (event.target as HTMLSelectElement).value) }, { replace: true })}>
                <option value="">choose…</option>
                {(catalogue.data?.metrics ?? [])
                  .filter((metric, at, all) => !metrics.includes(metric.name) && all.findIndex((one) => one.name === metric.name) === at)
                  .map((metric) => (
                    <option key={metric.name}>{metric.name}</option>
                  ))}
              </select>
            </label>
            <div class="row">
              {metrics.map((metric) => (
                <span class="chip" key={metric}>
                  <span>{metric}</span>
                  <button aria-label={`Remove ${metric}`} onClick={() => setFilters({ metrics: toggled(metrics.join(","), metric) ?? "none" }, { replace: true })}>
                    ×
                  </button>
                </span>
              ))}
            </div>
          </div>
        </Panel>
      </div>
      {chosen.length === 0 ? (
        <Panel>
          <Empty title="No run is chosen." />
        </Panel>
      ) : (
        <Loaded from={answer}>
          {(data) => (
            <>
              <div class="grid">
                {metrics.map((metric) => {
                  const series = data.series[metric] ?? {};
                  const shown = data.runs.filter((run) => series[run.key]);
                  const { x: at, columns } = align(shown.map((run) => series[run.key]));
                  return (
                    <Panel span={6} key={metric}>
                      <Chart title={metric} x={at} xLabel={x} xFormat={x === "time" ? duration : number} series={shown.map((run, i) => ({ label: run.key, values: columns[i]!, tone: data.runs.indexOf(run) }))} height={200} sync={`compare-${x}`} />
                    </Panel>
                  );
                })}
              </div>
              <Differences data={data} />
            </>
          )}
        </Loaded>
      )}
    </Page>
  );
}

function Differences({ data }: { data: Compare }) {
  const rows = Object.entries(data.config);
  if (data.runs.length < 2) return null;
  return (
    <Panel title="Settings that differ" more={plural(rows.length, "setting")} flush>
      {rows.length === 0 ? (
        <Empty title="These runs have the same settings." />
      ) : (
        <div class="table-box" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th>Setting</th>
                {data.runs.map((run) => (
                  <th key={run.key}>{visible(run.key)}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map(([path, values]) => (
                <tr key={path}>
                  <td class="mono">{path}</td>
                  {data.runs.map((run) => (
                    <td key={run.key} class="mono clip">
                      {run.key in values ? visible(JSON.stringify(values[run.key])) : "–"}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
