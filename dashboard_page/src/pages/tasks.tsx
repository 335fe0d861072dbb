// How well each task is solved, by tier, and which tasks were never solved.
import { type TaskRow, type Tasks, apiPath, useMore, useResource } from "../api";
import { count, fixed, number, percent, plural } from "../format";
import { useHeldTick, useTick } from "../live";
import { Badge, Empty, LoadMore, Loaded, Meter, NamedTask, Page, Panel, Stat } from "../parts/basic";
import { Chart } from "../parts/chart";
import { href, linkTo, setFilters, useRoute } from "../router";

const COLUMNS: [sort: string | null, label: string, isNumber: boolean][] = [["task", "Task", false], [null, "Tier", false], ["draws", "Draws", true], ["solved", "Solved", true], [null, "Last draw", true], ["reward", "Reward", true], [null, "Tokens", true], [null, "Dropped", true], ["last", "Last step", true]];

export function TasksPage() {
  const { query } = useRoute();
  const filters = { sort: query.get("sort"), like: query.get("like"), tier: query.get("tier"), never_solved: query.get("never_solved") };
  const path = apiPath("tasks", { ...filters, limit: 200 });
  const more = useMore<Tasks>(path);
  const first = useResource<Tasks>(path, useHeldTick(useTick(5000), more.isLoading || more.pages.length > 0));
  const pages = first.data ? [first.data, ...more.pages] : [];
  const cursor = pages.at(-1)?.next_cursor ?? null;
  const rows = pages.flatMap((page) => page.tasks);
  return (
    <Page title="Tasks" about="Results of all draws of a task. A task opens its groups.">
      <Loaded from={first}>
        {(data) => (
          <>
            <div class="stats">
              <Stat label="Tasks drawn" value={count(data.total)} />
              <Stat label="Never solved" value={count(data.never_solved)} unit={data.total ? percent(data.never_solved / data.total) : undefined} tone={data.never_solved ? "warn" : ""} link={linkTo("/tasks?never_solved=1")} />
              {data.tiers.map((tier) => (
                <Stat key={tier.name} label={`Tier ${tier.name}${tier.is_open ? "" : " (closed)"}`} value={percent(tier.rate)} unit="solved" note={`${percent(tier.graduated_share)} of ${plural(tier.tasks, "task")} graduated`} link={linkTo(`/tasks?tier=${encodeURIComponent(tier.name)}`)}>
                  <Meter share={tier.rate} label={`Solve rate of tier ${tier.name}`} tone="good" />
                </Stat>
              ))}
            </div>
            <Mastery data={data} />
            <div class="row">
              <input type="search" aria-label="Task id" placeholder="Task id" defaultValue={filters.like ?? ""} onChange={(event) => setFilters({ like: (event.target as HTMLInputElement).value.trim() })} />
              <button class="button" aria-pressed={Boolean(filters.never_solved)} onClick={() => setFilters({ never_solved: filters.never_solved ? null : 1 })}>
                Never solved
              </button>
              {filters.tier ? (
                <span class="chip">
                  <span>tier: {filters.tier}</span>
                  <button aria-label="Remove the filter tier" onClick={() => setFilters({ tier: null })}>
                    ×
                  </button>
                </span>
              ) : null}
            </div>
            <Panel flush>
              {rows.length ? <TaskTable rows={rows} sort={filters.sort ?? "task"} /> : <Empty title={data.total ? "No task matches." : "No task was drawn yet."} />}
              {cursor ? <LoadMore more={more} path={apiPath("tasks", { ...filters, limit: 200, cursor })} label="Load more" /> : null}
            </Panel>
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Mastery({ data }: { data: Tasks }) {
  const tiers = Object.entries(data.mastery);
  if (tiers.length === 0) return null;
  const x = [...new Set(tiers.flatMap(([, points]) => points.draws))].sort((a, b) => a - b);
  const column = (draws: number[], values: (number | null)[]) => {
    const known = new Map(draws.map((draw, at) => [draw, values[at] ?? null]));
    return x.map((draw) => known.get(draw) ?? null);
  };
  return (
    <div class="grid">
      <Panel span={6}>
        <Chart title="Success rate of the drawn tasks" x={x} xLabel="draws" range={[0, 1.02]} format={percent} sync="tasks" series={tiers.map(([name, points]) => ({ label: name, values: column(points.draws, points.rate) }))} height={170} />
      </Panel>
      <Panel span={6}>
        <Chart title="Graduated tasks" x={x} xLabel="draws" range={[0, 1.02]} format={percent} sync="tasks" series={tiers.map(([name, points]) => ({ label: name, values: column(points.draws, points.graduated), steps: true }))} height={170} />
      </Panel>
    </div>
  );
}

function TaskTable({ rows, sort }: { rows: TaskRow[]; sort: string }) {
  const hasTiers = rows.some((row) => row.tier);
  const columns = COLUMNS.filter(([, label]) => hasTiers || label !== "Tier");
  return (
    <div class="table-box" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {columns.map(([key, label, isNumber]) => (
              <th key={label} class={isNumber ? "num" : ""} aria-sort={key === sort ? (key === "task" ? "ascending" : "descending") : undefined}>
                {key ? (
                  <button onClick={() => setFilters({ sort: key === "task" ? null : key }, { replace: true })}>
                    {label}
                    {key === sort ? (key === "task" ? " ↑" : " ↓") : ""}
                  </button>
                ) : (
                  label
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.task_id}>
              <NamedTask text={row.task_text} id={row.task_id} link={href("rollouts", [], { task: row.task_id })} />
              {hasTiers ? <td>{row.tier}</td> : null}
              <td class="num">{count(row.draws)}</td>
              <td class="num">
                <span class="rate">
                  <Meter share={row.solved_rate} label="Solve rate" tone="good" /> {percent(row.solved_rate)}
                </span>
              </td>
              <td class="num">{percent(row.last_solved_rate)}</td>
              <td class="num">{fixed(row.reward_mean, 3)}</td>
              <td class="num">{number(row.tokens, 1)}</td>
              <td class="num">{row.dropped ? <Badge tone="warn">{count(row.dropped)}</Badge> : ""}</td>
              <td class="num">{row.last_step ?? ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
