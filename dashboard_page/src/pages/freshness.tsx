// How old the trained data is, and what keeping it fresh costs.
import { type Freshness, apiPath, useResource } from "../api";
import { count, duration, number, percent } from "../format";
import { useTick } from "../live";
import { Empty, Loaded, Page, Panel, Stat } from "../parts/basic";
import { Chart } from "../parts/chart";
import { HeatMap } from "../parts/heatmap";
import { go, href } from "../router";

const CHARTS: [metric: string, title: string, label: string, format: typeof number][] = [
  ["async/staleness_capacity", "Groups that may start now", "capacity", number],
  ["async/in_flight", "Groups in flight", "in flight", number],
  ["ledger/queued_groups", "Groups queued for training", "queued", number],
  ["perf/sample_wait_time", "The trainer waits for a batch", "seconds", duration],
];

export function FreshnessPage() {
  const answer = useResource<Freshness>(apiPath("freshness"), useTick(4000));
  return (
    <Page title="Freshness" about="Lag is the number of policy versions between sampling a token and training it. The gate keeps it at or below the bound.">
      <Loaded from={answer}>
        {(data) => (
          <>
            <div class="stats">
              <Stat label="Staleness bound" value={number(data.bound)} unit="versions" note={data.policy === "drop" ? "groups that are too old are dropped" : data.policy === "wait" ? "groups are admitted so that none becomes too old" : undefined} />
              <Stat label="Trainer waited" value={duration(data.cost.wait_s)} unit={percent(data.cost.wait_share)} note={`trained for ${duration(data.cost.train_s)}`} />
              <Stat label="Dropped as stale" value={count(data.cost.stale_dropped)} unit={data.cost.stale_share === null ? undefined : percent(data.cost.stale_share, 1)} note={`${count(data.cost.stale_tokens)} tokens generated for nothing`} link={href("rollouts", [], { state: "dropped", drop: "stale" })} />
              <Stat label="In flight at most" value={number(data.max_in_flight)} unit="groups" note={`${number(data.groups_per_step)} groups per step`} />
              <Stat label="May start now" value={number(data.capacity)} unit="groups" />
            </div>
            {data.cost.sentence ? <p>{data.cost.sentence}</p> : null}
            <Panel title="Trained groups by step and lag" more="darker: more groups; red line: the bound; click opens the groups">
              {data.heat.steps.length ? (
                <HeatMap
                  steps={data.heat.steps}
                  stepSize={data.heat.step_size}
                  lags={data.heat.lags}
                  counts={data.heat.counts}
                  bound={data.bound}
                  onPick={(step, lag) => go(href("rollouts", [], { step: data.heat.step_size > 1 ? `${step}-${step + data.heat.step_size - 1}` : step, lag: `${lag}:${lag}` }))}
                />
              ) : (
                <Empty title="Nothing was trained yet." />
              )}
            </Panel>
            <div class="grid">
              {CHARTS.map(([metric, title, label, format]) => {
                const points = data.series[metric];
                if (!points?.x.length) return null;
                return (
                  <Panel span={4} key={metric}>
                    <Chart title={title} x={points.x} series={[{ label, values: points.y, fill: true }]} height={150} sync="freshness" range={[0, null]} format={format} />
                  </Panel>
                );
              })}
            </div>
          </>
        )}
      </Loaded>
    </Page>
  );
}
