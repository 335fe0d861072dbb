// Every metric of the run as a chart, grouped by its prefix. Charts share their cursor.
import { useMemo } from "preact/hooks";
import { type Metric, type Points, type SeriesAnswer, apiPath, useResource } from "../api";
import { duration, number, plural } from "../format";
import { useTick } from "../live";
import { Empty, Loaded, Page, Panel, Segmented } from "../parts/basic";
import { Chart } from "../parts/chart";
import { setFilters, useRoute } from "../router";
import { useIsVisible } from "../visible";

type Axis = "step" | "time" | "tokens";
const MAIN = ["rollout/reward", "rollout/accuracy", "train/loss", "train/grad_norm", "train/entropy", "train/ppo_kl", "rollout/response_len", "rollout/truncated_ratio", "async/version_offset_max", "perf/tokens_per_s", "perf/sample_wait_time", "perf/train_time"];

export function MetricsPage() {
  const { query } = useRoute();
  const x = (query.get("x") as Axis | null) ?? "step";
  const like = query.get("like") ?? "";
  const catalogue = useResource<SeriesAnswer>(apiPath("series"));
  // A metric that two processes report is one chart.
  const found = (catalogue.data?.metrics ?? []).filter((metric, at, all) => all.findIndex((one) => one.name === metric.name) === at).filter((metric) => metric.name.includes(like) || metric.meaning.toLowerCase().includes(like.toLowerCase()));
  const folders = useMemo(() => {
    const groups = new Map<string, Metric[]>();
    if (!like) groups.set("main", MAIN.flatMap((name) => found.filter((metric) => metric.name === name)));
    for (const metric of found) {
      const folder = metric.name.split("/")[0]!;
      groups.set(folder, [...(groups.get(folder) ?? []), metric]);
    }
    return groups;
  }, [catalogue.data, like]);
  return (
    <Page title="Metrics" about="Drag over a chart to zoom in; double-click to zoom out.">
      <div class="row">
        <label class="field">
          <span class="visually-hidden">Find a metric</span>
          <input type="search" placeholder="Find a metric" value={like} onInput={(event) => setFilters({ like: (event.target as HTMLInputElement).value }, { replace: true })} />
        </label>
        <Segmented label="Horizontal axis" value={x} options={[["step", "by step"], ["time", "by time"], ["tokens", "by trained tokens"]]} onChange={(value) => setFilters({ x: value === "step" ? null : value }, { replace: true })} />
        <span class="muted small">{catalogue.data ? plural(found.length, "metric") : ""}</span>
      </div>
      <Loaded from={catalogue}>
        {() =>
          found.length === 0 ? (
            <Panel>
              <Empty title={like ? "No metric has this name." : "No metrics were recorded yet."} />
            </Panel>
          ) : (
            [...folders].map(([folder, metrics]) =>
              metrics.length ? (
                <details key={folder} open={folder === "main" || like !== ""} class="folder">
                  <summary>
                    <h2>{folder}</h2> <span class="muted">{metrics.length}</span>
                  </summary>
                  <div class="grid">
                    {metrics.map((metric) => (
                      <MetricChart key={metric.name} metric={metric} x={x} />
                    ))}
                  </div>
                </details>
              ) : null,
            )
          )
        }
      </Loaded>
    </Page>
  );
}

function MetricChart({ metric, x }: { metric: Metric; x: Axis }) {
  const [box, isVisible] = useIsVisible();
  // A chart is fetched when it is first seen, and refreshed only while it is seen.
  const tick = useTick(5000);
  const answer = useResource<SeriesAnswer>(isVisible ? apiPath("series", { metrics: metric.name, x, points: 800 }) : null, isVisible ? tick : 0);
  const points: Points = answer.data?.series[metric.name] ?? { x: [], y: [], low: null, high: null, count: 0 };
  const xFormat = x === "time" ? duration : number;
  return (
    <section class="panel span-4" ref={box} aria-label={metric.name} title={metric.meaning}>
      {answer.data ? (
        <Chart
          title={metric.name}
          x={points.x}
          xLabel={x}
          xFormat={xFormat}
          series={[{ label: metric.unit, values: points.y }]}
          band={points.low && points.high ? { of: 0, low: points.low, high: points.high } : undefined}
          height={150}
          sync={`metrics-${x}`}
        />
      ) : (
        <h3 class="chart-waiting">{metric.name}</h3>
      )}
    </section>
  );
}
